//! The `[rollout]` section of a job: the sampling of responses.

use super::limits::{self, ABOVE_0, BYTES, COUNT, FINITE, SAMPLES, TOKENS};
use super::mesh::{Auto, size};
use crate::dtype::KvDtype;
use crate::error::{Error, Result};
use crate::experience::SamplingMask;
use crate::mesh::Mesh;

table! {
    /// Sampling and batching of responses.
    pub struct RolloutConfig {
        pub prompts_per_step: usize = 1024 => 1.0..=SAMPLES,
        pub samples_per_prompt: usize = 1 => 1.0..=65_536.0,
        pub response_tokens_max: usize = 1024 => 1.0..=TOKENS,
        pub response_tokens_expected: usize = 0 => 0.0..=TOKENS,
        pub response_tokens_schedule: Vec<[u64; 2]> = Vec::new(),
        pub response_tokens_grow_at: f32 = 0.0 => 0.0..=1.0,
        pub response_tokens_min: usize = 0 => 0.0..=TOKENS,
        pub temperature: f32 = 1.0 => 0.0..=FINITE,
        pub top_k: usize = 0 => 0.0..=COUNT,
        pub top_p: f32 = 1.0 => 0.0..=1.0,
        pub min_p: f32 = 0.0 => 0.0..=1.0,
        pub repetition_penalty: f32 = 1.0 => ABOVE_0..=FINITE,
        pub keep_sampling_mask: bool = false,
        pub stop: Vec<String> = Vec::new(),
        pub stop_token_ids: Vec<u32> = Vec::new(),
        pub ignore_eos: bool = false,
        pub batch_max: usize = 256 => 1.0..=65_536.0,
        pub prefill_tokens_max: usize = 2048 => 1.0..=TOKENS,
        pub kv_dtype: KvDtype = KvDtype::Model,
        pub kv_bytes_max: u64 = 0 => 0.0..=BYTES,
        pub graphs: bool = true,
        pub work_stealing: bool = true,
        /// `[rollout.dynamic_sampling]`
        pub dynamic_sampling: DynamicSampling = DynamicSampling::default(),
        pub tensor: Auto = Auto::Auto,
        pub data: Auto = Auto::Auto,
    }
}

table! {
    /// The groups of samples that are trained on; more prompts replace the others (DAPO, arXiv:2503.14476, section
    /// 3.2).
    pub struct DynamicSampling {
        pub low: f32 = 0.0 => -FINITE..=FINITE,
        pub high: f32 = 1.0 => -FINITE..=FINITE,
        pub prompts_max_factor: usize = 1 => 1.0..=1024.0,
    }
}

impl DynamicSampling {
    /// Whether groups are filtered at all.
    pub fn is_on(&self) -> bool {
        self.prompts_max_factor > 1
    }

    fn check(&self, samples_per_prompt: usize) -> Result<()> {
        limits::check("rollout.dynamic_sampling", self)?;
        let Self { low, high, prompts_max_factor } = *self;
        let key = "rollout.dynamic_sampling";
        Error::need(low < high, format!("{key}.low must be below high = {high} (got {low})"))?;
        if !self.is_on() && *self != Self::default() {
            return Err(Error::usage(format!("{key} needs prompts_max_factor above 1 (got {prompts_max_factor})"))
                .hint(format!(
                    "set {key}.prompts_max_factor = 4, the most prompts of a step as a multiple of prompts_per_step"
                )));
        }
        Error::need(
            !self.is_on() || samples_per_prompt > 1,
            format!("rollout.samples_per_prompt must be at least 2 with {key} (got {samples_per_prompt})"),
        )
    }
}

/// The least temperature above 0. Smaller ones would overflow. Greedy sampling is 0.
pub(super) const TEMPERATURE_MIN: f32 = 1e-3;

impl RolloutConfig {
    /// The largest sampling mask of a model with this vocabulary, if masks are kept.
    pub fn largest_mask(&self, vocabulary: usize) -> Option<SamplingMask> {
        let kept = if self.top_k == 0 { vocabulary } else { self.top_k.min(vocabulary) };
        self.keep_sampling_mask.then(|| SamplingMask::largest(vocabulary, kept))
    }

    /// Whether sampling excludes tokens by their probabilities.
    pub fn truncates(&self) -> bool {
        self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0
    }

    fn check_mask(&self) -> Result<()> {
        let penalty = self.repetition_penalty;
        let (why, hint) = if !self.keep_sampling_mask {
            return Ok(());
        } else if !self.truncates() {
            ("no filter excludes tokens".to_string(), "set rollout.top_k, top_p or min_p, or leave it out")
        } else if penalty != 1.0 {
            let why = format!("rollout.repetition_penalty = {penalty} samples from other logits than training uses");
            (why, "set rollout.repetition_penalty = 1.0, or use ppo.correction instead")
        } else {
            return Ok(());
        };
        Err(Error::usage(format!("rollout.keep_sampling_mask is true, but {why}")).hint(hint))
    }

    /// The entry of the schedule that applies in `step`, from 1, unless the first `skipped` ones include it.
    fn entry_at(&self, step: u64, skipped: usize) -> Option<(usize, usize)> {
        let mut rest = self.response_tokens_schedule.iter().enumerate().skip(skipped);
        rest.find(|(_, [last, _])| step <= *last).map(|(i, [_, tokens])| (i, *tokens as usize))
    }

    /// The length of the longest response in `step`, from 1, if the schedule sets it. Its first `skipped` entries do not
    /// count.
    pub fn scheduled_tokens(&self, step: u64, skipped: usize) -> Option<usize> {
        self.entry_at(step, skipped).map(|(_, tokens)| tokens)
    }

    /// The entries of the schedule to skip after `step`, in which a share `truncated` of the responses was cut by length.
    pub fn skipped_after(&self, step: u64, skipped: usize, truncated: f64) -> usize {
        let grows = self.response_tokens_grow_at > 0.0 && truncated > f64::from(self.response_tokens_grow_at);
        self.entry_at(step, skipped).filter(|_| grows).map_or(skipped, |(i, _)| i + 1)
    }

    fn check_schedule(&self) -> Result<()> {
        let (all, key) = (&self.response_tokens_schedule, "rollout.response_tokens_schedule");
        let steps_ascend = all.is_sorted_by(|[a, _], [b, _]| a < b) && all.first().is_none_or(|[first, _]| *first > 0);
        Error::need(steps_ascend, format!("{key} must have ascending last steps from 1 on (got {all:?})"))?;
        let (min, max) = (self.response_tokens_min.max(1) as u64, self.response_tokens_max as u64);
        if let Some(entry) = all.iter().find(|[_, tokens]| !(min..=max).contains(tokens)) {
            let rule = format!("{key} must have lengths between {min} and rollout.response_tokens_max = {max}");
            return Err(Error::usage(format!("{rule} (got {entry:?})")));
        }
        Error::need(
            self.response_tokens_grow_at <= 0.0 || all.is_sorted_by(|[_, a], [_, b]| a < b),
            format!("{key} must have ascending lengths with rollout.response_tokens_grow_at (got {all:?})"),
        )
    }

    /// Rejects values outside their range.
    pub fn check(&self) -> Result<()> {
        limits::check("rollout", self)?;
        self.check_schedule()?;
        self.check_mask()?;
        self.dynamic_sampling.check(self.samples_per_prompt)?;
        let t = self.temperature;
        Error::need(
            t == 0.0 || t >= TEMPERATURE_MIN,
            format!("rollout.temperature must be 0 (greedy) or at least {TEMPERATURE_MIN} (got {t})"),
        )?;
        if self.stop.iter().any(String::is_empty) {
            return Err(Error::usage("rollout.stop must not contain an empty string")
                .hint("remove it, as it would stop every response at once"));
        }
        let (min, max) = (self.response_tokens_min, self.response_tokens_max);
        let expected = self.response_tokens_expected;
        Error::need(
            expected <= max,
            format!(
                "rollout.response_tokens_expected must be at most rollout.response_tokens_max = {max} (got {expected})"
            ),
        )?;
        Error::need(
            min <= max,
            format!("rollout.response_tokens_min must be at most rollout.response_tokens_max = {max} (got {min})"),
        )
    }

    /// The layout of the rollout on the ranks of the training mesh: `tensor` ranks share each matrix, `data` groups of
    /// such ranks share the prompts. Decoding needs no ring, so each rank of a training ring gets prompts of its own.
    pub fn layout(&self, training: &Mesh) -> Result<Mesh> {
        let ranks = training.ranks();
        let tensor = size("rollout.tensor", self.tensor)?.unwrap_or(training.tensor);
        let data = size("rollout.data", self.data)?.unwrap_or((ranks / tensor).max(1));
        if data * tensor == ranks {
            return Ok(Mesh { tensor, ..Mesh::data_only(data) });
        }
        let hint = if ranks.is_multiple_of(tensor) {
            format!("set rollout.data = {}, or leave it out", ranks / tensor)
        } else {
            format!("set rollout.tensor = {}, as in training, or leave it out", training.tensor)
        };
        Err(Error::usage(format!(
            "rollout.data = {data} x rollout.tensor = {tensor} needs {} ranks, but the mesh has {ranks}",
            data * tensor
        ))
        .hint(hint))
    }
}
