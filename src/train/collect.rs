//! Rollout and reward of one rank's share of the prompts.

use super::exchange;
use super::policy::Policy;
use super::setup::Run;
use crate::comm::Group;
use crate::config::rollout::RolloutConfig;
use crate::data::PromptSource;
use crate::device::cpu::pool::share;
use crate::error::Result;
use crate::experience::{Experience, Prompt, Response};
use crate::metrics::Phase;
use crate::model::Arch;
use crate::reward::Reward;
use crate::rng::{Purpose, Rng};
use crate::rollout::{self, Engine, Hooks, Model, Stop};
use crate::sys;
use crate::tensor::arena;
use crate::text::Tokenizer;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

/// What produces experience: prompts, the engine, and the reward.
pub struct Collector {
    pub source: PromptSource,
    pub tokenizer: Arc<Tokenizer>,
    engine: Engine,
    reward: Reward,
    stop: Arc<Stop>,
    rng: Rng,
}

/// What a rollout phase came to.
pub struct Rollout {
    /// This rank's samples, in order, each on one rank; `None` where the phase was stopped.
    pub complete: Option<Vec<Experience>>,
    /// Where it was stopped: the finished responses of all ranks, with the prompt's index in the step.
    pub finished: Vec<Response>,
}

impl Collector {
    /// `weights_bytes` of weights come beside training's while the cache is there.
    pub fn new(
        run: &Run,
        source: PromptSource,
        tokenizer: Arc<Tokenizer>,
        arch: &Arch,
        weights_bytes: usize,
    ) -> Result<Self> {
        let config = &run.config;
        config.rollout.check()?;
        let reward = run.axes.all.agree(Reward::new(&config.reward, &config.base))?;
        let mut eos = arch.eos_tokens.clone();
        eos.extend(tokenizer.eos_ids().iter().filter(|id| !arch.eos_tokens.contains(id)));
        let stop = Arc::new(Stop::new(&config.rollout, &eos));
        let free = sys::memory::available_bytes() / run.world.local_size as u64;
        let free = free.min(arena::usage().left() as u64);
        let engine = Engine::new(&config.rollout, free.saturating_sub(weights_bytes as u64));
        Ok(Self { source, tokenizer, engine, reward, stop, rng: Rng::new(config.job.seed, Purpose::Sample) })
    }

    /// Samples responses to the part of `prompts` that this rank shares with those of its tensor axis in the rollout; those in `finished`
    /// are taken as they are.
    pub fn rollout(
        &mut self,
        run: &Run,
        policy: Policy,
        step: u32,
        prompts: &[Prompt],
        finished: Vec<Response>,
    ) -> Result<Rollout> {
        let own = prompts_of(run, prompts.len());
        let config = &run.config.rollout;
        let mut done: HashMap<(usize, u32), Response> = finished
            .into_iter()
            .filter(|r| own.contains(&r.prompt) && (r.sample as usize) < config.samples_per_prompt)
            .map(|r| ((r.prompt, r.sample), r))
            .collect();
        let responses = self.generate(run, policy, step, prompts, &own, config, &done);
        let responses = run.axes.all.agree(responses)?;
        for response in responses.into_iter().flatten() {
            done.insert((response.prompt, response.sample), response);
        }
        let wanted = own.len() * config.samples_per_prompt;
        let mut short = [f64::from(u8::from(done.len() < wanted))];
        run.axes.all.all_reduce_max_f64(&mut short);
        let mut all: Vec<Response> = done.into_values().collect();
        all.sort_by_key(|r| (r.prompt, r.sample));
        let all = dealt(all, &run.rollout_axes.tensor);
        if short[0] > 0.0 {
            return Ok(Rollout { complete: None, finished: exchange::gather(&run.axes.all, &all)? });
        }
        let complete = all
            .into_iter()
            .map(|response| Experience {
                prompt: prompts[response.prompt].clone(),
                mask: vec![1; response.tokens.len()],
                response,
                ..Experience::default()
            })
            .collect();
        Ok(Rollout { complete: Some(complete), finished: Vec::new() })
    }

    /// Responses to `prompts[own]`, with `prompt` counted in `prompts`; `None` where the call was stopped before.
    fn generate(
        &mut self,
        run: &Run,
        policy: Policy,
        step: u32,
        prompts: &[Prompt],
        own: &Range<usize>,
        config: &RolloutConfig,
        done: &HashMap<(usize, u32), Response>,
    ) -> Result<Vec<Option<Response>>> {
        let mut requests =
            rollout::requests(&prompts[own.clone()], config, &self.stop, policy.transformer.arch.context)?;
        let ids = draw_ids(prompts);
        for request in &mut requests {
            request.prompt += own.start;
            request.prompt_id = ids[request.prompt];
        }
        requests.retain(|r| !done.contains_key(&(r.prompt, r.sample)));
        let Policy { transformer, weights } = policy;
        let model = Model { transformer, weights, tokenizer: Some(&self.tokenizer) };
        let bar = run.recorder.phase(Phase::Rollout.name(), requests.len() as u64);
        let mut hooks = Hooks {
            stop: &|| run.stop_requested_here(),
            progress: &mut |progress| bar.set(progress.finished as u64),
            finished: &mut |_, _| Ok(()),
        };
        let outcome = self.engine.generate(model, self.rng, step, &requests, &mut hooks)?;
        // Training takes the memory of the cache in its turn.
        self.engine.release();
        Ok(outcome.responses)
    }

    /// Scores of `prompts` answered once with `config` (evaluation), each on one rank; `None` where this rank was asked
    /// to stop before all were answered.
    pub fn answer(
        &mut self,
        run: &Run,
        policy: Policy,
        step: u32,
        prompts: &[Prompt],
        config: &RolloutConfig,
    ) -> Result<Option<Vec<(Response, f32)>>> {
        let own = prompts_of(run, prompts.len());
        let responses = self.generate(run, policy, step, prompts, &own, config, &HashMap::new())?;
        let responses: Option<Vec<Response>> = responses.into_iter().collect();
        let Some(responses) = responses.map(|all| dealt(all, &run.rollout_axes.tensor)) else { return Ok(None) };
        let asked: Vec<&Prompt> = responses.iter().map(|r| &prompts[r.prompt]).collect();
        let scored = self.reward.score(&asked, &responses.iter().collect::<Vec<_>>())?;
        Ok(Some(responses.into_iter().zip(scored).map(|(response, scored)| (response, scored.score)).collect()))
    }

    /// Fills the scores of this rank's samples; gives the means, over all ranks, of what rewards said beside them.
    pub fn reward(&mut self, run: &Run, samples: &mut [Experience]) -> Result<Vec<(String, f64)>> {
        let (prompts, responses): (Vec<_>, Vec<_>) = samples.iter().map(|s| (&s.prompt, &s.response)).unzip();
        let scored = run.axes.all.agree(self.reward.score(&prompts, &responses))?;
        let mut extra: BTreeMap<String, (f64, u64)> = BTreeMap::new();
        for (sample, scored) in samples.iter_mut().zip(scored) {
            sample.score = scored.score;
            for (name, value) in scored.extra {
                let sum = extra.entry(name).or_default();
                *sum = (sum.0 + f64::from(value), sum.1 + 1);
            }
        }
        let mine: Vec<(String, (f64, u64))> = extra.into_iter().collect();
        let mut total: BTreeMap<String, (f64, u64)> = BTreeMap::new();
        for (name, (sum, count)) in exchange::gather(&run.axes.all, &mine)? {
            let at = total.entry(name).or_default();
            *at = (at.0 + sum, at.1 + count);
        }
        Ok(total.into_iter().map(|(name, (sum, count))| (name, sum / count as f64)).collect())
    }
}

/// The prompts, of `count`, that this rank answers: those that share its matrices in the rollout answer the same.
fn prompts_of(run: &Run, count: usize) -> Range<usize> {
    let sharing = &run.rollout_axes.zero;
    share(count, 1, sharing.rank(), sharing.size())
}

/// This rank's part of what all ranks of `tensor` hold alike: with it, each thing is on one rank of the mesh, and in
/// order over all of them.
fn dealt<T>(mut all: Vec<T>, tensor: &Group) -> Vec<T> {
    let own = share(all.len(), 1, tensor.rank(), tensor.size());
    all.truncate(own.end);
    all.drain(..own.start);
    all
}

/// What keys the draws of each prompt of a batch: its id, moved for a row that the batch holds again (at the end of an
/// epoch, or where a step takes more prompts than there are), so that the second answer is not the first one's copy.
fn draw_ids(prompts: &[Prompt]) -> Vec<u64> {
    let mut seen: HashMap<u64, u64> = HashMap::new();
    prompts
        .iter()
        .map(|prompt| {
            let times = seen.entry(prompt.id).or_default();
            let id = prompt.id ^ times.wrapping_mul(0x9E37_79B9_7F4A_7C15);
            *times += 1;
            id
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_that_comes_again_in_a_batch_is_drawn_anew_and_others_keep_their_id() {
        let prompts: Vec<Prompt> = [7, 8, 7, 9, 7].map(|id| Prompt { id, ..Prompt::default() }).to_vec();
        let ids = draw_ids(&prompts);
        assert_eq!((ids[0], ids[1], ids[3]), (7, 8, 9));
        assert!(ids[2] != ids[0] && ids[4] != ids[0] && ids[2] != ids[4]);
    }
}
