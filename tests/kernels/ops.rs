//! Operations on rows of values that bf16 can represent, compared with the same calls on the CPU. tests/ops compares
//! those with f64.

use crate::{device, in_every_order, numbers, rounded};
use rlhf_hpc::device::Device;
use rlhf_hpc::ops::glu::{self, Activation};
use rlhf_hpc::ops::rope::{RopeTable, Rotation};
use rlhf_hpc::ops::{columns, embedding, residual, rmsnorm, rope, row_gate, value_head};
use rlhf_hpc::tensor::{DType, Indices, Layout, Tensor, Weight, WeightMut};
use std::ops::Range;

/// One rounding to bf16, by up to 2^-8, of a value that f32 arithmetic left within 2^-17 of the true one.
const BF16: f64 = 1.0 / 256.0 + 1.0 / 131_072.0;
/// A few roundings of f32.
const F32: f64 = 4e-7;

fn written(device: Device, rows: usize, width: usize, values: &[f32]) -> Tensor {
    Tensor::from_slice(rows, width, &rounded(values)).on(device, DType::Bf16)
}

/// Some rows of the numbers of a seed.
fn tensor(device: Device, seed: u32, rows: Range<usize>, width: usize) -> Tensor {
    written(device, rows.len(), width, &numbers(seed, rows.end * width)[rows.start * width..])
}

fn in_f32(device: Device, seed: u32, len: usize) -> Tensor {
    Tensor::from_slice(1, len, &numbers(seed, len)).on(device, DType::F32)
}

/// Compares the results of `run` on the GPU, which are returned, with those on the CPU. Each result has a name and the
/// largest error of a value, relative to itself, or absolute if it is small.
fn compare_with_cpu<const N: usize>(
    what: &str,
    bounds: [(&str, f64, f64); N],
    run: impl Fn(Device) -> [Tensor; N],
) -> [Vec<f32>; N] {
    let [got, want] = [Device::Cuda, Device::Cpu].map(|device| run(device).map(|x| x.to_host()));
    for ((name, relative, absolute), (got, want)) in bounds.into_iter().zip(got.iter().zip(&want)) {
        assert_eq!(got.len(), want.len(), "{what}: {name}");
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            let error = (f64::from(*got) - f64::from(*want)).abs();
            // NaN fails.
            let is_near = error <= relative * f64::from(want.abs()) + absolute;
            assert!(is_near, "{what}: {name}[{i}] is {got}, needs {want}");
        }
    }
    got
}

/// Asserts that a row has the same bits alone and among others. `run` computes some rows on the GPU.
fn is_apart<const N: usize>(rows: usize, run: impl Fn(Range<usize>) -> [Tensor; N]) {
    let at = rows.saturating_sub(2);
    for (all, alone) in run(0..rows).iter().zip(run(at..at + rows.min(1))) {
        let (all, alone) = (all.to_host(), alone.to_host());
        assert_eq!(alone, all[at * alone.len()..][..alone.len()], "row {at} of {rows}");
    }
}

const EPS: f32 = 1e-6;
const OFFSET: f32 = 1.0;
const WIDTHS: [usize; 11] = [8, 24, 64, 96, 128, 256, 264, 1000, 2056, 4096, 8200];

/// rstd, y, dx and dw of `groups` groups of `n`; the gradients are added to what was there.
fn norms(groups: usize, n: usize) -> [Vec<f32>; 4] {
    // Terms of up to 4 may cancel, and their f32 rounding errors remain.
    let of_dw = ("dw", 1e-6, 2e-7 * (groups as f64 + 8.0));
    let bounds = [("rstd", F32, 0.0), ("y", BF16, 0.0), ("dx", BF16, 2e-6), of_dw];
    compare_with_cpu(&format!("norm of {groups} groups of {n}"), bounds, |device| {
        let [x, dy, mut dx] = [3, 7, 8].map(|seed| tensor(device, seed, 0..groups, n));
        let (w, mut dw) = (tensor(device, 4, 0..1, n), in_f32(device, 9, n));
        let [y, rstd] = normed(&x, &w);
        rmsnorm::backward(&x, w.slice(), OFFSET, &rstd, &dy, &mut dx, dw.slice_mut());
        [rstd, y, dx, dw]
    })
}

fn normed(x: &Tensor, w: &Tensor) -> [Tensor; 2] {
    let (mut y, mut rstd) = (x.as_wide(x.rows()), x.statistics(x.rows(), 1));
    rmsnorm::forward(x, w.slice(), OFFSET, EPS, &mut y, &mut rstd);
    [y, rstd]
}

#[test]
fn groups_of_every_width_are_normalised_as_on_the_cpu_with_equal_bits_in_every_order() {
    let first = std::cell::OnceCell::new();
    in_every_order(|| {
        // Enough short groups for several blocks.
        let groups = |n| [0, 1, 3, if n <= 256 { 150 } else { 19 }];
        let shapes = WIDTHS.into_iter().flat_map(|n| groups(n).map(|groups| (groups, n)));
        let bits = shapes.map(|(groups, n)| {
            let w = tensor(Device::Cuda, 4, 0..1, n);
            is_apart(groups, |rows| normed(&tensor(Device::Cuda, 3, rows, n), &w));
            norms(groups, n)
        });
        let bits: Vec<_> = bits.collect();
        assert!(*first.get_or_init(|| bits.clone()) == bits, "another order, other bits");
    });
    // More groups than one round of blocks takes at a time.
    let (_gpu, _one) = device();
    norms(4000, 16);
}

fn positions(rows: Range<usize>) -> Vec<u32> {
    rows.map(|row| (row * 7 % 50) as u32).collect()
}

fn table(e: usize) -> RopeTable {
    let frequencies: Vec<f32> = (0..e / 2).map(|i| 10f32.powf(-(i as f32) / 4.0)).collect();
    RopeTable::whole(&frequencies, 1.0, 64)
}

#[test]
fn queries_are_also_multiplied_by_the_factor_of_their_position() {
    in_every_order(|| {
        for (t, heads, kv_heads) in [(1, 1, 1), (30, 5, 2)] {
            let what = format!("{t} rows, {heads} and {kv_heads} heads");
            compare_with_cpu(&what, ["q", "k", "q back", "k back"].map(|name| (name, BF16, 3e-7)), |device| {
                let rotation = Rotation {
                    axes: Vec::new(),
                    head_dim: 64,
                    inverse_frequencies: (0..32).map(|i| 10f32.powf(-(i as f32) / 4.0)).collect(),
                    attention_factor: 1.0,
                    query_scale: Some((0.5, 8.0)),
                };
                let (table, positions) = (RopeTable::new(rotation, 64), positions(0..t));
                let at = Indices::on(device, &positions);
                let [[mut q, mut k], [mut dq, mut dk]] =
                    [(); 2].map(|()| [(1, heads), (2, kv_heads)].map(|(s, h)| tensor(device, s, 0..t, h * 64)));
                rope::forward(&mut q, &mut k, &at, &table);
                rope::backward(&mut dq, &mut dk, &at, &table);
                [q, k, dq, dk]
            });
        }
    });
}

#[test]
fn rope_rotates_every_head_by_its_position_regardless_of_other_rows() {
    in_every_order(|| {
        for e in [16, 64, 80, 96, 128, 256] {
            for (t, heads, kv_heads) in [(0, 4, 1), (1, 1, 1), (3, 4, 4), (9, 5, 1), (30, 6, 2)] {
                // Two products of up to 1 may cancel.
                let what = format!("{t} rows, {heads} and {kv_heads} heads of {e}");
                compare_with_cpu(&what, ["q", "k", "q back", "k back"].map(|name| (name, BF16, 2e-7)), |device| {
                    let (table, positions) = (table(e), positions(0..t));
                    let at = Indices::on(device, &positions);
                    let [[mut q, mut k], [mut dq, mut dk]] =
                        [(); 2].map(|()| [(1, heads), (2, kv_heads)].map(|(s, h)| tensor(device, s, 0..t, h * e)));
                    rope::forward(&mut q, &mut k, &at, &table);
                    rope::backward(&mut dq, &mut dk, &at, &table);
                    [q, k, dq, dk]
                });
            }
        }
        is_apart(30, |rows| {
            let [mut q, mut k] = [1, 2].map(|seed| tensor(Device::Cuda, seed, rows.clone(), 3 * 64));
            rope::forward(&mut q, &mut k, &Indices::on(Device::Cuda, &positions(rows)), &table(64));
            [q, k]
        });
    });
}

/// Gates between -20 and 20, and some where the exponential leaves the range of f32.
fn gates(len: usize) -> Vec<f32> {
    let far = [-200.0, 200.0, -90.0, 88.0, 0.0];
    let near = numbers(1, len).into_iter().map(|x| 20.0 * x);
    near.enumerate().map(|(i, x)| if i % 7 == 3 { far[i / 7 % far.len()] } else { x }).collect()
}

#[test]
fn the_glu_and_its_gradients_equal_the_cpus() {
    in_every_order(|| {
        let activations = [Activation::Silu, Activation::GeluTanh, Activation::Sigmoid];
        let lens = [0, 8, 24, 96, 3000, 2 * 4096];
        for (len, of) in lens.into_iter().flat_map(|len| activations.map(|of| (len, of))) {
            // What is less than the smallest normal f32 may be 0. Where gate is about -1.28 the two terms of dgate
            // cancel.
            // The exponent of GELU's is rounded, so its tails differ.
            let slope = match of {
                Activation::Silu => 1e-7,
                Activation::GeluTanh => 1e-5,
                // 1 - s cancels.
                _ => 3e-7,
            };
            let bounds = [("y", BF16, 1e-36), ("dgate", BF16, slope), ("dup", BF16, 1e-36)];
            compare_with_cpu(&format!("{len} gates of {of:?}"), bounds, |device| {
                let [up, dy] = [2, 3].map(|seed| tensor(device, seed, 0..1, len));
                let gate = written(device, 1, len, &gates(len));
                let [mut y, mut dgate, mut dup] = [(); 3].map(|()| gate.as_wide(1));
                glu::forward(of, &gate, &up, &mut y);
                glu::backward(of, &gate, &up, &dy, &mut dgate, &mut dup);
                [y, dgate, dup]
            });
        }
    });
}

#[test]
fn gates_of_rows_and_their_gradients_equal_the_cpus_and_rows_are_independent() {
    let gated = |device: Device, rows: Range<usize>, f: usize| {
        let x = tensor(device, 1, rows.clone(), f);
        let logits: Vec<f32> = gates(rows.end)[rows].to_vec();
        let mut gate = x.statistics(x.rows(), 1);
        match device {
            Device::Cpu => gate.data_mut().copy_from_slice(&logits),
            Device::Cuda => gate.cuda_mut().write(&logits),
        }
        let (mut y, mut dx) = (x.as_wide(x.rows()), tensor(device, 2, 0..x.rows(), f));
        row_gate::forward(&gate, &x, &mut y);
        let dgate = row_gate::backward(&gate, &x, &mut dx);
        [y, dx, dgate]
    };
    in_every_order(|| {
        for (t, f) in [(0, 8), (1, 8), (9, 264), (40, 1000), (3, 4096)] {
            let of_gate = ("dgate", 2e-6, 1e-7 * (f as f64).sqrt());
            compare_with_cpu(
                &format!("{t} rows of {f}"),
                [("y", BF16, 1e-36), ("dx", BF16, 1e-36), of_gate],
                |device| gated(device, 0..t, f),
            );
        }
        is_apart(20, |rows| {
            let [y, ..] = gated(Device::Cuda, rows, 264);
            [y]
        });
    });
}

#[test]
fn the_logits_of_a_gate_and_their_gradients_are_the_sums_of_their_products() {
    in_every_order(|| {
        let (t, d) = (19, 264);
        let [n, w, of_n, of_w] = [(1, t * d), (2, d), (3, t * d), (4, d)].map(|(seed, len)| numbers(seed, len));
        let [n, w, of_n] = [n, w, of_n].map(|x| rounded(&x));
        let on_gpu = |rows: usize, values: &[f32]| written(Device::Cuda, rows, d, values);
        let (on, of, layout) = (on_gpu(t, &n), on_gpu(1, &w), Layout::Row);
        let of = Weight { n: 1, k: d, layout, values: of.slice() };
        let g = row_gate::logits(&on, of.into());
        let (mut dn, mut dw) = (on_gpu(t, &of_n), in_f32(Device::Cuda, 4, d));
        let gradient = WeightMut { n: 1, k: d, layout, values: dw.slice_mut() };
        row_gate::backward_logits(&on, of, &g, &mut dn, Some(gradient), DType::F32);
        let ([g, dn, dw], mut want) = ([g, dn, dw].map(|x| x.to_host()), of_w.clone());
        for (row, (n, g)) in n.chunks(d).zip(&g).enumerate() {
            let product: f64 = n.iter().zip(&w).map(|(n, w)| f64::from(*n) * f64::from(*w)).sum();
            assert!((f64::from(*g) - product).abs() < 1e-5, "row {row}: {g}, needs {product}");
            for i in 0..d {
                let (got, want) = (dn[row * d + i], of_n[row * d + i] + g * w[i]);
                // The product and the sum are rounded.
                let within = (want.abs() + (g * w[i]).abs()) / 256.0 + 1e-6;
                assert!((got - want).abs() <= within, "dn {row} {i}: {got}, needs {want}");
            }
            want.iter_mut().zip(n).for_each(|(want, n)| *want += g * n);
        }
        let near = dw.iter().zip(&want).all(|(got, want)| (got - want).abs() < 2e-5 * (1.0 + want.abs()));
        assert!(near, "dw");
    });
}

#[test]
fn halves_of_heads_are_taken_apart_and_joined() {
    in_every_order(|| {
        for (t, heads, e) in [(0, 2, 32), (1, 1, 8), (7, 3, 80), (20, 4, 12)] {
            let what = format!("{t} rows of {heads} heads of {e}");
            compare_with_cpu(&what, ["first", "last", "joined"].map(|name| (name, 0.0, 0.0)), |device| {
                let [first, last] = columns::split(&tensor(device, 1, 0..t, heads * 2 * e), e);
                let joined = columns::join([&first, &last], e);
                [first, last, joined]
            });
        }
    });
}

#[test]
fn scaled_sums_are_rounded_once() {
    in_every_order(|| {
        for len in [0, 1, 8, 13, 3000] {
            compare_with_cpu(&format!("{len} values"), [("y", BF16, 1e-7)], |device| {
                let [x, mut y] = [1, 2].map(|seed| tensor(device, seed, 0..1, len));
                residual::add(0.3, &x, &mut y);
                [y]
            });
        }
    });
}

fn predicted(h: &Tensor, w: &Tensor) -> Tensor {
    let mut values = h.statistics(h.rows(), 1);
    value_head::forward(h, w.slice(), values.slice_mut());
    values
}

#[test]
fn values_and_their_gradients_equal_the_cpus_and_rows_are_independent() {
    in_every_order(|| {
        for (d, t) in [(8, 300), (24, 17), (64, 0), (96, 3), (1000, 40), (4096, 1), (4096, 20)] {
            // Sums of at most d / 32 terms below 1, and five more additions.
            let of_values = ("values", 1e-6, 6e-8 * (d as f64 / 32.0 + 8.0).powf(1.5));
            let of_dw = ("dw", 1e-6, 6e-8 * (16.0 + t as f64 / 16.0));
            compare_with_cpu(&format!("{t} rows of {d}"), [of_values, ("dh", BF16, 0.0), of_dw], |device| {
                let (h, w) = (tensor(device, 1, 0..t, d), tensor(device, 2, 0..1, d));
                let (mut dh, mut dw) = (h.as_wide(t), in_f32(device, 4, d));
                value_head::backward(&h, w.slice(), &numbers(3, t), &mut dh, dw.slice_mut());
                [predicted(&h, &w), dh, dw]
            });
        }
        let w = tensor(Device::Cuda, 2, 0..1, 1000);
        is_apart(20, |rows| [predicted(&tensor(Device::Cuda, 1, rows, 1000), &w)]);
    });
}

/// Rows of a vocabulary. Some occur often and some never.
const V: usize = 37;

/// Sums in f32, one row after another: the order is guaranteed.
#[test]
fn embedding_rows_are_copied_or_zero_for_other_ranks_and_gradients_are_summed_in_row_order() {
    in_every_order(|| {
        for (d, t) in [(8, 300), (24, 3), (64, 0), (96, 20), (1000, 1), (1000, 40), (4096, 9)] {
            for (first, n) in [(0, V), (5, 20)] {
                let tokens: Vec<u32> = (0..t as u32).map(|i| if i % 3 == 0 { 5 } else { i * 11 % V as u32 }).collect();
                let what = format!("{t} tokens of width {d}, rows {first} to {}", first + n);
                compare_with_cpu(&what, ["y", "dw"].map(|name| (name, 0.0, 0.0)), |device| {
                    let (w, dy) = (tensor(device, 1, first..first + n, d), tensor(device, 2, 0..t, d));
                    let (mut y, mut dw, layout) = (dy.as_wide(t), in_f32(device, 3, n * d), Layout::Row);
                    let part = Weight { n, k: d, layout, values: w.slice() };
                    embedding::forward_part(&Indices::on(device, &tokens), first, part, &mut y);
                    let part = WeightMut { n, k: d, layout, values: dw.slice_mut() };
                    embedding::backward_part(&tokens, first, &dy, part);
                    [y, dw]
                });
            }
        }
    });
}
