//! The buffers of one rank while it samples: weights of another layout, the cache, and the engine's forwards.

use super::case::{Case, KvCache};
use super::heap::{Held, Kind, Phase};
use super::job::Job;
use super::rank::Rank;
use super::rows::Row;
use super::shape::{Dims, Flat};
use super::walk::{Keep, Kernels, Packed, Walk};
use crate::config::mesh::RoleName;
use crate::config::rollout::RolloutConfig;
use crate::device::Device;
use crate::device::cuda::decode::{DecodeState, Room};
use crate::model::Arch;
use crate::ops::attention::PAGE;
use crate::rollout::blocks::pages_of;
use crate::rollout::scheduler::{Spec, cached_tokens_max, pages_wanted};
use crate::rollout::{bucket, new_tokens_max};
use crate::tensor::DType;

/// Room for stop tokens of a batch.
const STOPS: usize = 64;

impl Rank<'_> {
    pub fn rollout(&mut self, step: usize) -> KvCache {
        let job = self.case.job;
        self.sample(&job.waves_of(step, self.case.layout.rollout_data()), job.config.rollout.samples_per_prompt)
    }

    /// The prompts of an evaluation, each answered once.
    pub fn answer(&mut self) {
        let prompts = self.case.job.answered(self.case.layout.rollout_data());
        if !prompts.is_empty() {
            self.sample(&[prompts], 1);
        }
    }

    /// Answers prompts `times` times each, wave by wave.
    fn sample(&mut self, waves: &[Vec<Row>], times: usize) -> KvCache {
        self.free_gradients();
        let (job, layout) = (self.case.job, self.case.layout);
        let actor = self.has(RoleName::Actor).expect("who rolls out has the actor");
        // The critic makes room, too.
        if let Some(critic) = self.has(RoleName::Critic) {
            self.leave(critic);
        }
        self.heap.enter(Phase::Rollout);
        let dims = Dims::new(&job.archs.actor, layout.rollout_tensor);
        let flat = Flat::on(Device::Cuda, &job.archs.actor, RoleName::Actor, layout.rollout_tensor);
        let own_weights = if layout.reshards() { self.resharded(actor, &flat) } else { Vec::new() };
        // A cache that is large enough for one wave is kept for the next.
        let fullest = waves.iter().max_by_key(|wave| wave.iter().map(|row| row.tokens()).sum::<usize>());
        let fullest = fullest.expect("a step has a wave");
        let kv = kv_cache(self.case, &dims, fullest, times, self.allowed(&dims, fullest.len() * times));
        let cache: Vec<Held> = (0..2 * dims.layers)
            .map(|_| self.heap.take(Kind::KvCache, None, kv.bytes / (2 * dims.layers).max(1)))
            .collect();
        let sizes: Vec<_> = waves.iter().flat_map(|prompts| forwards(job, prompts, (times, kv.at_once))).collect();
        for &(tokens, rows) in &sizes {
            let packed = Packed { tokens, head_rows: rows, longest: 0 };
            if self.is_due(Phase::Rollout, RoleName::Actor, packed) {
                self.generate(&dims, &flat, tokens, rows);
            }
        }
        if job.config.rollout.graphs && kv.at_once > 0 {
            let graphs = self.graphs(&dims, &flat, waves.iter().flatten(), kv.at_once);
            // Prompts that are read when others have ended.
            if let Some(&(tokens, rows)) = sizes.first().filter(|_| kv.at_once < kv.samples) {
                self.generate(&dims, &flat, tokens, rows);
            }
            self.heap.give_all(graphs);
        }
        // Training takes the memory of both in its turn.
        self.heap.give_all(cache);
        self.heap.give_all(own_weights);
        kv.of_waves(waves.len())
    }

    /// The actor's weights in the layout of the rollout.
    fn resharded(&mut self, actor: usize, flat: &Flat) -> Vec<Held> {
        let (layout, role) = (self.case.layout, RoleName::Actor);
        // Where parts are cut otherwise: the whole unit that is cut, and the one on its way.
        let recut = layout.rollout_tensor != layout.mesh.tensor && layout.mesh.ranks() > 1;
        let largest = self.roles[actor].flat.largest() * layout.mesh.tensor;
        let units = if recut { 2 } else { 0 };
        let mut take = |kind, len: usize| self.heap.take(kind, Some(role), 2 * len);
        let whole: Vec<Held> = (0..units).map(|_| take(Kind::Gathered, largest)).collect();
        let held = flat.units().into_iter().map(|len| take(Kind::RolloutWeights, len)).collect();
        self.heap.give_all(whole);
        held
    }

    /// What decoding `rows` samples by graphs keeps: tables, and all that a graph of a step writes. Graphs of fewer rows write
    /// where that of the most rows does.
    fn graphs<'b>(
        &mut self,
        dims: &Dims,
        flat: &Flat,
        prompts: impl Iterator<Item = &'b Row>,
        rows: usize,
    ) -> [Held; 2] {
        let rollout = &self.case.job.config.rollout;
        let longest =
            prompts.map(|row| (row.prompt + rollout.response_tokens_max).min(dims.context)).max().unwrap_or(0);
        let rows = bucket(rows, rollout.batch_max);
        let seen = if rollout.repetition_penalty == 1.0 { 0 } else { rows * longest };
        let room = Room { rows, pages: rows * pages_of(longest), stops: STOPS, seen };
        let tables = self.heap.take(Kind::Graphs, None, DecodeState::bytes(&room));
        self.heap.begin_capture();
        self.generate(dims, flat, rows, rows);
        [tables, self.heap.end_capture()]
    }

    /// One forward of the engine: `tokens` fed, `rows` rows of logits.
    fn generate(&mut self, dims: &Dims, flat: &Flat, tokens: usize, rows: usize) {
        let joined = self.kernels.joined.map(|_| self.case.layout.rollout_tensor);
        let kernels = Kernels { joined, ..self.kernels };
        let edits = edits(&self.case.job.config.rollout);
        let mut walk = Walk::new(&mut self.heap, RoleName::Actor, (dims, flat), kernels, (0, 1));
        let kept = walk.forward(tokens, Keep::Nothing);
        let role = Some(RoleName::Actor);
        let h = walk.heap.take(Kind::Hidden, role, rows * dims.d * DType::Bf16.bytes());
        let logits = walk.heap.take(Kind::Logits, role, rows * dims.v * 4);
        walk.heap.give(h);
        if edits {
            let edited = walk.heap.take(Kind::Scratch, role, rows * dims.vocabulary * 4);
            walk.heap.give(edited);
        }
        walk.done(kept);
        if dims.v < dims.vocabulary {
            // Each rank draws for its share of the rows, of which it gets the whole vocabulary.
            let share = rows.div_ceil(dims.vocabulary.div_ceil(dims.v));
            let whole = [(); 2].map(|()| walk.heap.take(Kind::Logits, role, share * dims.vocabulary * 4));
            walk.heap.give_all(whole);
        }
        walk.heap.give(logits);
    }

    /// Bytes that the cache may take.
    fn allowed(&self, dims: &Dims, samples: usize) -> u64 {
        let tokens = self.case.job.config.rollout.prefill_tokens_max + samples;
        let transient = forward_bytes(dims, tokens, samples, DType::Bf16.bytes());
        self.case.device.memory_bytes.saturating_sub((self.heap.in_use() + transient) as u64)
    }
}

/// The cache of a rank of CPUs in a step.
pub fn cache_of(case: Case, step: usize) -> KvCache {
    let (job, layout) = (case.job, case.layout);
    let waves = job.waves_of(step, layout.rollout_data());
    let dims = Dims::new(&job.archs.actor, layout.rollout_tensor);
    let fullest = waves.iter().max_by_key(|wave| wave.iter().map(|row| row.tokens()).sum::<usize>());
    let fullest = fullest.expect("a step has a wave");
    let kv = kv_cache(case, &dims, fullest, job.config.rollout.samples_per_prompt, case.device.memory_bytes / 2);
    kv.of_waves(waves.len())
}

/// Pages for as many samples of `prompts` as the job, the config and the memory allow.
fn kv_cache(case: Case, dims: &Dims, prompts: &[Row], times: usize, free: u64) -> KvCache {
    let (rollout, cpu) = (&case.job.config.rollout, case.device.is_cpu());
    let token_bytes = 2 * dims.layers * dims.kv() * if cpu { 4 } else { 2 };
    let page_bytes = PAGE * token_bytes;
    let samples = prompts.len() * times;
    // The engine has room for the longest response there may be.
    let spec = |(group, row): (usize, &Row)| {
        let new_tokens_max = new_tokens_max(rollout, row.prompt, dims.context);
        Spec { group, prompt_tokens: row.prompt, new_tokens_max }
    };
    let specs: Vec<Spec> = prompts.iter().enumerate().map(spec).collect();
    let longest = specs.iter().map(|spec| cached_tokens_max(spec.prompt_tokens, spec.new_tokens_max)).max();
    let all = specs.into_iter().flat_map(|spec| std::iter::repeat_n(spec, times));
    let lanes = samples.min(rollout.batch_max);
    let needed = pages_wanted(all, rollout.batch_max) * page_bytes;
    let sample_bytes = (needed / lanes.max(1)).max(1);
    let allowed = if rollout.kv_bytes_max > 0 { rollout.kv_bytes_max } else { free };
    let longest_fits = longest.is_some_and(|tokens| (pages_of(tokens) * page_bytes) as u64 <= allowed);
    let at_once = if longest_fits { lanes.min((allowed / sample_bytes as u64) as usize).max(1) } else { 0 };
    let waves = if at_once == 0 { 0 } else { samples.div_ceil(at_once) };
    // Where a GPU's memory allows fewer than the batch, waves of equal size take the least for their number; else the engine
    // takes what it may.
    let is_even = !cpu && rollout.kv_bytes_max == 0 && at_once < lanes;
    let at_once = if is_even && waves > 0 { samples.div_ceil(waves) } else { at_once };
    let bytes = match at_once {
        0 => 0,
        _ if is_even => at_once * sample_bytes,
        _ => needed.min((allowed / page_bytes as u64) as usize * page_bytes),
    };
    let bytes_wanted = prompts.iter().map(|row| row.tokens()).sum::<usize>() * times * token_bytes;
    KvCache { token_bytes, samples, at_once, waves, bytes, bytes_wanted }
}

/// The most that one forward over `tokens` tokens takes, `rows` of which go through the head; `activation`: bytes of a value of
/// the hidden state.
fn forward_bytes(dims: &Dims, tokens: usize, rows: usize, activation: usize) -> usize {
    let row = 3 * dims.d + 2 * dims.q() + 2 * dims.kv() + 3 * dims.f;
    tokens * row * activation + rows * (dims.d * activation + dims.v * size_of::<f32>())
}

/// The most that an engine on one GPU takes beside weights and cache while it answers `samples` requests: the forward that reads
/// prompts beside those that decode, what graphs of decoding keep (their small tables left out), and logits that are changed before a draw.
pub fn engine_bytes(arch: &Arch, rollout: &RolloutConfig, samples: usize) -> u64 {
    let (dims, rows) = (Dims::new(arch, 1), samples.min(rollout.batch_max));
    let forward = |tokens| forward_bytes(&dims, tokens, rows, DType::Bf16.bytes());
    let graphs = if rollout.graphs { forward(rows) } else { 0 };
    let edited = if edits(rollout) { rows * dims.vocabulary * size_of::<f32>() } else { 0 };
    (forward(rollout.prefill_tokens_max + rows) + graphs + edited) as u64
}

/// Whether tokens are drawn from logits that are changed before.
fn edits(rollout: &RolloutConfig) -> bool {
    rollout.repetition_penalty != 1.0 || rollout.response_tokens_min > 0
}

/// The forwards of a rollout, by what they feed: (tokens, rows of logits). Prompts are read in their order within the
/// budget of a forward, beside samples that decode; each prompt once for all its `times` samples.
fn forwards(job: &Job, prompts: &[Row], (times, at_once): (usize, usize)) -> Vec<(usize, usize)> {
    if at_once == 0 {
        return Vec::new();
    }
    let (budget, times) = (job.config.rollout.prefill_tokens_max.max(1), times.max(1));
    let (mut sizes, mut decoding) = (Vec::new(), 0);
    let mut left: Vec<usize> = prompts.iter().take(at_once.div_ceil(times)).map(|row| row.prompt).rev().collect();
    while !left.is_empty() {
        let (mut free, mut complete) = (budget, 0);
        while let Some(prompt) = left.last_mut().filter(|_| free > 0) {
            let read = free.min(*prompt);
            free -= read;
            *prompt -= read;
            if *prompt == 0 {
                left.pop();
                complete += 1;
            }
        }
        sizes.push((budget - free + decoding, complete + decoding));
        decoding = (decoding + complete * times).min(at_once);
    }
    sizes.push((at_once, at_once));
    sizes.dedup();
    sizes
}
