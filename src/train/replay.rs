//! A replay: the steps of a job from a checkpoint to a recorded step, computed again from the record.

use super::adapters::Adapters;
use super::inputs::{self, Inputs};
use super::job::{Ended, Job, Opened};
use super::state;
use crate::checkpoint;
use crate::error::{Error, Result};
use crate::launch::replay::{Replay, Update};
use crate::launch::run::Run;

/// Computes the steps of `run.replay`, whose records are then in the directory of `run`. Returns the measurements of
/// each update of the last step. All ranks call this.
///
/// # Errors
/// `Usage` if the job has fewer steps, or the step fewer updates. `Data` if the record does not fit the job.
pub fn run<J: Job>(mut run: Run) -> Result<Vec<Update>> {
    let mut opened = Opened::<J>::open(&mut run)?;
    let (last, update) = run.replay.as_ref().map_or((0, None), |replay| (replay.step, replay.update));
    if last > opened.steps {
        let steps = opened.steps;
        return Err(Error::usage(format!("the job has {steps} steps, so there is no step {last}")));
    }
    // A checkpoint that it began from is compared with the inputs already.
    if opened.state.step == 0 {
        check_inputs(&run, &opened.state.inputs)?;
    }
    let adapters = Adapters::new(&run, &opened.job.learners());
    while opened.state.step < last {
        let number = opened.state.step + 1;
        opened.job.learners().into_iter().for_each(|learner| learner.measures_norms = number == last);
        opened.step(&mut run, &adapters).map_err(|ended| match ended {
            Ended::Failed(error) | Ended::Unfinished { error: Some(error), .. } => error,
            Ended::Unfinished { .. } => Error::fault(format!("step {number} did not finish")),
        })?;
    }
    let updates = run.replay.take().map_or_else(Vec::new, Replay::into_updates);
    match update.filter(|update| *update > updates.len()) {
        Some(update) => {
            Err(Error::usage(format!("step {last} has {} updates, so there is no update {update}", updates.len())))
        }
        None => Ok(updates),
    }
}

/// Rejects inputs that have changed since the newest checkpoint of the recorded run.
fn check_inputs(run: &Run, now: &Inputs) -> Result<()> {
    let recorded =
        run.replay.iter().find_map(|replay| checkpoint::all(&replay.recorded.join("checkpoints")).into_iter().next());
    let compared = recorded.map_or(Ok(Vec::new()), |newest| {
        inputs::compare(&mut state::read(&newest)?.inputs, now, run.config.checkpoint.changed_inputs)
    });
    run.ranks.all.agree(compared).map(drop)
}
