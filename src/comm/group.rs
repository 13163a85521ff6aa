//! A group of ranks along one axis of the mesh, and its collectives.
//!
//! A group of one does nothing, so that no layer asks how many ranks there are. All ranks of a group call the same
//! methods in the same order with equal lengths. A failed peer is a panic here: the panic hook of `abort` ends the job.

use super::accounting::enter;
use super::linked::Link;
use super::raw::{COUNT_MAX, Comm, Element};
use super::stream;
use crate::error::{Error, Kind, Result};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Elements of f32 in one message of a sum: 1 MiB, so that adding one overlaps with receiving the next.
pub(super) const CHUNK: usize = 1 << 18;
/// Elements a rank from which sums go our own way.
const OWN_MIN: usize = 2048;
/// Bytes of a gather up to which all its messages are posted together.
const AT_ONCE: usize = 1 << 18;
pub(super) const TAG: i32 = 7;
/// Hosts of a group that are named.
const HOSTS_NAMED: usize = 4;

/// Cheap to clone; clones are the same group.
#[derive(Clone)]
pub struct Group(Arc<Inner>);

struct Inner {
    axis: &'static str,
    rank: usize,
    size: usize,
    /// World rank and host of each member.
    members: Vec<Member>,
    /// None in a group of one. The lock keeps the collectives of two threads apart.
    channel: Option<Mutex<Channel>>,
    /// The GPUs of the ranks, where they are joined. Twins share it.
    link: Arc<OnceLock<Link>>,
}

#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) world_rank: usize,
    pub(super) host: String,
}

pub(super) struct Channel {
    pub(super) comm: Comm,
    /// Two chunks: one is received while the other is added.
    pub(super) scratch: Vec<f32>,
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Group({}, rank {} of {})", self.0.axis, self.0.rank, self.0.size)
    }
}

impl Group {
    /// The group of this rank alone: every collective is a no-op.
    pub fn one() -> Self {
        Self::alone("one", Member { world_rank: 0, host: crate::sys::host::name() })
    }

    fn alone(axis: &'static str, member: Member) -> Self {
        Self(Arc::new(Inner { axis, rank: 0, size: 1, members: vec![member], channel: None, link: Arc::default() }))
    }

    pub(super) fn over(axis: &'static str, comm: Comm, members: Vec<Member>) -> Self {
        Self::linked(axis, comm, members, Arc::default())
    }

    fn linked(axis: &'static str, comm: Comm, members: Vec<Member>, link: Arc<OnceLock<Link>>) -> Self {
        let (rank, size) = (comm.rank(), comm.size());
        assert_eq!(members.len(), size);
        let channel = (size > 1).then(|| Mutex::new(Channel { comm, scratch: Vec::new() }));
        Self(Arc::new(Inner { axis, rank, size, members, channel, link }))
    }

    /// The groups of an axis: ranks of equal `color` form one, ordered by `key`. All ranks of `self` call this.
    #[must_use]
    pub fn split(&self, axis: &'static str, color: usize, key: usize) -> Self {
        let me = &self.0.members[self.0.rank];
        let Some(channel) = self.channel() else { return Self::alone(axis, me.clone()) };
        let comm = channel.comm.split(color, key);
        let mut ranks = vec![0u64; comm.size()];
        comm.all_gather(&[self.0.rank as u64], &mut ranks);
        let members = ranks.iter().map(|&r| self.0.members[r as usize].clone()).collect();
        Self::over(axis, comm, members)
    }

    /// The same ranks with a channel of its own, for another thread. All ranks of `self` call this.
    pub(super) fn twin(&self) -> Self {
        let Some(channel) = self.channel() else { return self.clone() };
        Self::linked(self.0.axis, channel.comm.twin(), self.0.members.clone(), self.0.link.clone())
    }

    /// Whether its GPUs are joined.
    pub(super) fn is_linked(&self) -> bool {
        self.0.link.get().is_some()
    }

    /// How its GPUs are joined; none where values on GPUs travel through the host, as those of a stream's own thread do: the
    /// order of what it launches and of what others launch would not be the same on all ranks.
    pub(super) fn link(&self) -> Option<&Link> {
        self.0.link.get().filter(|_| stream::current().is_none())
    }

    /// Whether a graph may hold collectives of values on GPUs; if not, why. The same on all ranks.
    ///
    /// # Errors
    /// Why not.
    pub fn check_graphs(&self) -> std::result::Result<(), String> {
        match self.link() {
            _ if self.size() == 1 => Ok(()),
            Some(_) => Ok(()),
            None => Err(format!("values on GPUs go over the {} axis by MPI, through the host", self.axis())),
        }
    }

    /// Joins the GPUs of this group and of its twins.
    pub(super) fn set_link(&self, link: Link) {
        assert!(self.0.link.set(link).is_ok(), "the GPUs of axis {} are joined once", self.0.axis);
    }

    /// The rank in the world of each member.
    pub fn world_ranks(&self) -> impl Iterator<Item = usize> {
        self.0.members.iter().map(|member| member.world_rank)
    }

    /// `ranks 4..8 (node1)`, `ranks 0, 2, 4 (node1, node2 and 6 more)`: its ranks in the world, and their hosts.
    pub fn ranks_words(&self) -> String {
        let ranks: Vec<usize> = self.world_ranks().collect();
        let (first, last) = (ranks[0], ranks[ranks.len() - 1]);
        let is_run = ranks.windows(2).all(|pair| pair[1] == pair[0] + 1);
        let names: Vec<String> = ranks.iter().map(usize::to_string).collect();
        let ranks = if is_run { format!("{first}..{}", last + 1) } else { names.join(", ") };
        let mut hosts: Vec<&str> = self.0.members.iter().map(|member| &*member.host).collect();
        hosts.dedup();
        let more = hosts.len().saturating_sub(HOSTS_NAMED);
        hosts.truncate(HOSTS_NAMED);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("ranks {ranks} ({}{more})", hosts.join(", "))
    }

    pub fn axis(&self) -> &'static str {
        self.0.axis
    }

    pub fn rank(&self) -> usize {
        self.0.rank
    }

    pub fn size(&self) -> usize {
        self.0.size
    }

    pub(super) fn channel(&self) -> Option<MutexGuard<'_, Channel>> {
        self.0.channel.as_ref().map(|c| c.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns when all ranks have come here.
    pub fn barrier(&self) {
        let Some(channel) = self.channel() else { return };
        let _call = enter(self.0.axis, "barrier", 0);
        channel.comm.barrier();
    }

    /// x = sum over ranks of x. All ranks get equal bits; the order of the sum depends on the number of ranks alone.
    ///
    /// From `OWN_MIN` elements a rank up it is a reduce-scatter and a gather, which took half to two thirds of the
    /// time of MPI_Allreduce on 2 and 4 ranks of one host; below, it is recursive doubling.
    pub fn all_reduce_sum(&self, x: &mut [f32]) {
        let Some(mut channel) = self.channel() else { return };
        let _call = enter(self.0.axis, "all_reduce_sum", size_of_val(x));
        let (rank, size) = (self.0.rank, self.0.size);
        if x.len() >= OWN_MIN * size {
            let at = |r: usize| r * x.len() / size;
            let ranges: Vec<Range<usize>> = (0..size).map(|r| at(r)..at(r + 1)).collect();
            channel.reduce_scatter(x, &ranges, rank);
            channel.gather(x, &ranges, rank);
        } else if !x.is_empty() {
            channel.sum_short(x, rank, size);
        }
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
        let Some(channel) = self.channel() else { return };
        let _call = enter(self.0.axis, op, size_of_val(x));
        let unit = (CHUNK / self.0.size).max(1);
        let mut all = vec![0.0; unit.min(x.len()) * self.0.size];
        for chunk in x.chunks_mut(unit) {
            let all = &mut all[..chunk.len() * self.0.size];
            channel.comm.all_gather(chunk, all);
            let (first, rest) = all.split_at(chunk.len());
            chunk.copy_from_slice(first);
            for part in rest.chunks(chunk.len()) {
                chunk.iter_mut().zip(part).for_each(|(a, &b)| *a = f(*a, b));
            }
        }
    }

    /// On return `x[ranges[rank]]` holds the sum over ranks; the rest of `x` is unspecified. Rank r adds r, r-1, r-2 ...
    pub fn reduce_scatter_sum(&self, x: &mut [f32], ranges: &[Range<usize>]) {
        self.check(x.len(), ranges);
        let Some(mut channel) = self.channel() else { return };
        let _call = enter(self.0.axis, "reduce_scatter_sum", size_of_val(x));
        channel.reduce_scatter(x, ranges, self.0.rank);
    }

    /// As `reduce_scatter_sum`, but every element is the binary tree over ranks ((x0 + x1) + (x2 + x3)) + ..., bitwise,
    /// by recursive halving. (IEEE addition commutes, so the order inside a pair does not matter.)
    ///
    /// # Panics
    /// If the size of the group is no power of two.
    pub fn reduce_scatter_tree(&self, x: &mut [f32], ranges: &[Range<usize>]) {
        self.check(x.len(), ranges);
        let (rank, size) = (self.0.rank, self.0.size);
        assert!(size.is_power_of_two(), "a tree sum over {size} ranks of axis {}", self.0.axis);
        let Some(mut channel) = self.channel() else { return };
        let _call = enter(self.0.axis, "reduce_scatter_tree", size_of_val(x));
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

    /// In place: `x[ranges[rank]]` is mine; afterwards all of `x` is there.
    pub fn all_gather(&self, x: &mut [f32], ranges: &[Range<usize>]) {
        self.gather("all_gather", x, ranges);
    }

    /// As `all_gather`, for bf16 weights.
    pub fn all_gather_u16(&self, x: &mut [u16], ranges: &[Range<usize>]) {
        self.gather("all_gather_u16", x, ranges);
    }

    fn gather<T: Element>(&self, op: &'static str, x: &mut [T], ranges: &[Range<usize>]) {
        self.check(x.len(), ranges);
        let Some(channel) = self.channel() else { return };
        let _call = enter(self.0.axis, op, size_of_val(x));
        channel.gather(x, ranges, self.0.rank);
    }

    /// Everyone's numbers, in rank order; lengths may differ.
    pub fn all_gather_f64(&self, mine: &[f64]) -> Vec<Vec<f64>> {
        self.all_gather_bytes(bytemuck::cast_slice(mine))
            .iter()
            .map(|bytes| bytes.chunks_exact(8).map(|b| f64::from_ne_bytes(b.try_into().expect("8 bytes"))).collect())
            .collect()
    }

    /// Everyone's bytes, in rank order; lengths may differ and may pass 2 GiB.
    pub fn all_gather_bytes(&self, mine: &[u8]) -> Vec<Vec<u8>> {
        let Some(channel) = self.channel() else { return vec![mine.to_vec()] };
        let _call = enter(self.0.axis, "all_gather_bytes", mine.len());
        let mut lengths = vec![0u64; self.0.size];
        channel.comm.all_gather(&[mine.len() as u64], &mut lengths);
        let mut end = 0;
        let ranges: Vec<Range<usize>> = lengths
            .iter()
            .map(|&n| {
                let start = end;
                end += n as usize;
                start..end
            })
            .collect();
        let mut all = vec![0u8; end];
        all[ranges[self.0.rank].clone()].copy_from_slice(mine);
        channel.gather(&mut all, &ranges, self.0.rank);
        ranges.into_iter().map(|r| all[r].to_vec()).collect()
    }

    /// `bytes` = the root's `bytes`; the others' are replaced.
    pub fn broadcast_bytes(&self, root: usize, bytes: &mut Vec<u8>) {
        let Some(channel) = self.channel() else { return };
        let _call = enter(self.0.axis, "broadcast_bytes", bytes.len());
        let mut length = [bytes.len() as u64];
        channel.comm.broadcast(root, &mut length);
        bytes.resize(length[0] as usize, 0);
        for chunk in bytes.chunks_mut(COUNT_MAX) {
            channel.comm.broadcast(root, chunk);
        }
    }

    /// All ranks learn of any rank's error. Where one fails each returns an error: the lowest failing rank's, which
    /// names that rank and its host unless all ranks failed alike.
    pub fn agree<T>(&self, local: Result<T>) -> Result<T> {
        if self.0.size == 1 {
            return local;
        }
        let mut failed = [f64::from(u8::from(local.is_err()))];
        self.all_reduce_max_f64(&mut failed);
        if failed[0] == 0.0 {
            return local;
        }
        let mine = local.err().map(|e| (e.exit_code(), e.message, e.hint));
        let mine = serde_json::to_vec(&mine).expect("numbers and strings serialise");
        let all: Vec<Option<Failure>> = self
            .all_gather_bytes(&mine)
            .iter()
            .map(|bytes| serde_json::from_slice(bytes).expect("a peer of the same build wrote it"))
            .collect();
        let rank = all.iter().position(Option::is_some).expect("someone failed");
        let (code, message, hint) = all[rank].clone().expect("found above");
        let mut error = Error { kind: kind_of(code), message, hint };
        if all.iter().any(|other| *other != all[rank]) {
            let Member { world_rank, host } = &self.0.members[rank];
            error = error.within(format_args!("rank {world_rank} ({host})"));
        }
        super::abort::agreed(&error, rank == self.0.rank);
        Err(error)
    }

    pub(super) fn check(&self, len: usize, ranges: &[Range<usize>]) {
        assert_eq!(ranges.len(), self.0.size, "one range a rank of axis {}", self.0.axis);
        assert!(ranges.iter().all(|r| r.start <= r.end && r.end <= len), "ranges {ranges:?} within 0..{len}");
        assert!(ranges.windows(2).all(|w| w[0].end <= w[1].start), "ranges {ranges:?} ascend without overlap");
    }
}

/// Exit code, message and hint of an error: what of it travels.
type Failure = (i32, String, Option<String>);

fn kind_of(exit_code: i32) -> Kind {
    [Kind::Usage, Kind::Data, Kind::Io, Kind::Service, Kind::Stopped]
        .into_iter()
        .find(|&kind| Error::new(kind, "").exit_code() == exit_code)
        .unwrap_or(Kind::Fault)
}

impl Channel {
    /// Sends `x[give]` to one rank while `x[keep] +=` what another rank sends, chunk by chunk. Every rank walks its
    /// exchanges in the same order, so the chunk that is waited for is always one that the peer comes to.
    fn exchange_adding(&mut self, x: &mut [f32], give: (usize, Range<usize>), keep: (usize, Range<usize>)) {
        let Self { comm, scratch } = self;
        scratch.resize(2 * CHUNK, 0.0);
        let ((to, give), (from, keep)) = (give, keep);
        let (mut even, mut odd) = scratch.split_at_mut(CHUNK);
        let mut outstanding = None;
        for i in 0..give.len().max(keep.len()).div_ceil(CHUNK) {
            let (out, into) = (chunk(&give, i), chunk(&keep, i));
            // SAFETY: both requests are waited for in the next turn or after the loop, before `x` and `scratch` are
            // released; `give` and `keep` do not overlap (`check`), so what is being sent is not added to; `even` is not touched
            // until its request was waited for, because the halves swap each turn.
            let requests = unsafe {
                let receive = (!into.is_empty()).then(|| comm.receive(from, TAG, &mut even[..into.len()]));
                let send = (!out.is_empty()).then(|| comm.send(to, TAG, &x[out]));
                (receive, send)
            };
            if let Some((requests, range)) = outstanding.replace((requests, into)) {
                finish(requests, &mut x[range], odd);
            }
            std::mem::swap(&mut even, &mut odd);
        }
        if let Some((requests, range)) = outstanding {
            finish(requests, &mut x[range], odd);
        }
    }

    fn reduce_scatter(&mut self, x: &mut [f32], ranges: &[Range<usize>], rank: usize) {
        let size = ranges.len();
        for s in 1..size {
            let (to, from) = ((rank + s) % size, (rank + size - s) % size);
            self.exchange_adding(x, (to, ranges[to].clone()), (from, ranges[rank].clone()));
        }
    }

    /// Every rank's range goes to every other, at distance 1, 2, ...: one distance after the other, or, where little is
    /// sent, all at once.
    pub(super) fn gather<T: Element>(&self, x: &mut [T], ranges: &[Range<usize>], rank: usize) {
        let size = ranges.len();
        let at_once = if size_of_val(x) <= AT_ONCE { size - 1 } else { 1 };
        let (at, mine) = (x.as_mut_ptr(), ranges[rank].clone());
        let mut requests = Vec::new();
        for first in (1..size).step_by(at_once.max(1)) {
            let distances = first..size.min(first + at_once);
            for from in distances.clone().map(|s| (rank + size - s) % size) {
                let range = ranges[from].clone();
                // SAFETY: a range within `x` (`check`) that overlaps no other, waited for below, before `x` is released.
                unsafe {
                    let part = std::slice::from_raw_parts_mut(at.add(range.start), range.len());
                    self.post_receive(from, part, &mut requests);
                }
            }
            for to in distances.map(|s| (rank + s) % size) {
                // SAFETY: as above; this rank's range is only read.
                unsafe {
                    let part = std::slice::from_raw_parts(at.add(mine.start), mine.len());
                    self.post_send(to, part, &mut requests);
                }
            }
            requests.drain(..).for_each(super::raw::Request::wait);
        }
    }
}

fn chunk(range: &Range<usize>, i: usize) -> Range<usize> {
    let at = |i: usize| (range.start + i * CHUNK).min(range.end);
    at(i)..at(i + 1)
}

type Pair = (Option<super::raw::Request>, Option<super::raw::Request>);

fn finish((receive, send): Pair, into: &mut [f32], received: &[f32]) {
    if let Some(request) = receive {
        request.wait();
        into.iter_mut().zip(received).for_each(|(a, b)| *a += b);
    }
    if let Some(request) = send {
        request.wait();
    }
}
