//! MPI's own collectives on the communicator of a group, one call each: the baseline of `bench collectives`.

use super::channel::{Channel, TAG};
use super::group::Group;
use super::raw::{Element, check, count, start, start_mut};
use mpi::ffi;
use std::ffi::c_int;
use std::sync::MutexGuard;

/// A group's communicator, locked.
pub struct MpiBaseline<'a> {
    channel: MutexGuard<'a, Channel>,
    rank: usize,
    size: usize,
}

impl<'a> MpiBaseline<'a> {
    /// The baseline of a group; `None` for a group of one. The group's own collectives wait until this is dropped.
    pub fn of(group: &'a Group) -> Option<Self> {
        let channel = group.channel()?;
        Some(Self { channel, rank: group.rank(), size: group.size() })
    }

    /// MPI_Allreduce: `into` = sum over ranks of `from`, in MPI's order.
    pub fn all_reduce_sum(&self, from: &[f32], into: &mut [f32]) {
        assert_eq!(from.len(), into.len());
        let (n, kind, comm) = (count(from.len()), f32::datatype(), self.channel.comm.0);
        // SAFETY: both buffers hold `n` elements of the datatype and do not overlap (one is borrowed mutably); a constant of the
        // library.
        check("MPI_Allreduce", unsafe {
            ffi::MPI_Allreduce(start(from), start_mut(into), n, kind, ffi::RSMPI_SUM, comm)
        });
    }

    /// MPI_Reduce_scatter: `into` = the sum over ranks of `from[r * n..][..n]` on rank r, n = `into.len()`, equal on all ranks.
    pub fn reduce_scatter_sum(&self, from: &[f32], into: &mut [f32]) {
        assert_eq!(from.len(), into.len() * self.size);
        let (counts, kind, comm) = (vec![count(into.len()); self.size], f32::datatype(), self.channel.comm.0);
        // SAFETY: `from` has n elements a rank, `into` n, and they do not overlap; a constant of the library.
        check("MPI_Reduce_scatter", unsafe {
            ffi::MPI_Reduce_scatter(start(from), start_mut(into), counts.as_ptr(), kind, ffi::RSMPI_SUM, comm)
        });
    }

    /// MPI_Allgather: `into` = the `from` of all ranks.
    pub fn all_gather(&self, from: &[f32], into: &mut [f32]) {
        self.channel.comm.all_gather(from, into);
    }

    /// MPI_Sendrecv, to rank + 1 and from rank - 1.
    pub fn shift(&self, send: &[f32], receive: &mut [f32]) {
        let [to, from] = [self.rank + 1, self.rank + self.size - 1].map(|rank| (rank % self.size) as c_int);
        let ([sent, received], kind) = ([send.len(), receive.len()].map(count), f32::datatype());
        let (send, receive, comm) = (start(send), start_mut(receive), self.channel.comm.0);
        // SAFETY: both buffers have as many elements as said, and do not overlap; the status is ignored.
        check("MPI_Sendrecv", unsafe {
            let status = ffi::RSMPI_STATUS_IGNORE;
            ffi::MPI_Sendrecv(send, sent, kind, to, TAG, receive, received, kind, from, TAG, comm, status)
        });
    }

    /// MPI_Alltoall: `into[r * n..][..n]` = rank r's `from[rank * n..][..n]`, n equal on all ranks.
    pub fn all_to_all(&self, from: &[f32], into: &mut [f32]) {
        assert!(from.len() == into.len() && from.len().is_multiple_of(self.size));
        let (n, kind, comm) = (count(from.len() / self.size), f32::datatype(), self.channel.comm.0);
        // SAFETY: both buffers have n elements a rank, and they do not overlap.
        check("MPI_Alltoall", unsafe { ffi::MPI_Alltoall(start(from), n, kind, start_mut(into), n, kind, comm) });
    }
}
