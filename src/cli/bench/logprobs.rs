//! Log-probabilities over a large vocabulary: 4096 tokens, hidden 512, vocabulary 151936; seconds, and memory beyond the
//! weights and the input.

use super::measure::Meter;
use super::models::tokens;
use crate::error::Result;
use crate::ops::linear_logprob;
use crate::plan::work::Work;
use crate::sys::memory;
use crate::tensor::arena::{self, Buffer};
use crate::tensor::{DType, Layout, Tensor, Weight, WeightSlice};

const TOKENS: usize = 4096;
const HIDDEN: usize = 512;
const VOCABULARY: usize = 151_936;

/// Values of a spread-out, repeating pattern around 0.
fn fill(values: &mut [f32], scale: f32) {
    for (i, value) in values.iter_mut().enumerate() {
        *value = scale * ((i.wrapping_mul(2_654_435_761) >> 7) % 2048) as f32 / 1024.0 - scale;
    }
}

/// # Errors
/// None.
pub fn run(meter: &mut Meter) -> Result<()> {
    let len = Layout::Panel.len(VOCABULARY, HIDDEN);
    let mut store = Buffer::scratch(len * meter.dtype.bytes() / size_of::<f32>());
    if meter.dtype == DType::Bf16 {
        // The upper halves of f32 values are bf16 values.
        for (i, pair) in bytemuck::cast_slice_mut::<f32, u16>(&mut store).iter_mut().enumerate() {
            let value = 0.04 * ((i.wrapping_mul(2_654_435_761) >> 7) % 2048) as f32 / 1024.0 - 0.04;
            *pair = (value.to_bits() >> 16) as u16;
        }
    } else {
        fill(&mut store, 0.04);
    }
    let values = if meter.dtype == DType::Bf16 {
        WeightSlice::Bf16(bytemuck::cast_slice(&store))
    } else {
        WeightSlice::F32(&store)
    };
    let weight = Weight { n: VOCABULARY, k: HIDDEN, layout: Layout::Panel, values };
    let mut hidden = Tensor::scratch(TOKENS, HIDDEN);
    fill(hidden.data_mut(), 1.0);
    let targets = tokens(TOKENS, 0, VOCABULARY);
    let mut logprobs = vec![0.0; TOKENS];
    // One call before the clock and its buffers: what memory it takes.
    let (arena_before, resident_before) = (arena::usage(), memory::peak_bytes());
    linear_logprob::forward(&hidden, weight, &targets, 1.0, &mut logprobs, &mut []);
    let arena_mb = 1e-6 * arena::usage().peak.saturating_sub(arena_before.in_use) as f64;
    let resident_mb = 1e-6 * memory::peak_bytes().saturating_sub(resident_before) as f64;
    let measured = meter.long(|_| {
        linear_logprob::forward(&hidden, weight, &targets, 1.0, &mut logprobs, &mut []);
        Ok(None)
    })?;
    let cost = Work {
        products: 2.0 * (TOKENS * HIDDEN * VOCABULARY) as f64,
        attention: 0.0,
        bytes: (len * meter.dtype.bytes()) as f64,
    };
    let more = [("arena_beyond_mb", arena_mb), ("resident_beyond_mb", resident_mb)];
    meter.show(&format!("logprobs {TOKENS} x {HIDDEN} x {VOCABULARY}"), &measured, Some(TOKENS), cost, &more);
    meter.show_peaks(&measured);
    Ok(())
}
