//! Before a run: what ranks tell each other at the host arrives, too. Samples, scores and log-probabilities of roles go so,
//! wherever their models are: each rank's as many bytes as they come to, from this thread or, while that goes on, from a stream's
//! (`Group::all_gather_bytes`).

use super::group::Group;
use super::pattern::Pattern;
use super::stream::Stream;
use crate::error::{Error, Result};

/// Bytes of a rank's message, before its rank adds some: one, more than a short message holds, and as many as a step's samples.
const LENS: [usize; 3] = [1, 4099, 1 << 20];

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
    let mine = |call: usize| bytes(&pattern, all.rank(), call);
    let stream = Stream::new("check", &[all]);
    let away = mine(LENS.len());
    let pending = stream.submit(move |groups| groups[0].all_gather_bytes(&away));
    let mut gathered: Vec<Vec<Vec<u8>>> = (0..LENS.len()).map(|call| all.all_gather_bytes(&mine(call))).collect();
    gathered.push(pending.wait());
    let compared = gathered.iter().enumerate().try_for_each(|(call, got)| compare(all, &pattern, call, got));
    (gathered.len(), compared)
}

/// What `rank` sends in `call`; the last length is that of the stream's, too.
fn bytes(pattern: &Pattern, rank: usize, call: usize) -> Vec<u8> {
    let len = LENS[call.min(LENS.len() - 1)] + 3 * rank;
    let values = pattern.run(rank, call, 0..len.div_ceil(size_of::<f32>()));
    bytemuck::cast_slice::<f32, u8>(&values)[..len].to_vec()
}

fn compare(all: &Group, pattern: &Pattern, call: usize, got: &[Vec<u8>]) -> Result<()> {
    for (rank, got) in got.iter().enumerate() {
        let want = bytes(pattern, rank, call);
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
