//! The bytes of one rank, phase by phase: the buffers of a step taken and given back in the order in which a run does.

use super::devices::Device;
use super::heap::{Bytes, Heap, Held, Kind, Peak, Rule};
use super::job::{Job, head_of, learns};
use super::shape::{Dims, Flat, Layout};
use super::walk::{GPU_WORKSPACE_BYTES, Keep, Kernels, Packed, Walk, unit};
use crate::config::mesh::RoleName;
use crate::model::Head;
use crate::ops::attention::PAGE;
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

/// Bytes of a sample outside of tensors: token, two log-probabilities at sampling, that of the reference, value, KL,
/// reward, advantage, return and mask of each response token.
const RESPONSE_TOKEN_BYTES: usize = 9 * 4 + 1;
const PROMPT_TOKEN_BYTES: usize = 4;
/// Copies of the step's samples while ranks exchange them: encoded here, and as received.
const EXPERIENCE_COPIES: usize = 3;
/// What CUDA, its libraries and NCCL's channels keep of a GPU, declared.
const GPU_PROGRAM_BYTES: usize = 1536 << 20;
/// Rows and columns of the tiles of attention's kernels on the CPU.
const TILE: usize = 32;

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
    pub fits: bool,
}

impl Memory {
    /// The fullest moment of all.
    pub fn peak(&self) -> (Phase, &Peak) {
        let fullest = self.peaks.iter().max_by_key(|(_, peak)| peak.bytes);
        let (phase, peak) = fullest.expect("a job has phases");
        (*phase, peak)
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

/// A role on this rank.
struct Standing {
    role: RoleName,
    dims: Dims,
    flat: Flat,
    weights: Vec<Held>,
    gradients: Vec<Held>,
    state: Vec<Held>,
}

struct Rank<'a> {
    case: Case<'a>,
    kernels: Kernels,
    heap: Heap,
    roles: Vec<Standing>,
    swapped: usize,
}

/// The bytes of a rank that has `roles` (in the order in which they are loaded).
pub fn memory(case: Case, roles: &[RoleName]) -> Memory {
    let cpu = case.device.is_cpu();
    let kernels = Kernels { cpu, bf16: case.job.config.model.dtype == DType::Bf16, threads: case.threads };
    let arena_max = case.job.config.mesh.arena_bytes_max;
    let limit = if arena_max > 0 { arena_max as usize } else { usize::MAX };
    let heap = Heap::new(if cpu { Rule::Arena { limit } } else { Rule::Device });
    let mut rank = Rank { case, kernels, heap, roles: Vec::new(), swapped: 0 };
    rank.load(roles);
    let job = case.job;
    let kv = (job.is_ppo() && roles.contains(&RoleName::Actor)).then(|| rank.rollout());
    let experience = job.is_ppo().then(|| rank.experience());
    if job.is_ppo() {
        rank.score();
    }
    rank.train();
    rank.heap.enter(Phase::Checkpoint);
    rank.heap.give_all(experience);
    let Rank { heap, swapped, .. } = rank;
    let (arena, resident) = (heap.arena_peak(), heap.resident_peak());
    let peaks = heap.into_peaks();
    let in_use = peaks.values().map(|peak| peak.bytes).max().unwrap_or(0);
    let within = if cpu && arena_max > 0 { arena as u64 <= arena_max } else { true };
    let fits = within && in_use as u64 <= case.device.memory_bytes && kv.is_none_or(|kv| kv.at_once > 0);
    let limit = case.device.memory_bytes.min(limit as u64);
    Memory { peaks, resident: if cpu { resident } else { in_use }, arena, limit, kv, swapped, fits }
}

impl Rank<'_> {
    fn standing(&self, role: RoleName) -> Standing {
        let arch = self.case.job.archs.of(role).expect("a role that is planned has a model");
        let tensor = self.case.layout.mesh.tensor;
        let (dims, flat) = (Dims::new(arch, tensor), Flat::of(arch, role, tensor));
        Standing { role, dims, flat, weights: Vec::new(), gradients: Vec::new(), state: Vec::new() }
    }

    fn has(&self, role: RoleName) -> Option<usize> {
        self.roles.iter().position(|standing| standing.role == role)
    }

    /// Weights, optimizer state and gradients, in the order in which a run makes them.
    fn load(&mut self, roles: &[RoleName]) {
        let program = self.program_bytes(roles);
        // Held to the end.
        let _ = self.heap.take_plain(Kind::Program, None, program);
        if !self.case.device.is_cpu() {
            let _ = self.heap.take_plain(Kind::Collectives, None, GPU_WORKSPACE_BYTES);
        }
        for &role in roles {
            let mut standing = self.standing(role);
            // The files are mapped while they are read, one model after the other.
            let files = if self.kernels.cpu { self.file_bytes(&standing) } else { 0 };
            let files = self.heap.take_plain(Kind::Files, Some(role), files);
            standing.weights = self.weights(role, &standing.flat);
            self.heap.give(files);
            self.roles.push(standing);
        }
        for i in 0..self.roles.len() {
            if learns(self.roles[i].role) {
                self.learner(i);
            }
        }
    }

    /// What stays of a role's weights: all units, or the own range of each.
    fn weights(&mut self, role: RoleName, flat: &Flat) -> Vec<Held> {
        let (stage, ranks) = (self.case.layout.stage(), self.case.layout.zero_ranks());
        if stage < 3 {
            let units = flat.units().into_iter().zip(flat.rows.iter().copied());
            return units.flat_map(|of| unit(&mut self.heap, self.kernels, Kind::Weights, role, of)).collect();
        }
        let whole = unit(&mut self.heap, self.kernels, Kind::Gathered, role, (flat.largest(), 0));
        let own = flat.own_units(ranks).into_iter();
        let held = own.flat_map(|len| unit(&mut self.heap, self.kernels, Kind::Weights, role, (len, 0))).collect();
        self.heap.give_all(whole);
        held
    }

    /// AdamW's state of what is updated here, and the gradient.
    fn learner(&mut self, i: usize) {
        let (role, flat) = (self.roles[i].role, self.roles[i].flat.clone());
        self.roles[i].state = self.state(role, &flat);
        if self.kernels.cpu && self.kernels.bf16 {
            let values = self.heap.take(Kind::Scratch, Some(role), 4 * flat.largest());
            self.heap.give(values);
        }
        if self.kernels.cpu {
            self.gradients(i);
        }
    }

    fn state(&mut self, role: RoleName, flat: &Flat) -> Vec<Held> {
        let (stage, ranks) = (self.case.layout.stage(), self.case.layout.zero_ranks());
        let updated = 4 * if stage == 0 { flat.len() } else { flat.own(ranks) };
        let kinds = [Kind::Moments, Kind::Moments, Kind::Master];
        let copies = if self.kernels.bf16 { 3 } else { 2 };
        // What is swapped lies in files or in the host's memory, not in the arena.
        let swapped = self.case.layout.swap.optimizer;
        let take = |kind: &Kind| match swapped {
            true => self.heap.take_plain(*kind, Some(role), updated),
            false => self.heap.take(*kind, Some(role), updated),
        };
        kinds[..copies].iter().map(take).collect()
    }

    fn gradients(&mut self, i: usize) {
        let (stage, ranks) = (self.case.layout.stage(), self.case.layout.zero_ranks());
        let flat = &self.roles[i].flat;
        let lens = if stage >= 2 { flat.own_units(ranks) } else { flat.units() };
        let (role, copies) = (self.roles[i].role, self.case.job.gradient_copies(ranks));
        let all = (0..copies).flat_map(|_| lens.iter());
        self.roles[i].gradients = all.map(|len| self.heap.take(Kind::Gradients, Some(role), 4 * len)).collect();
    }

    /// The rotary tables, and what threads keep for attention. On a GPU: what its libraries take.
    fn program_bytes(&self, roles: &[RoleName]) -> usize {
        if !self.kernels.cpu {
            return GPU_PROGRAM_BYTES;
        }
        let job = self.case.job;
        let arch = job.archs.of(roles[0]).expect("a role that is planned has a model");
        let rope = arch.context * arch.head_dim * 4;
        let wide = arch.head_dim.next_multiple_of(PAGE);
        let longest = job.rows.tokens().div_ceil(self.case.layout.mesh.sequence);
        let tiles = 2 * TILE * (wide + PAGE + 1);
        let forward = tiles + 2 * longest.next_multiple_of(PAGE) * arch.head_dim;
        let rows = (longest * (arch.heads / arch.kv_heads)).next_multiple_of(TILE);
        let backward = 3 * rows * wide + 2 * (rows + PAGE * (arch.head_dim + wide + TILE));
        let lines = forward.max(backward).div_ceil(16).next_power_of_two();
        rope + self.kernels.threads * lines * 64
    }

    /// Bytes of a model's files, of which a rank reads its parts.
    fn file_bytes(&self, standing: &Standing) -> usize {
        let arch = self.case.job.archs.of(standing.role).expect("a role that is planned has a model");
        let named = arch.source.get("torch_dtype").or_else(|| arch.source.get("dtype"));
        let bytes = if named.and_then(serde_json::Value::as_str) == Some("float32") { 4 } else { 2 };
        standing.flat.parameters * bytes
    }

    fn experience(&mut self) -> Held {
        let rows = self.case.job.rows;
        let row = rows.prompt * PROMPT_TOKEN_BYTES + rows.response * RESPONSE_TOKEN_BYTES;
        let bytes = self.case.job.samples() * row * EXPERIENCE_COPIES;
        // On a GPU they lie in the host's memory.
        self.heap.take_plain(Kind::Experience, None, if self.kernels.cpu { bytes } else { 0 })
    }

    // ---- phases ----

    fn rollout(&mut self) -> KvCache {
        let (job, layout) = (self.case.job, self.case.layout);
        let actor = self.has(RoleName::Actor).expect("who rolls out has the actor");
        self.swap_out(|role| role != RoleName::Actor);
        self.heap.enter(Phase::Rollout);
        let dims = Dims::new(&job.archs.actor, layout.rollout_tensor);
        let flat = Flat::of(&job.archs.actor, RoleName::Actor, layout.rollout_tensor);
        let own_weights: Vec<Held> = if layout.reshards() {
            let largest = (self.roles[actor].flat.largest(), 0);
            let role = RoleName::Actor;
            let whole = unit(&mut self.heap, self.kernels, Kind::Gathered, role, largest);
            let units = flat.units().into_iter().zip(flat.rows.iter().copied());
            let held =
                units.flat_map(|of| unit(&mut self.heap, self.kernels, Kind::RolloutWeights, role, of)).collect();
            self.heap.give_all(whole);
            held
        } else {
            Vec::new()
        };
        let kv = self.kv_cache(&dims);
        let cache: Vec<Held> = (0..2 * dims.layers)
            .map(|_| self.heap.take(Kind::KvCache, None, kv.bytes / (2 * dims.layers).max(1)))
            .collect();
        for (tokens, rows) in forwards(job, kv.at_once) {
            self.generate(&dims, &flat, tokens, rows);
        }
        // Training takes the memory of both in its turn.
        self.heap.give_all(cache);
        self.heap.give_all(own_weights);
        kv
    }

    /// One forward of the engine: `tokens` fed, `rows` rows of logits.
    fn generate(&mut self, dims: &Dims, flat: &Flat, tokens: usize, rows: usize) {
        let kernels = self.kernels;
        let mut walk = Walk::new(&mut self.heap, RoleName::Actor, (dims, flat), kernels, (0, 1));
        let kept = walk.forward(tokens, Keep::Nothing);
        let role = Some(RoleName::Actor);
        let h = walk.heap.take(Kind::Hidden, role, rows * dims.d * kernels.activation());
        let logits = walk.heap.take(Kind::Logits, role, rows * dims.v * 4);
        walk.heap.give(h);
        walk.done(kept);
        if dims.v < dims.vocabulary {
            // Each rank draws for its share of the rows, of which it gets the whole vocabulary.
            let share = rows.div_ceil(dims.vocabulary.div_ceil(dims.v));
            let whole = [(); 2].map(|()| walk.heap.take(Kind::Logits, role, share * dims.vocabulary * 4));
            walk.heap.give_all(whole);
        }
        walk.heap.give(logits);
    }

    /// Pages for as many samples as the job, the config and the memory allow.
    fn kv_cache(&mut self, dims: &Dims) -> KvCache {
        let (job, layout) = (self.case.job, self.case.layout);
        let rollout = &job.config.rollout;
        let element = if self.kernels.cpu { 4 } else { 2 };
        let token_bytes = 2 * dims.layers * dims.kv() * element;
        let samples = job.config.rollout.prompts_per_step.div_ceil(layout.rollout_data()) * rollout.samples_per_prompt;
        // The CPU's engine has a page more, for samples that share a prompt.
        let pages = job.rows.tokens().div_ceil(PAGE) + usize::from(self.kernels.cpu);
        let sample_bytes = pages * PAGE * token_bytes;
        let memory = self.case.device.memory_bytes;
        let allowed = match (rollout.kv_bytes_max, self.kernels.cpu) {
            (0, true) => memory / 2,
            (0, false) => memory.saturating_sub((self.heap.in_use() + self.rollout_transient(dims, samples)) as u64),
            (given, _) => given,
        };
        let wanted = samples.min(rollout.batch_max);
        let at_once = wanted.min((allowed / sample_bytes as u64) as usize);
        let waves = if at_once == 0 { 0 } else { samples.div_ceil(at_once) };
        // Waves of equal size take the least memory for their number; the CPU's engine takes what it may.
        let even = if waves == 0 { 0 } else { samples.div_ceil(waves) };
        let at_once = if self.kernels.cpu { at_once } else { even };
        let bytes = at_once * sample_bytes;
        KvCache { token_bytes, samples, at_once, waves, bytes, bytes_wanted: samples * job.rows.tokens() * token_bytes }
    }

    /// The most that forwards of the rollout take beside the cache.
    fn rollout_transient(&self, dims: &Dims, samples: usize) -> usize {
        let job = self.case.job;
        let tokens = job.config.rollout.prefill_tokens_max + samples;
        let row = 3 * dims.d + 2 * dims.q() + 2 * dims.kv() + 3 * dims.f;
        tokens * row * self.kernels.activation() + samples * (dims.d * self.kernels.activation() + dims.v * 4)
    }

    fn packed(&self, rows: usize) -> Packed {
        let (job, sequence) = (self.case.job, self.case.layout.mesh.sequence);
        Packed {
            tokens: (rows * job.rows.tokens()).div_ceil(sequence),
            head_rows: job.head_rows(rows).div_ceil(sequence),
            longest: job.rows.tokens().div_ceil(sequence),
        }
    }

    fn score(&mut self) {
        self.heap.enter(Phase::Score);
        self.swap_in_weights();
        let batch = self.case.job.scoring(&self.case.layout.mesh);
        let packed = self.packed(batch.rows);
        for i in 0..self.roles.len() {
            let role = self.roles[i].role;
            if role == RoleName::Actor && !self.case.job.recomputes_logprobs(self.case.layout) {
                continue;
            }
            self.walk(i, |walk| {
                let kept = walk.forward(packed.tokens, Keep::Nothing);
                match head_of(role) {
                    Head::LanguageModel => walk.logprobs(packed.head_rows),
                    Head::Value => walk.values(packed.head_rows),
                }
                walk.done(kept);
            });
        }
    }

    fn train(&mut self) {
        self.swap_out(|role| !learns(role));
        self.heap.enter(Phase::Train);
        let batch = self.case.job.training(&self.case.layout.mesh);
        let packed = self.packed(batch.rows);
        let keep = if self.case.job.config.gradient.recompute { Keep::Input } else { Keep::Everything };
        for i in 0..self.roles.len() {
            if learns(self.roles[i].role) && !self.kernels.cpu {
                self.gradients(i);
            }
        }
        for i in 0..self.roles.len() {
            let role = self.roles[i].role;
            if !learns(role) {
                continue;
            }
            self.walk(i, |walk| {
                let kept = walk.forward(packed.tokens, keep);
                let dhidden = match head_of(role) {
                    Head::LanguageModel => walk.logprobs_backward(packed.tokens, packed.head_rows),
                    Head::Value => walk.values_backward(packed.tokens, packed.head_rows),
                };
                walk.backward(packed.tokens, kept, dhidden);
                walk.settle();
            });
        }
        self.swap_in_state();
        if !self.kernels.cpu {
            for i in 0..self.roles.len() {
                let gradients = std::mem::take(&mut self.roles[i].gradients);
                self.heap.give_all(gradients);
            }
        }
    }

    fn walk(&mut self, i: usize, work: impl FnOnce(&mut Walk)) {
        let standing = &self.roles[i];
        let layout = self.case.layout;
        let zero = (layout.stage(), layout.mesh.sequence);
        work(&mut Walk::new(&mut self.heap, standing.role, (&standing.dims, &standing.flat), self.kernels, zero));
    }

    // ---- host memory ----

    /// What the layout swaps goes: the optimizer's state, and the weights of roles that `idle` names.
    fn swap_out(&mut self, idle: impl Fn(RoleName) -> bool) {
        let (swap, before) = (self.case.layout.swap, self.heap.in_use());
        for standing in &mut self.roles {
            if swap.optimizer {
                self.heap.give_all(std::mem::take(&mut standing.state));
            }
            if swap.roles && idle(standing.role) {
                self.heap.give_all(std::mem::take(&mut standing.weights));
            }
        }
        self.swapped = self.swapped.max(before - self.heap.in_use());
    }

    /// Weights that were swapped out come back, all for scoring.
    fn swap_in_weights(&mut self) {
        for i in 0..self.roles.len() {
            if self.roles[i].weights.is_empty() {
                let (role, flat) = (self.roles[i].role, self.roles[i].flat.clone());
                self.roles[i].weights = self.weights(role, &flat);
            }
        }
    }

    /// State comes back for the update, when activations are gone.
    fn swap_in_state(&mut self) {
        for i in 0..self.roles.len() {
            if learns(self.roles[i].role) && self.roles[i].state.is_empty() {
                let (role, flat) = (self.roles[i].role, self.roles[i].flat.clone());
                self.roles[i].state = self.state(role, &flat);
            }
        }
    }
}

/// The forwards of a rollout of rows of one length, by what they feed: (tokens, rows of logits). Each size once.
fn forwards(job: &Job, at_once: usize) -> Vec<(usize, usize)> {
    if at_once == 0 {
        return Vec::new();
    }
    let budget = job.config.rollout.prefill_tokens_max.max(1);
    let (mut sizes, mut decoding, mut read) = (Vec::new(), 0, 0);
    let all = at_once * job.rows.prompt;
    while read < all {
        let tokens = budget.min(all - read);
        let complete = (read + tokens) / job.rows.prompt - read / job.rows.prompt;
        sizes.push((tokens + decoding, complete + decoding));
        decoding += complete;
        read += tokens;
    }
    sizes.push((at_once, at_once));
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}
