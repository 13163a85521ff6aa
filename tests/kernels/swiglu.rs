use crate::near::{BF16, assert_near, wide};
use crate::{bf16, in_every_order, numbers, rounded};
use rlhf_hpc::device::cuda::{Memory, swiglu};
use rlhf_hpc::dtype::DType;

/// Gates between -20 and 20, and some where the exponential leaves the range of f32.
fn gates(len: usize) -> Vec<f32> {
    let far = [-200.0, 200.0, -90.0, 88.0, 0.0];
    let near = numbers(1, len).into_iter().map(|x| 20.0 * x);
    near.enumerate().map(|(i, x)| if i % 7 == 3 { far[i / 7 % far.len()] } else { x }).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

#[test]
fn outputs_and_gradients_are_those_of_the_formula() {
    in_every_order(|| {
        for len in [0, 8, 24, 96, 3000, 2 * 4096] {
            let (gate, up, dy) = (gates(len), numbers(2, len), numbers(3, len));
            let on_gpu = [&gate, &up, &dy].map(|x| Memory::of(&bf16(x)));
            let [g, u, d] = [0, 1, 2].map(|i| on_gpu[i].view(DType::Bf16));
            let [mut y, mut dgate, mut dup] = [0; 3].map(|_| Memory::scratch(2 * len));
            swiglu::forward(g, u, y.view_mut(DType::Bf16));
            swiglu::backward(g, u, d, dgate.view_mut(DType::Bf16), dup.view_mut(DType::Bf16));
            let [gate, up, dy] = [&gate, &up, &dy].map(|x| wide(&rounded(x)));
            let each =
                |f: &dyn Fn(usize, f64) -> f64| -> Vec<f64> { (0..len).map(|i| f(i, sigmoid(gate[i]))).collect() };
            // What is less than the smallest normal f32 may be 0.
            let tiny = 1e-36;
            assert_near(y.view(DType::Bf16), &each(&|i, s| gate[i] * s * up[i]), BF16, tiny, "y");
            assert_near(dup.view(DType::Bf16), &each(&|i, s| dy[i] * gate[i] * s), BF16, tiny, "dup");
            // Where gate is about -1.28 the two terms cancel.
            let want = each(&|i, s| dy[i] * up[i] * s * (1.0 + gate[i] * (1.0 - s)));
            assert_near(dgate.view(DType::Bf16), &want, BF16, 1e-7, "dgate");
        }
    });
}

#[test]
#[should_panic(expected = "swiglu::forward: up has 16 values, gate 8")]
fn other_lengths_are_refused() {
    let (_, _one) = crate::device();
    let [gate, up, mut y] = [8, 16, 8].map(|len| Memory::zeros(2 * len));
    swiglu::forward(gate.view(DType::Bf16), up.view(DType::Bf16), y.view_mut(DType::Bf16));
}
