//! Graphs, cached memory, and asynchronous copies: the guarantees of `Gpu` on every device.

use crate::{device, numbers, refused};
use rlhf_hpc::device::cuda::graph::{GRAPHS_MAX, Graphs};
use rlhf_hpc::device::cuda::{Memory, Stream, copy};
use rlhf_hpc::dtype::DType;

const LEN: usize = 4096;

pub fn add(x: &Memory, y: &mut Memory) {
    copy::add(x.view(DType::F32), y.view_mut(DType::F32));
}

pub fn sums(x: &[f32], y: &[f32]) -> Vec<f32> {
    x.iter().zip(y).map(|(x, y)| x + y).collect()
}

#[test]
fn invalid_launches_are_rejected_and_leave_the_gpu_unchanged() {
    let (gpu, _one) = device();
    let mut x = Memory::from_values(&[1.0f32; 512]);
    let args = [x.arg_mut(), x.arg_mut(), 512usize.into()];
    for grid in [[1, 65_536, 1], [1, 1, 65_536]] {
        refused("add_f32", || gpu.launch("add_f32", grid, 256, 0, &args));
    }
    if !rlhf_hpc::device::cuda::embedded::CUBINS.is_empty() {
        refused("its blocks have at most 256 threads", || gpu.launch("add_f32", [1, 1, 1], 288, 0, &args));
    }
    assert_eq!(x.read::<f32>(512), [1.0; 512]);
    gpu.launch("add_f32", [1, 1, 1], 256, 0, &args);
    assert_eq!(x.read::<f32>(512), [2.0; 512]);
}

#[test]
fn alternating_graphs_are_captured_once_and_keep_memory_of_their_own() {
    let (gpu, _one) = device();
    let x = Memory::from_values(&numbers(7, LEN));
    let mut y = Memory::from_values(&numbers(8, LEN));
    let (mut graphs, mut captured) = (Graphs::default(), 0);
    let mut in_use = Vec::new();
    for key in [1, 2, 1, 2] {
        let work = || {
            captured += 1;
            let mut between = x.clone();
            for _ in 0..key {
                add(&x, &mut between);
            }
            add(&between, &mut y);
        };
        if !graphs.has(&key) {
            graphs.capture(key, work).expect("a graph");
        }
        graphs.replay(&key);
        in_use.push(gpu.usage().in_use);
    }
    assert_eq!(captured, 2);
    assert!(in_use.iter().all(|bytes| *bytes == in_use[0]), "{in_use:?}");
    let (own, mut want) = (numbers(7, LEN), numbers(8, LEN));
    let twice = sums(&own, &own);
    for between in [&twice, &sums(&own, &twice), &twice, &sums(&own, &twice)] {
        want = sums(between, &want);
    }
    assert_eq!(y.read::<f32>(LEN), want);
    let others: Vec<Memory> = (0..4).map(|seed| Memory::from_values(&numbers(seed, LEN))).collect();
    graphs.replay(&1);
    assert_eq!(y.read::<f32>(LEN), sums(&twice, &want));
    for (seed, other) in others.iter().enumerate() {
        assert_eq!(other.read::<f32>(LEN), numbers(seed as u32, LEN), "a replay wrote into it");
    }
    let before = gpu.usage().in_use;
    drop(graphs);
    assert_eq!(gpu.usage().in_use, before - 4 * LEN);
}

#[test]
fn of_too_many_graphs_the_one_unused_for_the_longest_time_is_dropped() {
    let (_gpu, _one) = device();
    let x = Memory::from_values(&numbers(7, LEN));
    let mut y = Memory::from_values(&numbers(8, LEN));
    let mut graphs = Graphs::default();
    for key in 0..GRAPHS_MAX {
        graphs.capture(key, || add(&x, &mut y)).expect("a graph");
    }
    graphs.replay(&0);
    graphs.capture(GRAPHS_MAX, || add(&x, &mut y)).expect("a graph");
    let kept: Vec<usize> = (0..=GRAPHS_MAX).filter(|key| graphs.has(key)).collect();
    assert!(kept.len() == GRAPHS_MAX && !kept.contains(&1), "{kept:?}");
    graphs.replay(&0);
    let own = numbers(7, LEN);
    assert_eq!(y.read::<f32>(LEN), sums(&own, &sums(&own, &numbers(8, LEN))));
}

#[test]
fn work_that_a_replay_would_not_repeat_is_rejected_in_a_capture() {
    let (gpu, _one) = device();
    let mut x = Memory::from_values(&[1u32; 8]);
    let work = || {
        refused("an upload", || x.write(&[2u32; 8]));
        refused("a download", || drop(x.read::<u32>(8)));
        refused("a wait", || gpu.wait());
    };
    Graphs::default().capture((), work).expect("a graph of nothing");
    assert_eq!(x.read::<u32>(8), [1; 8]);
}

#[test]
fn errors_name_a_missing_kernel_and_memory_beyond_the_limit_or_the_gpu() {
    let (gpu, _one) = device();
    // Before it fails, the pool reclaims memory that waits for copies, also from earlier tests.
    let too_much = || refused("not allocate 1073741824.00 MiB", || drop(Memory::scratch(1 << 50)));
    too_much();
    let before = gpu.usage().in_use;
    gpu.set_limit((before + (4 << 20)) as u64);
    let fits = Memory::scratch(3 << 20);
    refused("2.00 MiB", || drop(Memory::scratch(2 << 20)));
    refused("does not fit", || drop(Memory::scratch(2 << 20)));
    gpu.set_limit(0);
    drop(fits);
    drop(Memory::scratch(8 << 20));
    too_much();
    assert_eq!(gpu.usage().in_use, before);
    refused("there is no such kernel", || gpu.launch("residual_subtract", [1, 1, 1], 32, 0, &[]));
}

/// More than the pinned memory for copies, so that it is reused while earlier parts may be in flight.
#[test]
fn large_copies_arrive_complete_and_their_source_may_change_at_once() {
    let (gpu, _one) = device();
    let mut values: Vec<u32> = (0..5_500_000u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
    let want = values.clone();
    let mut x = Memory::scratch(4 * values.len());
    x.write(&values);
    values.fill(0);
    let small = Memory::from_values(&values[..1000]);
    gpu.order(Stream::Compute, Stream::Tensor);
    gpu.wait_for(Stream::Tensor);
    assert!(x.read::<u32>(want.len()) == want, "values were lost on the way");
    assert_eq!(small.read::<u32>(1000), &values[..1000]);
}
