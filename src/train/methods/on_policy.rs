//! On-policy distillation on one page: prompts -> the student's samples -> distributions of student and teachers ->
//! loss -> gradient -> step (arXiv:2306.13649).

use super::distill::{Distill, LearnedTokens, REPORTED, UPDATES};
use crate::config::Config;
use crate::data::Rows;
use crate::error::Result;
use crate::experience::Experience;
use crate::launch::banner::BannerRows;
use crate::launch::run::Run;
use crate::launch::step_shape::StepShape;
use crate::learn::sums::Sums;
use crate::learn::{Learner, Role};
use crate::metrics::Phases;
use crate::metrics::keys::{self, Metrics, named};
use crate::train::job::steps_of_epochs;
use crate::train::models::ModelSpec;
use crate::train::sampling::Sampling;
use crate::train::sampling::evaluate::EVAL_STEPS;
use crate::train::sampling::online::{Minibatch, OnlineMethod};
use crate::train::supervised::Method;
use std::time::Instant;

pub struct OnPolicy(Distill);

impl OnlineMethod for OnPolicy {
    fn models(config: &Config) -> Vec<ModelSpec> {
        Distill::models(config)
    }

    fn steps(config: &Config, rows: &Rows) -> u64 {
        steps_of_epochs(config, rows, config.rollout.prompts_per_step)
    }

    fn minibatches(Config { distill, .. }: &Config) -> (usize, usize) {
        (1, distill.minibatch_samples)
    }

    fn shape(Config { distill, model, .. }: &Config, rollout: StepShape) -> StepShape {
        StepShape { microbatch_tokens_max: distill.microbatch_tokens_max, scored: model.teachers.len(), ..rollout }
    }

    fn adapt_banner(run: &Run, rows: &mut BannerRows) {
        rows.about.retain(|_| run.config.reward.is_set());
    }

    fn new(config: &Config, teachers: Vec<Role>) -> Self {
        Self(Distill::with_teachers(config, teachers))
    }

    fn prepare(&mut self, run: &Run, _: &Sampling, _: u64, samples: &mut [Experience]) -> Result<(Metrics, f32)> {
        let score = samples.iter().map(|sample| f64::from(sample.score)).sum::<f64>() / samples.len() as f64;
        Ok((named(run.config.reward.is_set().then_some((keys::SCORE_MEAN, score))), 0.0))
    }

    fn update(&mut self, run: &Run, sampling: &mut Sampling, batch: &Minibatch) -> Result<Sums> {
        self.0.learn(run, student(sampling), &tokens_of(batch.samples))
    }

    fn metrics(_run: &Run, sums: &Sums) -> Metrics {
        let of_updates = sums.means(&[(keys::GRAD_NORM, UPDATES), (keys::LR, UPDATES)]);
        named(sums.means(REPORTED).into_iter().chain(of_updates))
    }

    /// Loss and divergence on samples of held-out prompts. With rewards, also the share of right answers.
    fn evaluate(&mut self, run: &mut Run, sampling: &mut Sampling, step: u64) -> Result<Metrics> {
        let start = Instant::now();
        let prompts = run.ranks.all.agree(sampling.collector.source.eval_rows(run.config.eval.samples_max))?;
        if prompts.is_empty() {
            return Ok(Vec::new());
        }
        let (samples, values) =
            sampling.sample(run, u64::from(EVAL_STEPS) + step, &prompts, 0, &[], &mut Phases::start())?;
        values?;
        let all_samples: Vec<&Experience> = samples.iter().collect();
        let mut all = named(self.0.measure(run, &student(sampling).role, &tokens_of(&all_samples))?);
        if run.config.reward.is_set() {
            let scored = sampling.evaluate(run, step)?;
            all.extend(scored.into_iter().filter(|(key, _)| key != keys::EVAL_TIME_S));
        } else {
            all.extend(named([(keys::EVAL_SAMPLES, prompts.len() as f64)]));
            all.extend(sampling.kv_divergence(run, &samples, run.config.rollout.temperature)?);
        }
        all.extend(named([(keys::EVAL_TIME_S, start.elapsed().as_secs_f64())]));
        Ok(all)
    }
}

fn student(sampling: &mut Sampling) -> &mut Learner {
    sampling.actor.as_mut().expect("a job without a placement has all models on each rank")
}

/// The student's own tokens of each response are learned (`mask`), not the tokens of an environment.
fn tokens_of<'a>(samples: &[&'a Experience]) -> Vec<LearnedTokens<'a>> {
    let of_sample = |sample: &&'a Experience| {
        let mask = std::iter::repeat_n(0, sample.prompt.tokens.len()).chain(sample.mask.iter().copied());
        LearnedTokens { tokens: sample.tokens().into(), mask: mask.collect(), images: sample.images() }
    };
    samples.iter().map(of_sample).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experience::{Prompt, Response};

    #[test]
    fn environment_tokens_are_read_and_not_learned() {
        let prompt = Prompt { tokens: vec![1, 2], ..Prompt::default() };
        let response = Response { tokens: vec![3, 4, 5, 6], ..Response::default() };
        let sample = Experience { prompt, response, mask: vec![1, 0, 0, 1], ..Experience::default() };
        let learned = &tokens_of(&[&sample])[0];
        assert_eq!((&learned.tokens[..], &learned.mask[..]), (&[1, 2, 3, 4, 5, 6][..], &[0, 0, 1, 0, 0, 1][..]));
    }
}
