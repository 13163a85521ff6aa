//! The metrics whose curves the terminal shows.

use super::keys;
use super::line::Line;

/// Key and label of each curve, in the order of the screen.
pub(super) const CURVES: [(&str, &str); 11] = [
    (keys::REWARD_MEAN, "reward"),
    (keys::KL_MEAN, "kl"),
    (keys::ENTROPY, "entropy"),
    (keys::LOSS, "loss"),
    (keys::EVAL_LOSS, "held-out loss"),
    (keys::EVAL_KL_MEAN, "held-out kl"),
    (keys::EVAL_ACCURACY, "held-out accuracy"),
    (keys::EVAL_MARGIN_MEAN, "held-out margin"),
    (keys::EVAL_REWARD_MEAN, "held-out reward"),
    (keys::EVAL_ACCURACY_GREEDY, "held-out greedy"),
    (keys::EVAL_ACCURACY_SAMPLED, "held-out sampled"),
];

/// The values of each curve over the whole run.
#[derive(Clone, Debug, Default)]
pub struct Curves {
    values: [Vec<f64>; CURVES.len()],
    /// Whether a held-out reward was neither 0 nor 1.
    is_graded: bool,
}

impl Curves {
    pub fn add(&mut self, line: &Line) {
        let means = line.get(keys::EVAL_REWARD_MEAN).zip(line.get(keys::EVAL_ACCURACY_GREEDY));
        self.is_graded |= means.is_some_and(|(reward, share)| is_graded(reward, share));
        for ((key, _), values) in CURVES.iter().zip(&mut self.values) {
            // With a reward, the loss is not informative.
            let is_shown = *key != keys::LOSS || line.get(keys::REWARD_MEAN).is_none();
            values.extend(line.get(key).filter(|_| is_shown));
        }
    }

    /// Key, label and values of each curve. Held-out rewards are a mean if they are graded, else shares of correct
    /// answers.
    pub(super) fn all(&self) -> impl Iterator<Item = (&'static str, &'static str, &[f64])> {
        let is_shown = |key: &str| match key {
            keys::EVAL_REWARD_MEAN => self.is_graded,
            keys::EVAL_ACCURACY_GREEDY | keys::EVAL_ACCURACY_SAMPLED => !self.is_graded,
            _ => true,
        };
        let all = CURVES.iter().zip(&self.values).filter(move |((key, _), _)| is_shown(key));
        all.map(|((key, label), values)| (*key, *label, values.as_slice()))
    }
}

/// Whether rewards with this mean and this share of correct answers have other values than 0 and 1. With only these
/// two values, mean and share are equal.
pub fn is_graded(reward_mean: f64, share: f64) -> bool {
    (reward_mean - share).abs() > 1e-6
}
