//! A group of ranks along one axis of the mesh, and its collectives.
//!
//! A group of one rank does nothing, so no layer needs to check the number of ranks. All ranks of a group call the same
//! methods in the same order with equal lengths. A failed peer causes a panic here: the panic hook of `abort` ends the
//! job.

use super::accounting::{Call, begin_call, note};
use super::channel::{CHUNK, Channel, disjoint};
use super::group_id;
use super::nccl_collectives::NcclGroup;
use super::raw::{COUNT_MAX, Comm, Element};
use crate::device::cpu::copy;
use crate::device::null;
use crate::sys::lock::lock;
use bytemuck::Pod;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

/// The number of elements over all ranks up to which every rank sums all values itself: one round instead of two.
const WHOLE_MAX: usize = 1 << 14;
/// The number of hosts of a group that are named.
const HOSTS_NAMED: usize = 4;

/// A group of ranks. Clones are cheap and refer to the same group.
#[derive(Clone)]
pub struct Group(Arc<Inner>);

struct Inner {
    axis: &'static str,
    rank: usize,
    /// See `group_id`. 0 for a group without peers.
    id: u32,
    /// World rank and host of each member.
    members: Vec<Member>,
    /// The channel to the peers. `None` if this rank is alone, or in a null group, whose collectives are counted and
    /// return at once. The lock separates the collectives of two threads.
    channel: Option<Mutex<Channel>>,
    /// The GPUs of the ranks if they are joined. Duplicates of the group share them.
    nccl: Arc<OnceLock<NcclGroup>>,
}

#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) world_rank: usize,
    pub(super) host: String,
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Group({}, rank {} of {})", self.0.axis, self.0.rank, self.size())
    }
}

impl Group {
    /// The group of this rank alone: every collective is a no-op.
    pub fn one() -> Self {
        Self::null("one", 0, 1)
    }

    /// A rank and a size without peers, for a plan. Collectives are counted as in any group and return at once. A sum
    /// or a maximum is the rank's own value, and a list of all ranks' values is its own value `size` times. In a
    /// buffer, the parts that peers would have written stay unchanged.
    pub fn null(axis: &'static str, rank: usize, size: usize) -> Self {
        Self::null_every(1, axis, rank, size)
    }

    /// The same, with every `stride`th rank.
    pub(super) fn null_every(stride: usize, axis: &'static str, rank: usize, size: usize) -> Self {
        assert!(rank < size, "rank {rank} of {size}");
        let host = crate::sys::host::name();
        let members = (0..size).map(|i| Member { world_rank: i * stride, host: host.clone() }).collect();
        Self(Arc::new(Inner { axis, rank, id: 0, members, channel: None, nccl: Arc::default() }))
    }

    /// A group with the communicator `comm`. `nccl` is set if the GPUs of these ranks are already joined.
    pub(super) fn from_comm(
        axis: &'static str,
        comm: Comm,
        members: Vec<Member>,
        nccl: Arc<OnceLock<NcclGroup>>,
    ) -> Self {
        assert_eq!(members.len(), comm.size());
        let channel = (members.len() > 1).then(|| Mutex::new(Channel::from_comm(comm)));
        let ranks: Vec<usize> = members.iter().map(|member| member.world_rank).collect();
        let id = if channel.is_some() { group_id::register(format!("{axis}: {}", list_ranks(&ranks))) } else { 0 };
        Self(Arc::new(Inner { axis, rank: comm.rank(), id, members, channel, nccl }))
    }

    /// Splits the ranks into the groups of an axis: ranks of equal `color` form a group, ordered by `key`. All ranks of
    /// `self` call this.
    ///
    /// # Panics
    /// In a null group of several ranks, which does not know the colors of other ranks.
    #[must_use]
    pub fn split(&self, axis: &'static str, color: usize, key: usize) -> Self {
        let Some(channel) = self.channel() else {
            assert_eq!(self.size(), 1, "a null group is split by its mesh");
            let (members, nccl) = (self.0.members.clone(), Arc::default());
            return Self(Arc::new(Inner { axis, rank: 0, id: 0, members, channel: None, nccl }));
        };
        let comm = channel.comm.split(color, key);
        let mut ranks = vec![0u64; comm.size()];
        comm.all_gather(&[self.0.rank as u64], &mut ranks);
        let members = ranks.iter().map(|&r| self.0.members[r as usize].clone()).collect();
        Self::from_comm(axis, comm, members, Arc::default())
    }

    /// The same ranks with a separate channel, for another thread. All ranks of `self` call this.
    pub(super) fn duplicate(&self) -> Self {
        let Some(channel) = self.channel() else { return self.clone() };
        Self::from_comm(self.0.axis, channel.comm.duplicate(), self.0.members.clone(), self.0.nccl.clone())
    }

    /// Whether this is a null group, whose collectives are only counted.
    pub fn is_null(&self) -> bool {
        self.0.channel.is_none() && self.size() > 1
    }

    /// The NCCL communicator. `None` if GPU values are staged through the host.
    pub(super) fn nccl(&self) -> Option<&NcclGroup> {
        self.0.nccl.get()
    }

    /// Checks whether a graph may contain collectives of GPU values. The result is the same on all ranks.
    ///
    /// # Errors
    /// The reason if it may not.
    pub fn check_graphs(&self) -> std::result::Result<(), String> {
        if self.size() == 1 || self.nccl().is_some() {
            return Ok(());
        }
        Err(format!("GPU values on the {} axis go through the host by MPI", self.axis()))
    }

    /// Joins the GPUs of this group and of its duplicates.
    pub(super) fn set_nccl(&self, nccl: NcclGroup) {
        assert!(self.0.nccl.set(nccl).is_ok(), "the GPUs of axis {} are already joined", self.0.axis);
    }

    /// The world rank of each member.
    pub fn world_ranks(&self) -> impl Iterator<Item = usize> {
        self.0.members.iter().map(|member| member.world_rank)
    }

    /// The world ranks and their hosts: `ranks 4 to 7 (node1)`, `ranks 0, 2, 4 (node1, node2 and 6 more)`.
    pub fn describe_ranks(&self) -> String {
        let ranks: Vec<usize> = self.world_ranks().collect();
        let mut hosts: Vec<&str> = self.0.members.iter().map(|member| &*member.host).collect();
        hosts.dedup();
        let more = hosts.len().saturating_sub(HOSTS_NAMED);
        hosts.truncate(HOSTS_NAMED);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("{} ({}{more})", list_ranks(&ranks), hosts.join(", "))
    }

    /// A member with its host: `rank 4 (node1)`.
    pub fn describe_member(&self, rank: usize) -> String {
        let Member { world_rank, host } = self.member(rank);
        format!("rank {world_rank} ({host})")
    }

    pub fn axis(&self) -> &'static str {
        self.0.axis
    }

    pub fn rank(&self) -> usize {
        self.0.rank
    }

    pub fn size(&self) -> usize {
        self.0.members.len()
    }

    pub(super) fn member(&self, rank: usize) -> &Member {
        &self.0.members[rank]
    }

    /// The channel to the peers, if there are any.
    pub(super) fn channel(&self) -> Option<MutexGuard<'_, Channel>> {
        self.0.channel.as_ref().map(lock)
    }

    /// Enters a collective, which is timed as long as the call lives. `None` without peers.
    fn begin_call(&self, op: &'static str, bytes: usize) -> Option<(MutexGuard<'_, Channel>, Call)> {
        if self.is_null() {
            // On a null device they are not counted for this process.
            if null::is_active() {
                note(op, self.axis(), [self.size(), self.stride()], bytes);
            } else {
                drop(begin_call(self.0.axis, op, bytes));
            }
        }
        let mut channel = self.channel()?;
        let number = channel.next_call();
        Some((channel, begin_call(self.0.axis, op, bytes).numbered(self.0.id, number)))
    }

    /// The distance in world ranks from one member to the next.
    pub(super) fn stride(&self) -> usize {
        let mut ranks = self.world_ranks();
        ranks.next().zip(ranks.next()).map_or(1, |(first, second)| second - first)
    }

    /// Returns after all ranks have called this.
    pub fn barrier(&self) {
        let Some((channel, _call)) = self.begin_call("barrier", 0) else { return };
        channel.comm.barrier();
    }

    /// x = sum over ranks of x, added in rank order.
    pub fn all_reduce_sum_f64(&self, x: &mut [f64]) {
        self.fold_f64("all_reduce_sum_f64", x, |a, b| a + b);
    }

    /// x = maximum over ranks of x; NaN if any rank's is NaN.
    pub fn all_reduce_max_f64(&self, x: &mut [f64]) {
        self.fold_f64("all_reduce_max_f64", x, |a, b| if a.is_nan() || a > b { a } else { b });
    }

    fn fold_f64(&self, op: &'static str, x: &mut [f64], f: impl Fn(f64, f64) -> f64) {
        let Some((channel, _call)) = self.begin_call(op, size_of_val(x)) else { return };
        let unit = (CHUNK / self.size()).max(1);
        let mut all = vec![0.0; unit.min(x.len()) * self.size()];
        for chunk in x.chunks_mut(unit) {
            let all = &mut all[..chunk.len() * self.size()];
            channel.comm.all_gather(chunk, all);
            let (first, rest) = all.split_at(chunk.len());
            chunk.copy_from_slice(first);
            for part in rest.chunks(chunk.len()) {
                chunk.iter_mut().zip(part).for_each(|(a, &b)| *a = f(*a, b));
            }
        }
    }

    /// On return `x[ranges[rank]]` contains the sum over ranks. The rest of `x` is unspecified. Rank r adds r, r-1, r-2
    /// ...
    pub fn reduce_scatter_sum(&self, x: &mut [f32], ranges: &[Range<usize>]) {
        self.check(x.len(), ranges);
        let Some((mut channel, _call)) = self.begin_call("reduce_scatter_sum", size_of_val(x)) else { return };
        channel.reduce_scatter(x, ranges, self.0.rank);
    }

    /// Does the same as `reduce_scatter_sum`, but sums every element in a binary tree over ranks: ((x0 + x1) + (x2 +
    /// x3)) + ... It uses recursive halving. The bits are those of the tree, because IEEE addition commutes: the order
    /// inside a pair does not matter.
    ///
    /// # Panics
    /// If the size of the group is not a power of two.
    pub fn reduce_scatter_tree(&self, x: &mut [f32], ranges: &[Range<usize>]) {
        self.check(x.len(), ranges);
        let (rank, size) = (self.0.rank, self.size());
        assert!(size.is_power_of_two(), "a tree sum needs a power of two of ranks, axis {} has {size}", self.0.axis);
        let Some((mut channel, _call)) = self.begin_call("reduce_scatter_tree", size_of_val(x)) else { return };
        let mut held: Vec<usize> = (0..size).collect();
        let mut bit = 1;
        while bit < size {
            let partner = rank ^ bit;
            let (keep, give): (Vec<usize>, Vec<usize>) = held.iter().partition(|&&k| k & bit == rank & bit);
            for (&k, &g) in keep.iter().zip(&give) {
                channel.exchange_adding(x, (partner, ranges[g].clone()), (partner, ranges[k].clone()));
            }
            held = keep;
            bit <<= 1;
        }
    }

    /// Gathers in place: `x[ranges[rank]]` is this rank's part; afterwards `x` is complete.
    pub fn all_gather<T: Element>(&self, x: &mut [T], ranges: &[Range<usize>]) {
        self.check(x.len(), ranges);
        let Some((channel, _call)) = self.begin_call("all_gather", size_of_val(x)) else { return };
        channel.gather(x, ranges, self.0.rank);
    }

    /// The numbers of all ranks, in rank order, if the number of each rank's is known. On a null device all are zeros:
    /// it has no peers, and does not compute all of its own numbers.
    ///
    /// # Panics
    /// If a rank has another number of them.
    pub fn all_gather_counts<T: Pod>(&self, mine: &[T], counts: &[usize]) -> Vec<Vec<T>> {
        let mut all = self.all_gather_numbers(mine);
        for (rank, (numbers, &count)) in all.iter_mut().zip(counts).enumerate() {
            if null::is_active() {
                *numbers = vec![T::zeroed(); count];
            }
            assert_eq!(numbers.len(), count, "numbers of rank {rank} of {}", self.0.axis);
        }
        all
    }

    /// The numbers of all ranks, in rank order. Lengths may differ.
    pub fn all_gather_numbers<T: Pod>(&self, mine: &[T]) -> Vec<Vec<T>> {
        let numbers = |bytes: &Vec<u8>| bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect();
        self.all_gather_bytes(bytemuck::cast_slice(mine)).iter().map(numbers).collect()
    }

    /// The bytes of all ranks, in rank order. Lengths may differ and may exceed 2 GiB.
    pub fn all_gather_bytes(&self, mine: &[u8]) -> Vec<Vec<u8>> {
        let Some((channel, _call)) = self.begin_call("all_gather_bytes", mine.len()) else {
            return vec![mine.to_vec(); self.size()];
        };
        let mut lengths = vec![0u64; self.size()];
        channel.comm.all_gather(&[mine.len() as u64], &mut lengths);
        let mut end = 0;
        let range = |n: &u64| {
            end += *n as usize;
            end - *n as usize..end
        };
        let ranges: Vec<Range<usize>> = lengths.iter().map(range).collect();
        let mut all = vec![0u8; end];
        all[ranges[self.0.rank].clone()].copy_from_slice(mine);
        channel.gather(&mut all, &ranges, self.0.rank);
        ranges.into_iter().map(|r| all[r].to_vec()).collect()
    }

    /// Replaces `bytes` on all ranks by the root's.
    pub fn broadcast_bytes(&self, root: usize, bytes: &mut Vec<u8>) {
        let Some((channel, _call)) = self.begin_call("broadcast_bytes", bytes.len()) else { return };
        let mut length = [bytes.len() as u64];
        channel.comm.broadcast(root, &mut length);
        bytes.resize(length[0] as usize, 0);
        for chunk in bytes.chunks_mut(COUNT_MAX) {
            channel.comm.broadcast(root, chunk);
        }
    }

    /// Replaces `x` on all ranks by the root's.
    pub fn broadcast<T: Element>(&self, root: usize, x: &mut [T]) {
        let Some((channel, _call)) = self.begin_call("broadcast", size_of_val(x)) else { return };
        x.chunks_mut(COUNT_MAX).for_each(|part| channel.comm.broadcast(root, part));
    }

    /// x = ((x_0 + x_1) + x_2) + ..., in rank order for every element, at any index and for any length of x. So the
    /// result for a row of activations does not depend on the other rows. All ranks get equal bits.
    pub fn all_reduce_sum_ordered(&self, x: &mut [f32]) {
        let Some((mut channel, _call)) = self.begin_call("all_reduce_sum_ordered", size_of_val(x)) else { return };
        let (rank, size) = (self.rank(), self.size());
        if x.len() * size <= WHOLE_MAX {
            channel.sum_whole(x, size);
        } else {
            channel.sum_ordered(x, rank, size);
        }
    }

    /// Shifts around the ring: sends `send` to rank + 1, and receives `receive` from rank - 1. Lengths may differ
    /// between ranks; the receiver knows its own. In a group of one, `receive` = `send`.
    pub fn shift(&self, send: &[f32], receive: &mut [f32]) {
        let (rank, size) = (self.rank(), self.size());
        let Some((channel, _call)) = self.begin_call("shift", size_of_val(send)) else {
            let len = send.len().min(receive.len());
            return copy::copy(&send[..len], &mut receive[..len]);
        };
        channel.swap(Some(((rank + size - 1) % size, receive)), Some(((rank + 1) % size, send)));
    }

    /// Sends `send[to[r]]` to rank r, and receives `receive[from[r]]` from rank r. Ranges may be empty and have any
    /// lengths. Those of `to` may overlap. `from[r]` has the length of `to[this rank]` on rank r. The rest of `receive`
    /// stays unchanged.
    ///
    /// # Panics
    /// If a range is outside its buffer, if two of `from` overlap, or if this rank's own two differ in length.
    pub fn all_to_all<T: Element>(&self, send: &[T], to: &[Range<usize>], receive: &mut [T], from: &[Range<usize>]) {
        let (rank, size) = (self.rank(), self.size());
        assert_eq!((to.len(), from.len()), (size, size), "one range per rank of axis {}", self.axis());
        if !null::is_active() {
            receive[from[rank].clone()].copy_from_slice(&send[to[rank].clone()]);
        }
        let Some((channel, _call)) = self.begin_call("all_to_all", size_of_val(send)) else { return };
        let mut parts = disjoint(receive, from);
        channel.to_all(|peer| &send[to[peer].clone()], &mut parts, rank, size - 1);
    }

    pub(super) fn check(&self, len: usize, ranges: &[Range<usize>]) {
        assert_eq!(ranges.len(), self.size(), "one range per rank of axis {}", self.0.axis);
        assert!(ranges.iter().all(|r| r.start <= r.end && r.end <= len), "ranges {ranges:?} must be within 0..{len}");
        assert!(ranges.windows(2).all(|w| w[0].end <= w[1].start), "ranges {ranges:?} must ascend without overlap");
    }
}

/// Describes ascending ranks: `rank 3`, `ranks 0 to 7`, `ranks 0, 8, 16`.
pub fn list_ranks(ranks: &[usize]) -> String {
    match ranks {
        [one] => format!("rank {one}"),
        [first, .., last] if last - first == ranks.len() - 1 => format!("ranks {first} to {last}"),
        _ => format!("ranks {}", ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    }
}
