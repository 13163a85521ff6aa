//! Measures collectives of each axis, and the links between ranks.

use super::machine::{self, Collective, Link};
use crate::comm::backends::Axis;
use crate::comm::{Group, World};
use crate::device::Device;
use crate::device::cuda::Stream;
use crate::launch::gpu;
use crate::launch::ranks::Ranks;
use crate::plan;
use crate::tensor::{DType, Flat};
use std::time::Instant;

/// Floats of an all-reduce, and of a message between two ranks.
const REDUCED: usize = 4 << 20;
const SENT: usize = 1 << 20;
const REPEATS: usize = 3;
/// Further measurements of links that seem slow, as another program may have held up a rank.
const RETRIES: usize = 5;

/// Value `i` of `rank`: an integer whose sums f32 holds exactly.
fn value(rank: usize, i: usize) -> f32 {
    ((i * 7 + rank * 31 + i / 251) % 251) as f32 - 100.0
}

/// Measures an all-reduce over each axis of several ranks, and checks its sums. All ranks call this.
pub fn axes(ranks: &Ranks, device: Device, plan: &plan::Device) -> Vec<Collective> {
    let alone = Group::one();
    let mut found = Vec::new();
    // On GPUs the stages of a pipeline exchange values through the host, which `links` measures.
    let stages = Axis { name: "pipeline", group: &ranks.axes.pipeline, stream: Stream::Tensor };
    for axis in gpu::axes(ranks, &alone).into_iter().chain((device == Device::Cpu).then_some(stages)) {
        ranks.all.barrier();
        let group = axis.group;
        if group.size() == 1 {
            continue;
        }
        let hosts: Vec<&String> = group.world_ranks().map(|rank| &ranks.world.hosts[rank]).collect();
        let here = hosts.iter().filter(|host| ***host == ranks.world.hosts[ranks.world.rank]).count();
        let across = plan.network * here as f64;
        let peak = if here < hosts.len() { plan.link.min(across) } else { plan.link };
        let dtype = if device == Device::Cuda { DType::Bf16 } else { DType::F32 };
        let (seconds, wrong) = all_reduce(group, device, dtype);
        let moved = 2.0 * (group.size() - 1) as f64 / group.size() as f64 * (REDUCED * dtype.bytes()) as f64;
        found.push(Collective {
            axis: axis.name,
            ranks: group.describe_ranks(),
            bytes_s: moved / seconds,
            planned: Some(peak * plan.efficiency.links),
            wrong,
        });
    }
    found
}

/// The seconds of an all-reduce on the slowest rank, and the first wrong sum that a CPU received. A GPU's sums are those
/// of the self-test of its collectives.
fn all_reduce(group: &Group, device: Device, dtype: DType) -> (f64, Option<String>) {
    let mut values = match device {
        Device::Cpu => Flat::zeros(device, REDUCED),
        Device::Cuda => Flat::on_gpu(dtype, REDUCED),
    };
    values.clear();
    if device == Device::Cpu {
        let mine: Vec<f32> = (0..REDUCED).map(|i| value(group.rank(), i)).collect();
        values.write(0..REDUCED, &mine);
    }
    group.sum_slice(values.all_mut());
    let wrong = (device == Device::Cpu).then(|| {
        let got = values.all().to_host();
        let sum = |i: usize| (0..group.size()).map(|rank| value(rank, i)).sum::<f32>();
        let at = (0..REDUCED).find(|i| got[*i].to_bits() != sum(*i).to_bits())?;
        Some(format!("element {at} is {}, not {}", got[at], sum(at)))
    });
    values.clear();
    let once = |_| {
        group.barrier();
        let start = Instant::now();
        group.sum_slice(values.all_mut());
        // Waits for a GPU.
        drop(values.slice(0..1).to_host());
        group.max(start.elapsed().as_secs_f64())
    };
    ((0..REPEATS).map(once).fold(f64::INFINITY, f64::min), wrong.flatten())
}

/// Measures messages through the host from each rank to the next one, and to the rank of the same place on the next host.
/// All ranks call this.
pub fn links(world: &World) -> Vec<Link> {
    let (group, size) = (world.group(), world.size);
    if size == 1 {
        return Vec::new();
    }
    let (send, mut receive) = (vec![1.0f32; SENT], vec![0.0f32; SENT]);
    let mut bytes_s = |from: usize, to: usize| {
        let range = |is_used: bool| if is_used { 0..SENT } else { 0..0 };
        let sends: Vec<_> = (0..size).map(|rank| range(world.rank == from && rank == to)).collect();
        let receives: Vec<_> = (0..size).map(|rank| range(world.rank == to && rank == from)).collect();
        let once = |_| {
            group.barrier();
            let start = Instant::now();
            group.all_to_all(&send, &sends, &mut receive, &receives);
            let is_part = [from, to].contains(&world.rank);
            group.max(if is_part { start.elapsed().as_secs_f64() } else { 0.0 })
        };
        (SENT * size_of::<f32>()) as f64 / (0..REPEATS).map(once).fold(f64::INFINITY, f64::min)
    };
    let mut found = Vec::new();
    let strides = [1, world.local_size.min(size)].map(|stride| stride % size);
    for (i, stride) in strides.into_iter().enumerate().filter(|(_, stride)| *stride > 0) {
        for from in (0..size).filter(|_| i == 0 || stride != strides[0]) {
            let to = (from + stride) % size;
            found.push(Link { from, to, bytes_s: bytes_s(from, to) });
        }
    }
    // All ranks have the same numbers.
    for _ in 0..RETRIES {
        for Link { from, to, .. } in machine::slow_links(&found, &world.hosts) {
            let again = bytes_s(from, to);
            let link = found.iter_mut().find(|link| (link.from, link.to) == (from, to)).expect("a measured link");
            link.bytes_s = link.bytes_s.max(again);
        }
    }
    found
}
