//! On-policy distillation on one page: prompts -> the student's samples -> distributions of student and teachers ->
//! loss -> gradient -> step (arXiv:2306.13649). Sampling, stopping and resuming work as in PPO.

use super::distill::{Distill, LearnedTokens, REPORTED, UPDATES};
use super::evaluate::EVAL_STEPS;
use super::job::{Ended, Job, Step};
use super::models::{JobModel, ModelSpec};
use super::ppo::Ppo;
use super::supervised::Method;
use crate::config::Config;
use crate::config::mesh::RoleName;
use crate::data::{PromptSource, Rows};
use crate::error::Result;
use crate::experience::{Experience, Prompt};
use crate::launch::banner::BannerRows;
use crate::launch::run::Run;
use crate::launch::step_shape::StepShape;
use crate::learn::{Learner, Role};
use crate::metrics::Phases;
use crate::metrics::keys::{self, Metrics, named};
use crate::model::Arch;
use crate::text::Tokenizer;
use serde_json::Value;
use std::sync::Arc;
use std::time::Instant;

pub struct OnPolicy {
    /// A PPO job without critic and reference.
    ppo: Ppo,
    distill: Distill,
}

impl Job for OnPolicy {
    type Row = Prompt;

    fn models(config: &Config) -> Vec<ModelSpec> {
        let mut all = Distill::models(config);
        all.extend(Ppo::reward_models(config));
        all
    }

    fn check_models(config: &Config, student: &Arch, other: &JobModel) -> Result<()> {
        Ppo::check_models(config, student, other)
    }

    fn shape(config: &Config) -> StepShape {
        let (distill, of_ppo) = (&config.distill, Ppo::shape(config));
        StepShape {
            minibatch: distill.minibatch_samples.min(of_ppo.samples()),
            epochs: 1,
            microbatch_tokens_max: distill.microbatch_tokens_max,
            trained: 1,
            scored: config.model.teachers.len(),
            ..of_ppo
        }
    }

    fn needs(run: &Run, arch: &Arch, rows: &Rows) -> BannerRows {
        let mut needs = Ppo::needs(run, arch, rows);
        needs.about.retain(|_| run.config.reward.is_set());
        needs
    }

    fn new(
        run: &Run,
        arch: &Arch,
        learners: Vec<Learner>,
        frozen: Vec<Role>,
        source: PromptSource,
        tokenizer: Arc<Tokenizer>,
    ) -> Result<Self> {
        let is_teacher = |role: &Role| role.name == RoleName::Teacher.name();
        let (teachers, rewards): (Vec<_>, Vec<_>) = frozen.into_iter().partition(is_teacher);
        let distill = Distill::new(&run.config, teachers, &tokenizer)?;
        let ppo = Ppo::new(run, arch, learners, rewards, source, tokenizer)?;
        Ok(Self { ppo, distill })
    }

    fn check_services(run: &Run, arch: &Arch, source: PromptSource, tokenizer: Arc<Tokenizer>) -> Result<()> {
        Ppo::check_services(run, arch, source, tokenizer)
    }

    fn rows(&self) -> &Rows {
        self.ppo.rows()
    }

    fn learners(&mut self) -> Vec<&mut Learner> {
        self.ppo.learners()
    }

    fn state(&self) -> Value {
        self.ppo.state()
    }

    fn restore(&mut self, state: Value, work: Option<&[u8]>) -> Result<()> {
        self.ppo.restore(state, work)
    }

    fn step(&mut self, run: &mut Run, step: &mut Step) -> std::result::Result<Metrics, Ended> {
        let Self { ppo, distill } = self;
        let (has_reward, size) = (run.config.reward.is_set(), run.config.distill.minibatch_samples);
        let mut work = ppo.begin(run, step, |_, samples| {
            let score = samples.iter().map(|sample| f64::from(sample.score)).sum::<f64>() / samples.len() as f64;
            Ok((named(has_reward.then_some((keys::SCORE_MEAN, score))), 0.0))
        })?;
        ppo.learn(run, step, &mut work, 1, size, |ppo, run, samples| {
            let student = ppo.actor.as_mut().expect("a job without a placement has all models on each rank");
            distill.learn(run, student, &tokens_of(samples))
        })?;
        let mut all = work.values.clone();
        all.extend(named(work.sums.means(REPORTED)));
        all.extend(named(work.sums.means(&[(keys::GRAD_NORM, UPDATES), (keys::LR, UPDATES)])));
        Ok(all)
    }

    /// Loss and divergence on samples of held-out prompts. With rewards, also the share of right answers.
    fn evaluate(&mut self, run: &mut Run, step: u64) -> Result<Metrics> {
        let start = Instant::now();
        let prompts = run.ranks.all.agree(self.ppo.collector.source.eval_rows(run.config.eval.samples_max))?;
        if prompts.is_empty() {
            return Ok(Vec::new());
        }
        let (samples, values) =
            self.ppo.sample(run, u64::from(EVAL_STEPS) + step, &prompts, 0, &[], &mut Phases::start())?;
        values?;
        let samples: Vec<&Experience> = samples.iter().collect();
        let student = &self.ppo.actor.as_ref().expect("a job without a placement has all models on each rank").role;
        let measured = self.distill.measure(run, student, &tokens_of(&samples))?;
        let mut all = named(measured);
        if run.config.reward.is_set() {
            let scored = self.ppo.evaluate(run, step)?;
            all.extend(scored.into_iter().filter(|(key, _)| key != keys::EVAL_TIME_S));
        } else {
            all.extend(named([(keys::EVAL_SAMPLES, prompts.len() as f64)]));
        }
        all.extend(named([(keys::EVAL_TIME_S, start.elapsed().as_secs_f64())]));
        Ok(all)
    }
}

/// The student's own tokens of each response are learned (`mask`), not the tokens of an environment.
fn tokens_of<'a>(samples: &[&'a Experience]) -> Vec<LearnedTokens<'a>> {
    let of_sample = |sample: &&'a Experience| {
        let mask = std::iter::repeat_n(0, sample.prompt.tokens.len()).chain(sample.mask.iter().copied());
        LearnedTokens { tokens: sample.tokens().into(), mask: mask.collect() }
    };
    samples.iter().map(of_sample).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experience::Response;

    #[test]
    fn tokens_of_an_environment_are_read_and_not_learned() {
        let prompt = Prompt { tokens: vec![1, 2], ..Prompt::default() };
        let response = Response { tokens: vec![3, 4, 5, 6], ..Response::default() };
        let sample = Experience { prompt, response, mask: vec![1, 0, 0, 1], ..Experience::default() };
        let learned = &tokens_of(&[&sample])[0];
        assert_eq!((&learned.tokens[..], &learned.mask[..]), (&[1, 2, 3, 4, 5, 6][..], &[0, 0, 1, 0, 0, 1][..]));
    }
}
