//! The self-test before a run trains on GPUs. It sends one pattern through each collective of each axis of several
//! ranks, with the backend and the stream of the job. Every rank knows the values of all others, so it knows every
//! result.

use super::backends::Axis;
use super::group::Group;
use super::world::Axes;
use crate::config::optim::GradientOrder;
use crate::device::Device;
use crate::device::cuda::{Memory, Stream, gpu, owned_by};
use crate::dtype::DType::{self, Bf16, F32};
use crate::error::{Error, Result};
use crate::tensor::{Flat, Slice, SliceMut, Tensor};
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
    AllToAll,
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
fn over<T: Send + 'static>(axis: &Axis, of: &Axes, work: impl FnOnce(&Group) -> T + Send + 'static) -> T {
    match axis.stream {
        Stream::Ring => of.ring_stream.submit(move |group| work(group)).wait(),
        Stream::Zero => of.zero_stream.submit(move |group| work(group)).wait(),
        _ => work(axis.group),
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
    let (name, dtype, values) = match op {
        Op::AllReduce => {
            let mut x = on_gpu(&sent(rank, all.clone()), Bf16);
            let x = over(axis, of, move |group| {
                group.sum_slice(SliceMut::Cuda(x.view_mut(Bf16)));
                x
            });
            let want = sum(all).into_iter().map(|x| half::bf16::from_f32(x).to_f32()).collect();
            ("all-reduce", Bf16, [x.view(Bf16).to_f32(), want])
        }
        Op::ReduceScatter(order) => {
            let mut x = Flat::Cuda(on_gpu(&sent(rank, all), F32), F32);
            let x = over(axis, of, move |group| {
                group.sum_scattered(&mut x, &shares, order);
                x
            });
            ("reduce-scatter", F32, [x.slice(mine.clone()).to_host(), sum(mine)])
        }
        Op::AllGather(dtype) => {
            let mut known = vec![STALE; all.len()];
            known[mine.clone()].copy_from_slice(&sent(rank, mine));
            let want = shares.iter().enumerate().flat_map(|(r, share)| sent(r, share.clone())).collect();
            let mut x = on_gpu(&known, dtype);
            let x = over(axis, of, move |group| {
                group.gather_view(&mut x.view_mut(dtype), &shares);
                x
            });
            ("all-gather", dtype, [x.view(dtype).to_f32(), want])
        }
        Op::Shift => {
            let (x, mut y) = (on_gpu(&sent(rank, mine), Bf16), on_gpu(&vec![STALE; share], Bf16));
            let y = over(axis, of, move |group| {
                group.shift_slice(Slice::Cuda(x.view(Bf16)), SliceMut::Cuda(y.view_mut(Bf16)));
                y
            });
            let before = (rank + size - 1) % size;
            let values = [y.view(Bf16).to_f32(), sent(before, shares[before].clone())];
            ("send and receive around the ring", Bf16, values)
        }
        Op::AllToAll => {
            let mut x = Tensor::scratch_on(Device::Cuda, 1, 0).statistics(1, all.len());
            let mut y = x.statistics(1, all.len());
            x.cuda_mut().write(&sent(rank, all));
            axis.group.slice_to_all(x.slice(), &shares, y.slice_mut(), &shares);
            ("all-to-all", F32, [y.to_host(), (0..size).flat_map(|r| sent(r, mine.clone())).collect()])
        }
    };
    (format!("{name} of {} values", dtype.name()), values)
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
            let ops = match axis.stream {
                Stream::Ring => vec![Op::Shift],
                Stream::Zero => vec![Op::ReduceScatter(order), Op::AllGather(Bf16)],
                _ if has_rollout => vec![Op::AllReduce, Op::AllGather(F32), Op::AllToAll],
                _ => vec![Op::AllReduce, Op::AllGather(F32)],
            };
            // Calls continue after a mismatch, because other ranks may have none.
            for op in ops {
                let checked = check_axis(axis, of, op);
                found = std::mem::replace(&mut found, Ok(())).and(checked);
            }
            names.push(axis.name);
        }
    });
    gpu().trim();
    all.agree(found).map(|()| names)
}
