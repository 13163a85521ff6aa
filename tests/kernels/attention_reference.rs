//! Attention on the GPU compared with the CPU's in f32 over the same bf16 values. tests/ops compares that with f64.

use crate::{bf16, numbers, rounded};
use rlhf_hpc::device::cpu;
use rlhf_hpc::device::cuda::attention::{self, SpanTable};
use rlhf_hpc::device::cuda::attention_backward;
use rlhf_hpc::device::cuda::{Memory, View};
use rlhf_hpc::dtype::{DType, KvDtype};
use rlhf_hpc::ops::attention::{AttentionShape, Span};

/// Half a unit in the last place of bf16, relative to the smallest number that has it.
const ROUNDING: f64 = 1.0 / 256.0;
/// The error of f32 in sums of some hundred terms of about 1.
const F32: f64 = 1e-5;

/// Values of q, k and v, rounded, and the same on the GPU.
pub struct Case {
    pub shape: AttentionShape,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    /// k and v before they are rounded to the dtype of a cache, in bf16.
    pub new: [Vec<f32>; 2],
    on_gpu: [Memory; 3],
}

pub fn shape(heads: usize, kv_heads: usize, head_dim: usize, window: Option<usize>) -> AttentionShape {
    AttentionShape {
        heads,
        kv_heads,
        head_dim,
        window,
        scale: 1.0 / (head_dim as f32).sqrt(),
        softcap: None,
        values_are_keys: false,
        kv: KvDtype::Model,
    }
}

pub fn ends(lengths: &[usize]) -> Vec<usize> {
    let mut ends = vec![0];
    for length in lengths {
        ends.push(ends[ends.len() - 1] + length);
    }
    ends
}

/// The rows `rows` of x (_, width).
pub fn gathered<T: Copy>(x: &[T], rows: &[usize], width: usize) -> Vec<T> {
    rows.iter().flat_map(|row| x[row * width..][..width].iter().copied()).collect()
}

impl Case {
    pub fn new(rows: usize, shape: AttentionShape) -> Self {
        let (of_q, of_k) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let q: Vec<f32> = numbers(1, rows * of_q).iter().map(|x| 3.0 * x).collect();
        Self::with_values([q, numbers(2, rows * of_k), numbers(3, rows * of_k)], shape)
    }

    pub fn with_values(values: [Vec<f32>; 3], shape: AttentionShape) -> Self {
        let [q, mut k, mut v] = values.map(|x| rounded(&x));
        let new = [k.clone(), v.clone()];
        if shape.kv == KvDtype::Fp8 {
            for x in [&mut k, &mut v] {
                cpu::kv_codes::round(x, shape.head_dim);
            }
        }
        let on_gpu = [&q, &k, &v].map(|x| Memory::from_values(&bf16(x)));
        Self { shape, q, k, v, new, on_gpu }
    }

    /// The values of a row of q, and of k and v.
    pub fn widths(&self) -> [usize; 3] {
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        [heads, kv_heads, kv_heads].map(|heads| heads * head_dim)
    }

    /// The case of some rows of q, and some of k and v.
    pub fn part(&self, rows: &[usize], key_rows: &[usize]) -> Self {
        let [of_q, of_k, _] = self.widths();
        let keys = |x| gathered(x, key_rows, of_k);
        Self::with_values([gathered(&self.q, rows, of_q), keys(&self.k), keys(&self.v)], self.shape)
    }

    pub fn views(&self) -> [View<'_>; 3] {
        self.on_gpu.each_ref().map(|x| x.view(DType::Bf16))
    }

    /// Rows of q, times heads.
    fn heads(&self) -> usize {
        self.q.len() / self.shape.head_dim
    }

    /// o and lse; 0 where no span covers a row.
    pub fn forward(&self, spans: &[Span]) -> (Vec<f32>, Vec<f32>) {
        let (mut o, mut lse) = (Memory::zeros(self.q.len() * 2), Memory::zeros(self.heads() * 4));
        let [q, k, v] = self.views();
        let table = SpanTable::new(spans, &self.shape);
        attention::forward(q, k, v, &table, false, o.view_mut(DType::Bf16), lse.view_mut(DType::F32));
        (o.view(DType::Bf16).to_f32(), lse.read(self.heads()))
    }

    /// dq, dk and dv as bf16; o and d_o hold bf16 values.
    pub fn backward(&self, table: &SpanTable, o: &[f32], lse: &[f32], d_o: &[f32]) -> [Vec<f32>; 3] {
        let [o, d_o] = [o, d_o].map(|x| Memory::from_values(&bf16(x)));
        let (lse, mut delta) = (Memory::from_values(lse), Memory::scratch(lse.len() * 4));
        attention_backward::delta(o.view(DType::Bf16), d_o.view(DType::Bf16), &self.shape, delta.view_mut(DType::F32));
        let [mut dq, mut dk, mut dv] = [&self.q, &self.k, &self.v].map(|x| Memory::scratch(x.len() * 2));
        let statistics = [lse.view(DType::F32), delta.view(DType::F32), d_o.view(DType::Bf16)];
        let to = [dk.view_mut(DType::Bf16), dv.view_mut(DType::Bf16)];
        let dq_to = dq.view_mut(DType::Bf16);
        attention_backward::backward(self.views(), statistics, table, [false; 2], dq_to, to);
        [dq, dk, dv].map(|x| x.view(DType::Bf16).to_f32())
    }

    /// o and lse of the CPU; 0 where no span covers a row.
    pub fn wanted(&self, spans: &[Span]) -> (Vec<f32>, Vec<f32>) {
        let (mut o, mut lse) = (vec![0.0; self.q.len()], vec![0.0; self.heads()]);
        cpu::attention::forward_rows(&self.q, &self.k, &self.v, spans, false, &self.shape, &mut o, &mut lse);
        (o, lse)
    }

    /// Compares o and lse with the CPU's.
    pub fn assert_forward_near(&self, what: &str, spans: &[Span], o: &[f32], lse: &[f32]) {
        let (want_o, want_lse) = self.wanted(spans);
        self.results_are_near(what, [o, lse], [&want_o, &want_lse]);
    }

    /// o and lse.
    pub fn results_are_near(&self, what: &str, got: [&[f32]; 2], want: [&[f32]; 2]) {
        self.are_near(&format!("{what}: o"), got[0], want[0], ROUNDING);
        for (i, (got, want)) in got[1].iter().zip(want[1]).enumerate() {
            assert!((got - want).abs() <= 4e-6 * (1.0 + want.abs()), "{what}: lse[{i}] = {got}, not {want}");
        }
    }

    /// Compares dq, dk and dv with the CPU's for the same o, lse and d_o.
    pub fn gradients_hold(&self, what: &str, spans: &[Span], slopes: [&[f32]; 3], got: &[Vec<f32>; 3]) {
        let mut want = [&self.q, &self.k, &self.v].map(|x| vec![0.0; x.len()]);
        let to = want.each_mut().map(|x| &mut x[..]);
        cpu::attention::backward_rows([&self.q, &self.k, &self.v], slopes, spans, false, &self.shape, to);
        let [dq, dk, dv] = got;
        self.gradients_are_near(what, &[("dq", dq, &want[0]), ("dk", dk, &want[1]), ("dv", dv, &want[2])]);
    }

    /// Names of gradients, their values, and the expected values.
    pub fn gradients_are_near(&self, what: &str, all: &[(&str, &[f32], &[f32])]) {
        for (name, got, want) in all {
            // Terms of a gradient cancel: the ds of a row of q add up to 0.
            self.are_near(&format!("{what}: {name}"), got, want, 2.0 * ROUNDING);
        }
    }

    /// Compares rows of a head by their norm, in which roundings cancel out. Each p and each result is off by at most
    /// 2^-9 of itself, and by 0.6 of that in the mean of squares. So 2^-8 is twice the sum of both. A row that is one
    /// percent too large is detected.
    fn are_near(&self, what: &str, got: &[f32], want: &[f32], share: f64) {
        assert_eq!(got.len(), want.len(), "{what}");
        let e = self.shape.head_dim;
        for (i, (got, want)) in got.chunks(e).zip(want.chunks(e)).enumerate() {
            let norm =
                |squares: &mut dyn Iterator<Item = f32>| squares.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
            let error = norm(&mut got.iter().zip(want).map(|(got, want)| got - want));
            let size = norm(&mut want.iter().copied());
            assert!(error <= share * size + F32, "{what}: row {i} is {error} off, of {size}");
        }
    }
}
