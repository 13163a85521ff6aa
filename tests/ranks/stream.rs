//! Communication in the background: order, no deadlock with other collectives, the exposed time, the effect of a panic;
//! and the exchanges between chosen ranks compared with plain indexing.

use crate::Test;
use rlhf_hpc::comm::{Axes, Group, Stream, World, accounting};
use rlhf_hpc::mesh::Mesh;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;

pub const TESTS: &[Test] = &[
    Test { name: "a stream runs its jobs in the order they were submitted", ranks: &[3], check: in_order },
    Test { name: "streams do not deadlock if ranks submit to them in different orders", ranks: &[2], check: crossed },
    Test { name: "only waiting time for a stream counts as exposed", ranks: &[1, 2], check: exposed },
    Test { name: "each item of a queue goes to the first rank that claims it", ranks: &[1, 2, 4], check: queue },
    Test { name: "shift sends values of any length to the next rank", ranks: &[1, 3], check: shift },
    Test {
        name: "all_to_all equals indexing, for uneven, empty and unordered ranges",
        ranks: &[1, 4],
        check: all_to_all,
    },
    Test { name: "disjoint parts of the world have axes of their own", ranks: &[4], check: parts },
];

fn value(rank: usize, i: usize) -> f32 {
    ((i * 7919 + rank * 104_729 + 3) % 65_537) as f32 - 11.0
}

fn values(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| value(rank, i)).collect()
}

fn in_order(world: &World) {
    let stream = Stream::new("ordered", &world.group());
    let begun = Arc::new(AtomicUsize::new(0));
    let pending: Vec<_> = (0..20)
        .map(|n| {
            let begun = begun.clone();
            stream.submit(move |group| {
                let turn = begun.fetch_add(1, Ordering::SeqCst);
                let mut x = values(group.rank() + n, 1000);
                group.all_reduce_sum_ordered(&mut x);
                (turn, x)
            })
        })
        .collect();
    for (n, pending) in pending.into_iter().enumerate() {
        let want: Vec<f32> = (0..1000).map(|i| (0..world.size).map(|r| value(r + n, i)).sum()).collect();
        assert_eq!(pending.wait(), (n, want));
    }
}

/// Odd ranks submit to the second stream first, and all ranks are in a collective of the main thread meanwhile.
fn crossed(world: &World) {
    let group = world.group();
    let streams = [Stream::new("first", &group), Stream::new("second", &group)];
    let order = if world.rank.is_multiple_of(2) { [0, 1] } else { [1, 0] };
    for len in [1, 50_000, 1_500_000] {
        let jobs = order.map(|s| {
            let mut x = values(world.rank + s, len);
            streams[s].submit(move |group| {
                group.all_reduce_sum_ordered(&mut x);
                x
            })
        });
        group.barrier();
        for (s, job) in order.into_iter().zip(jobs) {
            let want: Vec<f32> = (0..len).map(|i| (0..world.size).map(|r| value(r + s, i)).sum()).collect();
            assert!(job.wait() == want, "stream {s}, len {len}");
        }
    }
}

fn exposed(world: &World) {
    let group = world.group().split("exposure", 0, world.rank);
    let stream = Stream::new("hidden", &group);
    let of = |op| accounting().get(&("exposure", op)).copied().unwrap_or_default();
    // A job on the stream, done long before it is waited for: the calls are counted, nothing is exposed.
    let (done, ended) = channel::<()>();
    let pending = stream.submit(move |group| {
        let _done = done;
        group.all_gather_numbers(&[1.0])
    });
    let _ = ended.recv();
    std::thread::sleep(std::time::Duration::from_millis(300));
    pending.wait();
    let (gathers, waits) = (of("all_gather_bytes"), of("hidden"));
    assert_eq!(gathers.calls, u64::from(world.size > 1));
    assert_eq!((gathers.exposed, waits.calls, waits.exposed), (0.0, 0, 0.0));
    assert_eq!(gathers.seconds > 0.0, world.size > 1);
    // The same on this thread: exposed wholly.
    group.barrier();
    let barrier = of("barrier");
    assert_eq!(barrier.exposed, barrier.seconds);
    assert_eq!(barrier.exposed > 0.0, world.size > 1);
    // A job that cannot end before it is waited for: the wait is exposed, the collective's own seconds are not.
    let (release, held) = channel::<()>();
    let pending = stream.submit(move |group| {
        if group.size() > 1 {
            held.recv().expect("released below");
        }
        group.barrier();
    });
    let releaser = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(300));
        let _ = release.send(());
    });
    let before = rlhf_hpc::comm::exposed_seconds();
    pending.wait();
    releaser.join().expect("it only sends");
    let waits = of("hidden");
    assert_eq!((waits.calls, waits.seconds), (u64::from(world.size > 1), 0.0));
    assert_eq!(waits.exposed > 0.0, world.size > 1);
    assert_eq!(of("barrier").exposed, barrier.exposed, "the second barrier ran in the background");
    let gained = rlhf_hpc::comm::exposed_seconds() - before;
    assert!((gained - waits.exposed).abs() <= 1e-9, "{gained} s, {} s waited", waits.exposed);
}

/// The last rank is late, and one rank takes no item. The others take all items, and the next list is a new one.
fn queue(world: &World) {
    let (group, last) = (world.group(), world.size - 1);
    for count in [0, 1, 100] {
        let mine: Vec<u64> = group.with_queue(count, |next| {
            if world.rank == last && world.size > 1 {
                std::thread::sleep(std::time::Duration::from_millis(100));
            }
            let takes = world.rank != 1 || world.size < 4;
            std::iter::from_fn(|| if takes { next() } else { None }).map(|n| n as u64).collect()
        });
        let of_ranks = group.all_gather_numbers(&mine);
        let mut all = of_ranks.concat();
        all.sort_unstable();
        assert_eq!(all, (0..count as u64).collect::<Vec<_>>(), "{of_ranks:?}");
        assert!(of_ranks.iter().all(|taken| taken.is_sorted()));
        let late = if world.size > 1 { 0 } else { count };
        assert_eq!(of_ranks[last].len(), late, "{of_ranks:?}");
    }
}

fn shift(world: &World) {
    let before = (world.rank + world.size - 1) % world.size;
    for unit in [0, 1, 1000, 700_001] {
        // Rank r sends r * unit: ranks send and receive different lengths, and rank 0 sends nothing.
        let mut got = vec![f32::NAN; before * unit];
        world.group().shift(&values(world.rank, world.rank * unit), &mut got);
        assert!(got == values(before, before * unit), "unit {unit}");
    }
    // After a full round each rank has its own values again.
    let mut x = values(world.rank, 5000);
    for _ in 0..world.size {
        let mut next = vec![0.0; x.len()];
        world.group().shift(&x, &mut next);
        x = next;
    }
    assert!(x == values(world.rank, 5000));
}

/// The number of elements that rank `a` sends to rank `b`: uneven, some are 0.
fn dealt(a: usize, b: usize, unit: usize) -> usize {
    ((a * 3 + b * 5) % 4) * unit
}

fn all_to_all(world: &World) {
    let (me, size) = (world.rank, world.size);
    for unit in [0, 1, 777, 200_003] {
        // Sent back to front, with a gap of one element after each.
        let starts = |lens: Vec<usize>| -> Vec<Range<usize>> {
            let mut ranges = vec![0..0; lens.len()];
            let mut at = 0;
            for r in (0..lens.len()).rev() {
                ranges[r] = at..at + lens[r];
                at += lens[r] + 1;
            }
            ranges
        };
        let to_of = |a: usize| starts((0..size).map(|b| dealt(a, b, unit)).collect());
        let (to, from) = (to_of(me), starts((0..size).map(|a| dealt(a, me, unit)).collect()));
        let send = values(me, to[0].end + 1);
        let mut receive = vec![-7.0; from[0].end + 1];
        let mut want = receive.clone();
        for a in 0..size {
            let theirs = to_of(a)[me].clone();
            want[from[a].clone()].copy_from_slice(&values(a, theirs.end)[theirs]);
        }
        world.group().all_to_all(&send, &to, &mut receive, &from);
        assert!(receive == want, "unit {unit}");
    }
}

fn members(group: &Group, world: &World) -> Vec<usize> {
    group.all_gather_numbers(&[world.rank as f64]).iter().map(|r| r[0] as usize).collect()
}

fn parts(world: &World) {
    let cut = world.size - 1;
    let first = Mesh { data: cut, pipeline: 1, sequence: 1, tensor: 1, expert: 1 };
    let of_first = world.axes_of(0..cut, &first);
    let of_last = world.axes_of(cut..world.size, &Mesh::data_only(1));
    assert_eq!((of_first.is_some(), of_last.is_some()), (world.rank < cut, world.rank == cut));
    let axes: Axes = of_first.or(of_last).expect("one of the two");
    assert_eq!(members(&axes.all, world), if world.rank < cut { (0..cut).collect() } else { vec![cut] });
    assert_eq!(members(&axes.data, world), members(&axes.all, world));
    let job = axes.zero_stream.submit(|group| group.all_gather_numbers(&[1.0]).len());
    assert_eq!(job.wait(), axes.all.size());
    let whole = world.axes_of(0..world.size, &Mesh::data_only(world.size));
    assert_eq!(whole.expect("everyone").data.size(), world.size);
}
