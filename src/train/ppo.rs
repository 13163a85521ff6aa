//! PPO and its relatives on one page: prompts -> rollout -> reward -> advantage -> { loss -> gradient -> step }.

use super::cast::{Cast, Needed};
use super::clock::Clock;
use super::collect::Collector;
use super::inputs::Hashed;
use super::policy::{Sampler, rollout_bytes};
use super::produce::{Players, Waves, produce};
use super::role::{Learner, Role};
use super::setup::{Run, Values};
use super::state::{self, State, UpdateWork, Work};
use super::update::Update;
use super::{evaluate, finish, places, report};
use crate::advantage::AdvantageState;
use crate::comm::phase;
use crate::config::ppo::KlIn;
use crate::data::{Part, PromptSource};
use crate::error::{Error, Kind, Result};
use crate::experience::{Experience, Response};
use crate::metrics::{Phase, Phases, keys};
use crate::plan::Rows;
use crate::rng::{Purpose, Rng};
use std::time::Instant;

/// One PPO job: the roles that this rank plays, and what all ranks know alike.
pub struct Ppo {
    actor: Option<Learner>,
    critic: Option<Learner>,
    reference: Option<Role>,
    /// Where the actor is here.
    sampler: Option<Sampler>,
    waves: Waves,
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
    let Ppo { actor, critic, collector, state, .. } = &mut ppo;
    // The export puts the whole model together.
    actor.iter_mut().chain(critic).for_each(|learner| learner.sum.grads.free());
    finish::finish(&mut run, actor.as_ref().map(|actor| &actor.role), state.step, collector.source.ledger())
}

impl Ppo {
    /// Looks at everything that a job can be refused for, then loads its models, or fills them from the newest checkpoint.
    pub fn open(run: &mut Run) -> Result<Self> {
        if run.config.ppo.overlong_tokens_max == 0 {
            run.config.ppo.overlong_tokens_max = run.config.rollout.response_tokens_max;
        }
        let config = run.config.clone();
        if config.job.steps == 0 {
            return run.all.agree(Err(Error::usage("job.steps is 0, a ppo job needs at least 1")));
        }
        let tokenizer = run.tokenizer()?;
        let needed = Needed::all(run, &tokenizer)?;
        let arch = needed[0].arch.clone();
        let vocabulary = arch.vocabulary;
        let (prepared, hashed) = Hashed::data(run, Part::Prompt, &tokenizer, vocabulary)?;
        let source = PromptSource::open(&config.data, &tokenizer, vocabulary, &prepared, config.job.seed);
        let mut source = run.all.agree(source.and_then(|s| s.check_context(arch.context).map(|()| s)))?;

        let ahead = source.ahead(Rows::wanted(&config)).and_then(|rows| Ok((rows, source.eval_tokens()?)));
        let (rows, eval) = run.all.agree(ahead)?;
        run.expect(&rows, &eval);
        let mut state = State {
            step: 0,
            cursor: source.cursor().clone(),
            ledger: source.ledger().clone(),
            advantage: Some(AdvantageState::new(&config.ppo)),
            updates: Vec::new(),
            has_work: false,
            eval_due: config.eval.every_steps > 0,
            inputs: hashed.all(run)?,
        };
        let mut resumed = state::find(run, &arch, &state.inputs)?;
        if let Some(resumed) = &resumed {
            state = resumed.state.clone();
            run.all.agree(source.restore(&state.cursor, &state.ledger))?;
        }
        let resumed_from = resumed.as_ref().map(|resumed| resumed.state.step);
        let values = Values::of(resumed.is_some());

        let samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt;
        let minibatches_per_epoch = samples.div_ceil(config.ppo.minibatch_samples);
        let updates = config.job.steps * (config.ppo.epochs * minibatches_per_epoch) as u64;
        let Cast { actor, critic, reference } = Cast::load(run, &needed, values)?;
        let sampler = run.sampler(actor.as_ref(), source.longest())?;
        let plan = report::memory_plan(run, actor.as_ref(), critic.as_ref(), reference.as_ref());
        let learned = needed.iter().filter(|needed| needed.learns).map(|needed| needed.table().len()).sum();
        let unwritten = actor.iter().chain(&critic).map(|role| role.weights.bytes()).sum();
        let unwritten = if values == Values::ToRestore { unwritten } else { 0 };
        let (exported, recorded) = (needed[0].table().len(), run.rollout_bytes_max(source.longest(), arch.context));
        run.check_resources(&plan, unwritten, learned, exported * config.model.dtype().bytes(), recorded)?;
        let beside = actor.as_ref().map_or(0, |actor| rollout_bytes(run, actor));
        // One after the other: where state is offloaded, the first is gone before the second needs memory.
        let learner =
            |role: Option<Role>, optim| role.map(|role| run.learner(role, optim, updates, values)).transpose();
        let (mut actor, mut critic) = (learner(actor, &config.optim.actor)?, learner(critic, &config.optim.critic)?);

        let collector = Collector::new(run, source, tokenizer, &arch, beside)?;
        if let Some(resumed) = &resumed {
            let mut learners: Vec<&mut Learner> = actor.iter_mut().chain(&mut critic).collect();
            resumed.fill(run, &mut learners)?;
        }
        if !run.dry_run {
            let cut = run.recorder.cut_back(state.step);
            run.all.agree(cut)?;
        }
        let models = needed.iter().map(|n| (n.role.name(), n.table().parameters(), n.dir.as_path()));
        let models: Vec<_> = models.collect();
        run.banner(config.job.steps, resumed_from, &models, &plan, recorded);
        let waves = Waves::new(run);
        let work = resumed.as_mut().and_then(|resumed| resumed.work.take());
        Ok(Self { actor, critic, reference, sampler, waves, collector, state, work, steps: config.job.steps })
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
                Some(Work::Rollout(finished)) => self.collect(run, step, &finished, &mut phases)?,
                Some(Work::Unnamed) => unreachable!("refused when it was found"),
                None => self.collect(run, step, &[], &mut phases)?,
            };
            // A step that goes on after a resume is recorded again: resuming cut its record away.
            let recorded = run.recorder.rollouts(step, &work.experience, run.config.job.seed, &run.config_hash);
            run.all.agree(recorded)?;
            self.learn(run, step, &mut work, &mut phases, &mut clock)?;
            self.state.step = step;
            record(run, step, &work, &phases, &clock)?;
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
    fn collect(&mut self, run: &mut Run, step: u64, finished: &[Response], phases: &mut Phases) -> Result<UpdateWork> {
        let config = run.config.clone();
        phase::set(step, "rollout");
        let before = (self.collector.source.cursor().clone(), self.collector.source.ledger().clone());
        let prompts = self.collector.source.next(config.rollout.prompts_per_step);
        let prompts = run.all.agree(prompts)?;
        run.make_room(self.actor.as_mut(), self.critic.as_mut());
        let mut players = Players {
            actor: self.actor.as_ref().map(|actor| &actor.role).zip(self.sampler.as_ref()),
            critic: self.critic.as_mut().map(|critic| &mut critic.role),
            reference: self.reference.as_mut(),
        };
        let collector = &mut self.collector;
        let produced = produce(run, &mut players, collector, &self.waves, step, &prompts, finished, phases)?;
        let responses = |samples: Vec<Experience>| samples.into_iter().map(|sample| sample.response).collect();
        if !produced.complete {
            // Asked to stop: the prompts of this step are taken again on resume.
            (self.state.cursor, self.state.ledger) = before;
            self.save(run, Some(&Work::Rollout(responses(produced.samples))))?;
            return Err(run.stopped(self.state.step));
        }
        let extra = match produced.extra {
            Err(error) if error.kind == Kind::Service => {
                (self.state.cursor, self.state.ledger) = before;
                return Err(self.save_for(run, Some(&Work::Rollout(responses(produced.samples))), error));
            }
            scored => scored?,
        };
        let mut experience = produced.samples;
        let advantage = self.state.advantage.as_mut().expect("a ppo job has it");
        let kl_beta = advantage.kl.beta;
        let stats = crate::advantage::compute_step(&config.ppo, advantage, &mut experience)?;
        let shown = run.recorder.samples(step, &experience);
        run.all.agree(shown)?;
        let mut values = report::rollout_values(&stats, &experience, kl_beta);
        values.extend(produced.moved.map(|bytes| (keys::RESHARD_BYTES.to_string(), bytes)));
        values.extend(produced.sampler_gap.map(|gap| (keys::SAMPLER_GAP_MAX.to_string(), gap)));
        values.extend(extra.into_iter().map(|(name, mean)| (format!("reward/{name}"), mean)));
        Ok(UpdateWork { experience, kl_beta, values, ..UpdateWork::default() })
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
        // Away where a batch goes on after a resume, or after an evaluation.
        if let Some(critic) = &mut self.critic {
            run.come(&mut critic.role);
        }
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
            let (actor, critic) = (self.actor.as_mut(), self.critic.as_mut());
            let mut found = phases.time(Phase::Train, || {
                let found = clock.train(|| update.minibatch(actor, critic, &samples));
                places::sums(run, found)
            })?;
            if work.minibatches > 0 {
                // That of the first is before any update.
                found.remove(keys::LOGPROB_GAP_MAX);
            }
            work.sums.add(&found);
            work.minibatches += 1;
            run.has_learned = true;
            bar.inc(1);
        }
        (self.state.cursor, self.state.ledger) =
            (self.collector.source.cursor().clone(), self.collector.source.ledger().clone());
        Ok(())
    }

    /// Where the run is asked to stop meanwhile, the evaluation stays due.
    fn evaluate(&mut self, run: &mut Run, step: u64) -> Result<()> {
        phase::set(step, "eval");
        let start = Instant::now();
        run.make_room(self.actor.as_mut(), self.critic.as_mut());
        let actor = self.actor.as_ref().map(|actor| &actor.role).zip(self.sampler.as_ref());
        let gathered = actor.map(|(actor, sampler)| (sampler.gather(actor, &mut Phases::start()), actor, sampler));
        let policy = gathered.as_ref().map(|(weights, actor, sampler)| sampler.policy(actor, weights));
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
        let learners: Vec<&Learner> = self.actor.iter().chain(&self.critic).collect();
        state::save(run, &mut self.state, &learners, work)
    }
}

/// Records the numbers of a finished step.
fn record(run: &mut Run, step: u64, work: &UpdateWork, phases: &Phases, clock: &Clock) -> Result<()> {
    let mut values = report::known(&work.values);
    let kl_in_loss = run.config.ppo.kl_in == KlIn::Loss && run.config.needs_reference();
    values.extend(report::update_values(&work.sums, kl_in_loss));
    let tokens: usize = work.experience.iter().map(Experience::length).sum();
    let rollout_s = phases.spent(Phase::Rollout).as_secs_f64();
    if rollout_s > 0.0 {
        let sampled: usize = work.experience.iter().map(|e| e.response.tokens.len()).sum();
        values.push((keys::ROLLOUT_TOKENS_PER_S, sampled as f64 / rollout_s));
    }
    values.extend(places::phases(run, phases).values(tokens as u64));
    values.extend(clock.values(run));
    values.extend(run.memory_peaks());
    let recorded = run.recorder.step(step, &values);
    run.all.agree(recorded)
}
