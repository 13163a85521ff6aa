//! One PPO step in this process: 32 prompts of 32 tokens, 64 new tokens each; actor, critic and reference; one epoch of
//! one minibatch. The reward is the share of even tokens, a rule without cost.

use super::measure::{Meter, medians_ms};
use super::models::Source;
use super::rollout::RolloutBench;
use super::train::learner;
use crate::advantage::{self, AdvantageState};
use crate::comm::Axes;
use crate::config::Config;
use crate::error::Result;
use crate::experience::{Experience, Response};
use crate::learn::packed::Tokens;
use crate::learn::score;
use crate::learn::{Learner, Role};
use crate::metrics::keys;
use crate::model::cost::{self, Work};
use crate::model::{Arch, Head};
use crate::tensor::DType;
use crate::train::methods::update::Update;
use std::collections::BTreeMap;

const PROMPTS: usize = 32;
const PROMPT: usize = 32;
const NEW: usize = 64;

/// Seconds by phase: rollout, reference, values, advantages, updates.
const PHASES: [&str; 5] = ["rollout_ms", "reference_ms", "values_ms", "advantage_ms", "update_ms"];

struct Step {
    config: Config,
    actor: Learner,
    critic: Learner,
    reference: Role,
    rollout: RolloutBench,
    state: AdvantageState,
    number: u32,
}

fn cost(arch: &Arch, dtype: DType) -> Work {
    let rows = [(0, PROMPT + NEW); PROMPTS];
    let responses = PROMPTS * NEW;
    cost::sampling(arch, dtype, PROMPTS, PROMPT, NEW)
        + cost::forward(arch, dtype, &rows, responses)
        + cost::forward(arch, dtype, &rows, 0)
        + cost::training(arch, dtype, &rows, responses)
        + cost::training(arch, dtype, &rows, 0)
}

fn score_of(response: &Response) -> f32 {
    let even = response.tokens.iter().filter(|t| t.is_multiple_of(2)).count();
    even as f32 / response.tokens.len() as f32
}

fn tokens(samples: &[Experience]) -> Vec<Tokens<'_>> {
    samples.iter().map(Tokens::from_sample).collect()
}

impl Step {
    fn new(source: &Source, dtype: DType) -> Result<Self> {
        let mut config = Config::default();
        config.rollout.response_tokens_max = NEW;
        config.ppo.minibatch_samples = PROMPTS;
        config.ppo.lambda = 0.95;
        let actor = source.role("actor", Head::LanguageModel, dtype)?;
        let critic = source.role("critic", Head::Value, dtype)?;
        let reference = source.role("reference", Head::LanguageModel, dtype)?;
        let rollout = RolloutBench::new(&actor, PROMPTS, PROMPT, NEW, 1.0);
        let state = AdvantageState::new(&config.ppo);
        let (actor, critic) = (learner(actor, 1e-6)?, learner(critic, 9e-6)?);
        Ok(Self { config, actor, critic, reference, rollout, state, number: 0 })
    }

    /// Runs the whole step. Returns the seconds of its phases, and the log-probability gap of rollout and trainer.
    fn run(&mut self, meter: &Meter) -> Result<([f64; PHASES.len()], f64)> {
        self.number += 1;
        let tokens_max = self.config.ppo.microbatch_tokens_max;
        let mut at = vec![meter.now()];
        let responses = self.rollout.sample(&self.actor.role, self.number)?;
        let mut samples: Vec<Experience> = responses
            .into_iter()
            .map(|response| Experience {
                prompt: self.rollout.prompts[response.prompt].clone(),
                score: score_of(&response),
                mask: vec![1; response.tokens.len()],
                response,
                ..Experience::default()
            })
            .collect();
        at.push(meter.now());
        let axes = Axes::one();
        let found = score::logprobs(&self.reference, &axes, &tokens(&samples), 1.0, tokens_max);
        samples.iter_mut().zip(found).for_each(|(sample, logprobs)| sample.ref_logprobs = logprobs);
        at.push(meter.now());
        let found = score::values(&self.critic.role, &axes, &tokens(&samples), tokens_max);
        samples.iter_mut().zip(found).for_each(|(sample, mut values)| {
            sample.last_value = values.pop().expect("a value after the last token");
            sample.values = values;
        });
        at.push(meter.now());
        let kl_beta = self.state.kl.beta;
        advantage::compute_step(&self.config.ppo, &BTreeMap::new(), &mut self.state, &mut samples)?;
        at.push(meter.now());
        let chosen: Vec<&Experience> = samples.iter().collect();
        let update = Update { config: &self.config, axes: &axes, kl_beta, texts: &[] };
        let sums = update.minibatch(&mut self.actor, Some(&mut self.critic), &chosen)?;
        at.push(meter.now());
        Ok((std::array::from_fn(|i| at[i + 1] - at[i]), sums.get(keys::LOGPROB_GAP_MAX)))
    }
}

pub fn run(meter: &mut Meter, source: &Source) -> Result<()> {
    let mut step = Step::new(source, meter.dtype)?;
    let mut phases = Vec::new();
    let mut gap_max = 0.0f64;
    let measured = meter.long(|meter| {
        let (parts, gap) = step.run(meter)?;
        phases.push(parts);
        gap_max = gap_max.max(gap);
        Ok(())
    })?;
    let mut more = medians_ms(PHASES, &phases);
    more.push(("logprob_gap_max", gap_max));
    let cost = cost(step.actor.role.arch(), meter.dtype);
    let work = format!("{} ppo step {PROMPTS} x ({PROMPT} + {NEW})", source.name);
    meter.show(&work, &measured, Some(PROMPTS * (PROMPT + NEW)), cost, &more);
    meter.show_peaks(&measured);
    Ok(())
}
