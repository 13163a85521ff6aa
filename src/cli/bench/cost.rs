//! The least that a workload needs: multiply-adds, counted as two FLOPs each, and bytes.
//!
//! With t tokens, d width, L layers, q = heads x head dim, kv = key/value heads x head dim, f MLP width, v vocabulary,
//! and p the (query, key) pairs that the causal mask (and a window) keeps:
//!
//! | part | forward | forward and backward |
//! |---|---|---|
//! | GEMM | 2 t L (d q + 2 d kv + q d + 3 d f) | x 3 |
//! | attention | 4 q p L (scores, and values by weights) | x 3 (dP, dV, dQ, dK; recomputed scores are not counted) |
//! | head | 2 rows d v | x 3 |
//!
//! Norms, rotations, softmax, sampling and the optimizer are not counted. Bytes are the weights, once for each forward,
//! and the keys and values that attention reads.

use crate::model::Arch;
use crate::ops::attention::pairs;
use crate::tensor::DType;
use std::ops::Add;

/// The work of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// FLOPs of GEMMs with weights.
    pub products: f64,
    /// FLOPs of attention.
    pub attention: f64,
    pub bytes: f64,
}

impl Work {
    /// Work with GEMMs only, or with no FLOPs at all.
    pub fn from_bytes(bytes: f64, flops: f64) -> Self {
        Self { products: flops, attention: 0.0, bytes }
    }

    pub fn flops(&self) -> f64 {
        self.products + self.attention
    }
}

impl Add for Work {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            products: self.products + other.products,
            attention: self.attention + other.attention,
            bytes: self.bytes + other.bytes,
        }
    }
}

fn layer_elements(arch: &Arch) -> usize {
    let (d, q, kv, f) = (arch.width, arch.q_width(), arch.kv_width(), arch.mlp_width);
    2 * d * q + 2 * d * kv + 3 * d * f
}

/// FLOPs of attention over all layers, for sequences of (past, new) tokens.
fn attention(arch: &Arch, sequences: &[(usize, usize)]) -> f64 {
    let of = |window: &Option<usize>| sequences.iter().map(|&(past, new)| pairs(past, new, *window)).sum::<f64>();
    4.0 * arch.q_width() as f64 * arch.windows.iter().map(of).sum::<f64>()
}

/// One forward of sequences of (past, new) tokens, whose head (if any) sees `rows` rows.
pub fn forward(arch: &Arch, dtype: DType, sequences: &[(usize, usize)], rows: usize) -> Work {
    let tokens: usize = sequences.iter().map(|s| s.1).sum();
    let body = arch.layers * layer_elements(arch);
    let head = arch.width * arch.vocabulary;
    let weights = body + if rows > 0 { head } else { 0 };
    let cached: usize = sequences.iter().map(|s| s.0).sum::<usize>() * 2 * arch.kv_width() * arch.layers;
    Work {
        products: 2.0 * (tokens * body + rows * head) as f64,
        attention: attention(arch, sequences),
        bytes: (weights * dtype.bytes() + cached * size_of::<f32>()) as f64,
    }
}

/// The forward and backward of the same sequences.
pub fn training(arch: &Arch, dtype: DType, sequences: &[(usize, usize)], rows: usize) -> Work {
    let once = forward(arch, dtype, sequences, rows);
    once + once + once
}

/// Sampling of `new` tokens after each of `batch` prompts: the prompts in one forward, then one forward for each token
/// except the last.
pub fn sampling(arch: &Arch, dtype: DType, batch: usize, prompt: usize, new: usize) -> Work {
    let mut cost = forward(arch, dtype, &vec![(0, prompt); batch], batch);
    for past in prompt..prompt + new - 1 {
        cost = cost + forward(arch, dtype, &vec![(past, 1); batch], batch);
    }
    cost
}
