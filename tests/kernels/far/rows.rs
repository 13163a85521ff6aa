//! Flat runs of values, rows of activations and of embeddings. Logits never lie far: heads are computed in
//! chunks of 256 MiB; nor do parts of ranks, which are summed in pieces.

use super::{BOUNDS, Pair, Rows, VALUES, assert_same_bits, assert_same_bits_of, only, small};
use crate::{device, numbers};
use rlhf_hpc::device::cuda::adamw::{self, Decays, Update};
use rlhf_hpc::device::cuda::rope::{self, Table};
use rlhf_hpc::device::cuda::{Arg, Memory, ScatterLists, copy, embedding, glu, gpu, norm, rmsnorm, value_head};
use rlhf_hpc::dtype::DType::{self, Bf16, F32};
use rlhf_hpc::ops::glu::Activation;

/// Values of a block of a flat run.
const EACH: usize = 2048;
/// Values whose squares are one sum.
const SQUARES: usize = 4096;
/// The width of a model of 70 billion parameters, and rows of it beyond all bounds.
const WIDTH: usize = 8192;
const ROWS: usize = (1 << 32) / WIDTH + 5;
const HEAD: usize = 128;

fn flat<const N: usize>(what: &str, dtypes: [DType; N], work: impl Fn(&mut [Memory; N])) {
    assert_same_bits(what, dtypes.map(|dtype| (dtype, 1)), VALUES, EACH, |x, _| work(x));
}

#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn far_values_are_added_cast_and_gated() {
    flat("add", [F32, F32], |[from, to]| copy::add(from.view(F32), to.view_mut(F32)));
    for (from_dtype, to_dtype) in [(F32, Bf16), (Bf16, F32), (Bf16, Bf16), (F32, F32)] {
        flat("cast", [from_dtype, to_dtype], |[from, to]| copy::cast(from.view(from_dtype), to.view_mut(to_dtype)));
    }
    flat("swiglu", [Bf16; 3], |[gate, up, y]| {
        glu::forward(Activation::Silu, gate.view(Bf16), up.view(Bf16), y.view_mut(Bf16));
    });
    flat("swiglu backward", [Bf16; 5], |[gate, up, dy, dgate, dup]| {
        let [gate, up, dy] = [gate, up, dy].map(|x| x.view(Bf16));
        glu::backward(Activation::Silu, gate, up, dy, dgate.view_mut(Bf16), dup.view_mut(Bf16));
    });
}

/// Two parts with different decays meet at a bound.
#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn far_parameters_are_updated_with_the_decay_of_their_part_and_their_squares_are_summed() {
    let update = Update { lr: 3e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, bias1: 0.19, bias2: 0.1, grad_scale: 0.7 };
    flat("adamw", [F32, F32, F32, F32, Bf16], |[p, g, m, v, w]| {
        let len = p.bytes() / 4;
        // In a small tensor, the decay changes before its last blocks, which are those beyond the bound.
        let end = if len == VALUES { BOUNDS[1] } else { len.div_ceil(EACH).saturating_sub(4) * EACH };
        let decays = Decays::from_parts(&[(end, 0.1), (len, 0.7)]);
        let [p, m, v] = [p, m, v].map(|x| x.view_mut(F32));
        adamw::step(p, g.view(F32), m, v, w.view_mut(Bf16), &decays, &update);
    });
    let (_gpu, _one) = device();
    let Some(pair) = Pair::new([(F32, 1)], VALUES, 8 * SQUARES) else { return };
    let mut sums = Memory::zeros(8 * (3 + VALUES.div_ceil(SQUARES)));
    only(&pair.numbers(8 * SQUARES), || norm::sums_into(pair.far[0].view(F32), SQUARES, &mut sums, 3));
    let blocks = (pair.near[0].bytes() / 4).div_ceil(SQUARES);
    let mut of_near = Memory::zeros(8 * blocks);
    norm::sums_into(pair.near[0].view(F32), SQUARES, &mut of_near, 0);
    let near: Vec<f64> = of_near.read(blocks);
    let all: Vec<f64> = sums.read(3 + VALUES.div_ceil(SQUARES));
    let places = pair.groups.iter().flat_map(|(first, n)| (first / SQUARES)..(first + n).div_ceil(SQUARES));
    let far: Vec<f64> = places.map(|place| all[3 + place]).collect();
    assert!(far == near && far.iter().all(|sum| *sum > 0.0));
}

#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn far_groups_are_normalised_forward_and_backward() {
    // (values of a group, groups, groups of a block). The last case has more than 2^32 threads.
    let heads = (1 << 32) / HEAD + 37;
    for (n, groups, each) in [(WIDTH, ROWS, 1), (HEAD, heads, 16), (256, (1 << 27) + 8, 8)] {
        assert_same_bits("rmsnorm", [(Bf16, n), (Bf16, n), (F32, 1)], groups, each, |[x, y, rstd], _| {
            let w = small(9, n);
            rmsnorm::forward(x.view(Bf16), w.view(Bf16), [0.0, 1e-6], y.view_mut(Bf16), rstd.view_mut(F32));
        });
    }
    // Few groups per block, otherwise a block would process thousands.
    for (kernel, n, groups, each) in [
        ("rmsnorm_backward_2", WIDTH, ROWS, 8),
        ("rmsnorm_backward_4", 2 * WIDTH, ROWS / 2 + 3, 8),
        ("rmsnorm_backward_narrow", HEAD, heads, 64),
    ] {
        assert_same_bits(
            kernel,
            [(Bf16, n), (F32, 1), (Bf16, n), (Bf16, n)],
            groups,
            each,
            |[x, rstd, dy, dx], groups| {
                let (w, blocks) = (small(9, n), groups.len.div_ceil(each));
                let mut parts = Memory::scratch(4 * blocks * n);
                let (threads, shift) = if n == HEAD { (256, Some(Arg::U32(4))) } else { (512, None) };
                let mut args = vec![x.arg(), w.arg(), rstd.arg(), dy.arg(), dx.arg_mut(), parts.arg_mut()];
                args.extend([Arg::I32(n as i32), Arg::F32(1.0 / n as f32)]);
                args.extend(shift);
                args.extend([groups.len, each].map(|n| Arg::U32(n as u32)));
                gpu().launch(kernel, [blocks, 1, 1], threads, 0, &args);
            },
        );
    }
}

/// A block has two rows of 64 heads.
#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn rope_rotates_far_heads() {
    let tensors = [(Bf16, 60 * HEAD), (Bf16, 4 * HEAD)];
    let angles = numbers(5, 1000 * HEAD / 2);
    assert_same_bits("rope", tensors, (1 << 32) / (60 * HEAD) + 7, 2, |[q, k], rows| {
        let positions = Memory::from_values(&rows.map(|row| (row * 7 % 1000) as u32));
        let table = Table::new(HEAD, &angles, &angles, &[]);
        rope::rotate(q.view_mut(Bf16), k.view_mut(Bf16), rows.len, &positions, &table, false);
    });
}

#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn the_value_head_reads_far_rows_forward_and_backward() {
    const EACH: usize = 16;
    assert_same_bits("value head", [(Bf16, WIDTH), (F32, 1)], ROWS, 8, |[h, values], _| {
        value_head::forward(h.view(Bf16), small(9, WIDTH).view(Bf16), values.view_mut(F32));
    });
    let tensors = [(Bf16, WIDTH), (F32, 1), (Bf16, WIDTH)];
    let blocks = |group: usize| (0..4).map(|y| y * ROWS.div_ceil(EACH) + group).collect::<Vec<_>>();
    assert_same_bits_of("value head backward", tensors, ROWS, EACH, blocks, |[h, dvalues, dh], rows| {
        let (w, blocks) = (small(9, WIDTH), rows.len.div_ceil(EACH));
        let mut parts = Memory::scratch(4 * blocks * WIDTH);
        let mut args = vec![h.arg(), w.arg(), dvalues.arg(), dh.arg_mut(), parts.arg_mut()];
        args.extend([rows.len, WIDTH, EACH].map(|n| Arg::U32(n as u32)));
        gpu().launch("value_head_backward", [blocks, 4, 1], 256, 0, &args);
    });
}

/// Rows, each of which is fetched from where it lies to the same place of another tensor, and summed into it. Columns
/// of them, too, as a tensor rank has them of a matrix.
#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn far_rows_are_gathered_and_scattered() {
    // Each row has four blocks.
    let blocks = |row: usize| (4 * row..4 * row + 4).collect::<Vec<_>>();
    let all = |rows: Rows| Memory::from_values(&(0..rows.len as u32).collect::<Vec<_>>());
    assert_same_bits_of("gather", [(Bf16, WIDTH); 2], ROWS, 1, blocks, |[from, to], rows| {
        copy::gather(from.view(Bf16), WIDTH, &all(rows), to.view_mut(Bf16));
    });
    assert_same_bits_of("embedding", [(Bf16, WIDTH); 2], ROWS, 1, blocks, |[from, to], rows| {
        embedding::forward(&all(rows), 0, from.view(Bf16), WIDTH, to.view_mut(Bf16));
    });
    // Rows that are not checked have a token of another rank: the lists are short, and all their blocks run.
    assert_same_bits("sums of rows", [(Bf16, WIDTH), (F32, WIDTH), (Bf16, WIDTH)], ROWS, 1, |[dy, dw, sums], rows| {
        let is_met = |row: usize| !rows.is_far || rows.met.binary_search(&row).is_ok();
        let keys: Vec<u32> = (0..rows.len).map(|row| if is_met(row) { row as u32 } else { u32::MAX }).collect();
        embedding::backward(&ScatterLists::from_keys(&keys), 0, dy.view(Bf16), WIDTH, dw.view_mut(F32));
        let own = small(3, rows.met.len() * WIDTH);
        let keys: Vec<u32> = keys.into_iter().filter(|key| *key != u32::MAX).collect();
        copy::scatter(own.view(Bf16), WIDTH, &ScatterLists::from_keys(&keys), sums.view_mut(Bf16));
    });
    for (each, width) in [(8, 2048), (1, 256)] {
        let per_row = width / each / 256;
        let blocks = |row: usize| (row * per_row..(row + 1) * per_row).collect::<Vec<_>>();
        assert_same_bits_of("columns", [(Bf16, WIDTH), (F32, WIDTH)], ROWS, 1, blocks, |[from, to], rows| {
            let part = if each == 8 { 16 } else { 17 }..rows.len * WIDTH;
            let (from, to) = (from.view(Bf16).part(part.clone()), to.view_mut(F32).part(part));
            copy::columns(from, WIDTH, to, WIDTH, rows.len, width);
        });
    }
}
