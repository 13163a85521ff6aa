//! Metrics of a step over placements: roles on different ranks learn at the same time, and rank 0 records what all of them
//! measured. With one placement there is nothing to exchange.

use crate::comm::records;
use crate::error::Result;
use crate::launch::ranks::Ranks;
use crate::learn::sums::Sums;
use crate::metrics::{Phase, Phases};
use std::time::Duration;

/// Joins what one minibatch measured over all placements. They wait for each other here, so that all stop behind the same
/// minibatch and none continues where another's gradient is not finite.
pub fn sums(ranks: &Ranks, here: Result<Sums>) -> Result<Sums> {
    if ranks.placements.len() == 1 {
        return here;
    }
    let here = ranks.all.agree(here)?;
    let mine = if ranks.axes.all.rank() == 0 { vec![here] } else { Vec::new() };
    let mut all = Sums::default();
    for sums in records::gather::<Sums>(&ranks.all, &mine)? {
        all.add(&sums);
    }
    Ok(all)
}

/// Each phase's longest time over all placements.
pub fn phases(ranks: &Ranks, here: &Phases) -> Phases {
    let mut longest = here.clone();
    if ranks.placements.len() > 1 {
        let row = Phase::ALL.map(|phase| here.spent(phase).as_secs_f64());
        // The first rank of every placement tells.
        let mine = if ranks.axes.all.rank() == 0 { &row[..] } else { &[] };
        for row in ranks.all.all_gather_numbers(mine) {
            for (phase, seconds) in Phase::ALL.into_iter().zip(row) {
                let missing = Duration::from_secs_f64(seconds).saturating_sub(longest.spent(phase));
                if !missing.is_zero() {
                    longest.add(phase, missing);
                }
            }
        }
    }
    longest
}
