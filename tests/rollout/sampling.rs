//! One token from a row of logits.

use rlhf_hpc::device::cpu::pool;
use rlhf_hpc::device::simd::{Level, with_level};
use rlhf_hpc::ops::sample::{SampleParams, SampleRow, Sampled, forward, forward_parts, top_parts};
use rlhf_hpc::rng::{Purpose, Rng};
use rlhf_hpc::tensor::Tensor;

fn normal_rows(rows: usize, v: usize, scale: f32, seed: u64) -> Tensor {
    let rng = Rng::new(seed, Purpose::Init);
    let data: Vec<f32> = (0..rows * v).map(|i| rng.normal_pair([i as u32, 0, 0, 0])[0] * scale).collect();
    Tensor::from_slice(rows, v, &data)
}

fn draw(logits: &[f32], params: SampleParams, uniform: f32, seen: &[u32], banned: &[u32]) -> Sampled {
    let logits = Tensor::from_slice(1, logits.len(), logits);
    let mut out = [Sampled::default()];
    forward(&logits, &[SampleRow { params, uniform, seen, banned, bias: &[] }], &mut out);
    out[0]
}

fn softmax(x: &[f64]) -> Vec<f64> {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let e: Vec<f64> = x.iter().map(|x| (x - max).exp()).collect();
    let sum: f64 = e.iter().sum();
    e.iter().map(|e| e / sum).collect()
}

/// The distribution without filters.
fn plain(logits: &[f32], temperature: f32) -> Vec<f64> {
    softmax(&logits.iter().map(|&x| f64::from(x) / f64::from(temperature)).collect::<Vec<f64>>())
}

/// The filtered distribution by its definition, in f64: every filter on the renormalised result of the one before.
/// `seen` ascends.
fn distribution(logits: &[f32], params: &SampleParams, seen: &[u32], banned: &[u32]) -> Vec<f64> {
    let mut x: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
    for (token, x) in x.iter_mut().enumerate() {
        if seen.binary_search(&(token as u32)).is_ok() {
            let penalty = f64::from(params.repetition_penalty);
            *x = if *x < 0.0 { *x * penalty } else { *x / penalty };
        }
        if banned.contains(&(token as u32)) {
            *x = f64::NEG_INFINITY;
        }
        *x /= f64::from(params.temperature);
    }
    let mut order: Vec<usize> = (0..x.len()).collect();
    order.sort_by(|&a, &b| x[b].partial_cmp(&x[a]).expect("numbers").then(a.cmp(&b)));
    if params.top_k > 0 && params.top_k < x.len() {
        let border = x[order[params.top_k - 1]];
        x.iter_mut().filter(|x| **x < border).for_each(|x| *x = f64::NEG_INFINITY);
    }
    if params.top_p < 1.0 {
        let p = softmax(&x);
        let mut before = 0.0;
        for (rank, &token) in order.iter().enumerate() {
            if rank > 0 && before >= f64::from(params.top_p) {
                x[token] = f64::NEG_INFINITY;
            }
            before += p[token];
        }
    }
    let p = softmax(&x);
    let top = p.iter().copied().fold(0.0, f64::max);
    for (x, p) in x.iter_mut().zip(&p) {
        if *p < f64::from(params.min_p) * top {
            *x = f64::NEG_INFINITY;
        }
    }
    softmax(&x)
}

/// Whether `token` is the inverse of the cumulative distribution at `uniform`, up to `slack` at its borders.
fn is_inverse(p: &[f64], token: usize, uniform: f32, slack: f64) -> bool {
    let before: f64 = p[..token].iter().sum();
    let u = f64::from(uniform);
    p[token] > 0.0 && before - slack <= u && u <= before + p[token] + slack
}

fn combinations() -> Vec<SampleParams> {
    let mut all = Vec::new();
    for temperature in [0.5, 1.0, 1.7] {
        for top_k in [0, 1, 7, 40, 100_000] {
            for top_p in [1.0, 0.95, 0.5, 0.01] {
                for min_p in [0.0, 0.03, 0.5] {
                    for repetition_penalty in [1.0, 1.3] {
                        all.push(SampleParams { temperature, top_k, top_p, min_p, repetition_penalty });
                    }
                }
            }
        }
    }
    all
}

#[test]
fn samples_and_logprobs_equal_a_naive_f64_loop_for_every_combination_of_filters() {
    let rng = Rng::new(3, Purpose::Sample);
    for (i, (v, scale)) in [(5, 1.0), (37, 2.0), (300, 3.0), (2048, 0.3), (3001, 4.0)].into_iter().enumerate() {
        let logits = normal_rows(1, v, scale, 40 + i as u64);
        let seen: Vec<u32> = (0..v as u32).filter(|t| t % 5 == 2).flat_map(|t| [t, t]).collect();
        for (c, params) in combinations().into_iter().enumerate() {
            let banned: &[u32] = if c % 3 == 0 { &[1, 4] } else { &[] };
            let p = distribution(logits.row(0), &params, &seen, banned);
            let plain = plain(logits.row(0), params.temperature);
            for k in 0..12 {
                let uniform = match k {
                    0 => 0.0,
                    1 => 1.0 - f32::EPSILON / 2.0,
                    _ => rng.sample_uniform(i as u32, c as u64, k, 0),
                };
                let sampled = draw(logits.row(0), params, uniform, &seen, banned);
                let token = sampled.token as usize;
                assert!(is_inverse(&p, token, uniform, 2e-6), "v {v}, {params:?}, u {uniform}: token {token}");
                assert!(
                    (f64::from(sampled.sample_logprob) - p[token].ln()).abs() < 1e-5,
                    "v {v}, {params:?}: {sampled:?}"
                );
                assert!(
                    (f64::from(sampled.logprob) - plain[token].ln()).abs() < 2e-5,
                    "v {v}, {params:?}: {sampled:?}"
                );
            }
        }
    }
}

#[test]
fn a_flat_or_peaked_large_vocabulary_is_filtered_like_in_the_naive_loop() {
    for (i, scale) in [0.0, 0.05, 3.0, 12.0].into_iter().enumerate() {
        let logits = normal_rows(1, 151_936, scale, 90 + i as u64);
        for (top_p, top_k) in [(0.2, 0), (0.9, 1000), (0.999, 0), (0.999, 1000)] {
            let params = SampleParams { top_p, top_k, ..SampleParams::plain(1.0) };
            let p = distribution(logits.row(0), &params, &[], &[]);
            for uniform in [0.0, 0.3, 0.62, 0.999] {
                let sampled = draw(logits.row(0), params, uniform, &[], &[]);
                let token = sampled.token as usize;
                // A border may fall one token aside: 1e-5 of a flat distribution.
                assert!(is_inverse(&p, token, uniform, 5e-5), "scale {scale}, {params:?}, u {uniform}: {token}");
                let off = (f64::from(sampled.sample_logprob) - p[token].ln()).abs();
                assert!(off < 1e-4, "scale {scale}, {params:?}: {sampled:?}, off by {off}");
            }
        }
    }
}

#[test]
fn biases_are_applied_first_and_do_not_change_the_recorded_logprob() {
    let (seen, bias) = ([3, 9, 9, 11], [(2, 1.5), (9, -2.0), (11, 40.0)]);
    let logits = normal_rows(1, 37, 2.0, 44);
    let mut biased = logits.row(0).to_vec();
    for (token, bias) in bias {
        biased[token as usize] += bias;
    }
    for params in combinations() {
        let row = SampleRow { params, uniform: 0.4, seen: &seen, banned: &[11], bias: &bias };
        let mut out = [Sampled::default()];
        forward(&logits, &[row], &mut out);
        let p = distribution(&biased, &params, &seen, &[11]);
        let plain = plain(logits.row(0), params.temperature);
        let token = out[0].token as usize;
        assert!(is_inverse(&p, token, 0.4, 2e-6), "{params:?}: token {token}");
        assert!((f64::from(out[0].sample_logprob) - p[token].ln()).abs() < 1e-5, "{params:?}: {out:?}");
        assert!((f64::from(out[0].logprob) - plain[token].ln()).abs() < 2e-5, "{params:?}: {out:?}");
    }
}

/// The tokens that are sampled for some uniform of a fine grid.
fn support(logits: &[f32], params: SampleParams) -> Vec<u32> {
    let mut tokens: Vec<u32> = (0..4096).map(|i| draw(logits, params, i as f32 / 4096.0, &[], &[]).token).collect();
    tokens.sort_unstable();
    tokens.dedup();
    tokens
}

#[test]
fn top_p_keeps_equal_probabilities_lowest_token_first() {
    let params = SampleParams { top_p: 0.485, ..SampleParams::plain(1.0) };
    assert_eq!(support(&[1.0; 100], params), (0..49).collect::<Vec<u32>>());
}

#[test]
fn top_k_keeps_k_tokens_and_ties_with_the_last_of_them() {
    let plain = SampleParams::plain(1.0);
    assert_eq!(support(&[0.0, 3.0, 1.0, 2.0], SampleParams { top_k: 2, ..plain }), [1, 3]);
    assert_eq!(support(&[1.0, 2.0, 1.0, 0.5], SampleParams { top_k: 2, ..plain }), [0, 1, 2]);
}

#[test]
fn temperature_zero_selects_the_largest_logit_and_the_lowest_token_of_equal_ones() {
    let logits = [0.5, 2.0, -1.0, 2.0];
    for uniform in [0.0, 0.4, 0.999] {
        let sampled = draw(&logits, SampleParams::greedy(), uniform, &[], &[]);
        assert_eq!((sampled.token, sampled.sample_logprob), (1, 0.0));
        let e = logits.map(|x| f64::from(x).exp());
        assert!((f64::from(sampled.logprob) - (e[1] / e.iter().sum::<f64>()).ln()).abs() < 1e-6);
    }
    let penalised = SampleParams { repetition_penalty: 8.0, ..SampleParams::greedy() };
    assert_eq!(draw(&logits, penalised, 0.0, &[1, 3], &[]).token, 0);
}

#[test]
fn a_row_samples_the_same_token_for_any_other_rows_threads_and_instruction_set() {
    let logits = normal_rows(23, 5000, 2.0, 6);
    let rng = Rng::new(1, Purpose::Sample);
    let params = |i: usize| match i % 3 {
        0 => SampleParams::plain(1.0),
        1 => SampleParams { top_k: 50, top_p: 0.9, ..SampleParams::plain(0.8) },
        _ => SampleParams { min_p: 0.1, repetition_penalty: 1.2, ..SampleParams::plain(1.2) },
    };
    let seen = [3, 4999, 17];
    let rows: Vec<SampleRow> = (0..23)
        .map(|i| {
            let uniform = rng.sample_uniform(0, i as u64, 0, 0);
            SampleRow { params: params(i), uniform, seen: &seen, banned: &[], bias: &[] }
        })
        .collect();
    let alone: Vec<Sampled> =
        (0..23).map(|i| draw(logits.row(i), rows[i].params, rows[i].uniform, &seen, &[])).collect();
    for threads in [1, 2, 3] {
        pool::set_threads(threads);
        for level in Level::available() {
            let mut out = vec![Sampled::default(); 23];
            with_level(level, || forward(&logits, &rows, &mut out));
            assert_eq!(out, alone, "{threads} threads, {level:?}");
        }
    }
}

#[test]
fn a_non_finite_row_has_a_nan_logprob() {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut logits = vec![0.5; 100];
        logits[70] = bad;
        for params in [SampleParams::plain(1.0), SampleParams::greedy()] {
            assert!(draw(&logits, params, 0.5, &[], &[]).logprob.is_nan(), "{bad} {params:?}");
        }
    }
}

#[test]
fn a_sharded_vocabulary_samples_the_same_tokens_and_logprobs_up_to_rounding() {
    let logits = normal_rows(40, 1003, 3.0, 8);
    let rng = Rng::new(4, Purpose::Sample);
    let filtered = SampleParams { temperature: 0.8, top_k: 50, top_p: 0.9, min_p: 0.01, repetition_penalty: 1.2 };
    for params in [SampleParams::plain(1.0), SampleParams::greedy(), filtered] {
        let row = |i: u64| SampleRow {
            params,
            uniform: rng.sample_uniform(0, i, 0, 0),
            seen: &[3, 900],
            banned: &[5],
            bias: &[],
        };
        let rows: Vec<SampleRow> = (0..40).map(row).collect();
        let (mut whole, mut parts) = (vec![Sampled::default(); 40], vec![Sampled::default(); 40]);
        forward(&logits, &rows, &mut whole);
        forward_parts(&logits, &[320, 321, 704, 1003], &rows, &mut parts);
        for (whole, parts) in whole.iter().zip(&parts) {
            assert_eq!(whole.token, parts.token);
            assert!((whole.logprob - parts.logprob).abs() < 2e-6, "{whole:?} {parts:?}");
            assert!((whole.sample_logprob - parts.sample_logprob).abs() < 2e-6, "{whole:?} {parts:?}");
        }
    }
}

#[test]
fn the_best_tokens_are_those_of_a_naive_f64_loop_after_penalty_and_ban() {
    let (seen, banned, n) = ([7, 7, 90], [11, 12], 9);
    let params = SampleParams { repetition_penalty: 1.3, ..SampleParams::plain(0.8) };
    for (v, scale) in [(9, 1.0), (300, 3.0), (5003, 0.2)] {
        let mut logits = normal_rows(3, v, scale, 70 + v as u64);
        // Equal ones, lowest token first.
        logits.row_mut(2).fill(0.5);
        let (seen, banned) = if v > 90 { (&seen[..], &banned[..]) } else { (&[][..], &[][..]) };
        let row = SampleRow { params, uniform: 0.0, seen, banned, bias: &[] };
        let mut out = vec![Sampled::default(); 3 * n];
        top_parts(&logits, &[v / 2, v], &[row; 3], n, &mut out);
        for (i, best) in out.chunks_exact(n).enumerate() {
            let plain = plain(logits.row(i), 0.8);
            let penalty = |token: u32| if seen.contains(&token) { 1.3 } else { 1.0 };
            let allowed = (0..v as u32).filter(|token| !banned.contains(token));
            let mut naive: Vec<(f64, u32)> =
                allowed.map(|token| (plain[token as usize].ln() * penalty(token), token)).collect();
            naive.sort_by(|a, b| b.0.partial_cmp(&a.0).expect("numbers").then(a.1.cmp(&b.1)));
            for (got, (score, token)) in best.iter().zip(naive) {
                assert_eq!(got.token, token, "v {v}, row {i}");
                assert!((f64::from(got.sample_logprob) - score).abs() < 1e-4, "v {v}: {got:?}, needed {score}");
                assert!((f64::from(got.logprob) - plain[token as usize].ln()).abs() < 1e-4, "v {v}: {got:?}");
            }
        }
    }
    let mut out = vec![Sampled::default(); 2];
    let row = SampleRow { params, uniform: 0.0, seen: &[], banned: &[], bias: &[] };
    top_parts(&Tensor::from_slice(1, 3, &[0.0, f32::NAN, 1.0]), &[3], &[row], 2, &mut out);
    assert!(out[0].logprob.is_nan(), "a row that is not finite");
}
