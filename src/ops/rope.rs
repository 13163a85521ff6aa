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

/// In place on q (t, heads*e) and k (t, kv_heads*e): in each head x, with i < e/2, (x[i], x[i+e/2]) is rotated by the angle of
/// its row's position.
///
/// # Panics
/// If the shapes do not fit, or a position is not in the table.
pub fn forward(q: &mut Tensor, k: &mut Tensor, positions: &Indices, table: &RopeTable) {
    rotate([q, k], positions, table, false);
}

/// The transpose: rotates dq and dk back, in place.
///
/// # Panics
/// As `forward`.
pub fn backward(dq: &mut Tensor, dk: &mut Tensor, positions: &Indices, table: &RopeTable) {
    rotate([dq, dk], positions, table, true);
}

fn rotate(both: [&mut Tensor; 2], positions: &Indices, table: &RopeTable, back: bool) {
    let (rows, half) = (positions.len(), table.head_dim / 2);
    for (name, x) in ["q", "k"].into_iter().zip(&both) {
        assert!(
            x.rows() == rows && half > 0 && x.width().is_multiple_of(2 * half),
            "rope: {name} is {} x {}, for {rows} positions and head dim {}",
            x.rows(),
            x.width(),
            table.head_dim
        );
    }
    if let Some(last) = positions.largest() {
        assert!((last as usize) < table.positions(), "rope: position {last} of a table of {}", table.positions());
    }
    match both[0].device() {
        Device::Cpu => {
            let angles = cpu::rope::Angles { half, cos: &table.cos, sin: &table.sin, back };
            for x in both {
                let width = x.width();
                cpu::rope::rotate(x.data_mut(), width, positions, angles);
            }
        }
        Device::Cuda => {
            let rotate = if back { cuda::rope::backward } else { cuda::rope::forward };
            let [q, k] = both.map(Tensor::cuda_mut);
            rotate(q, Some(k), rows, positions.cuda(), table.cuda());
        }
    }
}
