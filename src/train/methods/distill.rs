//! Distillation on one page: rows -> distributions of student and teachers -> loss -> gradient -> step
//! (arXiv:1503.02531). `on_policy` holds distillation on the student's own samples.

use crate::config::Config;
use crate::config::mesh::RoleName;
use crate::config::method::distill::{CE_MEAN, DistillConfig};
use crate::data::SftRow;
use crate::error::{Error, Result};
use crate::experience::Image;
use crate::launch::run::Run;
use crate::learn::packed::PackedRow;
use crate::learn::sums::Sums;
use crate::learn::{HeadPass, Learner, MicroBatch, Objective, Pass, Role};
use crate::loss::distill::sampled_reverse_kl;
use crate::metrics::keys;
use crate::model::{DistillTargets, Head};
use crate::ops::linear_divergence::Divergences;
use crate::tensor::arena::Buffer;
use crate::text::Tokenizer;
use crate::train::models::ModelSpec;
use crate::train::supervised::{Method, Minibatch, Numbers, evaluate};
use std::borrow::Cow;
use std::ops::Range;

/// Tokens and optimizer steps that were counted.
const TOKENS: &str = "distilled_tokens";
pub const UPDATES: &str = "updates";

/// The token metrics of a step: keys, and the counts that divide their sums.
pub const REPORTED: &[(&str, &str)] = &[(keys::LOSS, UPDATES), (CE_MEAN, TOKENS), (keys::KL_MEAN, TOKENS)];

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
        Ok(Self::with_teachers(config, frozen))
    }

    fn update(&mut self, run: &Run, learner: &mut Learner, batch: &Minibatch<Self>) -> Result<Numbers> {
        Ok(self.learn(run, learner, &tokens_of(batch.rows))?.means(REPORTED))
    }

    /// Loss and divergence on held-out rows.
    fn evaluate(&mut self, run: &mut Run, learner: &mut Learner, batch: &Minibatch<Self>) -> Result<Numbers> {
        self.measure(run, &learner.role, &tokens_of(batch.rows))
    }
}

impl Distill {
    pub fn with_teachers(config: &Config, teachers: Vec<Role>) -> Self {
        let weights = config.model.teacher_weights().into_iter().map(|weight| weight as f32);
        Self(teachers.into_iter().zip(weights).collect())
    }

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

    /// One optimizer step on rows. The loss is a mean over all tokens that they predict. Returns sums of the
    /// measurements. All ranks call this.
    pub fn learn(&mut self, run: &Run, learner: &mut Learner, rows: &[LearnedTokens]) -> Result<Sums> {
        let (config, axes) = (&run.config.distill, &run.ranks.axes);
        let total = rows.iter().map(LearnedTokens::count).sum::<usize>();
        if total == 0 {
            return Err(
                Error::data("a minibatch has no tokens to learn").hint("check that its responses are not empty")
            );
        }
        let weight = 1.0 / total as f32;
        let mut sums = self.present(run, |teachers| {
            let objective = Distillation { config, rows, teachers, weight };
            learner.accumulate(axes, config.microbatch_tokens_max, &[&objective])
        });
        learner.step_if_finite(axes, &sums, &[&Distillation { config, rows, teachers: &self.0, weight }])?;
        let report = learner.report;
        sums.add(&Sums::from_list([(UPDATES, 1.0), (keys::GRAD_NORM, report.grad_norm), (keys::LR, report.lr)]));
        sums.add(&learner.measured);
        Ok(sums)
    }

    /// Means of loss and divergence over held-out rows, as `learn` computes them. All ranks call this.
    pub fn measure(&mut self, run: &Run, student: &Role, rows: &[LearnedTokens]) -> Result<Numbers> {
        let config = &run.config.distill;
        let sums = self.present(run, |teachers| {
            let objective = Distillation { config, rows, teachers, weight: 1.0 };
            evaluate(run, student, &objective, config.microbatch_tokens_max, |packed| {
                let targets = objective.targets(packed.own);
                let (found, logprobs) = HeadPass::forward(student, packed.own).divergences(&targets);
                vec![objective.sums(&logprobs, &found)]
            })
        })?;
        let sums = Sums::total(&sums);
        let mean = |key| sums.get(key) / sums.get(TOKENS).max(1.0);
        Ok(vec![(keys::EVAL_LOSS, mean(keys::LOSS)), (keys::EVAL_KL_MEAN, mean(keys::KL_MEAN))])
    }
}

/// Tokens of a row, of which those with a mask of 1 are learned. The first token is not predicted.
pub struct LearnedTokens<'a> {
    pub tokens: Cow<'a, [u32]>,
    pub mask: Cow<'a, [u8]>,
    pub images: Cow<'a, [Image]>,
}

impl LearnedTokens<'_> {
    fn count(&self) -> usize {
        self.mask.iter().skip(1).filter(|mask| **mask != 0).count()
    }
}

fn tokens_of(rows: &[SftRow]) -> Vec<LearnedTokens<'_>> {
    fn of(SftRow { tokens, mask, images, .. }: &SftRow) -> LearnedTokens<'_> {
        LearnedTokens { tokens: tokens.into(), mask: mask.into(), images: images.into() }
    }
    rows.iter().map(of).collect()
}

/// ce_coef * cross-entropy + (1 - ce_coef) * divergence from the teachers' distributions, each token with `weight`.
struct Distillation<'a> {
    config: &'a DistillConfig,
    rows: &'a [LearnedTokens<'a>],
    teachers: &'a [(Role, f32)],
    weight: f32,
}

impl Distillation<'_> {
    /// The distributions of the teachers for the tokens that a packed row predicts.
    fn targets<'a>(&'a self, row: &'a PackedRow) -> DistillTargets<'a> {
        let teachers = self.teachers.iter().map(|(role, weight)| HeadPass::forward(role, row).teacher(*weight));
        let DistillConfig { divergence, temperature, .. } = *self.config;
        DistillTargets { teachers: teachers.collect(), divergence, temperature }
    }

    /// Sums over the tokens of a packed row.
    fn sums(&self, logprobs: &[f32], found: &Divergences) -> Sums {
        let sum = |x: &[f32]| x.iter().map(|x| f64::from(*x)).sum::<f64>();
        let ([by_ce, by_kl], ce) = (self.config.coefs(), -sum(logprobs));
        let mut sums = Sums::from_list([
            (keys::LOSS, f64::from(self.weight) * (by_ce * ce + by_kl * sum(&found.losses))),
            (keys::KL_MEAN, sum(&found.values)),
            (TOKENS, logprobs.len() as f64),
        ]);
        if !self.config.on_policy {
            sums.add(&Sums::from_list([(CE_MEAN, ce)]));
        }
        sums
    }

    /// The loss from the log-probabilities of the sampled tokens alone.
    fn sampled_loss(&self, row: &PackedRow, pass: Pass) -> Sums {
        let temperature = self.config.temperature;
        let mut of_teachers = vec![0.0; row.rows.len()];
        for (role, weight) in self.teachers {
            let logprobs = HeadPass::forward(role, row).logprobs(temperature);
            of_teachers.iter_mut().zip(logprobs).for_each(|(sum, logprob)| *sum += weight * logprob);
        }
        let mut kl = 0.0;
        let mut loss = |range: Range<usize>, l: &[f32], _: &[f32], dlogprobs: &mut [f32], _: &mut [f32]| {
            kl += sampled_reverse_kl(l, &of_teachers[range], self.weight, dlogprobs);
        };
        pass.run(|head| head.token_loss(temperature, &mut loss));
        Sums::from_list([
            (keys::LOSS, f64::from(self.weight) * kl),
            (keys::KL_MEAN, kl),
            (TOKENS, row.rows.len() as f64),
        ])
    }
}

impl Objective for Distillation<'_> {
    fn lengths(&self) -> Vec<usize> {
        self.rows.iter().map(|row| row.tokens.len()).collect()
    }

    fn pack(&self, rows: &[usize]) -> PackedRow {
        let mut packed = PackedRow::new();
        for LearnedTokens { tokens, mask, images } in rows.iter().map(|&i| &self.rows[i]) {
            packed.push_where(tokens, |i| mask[i] != 0);
            packed.see(images);
        }
        packed
    }

    fn frozen(&self) -> Vec<&Role> {
        self.teachers.iter().map(|(role, _)| role).collect()
    }

    fn loss(&self, packed: &MicroBatch, pass: Pass) -> Sums {
        if !self.config.full_vocabulary {
            return self.sampled_loss(packed.own, pass);
        }
        // The teachers' forward passes are before the student's, whose activations are kept.
        let (targets, weights) = (self.targets(packed.own), self.config.coefs().map(|coef| coef as f32 * self.weight));
        let (found, logprobs) = pass.run(move |head| head.divergence_loss(&targets, weights));
        self.sums(&logprobs, &found)
    }
}
