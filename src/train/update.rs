//! One optimiser step of PPO: a minibatch of experience to new weights.

use super::batch::{PolicyBatch, ValueBatch, lengths, totals};
use super::losses::{PolicyLoss, Slopes, sums_of, value_slopes};
use super::role::{Learner, StepReport};
use super::sweep::{Measured, microbatches, sweep};
use super::{astray, cut};
use crate::comm::{Axes, Group};
use crate::config::Config;
use crate::config::ppo::PolicyLossKind;
use crate::error::Result;
use crate::experience::Experience;
use crate::gradient::microbatch::PackedRow;
use crate::loss::policy::{PolicySums, policy_loss};
use crate::loss::value::{ValueSums, value_loss};
use crate::model::Saved;
use crate::ops::linear_logprob::TokenLoss;
use crate::tensor::{PerToken, Tensor};

/// What the minibatches of a step add up to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct UpdateSums {
    pub policy: PolicySums,
    pub value: ValueSums,
    /// Largest |logprob in training - logprob at sampling| of the first minibatch.
    pub logprob_gap_max: f64,
    /// The optimiser steps of the actor and of the critic.
    pub steps: [StepSums; 2],
}

/// What optimiser steps of one model add up to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepSums {
    pub steps: f64,
    /// Sums of the gradient's norm before the clip and of the learning rate, and the largest norm.
    pub grad_norm: f64,
    pub lr: f64,
    pub grad_norm_max: f64,
}

impl StepSums {
    /// Of one step.
    fn of(StepReport { grad_norm, lr }: StepReport) -> Self {
        Self { steps: 1.0, grad_norm, lr, grad_norm_max: grad_norm }
    }

    /// The means over the steps, in which `grad_norm_max` stays what it is; none where no step was made.
    pub fn means(self) -> Option<Self> {
        let Self { steps, grad_norm, lr, .. } = self;
        (steps > 0.0).then(|| Self { steps: 1.0, grad_norm: grad_norm / steps, lr: lr / steps, ..self })
    }
}

impl std::ops::AddAssign for StepSums {
    fn add_assign(&mut self, other: Self) {
        self.steps += other.steps;
        self.grad_norm += other.grad_norm;
        self.lr += other.lr;
        self.grad_norm_max = larger(self.grad_norm_max, other.grad_norm_max);
    }
}

/// Numbers of `UpdateSums` as they travel between ranks.
const WIDTH: usize = 19;

impl UpdateSums {
    pub fn to_row(self) -> [f64; WIDTH] {
        let (p, v, [actor, critic]) = (self.policy, self.value, self.steps);
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
            actor.steps,
            actor.grad_norm,
            actor.lr,
            actor.grad_norm_max,
            critic.steps,
            critic.grad_norm,
            critic.lr,
            critic.grad_norm_max,
        ]
    }

    /// The sums of a row, which may be shorter: work that an older version saved has none of the optimiser's numbers.
    pub fn from_row(saved: &[f64]) -> Self {
        let row: [f64; WIDTH] = std::array::from_fn(|i| saved.get(i).copied().unwrap_or(0.0));
        let steps =
            |at| StepSums { steps: row[at], grad_norm: row[at + 1], lr: row[at + 2], grad_norm_max: row[at + 3] };
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
            steps: [steps(11), steps(15)],
        }
    }
}

impl std::ops::AddAssign for UpdateSums {
    fn add_assign(&mut self, other: Self) {
        self.policy += other.policy;
        self.value += other.value;
        self.logprob_gap_max = larger(self.logprob_gap_max, other.logprob_gap_max);
        self.steps.iter_mut().zip(other.steps).for_each(|(steps, more)| *steps += more);
    }
}

/// Adds what two ranges of samples measured.
fn add(total: &mut [f64; WIDTH], more: [f64; WIDTH]) {
    let mut sums = UpdateSums::from_row(total);
    sums += UpdateSums::from_row(&more);
    *total = sums.to_row();
}

/// The larger of two gaps; one that is not a number wins, so that it is seen.
pub fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

/// What stays the same over the minibatches of a step.
#[derive(Clone, Copy)]
pub struct Update<'a> {
    pub config: &'a Config,
    pub axes: &'a Axes,
    /// KL coefficient in force.
    pub kl_beta: f32,
}

impl Update<'_> {
    /// One step of the actor and of the critic, as far as they are here, on the whole minibatch. Every rank holds all samples
    /// and computes its own micro-batches.
    pub fn minibatch<'l>(
        &self,
        actor: impl Into<Option<&'l mut Learner>>,
        critic: Option<&mut Learner>,
        samples: &[&Experience],
    ) -> Result<UpdateSums> {
        let mut sums = UpdateSums::default();
        let totals = totals(samples);
        if let Some(actor) = actor.into() {
            sums += self.policy_gradient(actor, samples);
            self.step(actor, sums.policy.loss, samples, |members| PolicyBatch::new(self.config, members, totals).row)?;
            sums.steps[0] += StepSums::of(actor.report);
        }
        if let Some(critic) = critic {
            sums += self.value_gradient(critic, samples);
            self.step(critic, sums.value.loss, samples, |members| ValueBatch::new(members, totals).row)?;
            sums.steps[1] += StepSums::of(critic.report);
        }
        Ok(sums)
    }

    /// The step behind a gradient, where loss and gradient are finite.
    fn step(
        &self,
        learner: &mut Learner,
        loss: f64,
        samples: &[&Experience],
        row: impl Fn(&[&Experience]) -> PackedRow,
    ) -> Result<()> {
        let tokens_max = self.config.ppo.microbatch_tokens_max;
        let rows = |learner: &Learner| {
            let made = microbatches(learner, self.axes, &lengths(samples), tokens_max).into_iter();
            let rows = made.map(|chosen| row(&chosen.into_iter().map(|i| samples[i]).collect::<Vec<_>>()));
            rows.map(|whole| cut::part(&whole, &self.axes.sequence)).collect()
        };
        astray::step(learner, self.axes, self.config.gradient.recompute, loss, rows)
    }

    /// Makes the actor's gradient of the minibatch; the step is still to come. All ranks of the actor's mesh call this.
    pub fn policy_gradient(&self, actor: &mut Learner, samples: &[&Experience]) -> UpdateSums {
        let totals = totals(samples);
        let sums =
            sweep(actor, self.axes, &lengths(samples), self.config.ppo.microbatch_tokens_max, add, |actor, rows| {
                let members: Vec<&Experience> = rows.iter().map(|&i| samples[i]).collect();
                self.policy_microbatch(actor, &PolicyBatch::new(self.config, &members, totals))
            });
        UpdateSums::from_row(&sums)
    }

    /// Makes the critic's gradient of the minibatch; the step is still to come. All ranks of the critic's mesh call this.
    pub fn value_gradient(&self, critic: &mut Learner, samples: &[&Experience]) -> UpdateSums {
        let totals = totals(samples);
        let sums =
            sweep(critic, self.axes, &lengths(samples), self.config.ppo.microbatch_tokens_max, add, |critic, rows| {
                let members: Vec<&Experience> = rows.iter().map(|&i| samples[i]).collect();
                self.value_microbatch(critic, &ValueBatch::new(&members, totals))
            });
        UpdateSums::from_row(&sums)
    }

    fn policy_microbatch(&self, actor: &mut Learner, whole: &PolicyBatch) -> Measured<'_, WIDTH> {
        let Learner { role, sum, .. } = actor;
        let (model, w, temperature) = (&role.transformer, &role.weights, self.config.rollout.temperature);
        let row = &cut::part(&whole.row, &self.axes.sequence);
        let batch = whole.part(row);
        let mut saved = Saved::new(self.config.gradient.recompute);
        let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), Some(&mut saved));
        let mut head = |loss: &mut dyn TokenLoss| -> (Tensor, PerToken) {
            model.loss_backward(w, &hidden, &row.rows, &row.targets, temperature, loss, &mut sum.grads)
        };
        let (ppo, kl_beta) = (&self.config.ppo, self.kl_beta);
        let (policy, (dhidden, scored)) = if ppo.loss == PolicyLossKind::Gspo {
            // The ratio is of the whole sequence: all its log-probs are needed before any derivative.
            let (logprobs, entropy) = model.logprobs(w, &hidden, &row.rows, &row.targets, temperature, true);
            let (found, slopes) = self.sequence_loss(whole, &logprobs, &entropy);
            (Some(found), head(&mut Slopes::new(slopes.map(|slopes| cut::pick(row, &slopes)))))
        } else {
            let mut loss = PolicyLoss::new(ppo, kl_beta, &batch);
            let passed = head(&mut loss);
            (loss.sums(), passed)
        };
        let scored = scored.later();
        model.backward(w, saved, &row.cu_seqlens, dhidden, &mut sum.grads);
        Box::new(move || {
            let scored = scored.take();
            let (logprobs, entropy) = scored.split_at(batch.old_logprobs.len());
            let policy = policy.unwrap_or_else(|| sums_of(ppo, kl_beta, &batch, logprobs, entropy));
            let gaps = logprobs.iter().zip(&batch.old_logprobs).map(|(a, b)| f64::from((a - b).abs()));
            UpdateSums { policy, logprob_gap_max: gaps.fold(0.0, larger), ..UpdateSums::default() }.to_row()
        })
    }

    /// The loss of whole sequences, given the log-probabilities and entropies of this rank's tokens: sums, and the
    /// derivatives by the log-probability and the entropy of every token of the row. Ranks of the sequence axis compute
    /// the same derivatives; each sequence counts on one of them.
    pub(super) fn sequence_loss(
        &self,
        whole: &PolicyBatch,
        logprobs: &[f32],
        entropy: &[f32],
    ) -> (PolicySums, [Vec<f32>; 2]) {
        let sequence: &Group = &self.axes.sequence;
        let [logprobs, entropy] = [logprobs, entropy].map(|mine| cut::join(&whole.row, sequence, mine));
        let mut sums = PolicySums::default();
        let (mut dl, mut dh) = (vec![0.0; logprobs.len()], vec![0.0; logprobs.len()]);
        for (i, ends) in whole.row.row_offsets.windows(2).enumerate() {
            let r = ends[0]..ends[1];
            let tokens = whole.tokens(r.clone(), &logprobs[r.clone()], &entropy[r.clone()]);
            let found = policy_loss(&self.config.ppo, self.kl_beta, &tokens, &mut dl[r.clone()], &mut dh[r]);
            if i % sequence.size() == sequence.rank() {
                sums += found;
            }
        }
        (sums, [dl, dh])
    }

    fn value_microbatch(&self, critic: &mut Learner, whole: &ValueBatch) -> Measured<'_, WIDTH> {
        let Learner { role, sum, .. } = critic;
        let (model, w) = (&role.transformer, &role.weights);
        let row = &cut::part(&whole.row, &self.axes.sequence);
        let read = [&whole.old_values, &whole.returns, &whole.weights].map(|x| cut::pick(row, x));
        let mut saved = Saved::new(self.config.gradient.recompute);
        let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), Some(&mut saved));
        let values = model.values_there(w, &hidden, &row.rows);
        let clip = self.config.ppo.value_clip;
        let mut dvalues = PerToken::scratch(hidden.device(), values.len());
        let sums = value_slopes(clip, values.slice(), read.each_ref().map(Vec::as_slice), dvalues.slice_mut());
        let values = values.later();
        let dhidden = model.values_backward_there(w, &hidden, &row.rows, dvalues.slice(), &mut sum.grads);
        model.backward(w, saved, &row.cu_seqlens, dhidden, &mut sum.grads);
        Box::new(move || {
            let late = || {
                let values = values.take();
                value_loss(clip, &values, &read[0], &read[1], &read[2], &mut vec![0.0; values.len()])
            };
            UpdateSums { value: sums.unwrap_or_else(late), ..UpdateSums::default() }.to_row()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn update(grad_norm: f64, lr: f64) -> UpdateSums {
        let steps = [StepSums::of(StepReport { grad_norm, lr }), StepSums::of(StepReport { grad_norm: 3.0, lr: 1.0 })];
        UpdateSums { steps, logprob_gap_max: 0.5, ..UpdateSums::default() }
    }

    #[test]
    fn the_optimizer_reports_means_over_the_updates_of_a_step_and_the_largest_norm() {
        let mut sums = UpdateSums::default();
        assert_eq!(sums.steps[0].means(), None);
        sums += update(2.0, 0.1);
        // As it goes through a checkpoint in the middle of a step.
        let mut resumed = UpdateSums::from_row(&sums.to_row());
        assert_eq!(resumed, sums);
        resumed += update(8.0, 0.3);
        let means = StepSums { steps: 1.0, grad_norm: 5.0, lr: 0.2, grad_norm_max: 8.0 };
        assert_eq!(resumed.steps[0].means(), Some(means));
        assert_eq!(resumed.steps[1].means().map(|means| means.grad_norm), Some(3.0));
    }

    #[test]
    fn sums_that_an_older_version_saved_are_of_the_updates_that_they_know() {
        let row = update(2.0, 0.1).to_row();
        let mut sums = UpdateSums::from_row(&row[..11]);
        assert_eq!((sums.logprob_gap_max, sums.steps), (0.5, [StepSums::default(); 2]));
        sums += update(8.0, 0.3);
        let means = StepSums { steps: 1.0, grad_norm: 8.0, lr: 0.3, grad_norm_max: 8.0 };
        assert_eq!(sums.steps[0].means(), Some(means));
    }
}
