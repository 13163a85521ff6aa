//! What a piece of work needs at least: multiply-adds, counted two FLOPs each, and bytes.
//!
//! With t tokens, d width, L layers, q = heads x head dim, kv = key/value heads x head dim, f MLP width, v vocabulary,
//! and p the (query, key) pairs that the causal mask (and a window) leaves:
//!
//! | part | forward | forward and backward |
//! |---|---|---|
//! | products | 2 t L (d q + 2 d kv + q d + 3 d f) | x 3 |
//! | attention | 4 q p L (scores, and values by weights) | x 3 (dP, dV, dQ, dK; scores again are not counted) |
//! | head | 2 rows d v | x 3 |
//!
//! Norms, rotations, softmax, sampling and the optimizer count nothing. Bytes are the weights once for each forward
//! and the keys and values that attention reads.

use crate::model::Arch;
use crate::tensor::DType;
use std::ops::{Add, AddAssign, Mul};

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// FLOPs of products with weights: bf16 where the weights are.
    pub products: f64,
    /// FLOPs of attention: f32.
    pub attention: f64,
    pub bytes: f64,
}

impl Cost {
    pub fn flops(&self) -> f64 {
        self.products + self.attention
    }
}

impl Add for Cost {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            products: self.products + other.products,
            attention: self.attention + other.attention,
            bytes: self.bytes + other.bytes,
        }
    }
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Mul<f64> for Cost {
    type Output = Self;
    fn mul(self, times: f64) -> Self {
        Self { products: self.products * times, attention: self.attention * times, bytes: self.bytes * times }
    }
}

/// The elements of a layer's matrices.
fn layer_elements(arch: &Arch) -> usize {
    let (d, q, kv, f) = (arch.width, arch.q_width(), arch.kv_width(), arch.mlp_width);
    2 * d * q + 2 * d * kv + 3 * d * f
}

/// Pairs of `tokens` queries behind `past` keys: query i sees past + i + 1 keys, at most `window`.
pub fn pairs(past: usize, tokens: usize, window: Option<usize>) -> usize {
    (1..=tokens).map(|i| (past + i).min(window.unwrap_or(usize::MAX))).sum()
}

/// FLOPs of attention over all layers, for sequences of (past, new) tokens.
fn attention(arch: &Arch, sequences: &[(usize, usize)]) -> f64 {
    let pairs: usize = arch
        .windows
        .iter()
        .map(|window| sequences.iter().map(|&(past, new)| pairs(past, new, *window)).sum::<usize>())
        .sum();
    4.0 * (arch.q_width() * pairs) as f64
}

/// One forward of sequences of (past, new) tokens, whose head (if any) sees `rows` rows.
pub fn forward(arch: &Arch, dtype: DType, sequences: &[(usize, usize)], rows: usize) -> Cost {
    let tokens: usize = sequences.iter().map(|s| s.1).sum();
    let body = arch.layers * layer_elements(arch);
    let head = arch.width * arch.vocabulary;
    let weights = body + if rows > 0 { head } else { 0 };
    let cached: usize = sequences.iter().map(|s| s.0).sum::<usize>() * 2 * arch.kv_width() * arch.layers;
    Cost {
        products: 2.0 * (tokens * body + rows * head) as f64,
        attention: attention(arch, sequences),
        bytes: (weights * dtype.bytes() + cached * size_of::<f32>()) as f64,
    }
}

/// Forward and backward of the same.
pub fn training(arch: &Arch, dtype: DType, sequences: &[(usize, usize)], rows: usize) -> Cost {
    forward(arch, dtype, sequences, rows) * 3.0
}

/// Sampling `new` tokens behind each of `batch` prompts: the prompts in one forward, then a forward a token but for the
/// last.
pub fn sampling(arch: &Arch, dtype: DType, batch: usize, prompt: usize, new: usize) -> Cost {
    let mut cost = forward(arch, dtype, &vec![(0, prompt); batch], batch);
    for past in prompt..prompt + new - 1 {
        cost += forward(arch, dtype, &vec![(past, 1); batch], batch);
    }
    cost
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_those_of_the_causal_mask_and_of_a_window() {
        assert_eq!(pairs(0, 4, None), 1 + 2 + 3 + 4);
        assert_eq!(pairs(3, 2, None), 4 + 5);
        assert_eq!(pairs(3, 2, Some(2)), 2 + 2);
        assert_eq!(pairs(0, 3, Some(2)), 1 + 2 + 2);
    }
}
