//! A pass through a minibatch: the micro-batches of this rank, and the sums over all ranks.

use super::head_pass::{self, Pass};
use super::packed::PackedRow;
use super::routing::{self, RouterLoss};
use super::schedule::{self, Action};
use super::sums::Sums;
use super::tree_sum::leaves;
use super::{Learner, MicroBatch, Objective, non_finite};
use crate::comm::{Axes, records};
use crate::config::optim::GradientOrder;
use crate::data::balance::{self, Cost};
use crate::device::null;
use crate::error::{Error, Result};
use crate::model::{Feed, Saved};
use crate::sys::trace::{self, Category};
use std::ops::Range;

/// Part of a minibatch whose gradient is one summand.
pub struct Chunk {
    /// Index of the leaf in the tree of sums.
    leaf: usize,
    number: usize,
    pub microbatches: Vec<Vec<usize>>,
}

/// The chunks of each data rank, in its order: `count` in all under `order = "fixed"`, otherwise one per rank. A
/// micro-batch has at most `tokens_max` tokens.
pub fn chunks(
    order: GradientOrder,
    count: usize,
    cost: &Cost,
    lengths: &[usize],
    ranks: usize,
    tokens_max: usize,
) -> Vec<Vec<Chunk>> {
    if order == GradientOrder::Fast {
        let plan = balance::plan(lengths, ranks, tokens_max, cost).into_iter().enumerate();
        return plan.map(|(number, microbatches)| vec![Chunk { leaf: number, number, microbatches }]).collect();
    }
    let dealt = balance::deal(lengths, count);
    let chunk = |(leaf, number): (usize, usize)| {
        let microbatches = balance::microbatches(lengths, &dealt[number], tokens_max, 0);
        Chunk { leaf, number, microbatches }
    };
    (0..ranks).map(|rank| leaves(count, rank, ranks).into_iter().map(chunk).collect()).collect()
}

/// The rows of several objectives, counted through: first all rows of the first one.
struct Numbered<'a> {
    objectives: Vec<(&'a dyn Objective, Range<usize>)>,
    lengths: Vec<usize>,
}

impl<'a> Numbered<'a> {
    /// Objectives after the first one are left out if they have no rows.
    fn new(objectives: &[&'a dyn Objective]) -> Self {
        let mut all = Self { objectives: Vec::new(), lengths: Vec::new() };
        for objective in objectives {
            let (start, lengths) = (all.lengths.len(), objective.lengths());
            all.lengths.extend(lengths);
            if all.objectives.is_empty() || all.lengths.len() > start {
                all.objectives.push((*objective, start..all.lengths.len()));
            }
        }
        all
    }

    /// Each objective with its part of `rows`, packed.
    fn pack(&self, rows: &[usize]) -> impl Iterator<Item = (&'a dyn Objective, Vec<usize>, PackedRow)> {
        self.objectives.iter().map(|(objective, range)| {
            let own = rows.iter().filter(|row| range.contains(row)).map(|row| row - range.start).collect::<Vec<_>>();
            let packed = objective.pack(&own);
            (*objective, own, packed)
        })
    }
}

/// A micro-batch of this rank.
#[derive(Clone, Copy)]
struct Work<'a> {
    /// The index of its chunk among those of this rank.
    chunk: usize,
    rows: &'a [usize],
    /// The number of micro-batches that it represents in a plan.
    times: f64,
}

/// The micro-batches of chunks. A plan computes at least `window` that are alike.
fn work<'a>(own: &'a [Chunk], lengths: &[usize], window: usize) -> Vec<Work<'a>> {
    let of_chunk = |(number, chunk): (usize, &'a Chunk)| {
        let times = null::represented(&chunk.microbatches, lengths, window).into_iter();
        let work = move |(rows, times): (&'a Vec<usize>, f64)| Work { chunk: number, rows, times };
        chunk.microbatches.iter().zip(times).map(work).filter(|work| work.times > 0.0).collect::<Vec<_>>()
    };
    own.iter().enumerate().flat_map(of_chunk).collect()
}

/// The pass of an objective over a micro-batch.
struct StagePass<'a> {
    objective: &'a dyn Objective,
    rows: Vec<usize>,
    whole: PackedRow,
    /// This rank's part of `whole`.
    own: PackedRow,
    /// The results of the forward of each part of a stage that has no head.
    saved: Vec<Option<Saved>>,
}

impl Learner {
    /// Makes one optimizer step on the sum of the losses of `objectives`. Returns the sums over all ranks. A micro-batch
    /// has at most `tokens_max` tokens on each rank of a sequence group. All ranks of the mesh call this.
    ///
    /// # Errors
    /// See `step_if_finite`.
    pub fn learn(&mut self, axes: &Axes, tokens_max: usize, objectives: &[&dyn Objective]) -> Result<Sums> {
        let sums = self.accumulate(axes, tokens_max, objectives);
        self.step_if_finite(axes, &sums, objectives)?;
        Ok(sums)
    }

    /// Computes the gradient of a minibatch, and returns the sums over all ranks: first over each chunk in order, then
    /// over the chunks, independent of the ranks that computed them. Ranks of the tensor axis have the same sums, which
    /// count once. Each micro-batch has a pass of every objective, even one without rows of it, so that all ranks make
    /// the same passes. On a pipeline each rank walks the micro-batches in the order of its stage (`schedule`).
    pub fn accumulate(&mut self, axes: &Axes, tokens_max: usize, objectives: &[&dyn Objective]) -> Sums {
        let numbered = Numbered::new(objectives);
        let (passes, lengths) = (numbered.objectives.len(), &numbered.lengths);
        let (sum, tokens_max) = (&self.sum, tokens_max * axes.sequence.size());
        let (cost, data) = (Cost::from_arch(self.role.arch()), &axes.data);
        let of_ranks = chunks(sum.order, sum.fixed_chunks, &cost, lengths, data.size(), tokens_max);
        let microbatches: usize = of_ranks.iter().flatten().map(|chunk| chunk.microbatches.len()).sum();
        let own = of_ranks.into_iter().nth(data.rank()).expect("chunks of each rank");
        let router_loss = self.router_loss(axes, &numbered, &own, microbatches * passes);
        self.microbatches = own.iter().flat_map(|chunk| &chunk.microbatches).cloned().collect();
        let (mine, waits) = schedule::timed(axes, || self.walk(axes, &numbered, &own, &router_loss));
        let mut all = records::gather(&axes.zero, &mine).expect("ranks of one binary");
        all.sort_by_key(|(number, _)| *number);
        let mut total = Sums::total(all.iter().map(|(_, sums)| sums));
        if axes.pipeline.size() > 1 {
            // The last stage has the loss, and each stage has the routers of its layers.
            let of_stages = records::gather(&axes.pipeline, &[total]).expect("ranks of one binary");
            total = Sums::total(&of_stages);
        }
        self.measured = routing::finished(&mut total);
        self.measured.add(&waits);
        total
    }

    /// Walks the micro-batches of the chunks `own`. Returns the number of each chunk with its sums on this stage.
    fn walk(&mut self, axes: &Axes, numbered: &Numbered, own: &[Chunk], loss: &RouterLoss) -> Vec<(usize, Sums)> {
        let (stage, stages) = (axes.pipeline.rank(), axes.pipeline.size());
        let mut work = work(own, &numbered.lengths, schedule::window(stage, stages, axes.chunks));
        if axes.chunks > 1 {
            // Chunks alternate after as many micro-batches as there are stages.
            work.resize(work.len().next_multiple_of(stages), Work { chunk: 0, rows: &[], times: 1.0 });
        }
        let actions: Vec<Action> = schedule::actions(stage, stages, axes.chunks, work.len()).collect();
        let lookahead = if stages > 1 { 2 } else { 1 };
        let mut passes: Vec<Vec<StagePass>> = work.iter().map(|_| Vec::new()).collect();
        let mut sums = vec![Sums::default(); work.len()];
        let (mut expected, mut begun) = (0, 0);
        for (at, action) in actions.iter().enumerate() {
            while expected < actions.len().min(at + lookahead) {
                self.expect(axes, numbered, actions[expected], &work, &mut passes);
                expected += 1;
            }
            let (Action::Forward(part, i) | Action::Backward(part, i)) = *action;
            let Work { chunk, rows, times } = work[i];
            let numbers = || [rows.iter().map(|&row| numbered.lengths[row]).sum(), rows.len()];
            let is_last = at + 1 == actions.len();
            match action {
                // It is done together with the backward.
                Action::Forward(..) if self.role.transformer.has_head(part) => {}
                Action::Forward(..) => {
                    let _span = trace::span(Category::Pass, "micro-batch forward", "tokens rows", numbers);
                    sums[i].add(&null::times(times, || self.forward_stage(part, &mut passes[i])));
                }
                Action::Backward(..) => {
                    let _span = trace::span(Category::Pass, "micro-batch", "tokens rows", numbers);
                    self.begin_chunks(own, &mut begun, chunk + 1);
                    if self.role.transformer.has_head(part) {
                        sums[i].add(&null::times(times, || self.pass_whole(&passes[i], loss, is_last)));
                    } else {
                        null::times(times, || self.backward_stage(part, &mut passes[i], loss, is_last));
                    }
                    if part == 0 {
                        passes[i].clear();
                    }
                }
            }
        }
        self.begin_chunks(own, &mut begun, own.len() + 1);
        let of_chunk = |(number, chunk): (usize, &Chunk)| {
            let own = work.iter().zip(&sums).filter(|(work, _)| work.chunk == number);
            (chunk.number, Sums::total(own.map(|(_, sums)| sums)))
        };
        own.iter().enumerate().map(of_chunk).collect()
    }

    /// Begins the chunks before number `end`, and ends each before the next one.
    fn begin_chunks(&mut self, own: &[Chunk], begun: &mut usize, end: usize) {
        while *begun < end {
            if let Some(chunk) = begun.checked_sub(1) {
                self.sum.end_chunk(own[chunk].leaf);
            }
            if *begun < own.len() {
                self.sum.begin_chunk();
            }
            *begun += 1;
        }
    }

    /// Packs the rows of a forward, and starts to receive what an action needs from a neighboring stage.
    fn expect<'a>(
        &self,
        axes: &Axes,
        numbered: &Numbered<'a>,
        action: Action,
        work: &[Work],
        passes: &mut [Vec<StagePass<'a>>],
    ) {
        let model = &self.role.transformer;
        match action {
            Action::Forward(0, i) => {
                let pack = |(objective, rows, whole): (&'a dyn Objective, Vec<usize>, PackedRow)| {
                    let own = whole.shard(&axes.sequence);
                    StagePass { objective, rows, whole, own, saved: (0..axes.chunks).map(|_| None).collect() }
                };
                passes[i] = numbered.pack(work[i].rows).map(pack).collect();
                self.expect_forward(0, &passes[i]);
            }
            Action::Forward(part, i) => self.expect_forward(part, &passes[i]),
            Action::Backward(part, i) => {
                passes[i].iter().for_each(|pass| model.expect_backward(part, pass.own.tokens.len()));
            }
        }
    }

    fn expect_forward(&self, part: usize, passes: &[StagePass]) {
        for pass in passes {
            for frozen in pass.objective.frozen() {
                frozen.transformer.expect_forward(part, pass.own.tokens.len());
            }
            self.role.transformer.expect_forward(part, pass.own.tokens.len());
        }
    }

    /// The forwards of a micro-batch by a part of a stage, without the head. Returns the sums of its routers.
    fn forward_stage(&self, part: usize, passes: &mut [StagePass]) -> Sums {
        let mut sums = Sums::default();
        for pass in passes {
            pass.objective.frozen().into_iter().for_each(|role| head_pass::relay(role, part, &pass.own));
            pass.saved[part] = Some(head_pass::forward_stage(&self.role, part, &pass.own, self.recompute));
            sums.add(&routing::counted(&self.role.transformer.routers.take()));
        }
        sums
    }

    /// The backwards that follow.
    fn backward_stage(&mut self, part: usize, passes: &mut [StagePass], loss: &RouterLoss, is_last: bool) {
        let count = passes.len();
        for (number, StagePass { own, saved, .. }) in passes.iter_mut().enumerate() {
            self.sum.begin_microbatch(is_last && number + 1 == count);
            let saved = saved[part].take().expect("its forward was before");
            head_pass::backward_stage(&self.role, own, saved, loss, &mut self.sum.grads);
        }
    }

    /// Forward, loss and backward of a micro-batch on the last stage. Returns the sums of its losses.
    fn pass_whole(&mut self, passes: &[StagePass], loss: &RouterLoss, is_last: bool) -> Sums {
        let mut sums = Sums::default();
        for (number, StagePass { objective, rows, whole, own, .. }) in passes.iter().enumerate() {
            self.sum.begin_microbatch(is_last && number + 1 == passes.len());
            let batch = MicroBatch { rows, whole, own };
            let pass = Pass { router_loss: loss.clone(), ..self.pass(own) };
            sums.add(&objective.loss(&batch, pass));
            sums.add(&routing::counted(&self.role.transformer.routers.take()));
        }
        sums
    }

    /// The load-balancing loss of a minibatch, of which this rank has the chunks `own`, of `forwards` forwards on all
    /// ranks. All ranks call this.
    fn router_loss(&self, axes: &Axes, numbered: &Numbered, own: &[Chunk], forwards: usize) -> RouterLoss {
        let (role, coef) = (&self.role, self.router_loss_coef);
        let Some(spec) = role.arch().feeds().find_map(Feed::experts).filter(|_| coef > 0.0) else {
            return RouterLoss::None;
        };
        if forwards == 1 && axes.sequence.size() == 1 && axes.pipeline.size() == 1 {
            return RouterLoss::OfForward(coef);
        }
        let routers = &role.transformer.routers;
        let work = work(own, &numbered.lengths, 1);
        for (i, chunk) in role.transformer.passes(work.len()) {
            let Work { rows, times, .. } = work[i];
            let forward = |whole: PackedRow| head_pass::relay(role, chunk, &whole.shard(&axes.sequence));
            null::times(times, || numbered.pack(rows).for_each(|(.., whole)| routers.counted(|| forward(whole))));
        }
        let found = routers.take();
        let mut counts: Vec<f64> = found.chosen.iter().map(|chosen| *chosen as f64).collect();
        counts.resize(spec.count, 0.0);
        counts.push(found.pairs as f64);
        axes.zero.all_reduce_sum_f64(&mut counts);
        axes.pipeline.all_reduce_sum_f64(&mut counts);
        let pairs = counts.pop().expect("it was pushed");
        RouterLoss::Slope(routing::slope(coef, pairs, counts.into_iter()))
    }

    /// Makes the optimizer step after `accumulate`, which returned `sums`. Does not update if the loss or the gradient
    /// is not finite. All ranks call this.
    ///
    /// # Errors
    /// `Fault`, the same on all ranks. It names the first weight, forward result or gradient that is not finite.
    pub fn step_if_finite(&mut self, axes: &Axes, sums: &Sums, objectives: &[&dyn Objective]) -> Result<()> {
        let (update, loss) = (self.zero.updates + 1, objectives[0].loss_key());
        let (what, error) = if sums.get(loss).is_finite() {
            let Err(error) = self.step(axes) else { return Ok(()) };
            (format!("the gradient of update {update}"), error)
        } else {
            let what = format!("the loss of update {update}");
            let again = format!("{}: {what} is not finite, but a second forward pass is finite", self.role.name);
            (what, Error::fault(again).hint(non_finite::OF_MACHINE))
        };
        let numbered = Numbered::new(objectives);
        let packed = self.microbatches.iter().flat_map(|rows| numbered.pack(rows));
        let own = packed.map(|(.., row)| row.shard(&axes.sequence));
        non_finite::forward(&self.role, axes, self.recompute, &what, own).and(Err(error))
    }
}
