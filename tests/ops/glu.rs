//! The gate against f64.

use super::probe::{assert_near, same_bits, same_on_threads_and_levels, tensor};
use rlhf_hpc::ops::glu::{Activation, backward, forward};
use rlhf_hpc::tensor::Tensor;

/// Limits that many gates and ups of the tests exceed.
const CLAMPED: Activation = Activation::ClampedSilu { alpha: 1.702, limit: 1.25 };
const ACTIVATIONS: [Activation; 4] = [Activation::Silu, Activation::GeluTanh, Activation::Sigmoid, CLAMPED];

/// The result in f64.
fn value(activation: Activation, x: f64, up: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()) * up,
        Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()) * up,
        Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh()) * up
        }
        Activation::ClampedSilu { alpha, limit } => {
            let (alpha, limit) = (f64::from(alpha), f64::from(limit));
            let x = x.min(limit);
            x / (1.0 + (-alpha * x).exp()) * (up.clamp(-limit, limit) + 1.0)
        }
    }
}

/// y, dgate, dup.
fn run(activation: Activation, gate: &Tensor, up: &Tensor, dy: &Tensor) -> [Tensor; 3] {
    let [mut y, mut dgate, mut dup] = [gate.clone(), gate.clone(), gate.clone()];
    forward(activation, gate, up, &mut y);
    backward(activation, gate, up, dy, &mut dgate, &mut dup);
    [y, dgate, dup]
}

#[test]
fn the_gate_equals_its_equation_and_its_gradients_are_finite_differences() {
    let shapes = [(1, 1), (3, 7), (16, 33), (64, 688)];
    for ((rows, width), activation) in shapes.into_iter().flat_map(|shape| ACTIVATIONS.map(|of| (shape, of))) {
        let [mut gate, mut up, dy] = [1, 2, 3].map(|seed| tensor(seed, rows, width, 3.0));
        // No finite difference reaches over a limit.
        let at_limit = |x: &&mut f32| (x.abs() - 1.25).abs() < 1e-3;
        gate.data_mut().iter_mut().chain(up.data_mut()).filter(at_limit).for_each(|x| *x *= 1.01);
        let value = |gate: f64, up: f64| value(activation, gate, up);
        let each = |f: &dyn Fn(f64, f64, f64) -> f64| -> Vec<f64> {
            let values = gate.data().iter().zip(up.data()).zip(dy.data());
            values.map(|((&g, &u), &d)| f(f64::from(g), f64::from(u), f64::from(d))).collect()
        };
        let step = 1e-5;
        // The argument of GELU's exponential is rounded.
        let tolerance = if activation == Activation::Silu { 1e-6 } else { 4e-6 };
        let [y, dgate, dup] = run(activation, &gate, &up, &dy);
        assert_near("y", y.data(), &each(&|g, u, _| value(g, u)), tolerance);
        let slope = each(&|g, u, d| d * (value(g + step, u) - value(g - step, u)) / (2.0 * step));
        assert_near("dgate", dgate.data(), &slope, tolerance);
        let slope = each(&|g, u, d| d * (value(g, u + step) - value(g, u - step)) / (2.0 * step));
        assert_near("dup", dup.data(), &slope, tolerance);
    }
}

#[test]
fn extreme_values_of_the_gate_stay_finite() {
    let gate = Tensor::from_slice(1, 6, &[-1e30, -200.0, -88.5, 88.5, 200.0, 1e30]);
    let ones = Tensor::from_slice(1, 6, &[1.0; 6]);
    for activation in ACTIVATIONS {
        let [y, dgate, _] = run(activation, &gate, &ones, &ones);
        if activation == Activation::Sigmoid {
            assert_near("y", y.data(), &[0.0, 0.0, 0.0, 1.0, 1.0, 1.0], 1e-6);
            assert_near("dgate", dgate.data(), &[0.0; 6], 1e-6);
            continue;
        }
        if activation == CLAMPED {
            let at_limit = value(activation, 1e30, 1.0);
            assert_near("y", y.data(), &[0.0, 0.0, 0.0, at_limit, at_limit, at_limit], 1e-6);
            assert_near("dgate", dgate.data(), &[0.0; 6], 1e-6);
            continue;
        }
        assert_near("y", &y.data()[1..5], &[0.0, 0.0, 88.5, 200.0], 1e-6);
        assert_eq!((y.data()[0], y.data()[5]), (0.0, 1e30), "{activation:?}");
        assert_near("dgate", dgate.data(), &[0.0, 0.0, 0.0, 1.0, 1.0, 1.0], 1e-6);
    }
}

#[test]
fn neither_other_rows_nor_the_thread_count_nor_the_instruction_set_changes_a_row() {
    for (activation, (rows, width)) in ACTIVATIONS.into_iter().flat_map(|of| [(of, (200, 344)), (of, (7, 33))]) {
        let [gate, up, dy] = [1, 2, 3].map(|seed| tensor(seed, rows, width, 3.0));
        let all = run(activation, &gate, &up, &dy);
        same_on_threads_and_levels("all rows", || run(activation, &gate, &up, &dy).map(|x| x.data().to_vec()).into());
        let cut = |x: &Tensor| Tensor::from_slice(1, width, x.row(rows / 2));
        for (alone, all) in run(activation, &cut(&gate), &cut(&up), &cut(&dy)).iter().zip(&all) {
            same_bits("row", alone.data(), all.row(rows / 2));
        }
    }
}
