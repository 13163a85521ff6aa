//! The bytes of one rank, phase by phase: the buffers of a step taken and given back in the order in which a run does.

use super::devices::Device;
use super::heap::{Bytes, Heap, Kind, Peak, Rule};
use super::job::Job;
use super::rank::{GPU_PROGRAM_BYTES, Rank};
use super::shape::Layout;
use super::walk::Kernels;
use crate::config::job::Collectives;
use crate::config::mesh::RoleName;
use crate::device::cuda::key_segments::RUN;
use crate::tensor::DType;
use std::collections::BTreeMap;

/// Parts of a run. Memory is counted in each; a step has all but the first and the last.
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
}

/// The cache of keys and values of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvCache {
    /// Keys and values of one token over all layers.
    pub token_bytes: usize,
    /// Samples of this rank's group in a step.
    pub samples: usize,
    /// Samples that run at once.
    pub at_once: usize,
    pub waves: usize,
    pub bytes: usize,
    /// What all samples at once would need.
    pub bytes_wanted: usize,
}

/// What one rank holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Memory {
    /// The fullest moment of each phase: bytes in use.
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
}

impl Memory {
    /// The fullest moment of all.
    pub fn peak(&self) -> (Phase, &Peak) {
        let fullest = self.peaks.iter().max_by_key(|(_, peak)| peak.bytes);
        let (phase, peak) = fullest.expect("a job has phases");
        (*phase, peak)
    }

    /// Bytes of the fullest moment by purpose, the purposes of which there are none left out.
    pub fn groups(&self) -> Vec<(&'static str, usize)> {
        let (_, peak) = self.peak();
        let of = |name: &'static str, kinds: std::ops::RangeInclusive<Kind>| {
            let parts = peak.parts.iter().filter(|(what, _)| kinds.contains(&what.kind));
            (name, parts.map(|(_, bytes)| bytes).sum::<usize>())
        };
        let groups = [
            of("weights", Kind::Weights..=Kind::WeightRows),
            of("gradients", Kind::Gradients..=Kind::Gradients),
            of("optimizer", Kind::Moments..=Kind::Master),
            of("gathered", Kind::Gathered..=Kind::RolloutWeights),
            of("kv cache", Kind::KvCache..=Kind::KvCache),
            of("activations", Kind::Residual..=Kind::Scratch),
            of("other", Kind::Collectives..=Kind::Program),
        ];
        groups.into_iter().filter(|(_, bytes)| *bytes > 0).collect()
    }

    /// What a run measures of it: what is taken of a GPU beside what its libraries keep, or what is resident of the host.
    pub fn taken(&self, device: crate::device::Device) -> u64 {
        match device {
            crate::device::Device::Cpu => self.resident as u64,
            crate::device::Device::Cuda => self.arena as u64,
        }
    }

    /// Bytes of forwards, backwards and graphs at the fullest moment of `phase`.
    pub fn transient(&self, phase: Phase) -> usize {
        let kinds = Kind::Residual..=Kind::Graphs;
        let parts = self.parts(phase).into_iter().flatten().filter(|(what, _)| kinds.contains(&what.kind));
        parts.map(|(_, bytes)| bytes).sum()
    }

    /// Bytes of `phase` by kind and role.
    pub fn parts(&self, phase: Phase) -> Option<&Bytes> {
        self.peaks.get(&phase).map(|peak| &peak.parts)
    }
}

/// What `memory` looks at.
#[derive(Clone, Copy, Debug)]
pub struct Case<'a> {
    pub job: &'a Job<'a>,
    pub layout: &'a Layout,
    pub device: &'a Device,
    /// Threads of a rank, on the CPU.
    pub threads: usize,
}

/// How a rank computes.
fn kernels(case: Case) -> Kernels {
    let (config, cpu) = (case.job.config, case.device.is_cpu());
    let is_joined = !cpu && config.job.collectives != Collectives::Mpi;
    Kernels {
        cpu,
        bf16: config.model.dtype() == DType::Bf16,
        threads: case.threads,
        fast: !cpu && case.job.fast,
        joined: is_joined.then_some(case.layout.mesh.tensor),
        run: (!cpu && case.job.rows.tokens_max() > RUN).then_some(RUN),
    }
}

/// The bytes of a rank that has `roles` (in the order in which they are loaded).
pub fn memory(case: Case, roles: &[RoleName]) -> Memory {
    let cpu = case.device.is_cpu();
    let kernels = kernels(case);
    let arena_max = case.job.config.mesh.arena_bytes_max;
    let limit = if arena_max > 0 { arena_max as usize } else { usize::MAX };
    let mut device = case.device.clone();
    if !cpu && arena_max > 0 {
        device.memory_bytes = device.memory_bytes.min(arena_max + GPU_PROGRAM_BYTES as u64);
    }
    let case = Case { device: &device, ..case };
    let heap = Heap::new(if cpu { Rule::Arena { limit } } else { Rule::Device });
    let mut rank = Rank::new(case, kernels, heap);
    rank.load(roles);
    let job = case.job;
    let mut kv: Option<KvCache> = None;
    let mut experience = None;
    for step in 0..job.looked_at() {
        rank.heap.give_all(experience.take());
        if job.is_ppo() && roles.contains(&RoleName::Actor) {
            rank.answer();
            let taken = rank.rollout(step);
            kv = Some(kv.filter(|fuller| fuller.bytes_wanted >= taken.bytes_wanted).unwrap_or(taken));
        }
        experience = job.is_ppo().then(|| rank.experience(step));
        if job.is_ppo() {
            rank.score(step);
        }
        rank.train(step);
        rank.evaluate();
    }
    rank.checkpoint();
    rank.heap.give_all(experience);
    let swapped = rank.swapped();
    let pinned = if cpu { 0 } else { swapped + rank.pinned() };
    let heap = rank.heap;
    let (arena, resident) = (heap.arena_peak(), heap.resident_peak());
    let peaks = heap.into_peaks();
    let in_use = peaks.values().map(|peak| peak.bytes).max().unwrap_or(0);
    let within = if cpu && arena_max > 0 { arena as u64 <= arena_max } else { true };
    let fits = within && in_use as u64 <= case.device.memory_bytes && kv.is_none_or(|kv| kv.at_once > 0);
    let limit = case.device.memory_bytes.min(if cpu { limit as u64 } else { u64::MAX });
    let arena = if cpu { arena } else { in_use - GPU_PROGRAM_BYTES };
    Memory { peaks, resident: if cpu { resident } else { in_use }, arena, limit, kv, swapped, pinned, fits }
}
