//! The work of a model: multiply-adds, counted as two FLOPs each, and bytes. The only place that derives them from an
//! architecture.
//!
//! With t tokens, d width, q = heads x head dim, kv = key/value heads x head dim, f MLP width (of a token's experts
//! together), E experts, v vocabulary, and p the (query, key) pairs that the causal mask (and a window) keeps, for each
//! layer:
//!
//! | part | forward | forward and backward |
//! |---|---|---|
//! | GEMM | 2 t (d q + 2 d kv + q d + 3 d f + d E) | x 3 |
//! | attention | 4 q p (scores, and values by weights) | x 3 (dP, dV, dQ, dK; recomputed scores are not counted) |
//! | head | 2 rows d v | x 3 |
//!
//! Norms, rotations, softmax, sampling and the optimizer are not counted. Bytes are the weights, once for each forward,
//! and the keys and values that attention reads.
//!
//! `forward` and its relatives count pairs exactly, with each query's own key: t (t + 1) / 2 without a window. `Cost`
//! counts t^2 / 2 in integers, for dealing rows to ranks and for the model FLOPs of a step.

use super::arch::Arch;
use super::block_spec::{AttentionSpec, BlockSpec, Feed, Mixer, SharedName};
use super::part::{Cut, TensorPart};
use crate::ops::{attention, delta};
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

/// The elements of a layer's matrices that `tokens` tokens read, if their experts differ as far as they can.
pub fn layer_elements(arch: &Arch, block: &BlockSpec, tokens: usize) -> usize {
    let d = arch.width;
    let mixer = match &block.mixer {
        Mixer::Attention(attention) => attention.elements(d),
        Mixer::Delta(delta) => d * (2 * delta.keys().size() + 3 * delta.values().size() + 2 * delta.value_heads),
    };
    let feed = match &block.feed {
        Feed::Dense(mlp) => 3 * d * mlp.width,
        Feed::Experts(mixture) => {
            let read = mixture.count.min(tokens.saturating_mul(mixture.top_k));
            let gate = usize::from(mixture.shared.is_some_and(|shared| shared.name == SharedName::Gated));
            d * (mixture.count + gate) + 3 * d * (mixture.width * read + block.feed.shared_width())
        }
    };
    mixer + feed
}

/// The elements of all layers' matrices for a token. Each is a multiply-add.
pub fn elements(arch: &Arch) -> usize {
    elements_read(arch, 1)
}

/// The elements of all layers' matrices that `tokens` tokens read.
fn elements_read(arch: &Arch, tokens: usize) -> usize {
    arch.blocks.iter().map(|block| layer_elements(arch, block, tokens)).sum()
}

/// The most values for a token that a forward without a backward holds at a time, on a rank of the tensor axis.
pub fn forward_values(arch: &Arch, part: TensorPart) -> usize {
    let of_block = |block: &BlockSpec| {
        let mixer = match &block.mixer {
            Mixer::Attention(attention) => {
                // Gates, or heads in two orders.
                let is_more = attention.has_gate || attention.latent.is_some();
                let queries = attention.queries().len(part) * if is_more { 3 } else { 1 };
                2 * (queries + attention.keys().len(part))
            }
            // Projections, convolutions and normed heads, and the rule's result, gated and not.
            Mixer::Delta(delta) => {
                6 * delta.keys().len(part) + 5 * delta.values().len(part) + 4 * delta.heads().len(part)
            }
        };
        let [inner, shared] = [block.feed.width(), block.feed.shared_width()].map(|width| Cut::Even(width).len(part));
        let feed = match &block.feed {
            Feed::Dense(_) => 3 * inner,
            Feed::Experts(mixture) => mixture.count + mixture.top_k * (3 * inner + arch.width) + 4 * shared,
        };
        3 * arch.width + mixer + feed
    };
    arch.blocks.iter().map(of_block).max().unwrap_or_default()
}

/// One forward of sequences of (past, new) tokens, whose head (if any) sees `rows` rows.
pub fn forward(arch: &Arch, dtype: DType, sequences: &[(usize, usize)], rows: usize) -> Work {
    let tokens: usize = sequences.iter().map(|s| s.1).sum();
    let (body, head) = (elements(arch), arch.width * arch.vocabulary);
    let weights = elements_read(arch, tokens) + if rows > 0 { head } else { 0 };
    let past: usize = sequences.iter().map(|s| s.0).sum();
    let cached = past * arch.attentions().map(AttentionSpec::cached_values).sum::<usize>();
    let pairs = |window| sequences.iter().map(|&(past, new)| attention::pairs(past, new, window)).sum::<f64>();
    Work {
        products: 2.0 * (tokens * body + rows * head) as f64,
        attention: arch.attentions().map(|layer| attention::flops(layer.q_width(), pairs(layer.window))).sum::<f64>()
            + arch.deltas().map(|layer| delta::flops(&layer.shape(TensorPart::whole()), tokens)).sum::<f64>(),
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

/// The cost of a model's rows: a tokens + b tokens^2. A layer's attention window limits the square.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cost {
    /// The width of the hidden state.
    width: usize,
    /// Multiply-adds per token of all matrices, divided by the width.
    linear: usize,
    /// (multiply-adds of a query with a key and its value, divided by the width, in halves: half of all pairs are
    /// masked; the maximum number of keys that a query sees). The layers with the same limit are summed.
    windows: Vec<(usize, usize)>,
}

impl Cost {
    /// The cost of a forward. A backward costs about twice as much at any length.
    pub fn from_arch(arch: &Arch) -> Self {
        let width = arch.width;
        let linear = (elements(arch) + width * arch.vocabulary) / width;
        let mut windows: Vec<(usize, usize)> = Vec::new();
        for attention in arch.attentions() {
            let (halves, keys) = ((2 * attention.q_width()).div_ceil(width), attention.window.unwrap_or(usize::MAX));
            match windows.iter_mut().find(|(_, known)| *known == keys) {
                Some((sum, _)) => *sum += halves,
                None => windows.push((halves, keys)),
            }
        }
        Self { width, linear, windows }
    }

    /// The work of a row of `tokens`, in units of `width` multiply-adds.
    pub fn row(&self, tokens: usize) -> usize {
        let pairs = |window: usize| tokens * tokens - tokens.saturating_sub(window).pow(2);
        let attention: usize = self.windows.iter().map(|&(halves, window)| halves * pairs(window)).sum();
        self.linear * tokens + attention / 2
    }

    /// FLOPs of a forward of a row of `tokens`.
    pub fn flops(&self, tokens: usize) -> f64 {
        2.0 * (self.row(tokens) * self.width) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(more: &str) -> Cost {
        let config = format!(
            r#"{{"model_type": "mistral", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632,
                "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4, "sliding_window": {more}}}"#
        );
        let config: serde_json::Value = serde_json::from_str(&config).expect("JSON");
        Cost::from_arch(&Arch::from_config(config.as_object().expect("an object")).expect("a model"))
    }

    #[test]
    fn a_row_costs_its_tokens_and_its_attention_pairs() {
        let (full, cut) = (cost("null"), cost("100"));
        let matrices = 22 * (2 * 2048 + 2 * 256 + 3 * 5632) + 32000;
        assert_eq!(full.row(10), matrices * 10 + 22 * 100);
        assert_eq!(cut.row(10), full.row(10));
        assert_eq!(cut.row(150), matrices * 150 + 22 * (150 * 150 - 50 * 50));
    }
}
