//! Tests of the arena of the GPU, over one that counts.

use super::*;
use std::cell::{Cell, RefCell};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// A GPU of `room` bytes that counts.
struct Counted {
    room: Cell<usize>,
    next: Cell<u64>,
    freed: RefCell<Vec<u64>>,
}

impl Counted {
    fn with_room(room: usize) -> Self {
        Self { room: Cell::new(room), next: Cell::new(1 << 20), freed: RefCell::new(Vec::new()) }
    }
}

impl Backing for Counted {
    /// Neighbours, which must not become one.
    fn allocate(&self, bytes: usize) -> Result<u64> {
        let left = self.room.get().checked_sub(bytes).ok_or_else(|| Error::usage("not enough bytes are left"))?;
        self.room.set(left);
        let at = self.next.get();
        self.next.set(at + bytes as u64);
        Ok(at)
    }

    fn free(&self, address: u64, bytes: usize) {
        self.room.set(self.room.get() + bytes);
        self.freed.borrow_mut().push(address);
    }
}

fn allocate(pool: &mut Pool, bytes: usize, gpu: &Counted) -> u64 {
    pool.allocate(bytes, "a test", gpu).expect("there is room")
}

#[test]
fn reserved_memory_serves_every_mix_of_sizes_without_driver_calls() {
    let (mut pool, gpu) = (Pool::default(), Counted::with_room(1 << 30));
    pool.usage.limit = 256 * MIB;
    pool.reserve(256 * MIB, &gpu);
    let lasting = allocate(&mut pool, 40 * MIB, &gpu);
    for step in 0..200 {
        let sizes = (0..12).map(|i| 1 + (step * 7919 + i * i * 104_729) % (12 * MIB));
        let runs: Vec<u64> = sizes.map(|bytes| allocate(&mut pool, bytes, &gpu)).collect();
        let order = |i: usize| runs[(i * 5 + step) % runs.len()];
        (0..runs.len()).for_each(|i| pool.give(order(i), &gpu));
        assert_eq!((pool.usage.requests, pool.usage.in_use), (1, 40 * MIB));
    }
    pool.give(lasting, &gpu);
    assert_eq!((pool.free.len(), pool.by_size.len()), (1, 1), "everything is one free stretch again");
    assert_eq!(pool.usage.held, 256 * MIB);
}

#[test]
fn allocations_do_not_overlap_and_are_aligned() {
    let (mut pool, gpu) = (Pool::default(), Counted::with_room(1 << 30));
    let mut live: Vec<(u64, usize)> = Vec::new();
    for i in 0..400usize {
        let bytes = 1 + i * i * 7919 % (3 * MIB);
        let at = allocate(&mut pool, bytes, &gpu);
        assert!(at.is_multiple_of(PAGE as u64));
        let apart = |(other, len): &(u64, usize)| at + bytes as u64 <= *other || *other + *len as u64 <= at;
        assert!(live.iter().all(apart), "{at} of {bytes} bytes overlaps");
        live.push((at, bytes));
        if i % 3 != 0 {
            let (gone, _) = live.swap_remove(i * 31 % live.len());
            pool.give(gone, &gpu);
        }
    }
    for (at, _) in live {
        pool.give(at, &gpu);
    }
    pool.shrink(0, &gpu);
    assert_eq!((pool.usage.in_use, pool.usage.held, pool.free.len(), pool.chunks.len()), (0, 0, 0, 0));
    assert_eq!(gpu.room.get(), 1 << 30, "all memory was freed");
}

#[test]
fn small_allocations_do_not_fragment_the_memory_of_large_ones() {
    let (mut pool, gpu) = (Pool::default(), Counted::with_room(1 << 30));
    pool.reserve(64 * MIB, &gpu);
    let large = allocate(&mut pool, 20 * MIB, &gpu);
    let small = allocate(&mut pool, 4 * KIB, &gpu);
    pool.give(large, &gpu);
    allocate(&mut pool, 60 * MIB, &gpu);
    assert_eq!(pool.usage.requests, 1);
    pool.give(small, &gpu);
}

#[test]
fn a_request_beyond_the_limit_fails_with_the_memory_of_each_owner_and_the_memory_left() {
    let (mut pool, gpu) = (Pool::default(), Counted::with_room(1 << 30));
    pool.usage.limit = 64 * MIB;
    let kept = pool.allocate(16 * MIB, "weights of the critic", &gpu).expect("there is room");
    pool.allocate(24 * MIB, "gradients", &gpu).expect("there is room");
    assert_eq!(pool.usage.held, 64 * MIB, "the driver is not asked for more than the limit");
    let error = pool.allocate(25 * MIB, "kv cache", &gpu).expect_err("the limit");
    let said = "out of GPU memory: 25.00 MiB for kv cache does not fit; this rank uses 40.00 MiB (gradients 24.00 MiB, \
                weights of the critic 16.00 MiB) of its limit of 64.00 MiB, which leaves 24.00 MiB";
    assert_eq!((error.exit_code(), error.message.as_str()), (2, said));
    pool.give(kept, &gpu);
    pool.allocate(16 * MIB, "kv cache", &gpu).expect("freed memory is available again");
    assert_eq!(pool.owners(), [("gradients", 24 * MIB), ("kv cache", 16 * MIB)]);
}

#[test]
fn free_memory_is_returned_to_a_full_gpu_before_the_next_request() {
    let (mut pool, gpu) = (Pool::default(), Counted::with_room(100 * MIB));
    let a = allocate(&mut pool, 64 * MIB, &gpu);
    pool.give(a, &gpu);
    let b = allocate(&mut pool, 80 * MIB, &gpu);
    assert_eq!((pool.usage.held, gpu.freed.borrow().len()), (80 * MIB, 1));
    let why = pool.allocate(64 * MIB, "a test", &gpu).expect_err("full").message;
    assert!(why.contains("not allocate 64.00 MiB for a test; this process uses 80.00 MiB"), "{why}");
    pool.give(b, &gpu);
}

#[test]
fn memory_freed_in_a_capture_is_reused_only_by_that_capture_while_the_graph_lives() {
    let (mut pool, gpu) = (Pool::default(), Counted::with_room(1 << 30));
    let before = allocate(&mut pool, 4096, &gpu);
    pool.begin_capture(Free::new());
    let first = allocate(&mut pool, 4096, &gpu);
    pool.give(first, &gpu);
    assert_eq!(allocate(&mut pool, 4096, &gpu), first, "the same run again");
    pool.give(first, &gpu);
    let runs = pool.end_capture();
    assert_eq!(runs.len(), 1);
    pool.begin_capture(runs);
    assert_eq!(allocate(&mut pool, 1000, &gpu), first, "the run that the first graph holds");
    pool.give(first, &gpu);
    let runs = pool.end_capture();
    assert_eq!(runs.len(), 1);
    pool.give(before, &gpu);
    let [a, b] = [(); 2].map(|()| allocate(&mut pool, 4096, &gpu));
    assert!(a != first && b != first, "a run of the graph was given to another owner");
    assert_eq!((pool.usage.in_use, pool.owners()), (3 * 4096, vec![("a test", 8192), (GRAPHS, 4096)]));
    pool.release(runs, &gpu);
    assert_eq!(pool.usage.in_use, 2 * 4096);
}

#[test]
fn uncached_allocations_have_the_requested_size_and_are_freed_at_once() {
    let (mut pool, gpu) = (Pool { exact: true, ..Pool::default() }, Counted::with_room(1 << 20));
    let run = allocate(&mut pool, 1000, &gpu);
    assert_eq!((pool.usage.in_use, pool.usage.held), (1000, 1000));
    pool.give(run, &gpu);
    assert_eq!((pool.usage.held, gpu.room.get(), pool.usage.requests), (0, 1 << 20, 1));
}

#[test]
fn memory_that_copies_still_read_is_reused_only_if_no_other_is_left() {
    let (mut pool, gpu) = (Pool::default(), Counted::with_room(1 << 30));
    pool.usage.limit = 64 * MIB;
    pool.reserve(64 * MIB, &gpu);
    let runs = [20, 20, 10].map(|mib| allocate(&mut pool, mib * MIB, &gpu));
    pool.give_in_flight(runs[0], &gpu);
    pool.give_in_flight(runs[1], &gpu);
    assert_eq!(pool.usage.in_use, 10 * MIB);
    let last = allocate(&mut pool, 14 * MIB, &gpu);
    assert!(!runs.contains(&last), "another run was free");
    // Then the run that was freed first, and both together if one is too small.
    assert_eq!(allocate(&mut pool, 16 * MIB, &gpu), runs[0]);
    pool.give(runs[0], &gpu);
    assert_eq!(allocate(&mut pool, 36 * MIB, &gpu), runs[0]);
    assert_eq!((pool.usage.requests, pool.usage.held), (1, 64 * MIB), "the driver was not asked");
    // While a graph is captured it belongs to the graph.
    pool.begin_capture(Free::new());
    pool.give_in_flight(last, &gpu);
    assert_eq!(pool.end_capture().len(), 1);
}
