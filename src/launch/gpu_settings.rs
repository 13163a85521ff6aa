//! Settings that GPUs do not support yet.

use crate::config::Config;
use crate::config::job::DeviceName;
use crate::config::model::DTypeName;
use crate::error::{Error, Result};

/// Rejects settings that GPUs do not support yet, if the job asks for GPUs.
pub fn check(config: &Config) -> Result<()> {
    if config.job.device == DeviceName::Gpu { check_settings(config) } else { Ok(()) }
}

/// The same for a job that may run on GPUs.
pub(super) fn check_settings(Config { model, rollout, .. }: &Config) -> Result<()> {
    for (is_set, what, hint) in [
        (
            model.dtype == DTypeName::F32,
            "model.dtype = \"f32\": they hold weights and activations in bf16",
            "set model.dtype = \"bf16\", or job.device = \"cpu\"",
        ),
        (
            rollout.keep_sampling_mask,
            "rollout.keep_sampling_mask = true: no kernel masks logits yet",
            "set job.device = \"cpu\", or use ppo.correction instead",
        ),
    ] {
        if is_set {
            return Err(Error::usage(format!("GPUs do not support {what}")).hint(hint));
        }
    }
    Ok(())
}
