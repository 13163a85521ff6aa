//! The operations one by one, on the shapes of a model, with data in the caches if it fits.

use super::measure::Meter;
use super::models::Source;
use crate::device::{Device, null};
use crate::dtype::{KvDtype, round_bf16};
use crate::model::cost::{self, Work};
use crate::model::{Arch, AttentionSpec, ExpertsSpec, Feed, TensorPart};
use crate::ops::adamw;
use crate::ops::attention::{self, AttentionShape, KvLayer, PAGE, PagedSequence};
use crate::ops::delta::{self, DeltaShape, StateLayer, States};
use crate::ops::experts::{Routing, Rule};
use crate::ops::glu::{self, Activation};
use crate::ops::matmul::{self, Into};
use crate::ops::ring_attention::{self, Backward, Steps};
use crate::ops::{norm, rmsnorm, zigzag};
use crate::plan::synthetic::{self, Matrix, fill, filled};
use crate::tensor::arena::Buffer;
use crate::tensor::{Layout, SliceMut, Tensor, Weight, WeightMut};

const ROWS: [usize; 8] = [1, 4, 8, 16, 32, 64, 512, 2048];
/// Rows of each expert.
const ROWS_OF_EXPERT: [usize; 4] = [1, 16, 64, 256];
/// Training: sequences of a packed row.
const BATCH: usize = 8;
const TOKENS: usize = 256;
/// Ranks that share the sequences.
const RINGS: [usize; 3] = [1, 2, 4];
/// Decoding: sequences, and keys of each.
const DECODED: usize = 16;
const PAST: [usize; 2] = [127, 4095];

pub fn run(meter: &mut Meter, source: &Source) {
    let Source { arch, name, .. } = source;
    let (d, layer, f) = (arch.width, arch.attention(), arch.blocks[0].feed.width());
    let mut shapes =
        vec![(layer.q_width(), d), (layer.kv_width(), d), (d, layer.q_width()), (f, d), (d, f), (arch.vocabulary, d)];
    shapes.sort_unstable();
    shapes.dedup();
    for (n, k) in shapes {
        products(meter, name, n, k);
    }
    if let Some(spec) = arch.feeds().find_map(Feed::experts) {
        for rows in ROWS_OF_EXPERT {
            experts(meter, name, [spec.width, d], spec, rows);
        }
    }
    packed_attention(meter, name, arch);
    for size in RINGS {
        shared_attention(meter, name, arch, size);
    }
    for past in PAST {
        for kv in [KvDtype::Model, KvDtype::Fp8] {
            decode_attention(meter, name, arch, (past, kv));
        }
    }
    if let Some(spec) = arch.deltas().next() {
        delta_rule(meter, name, &spec.shape(TensorPart::whole()));
    }
    head(meter, name, arch);
    streams(meter, name, arch);
}

fn products(meter: &mut Meter, name: &str, n: usize, k: usize) {
    let (matrix, dtype) = (Matrix::new(n, k, meter.dtype), meter.dtype);
    let mut gradient = Buffer::zeros(Layout::Panel.len(n, k));
    for m in ROWS {
        let (x, dy) = (filled(m, k), filled(m, n));
        let (mut y, mut dx) = (Tensor::zeros(m, n), Tensor::zeros(m, k));
        // The matrix may be in a cache: memory is no bound.
        let cost = Work::from_bytes(0.0, 2.0 * (m * n * k) as f64);
        let label = |what: &str| format!("{name} {what} {m} x {n} x {k}");
        meter.short(&label("product"), None, cost, || {
            matmul::forward(&x, matrix.weight(), None, &mut y, Into::Overwrite);
        });
        meter.short(&label("product dx"), None, cost, || {
            matmul::backward_input(&dy, matrix.weight(), &mut dx, Into::Overwrite);
        });
        meter.short(&label("product dW"), None, cost, || {
            let dw = WeightMut { n, k, layout: Layout::Panel, values: (&mut gradient).into() };
            matmul::backward_weight(&dy, &x, dw, dtype);
        });
    }
}

/// The products of a mixture whose experts have `rows` rows each, and those of all rows with one matrix.
fn experts(meter: &mut Meter, name: &str, [n, k]: [usize; 2], spec: &ExpertsSpec, rows: usize) {
    let (count, dtype, s) = (spec.count, meter.dtype, rows * spec.count);
    let matrices: Vec<Matrix> = (0..count).map(|_| Matrix::new(n, k, dtype)).collect();
    let mut logits = Tensor::zeros(s / spec.top_k, count);
    for (i, chosen) in (0..s / spec.top_k * spec.top_k).map(|i| (i / spec.top_k, i % count)) {
        logits.row_mut(i)[chosen] = 1.0;
    }
    let routing = Routing::new(logits, spec.top_k, Rule::Softmax { renormalizes: spec.renormalizes });
    let (s, groups) = (routing.row_count(), &routing.groups);
    let len = Layout::Panel.len(n, k);
    let (x, dy, mut gradients) = (filled(s, k), filled(s, n), Buffer::zeros(count * len));
    let mut gradient = Buffer::zeros(len);
    let (mut y, mut dx) = (Tensor::zeros(s, n), Tensor::zeros(s, k));
    let cost = Work::from_bytes(0.0, 2.0 * (s * n * k) as f64);
    let weights: Vec<Weight> = matrices.iter().map(Matrix::weight).collect();
    let mut measure = |what: &str, work: &mut dyn FnMut()| meter.short(&format!("{name} {what}"), None, cost, work);
    let (of_experts, of_one) = (format!("{count} x {rows} x {n} x {k}"), format!("{s} x {n} x {k}"));
    measure(&format!("experts {of_experts}"), &mut || drop(groups.forward_each(&x, [&weights])));
    measure(&format!("one product {of_one}"), &mut || {
        matmul::forward(&x, weights[0], None, &mut y, Into::Overwrite);
    });
    measure(&format!("experts dx {of_experts}"), &mut || groups.backward_input(&dy, &weights, &mut dx, false));
    measure(&format!("one product dx {of_one}"), &mut || {
        matmul::backward_input(&dy, weights[0], &mut dx, Into::Overwrite);
    });
    measure(&format!("experts dW {of_experts}"), &mut || {
        let dw =
            gradients.chunks_mut(len).map(|values| WeightMut { n, k, layout: Layout::Panel, values: values.into() });
        groups.backward_weight(&dy, &x, dw.collect(), dtype);
    });
    measure(&format!("one product dW {of_one}"), &mut || {
        let dw = WeightMut { n, k, layout: Layout::Panel, values: (&mut gradient).into() };
        matmul::backward_weight(&dy, &x, dw, dtype);
    });
}

/// The attention of a layer, without its window.
fn full_attention(arch: &Arch) -> AttentionSpec {
    AttentionSpec { window: None, ..*arch.attention() }
}

fn packed_attention(meter: &mut Meter, name: &str, arch: &Arch) {
    let layer = full_attention(arch);
    let flops = attention::flops(layer.q_width(), BATCH as f64 * attention::pairs(0, TOKENS, None));
    let cost = Work { attention: flops, ..Work::default() };
    synthetic::packed_attention(&layer, [BATCH, TOKENS], &mut |op, work| {
        let is_forward = op == null::ATTENTION;
        let (what, cost) = if is_forward { ("attention", cost) } else { ("attention backward", cost + cost) };
        meter.short(&format!("{name} {what} {BATCH} x {TOKENS}"), Some(BATCH * TOKENS), cost, work);
    });
}

/// Attention of one rank of a ring, over all steps, for as many tokens as one sequence of `packed_attention`.
fn shared_attention(meter: &mut Meter, name: &str, arch: &Arch, size: usize) {
    let (ends, layer) = ([0, BATCH * TOKENS], full_attention(arch));
    let shape = layer.shape(TensorPart::whole());
    let Steps { steps, .. } = Steps::new(Device::Cpu, &ends, &shape, 0, size);
    let (t, qw, kvw) = (zigzag::tokens(&ends, 0, size), layer.q_width(), layer.kv_width());
    let (q, d_o) = (filled(t, qw), filled(t, qw));
    let keys = |rank: usize| filled(zigzag::tokens(&ends, rank, size), kvw);
    // Rank 0 has its own keys first, then those of the last rank.
    let froms = (0..size).map(|s| (size - s) % size);
    let blocks: Vec<Tensor> = froms.clone().map(|rank| ring_attention::block(&keys(rank), &keys(rank))).collect();
    let (mut o, mut lse, mut dq) = (Tensor::zeros(t, qw), Tensor::zeros(t, layer.heads), Tensor::zeros(t, qw));
    let queries = zigzag::pieces(&ends, 0, size);
    let passes = froms.flat_map(|from| zigzag::passes(&queries, &zigzag::pieces(&ends, from, size), &shape));
    let pairs: usize = passes.map(|pass| zigzag::pairs(&pass, &shape)).sum();
    let cost = Work { attention: attention::flops(qw, pairs as f64), ..Work::default() };
    let label = |what: &str| format!("{name} attention{what} of 1 of {size} x {}", ends[1]);
    meter.short(&label(""), Some(t), cost, || {
        for (step, block) in steps.iter().zip(&blocks) {
            ring_attention::forward(&q, block, step, &mut o, &mut lse);
        }
    });
    meter.short(&label(" backward"), Some(t), cost + cost, || {
        let backward = Backward::new([&q, &o, &lse, &d_o], &shape);
        for (step, block) in steps.iter().zip(&blocks) {
            drop(backward.step(block, step, &mut dq));
        }
    });
}

fn decode_attention(meter: &mut Meter, name: &str, arch: &Arch, (past, kv): (usize, KvDtype)) {
    let layer = full_attention(arch);
    let shape = AttentionShape { kv, ..layer.shape(TensorPart::whole()) };
    let pages = (past + 1).div_ceil(PAGE);
    let tables: Vec<Vec<u32>> = (0..DECODED).map(|s| (0..pages).map(|p| (s * pages + p) as u32).collect()).collect();
    let mut cache = KvLayer::new(Device::Cpu, meter.dtype, DECODED * pages, &shape);
    if let KvLayer::Cpu { keys, values } = &mut cache {
        for cached in [keys, values] {
            match (cached.all_mut(), kv) {
                // Codes of 1, and powers.
                (codes, KvDtype::Fp8) => codes.f32().fill(f32::from_bits(0x3838_3838)),
                (SliceMut::Bf16(values), KvDtype::Model) => values.fill(round_bf16(0.25)),
                (values, KvDtype::Model) => fill(values.f32()),
            }
        }
    }
    let sequences: Vec<PagedSequence> = tables.iter().map(|blocks| PagedSequence { past, tokens: 1, blocks }).collect();
    let paged = sequences.as_slice().into();
    let q = filled(DECODED, layer.q_width());
    let mut o = Tensor::zeros(DECODED, layer.q_width());
    let keys = DECODED * (past + 1);
    let cost = Work {
        attention: attention::flops(layer.q_width(), keys as f64),
        bytes: (keys * KvLayer::token_bytes(Device::Cpu, meter.dtype, &shape)) as f64,
        ..Work::default()
    };
    let what = if kv == KvDtype::Fp8 { " 8 bits" } else { "" };
    meter.short(&format!("{name} attention decode {DECODED} x {}{what}", past + 1), Some(DECODED), cost, || {
        attention::forward_paged(&q, &cache, &paged, &shape, &mut o, None);
    });
}

/// The gated delta rule over packed rows, its backward, and one token of each sequence.
fn delta_rule(meter: &mut Meter, name: &str, shape: &DeltaShape) {
    let (keys, values) = (shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim);
    let inputs = |t: usize| {
        let widths = [keys, keys, values, shape.value_heads, shape.value_heads];
        widths.map(|width| filled(t, width))
    };
    let cu_seqlens: Vec<usize> = (0..=BATCH).map(|row| row * TOKENS).collect();
    let (x, states) = (inputs(BATCH * TOKENS), States::whole(&cu_seqlens));
    let d_o = filled(BATCH * TOKENS, values);
    let cost = |tokens: usize| Work { attention: delta::flops(shape, tokens), ..Work::default() };
    let label = |what: &str| format!("{name} delta rule{what} {BATCH} x {TOKENS}");
    meter.short(&label(""), Some(BATCH * TOKENS), cost(BATCH * TOKENS), || {
        drop(delta::forward(x.each_ref(), shape, &mut States::whole(&cu_seqlens), 0));
    });
    let twice = cost(BATCH * TOKENS) + cost(BATCH * TOKENS);
    meter.short(&label(" backward"), Some(BATCH * TOKENS), twice, || {
        drop(delta::backward(x.each_ref(), shape, &states, &d_o));
    });
    let (mut cache, x) = (StateLayer::new(Device::Cpu, DECODED, shape.state_len()), inputs(DECODED));
    let pages: Vec<[u32; 1]> = (0..DECODED as u32).map(|page| [page]).collect();
    let sequences: Vec<PagedSequence> =
        pages.iter().map(|blocks| PagedSequence { past: PAST[0], tokens: 1, blocks }).collect();
    let paged = sequences.as_slice().into();
    meter.short(&format!("{name} delta rule decode {DECODED}"), Some(DECODED), cost(DECODED), || {
        drop(delta::forward(x.each_ref(), shape, &mut States::cached(&mut cache, &paged), 0));
    });
}

fn head(meter: &mut Meter, name: &str, arch: &Arch) {
    let (t, d, v) = (BATCH * TOKENS, arch.width, arch.vocabulary);
    let cost = Work::from_bytes(0.0, 2.0 * (t * d * v) as f64);
    synthetic::head(t, &Matrix::new(v, d, meter.dtype), &mut |op, work| {
        let (what, cost) = if op == null::HEAD { ("head", cost) } else { ("head and gradient", cost + cost + cost) };
        meter.short(&format!("{name} {what} {t} x {v} x {d}"), Some(t), cost, work);
    });
}

/// Memory-bound operations, compared with reading memory; data smaller than a cache may be faster.
fn streams(meter: &mut Meter, name: &str, arch: &Arch) {
    let (t, d, f) = (BATCH * TOKENS, arch.width, arch.blocks[0].feed.width());
    let mut stream = |what: &str, floats: usize, work: &mut dyn FnMut()| {
        meter.short(&format!("{name} {what}"), None, Work::from_bytes((floats * size_of::<f32>()) as f64, 0.0), work);
    };
    let (x, dy, w) = (filled(t, d), filled(t, d), vec![1.0; d]);
    let (mut y, mut rstd) = (Tensor::zeros(t, d), Tensor::zeros(t, 1));
    let (mut dx, mut dw) = (Tensor::zeros(t, d), vec![0.0; d]);
    let forward = &mut || rmsnorm::forward(&x, &w, 0.0, 1e-5, &mut y, &mut rstd);
    stream(&format!("rmsnorm {t} x {d}"), 2 * t * d, forward);
    let backward = &mut || rmsnorm::backward(&x, &w, 0.0, &rstd, &dy, &mut dx, &mut dw);
    stream(&format!("rmsnorm backward {t} x {d}"), 4 * t * d, backward);
    let (gate, up, dact) = (filled(t, f), filled(t, f), filled(t, f));
    let (mut act, mut dgate, mut dup) = (Tensor::zeros(t, f), Tensor::zeros(t, f), Tensor::zeros(t, f));
    stream(&format!("swiglu {t} x {f}"), 3 * t * f, &mut || glu::forward(Activation::Silu, &gate, &up, &mut act));
    let backward = &mut || glu::backward(Activation::Silu, &gate, &up, &dact, &mut dgate, &mut dup);
    stream(&format!("swiglu backward {t} x {f}"), 5 * t * f, backward);
    let n = cost::elements(arch);
    let (mut p, mut g) = (Buffer::zeros(n), Buffer::scratch(n));
    let (mut m, mut v) = (Buffer::zeros(n), Buffer::zeros(n));
    fill(&mut g);
    stream(&format!("adamw {n}"), 7 * n, &mut || adamw::step(&mut p, &g, &mut m, &mut v, &synthetic::UPDATE, 0.0));
    stream(&format!("gradient norm {n}"), n, &mut || drop(norm::sums_of_squares(&g, 1 << 14)));
}
