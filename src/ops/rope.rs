//! Rotary position embedding, half-split order as in Hugging Face models (arXiv:2104.09864).

use crate::tensor::Tensor;

/// cos and sin of every position up to the context length; `inverse_frequencies` (e/2) already hold any scaling,
/// and `attention_factor` multiplies both (1 for most models).
#[derive(Clone, Debug)]
pub struct RopeTable {
    pub head_dim: usize,
    /// [position][e/2]
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
}

impl RopeTable {
    pub fn new(inverse_frequencies: &[f32], attention_factor: f32, positions: usize) -> Self {
        let _ = (inverse_frequencies, attention_factor, positions);
        todo!()
    }
}

/// In place on x (t, heads*e): for each head, with i < e/2, (x[i], x[i+e/2]) is rotated by the angle of its position.
pub fn forward(x: &mut Tensor, positions: &[u32], table: &RopeTable) {
    let _ = (x, positions, table);
    todo!()
}

/// The transpose: rotates dx back, in place.
pub fn backward(dx: &mut Tensor, positions: &[u32], table: &RopeTable) {
    let _ = (dx, positions, table);
    todo!()
}
