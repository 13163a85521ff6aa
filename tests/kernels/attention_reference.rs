//! Attention and its gradients in f64, and cases of it on the GPU.

use crate::{bf16, numbers, rounded};
use rlhf_hpc::device::cuda::attention::{self, SpanTable};
use rlhf_hpc::device::cuda::attention_backward;
use rlhf_hpc::device::cuda::{Memory, View};
use rlhf_hpc::dtype::DType;
use rlhf_hpc::ops::attention::{AttentionShape, Span};

/// Half a unit in the last place of bf16, relative to the smallest number that has it.
const ROUNDING: f64 = 1.0 / 256.0;
/// What f32 costs in sums of some hundred terms of about 1.
const F32: f64 = 1e-5;

/// Values of q, k and v, rounded, and the same on the GPU.
pub struct Case {
    pub shape: AttentionShape,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    on_gpu: [Memory; 3],
}

/// Attention in f64. Where no span covers a row: o 0, lse -inf.
pub struct Reference {
    pub o: Vec<f64>,
    pub lse: Vec<f64>,
    /// sum_j p |v|: what rounding of p may cost
    pub reach: Vec<f64>,
}

/// A gradient in f64.
pub struct Gradient {
    values: Vec<f64>,
    /// The sum of the terms' absolute values: what rounding of one factor may cost
    reach: Vec<f64>,
}

/// Of q, k and v.
pub struct Gradients([Gradient; 3]);

pub fn shape(heads: usize, kv_heads: usize, head_dim: usize, window: Option<usize>) -> AttentionShape {
    AttentionShape { heads, kv_heads, head_dim, window, scale: 1.0 / (head_dim as f32).sqrt() }
}

pub fn ends(lengths: &[usize]) -> Vec<usize> {
    let mut ends = vec![0];
    for length in lengths {
        ends.push(ends[ends.len() - 1] + length);
    }
    ends
}

/// One span a sequence that is not empty.
pub fn whole(cu_seqlens: &[usize]) -> Vec<Span> {
    let span = |w: &[usize]| Span { row: w[0], tokens: w[1] - w[0], past: 0, key_row: w[0], keys: w[1] - w[0] };
    cu_seqlens.windows(2).map(span).filter(|span| span.tokens > 0).collect()
}

/// The rows `rows` of x (_, width).
pub fn gathered<T: Copy>(x: &[T], rows: &[usize], width: usize) -> Vec<T> {
    rows.iter().flat_map(|row| x[row * width..][..width].iter().copied()).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

impl Case {
    pub fn new(rows: usize, shape: AttentionShape) -> Self {
        let (of_q, of_k) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let q: Vec<f32> = numbers(1, rows * of_q).iter().map(|x| 3.0 * x).collect();
        Self::of([q, numbers(2, rows * of_k), numbers(3, rows * of_k)], shape)
    }

    pub fn of(values: [Vec<f32>; 3], shape: AttentionShape) -> Self {
        let on_gpu = values.each_ref().map(|x| Memory::of(&bf16(x)));
        let [q, k, v] = values.map(|x| rounded(&x));
        Self { shape, q, k, v, on_gpu }
    }

    /// The case of some rows of q, and some of k and v.
    pub fn part(&self, rows: &[usize], key_rows: &[usize]) -> Self {
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        let keys = |x| gathered(x, key_rows, kv_heads * head_dim);
        Self::of([gathered(&self.q, rows, heads * head_dim), keys(&self.k), keys(&self.v)], self.shape)
    }

    pub fn views(&self) -> [View<'_>; 3] {
        self.on_gpu.each_ref().map(|x| x.view(DType::Bf16))
    }

    /// Rows of q, times heads.
    fn heads(&self) -> usize {
        self.q.len() / self.shape.head_dim
    }

    /// o and lse; 0 where no span covers a row.
    pub fn forward(&self, spans: &[Span], dtype: DType) -> (Vec<f32>, Vec<f32>) {
        let (mut o, mut lse) = (Memory::zeros(self.q.len() * dtype.bytes()), Memory::zeros(self.heads() * 4));
        let [q, k, v] = self.views();
        let table = SpanTable::new(spans, &self.shape);
        attention::forward(q, k, v, &table, false, o.view_mut(dtype), lse.view_mut(DType::F32));
        (o.view(dtype).to_f32(), lse.read(self.heads()))
    }

    /// dq, dk and dv as bf16; o and d_o hold bf16 values.
    pub fn backward(&self, spans: &[Span], o: &[f32], lse: &[f32], d_o: &[f32]) -> [Vec<f32>; 3] {
        self.backward_over(&SpanTable::new(spans, &self.shape), o, lse, d_o)
    }

    /// The same over the spans of a table.
    pub fn backward_over(&self, table: &SpanTable, o: &[f32], lse: &[f32], d_o: &[f32]) -> [Vec<f32>; 3] {
        let [o, d_o] = [o, d_o].map(|x| Memory::of(&bf16(x)));
        let (lse, mut delta) = (Memory::of(lse), Memory::scratch(lse.len() * 4));
        attention_backward::delta(o.view(DType::Bf16), d_o.view(DType::Bf16), &self.shape, delta.view_mut(DType::F32));
        let [mut dq, mut dk, mut dv] = [&self.q, &self.k, &self.v].map(|x| Memory::scratch(x.len() * 2));
        let statistics = [lse.view(DType::F32), delta.view(DType::F32), d_o.view(DType::Bf16)];
        let to = [dk.view_mut(DType::Bf16), dv.view_mut(DType::Bf16)];
        let dq_to = dq.view_mut(DType::Bf16);
        attention_backward::backward(self.views(), statistics, table, [false; 2], dq_to, to);
        [dq, dk, dv].map(|x| x.view(DType::Bf16).to_f32())
    }

    /// One row of one head of q or k.
    fn at<'a>(&self, x: &'a [f32], row: usize, head: usize, heads: usize) -> &'a [f32] {
        let e = self.shape.head_dim;
        &x[(row * heads + head) * e..][..e]
    }

    /// (row of k, score) of each key that row i of a span sees.
    fn scores(&self, span: &Span, i: usize, head: usize) -> Vec<(usize, f64)> {
        let AttentionShape { heads, kv_heads, scale, .. } = self.shape;
        let q = self.at(&self.q, span.row + i, head, heads);
        let seen = self.shape.visible(span.past + i);
        let keys = (seen.start..seen.end.min(span.keys)).map(|j| {
            let k = self.at(&self.k, span.key_row + j, head * kv_heads / heads, kv_heads);
            (span.key_row + j, f64::from(scale) * dot(q, k))
        });
        keys.collect()
    }

    pub fn reference(&self, spans: &[Span]) -> Reference {
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        let zeros = || vec![0.0; self.q.len()];
        let mut all = Reference { o: zeros(), lse: vec![f64::NEG_INFINITY; self.heads()], reach: zeros() };
        for (span, i, head) in each_row(spans, heads) {
            let scores = self.scores(span, i, head);
            let top = scores.iter().fold(f64::NEG_INFINITY, |top, (_, s)| top.max(*s));
            let sum: f64 = scores.iter().map(|(_, s)| (s - top).exp()).sum();
            let at = (span.row + i) * heads + head;
            all.lse[at] = top + sum.ln();
            for (row, score) in scores {
                let p = (score - all.lse[at]).exp();
                let v = self.at(&self.v, row, head * kv_heads / heads, kv_heads);
                for (x, v) in v.iter().enumerate() {
                    all.o[at * head_dim + x] += p * f64::from(*v);
                    all.reach[at * head_dim + x] += p * f64::from(v.abs());
                }
            }
        }
        all
    }

    /// The equations of `ops::attention::backward_packed`.
    pub fn gradients(&self, spans: &[Span], o: &[f32], lse: &[f32], d_o: &[f32]) -> Gradients {
        let AttentionShape { heads, kv_heads, scale, .. } = self.shape;
        let mut all = Gradients([&self.q, &self.k, &self.v].map(|x| Gradient::zeros(x.len())));
        let Gradients([dq, dk, dv]) = &mut all;
        for (span, i, head) in each_row(spans, heads) {
            let (row, of_group) = (span.row + i, head * kv_heads / heads);
            let [q, o, d_o] = [&self.q[..], o, d_o].map(|x| self.at(x, row, head, heads));
            let delta = dot(o, d_o);
            for (key, score) in self.scores(span, i, head) {
                let [k, v] = [&self.k[..], &self.v[..]].map(|x| self.at(x, key, of_group, kv_heads));
                let p = (score - f64::from(lse[row * heads + head])).exp();
                let ds = f64::from(scale) * p * (dot(d_o, v) - delta);
                dq.add(row * heads + head, ds, k);
                dk.add(key * kv_heads + of_group, ds, q);
                dv.add(key * kv_heads + of_group, p, d_o);
            }
        }
        all
    }
}

fn each_row(spans: &[Span], heads: usize) -> impl Iterator<Item = (&Span, usize, usize)> {
    spans.iter().flat_map(move |span| (0..span.tokens * heads).map(move |i| (span, i / heads, i % heads)))
}

/// No error is beyond its bound.
fn are_near(what: &str, got: &[f32], want: &[f64], bound: impl Fn(usize) -> f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(*got) - want).abs() <= bound(i), "{what}[{i}] = {got}, not {want}");
    }
}

/// Rows of a head by their norm, in which roundings make up for each other: each p and each value of o is off by at most 2^-9
/// of itself, and by 0.6 of that in the mean of squares, so 2^-8 is twice what both come to. A row that is one part in a
/// hundred too large is seen.
fn rows_hold(what: &str, got: &[f32], want: &[f64], head_dim: usize) {
    for (i, (got, want)) in got.chunks(head_dim).zip(want.chunks(head_dim)).enumerate() {
        let norm = |squares: &mut dyn Iterator<Item = f64>| squares.map(|x| x * x).sum::<f64>().sqrt();
        let error = norm(&mut got.iter().zip(want).map(|(got, want)| f64::from(*got) - want));
        let size = norm(&mut want.iter().copied());
        assert!(error <= ROUNDING * size + F32, "{what}: row {i} is {error} off, of {size}");
    }
}

impl Reference {
    /// Some of its rows.
    pub fn of_rows(&self, rows: &[usize], shape: &AttentionShape) -> Self {
        let of = |x: &[f64], width| gathered(x, rows, width);
        let width = shape.heads * shape.head_dim;
        Self { o: of(&self.o, width), lse: of(&self.lse, shape.heads), reach: of(&self.reach, width) }
    }

    pub fn holds(&self, what: &str, o: &[f32], lse: &[f32]) {
        self.o_holds(what, o);
        are_near(&format!("{what}: lse"), lse, &self.lse, |i| 4e-6 * (1.0 + self.lse[i].abs()));
    }

    /// Probabilities are rounded to bf16, and o too; all else is f32.
    pub fn o_holds(&self, what: &str, o: &[f32]) {
        are_near(&format!("{what}: o"), o, &self.o, |i| ROUNDING * (self.reach[i] + self.o[i].abs()) + F32);
        rows_hold(what, o, &self.o, o.len() / self.lse.len());
    }
}

impl Gradient {
    fn zeros(len: usize) -> Self {
        Self { values: vec![0.0; len], reach: vec![0.0; len] }
    }

    /// Adds x times `by` to the head `at`.
    fn add(&mut self, at: usize, by: f64, x: &[f32]) {
        for (i, value) in x.iter().enumerate() {
            let term = by * f64::from(*value);
            self.values[at * x.len() + i] += term;
            self.reach[at * x.len() + i] += term.abs();
        }
    }
}

impl Gradients {
    /// One factor of each term is rounded to bf16, and the sum too; all else is f32.
    pub fn hold(&self, what: &str, got: &[Vec<f32>; 3]) {
        for ((Gradient { values, reach }, got), name) in self.0.iter().zip(got).zip(["dq", "dk", "dv"]) {
            let bound = |i: usize| ROUNDING * (reach[i] + values[i].abs()) + 2.0 * F32;
            are_near(&format!("{what}: {name}"), got, values, bound);
        }
    }
}
