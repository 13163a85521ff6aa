//! The best evaluation of a run. Its checkpoint is kept, its weights may be exported, and a run that does not improve
//! on it may end early.

use crate::config::Config;
use crate::config::checkpoint::BestMode;
use crate::error::{Error, Result};
use crate::metrics::keys::{Metrics, is_eval};
use serde::{Deserialize, Serialize};

/// The metric that ranks evaluations, and the best evaluation so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Best {
    metric: String,
    /// The step of the best evaluation, 0 if there is none. The evaluation before the first step does not count,
    /// because the user already has that model.
    step: u64,
    value: f64,
    /// Evaluations since then.
    since: u64,
}

impl Best {
    /// The step whose checkpoint is the best.
    pub fn step(&self) -> Option<u64> {
        (self.step > 0).then_some(self.step)
    }

    /// Forgets the best evaluation, whose checkpoint is lost. The next one is the best so far.
    pub fn forget(&mut self) {
        *self = Self { metric: std::mem::take(&mut self.metric), ..Self::default() };
    }

    /// Records an evaluation after `step` and returns whether it is the best so far. Of equal evaluations the first is
    /// the best.
    ///
    /// # Errors
    /// `Usage` if it does not report `checkpoint.best_metric`.
    pub fn judge(&mut self, config: &Config, step: u64, metrics: &Metrics) -> Result<bool> {
        let metric = &config.checkpoint.best_metric;
        if metric.is_empty() {
            return Ok(false);
        }
        let Some((_, value)) = metrics.iter().find(|(name, _)| name == metric) else {
            let names: Vec<&str> = metrics.iter().map(|(name, _)| &**name).filter(|name| is_eval(name)).collect();
            let hint = if names.is_empty() {
                "set data.eval_split: this job has no held-out rows".to_string()
            } else {
                format!("choose one of {}", names.join(", "))
            };
            return Err(Error::usage(format!(
                "checkpoint.best_metric = {metric}, but the evaluations of this job do not report it"
            ))
            .hint(hint));
        };
        if self.metric != *metric {
            *self = Self { metric: metric.clone(), ..Self::default() };
        }
        if step == 0 {
            return Ok(false);
        }
        let lower = match config.checkpoint.best_mode {
            BestMode::ByMetric => metric.ends_with("loss") || metric.contains("kl"),
            mode => mode == BestMode::Min,
        };
        let improves = if lower { *value < self.value } else { *value > self.value };
        if value.is_finite() && (improves || self.step == 0) {
            (self.step, self.value, self.since) = (step, *value, 0);
            return Ok(true);
        }
        self.since += 1;
        Ok(false)
    }

    /// The reason why the run ends before its last step, if it does.
    pub fn ends(&self, config: &Config) -> Option<String> {
        let patience = config.eval.patience;
        let is_over = patience > 0 && self.since >= patience && self.metric == config.checkpoint.best_metric;
        is_over.then(|| {
            let plural = if self.since == 1 { "" } else { "s" };
            format!("no better {} in {} evaluation{plural} (eval.patience = {patience})", self.metric, self.since)
        })
    }

    /// Describes the best evaluation: `eval_loss = 0.25 at step 40`.
    pub fn describe(&self) -> Option<String> {
        self.step().map(|step| format!("{} = {:.4} at step {step}", self.metric, self.value))
    }
}
