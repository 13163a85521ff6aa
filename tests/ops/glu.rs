//! The gate against f64.

use super::probe::{assert_near, same_bits, same_on_threads_and_levels, tensor};
use rlhf_hpc::ops::glu::{Activation, backward, forward};
use rlhf_hpc::tensor::Tensor;

/// y, dgate, dup.
fn run(gate: &Tensor, up: &Tensor, dy: &Tensor) -> [Tensor; 3] {
    let [mut y, mut dgate, mut dup] = [gate.clone(), gate.clone(), gate.clone()];
    forward(Activation::Silu, gate, up, &mut y);
    backward(Activation::Silu, gate, up, dy, &mut dgate, &mut dup);
    [y, dgate, dup]
}

#[test]
fn the_gate_equals_its_equation_and_its_gradients_are_finite_differences() {
    for (rows, width) in [(1, 1), (3, 7), (16, 33), (64, 688)] {
        let [gate, up, dy] = [1, 2, 3].map(|seed| tensor(seed, rows, width, 3.0));
        let value = |gate: f64, up: f64| gate / (1.0 + (-gate).exp()) * up;
        let each = |f: &dyn Fn(f64, f64, f64) -> f64| -> Vec<f64> {
            let values = gate.data().iter().zip(up.data()).zip(dy.data());
            values.map(|((&g, &u), &d)| f(f64::from(g), f64::from(u), f64::from(d))).collect()
        };
        let step = 1e-5;
        let [y, dgate, dup] = run(&gate, &up, &dy);
        assert_near("y", y.data(), &each(&|g, u, _| value(g, u)), 1e-6);
        let slope = each(&|g, u, d| d * (value(g + step, u) - value(g - step, u)) / (2.0 * step));
        assert_near("dgate", dgate.data(), &slope, 1e-6);
        let slope = each(&|g, u, d| d * (value(g, u + step) - value(g, u - step)) / (2.0 * step));
        assert_near("dup", dup.data(), &slope, 1e-6);
    }
}

#[test]
fn extreme_values_of_the_gate_stay_finite() {
    let gate = Tensor::from_slice(1, 6, &[-1e30, -200.0, -88.5, 88.5, 200.0, 1e30]);
    let ones = Tensor::from_slice(1, 6, &[1.0; 6]);
    let [y, dgate, _] = run(&gate, &ones, &ones);
    assert_near("y", &y.data()[1..5], &[0.0, 0.0, 88.5, 200.0], 1e-6);
    assert_eq!((y.data()[0], y.data()[5]), (0.0, 1e30));
    assert_near("dgate", dgate.data(), &[0.0, 0.0, 0.0, 1.0, 1.0, 1.0], 1e-6);
}

#[test]
fn neither_other_rows_nor_the_thread_count_nor_the_instruction_set_changes_a_row() {
    for (rows, width) in [(200, 344), (7, 33)] {
        let [gate, up, dy] = [1, 2, 3].map(|seed| tensor(seed, rows, width, 3.0));
        let all = run(&gate, &up, &dy);
        same_on_threads_and_levels("all rows", || run(&gate, &up, &dy).map(|x| x.data().to_vec()).into());
        let cut = |x: &Tensor| Tensor::from_slice(1, width, x.row(rows / 2));
        for (alone, all) in run(&cut(&gate), &cut(&up), &cut(&dy)).iter().zip(&all) {
            same_bits("row", alone.data(), all.row(rows / 2));
        }
    }
}
