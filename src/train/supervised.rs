//! Methods that learn from rows as they are: their jobs, and the splitting of rows into micro-batches for training and
//! evaluation.

use super::job::{Ended, Job, Step};
use super::models::ModelSpec;
use super::warnings::Warning;
use crate::comm::{phase, records};
use crate::config::Config;
use crate::config::mesh::RoleName;
use crate::data::balance::{self, Cost};
use crate::data::{Row, RowSource, Rows, SftRow};
use crate::error::{Error, Kind, Result};
use crate::launch::replay;
use crate::launch::run::Run;
use crate::launch::step_shape::StepShape;
use crate::learn::packed::PackedRow;
use crate::learn::sums::Sums;
use crate::learn::{HeadPass, Learner, MicroBatch, Objective, Pass, Role, head_pass, role, routing, schedule};
use crate::metrics::eval_rows::{EvalResponses, EvalRow};
use crate::metrics::keys::{self, Metrics, named};
use crate::metrics::{Phase, Phases};
use crate::model::{Arch, Head};
use crate::text::Tokenizer;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;

/// Metrics of a step or an evaluation, by key.
pub type Numbers = Vec<(&'static str, f64)>;

/// A method that learns from rows as they are: the models of its jobs, and the work on a minibatch.
pub trait Method: Sized {
    type Row: Row;
    /// The precomputed values that rows are compared with.
    type Precomputed: Default;
    /// Whether models score rows before anything is learned from them.
    const SCORES: bool = false;

    /// The model that learns, then the frozen models.
    fn models(config: &Config) -> Vec<ModelSpec> {
        vec![ModelSpec::actor(config, Head::LanguageModel)]
    }

    /// Rows of a step, maximum tokens of a micro-batch, and forward passes that only score a step's rows.
    fn shape(config: &Config) -> [usize; 3];

    /// See `Job`.
    fn check_rows(_config: &Config, _source: &RowSource<Self::Row>, _tokenizer: &Tokenizer) -> Result<()> {
        Ok(())
    }

    /// A warning about the settings of a job.
    fn warning_of_start(_config: &Config) -> Option<String> {
        None
    }

    /// A warning about the metrics of a step.
    fn warning_of_step(_config: &Config, _values: &Metrics) -> Option<Warning> {
        None
    }

    /// Creates the method with its frozen models.
    fn new(config: &Config, frozen: Vec<Role>, tokenizer: &Tokenizer) -> Result<Self>;

    /// Prepares rows before `role` learns from them or is evaluated on them. All ranks call this.
    fn precompute(&mut self, _: &Run, _role: &Role, _: &mut [Self::Row], _: &mut Phases) -> Result<Self::Precomputed> {
        Ok(Self::Precomputed::default())
    }

    /// One optimizer step. All ranks call this.
    fn update(&mut self, run: &Run, learner: &mut Learner, batch: &Minibatch<Self>) -> Result<Numbers>;

    /// Evaluates held-out rows. All ranks call this.
    ///
    /// # Errors
    /// `Stopped` if the run was asked to stop before the last row.
    fn evaluate(&mut self, run: &mut Run, learner: &mut Learner, batch: &Minibatch<Self>) -> Result<Numbers>;
}

/// Rows of a step, or held-out rows of an evaluation.
pub struct Minibatch<'a, M: Method> {
    pub step: u64,
    pub rows: &'a [M::Row],
    /// Pretraining rows, learned together with the others if the job has any.
    pub texts: &'a [SftRow],
    pub precomputed: M::Precomputed,
    pub tokenizer: &'a Tokenizer,
}

/// A job of a method.
pub struct Supervised<M: Method> {
    learner: Learner,
    source: RowSource<M::Row>,
    tokenizer: Arc<Tokenizer>,
    method: M,
}

impl<M: Method> Job for Supervised<M> {
    type Row = M::Row;

    fn models(config: &Config) -> Vec<ModelSpec> {
        M::models(config)
    }

    fn check_rows(config: &Config, source: &RowSource<M::Row>, tokenizer: &Tokenizer) -> Result<()> {
        M::check_rows(config, source, tokenizer)
    }

    fn shape(config: &Config) -> StepShape {
        let [samples, microbatch_tokens_max, scored] = M::shape(config);
        StepShape {
            kind: M::Row::KIND,
            rows: samples,
            samples_per_row: 1,
            minibatch: samples,
            epochs: 1,
            critic_epochs: 0,
            microbatch_tokens_max,
            trained: 1,
            scored,
        }
    }

    fn warnings_of_start(run: &Run, rows: &Rows, _context: usize) -> Vec<String> {
        let ([minibatch, ..], ranks) = (M::shape(&run.config), run.ranks.axes.data.size());
        let (key, of_epoch) = (format!("{}.minibatch_samples = {minibatch}", run.config.kind()), rows.epoch_rows());
        let all = [
            (ranks > minibatch).then(|| format!("{key} is below the {ranks} data ranks: some get no samples")),
            (minibatch as u64 > of_epoch)
                .then(|| format!("{key} exceeds the data's {of_epoch} rows: steps repeat rows")),
            M::warning_of_start(&run.config),
        ];
        all.into_iter().flatten().collect()
    }

    fn warnings_of_step(config: &Config, values: &Metrics) -> Vec<Warning> {
        M::warning_of_step(config, values).into_iter().collect()
    }

    fn new(
        run: &Run,
        _arch: &Arch,
        mut learners: Vec<Learner>,
        frozen: Vec<Role>,
        source: RowSource<M::Row>,
        tokenizer: Arc<Tokenizer>,
    ) -> Result<Self> {
        let learner = learners.pop().expect("a job without a placement has all models on each rank");
        for role in frozen.iter().filter(|role| role.name == RoleName::Teacher.name()) {
            let fits = source.check_context(role.arch().context);
            run.ranks.all.agree(fits.map_err(|e| e.within(role.dir.display()).within(role::key(role.name))))?;
        }
        Ok(Self { method: M::new(&run.config, frozen, &tokenizer)?, learner, source, tokenizer })
    }

    fn rows(&self) -> &Rows {
        &self.source
    }

    fn learners(&mut self) -> Vec<&mut Learner> {
        vec![&mut self.learner]
    }

    /// Mean and standard deviation of a reward model's scores in the last evaluation.
    fn state(&self) -> Value {
        json!(self.learner.role.arch().reward_mean_std)
    }

    fn restore(&mut self, state: Value, _work: Option<&[u8]>) -> Result<()> {
        self.learner.role.transformer.arch.reward_mean_std = mean_std(&state)?;
        Ok(())
    }

    fn step(&mut self, run: &mut Run, step: &mut Step) -> std::result::Result<Metrics, Ended> {
        phase::set(step.number, if M::SCORES { phase::Phase::Score } else { phase::Phase::Train });
        let Self { learner, source, tokenizer, method } = self;
        let [samples, ..] = M::shape(&run.config);
        let drawn = source.next(samples).and_then(|rows| Ok((rows, source.pretrain(step.number, samples)?)));
        let (mut rows, texts) = run.ranks.all.agree(drawn)?;
        let precomputed = method.precompute(run, &learner.role, &mut rows, &mut step.phases)?;
        phase::set(step.number, phase::Phase::Train);
        let (timers, batch) =
            (&mut step.timers, Minibatch { step: step.number, rows: &rows, texts: &texts, precomputed, tokenizer });
        let update = || timers.train(|| method.update(run, learner, &batch));
        let numbers = step.phases.time(Phase::Train, update)?;
        run.has_learned = true;
        let sequences = rows.iter().flat_map(Row::sequences).chain(texts.iter().flat_map(Row::sequences));
        step.lengths = sequences.collect();
        let mut all = named(numbers);
        all.extend(routing::metrics(&learner.measured).into_iter().chain(schedule::metrics(&learner.measured)));
        all.extend(named([
            (keys::GRAD_NORM, learner.report.grad_norm),
            (keys::LR, learner.report.lr),
            (keys::SAMPLES, samples as f64),
            (keys::TOKENS, step.lengths.iter().sum::<usize>() as f64),
            (keys::EPOCH, (step.number * samples as u64) as f64 / source.epoch_rows() as f64),
        ]));
        if let Some(replay) = &run.replay {
            replay.note(step.number, || replay::Update::new(all.clone(), [&*learner]));
        }
        Ok(all)
    }

    fn evaluate(&mut self, run: &mut Run, step: u64) -> Result<Metrics> {
        let start = Instant::now();
        let Self { learner, source, tokenizer, method } = self;
        let mut rows = run.ranks.all.agree(source.eval_rows(run.config.eval.samples_max))?;
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let precomputed = method.precompute(run, &learner.role, &mut rows, &mut Phases::start())?;
        let batch = Minibatch { step, rows: &rows, texts: &[], precomputed, tokenizer };
        let mut numbers = method.evaluate(run, learner, &batch)?;
        let seconds = start.elapsed().as_secs_f64();
        numbers.extend([(keys::EVAL_SAMPLES, rows.len() as f64), (keys::EVAL_TIME_S, seconds)]);
        Ok(named(numbers))
    }
}

/// Mean and standard deviation of a reward model's scores in the state of a checkpoint.
pub fn mean_std(state: &Value) -> Result<Option<(f32, f32)>> {
    Deserialize::deserialize(state).map_err(|e| Error::data(format!("the checkpoint's state is malformed: {e}")))
}

/// A method whose loss needs the outputs of several tokens before any derivative: log-probabilities of the tokens that
/// a packed row predicts, or scores of a value head.
pub trait ExampleLoss: Method {
    /// Packs the rows `chosen`, one after the other.
    fn pack(&self, batch: &Minibatch<Self>, chosen: &[usize]) -> PackedRow;

    /// Returns the sums that this rank counts, and the derivatives of the loss by its own outputs.
    fn loss(&self, packed: &LossInput<Self>) -> (Vec<ExampleSums>, Vec<f32>);

    /// Returns id, prompt and responses of a held-out row with the example results `examples`.
    fn read(batch: &Minibatch<Self>, examples: &[&ExampleSums]) -> Result<(u64, String, EvalResponses)>;
}

/// Sums of one example: (row index in the minibatch, index in the row, sums). The sums are its share of the loss, its
/// margin, whether it is right, and the additional counts of the method.
pub type ExampleSums = (usize, usize, Sums);

/// A packed row of a minibatch, with the model's outputs.
pub struct LossInput<'a, M: Method> {
    pub run: &'a Run,
    pub batch: &'a Minibatch<'a, M>,
    /// The weight of each example's loss.
    pub weight: f64,
    /// Indices of its rows in the minibatch.
    pub chosen: &'a [usize],
    pub whole: &'a PackedRow,
    /// This rank's part of the row.
    pub row: &'a PackedRow,
    /// The outputs, one for each predicted token of the part.
    pub numbers: Vec<f32>,
}

impl<M: ExampleLoss> LossInput<'_, M> {
    /// Evaluates rows of `N` sequences each. `judge` returns the sums of the row at an index, from the outputs of each
    /// sequence, and the derivative of its loss by each of them. Ranks of a ring compute the same, and the first one
    /// counts it.
    pub fn rows<const N: usize>(
        &self,
        judge: impl Fn(usize, [&[f32]; N]) -> (Sums, [f64; N]),
    ) -> (Vec<ExampleSums>, Vec<f32>) {
        let sequence = &self.run.ranks.axes.sequence;
        let numbers = self.whole.gather(sequence, &self.numbers);
        let (mut examples, mut slopes) = (Vec::new(), vec![0.0; numbers.len()]);
        for (&i, ends) in self.chosen.iter().zip(self.whole.row_offsets.windows(N + 1).step_by(N)) {
            let (of_row, by_number) = judge(i, std::array::from_fn(|k| &numbers[ends[k]..ends[k + 1]]));
            for (ends, slope) in ends.windows(2).zip(by_number) {
                slopes[ends[0]..ends[1]].fill((self.weight * slope) as f32);
            }
            examples.extend((sequence.rank() == 0).then_some((i, 0, of_row)));
        }
        (examples, self.row.select(&slopes))
    }
}

/// The losses of a minibatch's rows, each with `weight`.
struct Examples<'a, M: Method> {
    method: &'a M,
    run: &'a Run,
    batch: &'a Minibatch<'a, M>,
    weight: f64,
}

impl<M: ExampleLoss> Examples<'_, M> {
    /// The results of packed rows, and the derivatives of their loss by the outputs of this rank.
    fn measure(&self, packed: &MicroBatch, head: &HeadPass) -> (Vec<ExampleSums>, Vec<f32>) {
        let Self { method, run, batch, weight } = *self;
        let MicroBatch { rows: chosen, whole, own: row } = *packed;
        method.loss(&LossInput { run, batch, weight, chosen, whole, row, numbers: head.outputs() })
    }
}

impl<M: ExampleLoss> Objective for Examples<'_, M> {
    fn lengths(&self) -> Vec<usize> {
        lengths(self.batch.rows)
    }

    fn pack(&self, rows: &[usize]) -> PackedRow {
        self.method.pack(self.batch, rows)
    }

    fn loss(&self, packed: &MicroBatch, pass: Pass) -> Sums {
        let examples = pass.run(|head| {
            let (examples, slopes) = self.measure(packed, head);
            head.backward(&slopes);
            examples
        });
        Sums::total(examples.iter().map(|(.., of)| of))
    }
}

/// One optimizer step on rows, each of whose losses has this weight. Returns sums over all ranks. All ranks call this.
pub fn update<M: ExampleLoss>(
    method: &M,
    run: &Run,
    learner: &mut Learner,
    batch: &Minibatch<M>,
    weight: f64,
) -> Result<Sums> {
    let [_, tokens_max, _] = M::shape(&run.config);
    learner.learn(&run.ranks.axes, tokens_max, &[&Examples { method, run, batch, weight }])
}

/// Evaluates held-out rows and records the first of them. Returns the result of each row and the sums over all rows, in
/// the order of the rows. All ranks call this.
pub fn evaluate_examples<M: ExampleLoss>(
    method: &M,
    run: &mut Run,
    role: &Role,
    batch: &Minibatch<M>,
    weight: f64,
) -> Result<(Vec<ExampleSums>, Sums)> {
    let [_, tokens_max, _] = M::shape(&run.config);
    let objective = Examples { method, run, batch, weight };
    let examples = evaluate(run, role, &objective, tokens_max, |packed| {
        objective.measure(packed, &HeadPass::forward(role, packed.own)).0
    })?;
    let mut in_order: Vec<&ExampleSums> = examples.iter().collect();
    in_order.sort_by_key(|(row, example, _)| (*row, *example));
    let record = |examples: &[&ExampleSums]| {
        let (row, prompt, responses) = M::read(batch, examples)?;
        let margin = examples.iter().map(|(.., of)| of.get(keys::MARGIN_MEAN)).fold(f64::INFINITY, f64::min);
        let correct = examples.iter().all(|(.., of)| of.get(keys::ACCURACY) > 0.0);
        Ok(EvalRow { step: batch.step, row, prompt, responses, margin, correct })
    };
    let recorded = run.recorder.eval_rows(batch.step, in_order.chunk_by(|a, b| a.0 == b.0).map(record));
    run.ranks.all.agree(recorded)?;
    let sums = Sums::total(in_order.iter().map(|(.., of)| of));
    Ok((examples, sums))
}

/// Tokens of each row, all its sequences together.
pub fn lengths<T: Row>(rows: &[T]) -> Vec<usize> {
    rows.iter().map(|row| row.sequences().iter().sum()).collect()
}

/// The results of `measure` on held-out rows, on all ranks and in row order. Each call measures one micro-batch. All
/// ranks call this.
pub fn evaluate<T: Serialize + DeserializeOwned>(
    run: &Run,
    role: &Role,
    rows: &dyn Objective,
    tokens_max: usize,
    measure: impl FnMut(&MicroBatch) -> Vec<T>,
) -> Result<Vec<T>> {
    let (axes, mine) = (&run.ranks.axes, evaluate_share(run, role, rows, tokens_max, measure)?);
    axes.of_last_stage(|| records::gather(&axes.zero, &mine))
}

/// The same for this rank's share, on the last stage. Other stages have no results.
pub fn evaluate_share<T>(
    run: &Run,
    role: &Role,
    rows: &dyn Objective,
    tokens_max: usize,
    mut measure: impl FnMut(&MicroBatch) -> Vec<T>,
) -> Result<Vec<T>> {
    let axes = &run.ranks.axes;
    let tokens_max = tokens_max * axes.sequence.size();
    let plan = balance::plan(&rows.lengths(), axes.data.size(), tokens_max, &Cost::from_arch(role.arch()));
    let mut mine = Vec::new();
    // Every rank waits for all others to ask, so stages that follow each other ask less often.
    let between = if axes.pipeline.size() > 1 { 4 * axes.pipeline.size() } else { 1 };
    let own = &plan[axes.data.rank()];
    for (i, chunk) in role.transformer.passes(own.len()) {
        let chosen = &own[i];
        if chunk == 0 && i.is_multiple_of(between) && run.stop_requested() {
            return Err(Error::new(Kind::Stopped, "stopped during the evaluation"));
        }
        let whole = rows.pack(chosen);
        let own = whole.shard(&axes.sequence);
        if role.transformer.has_head(chunk) {
            mine.extend(measure(&MicroBatch { rows: chosen, whole: &whole, own: &own }));
        } else {
            rows.frozen().into_iter().chain([role]).for_each(|role| head_pass::relay(role, chunk, &own));
        }
    }
    Ok(mine)
}
