//! Checks before the first step that a job fits the machine.

use super::layout::Expected;
use super::run::Run;
use crate::config::rollout::RolloutConfig;
use crate::device::{Device, cuda};
use crate::dtype::DType;
use crate::error::{Error, Result, format_bytes};
use crate::metrics::rollouts::step_bytes_max;
use crate::model::{Arch, CacheGroup, Transformer};
use crate::rollout;
use crate::rollout::blocks::held_max;
use crate::rollout::scheduler::cached_tokens_max;
use crate::sys::{bounded_log, files, memory};
use crate::tensor::arena::{self, Usage};
use std::path::{Path, PathBuf};

/// The name of offloaded state and copies in errors.
const PINNED: &str = "offloaded state and weights (in pinned host memory)";

impl Run {
    /// Rejects a job if its gradients and optimizer state do not fit the free memory, or if its checkpoints, export and
    /// kept rollouts do not fit the disk. A checkpoint of all trained models takes `saved_bytes`, the export
    /// `export_bytes`, and the rollouts of a step at most `rollout_bytes`. All ranks call this after they have loaded
    /// their models, or made room for them; that room will take `unwritten` bytes of a host.
    pub fn check_resources(
        &self,
        unwritten: usize,
        saved_bytes: usize,
        export_bytes: usize,
        rollout_bytes: u64,
    ) -> Result<()> {
        let Expected { gradients, state, host: pinned, .. } = self.expected().cloned().unwrap_or_default();
        // Offloaded state is onloaded one part at a time.
        let to_come = if self.ranks.layout().swap.has_state() { gradients } else { gradients + state };
        let (within, what, of_host) = match self.device {
            Device::Cpu => (
                within(to_come, arena::usage(), ["on each rank", "", "mesh.arena_bytes_max allows", arena::HINT]),
                "gradients and optimizer state",
                to_come + unwritten,
            ),
            Device::Cuda => (within_gpu(to_come), PINNED, pinned),
        };
        let (ranks, available) = (self.ranks.world.local_size as u64, memory::available_bytes());
        self.ranks.all.agree(within.and_then(|()| fits(what, of_host as u64, ranks, available)))?;
        let export = if self.config.job.export { export_bytes } else { 0 };
        let fits = if self.ranks.all.rank() == 0 { self.fits_disk(saved_bytes, export, rollout_bytes) } else { Ok(()) };
        self.ranks.all.agree(fits)
    }

    fn fits_disk(&self, saved_bytes: usize, export: usize, rollout_bytes: u64) -> Result<()> {
        let (checkpoints, metrics, steps) = (&self.config.checkpoint, &self.config.metrics, self.config.job.steps);
        // A replay saves nothing.
        let saved_bytes = if self.replay.is_some() { 0 } else { saved_bytes };
        let to_come = |dir: &Path, keep_last, every_steps| {
            // Checkpoints, or files of rollouts.
            let is_of_a_step =
                |path: &PathBuf| path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"step-"));
            let there = files::entries(dir).map_or(0, |all| all.iter().filter(|path| is_of_a_step(path)).count());
            files_to_come(keep_last, every_steps, steps, there)
        };
        let best = usize::from(!checkpoints.best_metric.is_empty());
        let count = to_come(&self.checkpoints(), checkpoints.keep_last, checkpoints.every_steps) + best;
        let logs =
            if self.config.reward.has_python() { self.ranks.all.size() as u64 * bounded_log::BYTES_MAX } else { 0 };
        let saved = (count * saved_bytes + export) as u64 + logs;
        let recorded =
            to_come(&self.dir.join("rollouts"), metrics.rollouts_keep_last, metrics.rollouts_every_steps) as u64;
        // Few responses have the longest length. If all rollouts are kept, future ones do not reject a job.
        let counted = if metrics.rollouts_keep_last == 0 { 1 } else { recorded };
        let each = format_bytes(rollout_bytes);
        let logs = if logs > 0 { format!(", logs of rewards (up to {})", format_bytes(logs)) } else { String::new() };
        let what = |recorded| match rollout_bytes {
            0 => format!("checkpoints ({count} more){logs} and the export"),
            _ => format!(
                "checkpoints ({count} more), the export{logs}, and rollouts ({recorded} more of up to {each} each)"
            ),
        };
        let refused = |e: Error| {
            let e = e.within(what(counted));
            if rollout_bytes > 0 { e.also("set metrics.rollouts_keep_last to keep fewer rollouts") } else { e }
        };
        files::check_space(&self.dir, saved.saturating_add(rollout_bytes.saturating_mul(counted))).map_err(refused)?;
        if let Err(e) = files::check_space(&self.dir, saved.saturating_add(rollout_bytes.saturating_mul(recorded))) {
            let e = e.within(what(recorded));
            self.recorder.warn(&format!("{}; set metrics.rollouts_keep_last to keep fewer rollouts", e.message));
        }
        Ok(())
    }

    /// The most bytes of disk space that the rollouts of a step take, with prompts of up to `prompt_tokens` tokens and
    /// an actor of this shape; 0 if none are recorded.
    pub fn rollout_bytes_max(&self, prompt_tokens: usize, arch: &Arch) -> u64 {
        let (rollout, every_steps) = (&self.config.rollout, self.config.metrics.rollouts_every_steps);
        let samples = rollout.prompts_per_step * rollout.samples_per_prompt;
        let response_tokens = rollout::new_tokens_max(rollout, 0, arch.context);
        let mask = rollout.largest_mask(arch.vocabulary).map_or(0, |mask| size_of::<i64>() + mask.bytes());
        let masks = (samples * response_tokens * mask) as u64;
        if every_steps == 0 { 0 } else { step_bytes_max(samples, prompt_tokens, response_tokens) + masks }
    }
}

/// Rejects jobs that cannot sample: `rollout.kv_bytes_max` does not hold the longest row, or a stop token is outside
/// the vocabulary. `transformer` is the actor's in the rollout, with weights of `dtype`; `prompt_tokens` is the longest
/// prompt.
pub fn check_sampling(
    config: &RolloutConfig,
    transformer: &Transformer,
    dtype: DType,
    prompt_tokens: usize,
) -> Result<()> {
    let (arch, prompt) = (&transformer.arch, prompt_tokens);
    if let Some(token) = config.stop_token_ids.iter().find(|token| **token as usize >= arch.vocabulary) {
        let last = arch.vocabulary - 1;
        let message =
            format!("rollout.stop_token_ids must be at most {last}, the last token of model.actor (got {token})");
        return Err(Error::usage(message));
    }
    let response = rollout::new_tokens_max(config, prompt, arch.context);
    let tokens = cached_tokens_max(prompt, response);
    let pages = |group: &CacheGroup| held_max(group.kept, tokens, config.prefill_tokens_max);
    let groups = transformer.cache_groups().iter().map(pages);
    let needed: usize = groups.zip(transformer.kv_page_bytes(dtype)).map(|(pages, bytes)| pages * bytes).sum();
    // 0 bytes: the cache has no limit of its own.
    if config.kv_bytes_max == 0 || needed as u64 <= config.kv_bytes_max {
        return Ok(());
    }
    Err(Error::usage(format!(
        "rollout.kv_bytes_max must be at least {needed} to hold the longest row on a rank, {prompt} prompt tokens and up to \
         {response} response tokens (got {})",
        config.kv_bytes_max
    ))
    .hint(format!(
        "set rollout.kv_bytes_max to at least {needed} or to 0, or lower data.prompt_tokens_max or rollout.response_tokens_max"
    )))
}

/// The number of checkpoints, or files of rollouts, that a run will hold at once in addition to existing ones. It
/// counts the kept files, and the one that is written before the oldest is removed. 0 steps: as many as the data gives.
fn files_to_come(keep_last: usize, every_steps: u64, steps: u64, there: usize) -> usize {
    let made = if every_steps == 0 || steps == 0 { 1 } else { steps.div_ceil(every_steps) as usize };
    let held = if keep_last == 0 { made } else { made.min(keep_last + 1) };
    held.saturating_sub(there).max(1)
}

/// Rejects `bytes` that exceed the free part of a rank's memory. The error names the memory, its users, the limit and a
/// remedy.
fn within(bytes: usize, usage: Usage, [of, who, limited, hint]: [&str; 4]) -> Result<()> {
    if bytes <= usage.left() {
        return Ok(());
    }
    let [needed, used, limit, left] =
        [bytes, usage.in_use, usage.limit, usage.left()].map(|bytes| format_bytes(bytes as u64));
    Err(Error::usage(format!(
        "gradients and optimizer state need {needed} {of}, but {left} are free: {used} are in use{who}, and {limited} {limit}"
    ))
    .hint(hint))
}

/// The same check for this rank's GPU.
fn within_gpu(bytes: usize) -> Result<()> {
    let gpu = cuda::gpu();
    let name = |(name, bytes): &(_, usize)| format!("{name} {}", format_bytes(*bytes as u64));
    let who: Vec<String> = gpu.owners().iter().map(name).collect();
    let who = format!(" ({})", who.join(", "));
    within(bytes, gpu.usage(), ["on each rank's GPU", &who, "the limit of this rank is", cuda::pool::HINT])
}

/// Rejects `bytes` on each of `ranks` of a host if only `available` are free for all of them.
fn fits(what: &str, bytes: u64, ranks: u64, available: u64) -> Result<()> {
    if bytes.saturating_mul(ranks) <= available {
        return Ok(());
    }
    let [needed, all, left] = [bytes, bytes.saturating_mul(ranks), available].map(format_bytes);
    Err(Error::usage(format!(
        "{what} need {needed} on each rank and {all} on this host, which has {left} of free memory"
    ))
    .hint("start fewer ranks per host, or use more hosts, a smaller model, or model.dtype = \"bf16\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ranks_of_a_host_share_its_memory() {
        assert_eq!(fits(PINNED, 1 << 30, 8, 8 << 30), Ok(()));
        let error = fits(PINNED, 1 << 30, 8, (8 << 30) - 1).expect_err("one byte short");
        assert!(error.message.contains("1.0 GiB on each rank and 8.0 GiB on this host"), "{error}");
        assert!(fits(PINNED, u64::MAX, 2, u64::MAX - 1).is_err());
    }

    #[test]
    fn the_arena_limit_includes_memory_already_in_use() {
        let arena = |limit| Usage { in_use: 3 << 20, limit, ..Usage::NONE };
        assert_eq!(within(usize::MAX / 2, arena(usize::MAX), [""; 4]), Ok(()));
        assert_eq!(within(5 << 20, arena(8 << 20), [""; 4]), Ok(()));
        let error = within(6 << 20, arena(8 << 20), ["on it", "", "", ""]).expect_err("1 MiB too many");
        assert_eq!(error.exit_code(), 2);
        assert!(error.message.contains("need 6.0 MiB on it, but 5.0 MiB are free: 3.0 MiB are in use"), "{error}");
    }

    #[test]
    fn the_disk_must_hold_the_kept_checkpoints_and_the_one_being_written() {
        let count = files_to_come;
        assert_eq!([count(3, 10, 500, 0), count(3, 10, 500, 3), count(3, 10, 500, 9)], [4, 1, 1]);
        assert_eq!([count(3, 10, 15, 0), count(0, 10, 500, 0), count(3, 0, 500, 0), count(3, 10, 0, 0)], [2, 50, 1, 1]);
    }
}
