//! Every collective against a naive sum, for lengths around the chunk size and for uneven and empty ranges.

use crate::Test;
use rlhf_hpc::comm::{Axes, World};
use rlhf_hpc::error::{Error, Kind, Result};
use rlhf_hpc::mesh::Mesh;
use std::ops::Range;

const ALL: &[usize] = &[1, 3, 4];

pub const TESTS: &[Test] = &[
    Test { name: "f64 sums and maxima are in rank order", ranks: ALL, check: all_reduce_f64 },
    Test { name: "reduce_scatter_sum gives each rank its range of the sum", ranks: ALL, check: reduce_scatter },
    Test { name: "all_gather completes every rank's buffer", ranks: ALL, check: all_gather },
    Test { name: "gathered bytes and numbers of any lengths are in rank order", ranks: ALL, check: gather_any },
    Test { name: "broadcast_bytes sends the root's bytes", ranks: ALL, check: broadcast },
    Test { name: "agree returns the error of any rank on all ranks", ranks: ALL, check: agree },
    Test { name: "axes of a mesh are strided groups, tensor fastest", ranks: &[4], check: axes },
    Test { name: "ranks with the same cores share them", ranks: ALL, check: threads },
];

const LENGTHS: &[usize] = &[0, 1, 5, 4096, (1 << 18) - 1, (1 << 18) + 3, (1 << 19) + 17];

/// Values whose sums round, different on every rank.
pub fn values(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 2654435761 + rank * 40503 + 7) % 100_003) as f32 * 1e-3 - 37.0).collect()
}

fn naive_sum(ranks: usize, len: usize) -> Vec<f64> {
    let mut sum = vec![0.0; len];
    for rank in 0..ranks {
        sum.iter_mut().zip(values(rank, len)).for_each(|(a, b)| *a += f64::from(b));
    }
    sum
}

fn assert_near(got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(g) - w).abs() <= 1e-4, "element {i}: {g} against {w}");
    }
}

/// Cuts 0..len into `ranks` ranges of very different lengths; with three ranks and more, one is empty.
fn cuts(len: usize, ranks: usize) -> Vec<Range<usize>> {
    let at = |i: usize| match i {
        0 => 0,
        i if i == ranks => len,
        1 | 2 => len / 5,
        _ => len / 2,
    };
    (0..ranks).map(|i| at(i)..at(i + 1)).collect()
}

fn even(len: usize, ranks: usize) -> Vec<Range<usize>> {
    (0..ranks).map(|i| i * len / ranks..(i + 1) * len / ranks).collect()
}

fn all_reduce_f64(world: &World) {
    for len in [0, 1, 1000, (1 << 18) + 5] {
        let of = |rank: usize| (0..len).map(move |i| ((i * 31 + rank * 17) % 1009) as f64 / 7.0 - 50.0);
        let (mut sum, mut max): (Vec<f64>, Vec<f64>) = (of(world.rank).collect(), of(world.rank).collect());
        world.group().all_reduce_sum_f64(&mut sum);
        world.group().all_reduce_max_f64(&mut max);
        let mut want_sum: Vec<f64> = of(0).collect();
        let mut want_max = want_sum.clone();
        for rank in 1..world.size {
            want_sum.iter_mut().zip(of(rank)).for_each(|(a, b)| *a += b);
            want_max.iter_mut().zip(of(rank)).for_each(|(a, b)| *a = a.max(b));
        }
        assert!(sum == want_sum && max == want_max, "len {len}");
    }
    let mut x = [if world.rank == world.size - 1 { f64::NAN } else { 1e9 }];
    world.group().all_reduce_max_f64(&mut x);
    assert!(x[0].is_nan(), "a maximum hides no NaN");
}

fn reduce_scatter(world: &World) {
    for &len in LENGTHS {
        let sum = naive_sum(world.size, len);
        for ranges in [cuts(len, world.size), even(len, world.size)] {
            let mut x = values(world.rank, len);
            world.group().reduce_scatter_sum(&mut x, &ranges);
            let mine = ranges[world.rank].clone();
            assert_near(&x[mine.clone()], &sum[mine]);
        }
    }
}

fn all_gather(world: &World) {
    for &len in LENGTHS {
        for ranges in [cuts(len, world.size), even(len, world.size)] {
            let want = values(9, len);
            let mine = ranges[world.rank].clone();
            let mut x = vec![f32::NAN; len];
            x[mine.clone()].copy_from_slice(&want[mine.clone()]);
            world.group().all_gather(&mut x, &ranges);
            assert!(x == want, "len {len}");
            let want: Vec<u16> = (0..len).map(|i| (i * 7919) as u16).collect();
            let mut x = vec![0xffff; len];
            x[mine.clone()].copy_from_slice(&want[mine]);
            world.group().all_gather(&mut x, &ranges);
            assert!(x == want, "u16, len {len}");
        }
    }
}

fn gather_any(world: &World) {
    let of = |rank: usize| -> Vec<u8> { (0..rank * 100_001).map(|i| (i * 13 + rank) as u8).collect() };
    let all = world.group().all_gather_bytes(&of(world.rank));
    assert!(all == (0..world.size).map(of).collect::<Vec<_>>());
    let of = |rank: usize| vec![rank as f64 + 0.25; 3 - rank % 3];
    assert_eq!(world.group().all_gather_numbers(&of(world.rank)), (0..world.size).map(of).collect::<Vec<_>>());
}

fn broadcast(world: &World) {
    for root in 0..world.size {
        let mut bytes = if world.rank == root { vec![root as u8; 3_000_001] } else { vec![9; 5] };
        world.group().broadcast_bytes(root, &mut bytes);
        assert!(bytes == vec![root as u8; 3_000_001]);
    }
}

fn agree(world: &World) {
    assert_eq!(world.group().agree(Ok(world.rank)), Ok(world.rank));
    let all_alike: Result<()> = world.group().agree(Err(Error::usage("no such key").hint("look")));
    assert_eq!(all_alike, Err(Error::usage("no such key").hint("look")));
    let last = world.size - 1;
    let local = if world.rank == last { Err(Error::new(Kind::Io, "disk full")) } else { Ok(1) };
    let error = world.group().agree(local).expect_err("one rank failed");
    assert_eq!(error.kind, Kind::Io);
    let want = format!("rank {last} ({}): disk full", world.hosts[last]);
    assert_eq!(error.message, if world.size == 1 { "disk full".to_string() } else { want });
}

fn axes(world: &World) {
    let mesh = Mesh { data: 2, pipeline: 1, sequence: 1, tensor: 2, expert: 1 };
    let axes = Axes::split_mesh(&world.group(), &mesh);
    assert_eq!((axes.data.rank(), axes.data.size()), (world.rank / 2, 2));
    assert_eq!((axes.tensor.rank(), axes.tensor.size()), (world.rank % 2, 2));
    assert_eq!((axes.pipeline.size(), axes.sequence.size()), (1, 1));
    let mut x = [world.rank as f64];
    axes.data.all_reduce_sum_f64(&mut x);
    assert_eq!(x[0], [2.0, 4.0, 2.0, 4.0][world.rank]);
    axes.tensor.all_reduce_sum_f64(&mut x);
    assert_eq!(x[0], 6.0);
}

fn threads(world: &World) {
    let plan = world.threads();
    assert_eq!(plan.threads, (plan.mask.min(rlhf_hpc::sys::affinity::quota()) / world.size).max(1));
    assert_eq!(plan.warning, None, "mpirun was run without binding");
}
