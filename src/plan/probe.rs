//! Measurements of this CPU: the peaks of its cores and memory, and a few layers of the job's own model at the job's
//! own shapes. Each measurement takes a fraction of a second. All ranks measure at the same time, so that they share
//! the memory as in the run.

use super::devices::{Device, Efficiency, Latency};
use super::job::Job;
use super::synthetic::{self, Matrix, Measure, filled, packed_attention};
use crate::comm::{Group, World};
use crate::config::job::Recompute;
use crate::device::cpu::{peak, pool};
use crate::device::null::{self, Null, Task, Work};
use crate::mesh::Mesh;
use crate::model::{
    Arch, CacheGroup, Gradients, Head, Kept, Keys, LayerCache, Saved, TensorPart, Transformer, Weights, cost, init,
    packed_positions,
};
use crate::ops::adamw;
use crate::ops::attention::{self, PAGE, Paged, PagedSequence};
use crate::ops::matmul::{self, Into};
use crate::ops::norm;
use crate::ops::sample::{self, SampleRow, Sampled};
use crate::rollout;
use crate::sys::host::median;
use crate::tensor::arena::{self, Buffer};
use crate::tensor::{DType, Tensor};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

/// Multiply-adds of one sample of the peak: about a millisecond. The best of the samples is the peak, because other
/// processes only slow it down.
const PEAK_ROUNDS: usize = 400_000;
const PEAK_SAMPLES: usize = 32;
const READ_SAMPLES: usize = 9;
/// Bytes to read, more than caches hold.
const READ_BYTES: usize = 256 << 20;
/// Weights that decoding streams in a measurement: more than caches hold.
const STREAMED_BYTES: usize = 96 << 20;
const LAYERS_MAX: usize = 8;
/// FLOPs of one measured call, half a second on two cores, because GEMMs of few rows reach less; and the least number
/// of tokens.
const FLOPS: f64 = 1.2e11;
const TOKENS_MIN: usize = 128;
const REPEATS: usize = 3;
/// Elements of the update that is measured.
const UPDATED: usize = 8 << 20;
/// Floats of a measured collective.
const EXCHANGED: usize = 4 << 20;
/// Bytes moved into a mapped file and out of it.
const MOVED_BYTES: usize = 64 << 20;

/// The best of measured rates.
fn best(samples: usize, sample: impl Fn() -> f64) -> f64 {
    (0..samples).map(|_| sample()).fold(0.0, f64::max)
}

/// Operations of a measured call, as a null device counts them.
fn counted(work: impl FnOnce()) -> BTreeMap<Task, Work> {
    let device = Null { threads: 1, memory_bytes: u64::MAX, gpu: None };
    arena::on_null(device, work).2.work
}

/// The median of `REPEATS` calls after one that warms up, in seconds.
fn seconds(mut work: impl FnMut()) -> f64 {
    work();
    median((0..REPEATS).map(|_| {
        let start = Instant::now();
        work();
        start.elapsed().as_secs_f64()
    }))
}

/// The sharing of a node's cores, which the started ranks measure for the planned ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sharing {
    pub ranks_per_node: usize,
    /// Threads of one planned rank.
    pub threads: usize,
    /// Threads per core of a node: 1 unless ranks oversubscribe the cores.
    pub crowd: f64,
}

impl Sharing {
    /// The `started` ranks of this host have `threads` threads each. `ranks_per_node` ranks are planned, with `fixed`
    /// threads each if that is above 0.
    pub fn of(started: usize, threads: usize, ranks_per_node: usize, fixed: usize) -> Self {
        let cores = started * threads;
        let each = if fixed > 0 { fixed } else { (cores / ranks_per_node.max(1)).max(1) };
        let crowd = (each * ranks_per_node) as f64 / cores as f64;
        Self { ranks_per_node: ranks_per_node.max(1), threads: each, crowd: crowd.max(1.0) }
    }
}

/// Measures this machine, `declared`, as one of the planned ranks that share its node. All ranks of `world` call this,
/// each with a pool of the threads that it was started with. Afterwards the pool has the threads of a planned rank.
pub fn probe(job: &Job, world: &World, sharing: Sharing, declared: Device) -> Device {
    let dtype = job.config.model.dtype();
    let group = world.group();
    let mut data = Buffer::scratch(READ_BYTES / size_of::<f32>());
    data.fill(1.0);
    let read = || {
        group.barrier();
        1e9 * best(READ_SAMPLES, || peak::read_gbs(&data))
    };
    // All started ranks read at once, which measures the node's memory.
    let node = read() * world.local_size as f64;
    pool::set_threads(sharing.threads);
    let memory = read();
    drop(data);
    group.barrier();
    let fma = 1e9 * best(PEAK_SAMPLES, || peak::fma_gflops(PEAK_ROUNDS));
    let dot = || peak::bf16_gflops(PEAK_ROUNDS).map_or(fma, |rate| 1e9 * rate);
    let products = if dtype == DType::Bf16 { best(PEAK_SAMPLES, dot) } else { fma };
    let (link, latency_s) = links(world, memory);
    let device = Device {
        flops: products,
        attention_flops: fma,
        memory,
        link,
        network: link,
        host: files(job, &world.group()).unwrap_or(memory / 4.0),
        latency: Latency { call_s: 0.0, step_s: latency_s, network_s: latency_s },
        ..declared
    };
    group.barrier();
    let mut device = Bench::new(job, &device).measure();
    // One rank alone was measured; the planned ranks share the cores and the memory.
    device.flops /= sharing.crowd;
    device.attention_flops /= sharing.crowd;
    device.memory = (device.memory / sharing.crowd).min(node / sharing.ranks_per_node as f64);
    device
}

/// Bytes/s that `mesh.offload` moves between memory and memory-mapped files, in and out; none if the job moves nothing,
/// or if its directory is not writable. The cost depends on pages more than on bytes.
fn files(job: &Job, group: &Group) -> Option<f64> {
    if job.config.mesh.offload.is_empty() {
        return None;
    }
    let dir = job.config.job.dir.ancestors().find(|dir| dir.is_dir()).unwrap_or(Path::new("."));
    let mut moved = Buffer::zeros(MOVED_BYTES / size_of::<f32>());
    moved.move_to_file(dir).ok()?;
    group.barrier();
    let spent = seconds(|| {
        moved.prefetch_mut();
        moved.fill(1.0);
        moved.evict();
    });
    Some(2.0 * MOVED_BYTES as f64 / spent / Efficiency::declared_cpu().links)
}

/// The bytes/s that a rank moves in a collective, and the seconds of a small one.
fn links(world: &World, memory: f64) -> (f64, f64) {
    let group = world.group();
    let ranks = world.size as f64;
    if world.size == 1 {
        // Between ranks of a host each byte is written and read once more, by both sides.
        return (memory / 6.0, 2e-5);
    }
    let mut small = vec![1.0f32; 16];
    let latency = seconds(|| group.all_reduce_sum_ordered(&mut small)) / (2.0 * (ranks - 1.0));
    let mut large = Buffer::zeros(EXCHANGED);
    let spent = seconds(|| group.all_reduce_sum_ordered(&mut large));
    let moved = 2.0 * (ranks - 1.0) / ranks * (EXCHANGED * size_of::<f32>()) as f64;
    (moved / spent / Efficiency::declared_cpu().links, latency)
}

/// A measured call: its seconds, and its operations of one kind.
#[derive(Clone, Copy)]
struct Timed {
    seconds: f64,
    flops: f64,
    bytes: f64,
    is_attention: bool,
}

impl Timed {
    /// Raises the peaks of `device` that the call exceeded, so that no efficiency is above 1.
    fn raise(self, device: &mut Device) {
        let peak = if self.is_attention { &mut device.attention_flops } else { &mut device.flops };
        *peak = peak.max(self.flops / self.seconds);
        device.memory = device.memory.max(self.bytes / self.seconds);
    }

    /// The seconds at the peaks of `device`.
    fn floor(self, device: &Device) -> f64 {
        let peak = if self.is_attention { device.attention_flops } else { device.flops };
        (self.flops / peak).max(self.bytes / device.memory)
    }

    /// The share of a peak, without the seconds of other operations in the call.
    fn share(self, device: &Device, others_s: f64) -> f64 {
        share(self.floor(device), self.seconds - others_s)
    }
}

/// A call of `work`, whose operations `op` count.
fn timed(op: &str, mut work: impl FnMut()) -> Timed {
    let seconds = seconds(&mut work);
    let of_op: Vec<Work> = counted(work).into_iter().filter(|(task, _)| task.op == op).map(|(_, work)| work).collect();
    let sum = |amount: fn(&Work) -> f64| of_op.iter().map(amount).sum();
    let is_attention = [null::ATTENTION, null::ATTENTION_BACKWARD].contains(&op);
    Timed { seconds, flops: sum(|work| work.flops), bytes: sum(|work| work.bytes), is_attention }
}

fn share(floor: f64, seconds: f64) -> f64 {
    (floor / seconds.max(1e-9)).clamp(0.01, 1.0)
}

/// The measurements of `works`: a forward, then its backward.
fn both(works: impl FnOnce(&mut Measure)) -> [Timed; 2] {
    let mut found = Vec::with_capacity(2);
    works(&mut |op, work| found.push(timed(op, work)));
    [found[0], found[1]]
}

fn optimizer() -> Timed {
    let [mut p, mut g, mut m, mut v] = [(); 4].map(|()| Buffer::zeros(UPDATED));
    timed(null::OPTIMIZER, || {
        g.fill(1e-3);
        drop(norm::sums_of_squares(&g, 4096));
        adamw::step(&mut p, &g, &mut m, &mut v, &synthetic::UPDATE, 0.0);
    })
}

/// A few layers of the actor, and the shapes at which they are measured.
struct Bench<'a> {
    job: &'a Job<'a>,
    device: &'a Device,
    arch: Arch,
    /// The job's own model, with all layers and the whole vocabulary.
    whole: &'a Arch,
    dtype: DType,
    /// Length and number of the sequences of a packed row.
    length: usize,
    rows: usize,
}

impl<'a> Bench<'a> {
    fn new(job: &'a Job, device: &'a Device) -> Self {
        let (actor, dtype) = (job.archs.actor(), job.config.model.dtype());
        let layer = cost::layer_elements(actor, &actor.blocks[0], usize::MAX);
        let layers = STREAMED_BYTES.div_ceil(layer * dtype.bytes()).clamp(1, LAYERS_MAX).min(actor.blocks.len());
        let blocks = actor.blocks[..layers].to_vec();
        let arch = Arch { blocks, vocabulary: actor.vocabulary.min(512), ..actor.clone() };
        let per_token = 8.0 * cost::elements(&arch) as f64;
        let tokens = ((FLOPS / per_token) as usize).max(TOKENS_MIN);
        let (prompt, response) = job.rows.mean();
        let length = ((prompt + response).round() as usize).clamp(1, tokens);
        let wanted = job.fullest(&Mesh::data_only(1)).rows.max(1);
        let rows = (tokens / length).clamp(1, wanted);
        Self { job, device, arch, whole: actor, dtype, length, rows }
    }

    /// The device, with the efficiencies of this job.
    fn measure(&self) -> Device {
        let weights = init::init(&self.arch, Head::Value, self.dtype, 0);
        let model = Transformer::new(&self.arch, &weights.table);
        let layers = self.arch.blocks.len() as f64;
        let is_kept = matches!(self.job.config.gradient.recompute, Recompute::Auto | Recompute::None);
        let forwards = if is_kept { 1.0 } else { 2.0 };
        let (layer, packed) = (self.arch.attention(), [self.rows, self.length]);
        let [attention, backward] = both(|measure| packed_attention(layer, packed, measure));
        let score = self.pass(&model, &weights, None);
        let train = self.pass(&model, &weights, Some(Gradients::new(weights.table.clone())));
        let [body, attention_decode, head_decode] = self.decode(&model, &weights);
        let (sample, optimizer) = (self.sample(), optimizer());
        drop(weights);
        let [head, head_train] = self.head();
        let mut device = self.device.clone();
        let all = [
            attention,
            backward,
            score,
            train,
            body,
            attention_decode,
            head_decode,
            sample,
            optimizer,
            head,
            head_train,
        ];
        for one in all {
            one.raise(&mut device);
        }
        let attention_s = attention.seconds * layers;
        // A few layers, and a part of the head, were measured.
        let body_s = (body.seconds - attention_decode.seconds * layers).max(1e-9);
        let (more, wider) =
            (self.whole.blocks.len() as f64 / layers, self.whole.vocabulary as f64 / self.head_rows() as f64);
        let decode = share(
            body.floor(&device) * more + head_decode.floor(&device) * wider,
            body_s * more + head_decode.seconds * wider,
        );
        let of = |one: Timed| one.share(&device, 0.0);
        device.efficiency = Efficiency {
            train: train.share(&device, forwards * attention_s + backward.seconds * layers),
            score: score.share(&device, attention_s),
            decode,
            decode_wide: decode,
            attention: of(attention),
            attention_backward: of(backward),
            attention_decode: of(attention_decode),
            head: of(head),
            head_train: of(head_train),
            sample: of(sample),
            optimizer: of(optimizer),
            links: Efficiency::declared_cpu().links,
        };
        device
    }

    /// The rows of the head that decoding is measured with.
    fn head_rows(&self) -> usize {
        self.whole.vocabulary.min(STREAMED_BYTES / self.whole.width / self.dtype.bytes())
    }

    fn ends(&self) -> Vec<usize> {
        (0..=self.rows).map(|i| i * self.length).collect()
    }

    fn tokens(&self, n: usize) -> Vec<u32> {
        (0..n).map(|i| (i * 7919 % self.arch.vocabulary) as u32).collect()
    }

    /// A forward over the packed row, and its backward if there are gradients.
    fn pass(&self, model: &Transformer, weights: &Weights, mut grads: Option<Gradients>) -> Timed {
        let ends = self.ends();
        let (tokens, positions) = (self.tokens(self.rows * self.length), packed_positions(&ends));
        timed(null::GEMM, || {
            let mut saved = grads.is_some().then(|| Saved::new(self.job.config.gradient.recompute));
            let keys = Keys::Packed(ends.as_slice().into());
            let hidden = model.forward(weights, &tokens, &positions, keys, saved.as_mut());
            if let (Some(grads), Some(saved)) = (&mut grads, saved) {
                model.backward(weights, saved, &ends, hidden, grads);
            }
        })
    }

    /// A forward of one token per sequence through the layers, the attention in one of them, and the head.
    fn decode(&self, model: &Transformer, weights: &Weights) -> [Timed; 3] {
        let rollout = &self.job.config.rollout;
        let samples = rollout.prompts_per_step * rollout.samples_per_prompt;
        let batch = samples.div_ceil(self.device.ranks_per_node).min(rollout.batch_max).clamp(1, 64);
        let (prompt, response) = self.job.rows.mean();
        let past = ((prompt + response / 2.0) as usize).min(self.arch.context - 1).min(1024);
        let pages = (past + 1).div_ceil(PAGE);
        let tables: Vec<Vec<u32>> = (0..batch).map(|s| (0..pages).map(|p| (s * pages + p) as u32).collect()).collect();
        let sequences: Vec<PagedSequence> =
            tables.iter().map(|blocks| PagedSequence { past, tokens: 1, blocks }).collect();
        let slots: Vec<[u32; 1]> = (0..batch as u32).map(|s| [s]).collect();
        let states: Vec<PagedSequence> = slots.iter().map(|blocks| PagedSequence { past, tokens: 1, blocks }).collect();
        let each = |group: &CacheGroup| if group.kept == Kept::State { batch } else { batch * pages };
        let of = |group: &CacheGroup| if group.kept == Kept::State { &states[..] } else { &sequences[..] };
        let mut cache = model.kv_cache(weights.dtype(), &model.cache_groups().iter().map(each).collect::<Vec<_>>());
        let (tokens, positions) = (self.tokens(batch), vec![past as u32; batch]);
        let body = timed(null::GEMM, || {
            let paged: Vec<Paged> = model.cache_groups().iter().map(|group| of(group).into()).collect();
            let keys = Keys::Paged(&mut cache, &paged);
            drop(model.forward(weights, &tokens, &positions, keys, None));
        });
        let layer = self.arch.attention();
        let (shape, width) = (layer.shape(TensorPart::whole()), layer.q_width());
        let (q, mut o) = (filled(batch, width), Tensor::zeros(batch, width));
        let paged = sequences.as_slice().into();
        let mut attend = |layer| attention::forward_paged(&q, layer, &paged, &shape, &mut o, None);
        let keys: Vec<&attention::KvLayer> = cache.iter().filter_map(LayerCache::keys).collect();
        let seconds = median(keys.iter().map(|layer| seconds(|| attend(layer))));
        let attention = Timed { seconds, ..timed(null::ATTENTION, || attend(keys[0])) };
        let matrix = Matrix::new(self.head_rows(), self.whole.width, self.dtype);
        let (x, mut y) = (filled(batch, matrix.k), Tensor::zeros(batch, matrix.n));
        let head = timed(null::GEMM, || matmul::forward(&x, matrix.weight(), None, &mut y, Into::Overwrite));
        [body, attention, head]
    }

    /// Log-probabilities, without and with gradients.
    fn head(&self) -> [Timed; 2] {
        let (d, v) = (self.whole.width, self.whole.vocabulary.min(STREAMED_BYTES / 4 / self.whole.width).max(1));
        let rows = ((FLOPS / (6.0 * (d * v) as f64)) as usize).clamp(64, 2048);
        both(|measure| synthetic::head(rows, &Matrix::new(v, d, self.dtype), measure))
    }

    fn sample(&self) -> Timed {
        let (rows, v) = (16, self.whole.vocabulary);
        let logits = filled(rows, v);
        let params = rollout::sample_params(&self.job.config.rollout);
        let row = SampleRow { params, uniform: 0.5, seen: &[], banned: &[], bias: &[] };
        let rows: Vec<SampleRow> = vec![row; rows];
        let mut drawn = vec![Sampled::default(); rows.len()];
        timed(null::SAMPLING, || sample::forward(&logits, &rows, &mut drawn))
    }
}
