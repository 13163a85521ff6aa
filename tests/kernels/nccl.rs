//! Collectives between GPUs, over an NCCL that is emulated between processes (`emulation/nccl.cpp`), have the same bits
//! as through the host.

use crate::ranks::{LATE, assert_scene};
use crate::{bf16, numbers, on_gpu};
use rlhf_hpc::comm::backends::{self, Axis};
use rlhf_hpc::comm::nccl::Nccl;
use rlhf_hpc::comm::{self, Group, Stream, World};
use rlhf_hpc::config::job::Collectives;
use rlhf_hpc::config::optim::GradientOrder;
use rlhf_hpc::device::Device;
use rlhf_hpc::device::cuda::{self, Memory};
use rlhf_hpc::dtype::DType;
use rlhf_hpc::tensor::{Flat, Slice, SliceMut, Tensor};
use std::fs;
use std::ops::Range;
use std::process::Command;
use std::sync::Arc;

/// A group whose GPUs use NCCL, and one of the same ranks whose values are staged through the host.
struct Both {
    linked: Group,
    apart: Group,
}

impl Both {
    /// Asserts that `run` has the same bits with both groups.
    fn agree<T: PartialEq + std::fmt::Debug>(&self, what: &str, run: impl Fn(&Group) -> T) {
        assert_eq!(run(&self.linked), run(&self.apart), "{what}");
    }
}

/// Sets up NCCL for a group of all ranks with this axis name.
pub fn link(world: &World, name: &'static str, group: &Group, stream: cuda::Stream) {
    let gpu = format!("GPU {}", world.rank);
    let axes = [Axis { name, group, stream }];
    let rows = backends::choose(&world.group(), &axes, &gpu, Collectives::Nccl).expect("the GPUs are joined");
    assert_eq!(rows, [format!("{name}: NCCL 2.21.5 within a host")]);
}

pub fn scene(scene: &str, world: &World) {
    match scene {
        "same bits" => {
            let [linked, apart] = ["tensor", "apart"].map(|name| world.group().split(name, 0, world.rank));
            link(world, "tensor", &linked, cuda::Stream::Tensor);
            same_bits(&Both { linked, apart });
        }
        "streams" => streams(world),
        other => panic!("no scene {other}"),
    }
}

fn bits(x: &Tensor) -> Vec<u32> {
    x.to_host().into_iter().map(f32::to_bits).collect()
}

/// Values that differ between ranks, of many sizes so that the order of a sum shows.
fn values(rank: usize, len: usize) -> Vec<f32> {
    let scale = |i: usize| [1.0, 1e-4, 300.0, 0.03][(i + rank) % 4];
    numbers(rank as u32 * 77 + 5, len).into_iter().enumerate().map(|(i, x)| x * scale(i)).collect()
}

/// Cuts of 0..len: even ones, uneven ones, and some that are empty.
fn cuts(len: usize, size: usize) -> Vec<Vec<Range<usize>>> {
    let from_ends = |end: &dyn Fn(usize) -> usize| (0..size).map(|r| end(r)..end(r + 1)).collect();
    let equal = len / size;
    vec![
        from_ends(&|r| r * equal),
        from_ends(&|r| r * r * len / (size * size)),
        from_ends(&|r| if r < size.div_ceil(2) { 0 } else { len }),
        from_ends(&|r| if r == 0 { 0 } else { len - len / 3 }),
    ]
}

fn same_bits(both: &Both) {
    let (rank, size) = (both.linked.rank(), both.linked.size());
    // Below and above the size from which ranks sum shares; lengths that neither eight nor the ranks divide.
    for (rows, width) in [(1, 8), (3, 24), (1, 7), (400, 520), (1, 300_001), (0, 64)] {
        let x = Tensor::from_slice(rows, width, &values(rank, rows * width));
        for f32 in [false, true] {
            let on_gpu = || x.on(Device::Cuda, if f32 { DType::F32 } else { DType::Bf16 });
            both.agree(&format!("the sum of {rows} x {width}, f32: {f32}"), |group| {
                let mut x = on_gpu();
                group.sum_slice(x.slice_mut());
                bits(&x)
            });
        }
    }
    for len in [4 * size, 5003, 64 * size] {
        let x = values(rank, len);
        let flat = || Flat::Cuda(Memory::from_values(&x), DType::F32);
        for cuts in cuts(len, size) {
            let own = cuts[rank].clone();
            // Sums have equal ranges, gathers any ranges.
            let is_even = cuts.iter().all(|cut| cut.len() == own.len());
            let mut orders = Vec::from_iter(is_even.then_some(GradientOrder::Fast));
            orders.extend((is_even && size.is_power_of_two()).then_some(GradientOrder::Fixed));
            for order in orders {
                both.agree(&format!("{order:?} over {cuts:?}"), |group| {
                    let mut x = flat();
                    group.sum_scattered(&mut x, &cuts, order);
                    x.slice(own.clone()).to_host()
                });
            }
            both.agree(&format!("a gather over {cuts:?}"), |group| {
                let mut x = flat();
                group.gather_slice(x.all_mut(), &cuts);
                x.slice(0..len).to_host()
            });
            both.agree(&format!("weights over {cuts:?}"), |group| {
                let mut x = Memory::from_values(&bf16(&x));
                group.gather_view(&mut x.view_mut(DType::Bf16), &cuts);
                x.read::<u16>(len)
            });
        }
    }
    exchanged(both, rank, size);
}

/// Exchanges between chosen ranks, and the sum of a range at any offset.
fn exchanged(both: &Both, rank: usize, size: usize) {
    let lens = |r: usize| 8 * (r + 1);
    let from = (rank + size - 1) % size;
    for dtype in [DType::Bf16, DType::F32] {
        both.agree("around the ring", |group| {
            let send = on_gpu(dtype, &values(rank, lens(rank)));
            let mut receive = Memory::zeros(lens(from) * dtype.bytes());
            group.shift_slice(Slice::Cuda(send.view(dtype)), SliceMut::Cuda(receive.view_mut(dtype)));
            receive.view(dtype).to_f32()
        });
    }
    // Rank a sends 3 a + b values to rank b, from overlapping ranges.
    let x = Tensor::from_slice(1, 64, &values(rank, 64)).on(Device::Cuda, DType::F32);
    let to: Vec<Range<usize>> = (0..size).map(|b| b..b + 3 * rank + b).collect();
    let mut end = 1;
    let from: Vec<Range<usize>> = (0..size)
        .map(|a| {
            end += 3 * a + rank;
            end - 3 * a - rank..end
        })
        .collect();
    both.agree("to all", |group| {
        let mut receive = Tensor::from_slice(1, end + 2, &vec![0.5; end + 2]).on(Device::Cuda, DType::F32);
        group.slice_to_all(x.slice(), &to, receive.slice_mut(), &from);
        bits(&receive)
    });
    both.agree("a run that begins anywhere", |group| {
        let mut x = Memory::from_values(&values(rank, 99));
        group.sum_slice(SliceMut::Cuda(x.view_mut(DType::F32).part(3..80)));
        x.read::<u32>(99)
    });
}

#[test]
fn collectives_of_any_shape_have_the_bits_of_those_through_the_host() {
    for ranks in [3, 4] {
        assert_scene(ranks, "nccl: same bits", &[]);
    }
}

/// Jobs of streams, on a group whose NCCL is set up after the streams were created.
fn streams(world: &World) {
    let group = world.group().split("zero", 0, world.rank);
    let stream = Stream::new("zero", &group);
    link(world, "data", &group, cuda::Stream::Zero);
    let (rank, size, len) = (world.rank, world.size, 1024 * world.size);
    let ranges: Vec<Range<usize>> = (0..size).map(|r| 1024 * r..1024 * (r + 1)).collect();
    let job = |from: usize| {
        let (mut x, ranges) = (Flat::Cuda(Memory::from_values(&values(rank + from, len)), DType::F32), ranges.clone());
        stream.submit(move |group| {
            group.gather_slice(x.all_mut(), &ranges);
            x
        })
    };
    let held = cuda::gpu().usage().in_use;
    let pending: Vec<_> = (0..3).map(job).collect();
    for (from, pending) in pending.into_iter().enumerate() {
        let want: Vec<f32> = (0..size).flat_map(|r| values(r + from, len)[ranges[r].clone()].to_vec()).collect();
        assert_eq!(pending.wait().slice(0..len).to_host(), want, "job {from}");
    }
    // A job that is not waited for frees its memory when it is dropped, not earlier.
    drop(job(0));
    let (mut before, ranges) = (Flat::Cuda(Memory::from_values(&values(rank, len)), DType::F32), ranges);
    let pending = stream.submit(move |group| group.gather_slice(before.all_mut(), &ranges));
    assert_eq!(cuda::gpu().usage().in_use, held + 4 * len, "memory that a collective uses was given away");
    pending.wait();
    assert_eq!(cuda::gpu().usage().in_use, held);
    // A job sends the values at its submission, and later work sees the received values.
    let block = Arc::new(Memory::from_values(&values(rank, len)));
    let pass = |block: &Arc<Memory>| {
        let (block, mut received) = (block.clone(), Memory::scratch(4 * len));
        stream.submit(move |group| {
            group.shift_slice(Slice::Cuda(block.view(DType::F32)), SliceMut::Cuda(received.view_mut(DType::F32)));
            received
        })
    };
    let first = pass(&block);
    drop(block);
    // Reuses the block's memory if it is free.
    let zeros = Memory::zeros(4 * len);
    let received = Arc::new(first.wait());
    let second = pass(&received);
    let own = received.view(DType::F32).to_f32();
    let before = |n: usize| values((rank + n * (size - 1)) % size, len);
    assert_eq!((own, second.wait().view(DType::F32).to_f32()), (before(1), before(2)));
    assert!(zeros.read::<f32>(len).iter().all(|x| *x == 0.0));
    // In any order of waits, a job sends the values that the compute stream wrote before.
    let (from, mut sent) = (Memory::from_values(&values(rank, len)), Memory::zeros(4 * len));
    sent.view_mut(DType::F32).copy_from(from.view(DType::F32));
    let third = pass(&Arc::new(sent));
    cuda::gpu().wait_for(cuda::Stream::Zero);
    assert_eq!(third.wait().view(DType::F32).to_f32(), before(1));
    // All calls are counted, and none is in flight.
    let booked: u64 = comm::accounting().iter().filter(|((axis, _), _)| *axis == "zero").map(|(_, t)| t.calls).sum();
    assert!(booked >= 7, "{booked} calls");
}

#[test]
fn stream_jobs_are_launched_in_order_and_keep_their_memory_until_they_are_waited_for() {
    assert_scene(2, "nccl: streams", &[]);
}

#[test]
fn collectives_run_after_earlier_work_and_before_later_work_on_a_delayed_gpu() {
    for scene in ["streams", "same bits"] {
        assert_scene(2, &format!("nccl: {scene}"), &[LATE, ("EMULATED_PASSIVE", "1")]);
    }
}

/// Real libraries have a thread that waits for ranks. NCCL 2.14.3 was unloaded while its thread ran.
#[test]
fn an_unused_library_stays_loaded_for_its_threads() {
    let dir = tempfile::tempdir().expect("a directory");
    let [source, library] = ["nccl.c", "libnccl.so.2"].map(|name| dir.path().join(name));
    let of_group = ["GetErrorString", "GetUniqueId", "GroupStart", "GroupEnd", "CommInitRank", "CommAbort"];
    let others = ["CommGetAsyncError", "ReduceScatter", "AllGather", "Broadcast", "Send", "Recv"];
    let empty = of_group.iter().chain(&others).map(|name| format!("int nccl{name}(void) {{ return 0; }}\n"));
    let version = "int ncclGetVersion(int *version) { *version = 21403; return 0; }\n";
    // In C, as C++ symbols would keep a library loaded, too.
    fs::write(&source, empty.collect::<String>() + version).expect("a source");
    let mut compiler = Command::new("gcc");
    let status = compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status().expect("gcc is needed");
    assert!(status.success(), "{compiler:?}: {status}");
    let version = Nccl::at(&library).map(|nccl| nccl.version);
    assert_eq!(version, Ok([2, 14, 3]));
    let mapped = fs::read_to_string("/proc/self/maps").expect("the system's maps");
    assert!(mapped.contains(library.to_str().expect("a path is text")), "it was closed");
}
