//! The order of work on a pipeline's stages: one forward, one backward (1F1B; arXiv:2104.04473, section 2.2).
//!
//! Stage i of p starts with forwards of p - 1 - i micro-batches. Then it does a forward and a backward in turn, and the
//! backwards that are left. So it holds the activations of min(m, p - i) micro-batches, and of m + p - 1 turns it waits
//! for p - 1. Each stage walks the micro-batches in order: a weight's gradient is the sum in the order of one stage.

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

/// A part of a pass of a micro-batch, by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Forward(usize),
    Backward(usize),
}

/// The most micro-batches whose activations stage `stage` of `stages` holds.
pub fn window(stage: usize, stages: usize) -> usize {
    stages - stage
}

/// The actions of stage `stage` of `stages` for `microbatches`, in order.
pub fn actions(stage: usize, stages: usize, microbatches: usize) -> impl Iterator<Item = Action> {
    let ahead = (window(stage, stages) - 1).min(microbatches);
    let first = (0..ahead).map(Action::Forward);
    let in_turn = (ahead..microbatches).flat_map(move |i| [Action::Forward(i), Action::Backward(i - ahead)]);
    let rest = (microbatches - ahead..microbatches).map(Action::Backward);
    first.chain(in_turn).chain(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_does_each_forward_before_its_backward_in_order_and_holds_as_few_activations_as_promised() {
        for (stages, microbatches) in (1..9).flat_map(|p| (0..20).map(move |m| (p, m))) {
            for stage in 0..stages {
                let (mut forwards, mut backwards, mut most) = (0, 0, 0);
                for action in actions(stage, stages, microbatches) {
                    match action {
                        Action::Forward(i) => {
                            assert_eq!(i, forwards);
                            forwards += 1;
                        }
                        Action::Backward(i) => {
                            assert_eq!(i, backwards);
                            backwards += 1;
                        }
                    }
                    assert!(forwards >= backwards);
                    most = most.max(forwards - backwards);
                }
                assert_eq!((forwards, backwards), (microbatches, microbatches));
                assert_eq!(most, microbatches.min(stages - stage), "stage {stage} of {stages}");
            }
        }
    }

    /// The turns until all stages are done, if a forward takes 1 and a backward 2, and the turns that each waits.
    fn simulated(stages: usize, microbatches: usize) -> (usize, Vec<usize>) {
        let mut left: Vec<Vec<Action>> = (0..stages).map(|i| actions(i, stages, microbatches).collect()).collect();
        for actions in &mut left {
            actions.reverse();
        }
        // The turn at which a stage has done a micro-batch's forward and backward.
        let mut done = vec![vec![[usize::MAX; 2]; microbatches]; stages];
        let mut now = vec![0; stages];
        while left.iter().any(|actions| !actions.is_empty()) {
            let mut moved = false;
            for i in 0..stages {
                while let Some(&action) = left[i].last() {
                    let (after, cost, place) = match action {
                        Action::Forward(k) => (if i == 0 { 0 } else { done[i - 1][k][0] }, 1, (k, 0)),
                        Action::Backward(k) if i + 1 == stages => (done[i][k][0], 2, (k, 1)),
                        Action::Backward(k) => (done[i + 1][k][1], 2, (k, 1)),
                    };
                    if after == usize::MAX {
                        break;
                    }
                    now[i] = now[i].max(after) + cost;
                    done[i][place.0][place.1] = now[i];
                    left[i].pop();
                    moved = true;
                }
            }
            assert!(moved, "{stages} stages with {microbatches} micro-batches wait for each other");
        }
        let end = now.into_iter().max().unwrap_or_default();
        (end, vec![end - 3 * microbatches; stages])
    }

    #[test]
    fn no_stages_wait_for_each_other_and_equal_stages_wait_for_p_minus_1_turns() {
        for (stages, microbatches) in (1..9).flat_map(|p| (1..20).map(move |m| (p, m))) {
            let (end, waits) = simulated(stages, microbatches);
            assert_eq!(end, 3 * (microbatches + stages - 1), "{stages} stages, {microbatches} micro-batches");
            assert!(waits.iter().all(|wait| *wait == 3 * (stages - 1)));
        }
    }
}
