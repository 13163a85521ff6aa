//! Micro-batches of experience with everything that their losses read.

use crate::config::Config;
use crate::config::ppo::{Aggregation, Correction};
use crate::experience::Experience;
use crate::learn::packed::PackedRow;
use crate::learn::sequence_shard::select;
use crate::loss::aggregation::{self, Totals};
use crate::loss::correction;
use crate::loss::policy::PolicyTokens;
use std::ops::Range;

/// The response tokens of a minibatch, over all ranks.
pub(super) fn totals(samples: &[&Experience]) -> Totals {
    let mut totals = Totals::default();
    for sample in samples {
        totals.add_mask(&sample.mask);
    }
    totals
}

pub(super) fn lengths(samples: &[&Experience]) -> Vec<usize> {
    samples.iter().map(|sample| sample.length()).collect()
}

/// What the actor's loss reads, flat over the response tokens of one packed row.
#[derive(Default)]
pub(super) struct PolicyBatch {
    pub row: PackedRow,
    pub old_logprobs: Vec<f32>,
    ref_logprobs: Vec<f32>,
    advantages: Vec<f32>,
    factors: Vec<f32>,
    weights: Vec<f32>,
}

impl PolicyBatch {
    pub fn new(config: &Config, samples: &[&Experience], totals: Totals) -> Self {
        let ppo = &config.ppo;
        let mut batch = Self { row: PackedRow::new(), ..Self::default() };
        for sample in samples {
            let response = &sample.response;
            batch.row.push(&sample.tokens(), sample.prompt.tokens.len());
            batch.old_logprobs.extend_from_slice(&response.logprobs);
            batch.ref_logprobs.extend_from_slice(&sample.ref_logprobs);
            batch.advantages.extend_from_slice(&sample.advantages);
            let (by, longest) = (ppo.aggregation_in_force(), config.rollout.response_tokens_max);
            aggregation::weights(by, &sample.mask, totals, longest, &mut batch.weights);
            if ppo.correction != Correction::None {
                let range = [ppo.correction_low, ppo.correction_high];
                let (old, drawn) = (&response.logprobs, &response.sample_logprobs);
                correction::factors(ppo.correction, range, old, drawn, &sample.mask, &mut batch.factors);
            }
        }
        batch
    }

    /// What belongs to the tokens that `part` of the row predicts; without the row itself.
    pub fn part(&self, part: &PackedRow) -> Self {
        Self {
            row: PackedRow::default(),
            old_logprobs: select(part, &self.old_logprobs),
            ref_logprobs: select(part, &self.ref_logprobs),
            advantages: select(part, &self.advantages),
            factors: select(part, &self.factors),
            weights: select(part, &self.weights),
        }
    }

    /// The slices of tokens `range` with the policy's current numbers.
    pub fn tokens<'a>(&'a self, range: Range<usize>, logprobs: &'a [f32], entropy: &'a [f32]) -> PolicyTokens<'a> {
        let part = |x: &'a [f32]| if x.is_empty() { x } else { &x[range.clone()] };
        PolicyTokens {
            logprobs,
            entropy,
            old_logprobs: part(&self.old_logprobs),
            advantages: part(&self.advantages),
            ref_logprobs: part(&self.ref_logprobs),
            factors: part(&self.factors),
            weights: part(&self.weights),
        }
    }
}

/// What the critic's loss reads.
#[derive(Default)]
pub(super) struct ValueBatch {
    pub row: PackedRow,
    pub returns: Vec<f32>,
    pub old_values: Vec<f32>,
    pub weights: Vec<f32>,
}

impl ValueBatch {
    pub fn new(samples: &[&Experience], totals: Totals) -> Self {
        let mut batch = Self { row: PackedRow::new(), ..Self::default() };
        for sample in samples {
            batch.row.push(&sample.tokens(), sample.prompt.tokens.len());
            batch.returns.extend_from_slice(&sample.returns);
            batch.old_values.extend_from_slice(&sample.values);
            // A mean over tokens, whatever the policy's aggregation.
            aggregation::weights(Aggregation::Token, &sample.mask, totals, 1, &mut batch.weights);
        }
        batch
    }
}
