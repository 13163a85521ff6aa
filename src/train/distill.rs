//! Distillation on one page: rows -> distributions of student and teachers -> loss -> gradient -> step
//! (arXiv:1503.02531). `on_policy` holds distillation on the student's own samples.

use super::models::ModelSpec;
use super::sft::pack;
use super::supervised::{self, Method, Minibatch, Numbers, lengths};
use crate::config::Config;
use crate::config::distill::DistillConfig;
use crate::config::mesh::RoleName;
use crate::data::SftRow;
use crate::error::{Error, Result};
use crate::launch::run::Run;
use crate::learn::accumulation::accumulate;
use crate::learn::packed::PackedRow;
use crate::learn::sums::Sums;
use crate::learn::{Learner, Role};
use crate::loss::distill::sampled_reverse_kl;
use crate::metrics::keys;
use crate::model::{DistillTargets, Head};
use crate::ops::linear_divergence::Divergences;
use crate::tensor::Tensor;
use crate::tensor::arena::Buffer;
use crate::text::Tokenizer;
use std::ops::Range;

/// Tokens and optimizer steps that were counted.
const TOKENS: &str = "distilled_tokens";
pub const UPDATES: &str = "updates";

/// The token metrics of a step: keys, and the counts that divide their sums.
pub const REPORTED: &[(&str, &str)] = &[(keys::LOSS, UPDATES), (keys::CE_MEAN, TOKENS), (keys::KL_MEAN, TOKENS)];

/// The teachers of a job, with their weights in its loss.
pub struct Distill(Vec<(Role, f32)>);

impl Method for Distill {
    type Row = SftRow;
    type Precomputed = ();

    /// The student, then its teachers.
    fn models(config: &Config) -> Vec<ModelSpec> {
        let teachers = config.model.teachers.iter().map(|dir| ModelSpec::frozen(RoleName::Teacher, dir));
        std::iter::once(ModelSpec::actor(config, Head::LanguageModel)).chain(teachers).collect()
    }

    fn shape(Config { distill, model, .. }: &Config) -> [usize; 3] {
        [distill.minibatch_samples, distill.microbatch_tokens_max, model.teachers.len()]
    }

    fn new(config: &Config, frozen: Vec<Role>, _tokenizer: &Tokenizer) -> Result<Self> {
        let weights = config.model.teacher_weights().into_iter().map(|weight| weight as f32);
        Ok(Self(frozen.into_iter().zip(weights).collect()))
    }

    fn update(&mut self, run: &Run, learner: &mut Learner, batch: &Minibatch<Self>) -> Result<Numbers> {
        let sums = self.learn(run, learner, &lengths(batch.rows), |chosen| pack(batch.rows, chosen))?;
        Ok(sums.means(REPORTED))
    }

    /// Loss and divergence on held-out rows.
    fn evaluate(&mut self, run: &mut Run, learner: &mut Learner, batch: &Minibatch<Self>) -> Result<Numbers> {
        self.measure(run, &learner.role, &lengths(batch.rows), |chosen| pack(batch.rows, chosen))
    }
}

impl Distill {
    /// Runs `work` with the weights of all teachers in memory. All ranks call this.
    fn present<R>(&mut self, run: &Run, work: impl FnOnce(&[(Role, f32)]) -> R) -> R {
        for (role, _) in &mut self.0 {
            run.onload(role);
            role.weights.buffers().for_each(Buffer::prefetch);
        }
        let done = work(&self.0);
        for (role, _) in &mut self.0 {
            role.weights.release();
            role.weights.buffers().for_each(Buffer::evict);
            run.offload_weights(role);
        }
        done
    }

    /// One optimizer step on rows of `lengths` tokens, which `pack` turns into packed rows. The loss is a mean over all
    /// tokens that they predict. Returns sums of the measurements. All ranks call this.
    pub fn learn(
        &mut self,
        run: &Run,
        learner: &mut Learner,
        lengths: &[usize],
        pack: impl Fn(&[usize]) -> PackedRow,
    ) -> Result<Sums> {
        let (config, axes) = (&run.config.distill, &run.ranks.axes);
        let total = pack(&(0..lengths.len()).collect::<Vec<_>>()).rows.len();
        if total == 0 {
            return Err(
                Error::data("a minibatch has no tokens to learn").hint("check that its responses are not empty")
            );
        }
        let weight = 1.0 / total as f32;
        let part = |chosen: &[usize]| pack(chosen).shard(&axes.sequence);
        let mut sums = self.present(run, |teachers| {
            accumulate(learner, axes, lengths, config.microbatch_tokens_max, 1, |learner, chosen, _| {
                microbatch(config, learner, teachers, &part(chosen), weight)
            })
        });
        learner.step_if_finite(axes, sums.get(keys::LOSS), part)?;
        let report = learner.report;
        sums.add(&Sums::from_list([(UPDATES, 1.0), (keys::GRAD_NORM, report.grad_norm), (keys::LR, report.lr)]));
        Ok(sums)
    }

    /// Means of loss and divergence over held-out rows, as `learn` computes them. All ranks call this.
    pub fn measure(
        &mut self,
        run: &Run,
        student: &Role,
        lengths: &[usize],
        pack: impl Fn(&[usize]) -> PackedRow,
    ) -> Result<Numbers> {
        let config = &run.config.distill;
        let sums = self.present(run, |teachers| {
            supervised::evaluate(run, student, lengths, config.microbatch_tokens_max, |chosen| {
                let row = pack(chosen).shard(&run.ranks.axes.sequence);
                let distill_targets = distill_targets(config, teachers, &row);
                let (model, w) = (&student.transformer, &student.weights);
                let hidden = model.forward(w, &row.tokens, &row.positions, row.keys(), None);
                let (found, logprobs) = model.divergences(w, &hidden, &row.rows, &row.targets, &distill_targets);
                vec![measured(config, &logprobs, &found, 1.0)]
            })
        })?;
        let sums = Sums::total(&sums);
        let mean = |key| sums.get(key) / sums.get(TOKENS).max(1.0);
        Ok(vec![(keys::EVAL_LOSS, mean(keys::LOSS)), (keys::EVAL_KL_MEAN, mean(keys::KL_MEAN))])
    }
}

/// A teacher's hidden states of a packed row.
fn hidden(role: &Role, row: &PackedRow) -> Tensor {
    role.transformer.forward(&role.weights, &row.tokens, &row.positions, row.keys(), None)
}

/// The distributions of the teachers for the tokens that a packed row predicts.
fn distill_targets<'a>(config: &DistillConfig, teachers: &'a [(Role, f32)], row: &PackedRow) -> DistillTargets<'a> {
    let precomputed = |(role, weight): &'a (Role, f32)| {
        role.transformer.teacher(&role.weights, &hidden(role, row), &row.rows, *weight)
    };
    let teachers = teachers.iter().map(precomputed).collect();
    DistillTargets { teachers, divergence: config.divergence, temperature: config.temperature }
}

/// Sums over the tokens of a packed row, each with `weight` in the loss.
fn measured(config: &DistillConfig, logprobs: &[f32], found: &Divergences, weight: f64) -> Sums {
    let sum = |x: &[f32]| x.iter().map(|x| f64::from(*x)).sum::<f64>();
    let ([by_ce, by_kl], ce) = (config.coefs(), -sum(logprobs));
    let mut sums = Sums::from_list([
        (keys::LOSS, weight * (by_ce * ce + by_kl * sum(&found.losses))),
        (keys::KL_MEAN, sum(&found.values)),
        (TOKENS, logprobs.len() as f64),
    ]);
    if !config.on_policy {
        sums.add(&Sums::from_list([(keys::CE_MEAN, ce)]));
    }
    sums
}

/// Accumulates the gradient of one packed row, then frees the teachers' hidden states.
fn microbatch(
    config: &DistillConfig,
    learner: &mut Learner,
    teachers: &[(Role, f32)],
    row: &PackedRow,
    weight: f32,
) -> Sums {
    if !config.full_vocabulary {
        return sampled_microbatch(config, learner, teachers, row, weight);
    }
    let (distill_targets, weights) =
        (distill_targets(config, teachers, row), config.coefs().map(|coef| coef as f32 * weight));
    let (found, logprobs) = learner.backward(row, move |model, w, hidden, grads| {
        let (dhidden, found, logprobs) =
            model.divergences_backward(w, hidden, &row.rows, &row.targets, &distill_targets, weights, grads);
        (dhidden, (found, logprobs))
    });
    measured(config, &logprobs, &found, weight.into())
}

/// The same from the log-probabilities of the sampled tokens alone.
fn sampled_microbatch(
    config: &DistillConfig,
    learner: &mut Learner,
    teachers: &[(Role, f32)],
    row: &PackedRow,
    weight: f32,
) -> Sums {
    let mut of_teachers = vec![0.0; row.rows.len()];
    for (role, weight) in teachers {
        let hidden = hidden(role, row);
        let (model, w) = (&role.transformer, &role.weights);
        let (logprobs, _) = model.logprobs(w, &hidden, &row.rows, &row.targets, config.temperature, false);
        of_teachers.iter_mut().zip(logprobs).for_each(|(sum, logprob)| *sum += weight * logprob);
    }
    let mut kl = 0.0;
    let mut loss = |range: Range<usize>, l: &[f32], _: &[f32], dlogprobs: &mut [f32], _: &mut [f32]| {
        kl += sampled_reverse_kl(l, &of_teachers[range], weight, dlogprobs);
    };
    learner.backward(row, |model, w, hidden, grads| {
        let (rows, temperature) = (&row.rows, config.temperature);
        (model.logprobs_backward(w, hidden, rows, &row.targets, temperature, &mut loss, grads).0, ())
    });
    Sums::from_list([(keys::LOSS, f64::from(weight) * kl), (keys::KL_MEAN, kl), (TOKENS, row.rows.len() as f64)])
}
