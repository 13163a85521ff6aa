//! Attention over the paged cache compared with training's: a token has the same bits on every path.

pub mod batch;
mod codes;
mod runs;

use crate::{device, in_every_order, numbers, refused};
use batch::{Batch, shape};
use rlhf_hpc::device::Device;
use rlhf_hpc::device::cpu::attention::PagedSequence;
use rlhf_hpc::device::cuda::kv_cache::{KvPages, SequenceTable, copy_page};
use rlhf_hpc::device::cuda::{Memory, paged_attention};
use rlhf_hpc::dtype::DType;
use rlhf_hpc::ops::attention::{self, AttentionShape, KvLayer};
use rlhf_hpc::ops::rope::{self, RopeTable, Rotation};
use rlhf_hpc::tensor::{Indices, Tensor};

/// Head dims, with blocks of keys of 64 and of 32.
const DIMS: [usize; 6] = [32, 64, 80, 96, 128, 256];

#[test]
fn prefill_and_decode_have_the_bits_of_training() {
    let _one = device();
    let lengths = [1, 2, 31, 32, 33, 64, 65, 129, 257];
    let last = lengths.map(|len| (len - 1, 1));
    let groups = [(1, 1, None), (4, 1, None), (14, 2, Some(70)), (16, 1, Some(1)), (8, 1, Some(33))];
    let more = [(2, 2, None), (6, 2, Some(40)), (7, 1, None)];
    for (i, head_dim) in DIMS.into_iter().enumerate() {
        for (heads, kv_heads, window) in [groups[i % 5], groups[(i + 2) % 5]] {
            Batch::new(&shape(heads, kv_heads, head_dim, window), &lengths).assert_training_bits(&last);
        }
        let (heads, kv_heads, window) = more[i % 3];
        Batch::new(&shape(heads, kv_heads, head_dim, window), &[70, 1, 20]).assert_training_bits(&[
            (0, 70),
            (0, 1),
            (0, 20),
        ]);
    }
    for window in [None, Some(50)] {
        // A long part, a part that ends a page, nothing new, and a few tokens that one decoding tile holds.
        let batch = Batch::new(&shape(4, 2, 64, window), &[200, 100, 40, 90]);
        batch.assert_training_bits(&[(94, 106), (33, 63), (40, 0), (83, 7)]);
    }
}

#[test]
fn a_token_has_the_same_bits_for_any_chunk_size() {
    let _one = device();
    for (head_dim, heads, kv_heads, window) in [
        (32, 5, 1, Some(80)),
        (64, 4, 1, None),
        (64, 3, 3, Some(70)),
        (80, 2, 1, None),
        (96, 7, 1, Some(90)),
        (128, 4, 2, None),
        (128, 16, 1, Some(65)),
        (256, 2, 1, None),
    ] {
        let shape = shape(heads, kv_heads, head_dim, window);
        Batch::new(&shape, &[150, 1, 67]).assert_training_bits(&[(0, 150), (0, 1), (0, 67)]);
        let len = 135;
        let batch = Batch::new(&shape, &[len]);
        let (want, width) = (batch.trained(&[(0, len)]), heads * head_dim);
        let holds = |at: usize, tokens: usize| {
            let got = batch.run(false, &[(at, tokens)]);
            assert!(got == want[at * width..(at + tokens) * width], "{head_dim}: tokens {at} + {tokens}");
        };
        for step in [21, 64, 97] {
            (0..len).step_by(step).for_each(|at| holds(at, step.min(len - at)));
        }
        for at in [0, 31, 32, 63, 64, 127, 128, 134] {
            holds(at, 1);
        }
    }
}

#[test]
fn split_decoding_has_the_bits_of_training() {
    let _one = device();
    for (head_dim, heads, kv_heads, window) in [
        (32, 4, 2, None),
        (64, 4, 1, None),
        (80, 7, 1, Some(70)),
        (96, 2, 2, None),
        (128, 10, 2, Some(300)),
        (128, 16, 1, None),
        (256, 3, 1, Some(1)),
    ] {
        let batch = Batch::new(&shape(heads, kv_heads, head_dim, window), &[600, 1, 64, 257, 130, 20]);
        // Two tokens of the last one, which use a prefill tile if groups are large.
        batch.assert_training_bits(&[(599, 1), (0, 1), (63, 1), (256, 1), (129, 1), (18, 2)]);
        batch.assert_training_bits(&[(0, 0), (0, 0), (0, 0), (256, 1), (0, 0), (0, 0)]);
    }
}

#[test]
fn capped_scores_have_the_bits_of_training_in_prefill_and_decode() {
    let _one = device();
    for (i, head_dim) in DIMS.into_iter().enumerate() {
        let window = [None, Some(70)][i % 2];
        let shape = AttentionShape { softcap: Some(1.5), ..shape(4, 2, head_dim, window) };
        let batch = Batch::new(&shape, &[300, 1, 64, 70, 20]);
        batch.assert_training_bits(&[(299, 1), (0, 1), (60, 4), (0, 70), (17, 3)]);
    }
}

#[test]
fn no_order_of_threads_changes_a_bit() {
    in_every_order(|| {
        for head_dim in DIMS {
            // A prefill tile with warps without rows, and decode tiles.
            Batch::new(&shape(4, 2, head_dim, Some(80)), &[70, 20, 140]).assert_training_bits(&[
                (52, 18),
                (19, 1),
                (137, 3),
            ]);
        }
    });
}

/// Keys and values of all pages, [g][PAGE][e] each.
fn pages(cache: &KvPages) -> (Vec<f32>, Vec<f32>) {
    (cache.keys().to_f32(), cache.values().to_f32())
}

#[test]
fn rows_are_appended_only_where_the_page_table_points_and_whole_pages_are_copied() {
    let shape = shape(6, 3, 80, None);
    let width = 240;
    in_every_order(|| {
        let batch = Batch::new(&shape, &[37, 70]);
        let mut cache = KvPages::new(7, &shape);
        let sequences = [
            PagedSequence { past: 30, tokens: 7, blocks: &[6, 1] },
            PagedSequence { past: 64, tokens: 2, blocks: &[0, 2, 5] },
        ];
        batch.append_to(&mut cache, &sequences);
        let (keys, values) = pages(&cache);
        let mut want = (vec![0.0; keys.len()], vec![0.0; values.len()]);
        for (i, sequence) in sequences.iter().enumerate() {
            for at in sequence.past..sequence.past + sequence.tokens {
                for x in 0..width {
                    let page = sequence.blocks[at / 32] as usize;
                    let to = ((page * 3 + x / 80) * 32 + at % 32) * 80 + x % 80;
                    want.0[to] = batch.case.k[(batch.ends[i] + at) * width + x];
                    want.1[to] = batch.case.v[(batch.ends[i] + at) * width + x];
                }
            }
        }
        assert!(keys == want.0 && values == want.1);
        copy_page(&mut cache, 1, 4);
        copy_page(&mut cache, 5, 3);
        let len = cache.page_len();
        for x in [&mut want.0, &mut want.1] {
            x.copy_within(len..2 * len, 4 * len);
            x.copy_within(5 * len..6 * len, 3 * len);
        }
        assert!(pages(&cache) == want, "pages are copied whole");
    });
}

#[test]
fn rope_fused_with_the_cache_write_equals_rope_in_place() {
    in_every_order(|| {
        for (heads, kv_heads, e) in [(1, 1, 32), (5, 1, 80), (6, 3, 128)] {
            let (shape, rows) = (shape(heads, kv_heads, e, None), 9);
            let frequencies: Vec<f32> = (0..e / 2).map(|i| 10f32.powf(-(i as f32) / 4.0)).collect();
            let rotation = Rotation {
                axes: Vec::new(),
                head_dim: e,
                inverse_frequencies: frequencies,
                attention_factor: 1.0,
                query_scale: (heads > 1).then_some((0.5, 12.0)),
            };
            let (rope, at) = (RopeTable::new(rotation, 64), (20..29).collect::<Vec<u32>>());
            let at = Indices::on(Device::Cuda, &at);
            let of = |seed, heads: usize| {
                Tensor::from_slice(rows, heads * e, &numbers(seed, rows * heads * e)).on(Device::Cuda, DType::Bf16)
            };
            let sequences = [PagedSequence { past: 20, tokens: 9, blocks: &[2] }];
            let caches = [true, false].map(|on_the_way| {
                let (mut q, mut k, v) = (of(1, heads), of(2, kv_heads), of(3, kv_heads));
                let mut cache = KvLayer::new(Device::Cuda, DType::Bf16, 3, &shape);
                let none = RopeTable::whole(&vec![0.0; e / 2], 1.0, 64);
                if !on_the_way {
                    rope::forward(&mut q, &mut k, &at, &rope);
                }
                let by = if on_the_way { &rope } else { &none };
                attention::kv_append(&mut cache, [&mut q, &mut k], Some(&v), (&at, by), &sequences[..].into(), &shape);
                let KvLayer::Cuda(cache) = cache else { panic!("a cache of the GPU") };
                (q.to_host(), pages(&cache))
            });
            assert_eq!(caches[0], caches[1], "{heads} heads and {kv_heads} of {e}");
        }
    });
}

#[test]
fn inputs_without_a_kernel_are_rejected_with_a_message() {
    let _one = device();
    let odd = shape(4, 2, 72, None);
    let mut cache = KvPages::new(4, &odd);
    let table = SequenceTable::new(&[PagedSequence { past: 60, tokens: 5, blocks: &[0, 1, 3] }], &odd);
    let (q, mut o) = (Memory::zeros(5 * 288 * 2), Memory::zeros(5 * 288 * 2));
    refused("head dim 72 is not one of [32", || {
        paged_attention::forward(q.view(DType::Bf16), &cache, &table, o.view_mut(DType::Bf16));
    });
    refused("cannot copy page 1 to page 1 in a cache of 4 pages", || copy_page(&mut cache, 1, 1));
    refused("cannot copy page 0 to page 4 in a cache of 4 pages", || copy_page(&mut cache, 0, 4));
}
