//! The tables by which decoding goes on without the host: attention reads by them what it reads by the host's.
//! What is drawn and fed by them is what the host draws and feeds: `rollout.rs` and `graphs.rs`.

use crate::{bf16, device, numbers};
use rlhf_hpc::device::cpu::attention::{AttentionShape, PAGE, PagedSequence};
use rlhf_hpc::device::cuda::decode::{Capacity, DecodeSlot, DecodeState};
use rlhf_hpc::device::cuda::kv_cache::{KvPages, SequenceTable, kv_append};
use rlhf_hpc::device::cuda::{Memory, paged_attention};
use rlhf_hpc::dtype::DType;
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

/// A cache of numbers, and attention of one new row of each of `pasts`, by tables of the GPU and by those of the host.
fn attended(shape: &AttentionShape, pasts: &[usize], longest: Option<usize>) -> [Vec<u16>; 2] {
    let (width, kept, bucket) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, pasts.len() + 2);
    let blocks: Vec<Vec<u32>> = pasts
        .iter()
        .enumerate()
        .map(|(i, past)| (0..=past / PAGE).map(|page| (page * pasts.len() + i) as u32).collect())
        .collect();
    let pages = blocks.iter().flatten().max().map_or(0, |page| *page as usize + 1);
    let mut cache = KvPages::new(pages, shape);
    let whole: Vec<PagedSequence> =
        pasts.iter().zip(&blocks).map(|(&past, blocks)| PagedSequence { past: 0, tokens: past + 1, blocks }).collect();
    let all: usize = whole.iter().map(|sequence| sequence.tokens).sum();
    let [k, v] = [1, 2].map(|seed| Memory::of(&bf16(&numbers(seed, all * kept))));
    let table = SequenceTable::new(&whole, shape);
    kv_append(&mut cache, k.view(DType::Bf16), v.view(DType::Bf16), &table, shape);
    let q = Memory::of(&bf16(&numbers(3, bucket * width)));
    let attend = |table: &SequenceTable, rows: usize| {
        let mut o = Memory::zeros(2 * rows * width);
        let q = q.view(DType::Bf16).part(0..rows * width);
        paged_attention::forward(q, &cache, table, shape, o.view_mut(DType::Bf16));
        o.read::<u16>(pasts.len() * width)
    };
    let new: Vec<PagedSequence> =
        pasts.iter().zip(&blocks).map(|(&past, blocks)| PagedSequence { past, tokens: 1, blocks }).collect();
    let by_host = attend(&SequenceTable::with(&new, shape, false), pasts.len());
    let mut tables = filled(pasts, &blocks, bucket, pages);
    tables.begin(bucket);
    let by_gpu = attend(&tables.sequences(bucket, longest, shape), bucket);
    [by_host, by_gpu]
}

#[test]
fn attention_by_these_tables_has_the_bits_of_attention_by_the_hosts() {
    let (_gpu, _one) = device();
    let shape = |heads, kv_heads, window| AttentionShape { heads, kv_heads, head_dim: 64, window, scale: 0.3 };
    for (shape, pasts, longest) in [
        (shape(2, 1, None), &[0, 31, 32, 77][..], None),
        (shape(4, 2, Some(40)), &[3, 140], None),
        // More heads share a key than a tile of the decoding kernel has rows.
        (shape(20, 1, None), &[70, 5], None),
        (shape(2, 1, None), &[300, 12], Some(512)),
        (shape(4, 2, Some(70)), &[290, 257], Some(512)),
    ] {
        let [by_host, by_gpu] = attended(&shape, pasts, longest);
        assert_eq!(by_host, by_gpu, "{shape:?}, {pasts:?} cached, split for {longest:?}");
    }
}
