//! Sinks against a softmax in f64 that has them, and their gradients against finite differences.

use super::probe::{assert_near, same_bits, same_on_threads_and_levels, tensor, wide};
use rlhf_hpc::ops::sinks::{backward, forward};
use rlhf_hpc::tensor::Tensor;

/// (rows, heads, head dim)
const SHAPES: [(usize, usize, usize); 4] = [(1, 1, 6), (5, 3, 16), (40, 4, 64), (300, 7, 40)];

/// Attention without sinks: o, lse, and the gradient of o, with sinks.
fn case(rows: usize, heads: usize, e: usize) -> ([Tensor; 3], Vec<f32>) {
    let (o, d_o) = (tensor(1, rows, heads * e, 1.0), tensor(2, rows, heads * e, 1.0));
    ([o, tensor(3, rows, heads, 4.0), d_o], tensor(4, 1, heads, 3.0).data().to_vec())
}

/// The changed o and lse, and the gradients of the sinks.
fn run([o, lse, d_o]: &[Tensor; 3], sinks: &[f32]) -> [Vec<f32>; 3] {
    let (mut o, mut lse, mut slopes) = (o.clone(), lse.clone(), vec![0.5; sinks.len()]);
    forward(&mut o, &mut lse, sinks);
    backward([&o, &lse, d_o], sinks, &mut slopes);
    [o.data().to_vec(), lse.data().to_vec(), slopes]
}

#[test]
fn a_sink_is_a_further_logit_without_a_value_and_its_gradient_is_a_finite_difference() {
    for (rows, heads, e) in SHAPES {
        let (x, sinks) = case(rows, heads, e);
        let [o, lse, d_o] = x.each_ref().map(|x| wide(x.data()));
        // The keys of a row together are one key, whose logit is their log-sum-exp.
        let share = |i: usize, s: f64| lse[i].exp() / (lse[i].exp() + s.exp());
        let of = |i: usize, s: &[f64]| o[i] * share(i / e, s[i / e % heads]);
        let s = wide(&sinks);
        let [got_o, got_lse, slopes] = run(&x, &sinks);
        assert_near("o", &got_o, &(0..o.len()).map(|i| of(i, &s)).collect::<Vec<_>>(), 2e-6);
        let want: Vec<f64> = (0..lse.len()).map(|i| (lse[i].exp() + s[i % heads].exp()).ln()).collect();
        assert_near("lse", &got_lse, &want, 1e-6);
        let loss = |s: &[f64]| (0..o.len()).map(|i| d_o[i] * of(i, s)).sum::<f64>();
        let slope = |h: usize| {
            let shifted = |by: f64| {
                let mut s = s.clone();
                s[h] += by;
                loss(&s)
            };
            0.5 + (shifted(1e-5) - shifted(-1e-5)) / 2e-5
        };
        assert_near("the gradient", &slopes, &(0..heads).map(slope).collect::<Vec<_>>(), 1e-5);
    }
}

#[test]
fn extreme_sinks_leave_attention_or_nothing_of_it() {
    let (lse, sinks) = (Tensor::from_slice(1, 3, &[100.0, -100.0, 0.0]), [-1e30, 1e30, 0.0]);
    let (mut o, mut lse) = (Tensor::from_slice(1, 6, &[2.0; 6]), lse);
    forward(&mut o, &mut lse, &sinks);
    assert_eq!(o.data(), [2.0, 2.0, 0.0, 0.0, 1.0, 1.0]);
    assert_eq!(lse.data(), [100.0, 1e30, 2.0f32.ln()]);
    let mut slopes = [0.0; 3];
    backward([&o, &lse, &o], &sinks, &mut slopes);
    assert_near("the gradients", &slopes, &[0.0, 0.0, -1.0], 1e-6);
}

#[test]
fn neither_other_rows_nor_the_thread_count_nor_the_instruction_set_changes_a_row() {
    let (rows, heads, e) = SHAPES[3];
    let (x, sinks) = case(rows, heads, e);
    same_on_threads_and_levels("all rows", || run(&x, &sinks).into());
    let [o, lse, _] = run(&x, &sinks);
    let cut = |x: &Tensor| Tensor::from_slice(1, x.width(), x.row(rows / 2));
    let alone = run(&x.each_ref().map(cut), &sinks);
    same_bits("o", &alone[0], &o[rows / 2 * heads * e..][..heads * e]);
    same_bits("lse", &alone[1], &lse[rows / 2 * heads..][..heads]);
}
