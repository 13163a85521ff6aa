//! A pass through a minibatch: the micro-batches of this rank, and the sums over all ranks.

use super::packed::PackedRow;
use super::routing::{self, RouterLoss};
use super::sums::Sums;
use super::tree_sum::leaves;
use super::{HeadPass, Learner, MicroBatch, Objective, Pass, non_finite};
use crate::comm::{Axes, records};
use crate::config::optim::GradientOrder;
use crate::data::balance::{self, Cost};
use crate::device::null;
use crate::error::{Error, Result};
use crate::model::Feed;
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
    /// the same passes.
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
        let mut left = self.microbatches.len();
        let mut mine = Vec::new();
        for chunk in own {
            self.sum.begin_chunk();
            let mut sums = Sums::default();
            let times = null::represented(&chunk.microbatches, lengths);
            for (rows, times) in chunk.microbatches.iter().zip(times) {
                let numbers = || [rows.iter().map(|&row| lengths[row]).sum(), rows.len()];
                let _span = trace::span(Category::Pass, "micro-batch", "tokens rows", numbers);
                left -= 1;
                if times > 0.0 {
                    let mut add = || {
                        let mut sums = Sums::default();
                        for (pass, (objective, rows, whole)) in numbered.pack(rows).enumerate() {
                            self.sum.begin_microbatch(left == 0 && pass + 1 == passes);
                            let own = whole.shard(&axes.sequence);
                            let batch = MicroBatch { rows: &rows, whole: &whole, own: &own };
                            let pass = Pass { router_loss: router_loss.clone(), ..self.pass(&own) };
                            sums.add(&objective.loss(&batch, pass));
                            sums.add(&routing::counted(&self.role.transformer.routers.take()));
                        }
                        sums
                    };
                    sums.add(&null::times(times, &mut add));
                }
            }
            self.sum.end_chunk(chunk.leaf);
            mine.push((chunk.number, sums));
        }
        let mut all = records::gather(&axes.zero, &mine).expect("ranks of one binary");
        all.sort_by_key(|(number, _)| *number);
        let mut total = Sums::total(all.iter().map(|(_, sums)| sums));
        self.routers = routing::finished(&mut total);
        total
    }

    /// The load-balancing loss of a minibatch, of which this rank has the chunks `own`, of `forwards` forwards on all
    /// ranks. All ranks call this.
    fn router_loss(&self, axes: &Axes, numbered: &Numbered, own: &[Chunk], forwards: usize) -> RouterLoss {
        let (role, coef) = (&self.role, self.router_loss_coef);
        let Some(spec) = role.arch().feeds().find_map(Feed::experts).filter(|_| coef > 0.0) else {
            return RouterLoss::None;
        };
        if forwards == 1 && axes.sequence.size() == 1 {
            return RouterLoss::OfForward(coef);
        }
        let routers = &role.transformer.routers;
        for chunk in own {
            let times = null::represented(&chunk.microbatches, &numbered.lengths);
            for (rows, times) in chunk.microbatches.iter().zip(times).filter(|(_, times)| *times > 0.0) {
                let forward = |whole: PackedRow| drop(HeadPass::forward(role, &whole.shard(&axes.sequence)));
                null::times(times, || {
                    numbered.pack(rows).for_each(|(.., whole)| routers.counted(|| forward(whole)));
                });
            }
        }
        let found = routers.take();
        let mut counts: Vec<f64> = found.chosen.iter().map(|chosen| *chosen as f64).collect();
        counts.resize(spec.count, 0.0);
        counts.push(found.pairs as f64);
        axes.zero.all_reduce_sum_f64(&mut counts);
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
