//! Flat runs: parameters, gradients, moments and activations as one row of values.

use super::{BOUNDS, Pair, VALUES, Wide, bits, get, has_room, holds, only, put};
use crate::device;
use rlhf_hpc::device::cuda::adamw::{self, Decays, Update};
use rlhf_hpc::device::cuda::rank_sum::{self, Parts};
use rlhf_hpc::device::cuda::{Memory, copy, norm, swiglu};
use rlhf_hpc::dtype::DType::{self, Bf16, F32};

/// Values of a block.
const EACH: usize = 2048;

fn flat(what: &str, dtypes: &[DType], work: impl Fn(&mut [Memory])) {
    let tensors: Vec<Wide> = dtypes.iter().map(|dtype| (*dtype, 1)).collect();
    holds(what, &tensors, VALUES, EACH, |x, _| work(x));
}

#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn far_values_are_added_and_cast() {
    flat("add", &[F32, F32], |x| {
        let (from, to) = x.split_at_mut(1);
        copy::add(from[0].view(F32), to[0].view_mut(F32));
    });
    for (from_dtype, to_dtype) in [(F32, Bf16), (Bf16, F32), (Bf16, Bf16), (F32, F32)] {
        flat("cast", &[from_dtype, to_dtype], |x| {
            let (from, to) = x.split_at_mut(1);
            copy::cast(from[0].view(from_dtype), to[0].view_mut(to_dtype));
        });
    }
}

#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn far_activations_are_gated() {
    flat("swiglu", &[Bf16; 3], |x| {
        let (from, to) = x.split_at_mut(2);
        swiglu::forward(from[0].view(Bf16), from[1].view(Bf16), to[0].view_mut(Bf16));
    });
    flat("swiglu backward", &[Bf16; 5], |x| {
        let (from, to) = x.split_at_mut(3);
        let [gate, up, dy] = [0, 1, 2].map(|i| from[i].view(Bf16));
        let (dgate, dup) = to.split_at_mut(1);
        swiglu::backward(gate, up, dy, dgate[0].view_mut(Bf16), dup[0].view_mut(Bf16));
    });
}

/// Two parts with other decays meet at a bound.
#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn far_parameters_are_updated_with_the_decay_of_their_part() {
    let update = Update { lr: 3e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, bias1: 0.19, bias2: 0.1, grad_scale: 0.7 };
    flat("adamw", &[F32, F32, F32, F32, Bf16], |x| {
        let len = x[0].bytes() / 4;
        // Of the small tensors, the blocks before the bound are all before it but the last five.
        let end = if len == VALUES { BOUNDS[1] } else { len.div_ceil(EACH).saturating_sub(4) * EACH };
        let decays = Decays::of(&[(end, 0.1), (len, 0.7)]);
        let [p, g, m, v, w] = x else { unreachable!("five tensors") };
        let [p, m, v] = [p, m, v].map(|x| x.view_mut(F32));
        adamw::step(p, g.view(F32), m, v, w.view_mut(Bf16), &decays, &update);
    });
}

#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn far_squares_are_summed_into_their_places() {
    const BLOCK: usize = 4096;
    let (_gpu, _one) = device();
    let Some(pair) = Pair::new(&[(F32, 1)], VALUES, 8 * BLOCK) else { return };
    let mut sums = Memory::zeros(8 * (3 + VALUES.div_ceil(BLOCK)));
    only(&pair.numbers(8 * BLOCK), || norm::sums_into(pair.far[0].view(F32), BLOCK, &mut sums, 3));
    let near = norm::sums_of_squares(pair.near[0].view(F32), BLOCK);
    let all: Vec<f64> = sums.read(3 + VALUES.div_ceil(BLOCK));
    let places = pair.groups.iter().flat_map(|(first, n)| (first / BLOCK)..(first + n).div_ceil(BLOCK));
    let far: Vec<f64> = places.map(|place| all[3 + place]).collect();
    assert!(far == near && far.iter().all(|sum| *sum > 0.0));
}

/// The parts of other ranks lie a stride apart, the last of them beyond all bounds.
#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn far_parts_of_ranks_are_summed() {
    const RANKS: usize = 4;
    const LEN: usize = (1 << 30) + 5 * EACH;
    let (_gpu, _one) = device();
    let blocks = [0, (1 << 30) / EACH - 1, (1 << 30) / EACH, LEN / EACH - 1];
    for (dtype, in_tree) in [(F32, false), (Bf16, false), (F32, true)] {
        if !has_room((RANKS + 1) * LEN * dtype.bytes()) {
            return;
        }
        let len = blocks.len() * EACH;
        let values = |seed| bits(dtype, &crate::numbers(seed, len));
        let window = EACH * dtype.bytes();
        let (mut x, mut parts) = (Memory::scratch(LEN * dtype.bytes()), Memory::scratch(RANKS * LEN * dtype.bytes()));
        for (i, block) in blocks.iter().enumerate() {
            put(&mut x, dtype, block * EACH, &values(9)[i * window..][..window]);
            for rank in 0..RANKS {
                put(&mut parts, dtype, rank * LEN + block * EACH, &values(rank as u32)[i * window..][..window]);
            }
        }
        let (mut near, all) =
            (Memory::of(&values(9)), Memory::of(&(0..RANKS as u32).map(values).collect::<Vec<_>>().concat()));
        let sum = |x: &mut Memory, parts: &Memory, stride| {
            let parts = Parts { values: parts.view(dtype), stride, rank: 1, ranks: RANKS };
            let x = x.view_mut(dtype);
            if in_tree { rank_sum::in_tree(parts, x) } else { rank_sum::in_order(parts, x) }
        };
        // A thread of the tree has one value.
        let chosen: Vec<usize> =
            if in_tree { blocks.iter().flat_map(|b| 8 * b..8 * b + 8).collect() } else { blocks.to_vec() };
        only(&chosen, || sum(&mut x, &parts, LEN));
        sum(&mut near, &all, len);
        for (i, block) in blocks.iter().enumerate() {
            let (far, near) = (get(x.view(dtype), block * EACH, EACH), get(near.view(dtype), i * EACH, EACH));
            assert_eq!(far, near, "{dtype:?}, block {block}");
        }
    }
}
