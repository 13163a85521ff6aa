//! Warnings of a run about settings and metrics that are rarely intended. Each is given once and names the key to
//! change. Warnings of a method are on its page.

use crate::config::Config;
use crate::data::Rows;
use crate::metrics::keys::{self, Metrics};
use std::collections::BTreeSet;

/// Share of filtered rows above which a run warns.
const FILTERED: f64 = 0.1;
/// Lead of the accuracy on trained rows over held-out rows above which a run warns, if both have at least
/// `OVERFIT_SAMPLES` rows.
const OVERFIT: f64 = 0.2;
const OVERFIT_SAMPLES: f64 = 32.0;
/// The wait for rewards in a step above which a run warns, in seconds. Shorter ones are not worth a change.
const WAITING_S: f64 = 0.5;

/// KL divergence per token by the rounding of keys and values above which a run warns, in nats.
const KV_KL: f64 = 0.02;

/// A warning, with a name by which it is given once.
pub type Warning = (&'static str, String);

/// Warns before the first step if many rows are filtered.
pub fn of_filtered(rows: &Rows) -> Option<String> {
    let ledger = rows.ledger();
    let (filtered, rules) = ledger.losses();
    let share = filtered as f64 / ledger.rows.max(1) as f64;
    (share > FILTERED).then(|| {
        format!("{:.0} % of the rows are filtered, as listed in ledger.jsonl ({})", 100.0 * share, rules.join("; "))
    })
}

/// Warns before the first step of a run of `steps` steps if it has not all the steps to trace.
pub fn of_trace(config: &Config, steps: u64) -> Option<String> {
    let missing = config.metrics.untraced(steps);
    let list = missing.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    (!missing.is_empty()).then(|| format!("metrics.trace_steps: the run has steps 1 to {steps}, and no step {list}"))
}

/// Warnings about the numbers of steps, each of which is given once.
#[derive(Default)]
pub struct Warnings {
    /// The names of the warnings given so far.
    given: BTreeSet<&'static str>,
    /// Accuracy of the last step, and its number of rows.
    trained: (f64, f64),
}

impl Warnings {
    /// The warnings of a step that were not given before. `values` are the metrics of the step.
    pub fn of_step(&mut self, values: &Metrics, warnings: Vec<Warning>) -> Vec<String> {
        self.trained = (value(values, keys::ACCURACY), value(values, keys::SAMPLES));
        self.new_ones(warnings)
    }

    /// A new warning about a step of `seconds` that `waited` for rewards or the environment.
    pub fn of_waiting(&mut self, config: &Config, waited: f64, seconds: f64) -> Option<String> {
        let reward = &config.reward;
        let batch = match (reward.python.is_empty(), reward.http.is_empty()) {
            (true, true) => "",
            (false, _) => ", raise batch in [[reward.python]], or make the function async",
            (true, false) => ", or raise batch in [[reward.http]]",
        };
        let is_slow = waited > WAITING_S && waited > 0.5 * seconds;
        let warning = is_slow.then(|| {
            let share = 100.0 * waited / seconds;
            let text = format!("{share:.0} % of a step was spent waiting for rewards: raise reward.workers{batch}");
            ("waiting", text)
        });
        self.new_ones(warning).pop()
    }

    /// New warnings about an evaluation after the last step.
    pub fn of_eval(&mut self, values: &Metrics) -> Vec<String> {
        let (accuracy, samples) = self.trained;
        let held_out = value(values, keys::EVAL_ACCURACY);
        let enough = samples.min(value(values, keys::EVAL_SAMPLES)) >= OVERFIT_SAMPLES;
        let overfitted = (enough && accuracy - held_out > OVERFIT).then(|| {
            let text = format!(
                "accuracy is {accuracy:.2} on the rows of the step and {held_out:.2} on held-out rows, so the model \
                 overfits: use fewer epochs, a smaller optim.actor.lr or more rows, or keep the best checkpoint with \
                 checkpoint.best_metric"
            );
            ("overfit", text)
        });
        let kl = value(values, keys::EVAL_KV_KL_MEAN);
        let rounds = (kl > KV_KL).then(|| {
            let text = format!(
                "rounding keys and values changes the policy by {kl:.3} nats per token (eval_kv_kl_mean): set \
                 rollout.kv_dtype = \"model\" if the trained model will be used without it"
            );
            ("kv_kl", text)
        });
        self.new_ones(overfitted.into_iter().chain(rounds))
    }

    fn new_ones(&mut self, all: impl IntoIterator<Item = Warning>) -> Vec<String> {
        all.into_iter().filter(|(name, _)| self.given.insert(name)).map(|(_, text)| text).collect()
    }
}

/// The metric `key`, NaN if the step does not have it.
pub fn value(values: &Metrics, key: &str) -> f64 {
    values.iter().find(|(name, _)| name == key).map_or(f64::NAN, |(_, value)| *value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::keys::named;

    #[test]
    fn a_model_that_is_right_only_on_training_rows_causes_one_warning() {
        let mut warnings = Warnings::default();
        let mut of = |samples: f64, held_out: f64| {
            warnings.of_step(&named([(keys::ACCURACY, 0.95), (keys::SAMPLES, samples)]), Vec::new());
            let values = named([(keys::EVAL_ACCURACY, held_out), (keys::EVAL_SAMPLES, 64.0)]);
            warnings.of_eval(&values).len()
        };
        assert_eq!([of(16.0, 0.5), of(64.0, 0.9), of(64.0, 0.7), of(64.0, 0.6)], [0, 0, 1, 0]);
    }

    #[test]
    fn a_policy_that_rounded_keys_change_causes_one_warning() {
        let mut warnings = Warnings::default();
        let mut of = |kl: f64| warnings.of_eval(&named([(keys::EVAL_KV_KL_MEAN, kl)])).concat();
        assert!(of(0.02).is_empty() && of(0.021).contains("0.021 nats per token") && of(0.5).is_empty());
    }
}
