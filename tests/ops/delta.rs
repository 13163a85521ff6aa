//! The gated delta rule and its convolution against naive f64 loops, their backwards against finite differences, and rows
//! in parts against whole rows.

use crate::ops::probe::Numbers;
use rlhf_hpc::device::Device;
use rlhf_hpc::ops::attention::{Paged, PagedSequence};
use rlhf_hpc::ops::delta::{self, DeltaShape, StateLayer, States};
use rlhf_hpc::tensor::Tensor;

/// Heads that share keys; columns that fill a part of a block, or more than one.
const SHAPES: [DeltaShape; 3] = [
    DeltaShape { key_heads: 2, value_heads: 4, key_dim: 5, value_dim: 3 },
    DeltaShape { key_heads: 1, value_heads: 1, key_dim: 7, value_dim: 37 },
    DeltaShape { key_heads: 3, value_heads: 3, key_dim: 33, value_dim: 32 },
];
/// Ends of rows: one token, and more than a chunk of the backward.
const ROWS: [usize; 4] = [0, 1, 8, 79];

/// q, k, v, decay in (0, 1) and rate in (0, 1).
fn inputs(shape: &DeltaShape, numbers: &mut Numbers) -> [Tensor; 5] {
    let t = ROWS[ROWS.len() - 1];
    let (keys, values) = (shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim);
    let length = 1.0 / (shape.key_dim as f32).sqrt();
    let mut scaled = |width: usize, scale: f32, offset: f32| {
        let data: Vec<f32> = numbers.vec(t * width).into_iter().map(|x| x * scale + offset).collect();
        Tensor::from_slice(t, width, &data)
    };
    [
        scaled(keys, length, 0.0),
        scaled(keys, length, 0.0),
        scaled(values, 1.0, 0.0),
        scaled(shape.value_heads, 0.4, 0.55),
        scaled(shape.value_heads, 0.4, 0.5),
    ]
}

/// S_t = a S_(t-1) + k (b (v - a S_(t-1)^T k))^T, o = S_t^T q, in f64.
fn naive(x: &[Vec<f64>; 5], shape: &DeltaShape) -> Vec<f64> {
    let DeltaShape { key_heads, value_heads, key_dim, value_dim } = *shape;
    let mut o = vec![0.0; x[2].len()];
    for row in ROWS.windows(2) {
        for h in 0..value_heads {
            let mut s = vec![0.0; key_dim * value_dim];
            for t in row[0]..row[1] {
                let keys = (t * key_heads + h * key_heads / value_heads) * key_dim;
                let (q, k) = (&x[0][keys..keys + key_dim], &x[1][keys..keys + key_dim]);
                let at = (t * value_heads + h) * value_dim;
                let (a, b) = (x[3][t * value_heads + h], x[4][t * value_heads + h]);
                for c in 0..value_dim {
                    let known: f64 = (0..key_dim).map(|i| a * s[i * value_dim + c] * k[i]).sum();
                    let u = b * (x[2][at + c] - known);
                    (0..key_dim).for_each(|i| s[i * value_dim + c] = a * s[i * value_dim + c] + k[i] * u);
                    o[at + c] = (0..key_dim).map(|i| s[i * value_dim + c] * q[i]).sum();
                }
            }
        }
    }
    o
}

fn wide(x: &Tensor) -> Vec<f64> {
    x.data().iter().map(|&x| f64::from(x)).collect()
}

#[test]
fn the_delta_rule_equals_a_naive_loop_and_its_slopes_finite_differences() {
    for (i, shape) in SHAPES.iter().enumerate() {
        let mut numbers = Numbers::new(40 + i as u64);
        let x = inputs(shape, &mut numbers);
        let o = delta::forward(x.each_ref(), shape, &mut States::whole(&ROWS), 0);
        let exact = x.each_ref().map(wide);
        let apart = o.data().iter().zip(naive(&exact, shape)).map(|(o, e)| (f64::from(*o) - e).abs());
        assert!(apart.fold(0.0, f64::max) < 1e-5, "{shape:?}");
        let d_o = numbers.tensor(o.rows(), o.width());
        let slopes = delta::backward(x.each_ref(), shape, &States::whole(&ROWS), &d_o);
        let loss =
            |x: &[Vec<f64>; 5]| -> f64 { naive(x, shape).iter().zip(d_o.data()).map(|(o, d)| o * f64::from(*d)).sum() };
        for (input, slope) in slopes.iter().enumerate() {
            for at in (0..slope.data().len()).step_by(slope.data().len().div_ceil(23)) {
                let moved = |by: f64| {
                    let mut x = exact.clone();
                    x[input][at] += by;
                    loss(&x)
                };
                let difference = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                let (slope, size) = (f64::from(slope.data()[at]), difference.abs().max(1.0));
                assert!((slope - difference).abs() < 2e-5 * size, "{shape:?} {input} {at}: {slope} {difference}");
            }
        }
    }
}

#[test]
fn a_row_in_parts_has_the_bits_of_the_whole_row_for_any_cuts() {
    const TAPS: usize = 4;
    for (i, shape) in SHAPES.iter().enumerate() {
        let mut numbers = Numbers::new(50 + i as u64);
        let x = inputs(shape, &mut numbers);
        let width = x[2].width();
        let taps = numbers.vec(width * TAPS);
        // Both read the same rows; a page has the inputs of the convolution and then the state.
        let (kept, whole) = ((TAPS - 1) * width, [0, x[2].rows()]);
        let both = |x: &[Tensor; 5], states: &mut States| {
            let mut y = x[2].like(x[2].rows(), width);
            delta::conv_forward(&x[2], &taps[..], states, 0, &mut y);
            [y, delta::forward(x.each_ref(), shape, states, kept)]
        };
        let expected = both(&x, &mut States::whole(&whole));
        for cuts in [vec![1], vec![2, 3, 70], vec![32, 64], (1..79).collect()] {
            let mut cache = StateLayer::new(Device::Cpu, 3, kept + shape.state_len());
            let mut start = 0;
            for end in cuts.into_iter().chain([whole[1]]) {
                let part = x
                    .each_ref()
                    .map(|x| Tensor::from_slice(end - start, x.width(), &x.data()[start * x.width()..end * x.width()]));
                let sequence = [PagedSequence { past: start, tokens: end - start, blocks: &[0, 2] }];
                let paged: Paged = sequence.as_slice().into();
                let got = both(&part, &mut States::cached(&mut cache, &paged));
                for (got, expected) in got.iter().zip(&expected) {
                    assert_eq!(got.data(), &expected.data()[start * width..end * width], "{shape:?} at {start}");
                }
                start = end;
            }
        }
    }
}

#[test]
fn the_convolution_equals_a_naive_loop_and_its_slopes_finite_differences() {
    let (mut numbers, taps, channels) = (Numbers::new(60), 3, 5);
    let x = numbers.tensor(ROWS[ROWS.len() - 1], channels);
    let w = numbers.vec(channels * taps);
    let naive = |x: &[f64], w: &[f64]| -> Vec<f64> {
        let mut y = vec![0.0; x.len()];
        for row in ROWS.windows(2) {
            for (t, c) in (row[0]..row[1]).flat_map(|t| (0..channels).map(move |c| (t, c))) {
                let from = |j: usize| (t + j + 1).checked_sub(taps).filter(|at| *at >= row[0]);
                let sum: f64 = (0..taps).filter_map(|j| Some(w[c * taps + j] * x[from(j)? * channels + c])).sum();
                y[t * channels + c] = sum / (1.0 + (-sum).exp());
            }
        }
        y
    };
    let mut y = x.like(x.rows(), channels);
    delta::conv_forward(&x, &w[..], &mut States::whole(&ROWS), 0, &mut y);
    let (wide_x, wide_w) = (wide(&x), w.iter().map(|&w| f64::from(w)).collect::<Vec<_>>());
    let apart = y.data().iter().zip(naive(&wide_x, &wide_w)).map(|(y, e)| (f64::from(*y) - e).abs());
    assert!(apart.fold(0.0, f64::max) < 1e-6);
    let dy = numbers.tensor(x.rows(), channels);
    let mut dw = vec![0.5; w.len()];
    let dx = delta::conv_backward(&x, &w[..], &States::whole(&ROWS), dy.clone(), &mut dw[..]);
    let loss =
        |x: &[f64], w: &[f64]| -> f64 { naive(x, w).iter().zip(dy.data()).map(|(y, d)| y * f64::from(*d)).sum() };
    let slope_at = |values: &[f64], at: usize, loss: &dyn Fn(&[f64]) -> f64| {
        let moved = |by: f64| {
            let mut values = values.to_vec();
            values[at] += by;
            loss(&values)
        };
        (moved(1e-5) - moved(-1e-5)) / 2e-5
    };
    for at in 0..dx.data().len() {
        let exact = slope_at(&wide_x, at, &|x| loss(x, &wide_w));
        assert!((f64::from(dx.data()[at]) - exact).abs() < 1e-5, "dx {at}");
    }
    for (at, dw) in dw.iter().enumerate() {
        let exact = slope_at(&wide_w, at, &|w| loss(&wide_x, w));
        assert!((f64::from(dw - 0.5) - exact).abs() < 2e-5, "dw {at}");
    }
}
