//! y = x W^T and its gradients: compared with f64, and bitwise independent of batch, threads and instruction set.

use crate::ops::probe::{Matrix, Numbers, assert_near, bf16, same_bits, same_on_threads_and_levels, tolerance};
use rlhf_hpc::device::cpu::pool::set_threads;
use rlhf_hpc::device::simd::{Level, with_level};
use rlhf_hpc::ops::matmul::{Into, backward_input, backward_weight, forward, forward_onto};
use rlhf_hpc::tensor::{DType, Layout, Tensor, WeightMut};

/// (m, n, k) with every kind of tail: lanes, panels, rows, odd and tiny k; several blocks of rows, of k, of m, and of
/// the transposed n.
const SHAPES: [(usize, usize, usize); 17] = [
    (1, 1, 1),
    (1, 32, 8),
    (2, 33, 12),
    (3, 64, 24),
    (4, 96, 7),
    (5, 31, 80),
    (7, 100, 33),
    (8, 128, 256),
    (9, 65, 129),
    (13, 70, 1031),
    (16, 688, 256),
    (17, 256, 688),
    (33, 40, 2500),
    (64, 24, 17),
    (150, 200, 96),
    (700, 50, 130),
    (2, 2100, 1041),
];

fn f64_product(x: &[f32], w: &[f32], m: usize, n: usize, k: usize) -> Vec<f64> {
    let mut y = vec![0.0; m * n];
    for i in 0..m {
        for r in 0..n {
            y[i * n + r] = (0..k).map(|c| f64::from(x[i * k + c]) * f64::from(w[r * k + c])).sum();
        }
    }
    y
}

/// The values that a GEMM with weights of this dtype uses.
fn used(x: &Tensor, dtype: DType) -> Vec<f32> {
    x.data().iter().map(|&x| if dtype == DType::Bf16 { bf16(x) } else { x }).collect()
}

#[test]
fn forward_equals_the_f64_product_for_every_shape_and_dtype() {
    for (m, n, k) in SHAPES {
        let mut numbers = Numbers::new(7 + (m * n * k) as u64);
        let (x, w, bias) = (numbers.tensor(m, k), Matrix::rounded(n, k, &mut numbers), numbers.vec(n));
        let before = numbers.tensor(m, n);
        for dtype in [DType::F32, DType::Bf16] {
            let (weight, product) = (w.weight(dtype), f64_product(&used(&x, dtype), &w.rows, m, n, k));
            let mut y = Tensor::from_slice(m, n, &vec![f32::NAN; m * n]);
            forward(&x, weight, None, &mut y, Into::Overwrite);
            assert_near(&format!("{m} {n} {k} {dtype:?}"), y.data(), &product, tolerance(k));
            forward(&x, weight, Some((&bias).into()), &mut y, Into::Overwrite);
            let with_bias: Vec<f64> = product.iter().enumerate().map(|(i, p)| p + f64::from(bias[i % n])).collect();
            assert_near(&format!("{m} {n} {k} {dtype:?} with bias"), y.data(), &with_bias, tolerance(k));
            let mut sum = before.clone();
            forward(&x, weight, Some((&bias).into()), &mut sum, Into::Add);
            let added: Vec<f32> = before.data().iter().zip(y.data()).map(|(a, b)| a + b).collect();
            same_bits(&format!("{m} {n} {k} {dtype:?} added"), sum.data(), &added);
            for (bias, before) in [(Some((&bias).into()), &before), (None, &y)] {
                let mut sum = before.clone();
                forward(&x, weight, bias, &mut sum, Into::Add);
                for level in Level::available() {
                    let mut apart = Tensor::from_slice(m, n, &vec![f32::NAN; m * n]);
                    with_level(level, || forward_onto(before, &x, weight, bias, &mut apart));
                    same_bits(&format!("{m} {n} {k} {dtype:?} {level:?} onto another"), apart.data(), sum.data());
                }
            }
        }
    }
}

#[test]
fn a_row_of_the_product_has_the_same_bits_in_any_batch_position_and_thread_count() {
    for (n, k) in [(1024, 256), (1000, 333), (70, 1031), (40, 5000), (32, 8)] {
        let mut numbers = Numbers::new((n + k) as u64);
        let w = Matrix::new(n, k, &mut numbers);
        let rows = numbers.vec(300 * k);
        let probe = numbers.vec(k);
        for weight in [w.f32(), w.bf16()] {
            let mut expected = Tensor::scratch(1, n);
            forward(&Tensor::from_slice(1, k, &probe), weight, None, &mut expected, Into::Overwrite);
            for m in (1..=9).chain([13, 16, 17, 31, 32, 64, 97, 300]) {
                for position in [0, m / 2, m - 1] {
                    set_threads(1 + (m + position) % 3);
                    let mut x = Tensor::from_slice(m, k, &rows[..m * k]);
                    x.row_mut(position).copy_from_slice(&probe);
                    let mut y = Tensor::from_slice(m, n, &vec![f32::NAN; m * n]);
                    forward(&x, weight, None, &mut y, Into::Overwrite);
                    same_bits(&format!("{n} {k} row {position} of {m}"), y.row(position), expected.data());
                }
            }
        }
    }
}

#[test]
fn backward_input_equals_the_f64_product() {
    for (m, n, k) in SHAPES {
        let mut numbers = Numbers::new((2 * m + n * k) as u64);
        let (dy, w) = (numbers.tensor(m, n), Matrix::rounded(n, k, &mut numbers));
        let before = numbers.tensor(m, k);
        let transposed: Vec<f32> = (0..n * k).map(|i| w.rows[i % n * k + i / n]).collect();
        for dtype in [DType::F32, DType::Bf16] {
            let (weight, expected) = (w.weight(dtype), f64_product(&used(&dy, dtype), &transposed, m, k, n));
            for level in Level::available() {
                let mut dx = Tensor::from_slice(m, k, &vec![f32::NAN; m * k]);
                with_level(level, || backward_input(&dy, weight, &mut dx, Into::Overwrite));
                assert_near(&format!("dx {m} {n} {k} {dtype:?} {level:?}"), dx.data(), &expected, tolerance(n));
                let mut sum = before.clone();
                with_level(level, || backward_input(&dy, weight, &mut sum, Into::Add));
                let expected: Vec<f64> = expected.iter().zip(before.data()).map(|(e, &b)| e + f64::from(b)).collect();
                assert_near(&format!("dx added {m} {n} {k} {dtype:?} {level:?}"), sum.data(), &expected, tolerance(n));
            }
        }
    }
}

#[test]
fn backward_weight_adds_the_f64_product_and_leaves_padding_alone() {
    for (m, n, k) in SHAPES {
        let mut numbers = Numbers::new((m * n + k) as u64);
        let (dy, x) = (numbers.tensor(m, n), numbers.tensor(m, k));
        let start = Matrix::new(n, k, &mut numbers);
        for dtype in [DType::F32, DType::Bf16] {
            let [dy_used, x_used] = [&dy, &x].map(|t| {
                let (used, width) = (used(t, dtype), t.width());
                (0..m * width).map(|i| used[i % m * width + i / m]).collect::<Vec<f32>>()
            });
            let product = f64_product(&dy_used, &x_used, n, k, m);
            let expected: Vec<f64> = product.iter().zip(&start.rows).map(|(p, &s)| p + f64::from(s)).collect();
            for level in Level::available() {
                let mut dw = start.panels.clone();
                let view = WeightMut { n, k, layout: Layout::Panel, values: (&mut dw).into() };
                with_level(level, || backward_weight(&dy, &x, view, dtype));
                let mut got = vec![0.0; n * k];
                for (r, c) in (0..n).flat_map(|r| (0..k).map(move |c| (r, c))) {
                    got[r * k + c] = std::mem::take(&mut dw[Layout::Panel.index(k, r, c)]);
                }
                assert_near(&format!("dW {m} {n} {k} {dtype:?} {level:?}"), &got, &expected, tolerance(m));
                assert!(dw.iter().all(|x| x.to_bits() == 0), "padding of dW {n} {k} stays zero");
            }
        }
    }
}

#[test]
fn gradients_have_the_same_bits_on_any_number_of_threads_and_any_level() {
    for (m, n, k) in SHAPES {
        let mut numbers = Numbers::new((m + n + k) as u64);
        let (dy, x, w) = (numbers.tensor(m, n), numbers.tensor(m, k), Matrix::new(n, k, &mut numbers));
        for dtype in [DType::F32, DType::Bf16] {
            same_on_threads_and_levels(&format!("{m} {n} {k} {dtype:?}"), || {
                let mut dx = Tensor::scratch(m, k);
                let mut dw = vec![0.0; w.panels.len()];
                let view = WeightMut { n, k, layout: Layout::Panel, values: (&mut dw).into() };
                backward_input(&dy, w.weight(dtype), &mut dx, Into::Overwrite);
                backward_weight(&dy, &x, view, dtype);
                vec![dx.data().to_vec(), dw]
            });
        }
    }
}

#[test]
#[should_panic(expected = "matmul::forward: x must be (3, 24), got (3, 20)")]
fn a_wrong_shape_is_named() {
    let mut numbers = Numbers::new(4);
    let w = Matrix::new(40, 24, &mut numbers);
    forward(&Tensor::zeros(3, 20), w.f32(), None, &mut Tensor::zeros(3, 40), Into::Overwrite);
}
