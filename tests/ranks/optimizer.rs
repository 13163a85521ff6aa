//! The sharded optimizer on several ranks against AdamW over the whole buffer.

use crate::Fact;
use rlhf_hpc::comm::{Group, World};
use rlhf_hpc::config::optim::{GradientOrder, OptimConfig};
use rlhf_hpc::error::Result;
use rlhf_hpc::learn::tree_sum::{TreeSum, leaves};
use rlhf_hpc::optim::{Partition, StepStats, Zero};
use rlhf_hpc::tensor::Flat;
use rlhf_hpc::tensor::arena::Buffer;
use std::ops::Range;
use std::sync::Arc;

pub const FACTS: &[Fact] = &[
    Fact {
        name: "a sharded optimizer equals unsharded AdamW on the same gradient, bitwise",
        ranks: &[1, 2, 3, 4],
        check: equals,
    },
    Fact { name: "ten updates in fixed order have the same bits on 1, 2 and 4 ranks", ranks: &[1, 2, 4], check: fixed },
    Fact { name: "a sharded f32 master makes the updates of whole f32 weights", ranks: &[1, 2, 3], check: master },
    Fact { name: "a NaN on one rank is an error on all, and changes nothing", ranks: &[1, 2, 4], check: not_finite },
];

/// Units of which some are cut, some go to one rank.
const UNITS: [Range<usize>; 4] = [0..2 * 4096 + 128, 2 * 4096 + 128..5 * 4096, 5 * 4096..5 * 4096 + 64, 20_544..LEN];
const LEN: usize = 7 * 4096 + 1024;

fn vectors() -> Vec<Range<usize>> {
    vec![100..200, 4000..4200, 12_000..20_480, 20_480..21_000]
}

fn config() -> OptimConfig {
    OptimConfig { weight_decay: 0.1, clip_norm: 0.5, ..OptimConfig::with_lr(1e-2) }
}

fn weights() -> Vec<f32> {
    (0..LEN).map(|i| ((i * 7919) % 2003) as f32 * 1e-3 - 1.0).collect()
}

/// The gradient of one chunk of update t; sums of several round.
fn gradient(t: usize, chunk: usize) -> impl Iterator<Item = f32> {
    (0..LEN).map(move |i| ((i * 31 + chunk * 1009 + t * 17) % 509) as f32 * 1.37e-5 - 3e-3)
}

/// A gradient whose sum over ranks is exact, so that the order of the sum does not show.
fn exact(t: usize) -> Vec<f32> {
    (0..LEN).map(|i| ((i * 31 + t * 17) % 509) as f32 / 4096.0 - 0.0625).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

pub fn state(config: &OptimConfig, units: &[Range<usize>], group: &Group, vectors: &[Range<usize>]) -> Zero {
    Zero::new(config, Arc::new(Partition::new(units, group.rank(), group.size())), vectors)
}

/// One update of flat parameters that every rank holds, as the weights of a model are updated.
pub fn step(
    state: &mut Zero,
    params: &mut [f32],
    grads: &mut [f32],
    group: &Group,
    order: GradientOrder,
) -> Result<StepStats> {
    let partition = state.partition().clone();
    for u in 0..partition.units() {
        let unit = &mut grads[partition.unit(u)];
        match order {
            GradientOrder::Fast => group.reduce_scatter_sum(unit, partition.cuts(u)),
            GradientOrder::Fixed => group.reduce_scatter_tree(unit, partition.cuts(u)),
        }
    }
    let stats = state.measure(|u| &grads[partition.own(u)], group, &Group::one())?;
    let update = state.begin(1e-2, stats.clip_scale);
    for u in 0..partition.units() {
        state.apply(update, u, &mut params[partition.own(u)], &grads[partition.own(u)]);
        group.all_gather(&mut params[partition.unit(u)], partition.cuts(u));
    }
    Ok(stats)
}

fn equals(world: &World) {
    let alone = Group::one();
    let group = world.group();
    let (mut sharded, mut whole) = (weights(), weights());
    let mut mine = state(&config(), &UNITS, &group, &vectors());
    let mut reference = state(&config(), &UNITS, &alone, &vectors());
    for t in 0..5 {
        // Every rank holds its part of the elements: the sum over ranks adds zeros.
        let mut grads = exact(t);
        grads.iter_mut().enumerate().filter(|(i, _)| i % world.size != world.rank).for_each(|(_, g)| *g = 0.0);
        let got = step(&mut mine, &mut sharded, &mut grads, &group, GradientOrder::Fast).expect("finite");
        let want = step(&mut reference, &mut whole, &mut exact(t), &alone, GradientOrder::Fast).expect("finite");
        assert!(got == want && got.clip_scale < 1.0, "{got:?} against {want:?}");
        assert_eq!(bits(&sharded), bits(&whole), "update {t}");
    }
    let partition = mine.partition();
    for u in 0..partition.units() {
        assert_eq!(bits(mine.m.slice(partition.held(u)).cpu()), bits(reference.m.slice(partition.own(u)).cpu()));
        assert_eq!(bits(mine.v.slice(partition.held(u)).cpu()), bits(reference.v.slice(partition.own(u)).cpu()));
    }
}

/// Ten updates of 12 chunks each, as `world.size` ranks and as one.
fn fixed(world: &World) {
    let run = |rank: usize, ranks: usize, group: &Group| {
        let mut params = weights();
        let mut state = state(&config(), &UNITS, group, &vectors());
        for t in 0..10 {
            let mut sum = TreeSum::new(LEN);
            for (leaf, chunk) in leaves(12, rank, ranks) {
                let mut grads = sum.buffer();
                grads.on_host(|grads| grads.iter_mut().zip(gradient(t, chunk)).for_each(|(a, g)| *a += g));
                sum.add(leaf, grads);
            }
            let mut step = |grads: &mut [f32]| step(&mut state, &mut params, grads, group, GradientOrder::Fixed);
            sum.finish().on_host(&mut step).expect("finite");
        }
        params
    };
    let together = run(world.rank, world.size, &world.group());
    let alone = run(0, 1, &Group::one());
    assert_ne!(bits(&alone), bits(&weights()));
    assert_eq!(bits(&together), bits(&alone));
}

fn master(world: &World) {
    let group = world.group();
    let mut params = weights();
    let mut in_place = state(&config(), &UNITS, &group, &vectors());
    let partition = in_place.partition().clone();
    let own: Vec<f32> = (0..partition.units()).flat_map(|u| weights()[partition.own(u)].to_vec()).collect();
    let mut buffer = Buffer::scratch(own.len());
    buffer.copy_from_slice(&own);
    let mut with_master = state(&config(), &UNITS, &group, &vectors()).with_master(Flat::Cpu(buffer));
    for t in 0..3 {
        let mut grads = exact(t);
        let stats = step(&mut in_place, &mut params, &mut grads, &group, GradientOrder::Fast).expect("finite");
        let update = with_master.begin(1e-2, stats.clip_scale);
        for u in 0..partition.units() {
            let published = with_master.apply_master(update, u, &grads[partition.own(u)]);
            assert_eq!(bits(published), bits(&params[partition.own(u)]));
        }
    }
}

fn not_finite(world: &World) {
    let group = world.group();
    let mut params = weights();
    let mut state = state(&config(), &UNITS, &group, &vectors());
    let mut grads = exact(0);
    if world.rank == world.size - 1 {
        grads[5000] = f32::NAN;
    }
    let error = step(&mut state, &mut params, &mut grads, &group, GradientOrder::Fixed).expect_err("NaN");
    assert!(error.message.contains("not finite"), "{error}");
    assert_eq!((bits(&params), state.updates), (bits(&weights()), 0));
}
