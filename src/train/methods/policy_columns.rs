//! The inputs of the policy loss, token by token.

use crate::comm::Group;
use crate::config::Config;
use crate::config::method::ppo::{Correction, PpoConfig};
use crate::experience::Experience;
use crate::learn::packed::PackedRow;
use crate::loss::aggregation::{self, Totals};
use crate::loss::correction;
use crate::loss::policy::{PolicySums, PolicyTokens, policy_loss};
use std::ops::Range;

/// One value for each token that a packed row predicts.
pub fn column(samples: &[&Experience], rows: &[usize], of: fn(&Experience) -> &[f32]) -> Vec<f32> {
    rows.iter().flat_map(|&i| of(samples[i])).copied().collect()
}

/// The inputs of the policy loss for each token that a row predicts. Columns that do not exist are empty.
pub struct PolicyColumns {
    pub old_logprobs: Vec<f32>,
    ref_logprobs: Vec<f32>,
    advantages: Vec<f32>,
    /// Importance weights.
    factors: Vec<f32>,
    /// Weights of the tokens in the loss.
    pub weights: Vec<f32>,
}

impl PolicyColumns {
    /// The columns of the samples `rows` of a minibatch with these totals.
    pub fn new(config: &Config, samples: &[&Experience], rows: &[usize], totals: Totals) -> Self {
        let (ppo, longest) = (&config.ppo, config.rollout.response_tokens_max);
        let (mut factors, mut weights) = (Vec::new(), Vec::new());
        for Experience { mask, response, .. } in rows.iter().map(|&i| samples[i]) {
            aggregation::weights(ppo.aggregation_in_force(), mask, totals, longest, &mut weights);
            if ppo.correction != Correction::None {
                let range = [ppo.correction_low, ppo.correction_high];
                let (old, sampled) = (&response.logprobs, &response.sample_logprobs);
                correction::factors(ppo.correction, range, old, sampled, mask, &mut factors);
            }
        }
        let column = |of| column(samples, rows, of);
        Self {
            old_logprobs: column(|s| &s.response.logprobs),
            ref_logprobs: column(|s| &s.ref_logprobs),
            advantages: column(|s| &s.advantages),
            factors,
            weights,
        }
    }

    /// The columns of the tokens that the part `row` predicts.
    #[must_use]
    pub fn select(&self, row: &PackedRow) -> Self {
        let Self { old_logprobs, ref_logprobs, advantages, factors, weights } = self;
        let all = [old_logprobs, ref_logprobs, advantages, factors, weights];
        let [old_logprobs, ref_logprobs, advantages, factors, weights] = all.map(|column| row.select(column));
        Self { old_logprobs, ref_logprobs, advantages, factors, weights }
    }

    /// The tokens `range` with the policy's outputs.
    pub fn tokens<'a>(&'a self, range: Range<usize>, logprobs: &'a [f32], entropy: &'a [f32]) -> PolicyTokens<'a> {
        let part = |x: &'a Vec<f32>| if x.is_empty() { &x[..] } else { &x[range.clone()] };
        PolicyTokens {
            logprobs,
            old_logprobs: part(&self.old_logprobs),
            advantages: part(&self.advantages),
            ref_logprobs: part(&self.ref_logprobs),
            entropy,
            factors: part(&self.factors),
            weights: part(&self.weights),
        }
    }

    /// The policy loss of whole sequences, from the log-probabilities and entropies of this rank's tokens of `row`.
    /// Returns sums, and the derivatives by the log-probability and the entropy of every token of the row. Ranks of the
    /// axis `sequence` compute the same derivatives. Each sequence counts on one of them.
    pub fn sequence_loss(
        &self,
        ppo: &PpoConfig,
        kl_beta: f32,
        row: &PackedRow,
        sequence: &Group,
        logprobs: &[f32],
        entropy: &[f32],
    ) -> (PolicySums, [Vec<f32>; 2]) {
        let [logprobs, entropy] = [logprobs, entropy].map(|mine| row.gather(sequence, mine));
        let mut sums = PolicySums::default();
        let (mut dl, mut dh) = (vec![0.0; logprobs.len()], vec![0.0; logprobs.len()]);
        for (i, ends) in row.row_offsets.windows(2).enumerate() {
            let r = ends[0]..ends[1];
            let tokens = self.tokens(r.clone(), &logprobs[r.clone()], &entropy[r.clone()]);
            let found = policy_loss(ppo, kl_beta, &tokens, &mut dl[r.clone()], &mut dh[r]);
            if i % sequence.size() == sequence.rank() {
                sums += found;
            }
        }
        (sums, [dl, dh])
    }
}
