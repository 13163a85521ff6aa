//! The numbers whose curves the terminal shows.

use super::keys;
use super::line::Line;

#[derive(Clone, Copy, Debug)]
pub(super) struct Curve {
    pub key: &'static str,
    pub label: &'static str,
}

impl Curve {
    pub fn is_eval(&self) -> bool {
        keys::is_eval(self.key)
    }
}

pub(super) const CURVES: [Curve; 8] = [
    Curve { key: keys::REWARD_MEAN, label: "reward" },
    Curve { key: keys::KL_MEAN, label: "kl" },
    Curve { key: keys::ENTROPY, label: "entropy" },
    Curve { key: keys::LOSS, label: "loss" },
    Curve { key: keys::EVAL_LOSS, label: "held-out loss" },
    Curve { key: keys::EVAL_ACCURACY, label: "held-out accuracy" },
    Curve { key: keys::EVAL_ACCURACY_GREEDY, label: "held-out greedy" },
    Curve { key: keys::EVAL_ACCURACY_SAMPLED, label: "held-out sampled" },
];

/// The values of each curve over the whole run.
#[derive(Clone, Debug, Default)]
pub struct Curves([Vec<f64>; CURVES.len()]);

impl Curves {
    pub fn add(&mut self, line: &Line) {
        for (curve, values) in CURVES.iter().zip(&mut self.0) {
            values.extend(line.get(curve.key));
        }
    }

    /// In the order of the screen.
    pub(super) fn all(&self) -> impl Iterator<Item = (&'static Curve, &[f64])> {
        CURVES.iter().zip(self.0.iter().map(Vec::as_slice))
    }
}

impl<'a> FromIterator<&'a Line> for Curves {
    fn from_iter<I: IntoIterator<Item = &'a Line>>(lines: I) -> Self {
        let mut curves = Self::default();
        lines.into_iter().for_each(|line| curves.add(line));
        curves
    }
}
