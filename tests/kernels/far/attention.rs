//! Attention with far rows, keys and pages.

use super::{Pair, Wide, has_room, only, small};
use crate::device;
use crate::paged_attention::batch::append;
use rlhf_hpc::device::cpu::attention::{AttentionShape, PAGE, PagedSequence};
use rlhf_hpc::device::cuda::attention::{self, SpanTable};
use rlhf_hpc::device::cuda::kv_cache::{KvPages, SequenceTable, copy_page};
use rlhf_hpc::device::cuda::{Memory, attention_backward, paged_attention};
use rlhf_hpc::dtype::DType::{self, Bf16, F32};
use rlhf_hpc::dtype::KvDtype;
use rlhf_hpc::ops::attention::Span;

/// Values of a row of q, and of k.
const WIDE: usize = 16 * 128;
const NARROW: usize = 2 * 128;

fn shape(window: Option<usize>) -> AttentionShape {
    AttentionShape {
        heads: 16,
        kv_heads: 2,
        head_dim: 128,
        window,
        scale: 0.1,
        softcap: None,
        values_are_keys: false,
        kv: KvDtype::Model,
    }
}

/// Rows of tensors, as attention has them: q, d_o, lse, delta, o, dq and k, v, dk, dv.
const OF_ROWS: [Wide; 6] = [(Bf16, WIDE), (Bf16, WIDE), (F32, 16), (F32, 16), (Bf16, WIDE), (Bf16, WIDE)];
const OF_KEYS: [Wide; 4] = [(Bf16, NARROW); 4];

fn attend(of_rows: &mut [Memory; 6], of_keys: &mut [Memory; 4], spans: &[Span], window: Option<usize>) {
    let table = SpanTable::new(spans, &shape(window));
    let [q, d_o, lse, delta, o, dq] = of_rows;
    let [k, v, dk, dv] = of_keys;
    let [q, k, v, d_o] = [q, k, v, d_o].map(|x| x.view(Bf16));
    attention::forward(q, k, v, &table, false, o.view_mut(Bf16), lse.view_mut(F32));
    // Only forward has key segments.
    if window.is_some() {
        return;
    }
    // Eight heads of a row are a block.
    let blocks: Vec<usize> = spans.iter().flat_map(|span| 2 * span.row..2 * (span.row + span.tokens)).collect();
    only(&blocks, || attention_backward::delta(o.view(Bf16), d_o, &shape(window), delta.view_mut(F32)));
    let statistics = [lse.view(F32), delta.view(F32), d_o];
    let to = [dk.view_mut(Bf16), dv.view_mut(Bf16)];
    // Blocks with visible keys come first. The gradients of all other keys would be set to 0, which takes much longer.
    let tiles: usize = spans.iter().map(|span| shape(window).kv_heads * span.keys.div_ceil(128)).sum();
    let blocks: Vec<usize> = (0..tiles).collect();
    only(&blocks, || {
        attention_backward::backward([q, k, v], statistics, &table, [false; 2], dq.view_mut(Bf16), to);
    });
}

/// Rows and keys around each bound; with a window, after keys of two runs.
#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn attention_over_far_rows_and_keys_is_right_forward_and_backward() {
    let (_gpu, _one) = device();
    for (window, tokens, keys) in [(None, 40, 140), (Some(64), 12, 4102)] {
        let all = |width: usize, each: usize| ((1 << 32) / width).next_multiple_of(each) + each;
        let Some(mut rows) = Pair::new(OF_ROWS, all(WIDE, tokens), tokens) else { return };
        let Some(mut seen) = Pair::new(OF_KEYS, all(NARROW, keys), keys) else { return };
        let span = |row, key_row| Span { row, tokens, past: keys - tokens, key_row, keys };
        let groups = rows.groups.iter().zip(&seen.groups);
        let far: Vec<Span> = groups.map(|((row, _), (key, _))| span(*row, *key)).collect();
        let near: Vec<Span> = (0..far.len()).map(|i| span(i * tokens, i * keys)).collect();
        assert_eq!([rows.groups.len(), seen.groups.len()], [5; 2], "the ends, and one around each bound");
        attend(&mut rows.far, &mut seen.far, &far, window);
        attend(&mut rows.near, &mut seen.near, &near, window);
        rows.agree(&format!("rows, window {window:?}"));
        seen.agree(&format!("keys, window {window:?}"));
    }
}

/// Pages of 4096 values, on both sides of each bound.
const PAGES: usize = (1 << 20) + 8;

fn paged_shape(kv: KvDtype) -> AttentionShape {
    AttentionShape {
        heads: 8,
        kv_heads: 2,
        head_dim: 64,
        window: None,
        scale: 0.2,
        softcap: None,
        values_are_keys: false,
        kv,
    }
}

/// The results of decoding, whole and split, and of prefill over the cached tokens of two sequences with these pages.
fn cached(kv: KvDtype, pages: usize, tables: [&[u32]; 2], pairs: &[(u32, u32)]) -> Vec<Vec<u16>> {
    let shape = paged_shape(kv);
    let (of_q, of_k) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let lengths = tables.map(|table| table.len() * PAGE - 5);
    let mut cache = KvPages::new(pages, &shape);
    let all = [0, 1].map(|i| PagedSequence { past: 0, tokens: lengths[i], blocks: tables[i] });
    let tokens: usize = lengths.iter().sum();
    let (k, v) = (small(1, tokens * of_k), small(2, tokens * of_k));
    append(&mut cache, &k, &v, &all, &shape);
    for (from, to) in pairs {
        copy_page(&mut cache, *from, *to);
    }
    let attended = |how, last: [usize; 2]| {
        let new = [0, 1].map(|i| PagedSequence { past: lengths[i] - last[i], tokens: last[i], blocks: tables[i] });
        let table = SequenceTable::with(&new, &shape, how);
        let rows: usize = last.iter().sum();
        let (q, mut o) = (small(3, rows * of_q), Memory::scratch(2 * rows * of_q));
        paged_attention::forward(q.view(DType::Bf16), &cache, &table, o.view_mut(Bf16));
        o.read::<u16>(rows * of_q)
    };
    let copies = pairs.iter().map(|(_, to)| {
        let (at, mut page) = (*to as usize * cache.page_len(), vec![0u16; cache.page_len()]);
        cache.values().part(at..at + page.len()).read_bits(&mut page);
        page
    });
    let mut found = vec![attended(false, [1, 1]), attended(true, [1, 1]), attended(false, [20, 9])];
    found.extend(copies);
    found
}

/// The first sequence attends to keys of two segments.
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
    for kv in [KvDtype::Model, KvDtype::Fp8] {
        let of_far = cached(kv, PAGES, [&far[..131], &far[131..]], &pairs);
        let of_near = cached(kv, near.len() + 2, [&near[..131], &near[131..]], &near_pairs);
        assert!(of_far == of_near, "{kv:?}: bits differ");
    }
}
