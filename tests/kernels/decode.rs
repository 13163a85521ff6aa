//! The tables by which decoding goes on without the host: step by step what the host would have made of the same draws.

use crate::{bf16, device, in_every_order, numbers};
use rlhf_hpc::device::cpu::attention::{AttentionShape, PAGE, PagedSequence};
use rlhf_hpc::device::cuda::decode::{Capacity, DecodeSlot, DecodeState, Draw, ENDED, UNCHANGED};
use rlhf_hpc::device::cuda::kv_cache::{Decode, KvPages, SequenceTable, kv_append};
use rlhf_hpc::device::cuda::{Memory, Pinned, paged_attention};
use rlhf_hpc::dtype::DType;
use rlhf_hpc::ops::sample::{SampleParams, SampleRow, Sampled, forward};
use rlhf_hpc::rng::{Purpose, Rng};
use rlhf_hpc::tensor::Tensor;

const V: usize = 40;
const CACHE_PAGES: usize = 64;
const STEPS: usize = 40;

/// A row as the host keeps it.
struct Row {
    prompt: u64,
    past: usize,
    token: u32,
    new: usize,
    min: usize,
    max: usize,
    stops: Vec<u32>,
    pages: Vec<u32>,
    ends_at: Option<usize>,
    params: SampleParams,
    /// Prompt and new tokens.
    seen: Vec<u32>,
    ended: bool,
}

fn row(i: usize) -> Row {
    let past = [0, 5, 31, 32, 63, 30, 2][i % 7];
    let stops: [Vec<u32>; 7] =
        [vec![], (5..17).collect(), vec![7], (20..30).collect(), vec![], vec![0, 33], (30..36).collect()];
    Row {
        prompt: ((i as u64) << 31) + 77,
        past,
        token: (i * 5 % V) as u32,
        new: 1 + i % 3,
        min: [0, 4, 12][i % 3],
        max: 6 + 5 * i,
        stops: stops[i % 7].clone(),
        pages: (0..=past / PAGE).map(|page| (i * 7 + page * 3) as u32).collect(),
        ends_at: (i == 4).then_some(3),
        params: SampleParams {
            temperature: [1.0, 0.0, 0.7][i % 3],
            top_k: [0, 5, 0, 12][i % 4],
            top_p: [1.0, 0.8][i % 2],
            min_p: [0.0, 0.0, 0.05][i % 3],
            repetition_penalty: [1.0, 1.4, 0.7][i / 2 % 3],
        },
        seen: (0..8).map(|j| ((i * 5 + j * j) % V) as u32).chain([(i * 5 % V) as u32]).collect(),
        ended: false,
    }
}

/// What a token is fed to decides nothing here: logits are numbers of their own, by step.
fn logits(step: usize, rows: usize) -> Vec<f32> {
    numbers(900 + step as u32, rows * V).into_iter().map(|x| 5.0 * x).collect()
}

fn filled(rows: &[Row], bucket: usize, rng: Rng, cache_pages: usize) -> DecodeState {
    let (mut lanes, mut params, mut stops, mut pages) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut seen = Vec::new();
    for (i, row) in rows.iter().enumerate() {
        let first_stop = stops.len() as u32;
        stops.extend_from_slice(&row.stops);
        let mut own = row.seen.clone();
        own.sort_unstable();
        own.dedup();
        let seen_from = seen.len() as u32;
        seen.append(&mut own);
        lanes.push(DecodeSlot {
            counter: Rng::sample_counter(3, row.prompt, i as u32, row.new as u32),
            key: rng.key(),
            token: row.token,
            past: row.past as u32,
            left: (row.max - row.new) as u32,
            banned: row.min.saturating_sub(row.new) as u32,
            stops: [first_stop, stops.len() as u32],
            pages: pages.len() as u32,
            ended: 0,
            seen: [seen_from, seen.len() as u32],
        });
        seen.resize(seen.len() + row.max, 0);
        params.push(row.params);
        pages.extend_from_slice(&row.pages);
        pages.resize(pages.len() + 4, 0);
    }
    lanes.resize(bucket, DecodeSlot::IDLE);
    params.resize(bucket, SampleParams::greedy());
    let room = Capacity { rows: bucket + 3, pages: pages.len() + 5, stops: stops.len() + 1, seen: seen.len() };
    let mut tables = DecodeState::new(room, cache_pages);
    tables.fill(&lanes, &params, &stops, &seen, &pages);
    tables
}

/// What the host draws for the row that is fed `row.past` tokens, and what becomes of it.
fn drawn_by_host(row: &mut Row, i: usize, rng: Rng, logits: &[f32]) -> (Sampled, bool) {
    let uniform = rng.sample_uniform(3, row.prompt, i as u32, row.new as u32);
    let banned = if row.new < row.min { &row.stops[..] } else { &[] };
    let mut out = [Sampled::default()];
    let mut values = Tensor::scratch(1, V);
    values.data_mut().copy_from_slice(logits);
    let values = values.in_f32_on(rlhf_hpc::device::Device::Cuda);
    forward(&values, &[SampleRow { params: row.params, uniform, seen: &row.seen, banned }], &mut out);
    row.new += 1;
    row.past += 1;
    row.token = out[0].token;
    row.seen.push(row.token);
    (out[0], row.stops.contains(&row.token) || row.new == row.max)
}

/// A step in which as many ranks draw for a share of the rows each.
fn step(
    tables: &mut DecodeState,
    (bucket, ranks): (usize, usize),
    values: &Memory,
    ends: &Memory,
    pinned: Pinned,
) -> Pinned {
    tables.begin(bucket);
    for rank in 0..ranks {
        let share = rank * bucket / ranks..(rank + 1) * bucket / ranks;
        let logits = values.view(DType::F32).part(share.start * V..share.end * V);
        tables.draw(logits, share, V, ends, true);
    }
    tables.end(bucket, ranks);
    tables.see(bucket);
    tables.fetch(pinned, bucket).finish()
}

#[test]
fn rows_go_on_as_the_host_would_lead_them() {
    in_every_order(follow_the_host);
}

fn follow_the_host() {
    let (rng, bucket) = (Rng::new(5, Purpose::Sample), 9);
    let mut rows: Vec<Row> = (0..7).map(row).collect();
    let mut tables = filled(&rows, bucket, rng, CACHE_PAGES);
    let ends = Memory::of(&[V as i32]);
    let mut pinned = Pinned::new(bucket * size_of::<Draw>());
    let (mut next_page, mut by_token, mut by_length) = (40, 0, 0);
    for at in 0..STEPS {
        let mut changes = [UNCHANGED; 9];
        for (row, change) in rows.iter_mut().zip(&mut changes) {
            if !row.ended && row.ends_at == Some(at) {
                (row.ended, *change) = (true, ENDED);
            } else if !row.ended && row.past.is_multiple_of(PAGE) && row.past / PAGE == row.pages.len() {
                row.pages.push(next_page);
                *change = next_page;
                next_page += 1;
            }
        }
        if changes.iter().any(|change| *change != UNCHANGED) {
            tables.change(&changes);
        }
        let values = logits(at, bucket);
        pinned = step(&mut tables, (bucket, 1 + at % 4), &Memory::of(&values), &ends, pinned);
        let fed: Vec<[u32; 2]> =
            tables.tokens().read(bucket).into_iter().zip(tables.positions().read(bucket)).map(Into::into).collect();
        let shape = AttentionShape { heads: 2, kv_heads: 1, head_dim: 64, window: None, scale: 1.0 };
        let (sequences, slots) = tables.sequences(bucket, None, &shape).to_host();
        for i in 0..bucket {
            let draw = pinned.draw(i);
            let Some(row) = rows.get_mut(i).filter(|row| !row.ended) else {
                assert_eq!((draw.state, fed[i], slots[i]), (Draw::IDLE, [0, 0], -1), "step {at}, row {i} is idle");
                assert_eq!(sequences[i], [0, 1, i as i32, 0], "step {at}, row {i} sees the first key of a page");
                continue;
            };
            assert_eq!(fed[i], [row.token, row.past as u32], "step {at}, row {i} is fed");
            let slot = row.pages[row.past / PAGE] as usize * PAGE + row.past % PAGE;
            assert_eq!((sequences[i][..3].to_vec(), slots[i]), (vec![row.past as i32, 1, i as i32], slot as i32));
            let (want, ends) = drawn_by_host(row, i, rng, &values[i * V..][..V]);
            let got = [draw.token, draw.logprob.to_bits(), draw.sample_logprob.to_bits()];
            assert_eq!(got, [want.token, want.logprob.to_bits(), want.sample_logprob.to_bits()], "step {at}, row {i}");
            assert_eq!(draw.state, if ends { Draw::ENDS } else { Draw::GOES_ON }, "step {at}, row {i}");
            row.ended = ends;
            by_token += usize::from(ends && row.new < row.max);
            by_length += usize::from(ends && row.new == row.max);
        }
    }
    assert!(by_token > 1 && by_length > 1 && next_page > 42, "{by_token} and {by_length} ends, page {next_page}");
    assert!(rows.iter().all(|row| row.ended));
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
    let by_host = attend(&SequenceTable::with(&new, shape, Decode::Whole), pasts.len());
    let rng = Rng::new(1, Purpose::Sample);
    let rows: Vec<Row> =
        pasts.iter().zip(&blocks).map(|(&past, pages)| Row { past, pages: pages.clone(), ..row(0) }).collect();
    let mut tables = filled(&rows, bucket, rng, pages);
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
