//! One pass over a minibatch: the micro-batches of this rank, and the sums over those of all ranks.

use crate::comm::Axes;
use crate::comm::records;
use crate::config::optim::GradientOrder;
use crate::data::balance::{self, Cost};
use crate::data::packing;
use crate::device::null;
use crate::learn::Learner;
use crate::learn::sums::Sums;

/// Part of a minibatch whose gradient is one summand.
struct Chunk {
    /// Place in the tree of sums.
    leaf: usize,
    number: usize,
    microbatches: Vec<Vec<usize>>,
}

/// The chunks of this rank, in the order in which to compute them. `tokens_max` is a rank's; a ring of ranks holds as
/// many times more of a row.
fn chunks(learner: &Learner, axes: &Axes, lengths: &[usize], tokens_max: usize) -> Vec<Chunk> {
    let (sum, tokens_max) = (&learner.sum, tokens_max * axes.sequence.size());
    match sum.order {
        GradientOrder::Fast => {
            let cost = Cost::of(learner.role.arch());
            let mut plan = balance::plan(lengths, axes.data.size(), tokens_max, &cost);
            let number = axes.data.rank();
            vec![Chunk { leaf: number, number, microbatches: plan.swap_remove(number) }]
        }
        GradientOrder::Fixed => {
            let dealt = packing::deal(lengths, sum.chunks(&axes.data));
            let own = sum.own_chunks(&axes.data).into_iter();
            own.map(|(leaf, number)| {
                let microbatches = packing::microbatches(lengths, &dealt[number], tokens_max, 0);
                Chunk { leaf, number, microbatches }
            })
            .collect()
        }
    }
}

/// The rows of each micro-batch that accumulation makes on this rank, in its order.
pub fn microbatches(learner: &Learner, axes: &Axes, lengths: &[usize], tokens_max: usize) -> Vec<Vec<usize>> {
    chunks(learner, axes, lengths, tokens_max).into_iter().flat_map(|chunk| chunk.microbatches).collect()
}

/// Makes the gradient of a minibatch of rows of `lengths` tokens, the same on all ranks of the mesh: `microbatch` adds
/// the gradient of this rank's part of the given rows to `learner.sum.grads`, and returns what it measured. Gives the
/// sums over all ranks: those of a chunk in its order, then chunk by chunk, whoever computed them. Ranks of the tensor
/// axis have the same sums, which count once.
pub fn accumulate(
    learner: &mut Learner,
    axes: &Axes,
    lengths: &[usize],
    tokens_max: usize,
    mut microbatch: impl FnMut(&mut Learner, &[usize]) -> Sums,
) -> Sums {
    let chunks = chunks(learner, axes, lengths, tokens_max);
    let mut left: usize = chunks.iter().map(|chunk| chunk.microbatches.len()).sum();
    let mut mine = Vec::new();
    for chunk in chunks {
        learner.sum.begin_chunk();
        let mut sums = Sums::default();
        let times = null::represented(&chunk.microbatches, lengths);
        for (rows, times) in chunk.microbatches.iter().zip(times) {
            left -= 1;
            if times > 0.0 {
                let mut add = || {
                    learner.sum.begin_microbatch(left == 0);
                    microbatch(learner, rows)
                };
                sums.add(&null::times(times, &mut add));
            }
        }
        learner.sum.end_chunk(chunk.leaf);
        mine.push((chunk.number, sums));
    }
    let mut all = records::gather(&axes.zero, &mine).expect("ranks of one binary");
    all.sort_by_key(|(number, _)| *number);
    let mut total = Sums::default();
    for (_, sums) in &all {
        total.add(sums);
    }
    total
}
