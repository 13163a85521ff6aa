use crate::near::{BF16, assert_near, wide};
use crate::{bf16, in_every_order, numbers, rounded};
use rlhf_hpc::device::cuda::{Memory, value_head};
use rlhf_hpc::dtype::DType;

fn check(t: usize, d: usize) {
    let (h, w, dvalues, dw) = (numbers(1, t * d), numbers(2, d), numbers(3, t), numbers(4, d));
    let (on_h, on_w, on_dvalues) = (Memory::of(&bf16(&h)), Memory::of(&bf16(&w)), Memory::of(&dvalues));
    let (mut values, mut dh, mut on_dw) = (Memory::scratch(4 * t), Memory::scratch(2 * t * d), Memory::of(&dw));
    let (view_h, view_w) = (on_h.view(DType::Bf16), on_w.view(DType::Bf16));
    value_head::forward(view_h, view_w, values.view_mut(DType::F32));
    let views = (dh.view_mut(DType::Bf16), on_dw.view_mut(DType::F32));
    value_head::backward(view_h, view_w, on_dvalues.view(DType::F32), views.0, views.1);

    let (h, w, dvalues) = (wide(&rounded(&h)), wide(&rounded(&w)), wide(&dvalues));
    let what = format!("{t} rows of {d}");
    let want: Vec<f64> = h.chunks(d).map(|h| h.iter().zip(&w).map(|(h, w)| h * w).sum()).collect();
    // Chains of at most d / 32 terms below 1, and five sums more.
    assert_near(values.view(DType::F32), &want, 1e-6, 6e-8 * (d as f64 / 32.0 + 8.0).powf(1.5), &what);
    let want: Vec<f64> = (0..t * d).map(|i| dvalues[i / d] * w[i % d]).collect();
    assert_near(dh.view(DType::Bf16), &want, BF16, 0.0, &what);
    let want: Vec<f64> =
        (0..d).map(|c| f64::from(dw[c]) + (0..t).map(|t| dvalues[t] * h[t * d + c]).sum::<f64>()).collect();
    assert_near(on_dw.view(DType::F32), &want, 1e-6, 6e-8 * (16.0 + t as f64 / 16.0), &what);
}

#[test]
fn values_and_gradients_are_those_of_the_formula_and_a_row_does_not_depend_on_the_others() {
    in_every_order(|| {
        for (d, t) in [(8, 300), (24, 17), (64, 0), (96, 3), (1000, 40), (4096, 1), (4096, 20)] {
            check(t, d);
        }
        let d = 1000;
        let (h, w) = (bf16(&numbers(1, 20 * d)), Memory::of(&bf16(&numbers(2, d))));
        let values = |h: &[u16]| {
            let mut values = Memory::scratch(4 * h.len() / d);
            value_head::forward(Memory::of(h).view(DType::Bf16), w.view(DType::Bf16), values.view_mut(DType::F32));
            values.read::<u32>(h.len() / d)
        };
        assert_eq!(values(&h[9 * d..10 * d]), values(&h)[9..10]);
    });
}
