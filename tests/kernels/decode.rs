//! The tables by which decoding goes on without the host: attention reads by them what it reads by the host's.
//! What is drawn and fed by them is what the host draws and feeds: `rollout.rs` and `graphs.rs`.

use crate::device;
use crate::paged_attention::batch::{Batch, shape};
use rlhf_hpc::device::cuda::decode::{Capacity, DecodeSlot, DecodeState};
use rlhf_hpc::ops::attention::AttentionShape;
use rlhf_hpc::ops::sample::SampleParams;

/// The tables of rows that are fed a token behind `pasts`, whose pages are `blocks`.
fn filled(pasts: &[usize], blocks: &[Vec<u32>], bucket: usize, cache_pages: usize) -> DecodeState {
    let (mut slots, mut pages) = (Vec::new(), Vec::new());
    for (past, blocks) in pasts.iter().zip(blocks) {
        slots.push(DecodeSlot {
            past: *past as u32,
            left: 5,
            pages: pages.len() as u32,
            ended: 0,
            ..DecodeSlot::idle()
        });
        pages.extend_from_slice(blocks);
    }
    slots.resize(bucket, DecodeSlot::idle());
    let room = Capacity { rows: bucket + 3, pages: pages.len() + 5, stops: 1, seen: 1 };
    let mut tables = DecodeState::new(room, cache_pages);
    tables.fill(&slots, &vec![SampleParams::greedy(); bucket], &[], &[], &pages);
    tables
}

/// Attention of one new row behind each of `pasts`, by tables of the GPU, in which two more rows idle.
fn holds(shape: &AttentionShape, pasts: &[usize], longest: Option<usize>) {
    let lengths: Vec<usize> = pasts.iter().map(|past| past + 1).chain([1, 1]).collect();
    let (batch, bucket, n) = (Batch::new(shape, &lengths), lengths.len(), pasts.len());
    let last: Vec<(usize, usize)> = lengths.iter().map(|len| (len - 1, 1)).collect();
    let (pages, blocks) = batch.tables();
    let (cache, q) = batch.cached(&last);
    let mut tables = filled(pasts, &blocks[..n], bucket, pages);
    tables.begin(bucket);
    let got = batch.attended(&q, &cache, &tables.sequences(bucket, longest, shape));
    let rows = n * shape.heads * shape.head_dim;
    assert_eq!(got[..rows], batch.run(&last)[..rows], "{shape:?}, {pasts:?} cached, split for {longest:?}");
}

#[test]
fn attention_by_these_tables_has_the_bits_of_attention_by_the_hosts() {
    let (_gpu, _one) = device();
    for (shape, pasts, longest) in [
        (shape(2, 1, 64, None), &[0, 31, 32, 77][..], None),
        (shape(4, 2, 64, Some(40)), &[3, 140], None),
        // More heads share a key than a tile of the decoding kernel has rows.
        (shape(20, 1, 64, None), &[70, 5], None),
        (shape(2, 1, 64, None), &[300, 12], Some(512)),
        (shape(4, 2, 64, Some(70)), &[290, 257], Some(512)),
    ] {
        holds(&shape, pasts, longest);
    }
}
