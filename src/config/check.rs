//! Checks of a job that types cannot make: ranges, combinations of values, and values that this release does not
//! support.

use super::job::{DeviceName, Gemm};
use super::limits::{self, Ranges};
use super::method::Uses;
use super::{Config, TABLES};
use crate::error::{Error, Result};

impl Config {
    /// Rejects a job that cannot run.
    pub fn check(&self) -> Result<()> {
        self.check_ranges()?;
        self.data.check()?;
        self.optim.actor.check("optim.actor")?;
        self.lora.check()?;
        self.checkpoint.check(&self.eval)?;
        self.check_eval().and(self.check_rollout_ranks())?;
        self.method().check(&self.shared())?;
        self.check_texts().and(self.check_steps())?;
        for (key, path) in [("job.dir", &self.job.dir), ("model.actor", &self.model.actor)] {
            Error::need(!path.as_os_str().is_empty(), format!("{key} must be a directory (got an empty string)"))?;
        }
        if self.job.gemm == Gemm::Cublaslt && self.job.device == DeviceName::Cpu {
            return Err(Error::usage("job.gemm = \"cublaslt\" needs GPUs (got job.device = \"cpu\")")
                .hint("set job.gemm = \"exact\" or \"auto\", or job.device = \"gpu\""));
        }
        Ok(())
    }

    /// Rejects pretraining rows that no loss counts.
    fn check_texts(&self) -> Result<()> {
        let has_texts = !self.data.pretrain.is_empty();
        match self.uses() {
            Uses { pretrain: Some((key, coef)), .. } => Error::need(
                has_texts == (coef > 0.0),
                format!("{key} must be above 0 if data.pretrain is set, and 0 otherwise (got {coef})"),
            ),
            uses => Error::need(
                !has_texts || !uses.trains,
                format!("data.pretrain is set, but {} jobs do not use it", self.kind()),
            ),
        }
    }

    /// Rejects a job whose number of steps is 0.
    fn check_steps(&self) -> Result<()> {
        let of = self.kind();
        match self.method().epochs() {
            _ if self.job.steps > 0 || !self.uses().trains => Ok(()),
            None => Err(Error::usage(format!("job.steps must be at least 1 in a {of} job (got 0)"))),
            Some(epochs) => {
                Error::need(epochs > 0.0, format!("{of}.epochs or job.steps must be above 0 (got {epochs} and 0)"))
            }
        }
    }

    /// Rejects rollout ranks of their own, or a rollout that runs ahead, in jobs that do not support them.
    fn check_rollout_ranks(&self) -> Result<()> {
        let ahead = self.mesh.async_updates_max > 0;
        if !self.uses().rollout_ranks && (ahead || self.mesh.rollout_is_apart()) {
            let kind = self.kind();
            return Err(Error::usage(format!(
                "rollout ranks of their own are for ppo jobs only (got job.kind = \"{kind}\")"
            ))
            .hint("remove \"rollout\" from mesh.placement, and mesh.async_updates_max"));
        }
        if ahead && self.rollout.dynamic_sampling.is_on() {
            return Err(Error::usage(
                "mesh.async_updates_max does not support rollout.dynamic_sampling, whose rounds wait for scores",
            )
            .hint("set mesh.async_updates_max = 0; the rollout can still have ranks of its own"));
        }
        if ahead && self.rollout.response_tokens_grow_at > 0.0 {
            return Err(Error::usage(
                "mesh.async_updates_max does not support rollout.response_tokens_grow_at, which waits for the last step",
            )
            .hint("remove rollout.response_tokens_grow_at; rollout.response_tokens_schedule alone works"));
        }
        if self.mesh.async_updates_max > 1 && !self.reward.environment.is_empty() {
            let k = self.mesh.async_updates_max;
            return Err(Error::usage(format!(
                "mesh.async_updates_max must be at most 1 with reward.environment, whose turns cannot change weights (got {k})"
            ))
            .hint("set mesh.async_updates_max = 1"));
        }
        self.mesh.check_async()
    }

    fn check_eval(&self) -> Result<()> {
        self.eval.check()?;
        if self.eval.beams > 1 && !self.reward.environment.is_empty() {
            return Err(Error::usage("eval.beams does not support reward.environment, whose turns are sampled")
                .hint("remove eval.beams"));
        }
        if self.data.eval_sets.is_empty() || self.uses().eval_sets {
            return Ok(());
        }
        let kind = self.kind();
        Err(Error::usage(format!(
            "data.eval_sets is for ppo and eval jobs; {kind} jobs evaluate on data.eval_split only"
        ))
        .hint("remove data.eval_sets, and evaluate checkpoints or the export with job.kind = \"eval\""))
    }

    /// Rejects numbers outside their ranges, even if the job does not use them.
    pub fn check_ranges(&self) -> Result<()> {
        let values = serde_json::to_value(self).map_err(|e| Error::fault(e.to_string()))?;
        let check = |(table, ranges): &(&str, Ranges)| {
            let settings = table.split('.').fold(&values, |values, name| &values[name]);
            limits::check_values(table, settings, ranges).err()
        };
        Error::all(TABLES.iter().filter_map(check).collect())
    }
}
