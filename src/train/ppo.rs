//! PPO and its relatives on one page: prompts -> rollout -> reward -> advantage -> { loss -> gradient -> step }.

use super::clock::Clock;
use super::collect::Collector;
use super::policy::{Sampler, rollout_bytes};
use super::role::{Learner, Role};
use super::setup::{Run, check_context, check_same_vocabulary, check_vocabulary};
use super::state::{self, State, UpdateWork, Work};
use super::update::{Update, UpdateSums, larger};
use super::{evaluate, exchange, finish, report, score};
use crate::advantage::AdvantageState;
use crate::checkpoint;
use crate::comm::phase;
use crate::config::ppo::KlIn;
use crate::data::{self, PromptSource};
use crate::error::{Error, Kind, Result};
use crate::experience::{Experience, Response};
use crate::metrics::{Phase, Phases, keys};
use crate::model::Head;
use crate::rng::{Purpose, Rng};
use crate::text::Tokenizer;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// One PPO job. `reference` and `critic` exist where the configuration needs them.
pub struct Ppo {
    actor: Learner,
    critic: Option<Learner>,
    reference: Option<Role>,
    sampler: Sampler,
    collector: Collector,
    state: State,
    work: Option<Work>,
    steps: u64,
}

/// Runs the job: opens, resumes, trains, exports.
pub fn run(mut run: Run) -> Result<()> {
    let mut ppo = Ppo::open(&mut run)?;
    if run.dry_run {
        run.recorder.say("dry run: the job is ready to start");
        return Ok(());
    }
    ppo.train(&mut run)?;
    let Ppo { actor, collector, state, .. } = &mut ppo;
    finish::finish(&mut run, &actor.role, state.step, collector.source.ledger())
}

type Models = (Arc<Tokenizer>, Role, Option<Role>, Option<Role>);

/// The tokenizer, and actor, critic and reference where the configuration needs them.
fn models(run: &Run) -> Result<Models> {
    let config = &run.config;
    let tokenizer = run.tokenizer()?;
    let actor = run.role("actor", &config.model.actor, Head::LanguageModel)?;
    run.axes.all.agree(check_vocabulary(&actor, &tokenizer))?;
    let reference =
        if config.needs_reference() { Some((config.model.reference_dir(), Head::LanguageModel)) } else { None };
    let critic = if config.ppo.advantage.has_critic() { Some((config.model.critic_dir(), Head::Value)) } else { None };
    let load = |name, wanted: Option<(&Path, Head)>| {
        let Some((dir, head)) = wanted else { return Ok(None) };
        let role = run.role(name, dir, head)?;
        run.axes.all.agree(check_same_vocabulary(&actor, &role).and_then(|()| check_context(&actor, &role, config)))?;
        Ok(Some(role))
    };
    let mut reference = load("reference", reference)?;
    if let Some(reference) = &mut reference {
        run.offload_role(reference)?;
    }
    let critic = load("critic", critic)?;
    Ok((tokenizer, actor, critic, reference))
}

impl Ppo {
    /// Loads everything, checks that it fits together, and continues from the newest checkpoint.
    pub fn open(run: &mut Run) -> Result<Self> {
        if run.config.ppo.overlong_tokens_max == 0 {
            run.config.ppo.overlong_tokens_max = run.config.rollout.response_tokens_max;
        }
        let config = run.config.clone();
        if config.job.steps == 0 {
            return run.axes.all.agree(Err(Error::usage("job.steps is 0, a ppo job needs at least 1")));
        }
        let (tokenizer, actor, critic, reference) = models(run)?;
        let cache = run.dir.join("data");
        let vocabulary = actor.arch().vocabulary;
        let shard = || data::prepare(&config.data, data::Part::Prompt, &tokenizer, vocabulary, &cache).map(drop);
        run.axes.all.agree(if run.axes.all.rank() == 0 { shard() } else { Ok(()) })?;
        let source = PromptSource::open(&config.data, &tokenizer, vocabulary, &cache, config.job.seed);
        let source = run.axes.all.agree(source.and_then(|s| s.check_context(actor.arch().context).map(|()| s)))?;

        let samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt;
        let minibatches_per_epoch = samples.div_ceil(config.ppo.minibatch_samples);
        let updates = config.job.steps * (config.ppo.epochs * minibatches_per_epoch) as u64;
        let plan = report::memory_plan(run, &actor, critic.as_ref(), reference.as_ref());
        run.check_resources(&plan, std::iter::once(&actor).chain(&critic))?;
        let learner = |role, optim| Learner::new(role, optim, &config.gradient, updates, &run.axes, run.stage);
        let sampler = run.axes.all.agree(Sampler::new(&actor, &run.axes, &run.rollout_axes))?;
        let beside = rollout_bytes(run, &actor);
        let mut actor = run.axes.all.agree(learner(actor, &config.optim.actor))?;
        run.offload_learner(&mut actor)?;
        let critic = critic.map(|role| learner(role, &config.optim.critic)).transpose();
        let mut critic = run.axes.all.agree(critic)?;
        if let Some(critic) = &mut critic {
            run.offload_learner(critic)?;
        }

        let mut collector = Collector::new(run, source, tokenizer, actor.role.arch(), beside)?;
        let mut state = State {
            step: 0,
            cursor: collector.source.cursor().clone(),
            ledger: collector.source.ledger().clone(),
            advantage: Some(AdvantageState::new(&config.ppo)),
            updates: Vec::new(),
            has_work: false,
            eval_due: config.eval.every_steps > 0,
        };
        let mut work = None;
        let mut resumed_from = None;
        if let Some(checkpoint) = checkpoint::resume(&run.checkpoints(), &run.axes.all)? {
            let mut learners: Vec<&mut Learner> = std::iter::once(&mut actor).chain(&mut critic).collect();
            (state, work) = state::restore(run, &checkpoint, &mut learners)?;
            run.axes.all.agree(collector.source.restore(&state.cursor, &state.ledger))?;
            resumed_from = Some(state.step);
        }
        if !run.dry_run {
            let cut = run.recorder.cut_back(state.step);
            run.axes.all.agree(cut)?;
        }
        let roles: Vec<&Role> =
            [Some(&actor.role), critic.as_ref().map(|c| &c.role), reference.as_ref()].into_iter().flatten().collect();
        run.banner(config.job.steps, resumed_from, &roles, &plan);
        Ok(Self { actor, critic, reference, sampler, collector, state, work, steps: config.job.steps })
    }

    pub fn train(&mut self, run: &mut Run) -> Result<()> {
        if self.state.eval_due {
            self.evaluate(run, self.state.step)?;
            if self.state.eval_due {
                self.save(run, None)?;
                return Err(run.stopped(self.state.step));
            }
        }
        while self.state.step < self.steps {
            let step = self.state.step + 1;
            let (mut phases, mut clock) = (Phases::start(), Clock::start());
            let mut work = match self.work.take() {
                Some(Work::Update(work)) => work,
                Some(Work::Rollout(finished)) => self.collect(run, step, finished, &mut phases)?,
                None => self.collect(run, step, Vec::new(), &mut phases)?,
            };
            // A step that goes on after a resume is recorded again: resuming cut its record away.
            let recorded = run.recorder.rollouts(step, &work.experience, run.config.job.seed, &run.config_hash);
            run.axes.all.agree(recorded)?;
            self.learn(run, step, &mut work, &mut phases, &mut clock)?;
            self.state.step = step;
            self.record(run, step, &work, &phases, &clock)?;
            let every = run.config.eval.every_steps;
            self.state.eval_due = every > 0 && (step.is_multiple_of(every) || step == self.steps);
            if self.state.eval_due {
                self.evaluate(run, step)?;
            }
            let stop = self.state.eval_due || (step < self.steps && run.stop_requested());
            if stop || run.config.checkpoint.due(step, self.steps) {
                phase::set(step, "checkpoint");
                self.save(run, None)?;
            }
            if stop {
                return Err(run.stopped(step));
            }
        }
        Ok(())
    }

    /// Rollout, reward, scores of reference and critic, advantages: the whole batch on every rank.
    fn collect(
        &mut self,
        run: &mut Run,
        step: u64,
        finished: Vec<Response>,
        phases: &mut Phases,
    ) -> Result<UpdateWork> {
        let config = run.config.clone();
        phase::set(step, "rollout");
        let before = (self.collector.source.cursor().clone(), self.collector.source.ledger().clone());
        let prompts = self.collector.source.next(config.rollout.prompts_per_step);
        let prompts = run.axes.all.agree(prompts)?;
        let gathered = self.sampler.gather(&self.actor.role, phases);
        let policy = self.sampler.policy(&self.actor.role, &gathered);
        let rollout =
            phases.time(Phase::Rollout, || self.collector.rollout(run, policy, step as u32, &prompts, finished))?;
        let moved = gathered.moved();
        drop(gathered);
        let Some(mut mine) = rollout.complete else {
            // Asked to stop: the prompts of this step are taken again on resume.
            (self.state.cursor, self.state.ledger) = before;
            self.save(run, Some(&Work::Rollout(rollout.finished)))?;
            return Err(run.stopped(self.state.step));
        };
        phase::set(step, "reward");
        let extra = match phases.time(Phase::Reward, || self.collector.reward(run, &mut mine)) {
            Err(error) if error.kind == Kind::Service => {
                let responses: Vec<Response> = mine.into_iter().map(|sample| sample.response).collect();
                let responses = exchange::gather(&run.axes.all, &responses)?;
                (self.state.cursor, self.state.ledger) = before;
                return Err(self.save_for(run, Some(&Work::Rollout(responses)), error));
            }
            scored => scored?,
        };
        phase::set(step, "score");
        let mut experience = exchange::gather(&run.axes.all, &mine)?;
        phases.time(Phase::Score, || self.score(run, &mut experience));
        let gap = self.renew_logprobs(run, &mut experience, phases);
        let advantage = self.state.advantage.as_mut().expect("a ppo job has it");
        let kl_beta = advantage.kl.beta;
        let stats = crate::advantage::compute_step(&config.ppo, advantage, &mut experience)?;
        let shown = run.recorder.samples(step, &experience);
        run.axes.all.agree(shown)?;
        let mut values = report::rollout_values(&stats, &experience, kl_beta);
        values.extend(moved.map(|bytes| (keys::RESHARD_BYTES.to_string(), bytes)));
        values.extend(gap.map(|gap| (keys::SAMPLER_GAP_MAX.to_string(), gap)));
        values.extend(extra.into_iter().map(|(name, mean)| (format!("reward/{name}"), mean)));
        Ok(UpdateWork { experience, kl_beta, values, ..UpdateWork::default() })
    }

    /// Fills in what the reference and the critic say of all samples.
    fn score(&self, run: &Run, experience: &mut [Experience]) {
        let (tokens_max, temperature) = (run.config.ppo.microbatch_tokens_max, run.config.rollout.temperature);
        if let Some(reference) = &self.reference {
            let found = score::logprobs(reference, &run.axes, experience, temperature, tokens_max);
            experience.iter_mut().zip(found).for_each(|(sample, logprobs)| sample.ref_logprobs = logprobs);
        }
        if let Some(critic) = &self.critic {
            let found = score::values(&critic.role, &run.axes, experience, tokens_max);
            for (sample, (values, last)) in experience.iter_mut().zip(found) {
                (sample.values, sample.last_value) = (values, last);
            }
        }
    }

    /// Computes l_old again where sampling is not bitwise what training computes; gives the largest difference.
    fn renew_logprobs(&self, run: &Run, experience: &mut [Experience], phases: &mut Phases) -> Option<f64> {
        if !run.config.ppo.recomputes_old_logprobs(&run.mesh, &run.rollout) {
            return None;
        }
        let (tokens_max, temperature) = (run.config.ppo.microbatch_tokens_max, run.config.rollout.temperature);
        let found = phases.time(Phase::OldLogprobs, || {
            score::logprobs(&self.actor.role, &run.axes, experience, temperature, tokens_max)
        });
        let mut gap = 0.0;
        for (sample, logprobs) in experience.iter_mut().zip(found) {
            let gaps = sample.response.logprobs.iter().zip(&logprobs).map(|(a, b)| f64::from((a - b).abs()));
            gap = gaps.fold(gap, larger);
            sample.response.logprobs = logprobs;
        }
        Some(gap)
    }

    /// Epochs over minibatches of a global, seeded shuffle; ranks do not show in it. Stops between two updates.
    fn learn(
        &mut self,
        run: &mut Run,
        step: u64,
        work: &mut UpdateWork,
        phases: &mut Phases,
        clock: &mut Clock,
    ) -> Result<()> {
        phase::set(step, "train");
        let config = run.config.clone();
        let (epochs, size) = (config.ppo.epochs, config.ppo.minibatch_samples);
        let rng = Rng::new(config.job.seed, Purpose::Shuffle);
        // Of the batch, not of the configuration: that may be another one than where the batch was saved.
        let per_epoch = work.experience.len().div_ceil(size);
        let total = epochs * per_epoch;
        let bar = run.recorder.phase(Phase::Train.name(), total as u64);
        bar.set(work.minibatches as u64);
        while work.minibatches < total {
            if work.minibatches > 0 && run.stop_requested() {
                (self.state.cursor, self.state.ledger) =
                    (self.collector.source.cursor().clone(), self.collector.source.ledger().clone());
                let unfinished = Work::Update(std::mem::take(work));
                self.save(run, Some(&unfinished))?;
                return Err(run.stopped(self.state.step));
            }
            let (epoch, index) = (work.minibatches / per_epoch, work.minibatches % per_epoch);
            let order = rng.permutation(work.experience.len(), (step as usize * epochs + epoch) as u32);
            let chosen = order.chunks(size).nth(index).unwrap_or_default();
            let samples: Vec<&Experience> = chosen.iter().map(|&i| &work.experience[i]).collect();
            let update = Update { config: &config, axes: &run.axes, kl_beta: work.kl_beta };
            let (actor, critic) = (&mut self.actor, self.critic.as_mut());
            let found = phases.time(Phase::Train, || clock.train(|| update.minibatch(actor, critic, &samples)))?;
            let first = work.minibatches == 0;
            let mut sums = work.sums();
            let gap = if first { found.logprob_gap_max } else { sums.logprob_gap_max };
            sums += found;
            sums.logprob_gap_max = gap;
            work.sums = sums.to_row().to_vec();
            work.minibatches += 1;
            bar.inc(1);
        }
        (self.state.cursor, self.state.ledger) =
            (self.collector.source.cursor().clone(), self.collector.source.ledger().clone());
        Ok(())
    }

    fn record(&mut self, run: &mut Run, step: u64, work: &UpdateWork, phases: &Phases, clock: &Clock) -> Result<()> {
        let mut values = report::known(&work.values);
        let sums: UpdateSums = work.sums();
        let critic = self.critic.as_ref().map(|c| c.report);
        let kl_in_loss = run.config.ppo.kl_in == KlIn::Loss && self.reference.is_some();
        values.extend(report::update_values(&sums, work.minibatches, self.actor.report, critic, kl_in_loss));
        let tokens: usize = work.experience.iter().map(Experience::length).sum();
        let rollout_s = phases.spent(Phase::Rollout).as_secs_f64();
        if rollout_s > 0.0 {
            let sampled: usize = work.experience.iter().map(|e| e.response.tokens.len()).sum();
            values.push((keys::ROLLOUT_TOKENS_PER_S, sampled as f64 / rollout_s));
        }
        values.extend(phases.values(tokens as u64));
        values.extend(clock.values(&run.axes.all));
        values.extend(run.memory_peaks());
        let recorded = run.recorder.step(step, &values);
        run.axes.all.agree(recorded)
    }

    /// Where the run is asked to stop meanwhile, the evaluation stays due.
    fn evaluate(&mut self, run: &mut Run, step: u64) -> Result<()> {
        phase::set(step, "eval");
        let start = Instant::now();
        let gathered = self.sampler.gather(&self.actor.role, &mut Phases::start());
        let policy = self.sampler.policy(&self.actor.role, &gathered);
        match evaluate::evaluate(run, policy, &mut self.collector, step, start) {
            // Before the first step there is nothing to save.
            Err(error) if error.kind == Kind::Service && step > 0 => Err(self.save_for(run, None, error)),
            Err(error) => Err(error),
            Ok(done) => {
                self.state.eval_due = !done;
                Ok(())
            }
        }
    }

    /// A failed reward ends the run, but loses nothing: saves, and gives the error to end with.
    fn save_for(&mut self, run: &mut Run, work: Option<&Work>, error: Error) -> Error {
        match self.save(run, work) {
            Ok(()) => {
                let hint = error.hint.clone().map_or(String::new(), |hint| format!("{hint}; "));
                error.hint(format!("{hint}a checkpoint holds all work so far: run the same line to go on"))
            }
            Err(unsaved) => {
                Error { message: format!("{}; and no checkpoint: {}", error.message, unsaved.message), ..error }
            }
        }
    }

    fn save(&mut self, run: &mut Run, work: Option<&Work>) -> Result<()> {
        let mut learners = vec![&self.actor];
        learners.extend(&self.critic);
        state::save(run, &mut self.state, &learners, work)
    }
}
