//! Log-probabilities over a large vocabulary: 4096 tokens, hidden size 512, vocabulary 151936. It measures seconds, and
//! memory in addition to the weights and the input.

use super::measure::Meter;
use super::models::tokens;
use crate::error::Result;
use crate::model::cost::Work;
use crate::ops::linear_logprob;
use crate::plan::synthetic::{Matrix, filled};
use crate::sys::memory;
use crate::tensor::Layout;
use crate::tensor::arena;

const TOKENS: usize = 4096;
const HIDDEN: usize = 512;
const VOCABULARY: usize = 151_936;

pub fn run(meter: &mut Meter) -> Result<()> {
    let matrix = Matrix::new(VOCABULARY, HIDDEN, meter.dtype);
    let (hidden, weight) = (filled(TOKENS, HIDDEN), matrix.weight());
    let targets = tokens(TOKENS, 0, VOCABULARY);
    let mut logprobs = vec![0.0; TOKENS];
    // One call before the timer and its buffers, for its memory.
    let (arena_before, resident_before) = (arena::usage(), memory::peak_bytes());
    linear_logprob::forward(&hidden, weight, &targets, 1.0, &mut logprobs, &mut []);
    let arena_mb = 1e-6 * arena::usage().peak.saturating_sub(arena_before.in_use) as f64;
    let resident_mb = 1e-6 * memory::peak_bytes().saturating_sub(resident_before) as f64;
    let measured = meter.long(|_| {
        linear_logprob::forward(&hidden, weight, &targets, 1.0, &mut logprobs, &mut []);
        Ok(())
    })?;
    let bytes = (Layout::Panel.len(VOCABULARY, HIDDEN) * meter.dtype.bytes()) as f64;
    let cost = Work::from_bytes(bytes, 2.0 * (TOKENS * HIDDEN * VOCABULARY) as f64);
    let more = [("arena_beyond_mb", arena_mb), ("resident_beyond_mb", resident_mb)];
    meter.show(&format!("logprobs {TOKENS} x {HIDDEN} x {VOCABULARY}"), &measured, Some(TOKENS), cost, &more);
    meter.show_peaks(&measured);
    Ok(())
}
