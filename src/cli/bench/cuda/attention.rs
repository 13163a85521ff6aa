//! Attention: one long sequence, forward and backward; one step of a ring; and single tokens over the cache.

use super::bench::{Bench, Target, Work};
use crate::device::Device;
use crate::device::cpu::attention::{AttentionShape, PAGE, PagedSequence, Span};
use crate::device::cuda::kv_cache::{self, KvPages, SequenceTable};
use crate::device::cuda::rope::Table;
use crate::device::cuda::{Memory, attention, attention_backward, paged_attention};
use crate::dtype::KvDtype;
use crate::ops::ring_attention::{self, Backward, Step};
use crate::tensor::DType::{Bf16, F32};
use crate::tensor::Tensor;

/// The numbers of query heads and of key/value heads.
const HEADS: (usize, usize) = (32, 8);
/// Head dims that are measured in addition to that of the targets.
const OTHER_HEAD_DIMS: [usize; 3] = [32, 64, 256];
const HEAD_DIM: usize = 128;
/// Decoding shapes: the number of sequences, and the tokens that each already has.
const DECODED: [(usize, usize); 7] =
    [(1, 4096), (1, 32768), (1, 131_072), (8, 8192), (64, 1024), (64, 4096), (256, 1024)];
/// Shapes that are measured with keys and values in 8 bits, too.
const DECODED_CODES: [(usize, usize); 2] = [(1, 32768), (64, 4096)];

pub(super) fn run(bench: &Bench) {
    long(bench, HEAD_DIM);
    for (batch, past) in DECODED {
        decode(bench, bench.pick(batch, batch.min(2)), bench.n(past), KvDtype::Model);
    }
    for (batch, past) in DECODED_CODES {
        decode(bench, bench.pick(batch, batch.min(2)), bench.n(past), KvDtype::Fp8);
    }
    for e in OTHER_HEAD_DIMS {
        long(bench, e);
    }
    ring_step(bench);
}

fn shape(bench: &Bench, e: usize) -> AttentionShape {
    let (heads, kv_heads) = bench.pick(HEADS, (4, 1));
    AttentionShape {
        heads,
        kv_heads,
        head_dim: e,
        window: None,
        scale: 1.0 / (e as f32).sqrt(),
        softcap: None,
        values_are_keys: false,
        kv: KvDtype::Model,
    }
}

/// Causal attention of one long sequence.
fn long(bench: &Bench, e: usize) {
    let (t, shape) = (bench.n(8192), shape(bench, e));
    let (heads, kv_heads) = (shape.heads, shape.kv_heads);
    let table = attention::SpanTable::packed(&[0, t], &shape);
    let (q, kv) = (t * heads * e, t * kv_heads * e);
    let [query, d_o] = [q, q].map(|len| bench.random(len));
    let [key, value] = [kv, kv].map(|len| bench.random(len));
    let (mut o, mut lse, mut delta) =
        (Memory::zeros(2 * q), Memory::zeros(4 * t * heads), Memory::zeros(4 * t * heads));
    // Half of all pairs are masked.
    let flops = 2.0 * (heads * e) as f64 * (t as f64).powi(2);
    let (forward, backward) =
        (Work::from_bytes(4.0 * (q + kv) as f64, flops), Work::from_bytes(8.0 * (q + kv) as f64, 2.5 * flops));
    // The kernels use sm_80's instructions. Newer GPUs have faster ones, so PyTorch's attention is the target there.
    let is_newer = bench.gpu.properties().capability.0 >= 9;
    let of_forward = if is_newer { Target::PyTorch } else { Target::Product(0.6) };
    let [of_forward, of_backward] = [of_forward, Target::Product(0.5)].map(|target| (e == HEAD_DIM).then_some(target));
    let of = format!("{t} tokens, {heads} heads of {e} over {kv_heads}");
    bench.measure(&format!("attention forward, {of}"), forward, of_forward, || {
        let (q, k, v) = (query.view(Bf16), key.view(Bf16), value.view(Bf16));
        attention::forward(q, k, v, &table, false, o.view_mut(Bf16), lse.view_mut(F32));
    });
    let [mut dq, mut dk, mut dv] = [q, kv, kv].map(|len| Memory::scratch(2 * len));
    bench.measure(&format!("attention backward, {of}"), backward, of_backward, || {
        attention_backward::delta(o.view(Bf16), d_o.view(Bf16), &shape, delta.view_mut(F32));
        let inputs = [query.view(Bf16), key.view(Bf16), value.view(Bf16)];
        let slopes = [lse.view(F32), delta.view(F32), d_o.view(Bf16)];
        let gradients = [dk.view_mut(Bf16), dv.view_mut(Bf16)];
        attention_backward::backward(inputs, slopes, &table, [false; 2], dq.view_mut(Bf16), gradients);
    });
}

/// One step of a ring: the later half of a rank's rows attends to the keys of another rank.
fn ring_step(bench: &Bench) {
    let (t, e, shape) = (bench.n(8192), HEAD_DIM, shape(bench, HEAD_DIM));
    let (heads, kv_heads) = (shape.heads, shape.kv_heads);
    let late = Span { row: t / 2, tokens: t - t / 2, past: t, key_row: 0, keys: t };
    let step = Step::new(Device::Cuda, vec![vec![late]], &shape, t, false);
    let random = |rows: usize, heads: usize, seed: u32| {
        let values = (0..rows * heads * e).map(|i| f32::from((i as u32).wrapping_mul(seed) as u16) / 32768.0 - 1.0);
        Tensor::from_slice(rows, heads * e, &values.collect::<Vec<f32>>()).on(Device::Cuda, Bf16)
    };
    let (q, d_o, block) = (random(t, heads, 40503), random(t, heads, 30011), random(2 * t, kv_heads, 50021));
    let [mut sum, mut lse, mut dq] = [e, 1, e].map(|each| Tensor::zeros(t, heads * each).on(Device::Cuda, F32));
    let (of_q, of_k) = (t * heads * e, t * kv_heads * e);
    let flops = 4.0 * (heads * e) as f64 * (t as f64).powi(2) / 2.0;
    // q, o read and written, k and v.
    let cost = Work::from_bytes((of_q / 2 * (2 + 8) + 2 * of_k * 2) as f64, flops);
    bench.measure(&format!("attention forward, a step of a ring, {} x {t}", t / 2), cost, None, || {
        ring_attention::forward(&q, &block, &step, &mut sum, &mut lse);
    });
    let o = ring_attention::rounded(sum.clone());
    let cost = Work::from_bytes((of_q / 2 * (2 + 2 + 8) + 2 * of_k * (2 + 4)) as f64, 2.5 * flops);
    let backward = Backward::new([&q, &o, &lse, &d_o], &shape);
    bench.measure(&format!("attention backward, a step of a ring, {} x {t}", t / 2), cost, None, || {
        drop(backward.step(&block, &step, &mut dq));
    });
}

/// Attention of one token of each of `batch` sequences over a cache of `past` tokens each; several caches take turns.
fn decode(bench: &Bench, batch: usize, past: usize, kv: KvDtype) {
    let (e, shape) = (HEAD_DIM, AttentionShape { kv, ..shape(bench, HEAD_DIM) });
    let (heads, width) = (shape.heads, shape.kv_heads * e);
    let (pages, token_bytes) = ((past + 1).div_ceil(PAGE), shape.cached_bytes(Bf16.bytes()));
    let copies = bench.copies(batch * pages * PAGE * token_bytes);
    let mut cache = KvPages::new(copies * batch * pages, &shape);
    let [k, v] = [(); 2].map(|()| bench.random((past + 1) * width));
    let (mut q, angles) =
        (bench.random((past + 1) * heads * e), Table::new(e, &vec![1.0; e / 2], &vec![0.0; e / 2], &[]));
    let at = (&Memory::zeros(4 * (past + 1)), &angles);
    let tables: Vec<SequenceTable> = (0..copies)
        .map(|copy| {
            let first = |s: usize| (copy * batch + s) * pages;
            let blocks: Vec<Vec<u32>> =
                (0..batch).map(|s| (first(s)..first(s) + pages).map(|page| page as u32).collect()).collect();
            for blocks in &blocks {
                let all = SequenceTable::new(&[PagedSequence { past: 0, tokens: past + 1, blocks }], &shape);
                let new = [k.view(Bf16), v.view(Bf16)];
                match kv {
                    KvDtype::Model => kv_cache::kv_append(&mut cache, q.view_mut(Bf16), new, at, &all),
                    KvDtype::Fp8 => kv_cache::append_codes(&mut cache, new, &all),
                }
            }
            let last: Vec<PagedSequence> =
                blocks.iter().map(|blocks| PagedSequence { past, tokens: 1, blocks }).collect();
            SequenceTable::new(&last, &shape)
        })
        .collect();
    let (q, mut o) = (bench.random(batch * heads * e), Memory::scratch(2 * batch * heads * e));
    let keys = (batch * (past + 1)) as f64;
    let cost = Work::from_bytes(keys * token_bytes as f64, 4.0 * keys * (heads * e) as f64);
    let (mut turn, what) = (0, if kv == KvDtype::Fp8 { ", 8 bits" } else { "" });
    let work = format!("decode attention{what}, {batch} x {past} keys, {heads} heads over {}", shape.kv_heads);
    bench.measure(&work, cost, Some(Target::Copy(0.85)), || {
        turn = (turn + 1) % copies;
        paged_attention::forward(q.view(Bf16), &cache, &tables[turn], o.view_mut(Bf16));
    });
}
