//! The metrics whose curves the terminal shows.

use super::keys;
use super::line::Line;

/// Key and label of each curve, in the order of the screen.
pub(super) const CURVES: [(&str, &str); 10] = [
    (keys::REWARD_MEAN, "reward"),
    (keys::KL_MEAN, "kl"),
    (keys::ENTROPY, "entropy"),
    (keys::LOSS, "loss"),
    (keys::EVAL_LOSS, "held-out loss"),
    (keys::EVAL_KL_MEAN, "held-out kl"),
    (keys::EVAL_ACCURACY, "held-out accuracy"),
    (keys::EVAL_MARGIN_MEAN, "held-out margin"),
    (keys::EVAL_ACCURACY_GREEDY, "held-out greedy"),
    (keys::EVAL_ACCURACY_SAMPLED, "held-out sampled"),
];

/// The values of each curve over the whole run.
#[derive(Clone, Debug, Default)]
pub struct Curves([Vec<f64>; CURVES.len()]);

impl Curves {
    pub fn add(&mut self, line: &Line) {
        for ((key, _), values) in CURVES.iter().zip(&mut self.0) {
            // With a reward, the loss is not informative.
            let is_shown = *key != keys::LOSS || line.get(keys::REWARD_MEAN).is_none();
            values.extend(line.get(key).filter(|_| is_shown));
        }
    }

    /// Key, label and values of each curve.
    pub(super) fn all(&self) -> impl Iterator<Item = (&'static str, &'static str, &[f64])> {
        CURVES.iter().zip(&self.0).map(|((key, label), values)| (*key, *label, values.as_slice()))
    }
}
