//! Losses of pairs: against OpenRLHF's numbers, to 1e-5, and derivatives against finite differences.

use rlhf_hpc::config::method::preference::{DpoConfig, PairLoss, PreferenceLoss};
use rlhf_hpc::loss::preference::{Pair, PairLogprobs, pair_loss, preference_loss};

use crate::formulas::golden::{Case, cases, close, read};

/// Their loss is the mean over the pairs, and so are their derivatives; `sides` name the inputs of both.
fn agrees(case: &Case, pairs: &[(Pair, [f64; 2])], sides: [&str; 2]) {
    let (n, what) = (pairs.len() as f64, format!("{} of {sides:?}", case.args));
    let loss = pairs.iter().map(|(pair, _)| pair.loss).sum::<f64>() / n;
    close(loss, case.out["loss"].as_f64().unwrap(), &what);
    for (side, name) in sides.into_iter().enumerate() {
        let want: Vec<f64> = read(&case.grad[name]);
        assert_eq!(want.len(), pairs.len(), "{what}");
        for ((_, slopes), want) in pairs.iter().zip(want) {
            close(slopes[side] / n, want, &what);
        }
    }
}

#[test]
fn dpo_with_and_without_smoothing_and_ipo_agree() {
    for case in cases("dpo") {
        let ipo = case.args["ipo"] == true;
        let config = DpoConfig {
            loss: if ipo { PreferenceLoss::Ipo } else { PreferenceLoss::Sigmoid },
            beta: case.arg("beta").unwrap(),
            label_smoothing: case.arg("label_smoothing").unwrap_or(0.0),
            ..DpoConfig::default()
        };
        let [pc, pr] = ["pc", "pr"].map(|name| read::<Vec<f32>>(&case.inputs[name]));
        let [rc, rr] = ["rc", "rr"].map(|name| read::<Vec<f64>>(&case.inputs[name]));
        // A response of one token, whose log-probability is the sum.
        let of = |i: usize| PairLogprobs { chosen: &pc[i..=i], rejected: &pr[i..=i], reference: [rc[i], rr[i]] };
        let pairs: Vec<_> = (0..pc.len()).map(|i| preference_loss(&config, of(i))).collect();
        agrees(&case, &pairs, ["pc", "pr"]);
        let [chosen, rejected] = ["chosen_rewards", "rejected_rewards"].map(|name| read::<Vec<f64>>(&case.out[name]));
        for (i, (pair, _)) in pairs.iter().enumerate() {
            close(pair.chosen_reward, chosen[i], &case.args);
            close(pair.rejected_reward, rejected[i], &case.args);
        }
    }
}

#[test]
fn losses_of_reward_models_with_and_without_a_margin_agree() {
    for (name, kind, with_margin) in [("pairwise", PairLoss::Sigmoid, 1), ("logexp", PairLoss::Logexp, 0)] {
        let mut margins = 0;
        for case in cases(name) {
            let [chosen, rejected] = ["chosen", "reject"].map(|name| read::<Vec<f64>>(&case.inputs[name]));
            let margin: Option<Vec<f64>> = read(&case.inputs["margin"]);
            margins += usize::from(margin.is_some());
            let margin = margin.unwrap_or_else(|| vec![0.0; chosen.len()]);
            let pairs: Vec<_> = (0..chosen.len()).map(|i| pair_loss(kind, chosen[i], rejected[i], margin[i])).collect();
            agrees(&case, &pairs, ["chosen", "reject"]);
        }
        assert_eq!(margins, with_margin, "{name}");
    }
    let unmoved = |margin| pair_loss(PairLoss::Logexp, 0.5, -0.25, margin);
    assert_eq!(unmoved(3.0), unmoved(0.0), "logexp knows no margin");
}

/// Log-probabilities of 3 and of 5 tokens.
const CHOSEN: [f32; 3] = [-0.75, -1.5, -0.375];
const REJECTED: [f32; 5] = [-0.25, -2.0, -0.5, -1.25, -0.875];

#[test]
fn derivatives_of_every_preference_loss_equal_finite_differences() {
    const STEP: f32 = 1.0 / 1024.0;
    for loss in [PreferenceLoss::Sigmoid, PreferenceLoss::Ipo, PreferenceLoss::Simpo, PreferenceLoss::Orpo] {
        for nll_coef in [0.0, 0.3] {
            let config = DpoConfig {
                loss,
                beta: 0.7,
                label_smoothing: 0.2,
                nll_coef,
                simpo_margin: 0.4,
                orpo_coef: 0.6,
                ..DpoConfig::default()
            };
            let of = |sides: &[Vec<f32>; 2]| {
                let [chosen, rejected] = sides;
                preference_loss(&config, PairLogprobs { chosen, rejected, reference: [-3.0, -4.5] })
            };
            let sides = [CHOSEN.to_vec(), REJECTED.to_vec()];
            let (_, slopes) = of(&sides);
            for (side, t) in (0..2).flat_map(|side| (0..sides[side].len()).map(move |t| (side, t))) {
                let at = |by: f32| {
                    let mut moved = sides.clone();
                    moved[side][t] += by;
                    of(&moved).0.loss
                };
                let want = (at(STEP) - at(-STEP)) / (2.0 * f64::from(STEP));
                let (got, what) = (slopes[side], format!("{loss:?}, nll_coef {nll_coef}, side {side}, token {t}"));
                assert!(want.abs() > 1e-3, "{what}: the loss is flat, {want}");
                assert!((got - want).abs() <= 1e-3 * want.abs(), "{what}: derivative {got}, difference {want}");
            }
        }
    }
}

#[test]
fn losses_of_pairs_far_apart_and_of_certain_responses_are_finite() {
    for (chosen, rejected) in [(0.0, -5e3), (-5e3, 0.0), (0.0, 0.0)] {
        for loss in [PreferenceLoss::Sigmoid, PreferenceLoss::Ipo, PreferenceLoss::Simpo, PreferenceLoss::Orpo] {
            let config = DpoConfig { loss, label_smoothing: 0.1, ..DpoConfig::default() };
            let pair = PairLogprobs { chosen: &[chosen], rejected: &[rejected], reference: [0.0; 2] };
            let (pair, slopes) = preference_loss(&config, pair);
            let all = [pair.loss, slopes[0], slopes[1]];
            assert!(all.iter().all(|x| x.is_finite()), "{loss:?} of {chosen} and {rejected}: {all:?}");
        }
        let (pair, slopes) = pair_loss(PairLoss::Sigmoid, f64::from(chosen), f64::from(rejected), 1.0);
        assert!(pair.loss.is_finite() && slopes.iter().all(|x| x.is_finite()), "{chosen} and {rejected}: {pair:?}");
    }
}
