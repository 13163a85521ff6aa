//! Rollout and reward of one rank's share of the prompts.

use super::reward_models::RewardModels;
use crate::comm::{Group, Stream, records};
use crate::config::Config;
use crate::config::mesh::RoleName;
use crate::config::rollout::RolloutConfig;
use crate::data::PromptSource;
use crate::device::cpu::pool::share;
use crate::device::null;
use crate::error::{Error, Result};
use crate::experience::{Experience, Finish, Prompt, Response};
use crate::launch::run::Run;
use crate::metrics::Phase;
use crate::model::Arch;
use crate::reward::{Reward, RewardContext, Scored};
use crate::rng::{Purpose, Rng};
use crate::rollout::{self, Engine, Hooks, Model, Request, Stop};
use crate::text::Tokenizer;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::fs;
use std::ops::Range;
use std::sync::Arc;

/// What produces experience: prompts, the engine, and the reward.
pub struct Collector {
    pub source: PromptSource,
    pub tokenizer: Arc<Tokenizer>,
    /// Over which responses reach all ranks, where roles are on ranks of their own.
    pub pipeline: Option<Stream>,
    engine: Engine,
    reward: Reward,
    reward_models: RewardModels,
    stop: Arc<Stop>,
    rng: Rng,
    /// Tokens of the actor's longest row.
    context: usize,
    /// Whether the run has logged why no graphs are captured.
    graphs_logged: bool,
}

/// The responses of one rank to a batch of prompts.
#[derive(Serialize, Deserialize)]
pub struct RankResponses {
    /// False where this rank was asked to stop before all prompts were answered.
    pub complete: bool,
    /// In order; `Response::prompt` is the index in the step.
    pub responses: Vec<Response>,
}

impl Collector {
    /// `weights_bytes` of weights are on the device in addition to those of training while the cache is allocated.
    pub fn new(
        run: &Run,
        source: PromptSource,
        tokenizer: Arc<Tokenizer>,
        arch: &Arch,
        weights_bytes: usize,
        reward_models: RewardModels,
    ) -> Result<Self> {
        let config = &run.config;
        config.rollout.check()?;
        let reward = run.ranks.all.agree(reward(run, &source))?;
        let mut eos = arch.eos_tokens.clone();
        eos.extend(tokenizer.eos_ids().iter().filter(|id| !arch.eos_tokens.contains(id)));
        let stop = Arc::new(Stop::new(&config.rollout, &eos));
        let engine = Engine::new(&config.rollout, run.memory_free().saturating_sub(weights_bytes as u64));
        let rng = Rng::new(config.job.seed, Purpose::Sample);
        let pipeline = (run.ranks.placements.len() > 1).then(|| Stream::new("pipeline", &[&run.ranks.all]));
        let context = arch.context;
        Ok(Self {
            source,
            tokenizer,
            pipeline,
            engine,
            reward,
            reward_models,
            stop,
            rng,
            context,
            graphs_logged: false,
        })
    }

    /// Samples responses to this rank's share of the prompts `part`, but for `finished` ones. All ranks of the actor call this.
    pub fn rollout(
        &mut self,
        run: &Run,
        model: Model,
        step: u32,
        prompts: &[Prompt],
        part: &Range<usize>,
        finished: &[Response],
    ) -> Result<RankResponses> {
        let own = prompts_of(run, part);
        let config = &run.config.rollout;
        let of_each = run.config.responses_per_prompt();
        let wanted = |r: &&Response| own.contains(&r.prompt) && (r.sample as usize) < of_each;
        let mut all: Vec<Response> = finished.iter().filter(wanted).cloned().collect();
        let greedy = greedy(config);
        let configs = if run.config.has_greedy() { &[config, &greedy][..] } else { &[config] };
        let responses = self.generate(run, model, step, prompts, &own, configs, &all);
        let responses = run.ranks.axes.all.agree(responses)?;
        self.log_refused_graphs(run);
        all.extend(responses.into_iter().flatten());
        all.sort_by_key(|r| (r.prompt, r.sample));
        let complete = all.len() == own.len() * of_each;
        Ok(RankResponses { complete, responses: own_share(all, &run.ranks.rollout_axes.tensor) })
    }

    /// The responses of all ranks to the prompts `batch` on a null device, which has no other ranks: each as long as it may be.
    pub fn responses_of_all(&self, config: &Config, prompts: &[Prompt], wave: &Range<usize>) -> RankResponses {
        let answers = |prompt: usize| {
            let tokens = rollout::new_tokens_max(&config.rollout, prompts[prompt].tokens.len(), self.context);
            let (tokens, logprobs, sample_logprobs) = (vec![0; tokens], vec![0.0; tokens], vec![0.0; tokens]);
            let finish = Finish::Length;
            let one = Response { prompt, tokens, logprobs, sample_logprobs, finish, ..Response::default() };
            (0..config.responses_per_prompt() as u32).map(move |sample| Response { sample, ..one.clone() })
        };
        RankResponses { complete: true, responses: wave.clone().flat_map(answers).collect() }
    }

    /// Logs once why decoding uses no graphs, where some rank could not capture one. All ranks of the actor call this.
    fn log_refused_graphs(&mut self, run: &Run) {
        if self.graphs_logged || run.decoding().is_none() {
            return;
        }
        let of_ranks = run.ranks.axes.all.all_gather_bytes(self.engine.refused().unwrap_or_default().as_bytes());
        let Some(why) = of_ranks.iter().find(|why| !why.is_empty()) else { return };
        let why = String::from_utf8_lossy(why);
        run.recorder.warn(&format!("decoding goes on kernel by kernel, as a CUDA graph cannot be captured: {why}"));
        self.graphs_logged = true;
    }

    /// Responses to `prompts[own]`, with `prompt` counted in `prompts`; `None` for those that did not finish before a stop. Those
    /// of each of `configs` are numbered behind those of the one before.
    fn generate(
        &mut self,
        run: &Run,
        model: Model,
        step: u32,
        prompts: &[Prompt],
        own: &Range<usize>,
        configs: &[&RolloutConfig],
        done: &[Response],
    ) -> Result<Vec<Option<Response>>> {
        let mut requests: Vec<Request> = Vec::new();
        for config in configs {
            let first = requests.last().map_or(0, |last| last.sample + 1);
            let more = rollout::requests(&prompts[own.clone()], config, &self.stop, self.context)?;
            requests.extend(more.into_iter().map(|request| Request { sample: first + request.sample, ..request }));
        }
        requests.sort_by_key(|request| request.prompt);
        let ids = random_ids(prompts);
        for request in &mut requests {
            request.prompt += own.start;
            request.prompt_id = ids[request.prompt];
        }
        let done: HashSet<(usize, u32)> = done.iter().map(|r| (r.prompt, r.sample)).collect();
        requests.retain(|r| !done.contains(&(r.prompt, r.sample)));
        let model = Model { tokenizer: Some(&self.tokenizer), ..model };
        if let Some(bytes) = run.cache_bytes() {
            self.engine.allow(bytes);
        }
        let bar = run.recorder.phase(Phase::Rollout.name(), requests.len() as u64);
        let mut hooks = Hooks {
            stop: &|| run.stop_requested_here(),
            progress: &mut |progress| bar.set_position(progress.finished as u64),
            drawn: &mut |_, _| {},
            finished: &mut |_, _| Ok(()),
        };
        let outcome = self.engine.generate(model, self.rng, step, &requests, &mut hooks)?;
        // Training needs the memory of the cache.
        self.engine.release();
        Ok(outcome.responses)
    }

    /// Scores and lengths of responses to `prompts`, one sample each, each on one rank, without those that a reward failed on;
    /// `None` where a rank was asked to stop before all were answered. `model`: the actor, where it is on this rank. All ranks of the run call this.
    pub fn evaluate(
        &mut self,
        run: &Run,
        model: Option<Model>,
        step: u32,
        prompts: &[Prompt],
        config: &RolloutConfig,
    ) -> Result<Option<Vec<(Scored, u64)>>> {
        let own = prompts_of(run, &(0..prompts.len()));
        let mut answer = |model| {
            let responses = self.generate(run, model, step, prompts, &own, &[config], &[])?;
            let Some(responses) = responses.into_iter().collect() else { return Ok(None) };
            let responses: Vec<Response> = own_share(responses, &run.ranks.rollout_axes.tensor);
            let asked: Vec<&Prompt> = responses.iter().map(|r| &prompts[r.prompt]).collect();
            let scored = self.reward.score(&asked, &responses.iter().collect::<Vec<_>>())?;
            Ok(Some(scored.into_iter().zip(responses).collect()))
        };
        let mine: Option<Vec<(Scored, Response)>> =
            run.ranks.all.agree(model.map_or(Ok(Some(Vec::new())), &mut answer))?;
        if run.ranks.all.any(mine.is_none()) {
            return Ok(None);
        }
        let all = records::gather(&run.ranks.all, &mine.unwrap_or_default())?;
        let lengths: Vec<u64> = all.iter().map(|(_, response)| response.tokens.len() as u64).collect();
        let (mut scored, responses): (Vec<Scored>, Vec<Response>) = all.into_iter().unzip();
        if !run.config.reward.models.is_empty() {
            let of = |response: Response| Experience {
                prompt: prompts[response.prompt].clone(),
                response,
                ..Experience::default()
            };
            let samples: Vec<Experience> = responses.into_iter().map(of).collect();
            let found = if run.ranks.has(RoleName::Reward) {
                self.reward_models.score(run, &samples, &mut scored).map(|()| scored)
            } else {
                Ok(Vec::new())
            };
            let of_placements = run.ranks.of_placements(run.ranks.all.agree(found)?)?;
            scored = of_placements.into_iter().find(|scored| !scored.is_empty()).unwrap_or_default();
        }
        let known = scored.into_iter().zip(lengths).filter(|(scored, _)| scored.failed.is_none());
        Ok(Some(known.collect()))
    }

    /// The rewards of all `samples`. All ranks of the reward's placement call this with the same samples; each scores its share.
    pub fn reward(&mut self, run: &Run, samples: &[Experience]) -> Result<Vec<Scored>> {
        let axes = &run.ranks.axes.all;
        let own = &samples[share(samples.len(), 1, axes.rank(), axes.size())];
        let (prompts, responses): (Vec<_>, Vec<_>) = own.iter().map(|s| (&s.prompt, &s.response)).unzip();
        let scored = axes.agree(self.reward.score(&prompts, &responses))?;
        let mut scored = records::gather(axes, &scored)?;
        if null::is_active() {
            // A null device has no peers, whose scores are missing.
            scored.resize(samples.len(), Scored::default());
        }
        axes.agree(self.reward_models.score(run, samples, &mut scored))?;
        Ok(scored)
    }
}

/// One response to each prompt, of the tokens that are most likely.
pub fn greedy(config: &RolloutConfig) -> RolloutConfig {
    RolloutConfig { samples_per_prompt: 1, temperature: 0.0, ..config.clone() }
}

/// The reward, which sees the rows of `source` and logs beside this rank.
fn reward(run: &Run, source: &PromptSource) -> Result<Reward> {
    let Config { data, reward, base, .. } = &run.config;
    let rows = source.lookup(data);
    let logs = run.dir.join("logs");
    let is_logged = !run.dry_run && !reward.python.is_empty();
    if is_logged {
        fs::create_dir_all(&logs).map_err(|e| Error::io("create", &logs, &e))?;
    }
    let mut columns: Vec<String> = Vec::new();
    for id in source.first_ids() {
        columns.extend(rows(id)?.columns.into_iter().map(|(name, _)| name));
    }
    let log = is_logged.then(|| logs.join(format!("reward-rank-{}.log", run.ranks.world.rank)));
    let context = RewardContext { rows: Some(Arc::new(rows)), columns, log };
    Reward::new(reward, base, &context)
}

/// The prompts of `part` that this rank answers: ranks that share its matrices in the rollout answer the same.
fn prompts_of(run: &Run, part: &Range<usize>) -> Range<usize> {
    let sharing = &run.ranks.rollout_axes.zero;
    let own = share(part.len(), 1, sharing.rank(), sharing.size());
    part.start + own.start..part.start + own.end
}

/// This rank's share of results that all ranks of `tensor` hold identically: with it each result is on one rank of the mesh, in order.
fn own_share<T>(mut all: Vec<T>, tensor: &Group) -> Vec<T> {
    let own = share(all.len(), 1, tensor.rank(), tensor.size());
    all.drain(own).collect()
}

/// The ids that key the random numbers of each prompt of a batch. A row that the batch holds twice (at the end of an epoch, or
/// where a step takes more prompts than there are) gets another id the second time, so that the second answer is no copy.
fn random_ids(prompts: &[Prompt]) -> Vec<u64> {
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
        let ids = random_ids(&prompts);
        assert_eq!((ids[0], ids[1], ids[3]), (7, 8, 9));
        assert!(ids[2] != ids[0] && ids[4] != ids[0] && ids[2] != ids[4]);
    }
}
