//! A pass through a minibatch: the micro-batches of this rank, and the sums over all ranks.

use crate::comm::{Axes, records};
use crate::config::optim::GradientOrder;
use crate::data::balance::{self, Cost};
use crate::device::null;
use crate::learn::Learner;
use crate::learn::sums::Sums;
use crate::learn::tree_sum::leaves;

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

/// Computes the gradient of a minibatch of rows of `lengths` tokens, the same on all ranks of the mesh. `microbatch`
/// adds the gradient of this rank's part of the given rows to `learner.sum.grads`, and returns its measurements.
/// Returns the sums over all ranks: first over each chunk in order, then over the chunks, independent of the ranks that
/// computed them. Ranks of the tensor axis have the same sums, which count once. `tokens_max` is the limit of one rank;
/// a ring of N ranks holds N times as many tokens of a row.
///
/// If the rows of a minibatch are not all learned from in the same way, each micro-batch is passed `passes` times, with
/// the number of the pass (from 0). Each pass runs a forward and backward of its rows, even if there are none.
pub fn accumulate(
    learner: &mut Learner,
    axes: &Axes,
    lengths: &[usize],
    tokens_max: usize,
    passes: usize,
    mut microbatch: impl FnMut(&mut Learner, &[usize], usize) -> Sums,
) -> Sums {
    let (sum, tokens_max) = (&learner.sum, tokens_max * axes.sequence.size());
    let (cost, data) = (Cost::from_arch(learner.role.arch()), &axes.data);
    let of_ranks = chunks(sum.order, sum.fixed_chunks, &cost, lengths, data.size(), tokens_max);
    let own = of_ranks.into_iter().nth(data.rank()).expect("chunks of each rank");
    learner.microbatches = own.iter().flat_map(|chunk| &chunk.microbatches).cloned().collect();
    let mut left = learner.microbatches.len();
    let mut mine = Vec::new();
    for chunk in own {
        learner.sum.begin_chunk();
        let mut sums = Sums::default();
        let times = null::represented(&chunk.microbatches, lengths);
        for (rows, times) in chunk.microbatches.iter().zip(times) {
            left -= 1;
            if times > 0.0 {
                let mut add = || {
                    let mut sums = Sums::default();
                    for pass in 0..passes {
                        learner.sum.begin_microbatch(left == 0 && pass + 1 == passes);
                        sums.add(&microbatch(learner, rows, pass));
                    }
                    sums
                };
                sums.add(&null::times(times, &mut add));
            }
        }
        learner.sum.end_chunk(chunk.leaf);
        mine.push((chunk.number, sums));
    }
    let mut all = records::gather(&axes.zero, &mine).expect("ranks of one binary");
    all.sort_by_key(|(number, _)| *number);
    Sums::total(all.iter().map(|(_, sums)| sums))
}
