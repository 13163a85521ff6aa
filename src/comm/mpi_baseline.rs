//! MPI's own collectives on the communicator of a group, one call each: what `bench collectives` compares ours with.

use super::channel::{Channel, TAG};
use super::group::Group;
use std::sync::MutexGuard;

/// A group's communicator, locked.
pub struct MpiBaseline<'a> {
    channel: MutexGuard<'a, Channel>,
    rank: usize,
    size: usize,
}

impl<'a> MpiBaseline<'a> {
    /// None for a group of one, which has no communicator. The group's own collectives wait until this is dropped.
    pub fn of(group: &'a Group) -> Option<Self> {
        let channel = group.channel()?;
        Some(Self { channel, rank: group.rank(), size: group.size() })
    }

    /// MPI_Allreduce: `into` = sum over ranks of `from`.
    pub fn all_reduce_sum(&self, from: &[f32], into: &mut [f32]) {
        self.channel.comm.all_reduce_sum(from, into);
    }

    /// MPI_Reduce_scatter, equal parts: `into` = this rank's part of the sum over ranks of `from`.
    pub fn reduce_scatter_sum(&self, from: &[f32], into: &mut [f32]) {
        self.channel.comm.reduce_scatter_sum(from, into);
    }

    /// MPI_Allgather: `into` = everyone's `from`.
    pub fn all_gather(&self, from: &[f32], into: &mut [f32]) {
        self.channel.comm.all_gather_blocking(from, into);
    }

    /// MPI_Sendrecv, to rank + 1 and from rank - 1.
    pub fn shift(&self, send: &[f32], receive: &mut [f32]) {
        let (to, from) = ((self.rank + 1) % self.size, (self.rank + self.size - 1) % self.size);
        self.channel.comm.send_receive(to, send, from, receive, TAG);
    }

    /// MPI_Alltoall, equal parts.
    pub fn all_to_all(&self, from: &[f32], into: &mut [f32]) {
        self.channel.comm.all_to_all(from, into);
    }
}
