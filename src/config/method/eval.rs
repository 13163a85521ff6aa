//! `[eval]`: evaluations during training, and jobs that only evaluate.

use super::interface::{MethodConfig, RowKind, Shared, Uses};
use crate::config::limits::{COUNT, FINITE};
use crate::config::rollout::TEMPERATURE_MIN;
use crate::error::{Error, Result};

table! {
    pub struct EvalConfig {
        pub every_steps: u64 = 0 => 0.0..=COUNT,
        pub samples_max: usize = 0 => 0.0..=COUNT,
        pub patience: u64 = 0 => 0.0..=COUNT,
        pub correct_at: f32 = 1.0 => -FINITE..=FINITE,
        pub samples_per_prompt: usize = 1 => 1.0..=65_536.0,
        pub pass_at: Vec<usize> = vec![1],
        pub temperature: f32 = 0.0 => 0.0..=FINITE,
        pub beams: usize = 1 => 1.0..=1024.0,
    }
}

impl EvalConfig {
    /// Rejects numbers of samples that have no meaning.
    pub fn check(&self) -> Result<()> {
        let (n, t) = (self.samples_per_prompt, self.temperature);
        Error::need(
            t == 0.0 || t >= TEMPERATURE_MIN,
            format!("eval.temperature must be 0 (greedy) or at least {TEMPERATURE_MIN} (got {t})"),
        )?;
        if let Some(k) = self.pass_at.iter().find(|k| !(1..=n).contains(*k)) {
            return Err(Error::usage(format!(
                "eval.pass_at must be between 1 and eval.samples_per_prompt = {n} (got {k})"
            ))
            .hint("raise eval.samples_per_prompt: pass@k needs at least k samples of a prompt"));
        }
        if n > 1 && t == 0.0 {
            return Err(Error::usage(format!("eval.samples_per_prompt must be 1 with eval.temperature = 0 (got {n})"))
                .hint("set eval.temperature, for example to 1.0: at temperature 0 all samples of a prompt are equal"));
        }
        Ok(())
    }

    /// Whether an evaluation is due after `step` (from 1) of `steps`.
    pub fn due(&self, step: u64, steps: u64) -> bool {
        self.every_steps > 0 && (step == steps || step.is_multiple_of(self.every_steps))
    }

    /// Whether samples use a temperature of their own instead of the rollout's.
    pub fn draws(&self) -> bool {
        self.temperature > 0.0
    }
}

impl MethodConfig for EvalConfig {
    fn title(&self) -> String {
        "evaluation".into()
    }

    fn uses(&self, _shared: &Shared) -> Uses {
        Uses { samples: true, trains: false, eval_sets: true, ..Uses::rows(RowKind::Prompt) }
    }

    fn check(&self, shared: &Shared) -> Result<()> {
        shared.reward.check().and(shared.rollout.check())
    }
}
