//! The best evaluation of a run: its checkpoint is kept, its weights may be exported, and a run that stays behind it may end.

use crate::config::Config;
use crate::config::checkpoint::BestMode;
use crate::error::{Error, Result};
use crate::metrics::keys::{Metrics, is_eval};
use serde::{Deserialize, Serialize};

/// What an evaluation is judged by, and the best one so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Best {
    metric: String,
    /// 0: none yet. The evaluation before the first step is of a model that the user has.
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

    /// Takes in an evaluation after `step`; whether it is the best so far. Of equal ones that is the first.
    ///
    /// # Errors
    /// `Usage` where it has no `checkpoint.best_metric`.
    pub fn judge(&mut self, config: &Config, step: u64, metrics: &Metrics) -> Result<bool> {
        let metric = &config.checkpoint.best_metric;
        if metric.is_empty() {
            return Ok(false);
        }
        let Some((_, value)) = metrics.iter().find(|(name, _)| name == metric) else {
            let names: Vec<&str> = metrics.iter().map(|(name, _)| &**name).filter(|name| is_eval(name)).collect();
            let hint = if names.is_empty() {
                "there are no rows to evaluate: set data.eval_split".to_string()
            } else {
                format!("evaluations of this job have {}", names.join(", "))
            };
            return Err(Error::usage(format!("checkpoint.best_metric is {metric}, an evaluation has none")).hint(hint));
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

    /// Why the run ends before its last step, where it does.
    pub fn ends(&self, config: &Config) -> Option<String> {
        let patience = config.eval.patience;
        let is_over = patience > 0 && self.since >= patience && self.metric == config.checkpoint.best_metric;
        is_over.then(|| {
            format!("{} evaluations without a better {} (eval.patience = {patience})", self.since, self.metric)
        })
    }

    /// `eval_loss = 0.25 at step 40`
    pub fn describe(&self) -> Option<String> {
        self.step().map(|step| format!("{} = {:.4} at step {step}", self.metric, self.value))
    }
}
