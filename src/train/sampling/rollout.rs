//! Rollout and reward of one rank's share of the prompts.

use super::episodes::{self, Episodes};
use super::planned_responses::PlannedResponses;
use super::reward_models::RewardModels;
use super::shares::{ClaimedPrompts, Key, PromptQueue, StepSlice, expect, own_share, share_of};
use crate::comm::{Group, Stream, records};
use crate::config::Config;
use crate::config::mesh::RoleName;
use crate::config::rollout::RolloutConfig;
use crate::data::PromptSource;
use crate::error::{Error, Kind, Result};
use crate::experience::{Experience, Finish, Prompt, Response};
use crate::launch::run::Run;
use crate::metrics::Phase;
use crate::model::Arch;
use crate::reward::environment::Environment;
use crate::reward::feedback::Texts;
use crate::reward::{Notes, Reward, RewardContext, Scored};
use crate::rng::{Purpose, Rng};
use crate::rollout::turns::Turns;
use crate::rollout::{self, Beams, Engine, Hooks, Model, Outcome, Queue, Request, Stop};
use crate::sys::bounded_log::BoundedLog;
use crate::sys::files;
use crate::sys::trace::{self, Category};
use crate::text::Tokenizer;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The producer of experience: prompts, the engine, and the reward.
pub struct Collector {
    pub source: PromptSource,
    pub tokenizer: Arc<Tokenizer>,
    /// The stream that carries responses to all ranks, if roles have their own ranks.
    pub pipeline: Option<Stream>,
    engine: Engine,
    /// The environment that answers turns, on the ranks that send the requests.
    environment: Option<Environment>,
    /// The number of phases with turns so far.
    rounds: u64,
    /// The error that ended the last of these phases early.
    env_error: Option<Error>,
    /// Load of the last phase.
    load: Load,
    pub reward: Reward,
    /// Prompt and sample of each response that this rank sends to the reward, in the order of its positions.
    pending_keys: Vec<Key>,
    reward_models: RewardModels,
    stop: Arc<Stop>,
    /// The maximum length of the actor's rows, in tokens.
    context: usize,
    /// The entries of `rollout.response_tokens_schedule` that no longer apply.
    pub lengths_skipped: usize,
    /// In a plan, the responses of all ranks.
    pub planned: Option<PlannedResponses>,
    /// Whether the run has logged the reason why graphs are not captured.
    graphs_logged: bool,
}

/// A response and its scores.
pub type Answer = (Response, Scored);

/// The longest wait for rewards before ranks synchronize again.
const WAIT: Duration = Duration::from_secs(1);

/// The cost of sampling responses.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Load {
    pub seconds: f64,
    pub preemptions: usize,
    pub drawn: usize,
    /// Tokens that could have been sampled in as many forward passes.
    pub places: usize,
    /// Prompts beyond an equal share.
    pub stolen: usize,
    /// See `Outcome`.
    pub prompt_tokens: usize,
    pub prefix_hit_tokens: usize,
}

impl Load {
    /// The load of a phase that began at `start` and decoded at most `batch_max` sequences at once. `stolen` is left at
    /// 0.
    fn new(outcome: &Outcome, batch_max: usize, start: Instant) -> Self {
        Self {
            seconds: start.elapsed().as_secs_f64(),
            preemptions: outcome.preemptions,
            drawn: outcome.responses.iter().flatten().map(Response::tokens_without_weights).sum(),
            places: outcome.forwards * batch_max,
            stolen: 0,
            prompt_tokens: outcome.prompt_tokens,
            prefix_hit_tokens: outcome.prefix_hit_tokens,
        }
    }
}

/// Prompts to answer, and how.
struct RequestBatch<'a> {
    /// The steps that the prompts belong to.
    slices: &'a [StepSlice],
    prompts: &'a [Prompt],
    /// The prompts to answer now.
    part: &'a Range<usize>,
    /// Settings of the responses to each prompt. The responses of each are numbered after those of the one before.
    configs: &'a [&'a RolloutConfig],
    /// If set, responses come from beam search.
    beams: Option<Beams>,
    /// Responses of an earlier phase: finished ones are kept, the others are continued.
    partial: &'a [Response],
    /// Whether responses go to the reward of these ranks.
    streams: bool,
}

/// The responses of one rank to a batch of prompts.
#[derive(Serialize, Deserialize)]
pub struct RankResponses {
    /// False if this rank was asked to stop before all prompts were answered.
    pub complete: bool,
    /// The responses in order; `Response::prompt` is the index in the step.
    pub responses: Vec<Response>,
    /// The load, on the first of the ranks that share a model.
    pub load: Option<Load>,
}

impl Collector {
    /// Opens the collector. While the KV cache is allocated, `weights_bytes` of weights are on the device in addition
    /// to training's weights.
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
        let texts = Texts {
            tokenizer: Arc::clone(&tokenizer),
            template: config.data.chat_template_args.clone(),
            vocabulary: arch.vocabulary,
            blind: episodes::blind(config, arch, &tokenizer),
        };
        let rewards = context(run, &source, texts).and_then(|context| {
            Ok((environment(run, &context)?, Reward::new(&config.reward, &config.base, &context)?))
        });
        let (environment, reward) = run.ranks.all.agree(rewards)?;
        let stop = Stop::of_model(&config.rollout, &arch.eos_tokens, Some(&tokenizer));
        let sees = source.have_images() || episodes::may_show_images(config, arch, &tokenizer);
        let stop = Arc::new(if sees { stop.with_images(&tokenizer) } else { stop });
        let engine = Engine::new(&config.rollout, run.memory_free().saturating_sub(weights_bytes as u64));
        let pipeline = (run.ranks.placements.len() > 1).then(|| Stream::new("pipeline", &run.ranks.all));
        Ok(Self {
            source,
            tokenizer,
            pipeline,
            engine,
            environment,
            rounds: 0,
            env_error: None,
            load: Load::default(),
            reward,
            pending_keys: Vec::new(),
            reward_models,
            stop,
            context: arch.context,
            lengths_skipped: 0,
            planned: PlannedResponses::new(&config.rollout, arch),
            graphs_logged: false,
        })
    }

    /// Samples responses to this rank's share of the prompts `part`, which belong to the steps of `slices`. Finished
    /// responses in `partial` are kept, and the others there are continued. Each response that ends is sent to its
    /// rewards, if these are on this rank. All ranks that sample call this.
    pub fn rollout(
        &mut self,
        run: &Run,
        model: Model,
        slices: &[StepSlice],
        prompts: &[Prompt],
        part: &Range<usize>,
        partial: &[Response],
    ) -> Result<RankResponses> {
        let config = &run.config.rollout;
        let greedy = greedy(config);
        let configs = if run.config.uses().greedy { &[config, &greedy][..] } else { &[config] };
        let streams = run.ranks.has(RoleName::Reward);
        self.reward.steps_done = u64::from(slices[0].step).saturating_sub(1);
        let batch = RequestBatch { slices, prompts, part, configs, beams: None, partial, streams };
        let answered = self.generate(run, model, &batch);
        let (responses, complete) = run.ranks.axes.all.agree(answered)?;
        self.log_refused_graphs(run);
        let tensor = &run.ranks.rollout_axes.tensor;
        let load = (tensor.rank() == 0).then_some(self.load);
        Ok(RankResponses { complete, responses: own_share(responses, tensor), load })
    }

    /// Logs once why decoding uses no graphs, if some rank could not capture one. All ranks of the actor call this.
    fn log_refused_graphs(&mut self, run: &Run) {
        if self.graphs_logged || run.decoding().is_none() {
            return;
        }
        let why = run.ranks.axes.all.first_words(self.engine.refused().unwrap_or_default());
        let Some(why) = why else { return };
        run.recorder.warn(&format!("CUDA graph capture failed, decoding without graphs until the next rollout: {why}"));
        self.graphs_logged = true;
    }

    /// Responses to the prompts of a batch that this rank takes, including those to continue, and whether none is
    /// missing. A stop ends it early.
    fn generate(&mut self, run: &Run, model: Model, batch: &RequestBatch) -> Result<(Vec<Response>, bool)> {
        let RequestBatch { slices, prompts, part, configs, beams, streams, .. } = *batch;
        let (config, axes) = (&run.config.rollout, &run.ranks.rollout_axes);
        let of_each: usize = configs.iter().map(|config| config.samples_per_prompt).sum();
        let (queue, failed) = (PromptQueue::new(run, part, beams.is_none()), RefCell::new(None));
        let rng = Rng::new(run.config.job.seed, Purpose::Sample);
        let (requests, done) = self.requests(batch, &queue.prompts)?;
        let model = Model { tokenizer: Some(&self.tokenizer), ..model };
        if let Some(bytes) = run.cache_bytes() {
            self.engine.allow(bytes);
        }
        let share = part.len().div_ceil(axes.zero.size()) * of_each;
        let batch_max = config.batch_max.min(share);
        let bar = run.recorder.phase(Phase::Rollout.name(), share as u64);
        self.rounds += 1;
        let (tokenizer, round, waited) = (&*self.tokenizer, self.rounds, &run.reward_wait_s);
        let episodes = |of| Episodes::new(of, prompts, &requests, tokenizer, round, &failed, waited);
        let mut episodes = self.environment.as_mut().map(episodes);
        let streams = streams.then(|| axes.tensor.clone());
        let whole = slices.iter().find(|slice| slice.tokens_max < usize::MAX);
        let whole = whole.map_or(prompts.len(), |slice| slice.prompts.start);
        let (done, reward, pending_keys, places) = (&done, &mut self.reward, &mut self.pending_keys, HashMap::new());
        let taken = ClaimedPrompts { reward, pending_keys, prompts, of_each, done, streams, places, whole };
        let (taken, engine, load) = (RefCell::new(taken), &mut self.engine, &mut self.load);
        let outcome = queue.claim(axes, &taken, |next| {
            let place = |prompt: usize| requests.partition_point(|request| request.prompt < prompt);
            let mut next = || next().map(|prompt| place(prompt)..place(prompt + 1));
            // A beam search begins with all of its prompts.
            while beams.is_some() && next().is_some() {}
            let mut hooks = Hooks {
                turns: episodes.as_mut().map(|episodes| episodes as &mut dyn Turns),
                stop: Some(&|| run.stop_requested_here() || failed.borrow().is_some()),
                progress: Some(&mut |progress| bar.set_position(progress.finished as u64)),
                finished: Some(&mut |_, response| {
                    taken.borrow_mut().push(response);
                    Ok(())
                }),
                queue: Some(Queue { batch_max, next: &mut next }),
                ..Hooks::default()
            };
            let start = Instant::now();
            let outcome = match beams {
                None => engine.generate(model, rng, slices[0].step, &requests, &mut hooks),
                Some(beams) => engine.beam_search(model, beams, &requests, &mut hooks),
            };
            *load = outcome.as_ref().map_or_else(|_| Load::default(), |done| Load::new(done, batch_max, start));
            outcome
        });
        let taken = taken.into_inner();
        self.load.stolen = taken.places.len().saturating_sub(queue.own);
        if let Some(environment) = &mut self.environment {
            environment.cancel();
        }
        self.env_error = failed.into_inner();
        let outcome = outcome?;
        // Training needs the memory of the cache.
        self.engine.release();
        Ok(taken.with_done(outcome.responses.into_iter().flatten()))
    }

    /// The requests for the prompts `own`, and the responses that need no request: they have ended, or have the maximum
    /// length of this phase.
    fn requests(&self, batch: &RequestBatch, own: &Range<usize>) -> Result<(Vec<Request>, Vec<Response>)> {
        let RequestBatch { slices, prompts, configs, partial, .. } = *batch;
        let mut requests: Vec<Request> = Vec::new();
        for config in configs {
            let first = requests.last().map_or(0, |last| last.sample + 1);
            let more = rollout::requests(&prompts[own.clone()], config, &self.stop, self.context)?;
            requests.extend(more.into_iter().map(|request| Request { sample: first + request.sample, ..request }));
        }
        requests.sort_by_key(|request| request.prompt);
        let ids: Vec<u64> = slices.iter().flat_map(|slice| random_ids(&prompts[slice.prompts.clone()])).collect();
        let mut known: HashMap<Key, &Response> = partial.iter().map(|r| ((r.prompt, r.sample), r)).collect();
        requests.retain_mut(|request| {
            request.prompt += own.start;
            request.prompt_id = ids[request.prompt];
            let slice = slices.iter().find(|slice| slice.prompts.contains(&request.prompt)).expect("a slice has it");
            let limit = configs[0].scheduled_tokens(u64::from(slice.step), self.lengths_skipped);
            let longest = request.new_tokens_max.min(limit.unwrap_or(usize::MAX));
            (request.step, request.new_tokens_max) = (Some(slice.step), longest.min(slice.tokens_max));
            let Some(partial) = known.get(&(request.prompt, request.sample)) else { return true };
            let drawn = partial.tokens.len();
            let goes_on =
                partial.finish == Finish::Length && drawn < request.new_tokens_max && self.environment.is_none();
            if goes_on {
                request.partial = Some(Arc::new((*partial).clone()));
                known.remove(&(request.prompt, request.sample));
            }
            goes_on
        });
        Ok((requests, known.into_values().cloned().collect()))
    }

    /// Sends this rank's share of `samples` to the reward, if they come from other ranks. All ranks of the reward's
    /// placement call this with the same samples.
    pub fn push(&mut self, run: &Run, samples: &[Experience], step: u64) {
        self.reward.steps_done = step.saturating_sub(1);
        let own = &samples[share_of(samples.len(), &run.ranks.axes.all)];
        let first = expect(&mut self.reward, &mut self.pending_keys, own.iter().map(Experience::key));
        own.iter().enumerate().for_each(|(i, sample)| self.reward.push(first + i, &sample.prompt, &sample.response));
        self.reward.flush();
    }

    /// The scores of all responses that ranks of `all` have sent, on each of these ranks. `None` if a rank was asked to
    /// stop before all scores were there. All ranks of the group call this.
    pub fn scored(&mut self, run: &Run, all: &Group) -> Result<Option<HashMap<Key, Scored>>> {
        let start = Instant::now();
        let (is_scored, is_stopped) = loop {
            let asked = Instant::now();
            let is_scored = self.reward.wait(asked + WAIT);
            trace::since(Category::Wait, || "rewards", asked);
            let stops = !is_scored && run.stop_requested_here();
            // No rank stays in a collective for long, even if a reward takes long.
            let mut of_any = [!is_scored, stops, self.reward.has_failed()].map(|is| f64::from(u8::from(is)));
            all.all_reduce_max_f64(&mut of_any);
            let [waits, stops, failed] = of_any.map(|is| is > 0.0);
            if !waits || stops || failed {
                break (is_scored, stops && !failed);
            }
        };
        run.reward_wait_s.set(run.reward_wait_s.get() + start.elapsed().as_secs_f64());
        if let Some(note) = all.first_words(&self.reward.next_note().unwrap_or_default()) {
            run.recorder.warn(&note);
        }
        let pending_keys = std::mem::take(&mut self.pending_keys);
        let scored = if is_scored && !is_stopped { self.reward.finish() } else { Ok(Vec::new()) };
        self.reward.cancel();
        if is_stopped {
            return Ok(None);
        }
        let mine: Vec<(Key, Scored)> = pending_keys.into_iter().zip(all.agree(scored)?).collect();
        Ok(Some(records::gather(all, &mine)?.into_iter().collect()))
    }

    /// Removes and returns the score of a response. A plan has only the scores of this rank, and zeros for the others.
    pub fn take_score(&self, scored: &mut HashMap<Key, Scored>, key: Key) -> Scored {
        let found = scored.remove(&key);
        assert!(found.is_some() || self.planned.is_some(), "response {key:?} was not scored");
        found.unwrap_or_default()
    }

    /// Drops the responses that were sent to the reward, because some are missing.
    ///
    /// # Errors
    /// The environment's error, if it is the reason.
    pub fn cancel(&mut self) -> Result<()> {
        self.pending_keys.clear();
        self.reward.cancel();
        self.env_error.take().map_or(Ok(()), Err)
    }

    /// Answers to `prompts` on all ranks, without responses on which a reward failed. The answers to a prompt are
    /// consecutive. `model`: the actor, if it is on this rank. With `beams` the answers come from beam search. All
    /// ranks of the run call this.
    ///
    /// # Errors
    /// `Stopped` if a rank was asked to stop before all prompts were answered.
    pub fn evaluate(
        &mut self,
        run: &Run,
        model: Option<Model>,
        step: u32,
        prompts: &[Prompt],
        config: &RolloutConfig,
        beams: Option<Beams>,
    ) -> Result<Vec<Answer>> {
        let stopped = || Error::new(Kind::Stopped, "stopped during the evaluation");
        // A plan samples as many responses as there are beams. Only the best one is scored.
        let searched = beams.filter(|_| self.planned.is_some()).map_or(config.samples_per_prompt, |beams| beams.count);
        let (beams, sampled) = (beams.filter(|_| self.planned.is_none()), config.samples_per_prompt);
        let config = &RolloutConfig { samples_per_prompt: searched, ..config.clone() };
        let mut answer = |model| {
            let slices = &[StepSlice::whole(step, prompts.len())];
            let (part, configs) = (&(0..prompts.len()), &[config][..]);
            let batch = RequestBatch { slices, prompts, part, configs, beams, partial: &[], streams: true };
            let (responses, is_complete) = self.generate(run, model, &batch)?;
            Ok(is_complete.then(|| own_share(responses, &run.ranks.rollout_axes.tensor)))
        };
        let mine: Option<Vec<Response>> = run.ranks.all.agree(model.map_or(Ok(Some(Vec::new())), &mut answer))?;
        if run.ranks.all.any(mine.is_none()) {
            let cancelled = self.cancel();
            return run.ranks.all.agree(cancelled).and(Err(stopped()));
        }
        let mut by_key = self.scored(run, &run.ranks.all)?.ok_or_else(stopped)?;
        let mut responses: Vec<Response> = records::gather(&run.ranks.all, &mine.unwrap_or_default())?;
        responses.retain(|response| (response.sample as usize) < sampled);
        responses.sort_by_key(|response| (response.prompt, response.sample));
        let score = |r: &Response| self.take_score(&mut by_key, (r.prompt, r.sample));
        let mut scored: Vec<Scored> = responses.iter().map(score).collect();
        if run.config.reward.has_models() {
            let of = |response: &Response| Experience {
                prompt: prompts[response.prompt].clone(),
                response: response.clone(),
                ..Experience::default()
            };
            let samples: Vec<Experience> = responses.iter().map(of).collect();
            let found = if run.ranks.has(RoleName::Reward) {
                self.reward_models.score(run, &samples, &mut scored).map(|()| scored)
            } else {
                Ok(Vec::new())
            };
            let of_placements = run.ranks.of_placements(&run.ranks.all, run.ranks.all.agree(found)?)?;
            scored = of_placements.into_iter().find(|scored| !scored.is_empty()).unwrap_or_default();
        }
        let known = responses.into_iter().zip(scored).filter(|(_, scored)| scored.failed.is_none());
        Ok(known.collect())
    }

    /// The scores of `samples` by the reward models. All ranks of the reward's placement call this with the same
    /// samples.
    pub fn reward(&mut self, run: &Run, samples: &[Experience]) -> Result<Vec<Scored>> {
        let mut scored = vec![Scored::default(); samples.len()];
        run.ranks.axes.all.agree(self.reward_models.score(run, samples, &mut scored))?;
        Ok(scored)
    }
}

/// Settings for one greedy response to each prompt.
pub fn greedy(config: &RolloutConfig) -> RolloutConfig {
    RolloutConfig { samples_per_prompt: 1, temperature: 0.0, ..config.clone() }
}

/// The context of rewards: the rows of `source`, and a log file next to this rank's log.
fn context(run: &Run, source: &PromptSource, texts: Texts) -> Result<RewardContext> {
    let Config { data, reward, .. } = &run.config;
    let logs = run.dir.join("logs");
    let open = || {
        files::create_dir_all(&logs)?;
        let path = logs.join(format!("reward-rank-{}.log", run.ranks.world.rank));
        BoundedLog::open(&path).map_err(|e| Error::io("open", &path, &e))
    };
    let log = (!run.dry_run && reward.has_python()).then(open).transpose()?;
    let (rows, columns) = (Arc::new(source.lookup(data)), source.columns(data)?);
    let (texts, steps) = (Some(Arc::new(texts)), run.config.job.steps);
    Ok(RewardContext { rows: Some(rows), columns, log, texts, steps, notes: Notes::default() })
}

/// The environment. The first of the ranks that share a schedule calls it. All of them know whether there is one.
fn environment(run: &Run, context: &RewardContext) -> Result<Option<Environment>> {
    let config = run.config.reward.environment.first().filter(|_| run.ranks.samples());
    config.map(|config| Environment::new(&run.config.reward, config, &run.config.base, context)).transpose()
}

/// The ids that key the random numbers of each prompt of a batch. A row may occur twice in a batch, at the end of an
/// epoch or if a step takes more prompts than there are. Its second occurrence gets another id, so that its answer is
/// not a copy.
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
    fn a_row_repeated_in_a_batch_is_sampled_with_a_new_id_and_other_rows_keep_their_id() {
        let prompts: Vec<Prompt> = [7, 8, 7, 9, 7].map(|id| Prompt { id, ..Prompt::default() }).to_vec();
        let ids = random_ids(&prompts);
        assert_eq!((ids[0], ids[1], ids[3]), (7, 8, 9));
        assert!(ids[2] != ids[0] && ids[4] != ids[0] && ids[2] != ids[4]);
    }
}
