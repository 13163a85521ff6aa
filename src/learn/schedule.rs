//! The order of work on a pipeline's stages: one forward, one backward (1F1B; arXiv:2104.04473, section 2.2).
//!
//! Stage i of p starts with forwards of p - 1 - i micro-batches. Then it does a forward and a backward in turn, and the
//! backwards that are left. So it holds the activations of min(m, p - i) micro-batches, and of m + p - 1 turns it waits
//! for p - 1. Each stage walks the micro-batches in order: a weight's gradient is the sum in the order of one stage.
//!
//! Interleaved (same paper), a stage has v chunks of layers, and the wait is a v-th, for v times as many messages.

use super::sums::Sums;
use crate::comm::Axes;
use crate::metrics::keys::{self, Metrics, named};
use std::time::Instant;

/// Keys of sums over ranks and updates: seconds of the schedule, and those of them in which a rank waited for a stage.
const SECONDS: &str = "schedule_s";
const WAITED: &str = "schedule_waited_s";

/// Runs a schedule. Returns also its seconds and its waits over all ranks, if there are several stages. All ranks call
/// this.
pub fn timed<R>(axes: &Axes, run: impl FnOnce() -> R) -> (R, Sums) {
    let (start, before) = (Instant::now(), axes.links.waited_s());
    let done = run();
    if axes.pipeline.size() == 1 {
        return (done, Sums::default());
    }
    // A stage that is done waits for the last backwards of the others.
    axes.links.wait(|| axes.pipeline.barrier());
    let mut seconds = [start.elapsed().as_secs_f64(), axes.links.waited_s() - before];
    axes.all.all_reduce_sum_f64(&mut seconds);
    (done, Sums::from_list([(SECONDS, seconds[0]), (WAITED, seconds[1])]))
}

/// The metrics of the schedules of a step, given their sums.
pub fn metrics(sums: &Sums) -> Metrics {
    let seconds = sums.get(SECONDS);
    let ratio = (seconds > 0.0).then(|| (keys::BUBBLE_RATIO, sums.get(WAITED) / seconds));
    named(ratio)
}

/// A part of a pass: the chunk of the stage's layers, and the index of the micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Forward(usize, usize),
    Backward(usize, usize),
}

/// The most micro-batches of which stage `stage` of `stages` holds activations.
pub fn window(stage: usize, stages: usize, chunks: usize) -> usize {
    if chunks == 1 { stages - stage } else { 2 * stages }
}

/// The actions of stage `stage` of `stages` for `microbatches`, in order. With several chunks of layers in each stage, the
/// number of micro-batches is a multiple of that of stages.
pub fn actions(stage: usize, stages: usize, chunks: usize, microbatches: usize) -> impl Iterator<Item = Action> {
    let all = microbatches * chunks;
    let behind = stages - 1 - stage;
    let ahead = if chunks == 1 { behind } else { 2 * behind + (chunks - 1) * stages }.min(all);
    // A chunk walks as many micro-batches as there are stages, then the next chunk does.
    let place = move |k: usize| {
        let (group, at) = (k / (stages * chunks), k % (stages * chunks));
        (at / stages, group * stages + at % stages)
    };
    let forward = move |k: usize| {
        let (chunk, i) = place(k);
        Action::Forward(chunk, i)
    };
    let backward = move |k: usize| {
        let (chunk, i) = place(k);
        Action::Backward(chunks - 1 - chunk, i)
    };
    let in_turn = (ahead..all).flat_map(move |k| [forward(k), backward(k - ahead)]);
    (0..ahead).map(forward).chain(in_turn).chain((all - ahead..all).map(backward))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stages, chunks and micro-batches.
    fn cases() -> impl Iterator<Item = [usize; 3]> {
        let plain = (1..9).flat_map(|p| (0..20).map(move |m| [p, 1, m]));
        plain.chain((2..6).flat_map(|p| (2..5).flat_map(move |v| (0..4).map(move |groups| [p, v, groups * p]))))
    }

    #[test]
    fn a_stage_does_each_forward_before_its_backward_in_order_and_holds_as_few_activations_as_promised() {
        for [stages, chunks, microbatches] in cases() {
            for stage in 0..stages {
                let (mut forwards, mut backwards) = (vec![0; chunks], vec![0; chunks]);
                let mut most = 0;
                for action in actions(stage, stages, chunks, microbatches) {
                    let (done, chunk, i) = match action {
                        Action::Forward(chunk, i) => (&mut forwards, chunk, i),
                        Action::Backward(chunk, i) => (&mut backwards, chunk, i),
                    };
                    assert_eq!(i, done[chunk], "a chunk walks micro-batches in order");
                    done[chunk] += 1;
                    assert!(forwards.iter().zip(&backwards).all(|(f, b)| f >= b));
                    most = most.max(forwards.iter().sum::<usize>() - backwards.iter().sum::<usize>());
                    assert!(forwards[0] - backwards[0] <= window(stage, stages, chunks), "{stages} x {chunks}");
                }
                assert!([forwards, backwards].iter().all(|done| *done == vec![microbatches; chunks]));
                let promised = if chunks == 1 { stages - stage } else { (chunks + 1) * stages - 1 - 2 * stage };
                assert_eq!(most, (microbatches * chunks).min(promised), "stage {stage} of {stages}");
            }
        }
    }

    /// The time until all stages are done, if a stage's forward takes `chunks` and its backward twice as long.
    fn simulated(stages: usize, chunks: usize, microbatches: usize) -> usize {
        let mut left: Vec<Vec<Action>> =
            (0..stages).map(|i| actions(i, stages, chunks, microbatches).collect()).collect();
        for actions in &mut left {
            actions.reverse();
        }
        // When each part of the model has done a micro-batch's forward and backward.
        let mut done = vec![vec![[usize::MAX; 2]; microbatches]; stages * chunks];
        let mut now = vec![0; stages];
        while left.iter().any(|actions| !actions.is_empty()) {
            let mut moved = false;
            for stage in 0..stages {
                while let Some(&action) = left[stage].last() {
                    let (Action::Forward(chunk, i) | Action::Backward(chunk, i)) = action;
                    let part = chunk * stages + stage;
                    let (after, cost, pass) = match action {
                        Action::Forward(..) => (if part == 0 { 0 } else { done[part - 1][i][0] }, 1, 0),
                        Action::Backward(..) if part + 1 == stages * chunks => (done[part][i][0], 2, 1),
                        Action::Backward(..) => (done[part + 1][i][1], 2, 1),
                    };
                    if after == usize::MAX {
                        break;
                    }
                    now[stage] = now[stage].max(after) + cost;
                    done[part][i][pass] = now[stage];
                    left[stage].pop();
                    moved = true;
                }
            }
            assert!(moved, "{stages} stages of {chunks} chunks wait for each other with {microbatches} micro-batches");
        }
        now.into_iter().max().unwrap_or_default()
    }

    /// The table of bubbles: (p - 1) micro-batches, and a v-th of that with v chunks.
    #[test]
    fn no_stages_wait_for_each_other_and_equal_stages_wait_for_p_minus_1_turns() {
        for [stages, chunks, microbatches] in cases().filter(|[.., microbatches]| *microbatches > 0) {
            let end = simulated(stages, chunks, microbatches);
            let busy = 3 * microbatches * chunks;
            assert_eq!(end, busy + 3 * (stages - 1), "{stages} stages of {chunks}, {microbatches} micro-batches");
        }
    }
}
