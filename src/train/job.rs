//! The work that every job does around its steps, once for all methods: open, resume, evaluate, stop, checkpoint,
//! record, export.

use super::about::{about, about_models, show_first};
use super::adapters::Adapters;
use super::dry_run;
use super::export;
use super::inputs::{self, Hashed};
use super::load;
use super::models::{self, JobModel, ModelSpec};
use super::origin::Origin;
use super::sampling;
use super::state::{self, State};
use super::step_metrics;
use super::timers::Timers;
use super::trace;
use super::warnings::{self, Warning, Warnings};
use crate::comm::{phase, records};
use crate::config::Config;
use crate::config::job::DeviceName;
use crate::data::{LEDGER_LINES, Prepared, Row, RowSource, Rows};
use crate::error::{Error, Kind, Result};
use crate::launch::banner::BannerRows;
use crate::launch::run::{Lacks, Run, WeightsFrom};
use crate::launch::step_shape::StepShape;
use crate::learn::{Learner, Role};
use crate::metrics::Phases;
use crate::metrics::keys::Metrics;
use crate::model::Arch;
use crate::sys::{self, memory, trace::Category};
use crate::text::Tokenizer;
use serde_json::Value;
use std::sync::Arc;

/// A training method: the models and rows of its jobs, and the work of one step.
pub trait Job: Sized {
    /// The row type of the method.
    type Row: Row;

    /// The models of the job. The first one is exported. They are loaded in this order.
    fn models(config: &Config) -> Vec<ModelSpec>;

    /// Rejects models that do not match the first one. The vocabulary is checked elsewhere.
    fn check_models(_config: &Config, _first: &Arch, _other: &JobModel) -> Result<()> {
        Ok(())
    }

    /// Rejects rows that the method cannot learn from, before any weights are loaded.
    fn check_rows(_config: &Config, _source: &RowSource<Self::Row>, _tokenizer: &Tokenizer) -> Result<()> {
        Ok(())
    }

    /// The number of steps. By default `job.steps`, or the steps of the method's epochs over the rows.
    fn steps(config: &Config, rows: &Rows) -> u64 {
        steps_of_epochs(config, rows, Self::shape(config).rows)
    }

    /// The shape of a step.
    fn shape(config: &Config) -> StepShape;

    /// Disk space beyond checkpoints, and rows of the banner.
    fn needs(_run: &Run, _arch: &Arch, _rows: &Rows) -> BannerRows {
        BannerRows::default()
    }

    /// Warnings about the job before its first step. `context` is the first model's, in tokens.
    fn warnings_of_start(_run: &Run, _rows: &Rows, _context: usize) -> Vec<String> {
        Vec::new()
    }

    /// Warnings about the metrics of a step.
    fn warnings_of_step(_config: &Config, _values: &Metrics) -> Vec<Warning> {
        Vec::new()
    }

    /// Creates the method from the models of this rank: the learners and the frozen models.
    fn new(
        run: &Run,
        arch: &Arch,
        learners: Vec<Learner>,
        frozen: Vec<Role>,
        source: RowSource<Self::Row>,
        tokenizer: Arc<Tokenizer>,
    ) -> Result<Self>;

    /// Starts the rewards and the environment of the job, to check them without models.
    fn check_services(
        _run: &Run,
        _arch: &Arch,
        _source: RowSource<Self::Row>,
        _tokenizer: Arc<Tokenizer>,
    ) -> Result<()> {
        Ok(())
    }

    fn rows(&self) -> &Rows;

    fn learners(&mut self) -> Vec<&mut Learner>;

    /// The state that a checkpoint keeps in addition to models and rows.
    fn state(&self) -> Value {
        Value::Null
    }

    /// Resumes from `state` and, if a step was interrupted, from the `work` of its [`Ended::Unfinished`].
    fn restore(&mut self, _state: Value, _work: Option<&[u8]>) -> Result<()> {
        Ok(())
    }

    /// The part of the next step that a checkpoint between two steps keeps, in the form of an interrupted step's work.
    fn partial_work(&self) -> Option<Vec<u8>> {
        None
    }

    /// Runs one step and returns its metrics, including `tokens` and `samples`. All ranks call this.
    fn step(&mut self, run: &mut Run, step: &mut Step) -> std::result::Result<Metrics, Ended>;

    /// Evaluates on the eval split. All ranks call this.
    ///
    /// # Errors
    /// `Stopped` if the run was asked to stop before the end of the split.
    fn evaluate(&mut self, run: &mut Run, step: u64) -> Result<Metrics>;
}

/// `job.steps`, or the steps of the method's epochs over the rows if a step takes `of_step` of them.
pub fn steps_of_epochs(config: &Config, rows: &Rows, of_step: usize) -> u64 {
    let epochs = || config.method().epochs().unwrap_or(0.0) * rows.epoch_rows() as f64 / of_step as f64;
    if config.job.steps > 0 { config.job.steps } else { epochs().ceil() as u64 }
}

pub struct Step {
    /// The step number, from 1.
    pub number: u64,
    pub phases: Phases,
    pub timers: Timers,
    /// Tokens of each sample that the step learned from, prompt included.
    pub lengths: Vec<usize>,
}

/// The reason why a step did not finish.
pub enum Ended {
    /// Stopped on request, or by `error`, with `work` for the next start. That start takes the rows of the step again
    /// unless `took_rows`.
    Unfinished { work: Vec<u8>, took_rows: bool, error: Option<Error> },
    /// The run ends without a checkpoint.
    Failed(Error),
}

impl From<Error> for Ended {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// Runs a job: opens, resumes, trains, exports.
pub fn run<J: Job>(mut run: Run) -> Result<()> {
    if run.lacks != Lacks::default() {
        return check_without::<J>(&mut run);
    }
    let mut opened = Opened::<J>::open(&mut run)?;
    if opened.is_over(&run) && !opened.learned.is_empty() && !opened.state.eval_due && !run.dry_run {
        let (step, steps) = (opened.state.step, opened.steps);
        let (why, key) = match opened.state.best.ends(&run.config) {
            Some(why) => (format!(": {why}"), "eval.patience"),
            None => (String::new(), "job.steps"),
        };
        run.recorder.say(&format!("nothing left to do ({step} of {steps} steps{why}); raise {key} to continue"));
    }
    if run.dry_run {
        run.recorder.say("dry run: the job is ready to start");
        return Ok(());
    }
    opened.train(&mut run)?;
    opened.load_best(&mut run)?;
    let ended = opened.ended(&run);
    let made = if opened.learned.is_empty() { 0 } else { opened.state.step };
    let Opened { mut job, .. } = opened;
    // The export needs memory for the whole model.
    job.learners().into_iter().for_each(|learner| learner.sum.grads.free());
    let (ledger, exported) = (job.rows().ledger().clone(), J::models(&run.config)[0].role.name());
    let learners = job.learners();
    let exported = learners.into_iter().find(|learner| learner.role.name == exported);
    export::finish(&mut run, exported, made, &ledger, ended)
}

/// Opens the rows, and rejects rows that the model or the method cannot learn from.
fn open_rows<J: Job>(
    config: &Config,
    arch: &Arch,
    tokenizer: &Arc<Tokenizer>,
    prepared: &Prepared,
) -> Result<RowSource<J::Row>> {
    let source = RowSource::open(&config.data, tokenizer, arch.vocabulary, prepared, config.job.seed)?;
    source.check_context(arch.context)?;
    source.have_images().then(|| arch.check_images(config.job.device == DeviceName::Gpu)).transpose()?;
    J::check_rows(config, &source, tokenizer)?;
    Ok(source)
}

/// Removes the records after `step`, and lists the rows that are not learned from. A dry run has no records.
fn begin_records(run: &mut Run, rows: &Rows, step: u64) -> Result<()> {
    if run.dry_run {
        return Ok(());
    }
    let is_writer = run.ranks.world.rank == 0;
    let filtered = run.dir.join(LEDGER_LINES);
    run.ranks.all.agree(if is_writer { rows.write_filtered(&filtered, step) } else { Ok(()) })?;
    let cut = run.recorder.cut_back(step);
    run.ranks.all.agree(cut)
}

/// Rejects a job that exceeds the memory or the disk. `unwritten` roles are not in memory yet.
fn check_resources<'a>(
    run: &Run,
    models: &[JobModel],
    unwritten: impl Iterator<Item = &'a Role>,
    rollouts: u64,
) -> Result<()> {
    let exports = 1 + usize::from(run.config.optim.actor.ema_beta > 0.0);
    let export_bytes = exports * models[0].table().len() * run.config.model.dtype().bytes();
    let unwritten = unwritten.map(|role| role.weights.bytes()).sum();
    run.check_resources(unwritten, models::saved_bytes(models), export_bytes, rollouts)
}

/// The dry run of a job that lacks its GPUs or its other ranks.
fn check_without<J: Job>(run: &mut Run) -> Result<()> {
    let Inputs { arch, tokenizer, models, source, steps, .. } = Inputs::<J>::open(run)?;
    let names: Vec<&str> = models.iter().map(|model| model.spec.role.name()).collect();
    let rows = about(&run.config, &J::shape(&run.config), &source, steps);
    J::check_services(run, &arch, source, tokenizer)?;
    dry_run::report(run, &names, rows);
    Ok(())
}

/// The inputs of a job, which are checked before its models are loaded.
struct Inputs<J: Job> {
    arch: Arch,
    tokenizer: Arc<Tokenizer>,
    models: Vec<JobModel>,
    hashed: Hashed,
    source: RowSource<J::Row>,
    steps: u64,
}

impl<J: Job> Inputs<J> {
    fn open(run: &mut Run) -> Result<Self> {
        let config = run.config.clone();
        // This check is first, because a directory without a model has no tokenizer either.
        run.ranks.all.agree(Arch::load(&config.model.actor).map_err(|e| e.within("model.actor")))?;
        let tokenizer = Arc::new(run.ranks.all.agree(Tokenizer::load(&config.model.actor))?);
        if config.data.chat_template {
            tokenizer.warn_of_turn_end(&config.data.chat_template_args);
        }
        let check = |first: &Arch, model: &JobModel| J::check_models(&config, first, model);
        let mut models = run.ranks.all.agree(models::described(&config, J::models(&config), &tokenizer, check))?;
        let arch = models[0].arch.clone();
        let prompts: Vec<&str> = config.data.all_prompts().map(String::as_str).collect();
        run.recorder.say(&format!("opening the data: {}", prompts.join(", ")));
        let (prepared, hashed) = Hashed::data(run, J::Row::KIND, &tokenizer, arch.vocabulary)?;
        let mut source = run.ranks.all.agree(open_rows::<J>(&config, &arch, &tokenizer, &prepared))?;
        let sees = source.have_images() || sampling::may_show_images(&config, &arch, &tokenizer);
        models.iter_mut().filter(|_| sees).for_each(|model| model.arch.use_tower());
        show_first(run, &mut source)?;
        let steps = J::steps(&config, &source);
        if steps == 0 && models::learned(&models).next().is_some() {
            return run.ranks.all.agree(Err(Error::usage("job.steps must be at least 1 (got 0)")));
        }
        Ok(Self { arch, tokenizer, models, hashed, source, steps })
    }
}

/// A job that is ready for its next step.
pub(super) struct Opened<J> {
    pub(super) job: J,
    pub(super) state: State,
    pub(super) steps: u64,
    arch: Arch,
    warnings: Warnings,
    /// Names of all models that learn, on any rank.
    learned: Vec<&'static str>,
}

impl<J: Job> Opened<J> {
    /// Checks everything that can reject a job, then loads its models or restores them from the newest checkpoint.
    pub(super) fn open(run: &mut Run) -> Result<Self> {
        let config = run.config.clone();
        let Inputs { arch, tokenizer, mut models, hashed, mut source, steps } = Inputs::<J>::open(run)?;
        let learned: Vec<&str> = models::learned(&models).map(|model| model.spec.role.name()).collect();
        let only_evaluates = learned.is_empty();
        run.write_resolved(steps)?;
        let shape = J::shape(&config);
        let ahead = source.ahead(shape.rows_ahead(&config)).and_then(|rows| Ok((rows, source.eval_tokens()?)));
        let (rows, eval) = run.ranks.all.agree(ahead)?;
        run.expect(&rows, &eval, source.count_images());
        run.check_step_time()?;
        let mut state = State {
            cursor: source.cursor().clone(),
            ledger: source.ledger().clone(),
            // A job that trains nothing ends where it begins, after its evaluation.
            step: if only_evaluates { steps } else { 0 },
            eval_due: config.eval.every_steps > 0 || only_evaluates,
            inputs: hashed.all(run, &models)?,
            ..State::default()
        };
        run.ranks.all.agree(inputs::unify(&config, &mut models, &state.inputs))?;
        let resumed = state::find(run, &arch, &learned, &state.inputs)?;
        if let Some(resumed) = &resumed {
            state = resumed.state.clone();
            // A run whose steps were lowered to the ones that it has made ends here.
            let is_unevaluated = state.evaluated.is_some_and(|step| step < state.step);
            state.eval_due |= config.eval.every_steps > 0 && state.step >= steps && is_unevaluated;
            run.ranks.all.agree(source.restore(&state.cursor, &state.ledger))?;
        }
        let begins = resumed.is_none();
        let origin = if begins { Origin::find(run, &arch, &learned, &mut state, &mut source)? } else { None };
        let values = if begins { WeightsFrom::ModelDir } else { WeightsFrom::Checkpoint };
        run.resident_at_start = memory::resident_bytes();
        let names: Vec<&str> = models.iter().map(|model| model.spec.role.name()).collect();
        run.recorder.say(&format!("loading the models: {}", names.join(", ")));
        let roles = load::load(run, &models, values)?;
        let mut needs = J::needs(run, &arch, &source);
        needs.about.splice(0..0, about(&config, &shape, &source, steps));
        let to_restore = roles.iter().filter(|role| resumed.is_some() && learned.contains(&role.name));
        check_resources(run, &models, to_restore, needs.rollouts)?;
        let (learners, frozen) = load::learners(run, &models, roles, (steps, &shape), values)?;
        let mut job = J::new(run, &arch, learners, frozen, source, tokenizer)?;
        resumed.iter().try_for_each(|resumed| resumed.fill(run, &learned, &mut job.learners()))?;
        origin.iter().try_for_each(|origin| origin.fill(run, &mut job.learners()))?;
        if !begins || !state.method.is_null() {
            // A replay computes whole steps.
            let work = resumed.as_ref().filter(|_| run.replay.is_none());
            let work = work.and_then(|resumed| resumed.work.as_deref());
            run.ranks.all.agree(job.restore(state.method.clone(), work))?;
        }
        begin_records(run, job.rows(), if only_evaluates { 0 } else { state.step })?;
        let (to_make, at) = (if only_evaluates { 0 } else { steps }, resumed.map(|resumed| resumed.state.step));
        run.banner(to_make, at, about_models(&run.config, &models), needs);
        let filtered = warnings::of_filtered(job.rows()).into_iter().chain(warnings::of_trace(&run.config, steps));
        for text in filtered.chain(J::warnings_of_start(run, job.rows(), arch.context)) {
            run.recorder.warn(&text);
        }
        Ok(Self { job, state, steps, arch, learned, warnings: Warnings::default() })
    }

    fn train(&mut self, run: &mut Run) -> Result<()> {
        if self.state.eval_due {
            let is_best = self.evaluate(run, self.state.step)?;
            if self.state.eval_due || is_best || self.is_over(run) {
                self.save(run, None)?;
            }
            if self.state.eval_due && self.learned.is_empty() {
                return Err(Error::new(
                    Kind::Stopped,
                    "stopped before the evaluation was done; run the same command again to restart it",
                ));
            }
            if self.state.eval_due {
                return Err(run.stopped(self.state.step));
            }
        }
        let adapters = Adapters::new(run, &self.job.learners());
        while !self.is_over(run) {
            trace::step(run, self.state.step + 1, |run| self.whole_step(run, &adapters))?;
        }
        Ok(())
    }

    /// The next step, and what is due after it.
    fn whole_step(&mut self, run: &mut Run, adapters: &Adapters) -> Result<()> {
        match self.step(run, adapters) {
            Ok(()) => self.between_steps(run),
            Err(Ended::Failed(error)) => Err(error),
            Err(Ended::Unfinished { work, took_rows, error }) => {
                if took_rows {
                    self.take_rows();
                }
                Err(match error {
                    Some(error) => self.save_for(run, Some(&work), error),
                    None => self.save(run, Some(&work)).map_or_else(|e| e, |()| run.stopped(self.state.step)),
                })
            }
        }
    }

    /// Makes the next step and records its metrics.
    pub(super) fn step(&mut self, run: &mut Run, adapters: &Adapters) -> std::result::Result<(), Ended> {
        let (phases, timers) = (Phases::start(), Timers::start());
        let mut step = Step { number: self.state.step + 1, phases, timers, lengths: Vec::new() };
        let made = self.job.step(run, &mut step);
        self.job.learners().into_iter().for_each(|learner| learner.zero.offload());
        let mut metrics = made?;
        self.take_rows();
        self.state.step = step.number;
        let waited = self.warnings.of_waiting(&run.config, run.reward_wait_s.take(), step.timers.seconds());
        let found = J::warnings_of_step(&run.config, &metrics);
        for text in self.warnings.of_step(&metrics, found).into_iter().chain(waited) {
            run.recorder.warn(&text);
        }
        metrics.extend(adapters.measure(run, step.number, self.steps, &self.job.learners())?);
        let flops = step_metrics::flops(run, &self.arch, &J::shape(&run.config), &step.lengths);
        Ok(step_metrics::record(run, step.number, (&step.phases, &step.timers), metrics, flops)?)
    }

    fn between_steps(&mut self, run: &mut Run) -> Result<()> {
        let step = self.state.step;
        self.state.eval_due = run.config.eval.due(step, self.steps);
        let is_best = self.state.eval_due && self.evaluate(run, step)?;
        let is_over = self.is_over(run);
        let stop = self.state.eval_due || (!is_over && run.stop_requested());
        if stop || is_best || is_over || run.config.checkpoint.due(step, self.steps) {
            phase::set(step, phase::Phase::Checkpoint);
            self.save(run, None)?;
        }
        if stop { Err(run.stopped(step)) } else { Ok(()) }
    }

    /// Counts the rows handed out by the source as trained on.
    fn take_rows(&mut self) {
        let rows = self.job.rows();
        (self.state.cursor, self.state.ledger) = (rows.cursor().clone(), rows.ledger().clone());
    }

    /// Whether the last step is done, or evaluations have not improved for too long.
    fn is_over(&self, run: &Run) -> bool {
        self.state.step >= self.steps || !self.state.eval_due && self.state.best.ends(&run.config).is_some()
    }

    /// Summary rows: the best evaluation, and the reason why the run ended before its last step.
    fn ended(&self, run: &Run) -> Vec<(String, String)> {
        let early = self.state.best.ends(&run.config).filter(|_| self.state.step < self.steps);
        let early = early.map(|why| format!("step {} of {}: {why}", self.state.step, self.steps));
        let rows = [("best", self.state.best.describe()), ("stopped early", early)];
        rows.into_iter().filter_map(|(name, text)| Some((name.to_string(), text?))).collect()
    }

    /// Restores the learners from the best checkpoint, if it is to be exported and is not the last one.
    fn load_best(&mut self, run: &mut Run) -> Result<()> {
        let wanted = run.config.job.export && run.config.checkpoint.export_best;
        if !wanted || self.state.best.step() == Some(self.state.step) {
            return Ok(());
        }
        if let Some(best) = state::best(run, &self.state.best, &self.arch, &self.learned)? {
            best.fill(run, &self.learned, &mut self.job.learners())?;
            let restored = self.job.restore(best.state.method, None);
            run.ranks.all.agree(restored)?;
        }
        Ok(())
    }

    /// Evaluates, and returns whether the evaluation is the best so far. If the run is asked to stop meanwhile, the
    /// evaluation stays due.
    fn evaluate(&mut self, run: &mut Run, step: u64) -> Result<bool> {
        phase::set(step, phase::Phase::Eval);
        let _span = sys::trace::span(Category::Phase, "evaluation", "", || []);
        match self.job.evaluate(run, step) {
            // Before the first step there is nothing to save.
            Err(error) if error.kind == Kind::Service && step > 0 && !self.learned.is_empty() => {
                Err(self.save_for(run, None, error))
            }
            Err(error) if error.kind == Kind::Stopped => Ok(false),
            Err(error) => Err(error),
            Ok(metrics) => {
                (self.state.eval_due, self.state.evaluated) = (false, Some(step));
                let recorded = if metrics.is_empty() { Ok(()) } else { run.recorder.eval(step, &metrics) };
                run.ranks.all.agree(recorded)?;
                // Times differ between ranks.
                let metrics = records::of_first(&run.ranks.all, || metrics);
                for text in self.warnings.of_eval(&metrics) {
                    run.recorder.warn(&text);
                }
                self.state.best.judge(&run.config, step, &metrics)
            }
        }
    }

    /// Saves after a failed reward, so that no work is lost, and returns the error to end with.
    fn save_for(&mut self, run: &mut Run, work: Option<&[u8]>, error: Error) -> Error {
        match self.save(run, work) {
            Ok(()) => {
                let hint = error.hint.clone().map_or(String::new(), |hint| format!("{hint}; "));
                error.hint(format!("{hint}run the same command again to resume: a checkpoint holds all work so far"))
            }
            Err(unsaved) => Error {
                message: format!("{}; saving a checkpoint also failed: {}", error.message, unsaved.message),
                ..error
            },
        }
    }

    fn save(&mut self, run: &mut Run, work: Option<&[u8]>) -> Result<()> {
        if self.learned.is_empty() {
            return Ok(());
        }
        self.state.method = self.job.state();
        let partial = if work.is_none() { self.job.partial_work() } else { None };
        let work = work.or(partial.as_deref());
        let learners = self.job.learners();
        state::save(run, &mut self.state, &self.learned, &learners, work)
    }
}
