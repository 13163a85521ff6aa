//! Metrics of a step over placements. Roles on different ranks learn at the same time, and rank 0 records the
//! measurements of all of them. With one placement there is nothing to exchange.

use crate::error::Result;
use crate::launch::ranks::Ranks;
use crate::learn::sums::Sums;
use crate::metrics::{Phase, Phases};
use std::time::Duration;

/// Joins the measurements of one minibatch over all placements. Placements wait for each other here, so that all stop
/// after the same minibatch, and none continues if the gradient of another is not finite.
pub fn sums(ranks: &Ranks, here: Result<Sums>) -> Result<Sums> {
    let together = &ranks.together;
    if together.size() == ranks.axes.all.size() {
        return here;
    }
    let here = together.agree(here)?;
    Ok(Sums::total(&ranks.of_placements(together, here)?))
}

/// The longest time of each phase over all placements.
pub fn phases(ranks: &Ranks, here: &Phases) -> Result<Phases> {
    let mut longest = here.clone();
    for row in ranks.of_placements(&ranks.all, Phase::ALL.map(|phase| here.spent(phase).as_secs_f64()).to_vec())? {
        for (phase, seconds) in Phase::ALL.into_iter().zip(row) {
            let missing = Duration::from_secs_f64(seconds).saturating_sub(longest.spent(phase));
            // A phase that is added counts as one that ran.
            if !missing.is_zero() {
                longest.add(phase, missing);
            }
        }
    }
    Ok(longest)
}
