//! The buffers of one rank, from loading to the checkpoint, in the order in which a run takes and gives them.

use super::heap::{Heap, Held, Kind};
use super::job::{Job, head_of, learns};
use super::memory::{Case, KvCache, Phase};
use super::shape::{Dims, Flat};
use super::walk::{GPU_WORKSPACE_BYTES, Keep, Kernels, Packed, Walk, unit};
use crate::config::mesh::RoleName;
use crate::model::Head;
use crate::ops::attention::PAGE;

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

/// A role on this rank.
struct Standing {
    role: RoleName,
    dims: Dims,
    flat: Flat,
    weights: Vec<Held>,
    gradients: Vec<Held>,
    state: Vec<Held>,
}

pub(super) struct Rank<'a> {
    case: Case<'a>,
    kernels: Kernels,
    pub heap: Heap,
    roles: Vec<Standing>,
}

impl<'a> Rank<'a> {
    pub fn new(case: Case<'a>, kernels: Kernels, heap: Heap) -> Self {
        Self { case, kernels, heap, roles: Vec::new() }
    }

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
    pub fn load(&mut self, roles: &[RoleName]) {
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
            if !learns(role) {
                self.leave(self.roles.len() - 1);
            }
        }
        for i in 0..self.roles.len() {
            if learns(self.roles[i].role) {
                self.learner(i);
                self.put_state_away(i);
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
        kinds[..copies].iter().map(|kind| self.heap.take(*kind, Some(role), updated)).collect()
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

    pub fn experience(&mut self) -> Held {
        let rows = self.case.job.rows;
        let row = rows.prompt * PROMPT_TOKEN_BYTES + rows.response * RESPONSE_TOKEN_BYTES;
        let bytes = self.case.job.samples() * row * EXPERIENCE_COPIES;
        // On a GPU they lie in the host's memory.
        self.heap.take_plain(Kind::Experience, None, if self.kernels.cpu { bytes } else { 0 })
    }

    // ---- phases ----

    pub fn rollout(&mut self) -> KvCache {
        let (job, layout) = (self.case.job, self.case.layout);
        let actor = self.has(RoleName::Actor).expect("who rolls out has the actor");
        // On a GPU the critic makes room, too.
        let critic = self.has(RoleName::Critic).filter(|_| !self.kernels.cpu);
        if let Some(critic) = critic {
            self.leave(critic);
        }
        self.heap.enter(Phase::Rollout);
        let dims = Dims::new(&job.archs.actor, layout.rollout_tensor);
        let flat = Flat::of(&job.archs.actor, RoleName::Actor, layout.rollout_tensor);
        let own_weights: Vec<Held> = if layout.reshards() {
            let role = RoleName::Actor;
            // Where parts are cut otherwise: the whole unit that is cut, and the one on its way.
            let recut = layout.rollout_tensor != layout.mesh.tensor && layout.mesh.ranks() > 1;
            let largest = (self.roles[actor].flat.largest() * layout.mesh.tensor, 0);
            let units = if recut { 2 } else { 0 };
            let whole: Vec<Held> =
                (0..units).flat_map(|_| unit(&mut self.heap, self.kernels, Kind::Gathered, role, largest)).collect();
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

    pub fn score(&mut self) {
        self.heap.enter(Phase::Score);
        let batch = self.case.job.scoring(&self.case.layout.mesh);
        let packed = self.packed(batch.rows);
        for i in 0..self.roles.len() {
            let role = self.roles[i].role;
            if role == RoleName::Actor && !self.case.job.recomputes_logprobs(self.case.layout) {
                continue;
            }
            self.come(i);
            self.walk(i, |walk| {
                let kept = walk.forward(packed.tokens, Keep::Nothing);
                match head_of(role) {
                    Head::LanguageModel => walk.logprobs(packed.head_rows),
                    Head::Value => walk.values(packed.head_rows),
                }
                walk.done(kept);
            });
            if !learns(role) {
                self.leave(i);
            }
        }
        for i in 0..self.roles.len() {
            if learns(self.roles[i].role) {
                self.come(i);
            }
        }
    }

    pub fn train(&mut self) {
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
            // The second micro-batch begins while the last unit of the first is reduced.
            let batches = batch.count.min(2);
            self.walk(i, |walk| {
                for _ in 0..batches {
                    let kept = walk.forward(packed.tokens, keep);
                    let dhidden = match head_of(role) {
                        Head::LanguageModel => walk.logprobs_backward(packed.tokens, packed.head_rows),
                        Head::Value => walk.values_backward(packed.tokens, packed.head_rows),
                    };
                    walk.backward(packed.tokens, kept, dhidden);
                }
                walk.settle();
            });
            // The update.
            self.fetch_state(i);
            self.put_state_away(i);
        }
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

    /// What is written is read: on the CPU state that waits in files comes into memory.
    pub fn checkpoint(&mut self) {
        self.heap.enter(Phase::Checkpoint);
        let learners: Vec<usize> = (0..self.roles.len()).filter(|i| learns(self.roles[*i].role)).collect();
        for i in &learners {
            self.fetch_state(*i);
        }
        for i in learners {
            self.put_state_away(i);
        }
    }

    // ---- host memory ----

    /// Weights of a role that is idle go, where the layout says so.
    fn leave(&mut self, i: usize) {
        if self.case.layout.swap.roles {
            let weights = std::mem::take(&mut self.roles[i].weights);
            self.heap.give_all(weights);
        }
    }

    /// Weights that left come back.
    fn come(&mut self, i: usize) {
        if self.roles[i].weights.is_empty() {
            let (role, flat) = (self.roles[i].role, self.roles[i].flat.clone());
            self.roles[i].weights = self.weights(role, &flat);
        }
    }

    /// The optimizer's state goes until the next update, where the layout says so.
    fn put_state_away(&mut self, i: usize) {
        if self.case.layout.swap.optimizer {
            let state = std::mem::take(&mut self.roles[i].state);
            self.heap.give_all(state);
        }
    }

    fn fetch_state(&mut self, i: usize) {
        if self.roles[i].state.is_empty() {
            let (role, flat) = (self.roles[i].role, self.roles[i].flat.clone());
            self.roles[i].state = self.state(role, &flat);
        }
    }

    /// Bytes outside of the device's memory during the rollout.
    pub fn swapped(&self) -> usize {
        let (layout, element) = (self.case.layout, if self.kernels.bf16 { 2 } else { 4 });
        let (stage, ranks) = (layout.stage(), layout.zero_ranks());
        let of = |standing: &Standing| {
            let (len, own, learns) = (standing.flat.len(), standing.flat.own(ranks), learns(standing.role));
            let state = (if self.kernels.bf16 { 12 } else { 8 }) * if stage == 0 { len } else { own };
            let weights = element * if stage == 3 { own } else { len };
            let idle = !learns || (standing.role == RoleName::Critic && !self.kernels.cpu);
            let state = if layout.swap.optimizer && learns { state } else { 0 };
            state + if layout.swap.roles && idle { weights } else { 0 }
        };
        self.roles.iter().map(of).sum()
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
