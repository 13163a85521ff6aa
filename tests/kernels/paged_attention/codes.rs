//! Keys and values in 8 bits: the GPU rounds them as the CPU does, and attention over codes has the bits of attention over
//! rounded bf16.

use super::DIMS;
use super::batch::{Batch, append, shape};
use crate::{bf16, device, in_every_order, numbers, refused, rounded};
use rlhf_hpc::device::Device;
use rlhf_hpc::device::cpu::attention::{AttentionShape, PAGE, PagedSequence};
use rlhf_hpc::device::cpu::kv_codes;
use rlhf_hpc::device::cuda::kv_cache::{KvPages, SequenceTable, copy_page};
use rlhf_hpc::device::cuda::{Memory, paged_attention};
use rlhf_hpc::dtype::{DType, KvDtype};
use rlhf_hpc::ops::attention::{KvLayer, round_as_cached};
use rlhf_hpc::tensor::Tensor;

/// Keys of a segment in the kernels.
const RUN: usize = 4096;

fn codes(heads: usize, kv_heads: usize, head_dim: usize, window: Option<usize>) -> AttentionShape {
    AttentionShape { kv: KvDtype::Fp8, ..shape(heads, kv_heads, head_dim, window) }
}

/// Heads of `e` values of all sizes: with ties, values that become 0, zeros alone, and the least and largest powers.
fn heads(e: usize) -> Vec<f32> {
    let sizes = [1.0, 448.0, 449.0, 447.9, 0.9, 3.7e-5, 6e-36, 1e-38, 1e30, 3e38, 0.0];
    let head = |(i, size): (usize, &f32)| {
        let values = numbers(i as u32, e).into_iter().enumerate();
        let mut head: Vec<f32> = values.map(|(j, x)| x * size * 2f32.powi(-((j % 24) as i32))).collect();
        head[i % e] = *size;
        // Halves between neighbours: 8.5 / 8 and 9.5 / 8 of a power of two, and of the smallest codes.
        for (j, tie) in [1.0625, -1.1875, 2.5 / 512.0, -1.5 / 512.0].into_iter().enumerate() {
            head[(i + 1 + j) % e] = if *size == 448.0 { tie } else { head[(i + 1 + j) % e] };
        }
        head
    };
    rounded(&sizes.iter().enumerate().flat_map(head).collect::<Vec<_>>())
}

/// Heads with values that are no numbers.
fn wrong(e: usize) -> Vec<f32> {
    let of = |wrong| std::iter::once(wrong).chain(numbers(5, e - 1));
    [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().flat_map(of).collect()
}

#[test]
fn training_rounds_keys_as_the_cpu_does() {
    in_every_order(|| {
        for e in [8, 16, 48, 112].into_iter().chain(DIMS) {
            let (numbers, wrong) = (heads(e), wrong(e));
            let all = [&numbers[..], &wrong].concat();
            let mut x = Tensor::from_slice(all.len() / e, e, &all).on(Device::Cuda, DType::Bf16);
            round_as_cached(&mut x, DType::Bf16, &codes(1, 1, e, None));
            let (got, mut want) = (x.to_host(), numbers.clone());
            kv_codes::round(&mut want, e);
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&got[..want.len()]), bits(&want), "{e}");
            assert!(got[want.len()..].iter().all(|x| !x.is_finite()), "{e}: {:?}", &got[want.len()..]);
        }
    });
}

/// Bytes of all pages.
fn bytes(cache: &KvPages) -> [Vec<u8>; 2] {
    [cache.keys(), cache.values()].map(|pages| {
        let mut bytes = vec![0; 2 * pages.len()];
        pages.read_bits(&mut bytes);
        bytes
    })
}

#[test]
fn pages_hold_the_codes_and_powers_of_the_cpu_and_are_copied_whole() {
    in_every_order(|| {
        for e in DIMS {
            let (kv_heads, shape) = (3, codes(6, 3, e, None));
            let mut cache = KvPages::new(7, &shape);
            let sequences = [
                PagedSequence { past: 30, tokens: 7, blocks: &[6, 1] },
                PagedSequence { past: 64, tokens: 2, blocks: &[0, 2, 5] },
            ];
            let all: Vec<f32> = heads(e).into_iter().cycle().take(18 * kv_heads * e).collect();
            let (k, v) = all.split_at(9 * kv_heads * e);
            let [on_k, on_v] = [k, v].map(|x| Memory::from_values(&bf16(x)));
            append(&mut cache, &on_k, &on_v, &sequences, &shape);
            let page_len = kv_heads * PAGE * (e + 1);
            let mut want = [k, v].map(|x| {
                let (mut pages, mut rows) = (vec![0u8; 7 * page_len], x.chunks_exact(kv_heads * e));
                for PagedSequence { past, tokens, blocks } in &sequences {
                    for at in *past..past + tokens {
                        for (g, head) in rows.next().expect("a row").chunks_exact(e).enumerate() {
                            let start = blocks[at / PAGE] as usize * page_len + g * PAGE * (e + 1);
                            let (power, token) = (kv_codes::power(head), at % PAGE);
                            let inverse = kv_codes::inverse(power);
                            let codes = head.iter().map(|x| kv_codes::code(*x, inverse));
                            pages.splice(start + token * e..start + (token + 1) * e, codes);
                            pages[start + PAGE * e + token] = power;
                        }
                    }
                }
                pages
            });
            assert!(bytes(&cache) == want, "{e}");
            assert_eq!(cache.bytes(), 7 * PAGE * KvLayer::token_bytes(Device::Cuda, DType::Bf16, &shape));
            copy_page(&mut cache, 1, 4);
            for pages in &mut want {
                pages.copy_within(page_len..2 * page_len, 4 * page_len);
            }
            assert!(bytes(&cache) == want, "{e}: pages are copied whole");
        }
    });
}

#[test]
fn attention_over_codes_has_the_bits_of_attention_over_rounded_keys() {
    let _one = device();
    let lengths = [1, 2, 31, 32, 33, 64, 65, 129, 257];
    let last = lengths.map(|len| (len - 1, 1));
    for (i, head_dim) in DIMS.into_iter().enumerate() {
        let (heads, kv_heads, window) = [(1, 1, None), (4, 1, Some(70)), (14, 2, None), (16, 1, Some(33))][i % 4];
        let shape = codes(heads, kv_heads, head_dim, window);
        // Decoding, whole and split, and prompts.
        Batch::new(&shape, &lengths).assert_training_bits(&last);
        Batch::new(&shape, &[70, 1, 20]).assert_training_bits(&[(0, 70), (0, 1), (0, 20)]);
        // Parts of prompts, nothing new, a few tokens that one decoding tile holds, and capped scores.
        let capped = AttentionShape { softcap: Some(1.5), ..codes(4, 2, head_dim, [None, Some(50)][i % 2]) };
        Batch::new(&capped, &[200, 100, 40, 90]).assert_training_bits(&[(94, 106), (33, 63), (40, 0), (83, 7)]);
        Batch::new(&capped, &[600, 1, 64]).assert_training_bits(&[(599, 1), (0, 1), (60, 4)]);
    }
    // Rows with several segments of keys.
    for (head_dim, len) in [(32, RUN + 9), (128, RUN + 65), (256, RUN + 1)] {
        let batch = Batch::new(&codes(2, 1, head_dim, None), &[len]);
        batch.assert_training_bits(&[(len - 12, 12)]);
        batch.assert_training_bits(&[(len - 1, 1)]);
    }
}

#[test]
fn no_order_of_threads_changes_a_bit_of_attention_over_codes() {
    in_every_order(|| {
        for head_dim in DIMS {
            let batch = Batch::new(&codes(4, 2, head_dim, Some(80)), &[70, 20, 140]);
            batch.assert_training_bits(&[(52, 18), (19, 1), (137, 3)]);
        }
    });
}

#[test]
fn kernels_of_another_dtype_reject_a_cache() {
    let _one = device();
    let sequences = [PagedSequence { past: 0, tokens: 5, blocks: &[0] }];
    let (rows, [model, fp8]) = (Memory::zeros(5 * 256 * 2), [shape(4, 2, 64, None), codes(4, 2, 64, None)]);
    let (mut bf16_pages, mut code_pages, mut o) =
        (KvPages::new(2, &model), KvPages::new(2, &fp8), Memory::zeros(5 * 256 * 2));
    refused("the cache is in bf16", || append(&mut bf16_pages, &rows, &rows, &sequences, &fp8));
    refused("the cache is in 8 bits", || append(&mut code_pages, &rows, &rows, &sequences, &model));
    let table = SequenceTable::new(&sequences, &fp8);
    refused("the cache is in another dtype", || {
        paged_attention::forward(rows.view(DType::Bf16), &bf16_pages, &table, o.view_mut(DType::Bf16));
    });
}
