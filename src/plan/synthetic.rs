//! Tensors and matrices with made-up values, for measuring what kernels reach.

use crate::model::Arch;
use crate::ops::attention::AttentionShape;
use crate::tensor::arena::Buffer;
use crate::tensor::{DType, Layout, Slice, Tensor, Weight};

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

/// The attention of a layer.
pub fn attention_shape(arch: &Arch, window: Option<usize>) -> AttentionShape {
    let Arch { heads, kv_heads, head_dim, .. } = *arch;
    AttentionShape { heads, kv_heads, head_dim, window, scale: 1.0 / (head_dim as f32).sqrt() }
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
