//! The self-test before a run trains on GPUs. It sends one pattern through each collective of each axis of several
//! ranks, with the backend and the stream of the job. Every rank knows the values of all others, so it knows every
//! result.

use super::backends::Axis;
use super::group::Group;
use super::world::{Axes, EXPERT, REPLICAS};
use crate::config::optim::GradientOrder;
use crate::device::cuda::{Memory, Stream, gpu, owned_by};
use crate::dtype::DType::{self, Bf16, F32};
use crate::error::{Error, Result};
use crate::tensor::{Flat, Slice, SliceMut};
use std::ops::Range;

/// The approximate number of values over all ranks' shares: more than one step of any backend.
const VALUES: usize = 1 << 20;
/// The initial value of result buffers: it differs from all sent values.
const STALE: f32 = -1000.0;

const HINT: &str = "set NCCL_DEBUG=INFO to see how the ranks are connected, job.collectives = \"mpi\" to send all \
                    through the host, or job.check = false to train without this test";

/// A collective to test.
#[derive(Clone, Copy, Debug)]
enum Op {
    AllReduce,
    ReduceScatter(GradientOrder),
    AllGather(DType),
    Shift,
    AllToAll(DType),
}

impl Op {
    fn dtype(self) -> DType {
        match self {
            Self::AllReduce | Self::Shift => Bf16,
            Self::ReduceScatter(_) => F32,
            Self::AllGather(dtype) | Self::AllToAll(dtype) => dtype,
        }
    }
}

/// The collectives of GPU values that a job with gradients in `order` calls over an axis.
fn ops(axis: &Axis, order: GradientOrder, has_rollout: bool) -> Vec<Op> {
    match axis.stream {
        Stream::Ring => vec![Op::Shift],
        Stream::Zero => vec![Op::ReduceScatter(order), Op::AllGather(Bf16)],
        // Rows, and the weights of rows.
        _ if axis.group.axis() == EXPERT => vec![Op::AllToAll(Bf16), Op::AllToAll(F32)],
        _ if has_rollout => vec![Op::AllReduce, Op::AllGather(F32), Op::AllToAll(F32)],
        _ => vec![Op::AllReduce, Op::AllGather(F32)],
    }
}

/// Value `i` of `rank`: an integer that bf16 can hold, different between ranks and indices. Sums are exact in every
/// order.
fn value(rank: usize, i: usize) -> f32 {
    ((i * 7 + rank * 31 + i / 251) % 251) as f32 - 100.0
}

fn sent(rank: usize, range: Range<usize>) -> Vec<f32> {
    range.map(|i| value(rank, i)).collect()
}

/// Values that a kernel writes before the call. A call that does not wait for the kernel sends other values.
fn on_gpu(values: &[f32], dtype: DType) -> Memory {
    let [mut given, mut memory] = [(); 2].map(|()| Memory::scratch(values.len() * dtype.bytes()));
    given.view_mut(dtype).write(values);
    memory.view_mut(dtype).copy_from(given.view(dtype));
    memory
}

/// Runs `work` as the job does, on a stream or from this thread: after everything that was started earlier, and before
/// everything that is started later.
fn run_on_axis<T: Send + 'static>(axis: &Axis, of: &Axes, work: impl FnOnce(&Group) -> T + Send + 'static) -> T {
    match axis.stream {
        Stream::Ring => of.ring_stream.submit(move |group| work(group)).wait(),
        Stream::Zero if axis.group.axis() == REPLICAS => of.replicas_stream.submit(move |group| work(group)).wait(),
        Stream::Zero => of.zero_stream.submit(move |group| work(group)).wait(),
        _ => work(axis.group),
    }
}

/// Makes one call on this rank with the values `x`, of which each rank has one of `shares`. Returns the result.
fn exchange(op: Op, axis: &Axis, of: &Axes, shares: Vec<Range<usize>>, mut x: Memory) -> Memory {
    match op {
        Op::AllReduce => run_on_axis(axis, of, move |group| {
            group.sum_slice(SliceMut::Cuda(x.view_mut(Bf16)));
            x
        }),
        Op::ReduceScatter(order) => run_on_axis(axis, of, move |group| {
            let mut x = Flat::Cuda(x, F32);
            group.sum_scattered(&mut x, &shares, order);
            let Flat::Cuda(x, _) = x else { unreachable!("its values stay on the GPU") };
            x
        }),
        Op::AllGather(dtype) => run_on_axis(axis, of, move |group| {
            group.gather_view(&mut x.view_mut(dtype), &shares);
            x
        }),
        Op::Shift => {
            let mut y = x.clone();
            run_on_axis(axis, of, move |group| {
                group.shift_slice(Slice::Cuda(x.view(Bf16)), SliceMut::Cuda(y.view_mut(Bf16)));
                y
            })
        }
        Op::AllToAll(dtype) => {
            let mut y = x.clone();
            let (send, receive) = (Slice::Cuda(x.view(dtype)), SliceMut::Cuda(y.view_mut(dtype)));
            axis.group.slice_to_all(send, &shares, receive, &shares);
            y
        }
    }
}

/// Makes one call on this rank. Returns its name, the received values, and the expected values. Values are written
/// before the call and read after it.
fn call(op: Op, axis: &Axis, of: &Axes) -> (String, [Vec<f32>; 2]) {
    let (rank, size) = (axis.group.rank(), axis.group.size());
    let share = (VALUES / size) | 1;
    let shares: Vec<Range<usize>> = (0..size).map(|r| r * share..(r + 1) * share).collect();
    let (mine, all) = (shares[rank].clone(), 0..size * share);
    let sum = |range: Range<usize>| range.map(|i| (0..size).map(|r| value(r, i)).sum()).collect::<Vec<f32>>();
    let (name, given, result, want) = match op {
        Op::AllReduce => {
            let want = sum(all.clone()).into_iter().map(|x| half::bf16::from_f32(x).to_f32()).collect();
            ("all-reduce", sent(rank, all.clone()), all, want)
        }
        Op::ReduceScatter(_) => ("reduce-scatter", sent(rank, all), mine.clone(), sum(mine)),
        Op::AllGather(_) => {
            let mut known = vec![STALE; all.len()];
            known[mine.clone()].copy_from_slice(&sent(rank, mine));
            let want = shares.iter().enumerate().flat_map(|(r, share)| sent(r, share.clone())).collect();
            ("all-gather", known, all, want)
        }
        Op::Shift => {
            let before = (rank + size - 1) % size;
            let want = sent(before, shares[before].clone());
            ("send and receive around the ring", sent(rank, mine), 0..share, want)
        }
        Op::AllToAll(_) => {
            let want = (0..size).flat_map(|r| sent(r, mine.clone())).collect();
            ("all-to-all", sent(rank, all.clone()), all, want)
        }
    };
    let dtype = op.dtype();
    let received = exchange(op, axis, of, shares, on_gpu(&given, dtype));
    (format!("{name} of {} values", dtype.name()), [received.view(dtype).part(result).to_f32(), want])
}

/// Checks a call over an axis. All its ranks call this.
fn check_axis(axis: &Axis, of: &Axes, op: Op) -> Result<()> {
    let (op, [got, want]) = call(op, axis, of);
    let Some(i) = got.iter().zip(&want).position(|(a, b)| a.to_bits() != b.to_bits()) else { return Ok(()) };
    let (name, ranks) = (axis.name, axis.group.describe_ranks());
    let way = if axis.group.nccl().is_some() { "NCCL" } else { "MPI, through the host," };
    Err(Error::fault(format!(
        "{op} over {way} on the {name} axis of {ranks} gave {} at element {i} of {}, expected {}",
        got[i],
        want.len(),
        want[i]
    ))
    .hint(HINT))
}

/// Checks each collective that a job with gradients in `order` calls over `axes`, on the streams `of` its mesh. With
/// `has_rollout`, it also checks the exchange of logits between ranks that share a vocabulary, and that of matrices
/// that the rollout shards differently. Returns the names of this rank's axes with several ranks. All ranks of `all`
/// call this, with axes in the same order.
///
/// # Errors
/// `Fault` on all ranks if one received wrong values. The error names the call and its ranks.
pub fn check(
    all: &Group,
    axes: &[Axis],
    of: &Axes,
    order: GradientOrder,
    has_rollout: bool,
) -> Result<Vec<&'static str>> {
    let (mut found, mut names) = (Ok(()), Vec::new());
    owned_by("the self-test", || {
        for axis in axes.iter().filter(|axis| axis.group.size() > 1) {
            // Calls continue after a mismatch, because other ranks may have none.
            for op in ops(axis, order, has_rollout) {
                let checked = check_axis(axis, of, op);
                found = std::mem::replace(&mut found, Ok(())).and(checked);
            }
            names.push(axis.name);
        }
    });
    gpu().trim();
    all.agree(found).map(|()| names)
}

/// Makes each of these calls once with about `values` values of an axis, the most that the job sends in one call. NCCL
/// chooses its algorithm by size, and allocates the buffers of each algorithm at its first call. All ranks call this,
/// with equal arguments.
pub fn warm(axes: &[Axis], of: &Axes, order: GradientOrder, has_rollout: bool, values: impl Fn(&Axis) -> usize) {
    owned_by("the self-test", || {
        for axis in axes.iter().filter(|axis| axis.group.nccl().is_some() && axis.group.size() > 1) {
            let share = values(axis).div_ceil(axis.group.size());
            let shares = (0..axis.group.size()).map(|r| r * share..(r + 1) * share).collect::<Vec<_>>();
            for op in ops(axis, order, has_rollout) {
                let sent = if matches!(op, Op::Shift) { share } else { share * shares.len() };
                drop(exchange(op, axis, of, shares.clone(), Memory::zeros(sent * op.dtype().bytes())));
            }
        }
    });
    gpu().trim();
}
