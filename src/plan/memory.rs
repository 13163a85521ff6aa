//! The bytes of one rank, phase by phase.

use super::case::{Case, KvCache};
use super::devices::GPU_PROGRAM_BYTES;
use super::job::learns;
use super::shape::Flat;
use crate::config::mesh::RoleName;
use crate::device::Device;
use crate::device::null::{Bytes, Cache, Peak, Record};
use crate::error::Error;
use std::collections::BTreeMap;

/// Parts of a run in which memory is counted; a step has all but the first and the last.
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
        match self {
            Self::Load => "load",
            Self::Rollout => "rollout",
            Self::Score => "score",
            Self::Train => "train",
            Self::Checkpoint => "checkpoint",
        }
    }

    /// By the names of `comm::phase`.
    fn of(name: &str, is_ppo: bool) -> Self {
        match name {
            "load" => Self::Load,
            "score" => Self::Score,
            "checkpoint" => Self::Checkpoint,
            "rollout" | "prefill" | "decode" | "reward" => Self::Rollout,
            "eval" if is_ppo => Self::Rollout,
            _ => Self::Train,
        }
    }
}

/// Owners of memory, by group and in the order in which tables show them; what is none of these is of activations.
const OWNERS: [(&str, &str); 16] = [
    ("weights of the actor", "weights"),
    ("weights of the critic", "weights"),
    ("weights of the reference", "weights"),
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
    ("rotary tables", "other"),
    ("mapped files", "other"),
    ("program", "other"),
];
const PROGRAM: &str = "program";

/// An owner's place among the others.
pub fn rank_of(owner: &str) -> usize {
    OWNERS.iter().position(|(name, _)| *name == owner).unwrap_or(OWNERS.len())
}

/// What one rank holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Memory {
    /// The fullest moment of each phase: bytes in use, by owner.
    pub peaks: BTreeMap<Phase, Peak>,
    /// The most that is taken from the system at once: what `peaks` counts, and what waits on free lists.
    pub resident: usize,
    /// The most that tensors alone take at once: what `mesh.arena_bytes_max` bounds.
    pub arena: usize,
    /// Bytes that a rank may take.
    pub limit: u64,
    pub kv: Option<KvCache>,
    /// Bytes that wait in the host's memory (or in mapped files) at most.
    pub swapped: usize,
    /// Bytes of the host's memory that are pinned at most: `swapped`, and what goes between the host and a GPU.
    pub pinned: usize,
    pub fits: bool,
    /// Why the job could not take its steps.
    pub failed: Option<Error>,
}

impl Memory {
    /// What a null device counted of a rank with `roles`, whose tensors took `arena` bytes at most.
    pub(super) fn of(case: Case, roles: &[RoleName], record: &Record, arena: usize, failed: Option<Error>) -> Self {
        let Case { job, device, .. } = case;
        // A job that is refused before it holds anything has this phase, too.
        let mut peaks = BTreeMap::from([(Phase::Load, Peak::default())]);
        for (name, peak) in &record.peaks {
            let fuller = peaks.entry(Phase::of(name, job.is_ppo())).or_default();
            if peak.bytes >= fuller.bytes {
                *fuller = peak.clone();
            }
        }
        let in_use = peaks.values().map(|peak| peak.bytes).max().unwrap_or(0);
        let program = if device.is_cpu() { 0 } else { GPU_PROGRAM_BYTES };
        let (resident, arena) = if device.is_cpu() { (record.resident, arena) } else { (in_use, in_use - program) };
        let arena_max = job.config.mesh.arena_bytes_max;
        let limit = if arena_max == 0 { u64::MAX } else { arena_max + program as u64 };
        let within = arena_max == 0 || arena as u64 <= arena_max;
        let fits = failed.is_none() && within && in_use as u64 <= device.memory_bytes;
        let (kv, swapped) = (record.cache.map(KvCache::of), swapped(case, roles));
        let (limit, pinned) = (limit.min(device.memory_bytes), record.pinned);
        Self { peaks, resident, arena, limit, kv, swapped, pinned, fits, failed }
    }

    /// The fullest moment of all.
    pub fn peak(&self) -> (Phase, &Peak) {
        let fullest = self.peaks.iter().max_by_key(|(_, peak)| peak.bytes);
        let (phase, peak) = fullest.expect("a job has phases");
        (*phase, peak)
    }

    /// Bytes of the fullest moment by purpose, the purposes of which there are none left out; beside them a GPU holds its program,
    /// which is not in `taken` either.
    pub fn groups(&self, device: Device) -> Vec<(&'static str, usize)> {
        let mut groups: Vec<(&'static str, usize)> = Vec::new();
        for (owner, group) in OWNERS {
            let bytes = self.peak().1.parts.get(owner).copied().unwrap_or(0);
            match groups.last_mut() {
                _ if bytes == 0 || (owner == PROGRAM && device == Device::Cuda) => {}
                Some((name, sum)) if *name == group => *sum += bytes,
                _ => groups.push((group, bytes)),
            }
        }
        groups
    }

    /// What a run measures of it: what is taken of a GPU beside what its libraries keep, or what is resident of the host.
    pub fn taken(&self, device: Device) -> u64 {
        match device {
            Device::Cpu => self.resident as u64,
            Device::Cuda => self.arena as u64,
        }
    }

    /// Bytes of forwards, backwards and graphs at the fullest moment of `phase`.
    pub fn transient(&self, phase: Phase) -> usize {
        ["activations", "graphs"].iter().filter_map(|owner| self.parts(phase)?.get(owner)).sum()
    }

    /// Bytes of `phase` by owner.
    pub fn parts(&self, phase: Phase) -> Option<&Bytes> {
        self.peaks.get(&phase).map(|peak| &peak.parts)
    }
}

impl KvCache {
    fn of(cache: Cache) -> Self {
        let Cache { token_bytes, bytes, bytes_needed, bytes_wanted, samples, batch_max } = cache;
        let slots = samples.min(batch_max);
        let at_once = if bytes >= bytes_needed { slots } else { (slots * bytes / bytes_needed.max(1)).max(1) };
        Self { token_bytes, samples, at_once, waves: samples.div_ceil(at_once.max(1)), bytes, bytes_wanted }
    }
}

/// Bytes outside of the device's memory during the rollout.
fn swapped(case: Case, roles: &[RoleName]) -> usize {
    let (job, layout, cpu) = (case.job, case.layout, case.device.is_cpu());
    let (stage, ranks, element) = (layout.stage(), layout.zero_ranks(), job.config.model.dtype().bytes());
    let device = if cpu { Device::Cpu } else { Device::Cuda };
    let of = |role: RoleName| {
        let arch = job.archs.of(role).expect("a role that is planned has a model");
        let flat = Flat::on(device, arch, role, layout.mesh.tensor);
        let (len, own, learns) = (flat.len(), flat.own(ranks), learns(role));
        let state = (if element == 2 { 12 } else { 8 }) * if stage == 0 { len } else { own };
        let weights = element * if stage == 3 { own } else { len };
        let idle = !learns || (role == RoleName::Critic && !cpu);
        let state = if layout.swap.optimizer && learns { state } else { 0 };
        state + if layout.swap.roles && idle { weights } else { 0 }
    };
    roles.iter().map(|role| of(*role)).sum()
}
