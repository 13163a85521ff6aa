//! One update: forward, cross-entropy, backward, clip, AdamW, on 8 sequences of 256 tokens.

use super::measure::{Meter, medians_ms};
use super::models::{Source, tokens};
use crate::comm::Axes;
use crate::config::job::GradientConfig;
use crate::config::optim::OptimConfig;
use crate::error::Result;
use crate::learn::packed::PackedRow;
use crate::learn::{Learner, Role};
use crate::loss::token::cross_entropy;
use crate::model::{Head, cost};
use std::ops::Range;

const BATCH: usize = 8;
const TOKENS: usize = 256;

/// A role that is trained alone.
pub fn learner(role: Role, lr: f64) -> Result<Learner> {
    let (optim, gradient) = (OptimConfig::with_lr(lr), GradientConfig::default());
    Learner::new(role.weights.device(), role, &optim, &gradient, 1_000_000, &Axes::one(), 1)?.with_masters()
}

/// Parts of an update: forward, head (and loss), backward, update (clip and AdamW).
const PARTS: [&str; 4] = ["forward_ms", "head_ms", "backward_ms", "update_ms"];

/// One update by the mean cross-entropy of the row's targets, on the learner's device; calls `done` after each part.
pub fn update(learner: &mut Learner, row: &PackedRow, mut done: impl FnMut()) -> Result<()> {
    learner.sum.begin_chunk();
    learner.sum.begin_microbatch(true);
    let weights = vec![1.0 / row.rows.len() as f32; row.rows.len()];
    let mut loss = |range: Range<usize>, l: &[f32], _: &[f32], dlogprobs: &mut [f32], _: &mut [f32]| {
        cross_entropy(l, &weights[range], dlogprobs);
    };
    learner.pass(row).run(|head| {
        done();
        head.token_loss(1.0, &mut loss);
        done();
    });
    learner.sum.end_chunk(0);
    done();
    learner.step(&Axes::one())?;
    done();
    Ok(())
}

pub fn run(meter: &mut Meter, source: &Source) -> Result<()> {
    let role = source.role("actor", Head::LanguageModel, meter.dtype)?;
    let arch = role.arch().clone();
    let mut row = PackedRow::new();
    (0..BATCH).for_each(|i| row.push(&tokens(TOKENS, i, arch.vocabulary), 1));
    let mut learner = learner(role, 1e-5)?;
    let mut parts: Vec<[f64; PARTS.len()]> = Vec::new();
    let measured = meter.long(|meter| {
        let mut at = vec![meter.now()];
        update(&mut learner, &row, || at.push(meter.now()))?;
        parts.push(std::array::from_fn(|i| at[i + 1] - at[i]));
        Ok(())
    })?;
    let cost = cost::training(&arch, meter.dtype, &[(0, TOKENS); BATCH], row.rows.len());
    let more = medians_ms(PARTS, &parts);
    meter.show(&format!("{} update {BATCH} x {TOKENS}", source.name), &measured, Some(BATCH * TOKENS), cost, &more);
    meter.show_peaks(&measured);
    Ok(())
}
