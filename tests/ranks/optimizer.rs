//! ZeRO-1 on several ranks against AdamW over the whole buffer.

use crate::Fact;
use rlhf_hpc::comm::{Group, World};
use rlhf_hpc::config::optim::{GradientOrder, OptimConfig};
use rlhf_hpc::gradient::{TreeSum, leaves};
use rlhf_hpc::optim::Zero1;
use std::ops::Range;

pub const FACTS: &[Fact] = &[
    Fact { name: "ZeRO-1 equals unsharded AdamW on the same gradient, bitwise", ranks: &[1, 2, 3, 4], check: equals },
    Fact { name: "ten updates in fixed order have the same bits on 1, 2 and 4 ranks", ranks: &[1, 2, 4], check: fixed },
    Fact { name: "a sharded f32 master makes the updates of whole f32 weights", ranks: &[1, 2, 3], check: master },
    Fact { name: "a NaN on one rank is an error on all, and changes nothing", ranks: &[1, 2, 4], check: not_finite },
];

const LEN: usize = 3 * 4096 + 1000;

fn vectors() -> Vec<Range<usize>> {
    vec![100..200, 4000..4200, 12_000..LEN]
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

fn equals(world: &World) {
    let alone = Group::one();
    let group = world.group();
    let (mut sharded, mut whole) = (weights(), weights());
    let mut state = Zero1::new(&config(), LEN, &group, &vectors());
    let mut reference = Zero1::new(&config(), LEN, &alone, &vectors());
    for t in 0..5 {
        // Every rank holds its part of the elements: the sum over ranks adds zeros.
        let mut mine = exact(t);
        mine.iter_mut().enumerate().filter(|(i, _)| i % world.size != world.rank).for_each(|(_, g)| *g = 0.0);
        let got = state.step(&mut sharded, &mut mine, &group, 1e-2, GradientOrder::Fast).expect("finite");
        let want = reference.step(&mut whole, &mut exact(t), &alone, 1e-2, GradientOrder::Fast).expect("finite");
        assert!(got == want && got.clip_scale < 1.0, "{got:?} against {want:?}");
        assert_eq!(bits(&sharded), bits(&whole), "update {t}");
    }
    assert_eq!(bits(&state.m), bits(&reference.m[state.own()]));
    assert_eq!(bits(&state.v), bits(&reference.v[state.own()]));
}

/// Ten updates of 12 chunks each, as `world.size` ranks and as one.
fn fixed(world: &World) {
    let run = |rank: usize, ranks: usize, group: &Group| {
        let mut params = weights();
        let mut state = Zero1::new(&config(), LEN, group, &vectors());
        for t in 0..10 {
            let mut sum = TreeSum::new(LEN);
            for (leaf, chunk) in leaves(12, rank, ranks) {
                let mut grads = sum.buffer();
                grads.iter_mut().zip(gradient(t, chunk)).for_each(|(a, g)| *a += g);
                sum.add(leaf, grads);
            }
            state.step(&mut params, &mut sum.finish(), group, 1e-2, GradientOrder::Fixed).expect("finite");
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
    let mut state = Zero1::new(&config(), LEN, &group, &vectors());
    let mut published = weights();
    let mut with_master = Zero1::with_master(&config(), &weights(), &group, &vectors());
    for t in 0..3 {
        let want = state.step(&mut params, &mut exact(t), &group, 1e-2, GradientOrder::Fast);
        let own = with_master.own();
        let got = with_master.step_master(&mut exact(t), &group, 1e-2, GradientOrder::Fast, |range, master| {
            assert_eq!(range, own);
            published[range].copy_from_slice(master);
        });
        assert_eq!(got, want);
        assert_eq!(bits(&published[own.clone()]), bits(&params[own]));
    }
}

fn not_finite(world: &World) {
    let group = world.group();
    let mut params = weights();
    let mut state = Zero1::new(&config(), LEN, &group, &vectors());
    let mut grads = exact(0);
    if world.rank == world.size - 1 {
        grads[5000] = f32::NAN;
    }
    let error = state.step(&mut params, &mut grads, &group, 1e-2, GradientOrder::Fixed).expect_err("NaN");
    assert!(error.message.contains("not finite"), "{error}");
    assert_eq!((bits(&params), state.updates), (bits(&weights()), 0));
}
