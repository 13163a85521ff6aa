//! Selective log-softmax against f64, and bitwise equality of its two passes.

use crate::models::relative_gap;
use crate::ops::probe::{Matrix, Numbers, assert_near, same_bits, wide};
use rlhf_hpc::device::cpu::softmax;
use rlhf_hpc::device::simd::Level;
use rlhf_hpc::experience::SamplingMask;
use rlhf_hpc::ops::linear_logprob::{
    Extra, HeadPart, RowStats, Targets, forward, forward_backward, forward_backward_part, forward_part,
};
use rlhf_hpc::tensor::{Layout, Tensor, Weight, WeightMut, arena};
use std::cell::RefCell;
use std::ops::Range;

struct Case {
    h: Tensor,
    w: Matrix,
    targets: Vec<u32>,
    temperature: f32,
}

impl Case {
    fn new(t: usize, d: usize, v: usize, temperature: f32) -> Self {
        let mut numbers = Numbers::new((t * d + v) as u64);
        let (h, w) = (numbers.tensor(t, d), Matrix::new(v, d, &mut numbers));
        let targets = (0..t).map(|i| ((i * 7919 + 13) % v) as u32).collect();
        Self { h, w, targets, temperature }
    }
}

/// (logprobs, entropy) by `forward`.
fn scored(case: &Case) -> (Vec<f32>, Vec<f32>) {
    let t = case.h.rows();
    let (mut logprobs, mut entropy) = (vec![0.0; t], vec![0.0; t]);
    forward(&case.h, case.w.f32(), &case.targets, case.temperature, &mut logprobs, &mut entropy);
    (logprobs, entropy)
}

/// The loss sum_t a_t logprob_t + b_t entropy_t with these a and b.
fn weights(i: usize) -> (f32, f32) {
    (1.0 - 0.3 * (i % 5) as f32, 0.2 * (i % 3) as f32 - 0.1)
}

fn run_both(case: &Case, w: Weight) -> (Vec<f32>, Vec<f32>, Tensor, Vec<f32>) {
    let (t, d, v) = (case.h.rows(), case.h.width(), case.w.n);
    let (mut logprobs, mut entropy) = (vec![0.0; t], vec![0.0; t]);
    let mut dh = Tensor::from_slice(t, d, &vec![f32::NAN; t * d]);
    let mut dw = vec![0.0; case.w.panels.len()];
    let mut seen = 0;
    let mut loss = |range: std::ops::Range<usize>, lp: &[f32], ent: &[f32], dlp: &mut [f32], dent: &mut [f32]| {
        assert_eq!(range.start, seen, "chunks come in order");
        assert!(lp.len() == range.len() && ent.len() == range.len());
        seen = range.end;
        for (j, i) in range.enumerate() {
            (dlp[j], dent[j]) = weights(i);
        }
    };
    forward_backward(
        &case.h,
        w,
        &case.targets,
        case.temperature,
        &mut loss,
        &mut logprobs,
        &mut entropy,
        &mut dh,
        WeightMut { n: v, k: d, layout: Layout::Panel, values: (&mut dw).into() },
    );
    assert_eq!(seen, t);
    (logprobs, entropy, dh, dw)
}

/// Per token (logprob, entropy), then dh and dW (rows), of the softmax over the tokens that `keeps`, naively.
fn naive(case: &Case, keeps: impl Fn(usize, usize) -> bool) -> [Vec<f64>; 4] {
    let (d, temperature, h, w) = (case.h.width(), f64::from(case.temperature), wide(case.h.data()), wide(&case.w.rows));
    let [mut logprobs, mut entropy] = [Vec::new(), Vec::new()];
    let (mut dh, mut dw) = (vec![0.0; h.len()], vec![0.0; w.len()]);
    for (i, &target) in case.targets.iter().enumerate() {
        let z = |v: usize| (0..d).map(|c| h[i * d + c] * w[v * d + c]).sum::<f64>() / temperature;
        let kept: Vec<(usize, f64)> = (0..case.w.n).filter(|&v| keeps(i, v)).map(|v| (v, z(v))).collect();
        let max = kept.iter().map(|(_, z)| *z).fold(f64::NEG_INFINITY, f64::max);
        let lse = max + kept.iter().map(|(_, z)| (z - max).exp()).sum::<f64>().ln();
        logprobs.push(z(target as usize) - lse);
        entropy.push(kept.iter().map(|(_, z)| -(z - lse).exp() * (z - lse)).sum::<f64>());
        let (a, b) = (f64::from(weights(i).0), f64::from(weights(i).1));
        for &(v, z) in &kept {
            let (p, is_target) = ((z - lse).exp(), f64::from(u8::from(v == target as usize)));
            let slope = (a * (is_target - p) - b * p * (z - lse + entropy[i])) / temperature;
            for c in 0..d {
                dh[i * d + c] += slope * w[v * d + c];
                dw[v * d + c] += slope * h[i * d + c];
            }
        }
    }
    [logprobs, entropy, dh, dw]
}

/// A matrix (n, k) in panels, row by row.
fn in_rows(panels: &[f32], n: usize, k: usize) -> Vec<f32> {
    (0..n * k).map(|at| panels[Layout::Panel.index(k, at / k, at % k)]).collect()
}

#[test]
fn logprobs_entropy_and_gradients_equal_the_f64_loop_and_scoring_has_the_bits_of_training() {
    for (t, d, v, temperature) in [(5, 24, 50, 1.0), (130, 33, 500, 0.7), (1, 8, 1, 1.0), (9, 12, 65, 2.5)] {
        let case = Case::new(t, d, v, temperature);
        let (logprobs, entropy, dh, dw) = run_both(&case, case.w.f32());
        let exact = naive(&case, |_, _| true);
        assert_near("logprobs", &logprobs, &exact[0], 3e-6);
        assert_near("entropy", &entropy, &exact[1], 3e-6);
        assert_near("dh", dh.data(), &exact[2], 1e-5);
        assert_near("dW", &in_rows(&dw, v, d), &exact[3], 1e-5);
        let scored = scored(&case);
        same_bits("scored", &scored.0, &logprobs);
        same_bits("scored", &scored.1, &entropy);
    }
}

#[test]
fn gradients_over_several_chunks_equal_those_of_single_tokens() {
    let case = Case::new(700, 4, 9000, 1.3);
    let (logprobs, entropy, dh, dw) = run_both(&case, case.w.f32());
    let scored = scored(&case);
    same_bits("scored", &scored.0, &logprobs);
    same_bits("scored", &scored.1, &entropy);
    let mut summed = vec![0.0f64; dw.len()];
    for i in 0..700 {
        let mut one = vec![0.0; dw.len()];
        let (mut lp, mut ent) = ([0.0], [0.0]);
        let mut dh_one = Tensor::scratch(1, 4);
        forward_backward(
            &Tensor::from_slice(1, 4, case.h.row(i)),
            case.w.f32(),
            &case.targets[i..=i],
            1.3,
            &mut |_: Range<usize>, _: &[f32], _: &[f32], dlp: &mut [f32], dent: &mut [f32]| {
                (dlp[0], dent[0]) = weights(i);
            },
            &mut lp,
            &mut ent,
            &mut dh_one,
            WeightMut { n: 9000, k: 4, layout: Layout::Panel, values: (&mut one).into() },
        );
        same_bits(&format!("dh of token {i}"), dh_one.data(), dh.row(i));
        summed.iter_mut().zip(&one).for_each(|(s, &x)| *s += f64::from(x));
    }
    assert_near("dW", &dw, &summed, 1e-5);
}

#[test]
fn a_bf16_head_gives_the_logprobs_and_gradients_of_its_rounded_inputs() {
    let (t, d, v) = (40, 24, 300);
    let mut numbers = Numbers::new(9);
    let case = Case {
        h: Tensor::from_slice(t, d, &Matrix::rounded(t, d, &mut numbers).rows),
        w: Matrix::rounded(v, d, &mut numbers),
        targets: (0..t).map(|i| (i * 7 % v) as u32).collect(),
        temperature: 1.0,
    };
    let exact = naive(&case, |_, _| true);
    let (logprobs, entropy, dh, dw) = run_both(&case, case.w.bf16());
    assert_near("logprobs", &logprobs, &exact[0], 3e-6);
    assert_near("entropy", &entropy, &exact[1], 3e-6);
    let (.., dh_f32, dw_f32) = run_both(&case, case.w.f32());
    // The gradients' own factors are rounded to 8 bits here.
    let off = [relative_gap(dh.data(), dh_f32.data()), relative_gap(&dw, &dw_f32)];
    assert!(off.iter().all(|off| *off < 4e-3), "dh and dW are off by {off:?}");
}

#[test]
fn logits_far_apart_neither_overflow_nor_give_nan() {
    let w = Matrix::from_rows(3, 1, vec![1.0, -1.0, 0.0]);
    let h = Tensor::from_slice(2, 1, &[1e4, -3e5]);
    let (mut logprobs, mut entropy) = ([0.0; 2], [0.0; 2]);
    forward(&h, w.f32(), &[0, 0], 1.0, &mut logprobs, &mut entropy);
    assert_eq!(logprobs, [0.0, -6e5]);
    assert!(entropy.iter().all(|e| e.abs() < 1e-30), "{entropy:?}");
}

#[test]
fn masked_logprobs_entropy_and_gradients_equal_the_f64_loop_with_and_without_vocabulary_shards() {
    let (t, d, v) = (70, 12, 165);
    let case = Case::new(t, d, v, 0.7);
    // Everything, the target alone, or what a hash says.
    let keeps = |i: usize, v: usize| match i % 7 {
        0 => true,
        1 => v as u32 == case.targets[i],
        _ => v as u32 == case.targets[i] || (i * 31 + v * 17) % 11 < 3,
    };
    let mask = |i: usize| SamplingMask::new((0..v as u32).filter(|&v| keeps(i, v as usize)));
    let masks: Vec<_> = (0..t).map(|i| if i % 7 == 0 { SamplingMask::default() } else { mask(i) }).collect();
    let targets = Targets { tokens: &case.targets, masks: &masks };
    let exact = naive(&case, keeps);
    for ends in [vec![v], vec![101, v]] {
        let gathered: RefCell<Vec<Vec<(RowStats, f32)>>> = RefCell::new(vec![Vec::new(); ends.len()]);
        let pass = |part: usize| {
            let rows = if part == 0 { 0 } else { ends[part - 1] }..ends[part];
            let w = Matrix::from_rows(rows.len(), d, case.w.rows[rows.start * d..rows.end * d].to_vec());
            let combine = |stats: &mut [RowStats], found: &mut [f32]| {
                let mut gathered = gathered.borrow_mut();
                gathered[part] = stats.iter().copied().zip(found.iter().copied()).collect();
                if gathered.iter().any(Vec::is_empty) {
                    return;
                }
                for (i, (stats, found)) in stats.iter_mut().zip(found).enumerate() {
                    *stats = RowStats::combined(&gathered.iter().map(|part| part[i].0).collect::<Vec<_>>());
                    *found = gathered.iter().map(|part| part[i].1).sum();
                }
            };
            let head =
                HeadPart { first: rows.start, rows_max: ends[0], combine: Some(&combine), gather: None, softcap: None };
            let [mut logprobs, mut entropy, mut scored, mut uncertain] = [(); 4].map(|()| vec![0.0; t]);
            let (l, e) = ((&mut scored[..]).into(), (&mut uncertain[..]).into());
            forward_part(&case.h, w.f32(), head, targets, case.temperature, l, Extra::Entropy, e, None);
            let (mut dh, mut dw) = (Tensor::scratch(t, d), vec![0.0; w.panels.len()]);
            let gradient = WeightMut { n: rows.len(), k: d, layout: Layout::Panel, values: (&mut dw).into() };
            let mut loss = |range: Range<usize>, _: &[f32], _: &[f32], dl: &mut [f32], de: &mut [f32]| {
                range.enumerate().for_each(|(j, i)| (dl[j], de[j]) = weights(i));
            };
            let (l, e) = (&mut logprobs, &mut entropy);
            forward_backward_part(
                &case.h,
                w.f32(),
                head,
                targets,
                case.temperature,
                &mut loss,
                None,
                l,
                e,
                &mut dh,
                Some(gradient),
            );
            same_bits("scored and trained", &[scored, uncertain].concat(), &[&logprobs[..], &entropy].concat());
            (logprobs, entropy, dh.data().to_vec(), in_rows(&dw, rows.len(), d))
        };
        // The statistics of all parts are known after the first round.
        (0..ends.len()).for_each(|part| drop(pass(part)));
        let parts: Vec<_> = (0..ends.len()).map(pass).collect();
        for (logprobs, entropy, ..) in &parts {
            assert_near("logprobs", logprobs, &exact[0], 3e-6);
            assert_near("entropy", entropy, &exact[1], 3e-6);
        }
        let dh: Vec<f32> = (0..t * d).map(|at| parts.iter().map(|part| part.2[at]).sum()).collect();
        assert_near("dh", &dh, &exact[2], 1e-5);
        assert_near("dW", &parts.iter().flat_map(|part| part.3.clone()).collect::<Vec<_>>(), &exact[3], 1e-5);
    }
}

#[test]
fn scoring_a_large_vocabulary_takes_at_most_64_mb() {
    // The arena counts the tensors of the whole process.
    crate::alone("ops::linear_logprob::scoring_a_large_vocabulary_takes_at_most_64_mb", || {
        let (t, d, v) = (300, 2, 151_936);
        let case = Case::new(t, d, v, 1.0);
        arena::trim();
        let before = arena::usage().held;
        scored(&case);
        let taken = arena::usage().held - before;
        assert!(taken <= 64_000_000, "{taken} bytes");
    });
}

#[test]
fn logits_of_minus_infinity_contribute_nothing() {
    let mut logits = Numbers::new(2).vec(777);
    let kept: Vec<f32> = logits.iter().copied().enumerate().filter(|(i, _)| i % 3 != 0).map(|(_, z)| z).collect();
    logits.iter_mut().step_by(3).for_each(|z| *z = f32::NEG_INFINITY);
    let z: Vec<f64> = kept.iter().map(|&z| f64::from(z) * 2.0).collect();
    let max = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = z.iter().map(|z| (z - max).exp()).sum();
    let entropy = sum.ln() - z.iter().map(|z| (z - max).exp() * (z - max)).sum::<f64>() / sum;
    for level in Level::available() {
        let stats = softmax::row_stats(level, &logits, 2.0);
        assert_near("statistics", &[stats.max, stats.sum_exp, stats.entropy()], &[max, sum, entropy], 1e-6);
        assert_eq!(stats.logprob(f32::NEG_INFINITY), f32::NEG_INFINITY);
    }
}
