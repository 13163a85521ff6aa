//! Tensors and matrices with synthetic values, for measuring kernels.

use crate::device::null;
use crate::model::{AttentionSpec, TensorPart};
use crate::ops::adamw::Update;
use crate::ops::attention;
use crate::ops::linear_logprob;
use crate::tensor::arena::Buffer;
use crate::tensor::{DType, Layout, Slice, Tensor, Weight, WeightMut};
use std::ops::Range;

/// A tensor (rows, width) of values in -0.5 .. 0.5.
pub fn filled(rows: usize, width: usize) -> Tensor {
    let mut x = Tensor::scratch(rows, width);
    fill(x.data_mut());
    x
}

/// Values in -0.5 .. 0.5.
pub fn fill(values: &mut [f32]) {
    for (i, value) in values.iter_mut().enumerate() {
        *value = ((i.wrapping_mul(2_654_435_761) >> 5) % 4096) as f32 / 4096.0 - 0.5;
    }
}

/// A typical update of AdamW.
pub const UPDATE: Update =
    Update { lr: 1e-6, beta1: 0.9, beta2: 0.95, eps: 1e-8, bias1: 0.1, bias2: 0.05, grad_scale: 1.0 };

/// Measures a workload, given the operation in it by its name on a null device.
pub type Measure<'a> = dyn FnMut(&'static str, &mut dyn FnMut()) + 'a;

/// Attention of a layer over `rows` sequences of `length` tokens each, packed: forward, then backward.
pub fn packed_attention(layer: &AttentionSpec, [rows, length]: [usize; 2], measure: &mut Measure) {
    let (t, shape) = (rows * length, layer.shape(TensorPart::whole()));
    let ends: Vec<usize> = (0..=rows).map(|i| i * length).collect();
    let (qw, kvw) = (layer.q_width(), layer.kv_width());
    let (q, k, v, d_o) = (filled(t, qw), filled(t, kvw), filled(t, kvw), filled(t, qw));
    let (mut o, mut lse) = (Tensor::zeros(t, qw), Tensor::zeros(t, layer.heads));
    let packed = ends.as_slice().into();
    measure(null::ATTENTION, &mut || {
        attention::forward_packed(&q, &k, &v, &packed, &shape, &mut o, &mut lse);
    });
    let (mut dq, mut dk, mut dv) = (Tensor::zeros(t, qw), Tensor::zeros(t, kvw), Tensor::zeros(t, kvw));
    measure(null::ATTENTION_BACKWARD, &mut || {
        attention::backward_packed(&q, &k, &v, &o, &lse, &d_o, &packed, &shape, &mut dq, &mut dk, &mut dv);
    });
}

/// Log-probabilities of `rows` tokens through the head (v, d) = `matrix`, without and then with gradients.
pub fn head(rows: usize, matrix: &Matrix, measure: &mut Measure) {
    let Matrix { n: v, k: d, .. } = *matrix;
    let h = filled(rows, d);
    let targets: Vec<u32> = (0..rows).map(|i| (i * 31 % v) as u32).collect();
    let (mut logprobs, mut entropy) = (vec![0.0; rows], vec![0.0; rows]);
    measure(null::HEAD, &mut || {
        linear_logprob::forward(&h, matrix.weight(), &targets, 1.0, &mut logprobs, &mut []);
    });
    let (mut dh, mut gradient) = (Tensor::zeros(rows, d), Buffer::zeros(Layout::Panel.len(v, d)));
    let mut loss = |_: Range<usize>, _: &[f32], _: &[f32], dlogprobs: &mut [f32], dentropy: &mut [f32]| {
        dlogprobs.fill(-1.0 / rows as f32);
        dentropy.fill(0.0);
    };
    measure(null::HEAD_BACKWARD, &mut || {
        let dw = WeightMut { n: v, k: d, layout: Layout::Panel, values: (&mut gradient).into() };
        let (l, e) = (&mut logprobs, &mut entropy);
        linear_logprob::forward_backward(&h, matrix.weight(), &targets, 1.0, &mut loss, l, e, &mut dh, dw);
    });
}

/// W[n][k] in panels, in either dtype.
pub struct Matrix {
    pub n: usize,
    pub k: usize,
    dtype: DType,
    store: Buffer,
}

impl Matrix {
    pub fn new(n: usize, k: usize, dtype: DType) -> Self {
        let len = Layout::Panel.len(n, k);
        let mut store = Buffer::scratch(if dtype == DType::Bf16 { len / 2 } else { len });
        match dtype {
            DType::F32 => fill(&mut store),
            // Pairs of small numbers.
            DType::Bf16 => store.fill(f32::from_bits(0x3c00_3c00)),
        }
        Self { n, k, dtype, store }
    }

    pub fn weight(&self) -> Weight<'_> {
        let values = match self.dtype {
            DType::F32 => Slice::F32(&self.store),
            DType::Bf16 => Slice::Bf16(bytemuck::cast_slice(&self.store)),
        };
        Weight { n: self.n, k: self.k, layout: Layout::Panel, values }
    }
}
