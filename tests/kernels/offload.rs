//! Values that are kept in host memory and onloaded to the GPU while they are needed, on every device. The driver does
//! its work as late, or as early, as it may (`driver.rs`).

use crate::graph::{add, sums};
use crate::{device, numbers};
use rlhf_hpc::config::optim::OptimConfig;
use rlhf_hpc::device::Device;
use rlhf_hpc::device::cuda::{HostCopy, Memory};
use rlhf_hpc::dtype::DType;
use rlhf_hpc::model::partition::Partition;
use rlhf_hpc::ops::norm;
use rlhf_hpc::optim::host_state::{UNITS_AT_ONCE, Vector};
use rlhf_hpc::optim::zero::Zero;
use rlhf_hpc::tensor::Slice;
use std::ops::Range;
use std::sync::Arc;

const LEN: usize = 40_000;

/// Allocates the freed memory and overwrites it.
fn spoil() {
    for seed in 0..3 {
        let mut other = Memory::scratch(4 * LEN);
        other.view_mut(DType::F32).clear();
        add(&Memory::from_values(&numbers(90 + seed, LEN)), &mut other);
    }
}

#[test]
fn offloaded_values_return_unchanged_and_their_memory_is_reused_meanwhile() {
    let (gpu, _one) = device();
    let (a, b) = (numbers(1, LEN), numbers(2, LEN));
    let (once, x) = (sums(&a, &b), Memory::from_values(&a));
    let mut y = Memory::from_values(&b);
    add(&x, &mut y);
    let before = gpu.usage();
    let mut host_copy = HostCopy::offload_from(&mut y);
    assert_eq!((before.in_use - gpu.usage().in_use).next_multiple_of(512), (4 * LEN).next_multiple_of(512));
    assert_eq!(gpu.usage().pinned - before.pinned, 4 * LEN);
    spoil();
    y = host_copy.onload();
    host_copy.wait();
    assert_eq!(y.read::<f32>(LEN), once);
    host_copy.offload(&mut y, false);
    spoil();
    y = host_copy.onload();
    host_copy.wait();
    add(&x, &mut y);
    host_copy.offload(&mut y, true);
    spoil();
    y = host_copy.onload();
    host_copy.wait();
    let twice = sums(&a, &once);
    assert_eq!(y.read::<f32>(LEN), twice, "what changed meanwhile");
    host_copy.offload(&mut y, false);
    host_copy.finish();
    assert_eq!(host_copy.as_f32(), twice);
    drop(host_copy);
    assert_eq!(gpu.usage().pinned, before.pinned);
}

#[test]
fn pinned_memory_is_backed_before_it_is_used() {
    let (gpu, _one) = device();
    let pages_of = |bytes: usize| {
        let (before, host_copy) = (gpu.usage().pinned, HostCopy::zeros(bytes));
        let values = host_copy.as_f32();
        let mut backed = vec![0u8; bytes.div_ceil(4096)];
        let at = values.as_ptr().cast_mut().cast();
        // SAFETY: a byte for each page of the run, which begins at a page.
        assert_eq!(unsafe { libc::mincore(at, bytes, backed.as_mut_ptr()) }, 0);
        assert_eq!(gpu.usage().pinned - before, bytes);
        (backed.len(), backed.iter().filter(|page| **page & 1 == 1).count(), values.iter().any(|x| *x != 0.0))
    };
    assert_eq!([5 << 20, 4096, 12].map(pages_of), [(1280, 1280, false), (1, 1, false), (1, 1, false)]);
}

/// Whether the driver is emulated and as late as possible.
fn is_late() -> bool {
    let early = std::env::var_os("EMULATED_EARLY");
    std::env::var_os(crate::emulation::LATE).is_some() && early.is_none_or(|early| early == "0")
}

#[test]
fn kernels_overlap_with_offloading_and_the_next_owner_of_the_memory_waits() {
    let (gpu, _one) = device();
    gpu.trim();
    let (a, b) = (numbers(1, LEN), numbers(2, LEN));
    let x = Memory::from_values(&a);
    let (mut y, mut z) = (Memory::from_values(&b), Memory::from_values(&b));
    add(&x, &mut y);
    let left = format!("{:?}", y.arg());
    let mut host_copy = HostCopy::offload_from(&mut y);
    add(&x, &mut z);
    gpu.wait();
    if is_late() {
        assert!(!host_copy.is_here(), "the compute stream has ended, and waited for the copy");
    }
    let mut others: Vec<Memory> = Vec::new();
    while is_late() && others.last().is_none_or(|last| format!("{:?}", last.arg()) != left) {
        let mut other = Memory::zeros(4 * LEN);
        add(&x, &mut other);
        others.push(other);
        assert!(others.len() < 20_000, "the memory of the offloaded value was not reused");
    }
    let once = sums(&a, &b);
    host_copy.finish();
    assert_eq!(host_copy.as_f32(), once);
    assert_eq!(z.read::<f32>(LEN), once);
    // Onloading waits for the offloading copy, which the host has not waited for.
    y = host_copy.onload();
    host_copy.wait();
    add(&x, &mut y);
    host_copy.offload(&mut y, true);
    y = host_copy.onload();
    host_copy.wait();
    assert_eq!(y.read::<f32>(LEN), sums(&a, &once));
}

/// Units of several lengths, one of which is empty.
fn units() -> Vec<Range<usize>> {
    let lens = [12_000, 4_096, 4_096, 0, 20_032, 4_096, 64];
    let ends = lens.iter().scan(0, |end, len| {
        *end += len;
        Some(*end)
    });
    ends.zip(lens).map(|(end, len)| end - len..end).collect()
}

/// One update of all units.
fn update_all(zero: &mut Zero, units: &[Range<usize>], w: &mut Memory, grads: &Memory) {
    let begun = zero.begin(0.01, 1.0);
    for (u, unit) in units.iter().enumerate() {
        let mut weights = w.view_mut(DType::Bf16);
        let own = Slice::Cuda(grads.view(DType::F32).part(unit.clone()));
        zero.apply_cuda(begun, u, weights.reborrow().part(unit.clone()), own);
    }
    zero.finish_update();
}

#[test]
fn updates_of_offloaded_state_equal_those_of_state_on_the_gpu() {
    let (gpu, _one) = device();
    let units = units();
    let config = OptimConfig { weight_decay: 0.1, ema_beta: 0.9, ..OptimConfig::with_lr(0.01) };
    let partition = Arc::new(Partition::whole(&units));
    let len = partition.own_len();
    let master = |zero: &mut Zero| {
        let values = numbers(7, len);
        units.iter().enumerate().for_each(|(u, unit)| zero.set_state(Vector::Master, u, 0, &values[unit.clone()]));
    };
    let zero = |on| Zero::new([Device::Cuda, on], &config, partition.clone(), &[], true);
    let [mut here, mut away] = [Device::Cuda, Device::Cpu].map(zero);
    master(&mut here);
    master(&mut away);
    assert_eq!(here.bytes(), away.bytes());
    let [mut w_here, mut w_away] = [(); 2].map(|()| Memory::zeros(2 * len));
    for update in 0..3 {
        let grads = Memory::from_values(&numbers(20 + update, len));
        let in_use = gpu.usage().in_use;
        for (zero, w) in [(&mut here, &mut w_here), (&mut away, &mut w_away)] {
            // During the update, only a few neighbouring units of the state are on the GPU.
            let neighbours = units.windows(UNITS_AT_ONCE).map(|all| all.iter().map(Range::len).sum::<usize>());
            gpu.set_limit((in_use + 16 * neighbours.max().expect("units") + UNITS_AT_ONCE * 512) as u64);
            update_all(zero, &units, w, &grads);
            gpu.set_limit(0);
        }
        assert_eq!(gpu.usage().in_use, in_use, "all of it was offloaded again");
    }
    // State that stays on the GPU between the updates of a step is offloaded after the last one.
    let (mut stays, mut w_stays) =
        (Zero::new([Device::Cuda, Device::Cpu], &config, partition.clone(), &[], true), Memory::zeros(2 * len));
    master(&mut stays);
    stays.keep_resident();
    for update in 0..3 {
        let grads = Memory::from_values(&numbers(20 + update, len));
        update_all(&mut stays, &units, &mut w_stays, &grads);
        let before = gpu.usage().in_use;
        if update > 0 {
            stays.offload();
            let left = before - gpu.usage().in_use;
            assert!(left >= 16 * len, "update {update}: {left} bytes of {len} values stayed");
        }
    }
    let bits = w_here.read::<u16>(len);
    assert!([w_away, w_stays].iter().all(|w| w.read::<u16>(len) == bits));
    for what in [Vector::Master, Vector::First, Vector::Second, Vector::Average] {
        for (u, unit) in units.iter().enumerate() {
            let [a, b, c] = [&here, &away, &stays].map(|zero| zero.state(what, u).expect("all have it").to_host());
            assert!(a == b && a == c && a.len() == unit.len(), "{what:?} of unit {u}");
            assert!(unit.is_empty() || norm::sums_of_squares(Slice::F32(&a), unit.len())[0] > 0.0, "{what:?}: zeros");
        }
    }
}
