//! Losses of labelled responses: KTO against OpenRLHF's numbers, to 1e-5, and derivatives against finite differences.

use rlhf_hpc::config::method::labelled::KtoConfig;
use rlhf_hpc::loss::labelled::{kto_loss, step_loss, step_margin};

use crate::formulas::golden::{Case, cases, close, read};

/// Log-ratios of a case: of desirable responses, and of the others.
fn log_ratios(case: &Case) -> [Vec<f64>; 2] {
    let h = |policy: &str, reference: &str| {
        let [policy, reference] = [policy, reference].map(|name| read::<Vec<f64>>(&case.inputs[name]));
        policy.iter().zip(reference).map(|(l, l_ref)| l - l_ref).collect()
    };
    [h("pc", "rc"), h("pr", "rr")]
}

#[test]
fn kto_agrees_in_loss_gradient_and_rewards() {
    for case in cases("kto") {
        let config = KtoConfig {
            beta: case.arg("beta").unwrap(),
            desirable_weight: case.arg("desirable_weight").unwrap(),
            undesirable_weight: case.arg("undesirable_weight").unwrap(),
            ..KtoConfig::default()
        };
        let sides = log_ratios(&case);
        let n = (sides[0].len() + sides[1].len()) as f64;
        let mut loss = 0.0;
        for (side, (input, rewards)) in [("pc", "chosen_rewards"), ("pr", "rejected_rewards")].into_iter().enumerate() {
            let [slopes, rewards]: [Vec<f64>; 2] = [read(&case.grad[input]), read(&case.out[rewards])];
            assert_eq!((slopes.len(), rewards.len()), (sides[side].len(), sides[side].len()));
            for (i, h) in sides[side].iter().enumerate() {
                let (of_row, slope) = kto_loss(&config, side == 0, *h, case.out["KL"].as_f64().unwrap());
                loss += of_row / n;
                close(slope / n, slopes[i], &case.args);
                close(config.beta * h, rewards[i], &case.args);
            }
        }
        close(loss, case.out["loss"].as_f64().unwrap(), &case.args);
    }
}

/// OpenRLHF's older loss uses the other side's mean log-ratio as KL and differentiates it, too. So only the loss
/// is compared.
#[test]
fn kto_with_a_kl_above_0_agrees_in_loss() {
    for case in cases("kto_vanilla") {
        let config = KtoConfig { beta: case.arg("beta").unwrap(), ..KtoConfig::default() };
        let mut sides = log_ratios(&case);
        let n = sides[0].len();
        sides[1].truncate(n);
        let kl = [1, 0].map(|other: usize| (sides[other].iter().sum::<f64>() / n as f64).max(0.0));
        assert!(kl.iter().all(|kl| *kl > 0.1), "{kl:?}");
        let all = (0..2).flat_map(|side| sides[side].iter().map(move |h| (side, h)));
        let loss: f64 = all.map(|(side, h)| kto_loss(&config, side == 0, *h, kl[side]).0).sum();
        close(loss / (2 * n) as f64, case.out["loss"].as_f64().unwrap(), &case.args);
    }
}

#[test]
fn derivatives_of_kto_equal_finite_differences() {
    const STEP: f64 = 1e-5;
    let config = KtoConfig { beta: 0.7, desirable_weight: 1.3, undesirable_weight: 0.6, ..KtoConfig::default() };
    for is_desirable in [true, false] {
        for h in [-2.0, 0.0, 0.5, 3.0] {
            let at = |by: f64| kto_loss(&config, is_desirable, h + by, 0.8).0;
            let (want, got) = ((at(STEP) - at(-STEP)) / (2.0 * STEP), kto_loss(&config, is_desirable, h, 0.8).1);
            assert!(want.abs() > 1e-3 && (got - want).abs() <= 1e-6, "{is_desirable} at {h}: {got}, not {want}");
        }
    }
    for h in [-1e9, 1e9] {
        let (loss, slope) = kto_loss(&config, true, h, 0.0);
        assert!(loss.is_finite() && slope == 0.0, "{loss}, {slope}");
    }
}

/// Logits of a vocabulary of five, of which three are reward tokens, and the labels.
const LOGITS: [f64; 5] = [0.3, -1.2, 2.0, 0.7, -0.4];
const REWARDS: [usize; 3] = [3, 1, 4];
const WANTED: [[f64; 3]; 3] = [[0.0, 1.0, 0.0], [0.25, 0.75, 0.0], [1.0, 0.0, 0.0]];

#[test]
fn the_loss_of_a_step_is_cross_entropy_over_the_reward_tokens_alone() {
    let softmax_loss = |logits: &[f64], wanted: &[f64]| -> f64 {
        let sum: f64 = REWARDS.iter().map(|&k| logits[k].exp()).sum();
        REWARDS.iter().zip(wanted).map(|(&k, y)| -y * (logits[k].exp() / sum).ln()).sum()
    };
    let log_sum = LOGITS.iter().map(|x| x.exp()).sum::<f64>().ln();
    let logprobs: Vec<f32> = REWARDS.iter().map(|&k| (LOGITS[k] - log_sum) as f32).collect();
    for wanted in WANTED {
        let (loss, slopes, p) = step_loss(&logprobs, &wanted);
        let (is_right, margin) = step_margin(&p, &wanted);
        assert!((loss - softmax_loss(&LOGITS, &wanted)).abs() < 1e-6, "{wanted:?}: {loss}");
        assert_eq!(is_right, wanted[0] == 1.0, "{wanted:?}: the first reward token is the likeliest");
        assert!(is_right == (margin > 0.0) && (p.iter().sum::<f64>() - 1.0).abs() < 1e-6, "{p:?}");
        // Through the log-probabilities back to the logits: the normaliser's part cancels.
        for v in 0..LOGITS.len() {
            let at = |by: f64| {
                let mut logits = LOGITS;
                logits[v] += by;
                softmax_loss(&logits, &wanted)
            };
            let want = (at(1e-5) - at(-1e-5)) / 2e-5;
            let share = (LOGITS[v] - log_sum).exp() * slopes.iter().sum::<f64>();
            let got = REWARDS.iter().zip(&slopes).filter(|(k, _)| **k == v).map(|(_, s)| s).sum::<f64>() - share;
            assert!((got - want).abs() < 1e-6, "{wanted:?}, token {v}: {got}, not {want}");
        }
    }
    let far = step_loss(&[-1e4, -1.0], &[1.0, 0.0]);
    assert!(far.0 == 9999.0 && far.1 == [-1.0, 1.0], "{far:?}");
}
