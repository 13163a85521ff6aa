//! Before a run: what ranks tell each other at the host arrives, too. Samples, scores and log-probabilities of roles go so,
//! wherever their models are: each rank's as many bytes as they come to, from this thread or, while that goes on, from a stream's
//! (`Group::all_gather_bytes`).

use super::group::Group;
use super::pattern::Pattern;
use super::stream::Stream;
use crate::error::{Error, Result};

/// Calls of this thread; the stream makes one more.
const CALLS: usize = 3;
/// Bytes of the longest messages of all ranks together, which each rank holds twice; and of one, at most and at least.
const LONG_OF_ALL: usize = 16 << 20;
const LONG_MAX: usize = 1 << 20;
const LONG_MIN: usize = 8 << 10;

const HINT: &str = "that is the site's MPI, or the network below it: OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,tcp in the environment \
                    goes another way; job.check = false trains all the same";

/// Patterns of bytes from every rank to every other; how many calls this rank has made. All ranks of `all` call this.
///
/// # Errors
/// `Fault` on a rank that got other bytes than were sent: which, of whom.
pub(super) fn check(all: &Group) -> (usize, Result<()>) {
    if all.size() == 1 {
        return (0, Ok(()));
    }
    let pattern = Pattern::new(all.size(), false);
    let mine = |call: usize| bytes(&pattern, all.rank(), call, all.size());
    let stream = Stream::new("check", &[all]);
    let away = mine(CALLS);
    let pending = stream.submit(move |groups| groups[0].all_gather_bytes(&away));
    let mut gathered: Vec<Vec<Vec<u8>>> = (0..CALLS).map(|call| all.all_gather_bytes(&mine(call))).collect();
    gathered.push(pending.wait());
    let compared = gathered.iter().enumerate().try_for_each(|(call, got)| compare(all, &pattern, call, got));
    (gathered.len(), compared)
}

/// Bytes of a message in `call` of `ranks` ranks, before its rank adds some: one, more than a short message holds, and
/// this thread's and the stream's share of what all together send.
fn len(call: usize, ranks: usize) -> usize {
    match call {
        0 => 1,
        1 => 4099,
        _ => (LONG_OF_ALL / ranks).clamp(LONG_MIN, LONG_MAX),
    }
}

/// What `rank` of `ranks` sends in `call`.
fn bytes(pattern: &Pattern, rank: usize, call: usize, ranks: usize) -> Vec<u8> {
    let len = len(call, ranks) + 3 * rank;
    let values = pattern.run(rank, call, 0..len.div_ceil(size_of::<f32>()));
    bytemuck::cast_slice::<f32, u8>(&values)[..len].to_vec()
}

fn compare(all: &Group, pattern: &Pattern, call: usize, got: &[Vec<u8>]) -> Result<()> {
    for (rank, got) in got.iter().enumerate() {
        let want = bytes(pattern, rank, call, all.size());
        let other = got.iter().zip(&want).position(|(a, b)| a != b);
        let Some(at) = other.or((got.len() != want.len()).then(|| got.len().min(want.len()))) else { continue };
        let (len, ranks) = (want.len(), all.ranks_words());
        let of = all.world_ranks().nth(rank).unwrap_or(rank);
        return Err(Error::fault(format!(
            "all-gather at the host over {ranks} gave other bytes from byte {at} of the {len} of rank {of} on"
        ))
        .hint(HINT));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_rank_holds_of_all_others_does_not_grow_with_their_number() {
        assert!([2, 16].iter().all(|ranks| len(2, *ranks) == 1 << 20));
        for ranks in [17, 100, 1024, 2048] {
            let all = ranks * len(3, ranks);
            assert!(all <= 16 << 20, "{all} bytes of {ranks} ranks");
        }
        // Still no short message, however many there are.
        assert!(len(2, 100_000) > len(1, 100_000));
    }
}
