//! The bytes of one rank, phase by phase.

use super::devices::Device;
use super::job::Job;
use crate::device::null::{self, Cache, Peak, Record};
use crate::error::Error;
use crate::launch::layout::Expected;
use serde::Serialize;
use std::collections::BTreeMap;

/// The phases of a run in which memory is counted; a step has all except the first and the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    Load,
    Rollout,
    Score,
    Train,
    Checkpoint,
}

impl Phase {
    pub const ALL: [Self; 5] = [Self::Load, Self::Rollout, Self::Score, Self::Train, Self::Checkpoint];

    pub fn name(self) -> &'static str {
        ["load", "rollout", "score", "train", "checkpoint"][self as usize]
    }

    fn from_null(phase: null::Phase, has_rollout: bool) -> Self {
        use null::Phase::{Checkpoint, Decode, Eval, Load, Prefill, Reward, Rollout, Score, Train};
        match phase {
            Load => Self::Load,
            Rollout | Prefill | Decode | Reward => Self::Rollout,
            Score => Self::Score,
            Checkpoint => Self::Checkpoint,
            Eval if has_rollout => Self::Rollout,
            Train | Eval => Self::Train,
        }
    }
}

/// Owners of memory with their group, in the order of the tables. All others are activations.
const OWNERS: [(&str, &str); 23] = [
    ("weights of the frozen base", "weights"),
    ("weights of the actor", "weights"),
    ("weights of the critic", "weights"),
    ("weights of the reference", "weights"),
    ("weights of the reward model", "weights"),
    ("weights of the rollout's copy", "weights"),
    ("weights of the vision tower", "weights"),
    ("weights", "weights"),
    ("gradients", "gradients"),
    ("optimizer state", "optimizer"),
    ("gathered units", "gathered"),
    ("rollout weights", "gathered"),
    ("kv cache", "kv cache"),
    ("activations", "activations"),
    ("graphs", "other"),
    ("gemm workspace", "other"),
    ("experience", "other"),
    ("sampling masks", "other"),
    ("patches of images", "other"),
    ("rows of images", "other"),
    ("rotary tables", "other"),
    ("mapped files", "other"),
    ("program", "other"),
];
const PROGRAM: &str = "program";

/// An owner's place among the others.
pub fn rank_of(owner: &str) -> usize {
    OWNERS.iter().position(|(name, _)| *name == owner).unwrap_or(OWNERS.len())
}

/// Whether the tables have a row for `owner`.
pub fn knows(owner: &str) -> bool {
    rank_of(owner) < OWNERS.len()
}

/// The KV cache of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct KvCache {
    /// Keys and values of one token over all layers.
    pub token_bytes: usize,
    /// Samples of this rank's group in a step.
    pub samples: usize,
    /// Samples that run at once.
    pub at_once: usize,
    pub batches: usize,
    pub bytes: usize,
    /// The bytes that all samples at once would need.
    pub bytes_wanted: usize,
}

/// The stages of a pipeline that are counted, by their number: the bytes of a rank at its peak, and the seconds of a step
/// without the wait for other stages.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Stages {
    pub bytes: Vec<(usize, f64)>,
    pub seconds: Vec<(usize, f64)>,
}

/// The memory of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Memory {
    /// The bytes in use at the fullest moment of each phase, by owner.
    pub peaks: BTreeMap<Phase, Peak>,
    /// The most bytes that are allocated from the system at once: the bytes in `peaks`, and free lists.
    pub resident: usize,
    /// The most bytes that tensors alone take at once, which `mesh.arena_bytes_max` limits.
    pub arena: usize,
    /// The bytes available to a rank.
    pub limit: u64,
    pub kv: Option<KvCache>,
    /// The same with responses of the expected length.
    pub kv_expected: Option<KvCache>,
    /// The most bytes of pinned host memory at once, or of memory-mapped files.
    pub host: usize,
    /// The counted stages of a pipeline.
    pub stages: Stages,
    pub fits: bool,
    /// The error that stopped the job's steps.
    pub failed: Option<Error>,
}

impl Memory {
    /// The memory of a rank as a null device counted it; its tensors took at most `arena` bytes.
    pub(super) fn from_record(
        job: &Job,
        device: &Device,
        record: &Record,
        arena: usize,
        failed: Option<Error>,
    ) -> Self {
        // A job that is rejected before it allocates anything has this phase, too.
        let mut peaks = BTreeMap::from([(Phase::Load, Peak::default())]);
        for (phase, peak) in &record.peaks {
            let fuller = peaks.entry(Phase::from_null(*phase, job.shape.has_rollout())).or_default();
            if peak.bytes >= fuller.bytes {
                *fuller = peak.clone();
            }
        }
        let in_use = peaks.values().map(|peak| peak.bytes).max().unwrap_or(0);
        let program = || peaks.values().filter_map(|peak| peak.parts.get(PROGRAM)).max().copied().unwrap_or(0);
        // On a CPU the program is not part of the arena.
        let program = if device.is_cpu() { 0 } else { program() };
        let (resident, arena) = if device.is_cpu() { (record.resident, arena) } else { (in_use, in_use - program) };
        let arena_max = job.config.mesh.arena_bytes_max;
        let limit = if arena_max == 0 { u64::MAX } else { arena_max + program as u64 };
        let within = arena_max == 0 || arena as u64 <= arena_max;
        let fits = failed.is_none() && within && in_use as u64 <= device.memory_bytes;
        let (kv, host, limit) = (record.cache.map(KvCache::from_cache), record.host, limit.min(device.memory_bytes));
        let kv_expected = None;
        Self { peaks, resident, arena, limit, kv, kv_expected, host, stages: Stages::default(), fits, failed }
    }

    /// The cache of the responses that count in the time.
    pub fn kv_of_time(&self) -> Option<KvCache> {
        self.kv_expected.or(self.kv)
    }

    /// The fullest moment of all.
    pub fn peak(&self) -> (Phase, &Peak) {
        let fullest = self.peaks.iter().max_by_key(|(_, peak)| peak.bytes);
        let (phase, peak) = fullest.expect("a job has phases");
        (*phase, peak)
    }

    /// The expectations of a run. On a GPU they exclude the program, whose memory a run measures itself.
    pub fn expected(&self, on_cpu: bool) -> Expected {
        let mut groups: Vec<(&'static str, usize)> = Vec::new();
        for (owner, group) in OWNERS.into_iter().filter(|(owner, _)| on_cpu || *owner != PROGRAM) {
            let bytes = self.peak().1.parts.get(owner).copied().unwrap_or(0);
            match groups.last_mut() {
                _ if bytes == 0 => {}
                Some((name, sum)) if *name == group => *sum += bytes,
                _ => groups.push((group, bytes)),
            }
        }
        let most = |owner: &str| Phase::ALL.into_iter().map(|phase| self.bytes_of(phase, owner)).max().unwrap_or(0);
        Expected {
            taken: if on_cpu { self.resident } else { self.arena } as u64,
            arena: self.arena,
            groups,
            gradients: most("gradients"),
            state: most("optimizer state"),
            host: self.host,
            forwards: self.bytes_of(Phase::Rollout, "activations") + self.bytes_of(Phase::Rollout, "graphs"),
            step_s: 0.0,
        }
    }

    /// Bytes of `owner` at the fullest moment of `phase`.
    pub fn bytes_of(&self, phase: Phase, owner: &str) -> usize {
        self.peaks.get(&phase).and_then(|peak| peak.parts.get(owner)).copied().unwrap_or(0)
    }
}

impl KvCache {
    fn from_cache(cache: Cache) -> Self {
        let Cache { token_bytes, bytes, bytes_needed, bytes_wanted, samples, batch_max } = cache;
        let slots = samples.min(batch_max);
        let at_once = if bytes >= bytes_needed { slots } else { (slots * bytes / bytes_needed.max(1)).max(1) };
        Self { token_bytes, samples, at_once, batches: samples.div_ceil(at_once.max(1)), bytes, bytes_wanted }
    }
}
