//! y[t] = W[token[t]], for W in row or panel layout (tied embeddings share the head's panels), f32 or bf16.

use crate::tensor::{Tensor, Weight, WeightMut};

pub fn forward(tokens: &[u32], w: Weight, y: &mut Tensor) {
    let _ = (tokens, w, y);
    todo!()
}

/// dW[token[t]] += dy[t], rows of one token summed in ascending t.
pub fn backward(tokens: &[u32], dy: &Tensor, dw: &mut WeightMut) {
    let _ = (tokens, dy, dw);
    todo!()
}
