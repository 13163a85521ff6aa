//! Rotary position embedding, half-split order as in Hugging Face models (arXiv:2104.09864).

use crate::device::cuda::Arg;
use crate::device::cuda::rope::Table;
use crate::device::{Device, cpu, cuda};
use crate::tensor::{Indices, Tensor};
use std::sync::OnceLock;

/// cos and sin of every position up to the context length; `inverse_frequencies` (e/2) already hold any scaling,
/// and `attention_factor` multiplies both (1 for most models).
#[derive(Debug)]
pub struct RopeTable {
    pub head_dim: usize,
    /// [position][e/2]
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
    /// The same for the kernels of a GPU, from the first use on.
    on_gpu: OnceLock<Table>,
}

impl RopeTable {
    /// The angle is the f32 product position * inverse frequency, as in `transformers`; its cos and sin are rounded
    /// once, from f64.
    pub fn new(inverse_frequencies: &[f32], attention_factor: f32, positions: usize) -> Self {
        let angles = (0..positions).flat_map(|at| inverse_frequencies.iter().map(move |f| f64::from(at as f32 * f)));
        let (sin, cos) = angles
            .map(|angle| {
                let (sin, cos) = angle.sin_cos();
                (sin as f32 * attention_factor, cos as f32 * attention_factor)
            })
            .unzip();
        Self { head_dim: 2 * inverse_frequencies.len(), cos, sin, on_gpu: OnceLock::new() }
    }

    fn cuda(&self) -> &Table {
        self.on_gpu.get_or_init(|| Table::new(self.head_dim, &self.cos, &self.sin))
    }

    /// Where the kernels of a GPU read it.
    pub fn place(&self) -> Arg {
        self.cuda().place()
    }

    /// Positions that the table holds.
    pub fn positions(&self) -> usize {
        if self.head_dim == 0 { 0 } else { self.cos.len() / (self.head_dim / 2) }
    }
}

/// In place on x (t, heads*e): for each head, with i < e/2, (x[i], x[i+e/2]) is rotated by the angle of its position.
///
/// # Panics
/// If the shapes do not fit, or a position is not in the table.
pub fn forward(x: &mut Tensor, positions: &Indices, table: &RopeTable) {
    rotate(x, positions, table, false);
}

/// The transpose: rotates dx back, in place.
///
/// # Panics
/// As `forward`.
pub fn backward(dx: &mut Tensor, positions: &Indices, table: &RopeTable) {
    rotate(dx, positions, table, true);
}

fn rotate(x: &mut Tensor, positions: &Indices, table: &RopeTable, back: bool) {
    let (rows, width, half) = (x.rows(), x.width(), table.head_dim / 2);
    assert!(
        rows == positions.len() && half > 0 && width.is_multiple_of(2 * half),
        "rope: x is {rows} x {width}, for {} positions and head dim {}",
        positions.len(),
        table.head_dim
    );
    if let Some(&last) = positions.iter().max() {
        assert!((last as usize) < table.positions(), "rope: position {last} of a table of {}", table.positions());
    }
    match x.device() {
        Device::Cpu => {
            let angles = cpu::rope::Angles { half, cos: &table.cos, sin: &table.sin, back };
            cpu::rope::rotate(x.data_mut(), width, positions, angles);
        }
        Device::Cuda => {
            let rotate = if back { cuda::rope::backward } else { cuda::rope::forward };
            rotate(x.cuda_mut(), None, rows, positions.cuda(), table.cuda());
        }
    }
}
