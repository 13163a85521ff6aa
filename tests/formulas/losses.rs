//! Losses: derivatives against finite differences, and their properties.

use rlhf_hpc::config::method::ppo::{Aggregation, KlEstimator, KlIn, PolicyLossKind, PpoConfig};
use rlhf_hpc::loss::aggregation::{Totals, weights};
use rlhf_hpc::loss::policy::{PolicySums, PolicyTokens, policy_loss};
use rlhf_hpc::loss::token::cross_entropy;
use rlhf_hpc::rng::{Purpose, Rng};

const N: usize = 64;
const STEP: f32 = 1.0 / 1024.0;

/// One whole sequence of seeded tokens; every seventh is masked.
struct Sequence {
    logprobs: Vec<f32>,
    old_logprobs: Vec<f32>,
    ref_logprobs: Vec<f32>,
    advantages: Vec<f32>,
    entropy: Vec<f32>,
    factors: Vec<f32>,
    weights: Vec<f32>,
}

impl Sequence {
    fn new(aggregation: Aggregation) -> Self {
        let rng = Rng::new(11, Purpose::Sample);
        let normal = |stream: u32, t: usize| rng.normal_pair([stream, t as u32, 0, 0])[0];
        let row = |stream: u32, scale: f32, shift: f32| -> Vec<f32> {
            (0..N).map(|t| shift + scale * normal(stream, t)).collect()
        };
        let old_logprobs = row(0, 0.5, -2.0);
        // Around the old ones, and off the borders of the clip range by more than the step of the differences.
        let mut logprobs: Vec<f32> = old_logprobs.iter().zip(row(1, 0.3, 0.0)).map(|(o, d)| o + d).collect();
        for (l, o) in logprobs.iter_mut().zip(&old_logprobs) {
            if [0.8f32.ln(), 1.2f32.ln()].iter().any(|border| (*l - o - border).abs() < 4.0 * STEP) {
                *l += 16.0 * STEP;
            }
        }
        let mask: Vec<u8> = (0..N).map(|t| u8::from(t % 7 != 3)).collect();
        let mut totals = Totals { tokens: 100, sequences: 2 };
        totals.add_mask(&mask);
        let mut row_weights = Vec::new();
        weights(aggregation, &mask, totals, 80, &mut row_weights);
        let ref_logprobs = row(2, 0.5, -2.0);
        let factors = row(3, 0.1, 1.0);
        let (advantages, entropy) = (row(4, 1.0, 0.0), row(5, 0.1, 1.5));
        Self { logprobs, old_logprobs, ref_logprobs, advantages, entropy, factors, weights: row_weights }
    }

    fn tokens(&self) -> PolicyTokens<'_> {
        PolicyTokens {
            logprobs: &self.logprobs,
            old_logprobs: &self.old_logprobs,
            advantages: &self.advantages,
            ref_logprobs: &self.ref_logprobs,
            entropy: &self.entropy,
            factors: &self.factors,
            weights: &self.weights,
        }
    }

    fn loss(&self, config: &PpoConfig) -> (PolicySums, Vec<f32>, Vec<f32>) {
        let (mut dlogprobs, mut dentropy) = (vec![f32::NAN; N], vec![f32::NAN; N]);
        let sums = policy_loss(config, 0.3, &self.tokens(), &mut dlogprobs, &mut dentropy);
        (sums, dlogprobs, dentropy)
    }
}

type Row = fn(&mut Sequence) -> &mut Vec<f32>;

/// Central difference of the loss by entry t of a row.
fn difference(sequence: &mut Sequence, row: Row, t: usize, config: &PpoConfig) -> f64 {
    let x = row(sequence)[t];
    let mut loss = |x: f32| {
        row(sequence)[t] = x;
        sequence.loss(config).0.loss
    };
    let (up, down) = (x + STEP, x - STEP);
    let (high, low) = (loss(up), loss(down));
    row(sequence)[t] = x;
    (high - low) / (f64::from(up) - f64::from(down))
}

#[track_caller]
fn same_slope(got: f32, want: f64, scale: f64, what: &str) {
    assert!((f64::from(got) - want).abs() <= 1e-4 * scale, "{what}: derivative {got}, difference {want}");
}

#[test]
fn policy_derivatives_equal_finite_differences() {
    let clip = PpoConfig::default();
    let configs = [
        ("kl k2", PpoConfig { kl_in: KlIn::Loss, kl_estimator: KlEstimator::K2, ..clip.clone() }),
        (
            "kl k3 and entropy",
            PpoConfig {
                kl_in: KlIn::Loss,
                kl_estimator: KlEstimator::K3,
                entropy_coef: 0.05,
                aggregation: Aggregation::Sequence,
                ..clip.clone()
            },
        ),
        (
            "weighted kl",
            PpoConfig { kl_in: KlIn::Loss, kl_estimator: KlEstimator::K3, kl_weighted: true, ..clip.clone() },
        ),
        ("fixed sum", PpoConfig { aggregation: Aggregation::SequenceSumFixed, ..clip.clone() }),
        ("sapo", PpoConfig { loss: PolicyLossKind::Sapo, sapo_tau_negative: 2.0, ..clip }),
    ];
    for (name, config) in configs {
        let mut sequence = Sequence::new(config.aggregation_in_force());
        let (_, dlogprobs, dentropy) = sequence.loss(&config);
        let mut moving = 0;
        for t in 0..N {
            let scale = f64::from(sequence.weights[t]).max(1e-3);
            let rows: [(&str, f32, Row); 2] =
                [("logprob", dlogprobs[t], |s| &mut s.logprobs), ("entropy", dentropy[t], |s| &mut s.entropy)];
            for (what, slope, row) in rows {
                let want = difference(&mut sequence, row, t, &config);
                same_slope(slope, want, scale, &format!("{name}, {what} {t}"));
            }
            moving += usize::from(dlogprobs[t] != 0.0);
        }
        assert!(moving > N / 4, "{name}: only {moving} tokens have a gradient");
    }
}

#[test]
fn cispo_derivative_holds_its_weight_constant() {
    let config = PpoConfig { loss: PolicyLossKind::Cispo, ..PpoConfig::default() };
    let sequence = Sequence::new(Aggregation::Token);
    let (sums, dlogprobs, _) = sequence.loss(&config);
    // With the clipped weight frozen the loss is linear in l: loss = sum of derivative times l.
    let linear: f64 = dlogprobs.iter().zip(&sequence.logprobs).map(|(&d, &l)| f64::from(d) * f64::from(l)).sum();
    assert!((sums.policy_loss - linear).abs() < 1e-6 * linear.abs().max(1.0));
    for (t, &got) in dlogprobs.iter().enumerate() {
        let ratio = (f64::from(sequence.logprobs[t]) - f64::from(sequence.old_logprobs[t])).exp().min(1.2);
        let weight = f64::from(sequence.weights[t]) * f64::from(sequence.factors[t]);
        let want = -weight * ratio * f64::from(sequence.advantages[t]);
        same_slope(got, want, f64::from(sequence.weights[t]).max(1e-3), "cispo");
    }
    assert!(sums.clipped > 0 && sums.clipped < sums.tokens);
}

#[test]
fn values_at_masked_tokens_have_no_effect() {
    let config = PpoConfig { entropy_coef: 0.1, ..PpoConfig::default() };
    let mut sequence = Sequence::new(Aggregation::Token);
    let want = sequence.loss(&config);
    for t in (0..N).filter(|t| t % 7 == 3) {
        sequence.logprobs[t] = f32::NEG_INFINITY;
        sequence.ref_logprobs[t] = f32::NAN;
        sequence.advantages[t] = f32::NAN;
        sequence.entropy[t] = f32::INFINITY;
    }
    assert_eq!(sequence.loss(&config), want);
    let mut d = vec![0.0; N];
    assert!(cross_entropy(&sequence.logprobs, &sequence.weights, &mut d).is_finite());
}

#[test]
fn a_log_ratio_beyond_twenty_is_flat() {
    let config = PpoConfig { clip_high: 1e30, ..PpoConfig::default() };
    let mut d = [0.0];
    let tokens = PolicyTokens {
        logprobs: &[-1.0],
        old_logprobs: &[-31.0],
        advantages: &[1.0],
        weights: &[1.0],
        ..PolicyTokens::default()
    };
    let sums = policy_loss(&config, 0.0, &tokens, &mut d, &mut []);
    assert!((sums.loss + 20f64.exp()).abs() < 1.0);
    assert_eq!(d, [0.0]);
}

#[test]
fn weights_sum_to_one_over_the_minibatch_and_skip_empty_sequences() {
    let masks: [&[u8]; 3] = [&[1, 0, 1, 1], &[0, 0], &[1, 1, 1, 1, 1]];
    let mut totals = Totals::default();
    for mask in masks {
        totals.add_mask(mask);
    }
    assert_eq!(totals, Totals { tokens: 8, sequences: 2 });
    for (aggregation, want) in [
        (Aggregation::Token, 1.0),
        (Aggregation::Sequence, 1.0),
        // 8 tokens of 2 sequences of at most 10.
        (Aggregation::SequenceSumFixed, 0.4),
    ] {
        let mut all = Vec::new();
        for mask in masks {
            weights(aggregation, mask, totals, 10, &mut all);
        }
        assert_eq!(all.len(), 11);
        let sum: f64 = all.iter().map(|&w| f64::from(w)).sum();
        assert!((sum - want).abs() < 1e-6, "{aggregation:?}: {sum}");
        assert_eq!((all[1], all[4], all[5]), (0.0, 0.0, 0.0));
    }
}
