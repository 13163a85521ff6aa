//! Derivatives of losses that are local to a token, against the host's and against naive f64 loops.

use crate::faults::noticed;
use crate::{device, in_every_order, numbers, on_a_real_gpu};
use rlhf_hpc::config::model::DType::F32;
use rlhf_hpc::config::ppo::{KlEstimator, KlIn, PolicyLossKind, PpoConfig};
use rlhf_hpc::device::cuda::Memory;
use rlhf_hpc::device::cuda::token_loss::{self, PolicyInputs};
use rlhf_hpc::loss::policy::{PolicySums, PolicyTokens, policy_loss};
use rlhf_hpc::loss::value::value_loss;
use std::ops::Range;

/// More than two blocks.
const N: usize = 300;
const BETA: f32 = 0.3;

/// Tokens at, inside and outside of every border of the losses; those of weight 0 hold what must not matter.
struct Tokens {
    logprobs: Vec<f32>,
    old: Vec<f32>,
    advantages: Vec<f32>,
    refs: Vec<f32>,
    entropy: Vec<f32>,
    factors: Vec<f32>,
    weights: Vec<f32>,
}

impl Tokens {
    fn new() -> Self {
        let old: Vec<f32> = numbers(1, N).iter().map(|x| 2.0 * x - 3.0).collect();
        let steps = numbers(2, N);
        let edges = [0.0, 1.2f32.ln(), 0.8f32.ln(), 20.0, -20.0, 25.0, -25.0, 1e-6, 3.0, -3.0];
        let logprobs = (0..N).map(|t| old[t] + if t % 3 == 0 { edges[t / 3 % 10] } else { 0.5 * steps[t] });
        let far = [0.0, 10.0, -10.0, 12.0, -12.0, 4.5, -4.5, -2.4, -2.5];
        let logprobs: Vec<f32> = logprobs.collect();
        let refs = (0..N).map(|t| logprobs[t] - if t % 4 == 0 { far[t / 4 % 9] } else { 0.7 * numbers(3, N)[t] });
        let mut all = Self {
            refs: refs.collect(),
            advantages: numbers(4, N)
                .iter()
                .enumerate()
                .map(|(t, a)| if t % 29 == 5 { 0.0 } else { 2.0 * a })
                .collect(),
            entropy: numbers(5, N).iter().map(|x| x + 1.5).collect(),
            factors: numbers(6, N).iter().enumerate().map(|(t, f)| if t % 11 == 3 { 0.0 } else { 1.0 + f }).collect(),
            weights: numbers(7, N).iter().map(|w| 0.01 * (w + 1.1)).collect(),
            logprobs,
            old,
        };
        for t in (0..N).filter(|t| t % 7 == 2) {
            all.weights[t] = 0.0;
            all.logprobs[t] = f32::NEG_INFINITY;
            all.refs[t] = f32::NAN;
            all.factors[t] = f32::INFINITY;
        }
        all
    }

    /// The host's tokens `range`; without references or factors where they are not wanted.
    fn part(&self, range: &Range<usize>, refs: bool, factors: bool) -> PolicyTokens<'_> {
        let part = |x: &'static str| -> &[f32] {
            let all = match x {
                "refs" if !refs => return &[],
                "factors" if !factors => return &[],
                "refs" => &self.refs,
                "factors" => &self.factors,
                "logprobs" => &self.logprobs,
                "old" => &self.old,
                "advantages" => &self.advantages,
                "entropy" => &self.entropy,
                _ => &self.weights,
            };
            &all[range.clone()]
        };
        PolicyTokens {
            logprobs: part("logprobs"),
            old_logprobs: part("old"),
            advantages: part("advantages"),
            ref_logprobs: part("refs"),
            entropy: part("entropy"),
            factors: part("factors"),
            weights: part("weights"),
        }
    }
}

/// Every loss that is local to a token, with each of its terms.
fn configs() -> Vec<(PpoConfig, bool, bool)> {
    let mut all = Vec::new();
    let estimators = [KlEstimator::K1, KlEstimator::K2, KlEstimator::K3];
    for (loss, dual_clip) in [(PolicyLossKind::Clip, 0.0), (PolicyLossKind::Clip, 1.5), (PolicyLossKind::Cispo, 0.0)] {
        for (i, kl_in) in [KlIn::None, KlIn::Loss, KlIn::Loss, KlIn::Loss, KlIn::Reward].into_iter().enumerate() {
            let kl_estimator = estimators[i % 3];
            let entropy_coef = [0.0, 0.01, -0.02][i % 3];
            let config = PpoConfig { loss, dual_clip, kl_in, kl_estimator, entropy_coef, ..PpoConfig::default() };
            all.push((config, i != 0, i % 2 == 1));
        }
    }
    all
}

/// The derivatives that the GPU makes of each of `ranges`, one behind the other.
fn on_gpu(config: &PpoConfig, tokens: &PolicyTokens, ranges: &[Range<usize>]) -> [Vec<f32>; 2] {
    let inputs =
        PolicyInputs::of([tokens.old_logprobs, tokens.advantages, tokens.weights], tokens.ref_logprobs, tokens.factors);
    let logprobs = Memory::of(tokens.logprobs);
    let [mut dl, mut dh] = [(); 2].map(|()| Memory::of(&[f32::NAN; N]));
    for range in ranges {
        let l = logprobs.view(F32).part(range.clone());
        let [a, b] = [&mut dl, &mut dh].map(|memory| memory.view_mut(F32).part(range.clone()));
        token_loss::policy(config, BETA, &inputs, range.clone(), l, a, b);
    }
    [dl.read(N), dh.read(N)]
}

/// The same bits on a GPU that is emulated, whose exponentials are the host's; a rounding apart on a real one.
fn assert_same(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (t, (got, want)) in got.iter().zip(want).enumerate() {
        let near = on_a_real_gpu() && (got - want).abs() <= 2.0 * f32::EPSILON * want.abs();
        assert!(near || got.to_bits() == want.to_bits(), "{what}: token {t}: {got}, the host has {want}");
    }
}

#[test]
fn derivatives_of_every_policy_loss_are_those_of_the_host() {
    let tokens = Tokens::new();
    let ranges = [0..0, 0..1, 1..130, 130..130, 130..N];
    in_every_order(|| {
        for (config, refs, factors) in configs() {
            let tokens = tokens.part(&(0..N), refs, factors);
            let [mut dl, mut dh] = [[f32::NAN; N]; 2];
            let sums: PolicySums = policy_loss(&config, BETA, &tokens, &mut dl, &mut dh);
            assert!(sums.clipped > 10 && sums.clipped < sums.tokens - 10, "both sides of the clip: {sums:?}");
            let got = on_gpu(&config, &tokens, &ranges);
            let what = format!("{config:?}");
            assert_same(&got[0], &dl, &what);
            assert_same(&got[1], &dh, &what);
        }
    });
}

/// A naive loop: the loss of one token as a formula, its slope by a case for each of its pieces.
fn naive(config: &PpoConfig, t: usize, tokens: &Tokens) -> f64 {
    let x = |values: &[f32]| f64::from(values[t]);
    let (l, o, a, w) = (x(&tokens.logprobs), x(&tokens.old), x(&tokens.advantages), x(&tokens.weights));
    let f = x(&tokens.factors);
    if w == 0.0 {
        return 0.0;
    }
    let (low, high) = (1.0 - f64::from(config.clip_low), 1.0 + f64::from(config.clip_high));
    let r = (l - o).clamp(-20.0, 20.0).exp();
    let moves = (l - o).abs() <= 20.0;
    let surrogate = if config.loss == PolicyLossKind::Cispo {
        r.min(high) * a
    } else {
        // Where the clipped term or the bound of the dual clip is in force, nothing flows.
        let held = (a > 0.0 && r > high) || (a < 0.0 && r < low);
        let bound = config.dual_clip > 0.0 && a < 0.0 && r > f64::from(config.dual_clip);
        if held || bound || !moves { 0.0 } else { r * a }
    };
    let d = l - x(&tokens.refs);
    let (kl, slope) = match config.kl_estimator {
        KlEstimator::K1 => (d, 1.0),
        KlEstimator::K2 => (d * d / 2.0, d),
        KlEstimator::K3 => ((-d).exp() - 1.0 + d, 1.0 - (-d).exp()),
    };
    let slope = if kl.abs() > 10.0 || config.kl_in != KlIn::Loss { 0.0 } else { slope };
    -w * f * surrogate + f64::from(BETA) * w * slope
}

#[test]
fn derivatives_of_every_policy_loss_are_those_of_f64() {
    let (_gpu, _one) = device();
    let tokens = Tokens::new();
    for (config, ..) in configs() {
        let given = tokens.part(&(0..N), true, true);
        let [dl, dh] = on_gpu(&config, &given, std::slice::from_ref(&(0..N)));
        for t in 0..N {
            let want = naive(&config, t, &tokens);
            // Two terms rounded to f32 and their sum; a border of the ratio may fall to either side of it.
            let error = (f64::from(dl[t]) - want).abs();
            let scale = f64::from(tokens.weights[t]) * 60.0;
            assert!(error <= 3e-7 * want.abs().max(scale), "{config:?}, token {t}: {} needs {want}", dl[t]);
            let bonus = f64::from(config.entropy_coef) * f64::from(tokens.weights[t]);
            assert!((f64::from(dh[t]) + bonus).abs() <= 1e-7 * bonus.abs(), "{config:?}, token {t}");
        }
    }
}

#[test]
#[should_panic(expected = "the ratio of gspo is of whole sequences")]
fn the_ratio_of_a_sequence_is_refused() {
    let (_gpu, _one) = device();
    let config = PpoConfig { loss: PolicyLossKind::Gspo, ..PpoConfig::default() };
    on_gpu(&config, &Tokens::new().part(&(0..N), false, false), std::slice::from_ref(&(0..1)));
}

#[test]
fn derivatives_of_the_value_loss_are_those_of_the_host_and_of_f64() {
    let old = numbers(1, N);
    let steps = numbers(2, N);
    let edges = [0.0, 0.2, -0.2, 0.4, -0.4];
    let mut values: Vec<f32> = (0..N).map(|t| old[t] + if t % 3 == 0 { edges[t / 3 % 5] } else { steps[t] }).collect();
    let returns = numbers(3, N);
    let mut weights: Vec<f32> = numbers(4, N).iter().map(|w| 0.02 * (w + 1.1)).collect();
    for t in (0..N).filter(|t| t % 6 == 4) {
        (weights[t], values[t]) = (0.0, f32::NAN);
    }
    in_every_order(|| {
        for clip in [0.0, 0.2] {
            for n in [0, 1, 128, N] {
                let mut want = vec![f32::NAN; n];
                let sums = value_loss(clip, &values[..n], &old[..n], &returns[..n], &weights[..n], &mut want);
                assert!(n < N || (sums.clipped > 0) == (clip > 0.0), "{sums:?}");
                let (on_gpu, mut dvalues) = (Memory::of(&values[..n]), Memory::of(&vec![f32::NAN; n]));
                let read = [&old[..n], &returns[..n], &weights[..n]];
                token_loss::value(clip, on_gpu.view(F32), read, dvalues.view_mut(F32));
                let got: Vec<f32> = dvalues.read(n);
                assert_same(&got, &want, &format!("clip {clip}"));
                for t in (0..n).filter(|&t| weights[t] != 0.0) {
                    let x = |values: &[f32]| f64::from(values[t]);
                    let (v, o, r) = (x(&values), x(&old), x(&returns));
                    let held =
                        clip > 0.0 && (o + (v - o).clamp(-f64::from(clip), f64::from(clip)) - r).abs() > (v - r).abs();
                    let want = if held { 0.0 } else { x(&weights) * (v - r) };
                    assert!((f64::from(got[t]) - want).abs() <= 1e-7 * want.abs(), "clip {clip}, token {t}");
                }
            }
        }
    });
}

#[test]
fn losses_with_a_wrong_piece_are_noticed() {
    let fact = "token_loss::derivatives_of_every_policy_loss_are_those_of_the_host";
    for (from, to) in [
        ("advantage < 0.0 && (double)dual", "(double)dual"),
        ("if (clipped < plain) value", "if (clipped > plain) value"),
        ("fabs(d) > 20.0 ? 0.0 : r", "r"),
        ("return fabs(kl) > 10.0 ? 0.0 : slope;", "return slope;"),
    ] {
        assert_eq!(noticed(fact, ("token_loss.cu", from, to), ", the host has "), None);
    }
    let fact = "token_loss::derivatives_of_the_value_loss_are_those_of_the_host_and_of_f64";
    assert_eq!(
        noticed(fact, ("token_loss.cu", "clipped * clipped > error", "clipped * clipped < error"), ", the host has "),
        None
    );
}
