//! Attention whose rows, keys and pages lie far.

use super::{Wide, bits, get, has_room, only, put, small};
use crate::{device, numbers};
use rlhf_hpc::device::cpu::attention::{AttentionShape, PAGE, PagedSequence};
use rlhf_hpc::device::cuda::attention::{self, SpanTable};
use rlhf_hpc::device::cuda::kv_cache::{Decode, KvPages, SequenceTable, copy_pages, kv_append};
use rlhf_hpc::device::cuda::{Memory, attention_backward, paged_attention};
use rlhf_hpc::dtype::DType::{self, Bf16, F32};
use rlhf_hpc::ops::attention::Span;

/// Values of a row of q, and of k.
const WIDE: usize = 16 * 128;
const NARROW: usize = 2 * 128;
const ROWS: usize = (1 << 32) / WIDE + 100;
const KEYS: usize = (1 << 32) / NARROW + 300;

fn shape(window: Option<usize>) -> AttentionShape {
    AttentionShape { heads: 16, kv_heads: 2, head_dim: 128, window, scale: 0.1 }
}

/// Rows of tensors, as attention has them: q, d_o, lse, delta, o, dq and k, v, dk, dv.
const OF_ROWS: [Wide; 6] = [(Bf16, WIDE), (Bf16, WIDE), (F32, 16), (F32, 16), (Bf16, WIDE), (Bf16, WIDE)];
const OF_KEYS: [Wide; 4] = [(Bf16, NARROW); 4];

/// Tensors of `rows` and `keys` rows whose spans, (first row, rows, first key, keys) each, have values.
fn tensors(rows: usize, keys: usize, spans: &[(usize, usize, usize, usize)]) -> Vec<Memory> {
    let of = |i: usize, &(dtype, width): &Wide, all: usize, part: &dyn Fn(usize) -> (usize, usize)| {
        let mut memory = Memory::scratch(all * width * dtype.bytes());
        for s in 0..spans.len() {
            let (first, n) = part(s);
            let values = numbers((100 * i + s) as u32, n * width);
            put(&mut memory, dtype, first * width, &bits(dtype, &values));
        }
        memory
    };
    let q = OF_ROWS.iter().enumerate().map(|(i, wide)| of(i, wide, rows, &|s| (spans[s].0, spans[s].1)));
    let k = OF_KEYS.iter().enumerate().map(|(i, wide)| of(10 + i, wide, keys, &|s| (spans[s].2, spans[s].3)));
    q.chain(k).collect()
}

fn attend(x: &mut [Memory], spans: &[(usize, usize, usize, usize)], window: Option<usize>) {
    let span = |&(row, tokens, key_row, keys): &(usize, usize, usize, usize)| Span {
        row,
        tokens,
        past: keys - tokens,
        key_row,
        keys,
    };
    let table = SpanTable::new(&spans.iter().map(span).collect::<Vec<_>>(), &shape(window));
    let [q, d_o, lse, delta, o, dq, k, v, dk, dv] = x else { unreachable!("ten tensors") };
    let [q, k, v, d_o] = [q, k, v, d_o].map(|x| x.view(Bf16));
    attention::forward(q, k, v, &table, false, o.view_mut(Bf16), lse.view_mut(F32));
    // A run of keys is a matter of forward alone.
    if window.is_some() {
        return;
    }
    // Eight heads of a row are a block.
    let blocks: Vec<usize> = spans.iter().flat_map(|span| 2 * span.0..2 * (span.0 + span.1)).collect();
    only(&blocks, || attention_backward::delta(o.view(Bf16), d_o, &shape(window), delta.view_mut(F32)));
    let statistics = [lse.view(F32), delta.view(F32), d_o];
    let to = [dk.view_mut(Bf16), dv.view_mut(Bf16)];
    // Blocks take their work by number, and begin with the keys that are seen; the others, of which there are far more, would all be
    // set to 0.
    let tiles: usize = spans.iter().map(|span| shape(window).kv_heads * span.3.div_ceil(128)).sum();
    let blocks: Vec<usize> = (0..tiles).collect();
    only(&blocks, || {
        attention_backward::backward([q, k, v], statistics, &table, [false; 2], dq.view_mut(Bf16), to);
    });
}

/// Rows and keys on both sides of each bound; with a window, behind keys of two runs.
#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn far_rows_attend_to_far_keys_and_walk_back() {
    let (_gpu, _one) = device();
    if !has_room((2 * 4 * WIDE + 8 * 16) * ROWS + 2 * 4 * NARROW * KEYS + 4 * 16 * 136 * ROWS) {
        return;
    }
    for (window, tokens, keys) in [(None, 40, 140), (Some(64), 12, 4102)] {
        let row = |bound: usize| bound / WIDE - tokens / 2;
        let key = |bound: usize| bound / NARROW - 70;
        let keys_all = KEYS + keys;
        let far = [
            (0, tokens, 0, keys),
            (row(1 << 31), tokens, key(1 << 31), keys),
            (row(1 << 32), tokens, key(1 << 32), keys),
            (ROWS - tokens, tokens, keys_all - keys, keys),
        ];
        // The last keys lie behind those before.
        let far = if keys > 300 { vec![far[0], far[1], far[3]] } else { far.to_vec() };
        let near: Vec<_> = (0..far.len()).map(|i| (i * tokens, tokens, i * keys, keys)).collect();
        let mut far_tensors = tensors(ROWS, keys_all, &far);
        let mut near_tensors = tensors(near.len() * tokens, near.len() * keys, &near);
        attend(&mut far_tensors, &far, window);
        attend(&mut near_tensors, &near, window);
        for (i, &(dtype, width)) in OF_ROWS.iter().chain(&OF_KEYS).enumerate() {
            for (far, near) in far.iter().zip(&near) {
                let (far, near, n) = if i < 6 { (far.0, near.0, tokens) } else { (far.2, near.2, keys) };
                let [far, near] = [(&far_tensors, far), (&near_tensors, near)]
                    .map(|(tensors, first)| get(tensors[i].view(dtype), first * width, n * width));
                assert!(far == near, "window {window:?}, tensor {i}");
            }
        }
    }
}

/// Pages of 4096 values, on both sides of each bound.
const PAGES: usize = (1 << 20) + 8;

fn paged_shape() -> AttentionShape {
    AttentionShape { heads: 8, kv_heads: 2, head_dim: 64, window: None, scale: 0.2 }
}

/// What decoding, whole and split, and prefill give over the cached tokens of two sequences with these pages.
fn cached(pages: usize, tables: [&[u32]; 2], pairs: &[(u32, u32)]) -> Vec<Vec<u16>> {
    let shape = paged_shape();
    let (of_q, of_k) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let lengths = tables.map(|table| table.len() * PAGE - 5);
    let mut cache = KvPages::new(pages, &shape);
    let all = [0, 1].map(|i| PagedSequence { past: 0, tokens: lengths[i], blocks: tables[i] });
    let tokens: usize = lengths.iter().sum();
    let (k, v) = (small(1, tokens * of_k), small(2, tokens * of_k));
    kv_append(&mut cache, k.view(Bf16), v.view(Bf16), &SequenceTable::new(&all, &shape), &shape);
    copy_pages(&mut cache, pairs);
    let attended = |how, last: [usize; 2]| {
        let new = [0, 1].map(|i| PagedSequence { past: lengths[i] - last[i], tokens: last[i], blocks: tables[i] });
        let table = SequenceTable::with(&new, &shape, how);
        let rows: usize = last.iter().sum();
        let (q, mut o) = (small(3, rows * of_q), Memory::scratch(2 * rows * of_q));
        paged_attention::forward(q.view(DType::Bf16), &cache, &table, &shape, o.view_mut(Bf16));
        o.read::<u16>(rows * of_q)
    };
    let copies = pairs.iter().map(|(_, to)| {
        let (at, mut page) = (*to as usize * cache.page_len(), vec![0u16; cache.page_len()]);
        cache.values().part(at..at + page.len()).read_bits(&mut page);
        page
    });
    let mut found =
        vec![attended(Decode::Whole, [1, 1]), attended(Decode::Split, [1, 1]), attended(Decode::Whole, [20, 9])];
    found.extend(copies);
    found
}

/// The first sequence sees keys of two runs.
#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn far_pages_are_written_copied_and_attended_to() {
    let (_gpu, _one) = device();
    if !has_room(4 * 4096 * PAGES) {
        return;
    }
    let around = |bound: u32, n: u32| bound - n / 2..bound + n / 2;
    let far: Vec<u32> =
        around(1 << 18, 40).chain(0..10).chain(around(1 << 19, 60)).chain(around(1 << 20, 14)).chain(70..90).collect();
    let pairs = [(1u32 << 20, 3 << 17), ((1 << 19) - 1, PAGES as u32 - 1)];
    let place = |page: u32| far.iter().position(|far| *far == page).expect("it is there") as u32;
    let near: Vec<u32> = (0..far.len() as u32).collect();
    let near_pairs = [(place(pairs[0].0), near.len() as u32), (place(pairs[1].0), near.len() as u32 + 1)];
    assert!(far.iter().all(|page| *page < PAGES as u32 - 1) && far.len() > 136);
    let of_far = cached(PAGES, [&far[..131], &far[131..]], &pairs);
    let of_near = cached(near.len() + 2, [&near[..131], &near[131..]], &near_pairs);
    assert!(of_far == of_near, "bits differ");
}
