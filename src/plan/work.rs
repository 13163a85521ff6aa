//! What the phases of a step need at least, on one rank: multiply-adds (two FLOPs each) and bytes.
//!
//! With t tokens, L layers and this rank's d, q, kv, f, v (`shape::Dims`), and p the (query, key) pairs that the causal
//! mask and a window leave:
//!
//! | part | forward | with backward | with recomputation |
//! |---|---|---|---|
//! | products | 2 t L (2 d q + 2 d kv + 3 d f) | x 3 | x 4 |
//! | attention | 4 q p L | x 3 | x 4 |
//! | head | 2 rows d v | x 3 | x 3 |
//!
//! Bytes: the weights once a forward (and twice more a backward), keys and values that decoding reads, and what AdamW
//! reads and writes. Norms, rotations and softmax count nothing: what they take is part of the efficiency.

use super::shape::Dims;
use std::ops::{Add, Mul};

/// Work of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// FLOPs of products with weights.
    pub products: f64,
    /// FLOPs of attention.
    pub attention: f64,
    pub bytes: f64,
}

impl Work {
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

impl Mul<f64> for Work {
    type Output = Self;
    fn mul(self, times: f64) -> Self {
        Self { products: self.products * times, attention: self.attention * times, bytes: self.bytes * times }
    }
}

/// (query, key) pairs of `tokens` queries behind `past` keys: query i sees past + i + 1 keys, at most `window`.
pub fn pairs(past: usize, tokens: usize, window: Option<usize>) -> f64 {
    let sum = |n: usize| n as f64 * (n as f64 + 1.0) / 2.0;
    let Some(window) = window else { return sum(past + tokens) - sum(past) };
    let growing = window.clamp(past, past + tokens);
    sum(growing) - sum(past) + (past + tokens - growing) as f64 * window as f64
}

/// The products of all layers on `tokens` tokens.
pub fn body(dims: &Dims, tokens: f64) -> Work {
    Work { products: 2.0 * tokens * (dims.layers * dims.layer_elements()) as f64, ..Work::default() }
}

/// The share of a layer's products that is computed again where only its input was kept: all but the MLP's last.
pub fn again(dims: &Dims) -> f64 {
    1.0 - (dims.d * dims.f) as f64 / dims.layer_elements() as f64
}

/// Attention of all layers over `rows` sequences of `tokens` behind `past`, forward.
pub fn attention(dims: &Dims, rows: f64, past: usize, tokens: usize) -> Work {
    let pairs: f64 = dims.windows.iter().map(|window| pairs(past, tokens, *window)).sum();
    Work { attention: 4.0 * dims.q() as f64 * pairs * rows, ..Work::default() }
}

/// The vocabulary's head on `rows` rows.
pub fn head(dims: &Dims, rows: f64) -> Work {
    Work { products: 2.0 * rows * (dims.d * dims.v) as f64, ..Work::default() }
}

/// Bytes of the weights that a forward reads, at `element` bytes each; with the head or without.
pub fn weight_bytes(dims: &Dims, element: usize, with_head: bool) -> f64 {
    let head = if with_head { dims.d * dims.v } else { 0 };
    ((dims.layers * dims.layer_elements() + head) * element) as f64
}

/// Bytes of keys and values that one token behind `past` others reads, over all layers, at `element` bytes each.
pub fn cached_bytes(dims: &Dims, past: f64, element: usize) -> f64 {
    let seen: f64 = dims.windows.iter().map(|window| window.map_or(past, |w| past.min(w as f64))).sum();
    seen * (2 * dims.kv() * element) as f64
}

/// Bytes that one update passes over, for `own` elements of state and `len` of gradient: the gradient is written (zeros)
/// and read (norm), then gradient, moments and weights are read and the last two written.
pub fn update_bytes(own: f64, len: f64, bf16: bool) -> f64 {
    let weights = if bf16 { 10.0 } else { 8.0 };
    4.0 * len + own * (4.0 + 4.0 + 16.0 + weights)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_those_of_the_causal_mask_and_of_a_window() {
        assert_eq!(pairs(0, 4, None), 1.0 + 2.0 + 3.0 + 4.0);
        assert_eq!(pairs(3, 2, None), 4.0 + 5.0);
        assert_eq!(pairs(3, 2, Some(2)), 2.0 + 2.0);
        assert_eq!(pairs(0, 3, Some(2)), 1.0 + 2.0 + 2.0);
        assert_eq!(pairs(0, 3, Some(9)), pairs(0, 3, None));
    }
}
