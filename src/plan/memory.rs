//! The bytes of one rank, phase by phase: the buffers of a step taken and given back in the order in which a run does.

use super::case::{Case, KvCache};
use super::devices::GPU_PROGRAM_BYTES;
use super::heap::{Bytes, Heap, Kind, Peak, Phase};
use super::job::learns;
use super::null::{self, Counted};
use super::rank::Rank;
use super::rollout::cache_of;
use super::shape::Flat;
use super::walk::Kernels;
use crate::config::job::Collectives;
use crate::config::mesh::RoleName;
use crate::device::Device;
use crate::device::cuda::key_segments::RUN;
use std::collections::BTreeMap;

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

    /// Bytes of the fullest moment by purpose, the purposes of which there are none left out; beside them a GPU holds its program,
    /// which is not in `taken` either.
    pub fn groups(&self, device: Device) -> Vec<(&'static str, usize)> {
        let (_, peak) = self.peak();
        let is_taken = |kind: Kind| device == Device::Cpu || kind != Kind::Program;
        let of = |name: &'static str, kinds: std::ops::RangeInclusive<Kind>| {
            let parts = peak.parts.iter().filter(|(what, _)| kinds.contains(&what.kind) && is_taken(what.kind));
            (name, parts.map(|(_, bytes)| bytes).sum::<usize>())
        };
        let groups = [
            of("weights", Kind::Weights..=Kind::Weights),
            of("gradients", Kind::Gradients..=Kind::Gradients),
            of("optimizer", Kind::Moments..=Kind::Master),
            of("gathered", Kind::Gathered..=Kind::RolloutWeights),
            of("kv cache", Kind::KvCache..=Kind::KvCache),
            of("activations", Kind::Activations..=Kind::Scratch),
            of("other", Kind::Collectives..=Kind::Program),
        ];
        groups.into_iter().filter(|(_, bytes)| *bytes > 0).collect()
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
        let kinds = Kind::Activations..=Kind::Graphs;
        let parts = self.parts(phase).into_iter().flatten().filter(|(what, _)| kinds.contains(&what.kind));
        parts.map(|(_, bytes)| bytes).sum()
    }

    /// Bytes of `phase` by kind and role.
    pub fn parts(&self, phase: Phase) -> Option<&Bytes> {
        self.peaks.get(&phase).map(|peak| &peak.parts)
    }
}

/// How a GPU computes.
fn kernels(case: Case) -> Kernels {
    let config = case.job.config;
    Kernels {
        fast: case.job.fast,
        joined: (config.job.collectives != Collectives::Mpi).then_some(case.layout.mesh.tensor),
        run: (case.job.rows.tokens_max() > RUN).then_some(RUN),
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

/// The bytes of a rank that has `roles` (in the order in which they are loaded).
pub fn memory(case: Case, roles: &[RoleName]) -> Memory {
    if case.device.is_cpu() { on_cpu(case, roles) } else { on_gpu(case, roles) }
}

fn on_cpu(case: Case, roles: &[RoleName]) -> Memory {
    let Case { job, device, .. } = case;
    let arena_max = job.config.mesh.arena_bytes_max;
    let plays = job.is_ppo() && roles.contains(&RoleName::Actor);
    let kv = plays.then(|| (0..job.looked_at()).map(|step| cache_of(case, step)).max_by_key(|kv| kv.bytes_wanted));
    let kv = kv.flatten();
    let swapped = swapped(case, roles);
    let Counted { peaks, resident, arena, ran } = null::count(case, roles);
    let in_use = peaks.values().map(|peak| peak.bytes).max().unwrap_or(0);
    let within = arena_max == 0 || arena as u64 <= arena_max;
    let has_room = in_use as u64 <= device.memory_bytes && kv.is_none_or(|kv| kv.at_once > 0);
    let limit = if arena_max == 0 { device.memory_bytes } else { device.memory_bytes.min(arena_max) };
    Memory { peaks, resident, arena, limit, kv, swapped, pinned: 0, fits: ran && within && has_room }
}

fn on_gpu(case: Case, roles: &[RoleName]) -> Memory {
    let arena_max = case.job.config.mesh.arena_bytes_max;
    let mut device = case.device.clone();
    if arena_max > 0 {
        device.memory_bytes = device.memory_bytes.min(arena_max + GPU_PROGRAM_BYTES as u64);
    }
    let case = Case { device: &device, ..case };
    let mut rank = Rank::new(case, kernels(case), Heap::default());
    rank.load(roles);
    let job = case.job;
    let mut kv: Option<KvCache> = None;
    for step in 0..job.looked_at() {
        if job.is_ppo() && roles.contains(&RoleName::Actor) {
            rank.answer();
            let taken = rank.rollout(step);
            kv = Some(kv.filter(|fuller| fuller.bytes_wanted >= taken.bytes_wanted).unwrap_or(taken));
        }
        if job.is_ppo() {
            rank.score(step);
        }
        rank.train(step);
        rank.evaluate();
    }
    rank.checkpoint();
    let swapped = swapped(case, roles);
    let pinned = swapped + rank.pinned();
    let peaks = rank.heap.into_peaks();
    let in_use = peaks.values().map(|peak| peak.bytes).max().unwrap_or(0);
    let fits = in_use as u64 <= case.device.memory_bytes && kv.is_none_or(|kv| kv.at_once > 0);
    let (limit, arena) = (case.device.memory_bytes, in_use - GPU_PROGRAM_BYTES);
    Memory { peaks, resident: in_use, arena, limit, kv, swapped, pinned, fits }
}
