//! Whether a job fits the machine, as far as that is known before its first step.

use super::layout::Expected;
use super::run::Run;
use crate::config::rollout::RolloutConfig;
use crate::device::{Device, cuda};
use crate::dtype::DType;
use crate::error::{Error, Result, format_bytes};
use crate::metrics::rollouts::step_bytes_max;
use crate::model::Transformer;
use crate::rollout;
use crate::rollout::blocks::pages_of;
use crate::rollout::scheduler::cached_tokens_max;
use crate::sys::{files, memory};
use crate::tensor::arena::{self, Usage};
use std::path::{Path, PathBuf};

/// What is offloaded to the host, and copied.
const PINNED: &str = "offloaded state and weights, in pinned memory,";

impl Run {
    /// Refuses a job whose gradients and optimizer state do not fit the memory that is left, or whose checkpoints and
    /// export do not fit the disk, with the rollouts that are kept. `saved_bytes` of all models that are trained go into a
    /// checkpoint, `export_bytes` of weights into the export, `rollout_bytes` at most into the rollouts of a step. All ranks call
    /// this after they have loaded their models, or made room for them: what that will take of a host is `unwritten` bytes.
    pub fn check_resources(
        &self,
        unwritten: usize,
        saved_bytes: usize,
        export_bytes: usize,
        rollout_bytes: u64,
    ) -> Result<()> {
        let Expected { gradients, state, host: pinned, .. } = self.expected().cloned().unwrap_or_default();
        // What is offloaded comes back a part at a time.
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
        let to_come = |dir: &Path, keep_last, every_steps| {
            // Checkpoints, or files of rollouts.
            let is_of_a_step =
                |path: &PathBuf| path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"step-"));
            let there = files::entries(dir).map_or(0, |all| all.iter().filter(|path| is_of_a_step(path)).count());
            files_to_come(keep_last, every_steps, steps, there)
        };
        let best = usize::from(!checkpoints.best_metric.is_empty());
        let count = to_come(&self.checkpoints(), checkpoints.keep_last, checkpoints.every_steps) + best;
        let saved = (count * saved_bytes + export) as u64;
        let recorded =
            to_come(&self.dir.join("rollouts"), metrics.rollouts_keep_last, metrics.rollouts_every_steps) as u64;
        // Responses are seldom all of the longest length: where all rollouts are kept, those to come refuse no job.
        let counted = if metrics.rollouts_keep_last == 0 { 1 } else { recorded };
        let each = format_bytes(rollout_bytes);
        let what = |recorded| match rollout_bytes {
            0 => format!("checkpoints ({count} more at once) and the export"),
            _ => format!(
                "checkpoints ({count} more at once) and the export, and rollouts ({recorded} more at once, of at most {each} each)"
            ),
        };
        let refused = |e: Error| {
            let e = e.within(what(counted));
            if rollout_bytes > 0 { e.also("keep fewer rollouts: metrics.rollouts_keep_last") } else { e }
        };
        files::check_space(&self.dir, saved.saturating_add(rollout_bytes.saturating_mul(counted))).map_err(refused)?;
        if let Err(e) = files::check_space(&self.dir, saved.saturating_add(rollout_bytes.saturating_mul(recorded))) {
            let e = e.within(what(recorded));
            self.recorder.warn(&format!("{}; metrics.rollouts_keep_last keeps fewer", e.message));
        }
        Ok(())
    }

    /// The most bytes that the rollouts of a step take of the disk, of prompts of up to `prompt_tokens` and a model with
    /// `context` tokens; 0 where none are recorded.
    pub fn rollout_bytes_max(&self, prompt_tokens: usize, context: usize) -> u64 {
        let (rollout, every_steps) = (&self.config.rollout, self.config.metrics.rollouts_every_steps);
        let samples = rollout.prompts_per_step * rollout.samples_per_prompt;
        let response_tokens = rollout::new_tokens_max(rollout, 0, context);
        if every_steps == 0 { 0 } else { step_bytes_max(samples, prompt_tokens, response_tokens) }
    }
}

/// Refuses what no step of sampling could do: a cache of `rollout.kv_bytes_max` that does not hold the longest row, and stop
/// tokens that the model does not know. `transformer` is the actor's in the rollout, with weights of `dtype`, `prompt_tokens` the longest prompt.
pub fn check_sampling(
    config: &RolloutConfig,
    transformer: &Transformer,
    dtype: DType,
    prompt_tokens: usize,
) -> Result<()> {
    let (arch, prompt) = (&transformer.arch, prompt_tokens);
    if let Some(token) = config.stop_token_ids.iter().find(|token| **token as usize >= arch.vocabulary) {
        let last = arch.vocabulary - 1;
        let message = format!("rollout.stop_token_ids has {token}, the vocabulary of model.actor ends at {last}");
        return Err(Error::usage(message));
    }
    let response = rollout::new_tokens_max(config, prompt, arch.context);
    let needed = pages_of(cached_tokens_max(prompt, response)) * transformer.kv_page_bytes(dtype);
    // 0 bytes: it takes what it needs.
    if config.kv_bytes_max == 0 || needed as u64 <= config.kv_bytes_max {
        return Ok(());
    }
    Err(Error::usage(format!(
        "rollout.kv_bytes_max is {}, keys and values of the longest row, {prompt} tokens and a response of up to {response}, take \
         {needed} bytes on a rank",
        config.kv_bytes_max
    ))
    .hint(format!(
        "set rollout.kv_bytes_max = {needed} at least, or 0, or lower data.prompt_tokens_max or rollout.response_tokens_max"
    )))
}

/// How many more checkpoints, or files of rollouts, a run will hold at once than there are: those that are kept, and the one that
/// is written before the oldest is removed. 0 steps: as many as the data gives.
fn files_to_come(keep_last: usize, every_steps: u64, steps: u64, there: usize) -> usize {
    let made = if every_steps == 0 || steps == 0 { 1 } else { steps.div_ceil(every_steps) as usize };
    let held = if keep_last == 0 { made } else { made.min(keep_last + 1) };
    held.saturating_sub(there).max(1)
}

/// Refuses `bytes` that the limit on a rank's memory does not leave: whose it is, who uses it, what limits it, and what helps.
fn within(bytes: usize, usage: Usage, [of, who, limited, hint]: [&str; 4]) -> Result<()> {
    if bytes <= usage.left() {
        return Ok(());
    }
    let [needed, used, limit, left] =
        [bytes, usage.in_use, usage.limit, usage.left()].map(|bytes| format_bytes(bytes as u64));
    Err(Error::usage(format!(
        "gradients and optimizer state need {needed} {of}; {used} are in use{who}, {limited} {limit}, and {left} would fit"
    ))
    .hint(hint))
}

/// The same of this rank's GPU.
fn within_gpu(bytes: usize) -> Result<()> {
    let gpu = cuda::gpu();
    let name = |(name, bytes): &(_, usize)| format!("{name} {}", format_bytes(*bytes as u64));
    let who: Vec<String> = gpu.owners().iter().map(name).collect();
    let who = format!(" ({})", who.join(", "));
    within(bytes, gpu.usage(), ["of each rank's GPU", &who, "the limit of this rank is", cuda::pool::HINT])
}

/// Refuses `bytes` on each of `ranks` of a host where `available` are left for all of them.
fn fits(what: &str, bytes: u64, ranks: u64, available: u64) -> Result<()> {
    if bytes.saturating_mul(ranks) <= available {
        return Ok(());
    }
    let [needed, all, left] = [bytes, bytes.saturating_mul(ranks), available].map(format_bytes);
    Err(Error::usage(format!(
        "{what} need {needed} on each rank, {all} on this host, and {left} of its memory are left"
    ))
    .hint("start fewer ranks a host or use more hosts, a smaller model, or model.dtype = \"bf16\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ranks_of_a_host_share_its_memory() {
        assert_eq!(fits(PINNED, 1 << 30, 8, 8 << 30), Ok(()));
        let error = fits(PINNED, 1 << 30, 8, (8 << 30) - 1).expect_err("one byte short");
        assert!(error.message.contains("1.0 GiB on each rank, 8.0 GiB on this host"), "{error}");
        assert!(fits(PINNED, u64::MAX, 2, u64::MAX - 1).is_err());
    }

    #[test]
    fn the_limit_of_the_arena_counts_what_is_in_use_already() {
        let arena = |limit| Usage { in_use: 3 << 20, limit, ..Usage::NONE };
        assert_eq!(within(usize::MAX / 2, arena(usize::MAX), [""; 4]), Ok(()));
        assert_eq!(within(5 << 20, arena(8 << 20), [""; 4]), Ok(()));
        let error = within(6 << 20, arena(8 << 20), ["on it", "", "", ""]).expect_err("1 MiB too many");
        assert_eq!(error.exit_code(), 2);
        assert!(error.message.contains("need 6.0 MiB on it; 3.0 MiB are in use"), "{error}");
    }

    #[test]
    fn the_disk_holds_the_kept_checkpoints_and_the_one_being_written() {
        let count = files_to_come;
        assert_eq!([count(3, 10, 500, 0), count(3, 10, 500, 3), count(3, 10, 500, 9)], [4, 1, 1]);
        assert_eq!([count(3, 10, 15, 0), count(0, 10, 500, 0), count(3, 0, 500, 0), count(3, 10, 0, 0)], [2, 50, 1, 1]);
    }
}
