//! What the emulated GPU notices, on kernels with one thing wrong each (`emulation/probe.cu`), and what it lets pass.

use crate::{device, emulation, in_every_order};
use rlhf_hpc::device::cuda::{Arg, Memory};
use std::ffi::{CStr, CString, c_char, c_void};

type Find = unsafe extern "C" fn(*const c_char) -> *const c_void;
type Launch = unsafe extern "C" fn(*const c_void, *const u32, u32, u64, *mut *mut c_void) -> *const c_char;

/// Runs a kernel that the binary does not carry, of 256 threads at most, and gives what the GPU said of it.
fn said(kernel: &str, blocks: usize, threads: usize, shared: usize, args: &[Arg]) -> Option<String> {
    let name = CString::new(kernel).expect("a name");
    // SAFETY: a string that ends in 0.
    let found = emulation::with_function("emulated_find", |find: Find| unsafe { find(name.as_ptr()) });
    assert!(!found.is_null(), "no kernel {kernel}");
    let mut words: Vec<u64> = args.iter().map(word).collect();
    let mut places: Vec<*mut c_void> = words.iter_mut().map(|word| std::ptr::from_mut(word).cast()).collect();
    let grid = [blocks as u32, 1, 1];
    emulation::with_function("emulated_launch", |launch: Launch| {
        // SAFETY: a kernel that was found, and a place for each of its parameters; the message lives until the next launch.
        unsafe {
            let message = launch(found, grid.as_ptr(), threads as u32, shared as u64, places.as_mut_ptr());
            (!message.is_null()).then(|| CStr::from_ptr(message).to_string_lossy().into_owned())
        }
    })
}

fn word(arg: &Arg) -> u64 {
    match *arg {
        Arg::Address(x) | Arg::U64(x) => x,
        Arg::I32(x) => u64::from(x as u32),
        Arg::U32(x) => u64::from(x),
        Arg::F32(x) => u64::from(x.to_bits()),
    }
}

/// A launch that must fail with `part` in its message, or none that must pass, in every order.
fn judged(part: Option<&str>, kernel: &'static str, blocks: usize, threads: usize, shared: usize, args: &[Arg]) {
    if crate::on_a_real_gpu() {
        eprintln!("skipped: what the emulated GPU notices");
        return;
    }
    in_every_order(|| {
        let message = said(kernel, blocks, threads, shared, args);
        match (&message, part) {
            (None, None) => {}
            (Some(message), Some(part)) if message.contains(part) => {}
            _ => panic!("{kernel} {args:?}: {message:?}, expected {part:?}"),
        }
    });
}

fn memory(values: usize) -> (Memory, Memory) {
    let _one = device();
    (Memory::of(&vec![1.0f32; values]), Memory::of(&vec![0.0f32; values]))
}

#[test]
fn accesses_outside_an_allocation_are_noticed() {
    let (x, mut y) = memory(256);
    let mut copy = |blocks, skew: i32, part| {
        let args = [x.arg(), y.arg_mut(), Arg::U64(i64::from(skew) as u64)];
        judged(part, "probe_copy", blocks, 128, 0, &args);
    };
    copy(2, 0, None);
    copy(2, 1, Some("reads of 4 bytes at byte 1024 of an allocation of 1024"));
    copy(2, -1, Some("4 before an allocation of 1024"));
    let (_, mut short) = memory(128);
    let args = [x.arg(), short.arg_mut(), Arg::U64(0)];
    judged(Some(" of an allocation of 512"), "probe_copy", 2, 128, 0, &args);
}

#[test]
fn freed_memory_and_hosts_memory_are_noticed() {
    let (x, mut y) = memory(128);
    let stale = x.arg();
    drop(x);
    judged(Some("freed memory"), "probe_copy", 1, 128, 0, &[stale, y.arg_mut(), Arg::U64(0)]);
    let host = [1.0f32; 128];
    let address = Arg::Address(host.as_ptr() as u64);
    judged(Some("no address of the GPU"), "probe_copy", 1, 128, 0, &[address, y.arg_mut(), Arg::U64(0)]);
}

#[test]
fn sixteen_bytes_are_aligned() {
    let (x, mut y) = memory(160);
    judged(None, "probe_eight", 1, 32, 0, &[x.arg(), y.arg_mut(), Arg::U64(16)]);
    judged(Some("not aligned"), "probe_eight", 1, 32, 0, &[x.arg(), y.arg_mut(), Arg::U64(8)]);
}

#[test]
fn every_missing_barrier_is_noticed_in_every_order() {
    let (_, mut y) = memory(256);
    let none = Some("no barrier between");
    for (distance, barrier, part) in [(0, 0, None), (1, 0, none), (1, 1, None), (32, 1, none), (32, 2, None)] {
        judged(part, "probe_barrier", 1, 256, 0, &[y.arg_mut(), Arg::I32(distance), Arg::I32(barrier)]);
    }
    judged(None, "probe_room", 1, 256, 0, &[y.arg_mut(), Arg::I32(1)]);
    judged(none, "probe_room", 1, 256, 0, &[y.arg_mut(), Arg::I32(0)]);
    judged(None, "probe_matrices", 1, 32, 0, &[y.arg_mut(), Arg::I32(1)]);
    judged(none, "probe_matrices", 1, 32, 0, &[y.arg_mut(), Arg::I32(0)]);
}

#[test]
fn the_room_of_a_sum_is_free_behind_it() {
    let (_, mut y) = memory(64);
    judged(None, "probe_sum", 1, 64, 0, &[y.arg_mut()]);
}

#[test]
fn copies_are_waited_for_and_then_need_a_barrier() {
    let (x, mut y) = memory(256);
    let mut copied = |wait, distance, barrier, part| {
        let args = [x.arg(), y.arg_mut(), Arg::I32(wait), Arg::I32(distance), Arg::I32(barrier)];
        judged(part, "probe_async", 1, 64, 1024, &args);
    };
    copied(1, 0, 0, None);
    copied(1, 1, 1, None);
    copied(0, 0, 0, Some("on its way"));
    copied(0, 1, 1, Some("on its way"));
    copied(1, 1, 0, Some("thread"));
}

#[test]
fn lanes_that_part_are_noticed() {
    let (_, mut y) = memory(64);
    let mut part = |from, way, part| {
        judged(part, "probe_part", 1, 64, 0, &[y.arg_mut(), Arg::I32(from), Arg::I32(way)]);
    };
    part(64, 0, None);
    part(32, 0, None);
    part(48, 0, Some("lanes of a warp part"));
    part(48, 1, Some("lanes of a warp part"));
    part(32, 2, None);
}

#[test]
fn threads_that_wait_for_the_block_are_all_there() {
    let (_, mut y) = memory(64);
    let args = [y.arg_mut(), Arg::I32(32), Arg::I32(1)];
    judged(Some("32 threads wait for the block, 32 have ended"), "probe_part", 1, 64, 0, &args);
}

#[test]
fn blocks_that_write_the_same_bytes_are_noticed() {
    let (_, mut y) = memory(64);
    judged(None, "probe_blocks", 8, 32, 0, &[y.arg_mut(), Arg::I32(1)]);
    judged(Some("another block"), "probe_blocks", 8, 32, 0, &[y.arg_mut(), Arg::I32(0)]);
}

#[test]
fn blocks_that_do_not_take_turns_are_noticed() {
    if crate::on_a_real_gpu() {
        return;
    }
    let parts = [None, Some("another block"), Some("another block"), Some("another block"), Some("what no block says")];
    for (fault, part) in parts.into_iter().enumerate() {
        in_every_order(|| {
            let (mut y, mut counters) = (Memory::of(&[0.0f32; 64]), Memory::of(&[0u32; 2]));
            let args = [y.arg_mut(), counters.arg_mut(), Arg::I32(fault as i32)];
            let message = said("probe_turns", 5, 64, 0, &args);
            match (&message, part) {
                (None, None) => assert!(y.read::<f32>(64).iter().all(|x| *x == 5.0)),
                (Some(message), Some(part)) if message.contains(part) => {}
                _ => panic!("fault {fault}: {message:?}, expected {part:?}"),
            }
        });
    }
}

#[test]
fn shared_memory_has_the_bytes_that_were_asked_for() {
    let (_, mut y) = memory(64);
    let mut bounds = |at, index, part| {
        judged(part, "probe_bounds", 1, 32, 100, &[y.arg_mut(), Arg::I32(at), Arg::I32(index)]);
    };
    bounds(99, 7, None);
    bounds(100, 7, Some("byte 100 of 100 bytes of shared memory"));
    bounds(99, 8, Some("outside its bounds"));
    judged(Some("more shared memory"), "probe_bounds", 1, 32, 200_000, &[y.arg_mut(), Arg::I32(0), Arg::I32(0)]);
}

#[test]
fn a_stack_that_grows_too_far_ends_the_launch_alone() {
    let (_, mut y) = memory(64);
    judged(None, "probe_stack", 1, 32, 0, &[y.arg_mut(), Arg::I32(10)]);
    judged(Some("a stack that grows"), "probe_stack", 1, 32, 0, &[y.arg_mut(), Arg::I32(100_000)]);
    judged(None, "probe_stack", 1, 32, 0, &[y.arg_mut(), Arg::I32(10)]);
}

#[test]
fn memory_begins_as_nan() {
    if crate::on_a_real_gpu() {
        return;
    }
    let _one = device();
    let mut y = Memory::scratch(128);
    assert!(y.read::<f32>(32).iter().all(|x| x.is_nan()), "memory");
    y.write(&[0.0f32; 32]);
    assert_eq!(said("probe_unwritten", 1, 32, 0, &[y.arg_mut()]), None);
    assert!(y.read::<f32>(32).iter().all(|x| x.is_nan()), "shared memory");
}

#[test]
fn launches_have_the_kernels_arguments_and_whole_warps() {
    if crate::on_a_real_gpu() {
        return;
    }
    let (x, mut y) = memory(32);
    judged(Some("whole warps"), "probe_copy", 1, 48, 0, &[x.arg(), y.arg_mut(), Arg::U64(0)]);
    let (gpu, _one) = device();
    for args in [&[y.arg_mut(), Arg::F32(1.0)][..], &[y.arg_mut(), Arg::F32(1.0), Arg::U64(32), Arg::U64(0)]] {
        let run = || gpu.launch("fill_f32", [1, 1, 1], 32, 0, args);
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).expect_err("other arguments");
        assert!(crate::words(&*panic).contains("the kernel has 3 parameters"), "{}", crate::words(&*panic));
    }
}
