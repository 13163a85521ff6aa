//! Mixtures of experts: the choice of experts, and their products, which have the bits of one product for each expert.

use crate::ops::probe::{Matrix, Numbers, assert_near, same_bits, same_on_threads_and_levels, wide};
use rlhf_hpc::ops::experts::{self, Addend, Routing, Rule};
use rlhf_hpc::ops::matmul::{self, Into};
use rlhf_hpc::tensor::{DType, Layout, Tensor, Weight, WeightMut};

/// (rows, experts, chosen, n, k): few and many rows of an expert, experts without rows, tails of panels, odd widths, and
/// chains of several blocks.
const SHAPES: [(usize, usize, usize, usize, usize); 7] = [
    (1, 8, 2, 64, 32),
    (3, 4, 4, 33, 17),
    (40, 5, 2, 96, 70),
    (17, 16, 3, 40, 129),
    (300, 3, 1, 70, 65),
    (9, 2, 2, 35, 2500),
    (150, 2, 1, 2100, 33),
];

/// Logits in which expert 1 is chosen more often than others, and the last one hardly ever.
fn logits(rows: usize, experts: usize, numbers: &mut Numbers) -> Tensor {
    let mut logits = numbers.tensor(rows, experts);
    for row in 0..rows {
        logits.row_mut(row)[1 % experts] += 0.7;
        logits.row_mut(row)[experts - 1] -= 0.9;
    }
    logits
}

/// The rows of each expert, ascending, in the order of experts.
fn sorted(routing: &Routing, experts: usize) -> Vec<Vec<usize>> {
    let k = routing.weights.width();
    let of = |e: usize| {
        let chose = |row: &usize| routing.chosen()[row * k..(row + 1) * k].contains(&(e as u32));
        (0..routing.weights.rows()).filter(chose).collect()
    };
    (0..experts).map(of).collect()
}

/// Rows `own` of x.
fn picked(x: &Tensor, own: &[usize]) -> Tensor {
    let values: Vec<f32> = own.iter().flat_map(|row| x.row(*row).to_vec()).collect();
    Tensor::from_slice(own.len(), x.width(), &values)
}

#[test]
fn the_products_of_experts_have_the_bits_of_one_product_for_each() {
    for (rows, experts, chosen, n, k) in SHAPES {
        let mut numbers = Numbers::new((rows * n + k) as u64);
        let routing = Routing::new(logits(rows, experts, &mut numbers), chosen, Rule::Softmax { renormalizes: true });
        let own = sorted(&routing, experts);
        let (x, dy) = (numbers.tensor(rows, k), numbers.tensor(rows, n));
        let (xs, dys) = (routing.gather(&x), routing.gather(&dy));
        let (w, other): (Vec<Matrix>, Vec<Matrix>) =
            (0..experts).map(|_| (Matrix::new(n, k, &mut numbers), Matrix::new(n, k, &mut numbers))).unzip();
        for dtype in [DType::F32, DType::Bf16] {
            let what = format!("{rows} {experts} {chosen} {n} {k} {dtype:?}");
            let [w, other] = [&w, &other].map(|all| all.iter().map(|w| w.weight(dtype)).collect::<Vec<Weight>>());
            let len = Layout::Panel.len(n, k);
            let run = || -> Vec<Vec<f32>> {
                let [y, second] = routing.groups.forward_each(&xs, [&w, &other]);
                let mut dx = Tensor::from_slice(xs.rows(), k, &vec![f32::NAN; xs.rows() * k]);
                routing.groups.backward_input(&dys, &w, &mut dx, false);
                routing.groups.backward_input(&dys, &other, &mut dx, true);
                let mut dw = vec![0.25; experts * len];
                let each =
                    dw.chunks_mut(len).map(|values| WeightMut { n, k, layout: Layout::Panel, values: values.into() });
                routing.groups.backward_weight(&dys, &xs, each.collect(), dtype);
                [y.data(), second.data(), dx.data(), &dw].map(<[f32]>::to_vec).into()
            };
            let got = run();
            let mut want = [Vec::new(), Vec::new(), Vec::new(), Vec::new()];
            for (e, own) in own.iter().enumerate() {
                let (x, dy) = (picked(&x, own), picked(&dy, own));
                let [mut y, mut second] = [0; 2].map(|_| Tensor::zeros(own.len(), n));
                let (mut dx, mut dw) = (Tensor::zeros(own.len(), k), vec![0.25; len]);
                if !own.is_empty() {
                    matmul::forward(&x, w[e], None, &mut y, Into::Overwrite);
                    matmul::forward(&x, other[e], None, &mut second, Into::Overwrite);
                    matmul::backward_input(&dy, w[e], &mut dx, Into::Overwrite);
                    matmul::backward_input(&dy, other[e], &mut dx, Into::Add);
                    let gradient = WeightMut { n, k, layout: Layout::Panel, values: (&mut dw).into() };
                    matmul::backward_weight(&dy, &x, gradient, dtype);
                }
                for (want, of_expert) in want.iter_mut().zip([y.data(), second.data(), dx.data(), &dw]) {
                    want.extend_from_slice(of_expert);
                }
            }
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                same_bits(&format!("{what}, result {i}"), got, want);
            }
            same_on_threads_and_levels(&what, run);
        }
    }
}

/// The weights of all experts for one row in f64. An expert that is not chosen has 0.
fn weights(logits: &[f64], chosen: &[u32], renormalizes: bool) -> Vec<f64> {
    let total: f64 = logits.iter().map(|x| x.exp()).sum();
    let mut weights = vec![0.0; logits.len()];
    for &e in chosen {
        weights[e as usize] = logits[e as usize].exp() / total;
    }
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|weight| if renormalizes { weight / sum } else { *weight }).collect()
}

#[test]
fn weights_of_experts_and_their_gradients_equal_those_in_f64() {
    let mut numbers = Numbers::new(5);
    let (rows, experts) = (7, 9);
    for (k, renormalizes) in [(1, true), (3, true), (3, false), (9, false)] {
        let logits = logits(rows, experts, &mut numbers);
        let routing = Routing::new(logits.clone(), k, Rule::Softmax { renormalizes });
        let dweights = numbers.tensor(rows, k);
        let slope: Vec<f32> = numbers.vec(experts);
        let got = routing.backward(&dweights, Some(&slope));
        for row in 0..rows {
            let chosen = &routing.chosen()[row * k..(row + 1) * k];
            assert!(chosen.is_sorted_by(|a, b| a < b));
            let lowest = chosen.iter().map(|e| logits.row(row)[*e as usize]).fold(f32::INFINITY, f32::min);
            let above = logits.row(row).iter().filter(|x| **x > lowest).count();
            assert_eq!(above, k - 1, "those with the largest logits");
            let row_of = wide(logits.row(row));
            let want: Vec<f64> = weights(&row_of, chosen, renormalizes).into_iter().filter(|x| *x > 0.0).collect();
            assert_near("weights", routing.weights.row(row), &want, 1e-6);
            let loss = |logits: &[f64]| {
                let all: Vec<u32> = (0..experts as u32).collect();
                let of_all = weights(logits, &all, false).into_iter().zip(&slope).map(|(p, a)| p * f64::from(*a));
                let of_chosen = weights(logits, chosen, renormalizes);
                let of_chosen =
                    chosen.iter().zip(dweights.row(row)).map(|(e, dg)| of_chosen[*e as usize] * f64::from(*dg));
                of_all.chain(of_chosen).sum::<f64>()
            };
            let slopes: Vec<f64> = (0..experts)
                .map(|e| {
                    let shifted = |by: f64| {
                        let mut logits = row_of.clone();
                        logits[e] += by;
                        loss(&logits)
                    };
                    (shifted(1e-5) - shifted(-1e-5)) / 2e-5
                })
                .collect();
            assert_near("dlogits", got.row(row), &slopes, 2e-6);
        }
    }
}

#[test]
fn of_experts_with_equal_logits_those_with_the_lowest_indices_are_chosen() {
    let logits = Tensor::from_slice(2, 5, &[0.5, 1.0, 0.5, 1.0, 0.5, -0.0, 0.0, 0.0, 0.0, 0.0]);
    let routing = Routing::new(logits, 3, Rule::Softmax { renormalizes: true });
    assert_eq!(*routing.chosen(), [0, 1, 3, 0, 1, 2]);
    assert_eq!(routing.groups.counts().collect::<Vec<_>>(), [2, 2, 1, 1, 0]);
}

#[test]
fn a_row_is_the_weighted_sum_of_its_experts_in_ascending_order_onto_its_addend() {
    let mut numbers = Numbers::new(11);
    let (rows, experts, k, width) = (6, 4, 3, 37);
    let routing = Routing::new(logits(rows, experts, &mut numbers), k, Rule::Softmax { renormalizes: false });
    let (y, c) = (numbers.tensor(routing.row_count(), width), numbers.tensor(rows, width));
    let starts: Vec<usize> =
        routing.groups.counts().scan(0, |end, count| Some(std::mem::replace(end, *end + count))).collect();
    let own = sorted(&routing, experts);
    let sum = |row: usize, column: usize, weighted: bool| {
        let of = |(i, e): (usize, &u32)| {
            let at = own[*e as usize].iter().position(|other| *other == row).expect("it chose the expert");
            let weight = if weighted { routing.weights.row(row)[i] } else { 1.0 };
            y.row(starts[*e as usize] + at)[column] * weight
        };
        routing.chosen()[row * k..(row + 1) * k].iter().enumerate().map(of).fold(0.0, |sum: f32, x| sum + x)
    };
    let all = |weighted: bool| -> Vec<f32> { (0..rows * width).map(|i| sum(i / width, i % width, weighted)).collect() };
    let mut x = Tensor::zeros(rows, width);
    routing.combine(&y, Addend::Nothing, &mut x);
    same_bits("alone", x.data(), &all(true));
    let added: Vec<f32> = c.data().iter().zip(all(true)).map(|(c, x)| c + x).collect();
    routing.combine(&y, Addend::Values(&c), &mut x);
    same_bits("onto another", x.data(), &added);
    let mut x = c.clone();
    routing.combine(&y, Addend::Result, &mut x);
    same_bits("in place", x.data(), &added);
    routing.scatter(&y, &mut x);
    same_bits("without weights", x.data(), &all(false));
}

#[test]
fn the_gradient_of_a_weight_is_the_product_of_its_expert_with_the_slope() {
    let mut numbers = Numbers::new(13);
    let (rows, experts, k, width) = (5, 4, 2, 45);
    let routing = Routing::new(logits(rows, experts, &mut numbers), k, Rule::Softmax { renormalizes: true });
    let (act, dact) = (numbers.tensor(routing.row_count(), width), numbers.tensor(routing.row_count(), width));
    let (mut weighed, mut dweighed) = (act.clone(), dact.clone());
    let slopes = experts::weigh(&mut weighed, &mut dweighed, &routing.row_weights());
    let dweights = routing.of_row_weights(&slopes);
    let own = sorted(&routing, experts);
    let mut at = 0;
    for (e, rows) in own.iter().enumerate() {
        for &row in rows {
            let i = routing.chosen()[row * k..].iter().position(|chosen| *chosen == e as u32).expect("it chose it");
            let want: f64 = wide(act.row(at)).iter().zip(wide(dact.row(at))).map(|(a, d)| a * d).sum();
            assert_near("the gradient of a weight", &dweights.row(row)[i..=i], &[want], 1e-6);
            let weight = routing.weights.row(row)[i];
            for (got, from) in [(weighed.row(at), act.row(at)), (dweighed.row(at), dact.row(at))] {
                same_bits("weighed", got, &from.iter().map(|x| x * weight).collect::<Vec<_>>());
            }
            at += 1;
        }
    }
}

#[test]
fn biases_of_experts_are_added_to_their_rows_and_their_gradients_are_sums_over_these_rows() {
    for (rows, experts, k, width, _) in SHAPES {
        let mut numbers = Numbers::new((3 * rows + width) as u64);
        let routing = Routing::new(logits(rows, experts, &mut numbers), k, Rule::Softmax { renormalizes: true });
        let (y, weights) = (numbers.tensor(routing.row_count(), width), routing.row_weights());
        let bias: Vec<Vec<f32>> = (0..experts).map(|_| numbers.vec(width)).collect();
        let bias: Vec<&[f32]> = bias.iter().map(Vec::as_slice).collect();
        let run = || {
            let (mut added, mut slopes) = (y.clone(), weights.clone());
            routing.groups.add_bias(&bias, &mut added);
            routing.groups.add_bias_slopes(&bias, &y, &mut slopes);
            let sums = [Some(&weights), None].map(|weights| routing.groups.bias_gradients(&y, weights));
            [&added, &slopes, &sums[0], &sums[1]].map(|x| x.data().to_vec()).into()
        };
        let got: Vec<Vec<f32>> = run();
        let counts: Vec<usize> = routing.groups.counts().collect();
        let of: Vec<usize> = counts.iter().enumerate().flat_map(|(e, count)| vec![e; *count]).collect();
        let mut want = [vec![], vec![], vec![0.0; experts * width], vec![0.0; experts * width]];
        for (i, &e) in of.iter().enumerate() {
            let (row, bias, weight) = (wide(y.row(i)), wide(bias[e]), f64::from(weights.row(i)[0]));
            want[0].extend(row.iter().zip(&bias).map(|(y, b)| y + b));
            want[1].push(weight + row.iter().zip(&bias).map(|(y, b)| y * b).sum::<f64>());
            for (j, y) in row.iter().enumerate() {
                want[2][e * width + j] += weight * y;
                want[3][e * width + j] += y;
            }
        }
        for ((got, want), tolerance) in got.iter().zip(&want).zip([1e-6, 1e-5, 1e-5, 1e-5]) {
            assert_near(&format!("{rows} {experts} {k} {width}"), got, want, tolerance);
        }
        same_on_threads_and_levels(&format!("{rows} {experts} {k} {width}"), run);
    }
}
