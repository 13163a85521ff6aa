//! AdamW, the gradient norm and the value head.

use crate::ops::probe::{Numbers, assert_near, same_on_threads_and_levels, tolerance, wide};
use rlhf_hpc::device::cpu::pool::set_threads;
use rlhf_hpc::device::simd::{Level, with_level};
use rlhf_hpc::ops::adamw::{Update, step};
use rlhf_hpc::ops::norm::sums_of_squares;
use rlhf_hpc::ops::value_head;
use rlhf_hpc::tensor::Tensor;

const WEIGHT_DECAY: f32 = 0.1;
const UPDATE: Update =
    Update { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, bias1: 0.271, bias2: 0.142_625, grad_scale: 0.5 };

fn moments(len: usize) -> [Vec<f32>; 4] {
    let mut numbers = Numbers::new(len as u64);
    let (p, g, m) = (numbers.vec(len), numbers.vec(len), numbers.vec(len));
    let v = numbers.vec(len).into_iter().map(f32::abs).collect();
    [p, g, m, v]
}

#[test]
fn adamw_equals_its_equation_in_f64() {
    let [mut p, g, mut m, mut v] = moments(1000);
    let (p0, m0, v0) = (p.clone(), m.clone(), v.clone());
    step(&mut p, &g, &mut m, &mut v, &UPDATE, WEIGHT_DECAY);
    let (mut ep, mut em, mut ev) = (Vec::new(), Vec::new(), Vec::new());
    for i in 0..1000 {
        let g = f64::from(g[i]) * 0.5;
        let m = f64::from(UPDATE.beta1) * f64::from(m0[i]) + (1.0 - f64::from(UPDATE.beta1)) * g;
        let v = f64::from(UPDATE.beta2) * f64::from(v0[i]) + (1.0 - f64::from(UPDATE.beta2)) * g * g;
        let update = m / f64::from(UPDATE.bias1) / ((v / f64::from(UPDATE.bias2)).sqrt() + f64::from(UPDATE.eps));
        ep.push(f64::from(p0[i]) - f64::from(UPDATE.lr) * (update + f64::from(WEIGHT_DECAY) * f64::from(p0[i])));
        em.push(m);
        ev.push(v);
    }
    assert_near("m", &m, &em, 2e-7);
    assert_near("v", &v, &ev, 2e-7);
    assert_near("p", &p, &ep, 3e-7);
}

#[test]
fn adamw_has_the_same_bits_for_any_split_and_instruction_level() {
    let len = 70_001;
    let [p0, g, m0, v0] = moments(len);
    let run = |cuts: &[usize]| {
        let (mut p, mut m, mut v) = (p0.clone(), m0.clone(), v0.clone());
        for (&a, &b) in cuts.iter().zip(&cuts[1..]) {
            step(&mut p[a..b], &g[a..b], &mut m[a..b], &mut v[a..b], &UPDATE, WEIGHT_DECAY);
        }
        vec![p, m, v]
    };
    assert!(run(&[0, len]) == run(&[0, 1, 50, 20_000, 69_999, len]), "in pieces");
    same_on_threads_and_levels("whole", || run(&[0, len]));
    same_on_threads_and_levels("in pieces", || run(&[0, 1, 50, 20_000, 69_999, len]));
}

#[test]
fn sums_of_squares_are_exact_and_the_same_on_every_level_and_thread_count() {
    let x = Numbers::new(1).vec(100_001);
    let expected: Vec<f64> = x.chunks(4096).map(|c| wide(c).iter().map(|x| x * x).sum()).collect();
    let first = sums_of_squares(&x, 4096);
    assert_eq!(first.len(), 25);
    for (got, expected) in first.iter().zip(&expected) {
        assert!((got - expected).abs() <= 1e-12 * expected);
    }
    for level in Level::available() {
        for threads in [1, 2, 3] {
            set_threads(threads);
            let now = with_level(level, || sums_of_squares(&x, 4096));
            assert!(now.iter().zip(&first).all(|(a, b)| a.to_bits() == b.to_bits()), "{level:?} {threads} threads");
        }
    }
    assert!(sums_of_squares(&[][..], 10).is_empty());
    assert_eq!(sums_of_squares(&[3.0, 4.0][..], 10), [25.0]);
}

#[test]
fn value_head_is_the_dot_product_and_a_row_does_not_depend_on_the_others() {
    for (t, d) in [(1, 1), (3, 31), (40, 256), (500, 77)] {
        let mut numbers = Numbers::new((t + d) as u64);
        let (h, w) = (numbers.tensor(t, d), numbers.vec(d));
        let mut values = vec![0.0; t];
        value_head::forward(&h, &w, &mut values);
        let expected: Vec<f64> =
            (0..t).map(|i| h.row(i).iter().zip(&w).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()).collect();
        assert_near("values", &values, &expected, tolerance(d));
        for level in Level::available() {
            for i in [0, t / 2, t - 1] {
                let mut one = [0.0];
                with_level(level, || value_head::forward(&Tensor::from_slice(1, d, h.row(i)), &w, &mut one[..]));
                assert_eq!(one[0].to_bits(), values[i].to_bits(), "{t} {d} row {i} {level:?}");
            }
        }
    }
}
