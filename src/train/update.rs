//! One optimiser step of PPO: a minibatch of experience to new weights.

use super::role::Learner;
use crate::comm::{Axes, Group};
use crate::config::Config;
use crate::config::ppo::{Aggregation, Correction, PolicyLossKind};
use crate::data::packing;
use crate::error::Result;
use crate::experience::Experience;
use crate::gradient::microbatch::PackedRow;
use crate::loss::aggregation::{self, Totals};
use crate::loss::correction;
use crate::loss::policy::{PolicySums, PolicyTokens, policy_loss};
use crate::loss::value::{ValueSums, value_loss};
use crate::model::Saved;
use std::ops::Range;

/// What the minibatches of a step add up to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct UpdateSums {
    pub policy: PolicySums,
    pub value: ValueSums,
    /// Largest |logprob in training - logprob at sampling| of the first minibatch.
    pub logprob_gap_max: f64,
}

/// Numbers of `UpdateSums` as they travel between ranks.
const WIDTH: usize = 11;

impl UpdateSums {
    pub fn to_row(self) -> [f64; WIDTH] {
        let (p, v) = (self.policy, self.value);
        [
            p.loss,
            p.policy_loss,
            p.tokens as f64,
            p.clipped as f64,
            p.policy_kl,
            p.entropy,
            p.kl,
            v.loss,
            v.tokens as f64,
            v.clipped as f64,
            self.logprob_gap_max,
        ]
    }

    pub fn from_row(row: &[f64]) -> Self {
        Self {
            policy: PolicySums {
                loss: row[0],
                policy_loss: row[1],
                tokens: row[2] as u64,
                clipped: row[3] as u64,
                policy_kl: row[4],
                entropy: row[5],
                kl: row[6],
            },
            value: ValueSums { loss: row[7], tokens: row[8] as u64, clipped: row[9] as u64 },
            logprob_gap_max: row[10],
        }
    }
}

impl std::ops::AddAssign for UpdateSums {
    fn add_assign(&mut self, other: Self) {
        self.policy += other.policy;
        self.value += other.value;
        self.logprob_gap_max = larger(self.logprob_gap_max, other.logprob_gap_max);
    }
}

/// The larger of two gaps; one that is not a number wins, so that it is seen.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

/// The samples of one packed row with everything their losses read, flat over the response tokens.
struct Microbatch {
    row: PackedRow,
    old_logprobs: Vec<f32>,
    ref_logprobs: Vec<f32>,
    advantages: Vec<f32>,
    returns: Vec<f32>,
    old_values: Vec<f32>,
    factors: Vec<f32>,
    weights: Vec<f32>,
    value_weights: Vec<f32>,
}

impl Microbatch {
    fn new(config: &Config, samples: &[&Experience], totals: Totals) -> Self {
        let ppo = &config.ppo;
        let mut batch = Self {
            row: PackedRow::new(),
            old_logprobs: Vec::new(),
            ref_logprobs: Vec::new(),
            advantages: Vec::new(),
            returns: Vec::new(),
            old_values: Vec::new(),
            factors: Vec::new(),
            weights: Vec::new(),
            value_weights: Vec::new(),
        };
        let aggregated = if ppo.loss == PolicyLossKind::Gspo { Aggregation::Sequence } else { ppo.aggregation };
        for sample in samples {
            let response = &sample.response;
            batch.row.push(&sample.tokens(), sample.prompt.tokens.len());
            batch.old_logprobs.extend_from_slice(&response.logprobs);
            batch.ref_logprobs.extend_from_slice(&sample.ref_logprobs);
            batch.advantages.extend_from_slice(&sample.advantages);
            batch.returns.extend_from_slice(&sample.returns);
            batch.old_values.extend_from_slice(&sample.values);
            let longest = config.rollout.response_tokens_max;
            aggregation::weights(aggregated, &sample.mask, totals, longest, &mut batch.weights);
            aggregation::weights(Aggregation::Token, &sample.mask, totals, longest, &mut batch.value_weights);
            if ppo.correction != Correction::None {
                let range = [ppo.correction_low, ppo.correction_high];
                let (old, drawn) = (&response.logprobs, &response.sample_logprobs);
                correction::factors(ppo.correction, range, old, drawn, &sample.mask, &mut batch.factors);
            }
        }
        batch
    }

    /// The slices of tokens `range` with the policy's current numbers.
    fn tokens<'a>(&'a self, range: Range<usize>, logprobs: &'a [f32], entropy: &'a [f32]) -> PolicyTokens<'a> {
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

/// What stays the same over the minibatches of a step.
pub struct Update<'a> {
    pub config: &'a Config,
    pub group: &'a Group,
    pub axes: &'a Axes,
    pub actor: &'a mut Learner,
    pub critic: Option<&'a mut Learner>,
    /// KL coefficient in force.
    pub kl_beta: f32,
}

impl Update<'_> {
    /// Gradient of the whole minibatch (every rank holds all its samples and computes its own chunks), then one step
    /// of the actor and of the critic.
    pub fn minibatch(&mut self, samples: &[&Experience]) -> Result<UpdateSums> {
        let mut totals = Totals::default();
        for sample in samples {
            totals.add_mask(&sample.mask);
        }
        let chunks = self.actor.sum.chunks(self.group);
        let lengths: Vec<usize> = samples.iter().map(|s| s.length()).collect();
        let dealt = packing::deal(&lengths, chunks);
        let mut mine = Vec::new();
        for (leaf, chunk) in self.actor.sum.own_chunks(self.group) {
            let members: Vec<&Experience> = dealt[chunk].iter().map(|&i| samples[i]).collect();
            mine.push(chunk as f64);
            mine.extend(self.chunk(leaf, &members, totals).to_row());
        }
        // Added in the order of chunks, whoever computed them.
        let gathered = self.group.all_gather_f64(&mine).concat();
        let mut rows: Vec<&[f64]> = gathered.chunks_exact(WIDTH + 1).collect();
        rows.sort_by(|a, b| a[0].total_cmp(&b[0]));
        let mut sums = UpdateSums::default();
        for row in rows {
            sums += UpdateSums::from_row(&row[1..]);
        }
        self.actor.step(self.axes)?;
        if let Some(critic) = &mut self.critic {
            critic.step(self.axes)?;
        }
        Ok(sums)
    }

    fn chunk(&mut self, leaf: usize, members: &[&Experience], totals: Totals) -> UpdateSums {
        let mut sums = UpdateSums::default();
        self.actor.sum.begin_chunk();
        if let Some(critic) = &mut self.critic {
            critic.sum.begin_chunk();
        }
        let lengths: Vec<usize> = members.iter().map(|s| s.length()).collect();
        for part in packing::microbatches(&lengths, self.config.ppo.microbatch_tokens_max) {
            let samples: Vec<&Experience> = part.iter().map(|&i| members[i]).collect();
            let batch = Microbatch::new(self.config, &samples, totals);
            sums += self.actor_microbatch(&batch);
            if self.critic.is_some() {
                sums.value += self.critic_microbatch(&batch);
            }
        }
        self.actor.sum.end_chunk(leaf);
        if let Some(critic) = &mut self.critic {
            critic.sum.end_chunk(leaf);
        }
        sums
    }

    fn actor_microbatch(&mut self, batch: &Microbatch) -> UpdateSums {
        let (ppo, beta) = (&self.config.ppo, self.kl_beta);
        let temperature = self.config.rollout.temperature;
        let Learner { role, sum, .. } = &mut *self.actor;
        let (model, w, row) = (&role.transformer, &role.weights, &batch.row);
        let mut saved = Saved::new(self.config.gradient.recompute);
        let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), Some(&mut saved));
        let mut policy = PolicySums::default();
        let (dhidden, logprobs) = if ppo.loss == PolicyLossKind::Gspo {
            // The ratio is of the whole sequence: all its log-probs are needed before any derivative.
            let (logprobs, entropy) = model.logprobs(w, &hidden, &row.rows, &row.targets, temperature, true);
            let (mut dl, mut dh) = (vec![0.0; logprobs.len()], vec![0.0; logprobs.len()]);
            for ends in row.row_offsets.windows(2) {
                let r = ends[0]..ends[1];
                let tokens = batch.tokens(r.clone(), &logprobs[r.clone()], &entropy[r.clone()]);
                policy += policy_loss(ppo, beta, &tokens, &mut dl[r.clone()], &mut dh[r]);
            }
            let mut copy = |r: Range<usize>, _: &[f32], _: &[f32], a: &mut [f32], b: &mut [f32]| {
                a.copy_from_slice(&dl[r.clone()]);
                b.copy_from_slice(&dh[r]);
            };
            let out =
                model.logprobs_backward(w, &hidden, &row.rows, &row.targets, temperature, &mut copy, &mut sum.grads);
            (out.0, out.1)
        } else {
            let mut local = |r: Range<usize>, l: &[f32], h: &[f32], dlogprobs: &mut [f32], dentropy: &mut [f32]| {
                policy += policy_loss(ppo, beta, &batch.tokens(r, l, h), dlogprobs, dentropy);
            };
            let out =
                model.logprobs_backward(w, &hidden, &row.rows, &row.targets, temperature, &mut local, &mut sum.grads);
            (out.0, out.1)
        };
        model.backward(w, saved, &row.cu_seqlens, dhidden, &mut sum.grads);
        let gaps = logprobs.iter().zip(&batch.old_logprobs).map(|(a, b)| f64::from((a - b).abs()));
        UpdateSums { policy, logprob_gap_max: gaps.fold(0.0, larger), ..UpdateSums::default() }
    }

    fn critic_microbatch(&mut self, batch: &Microbatch) -> ValueSums {
        let Some(Learner { role, sum, .. }) = self.critic.as_deref_mut() else { return ValueSums::default() };
        let (model, w, row) = (&role.transformer, &role.weights, &batch.row);
        let mut saved = Saved::new(self.config.gradient.recompute);
        let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), Some(&mut saved));
        let values = model.values(w, &hidden, &row.rows);
        let mut dvalues = vec![0.0; values.len()];
        let clip = self.config.ppo.value_clip;
        let sums = value_loss(clip, &values, &batch.old_values, &batch.returns, &batch.value_weights, &mut dvalues);
        let dhidden = model.values_backward(w, &hidden, &row.rows, &dvalues, &mut sum.grads);
        model.backward(w, saved, &row.cu_seqlens, dhidden, &mut sum.grads);
        sums
    }
}
