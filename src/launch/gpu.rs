//! `job.device`: the device of a run's models.

pub use super::gpu_settings::check;
use super::gpu_settings::check_settings;
use super::ranks::Ranks;
use super::self_test::SelfTest;
use super::step_shape::StepShape;
use crate::comm::backends::{self, Axis};
use crate::comm::group::list_ranks;
use crate::comm::self_test;
use crate::comm::{Group, World, gpus, phase, records};
use crate::config::Config;
use crate::config::job::{Collectives, DeviceName};
use crate::config::mesh::RoleName;
use crate::device::Device;
use crate::device::cpu::pool;
use crate::device::cuda::attention::HEAD_DIMS;
use crate::device::cuda::conv::TAPS_MAX;
use crate::device::cuda::delta::{HEADS_MAX, KEY_DIMS, VALUE_DIM_MAX};
use crate::device::cuda::devices::{self, Found, NoGpu};
use crate::device::cuda::experts::{CHOSEN_MAX, EXPERTS_MAX};
use crate::device::cuda::kernels::must_compile;
use crate::device::cuda::linear_logprob::VOCABULARY_MAX;
use crate::device::cuda::rmsnorm::WIDTH_MAX;
use crate::device::cuda::sample::PARTS_MAX;
use crate::device::cuda::{self, Gpu, Stream, kv_cache};
use crate::device::null;
use crate::error::{Error, Result, format_bytes};
use crate::model::{Arch, AttentionSpec, Cut, ExpertsSpec, Feed, Head, ParamTable, Scoring, Sinks, TensorPart};
use crate::sys::affinity;
use std::time::Instant;

/// The devices of the ranks of a run.
pub struct Opened {
    /// The GPUs; none on CPUs.
    pub gpu: Option<GpuOfRanks>,
    /// The reason why `auto` chose CPUs.
    pub no_gpu: Option<String>,
    /// The self-test that compared its kernels; none if it was turned off.
    pub checked: Option<SelfTest>,
}

impl Opened {
    /// The result of the self-test.
    pub fn describe_kernels(&self) -> String {
        let found = self.checked.as_ref().map(|test| test.description.clone());
        found.unwrap_or_else(|| "kernels not checked (job.check = false)".into())
    }
}

/// The GPU that each rank has.
pub struct GpuOfRanks {
    pub name: String,
    /// The smallest number of bytes for tensors of any rank.
    pub memory_bytes: u64,
    pub ranks_per_node: usize,
}

/// The models that the self-test represents.
pub type Models<'a> = dyn Fn(&Config) -> Result<Vec<(RoleName, Head, Arch)>> + 'a;

/// Opens this rank's GPU if the job asks for one, runs the self-test with small models like `models`, and sets the
/// device in the configuration. `auto` chooses CPUs only if no rank sees a GPU. A GPU that cannot be used is an error,
/// so that a cluster does not compute on its CPUs unnoticed. All ranks call this.
pub fn open(config: &mut Config, world: &World, models: &Models) -> Result<Opened> {
    let asked = config.job.device;
    let found = if asked == DeviceName::Cpu { None } else { Some(devices::devices()) };
    let no_gpu = match &found {
        Some(found) if asked == DeviceName::Auto => why_nobody_sees_one(world, found)?,
        _ => None,
    };
    let found = found.filter(|_| no_gpu.is_none());
    config.resolve_device(if found.is_some() { DeviceName::Gpu } else { DeviceName::Cpu });
    let Some(found) = found else {
        if config.job.collectives == Collectives::Nccl {
            return Err(Error::usage("job.collectives = \"nccl\" needs GPUs, but the job runs on CPUs")
                .hint("set job.device = \"gpu\", or job.collectives = \"auto\""));
        }
        return Ok(Opened { gpu: None, no_gpu, checked: None });
    };
    if asked == DeviceName::Auto {
        // The job did not name this device, so the error does not name the key.
        let unasked = |e: Error| Error { message: e.message.replace(" with job.device = \"gpu\"", " on a GPU"), ..e };
        world.group().agree(suits(config).map_err(unasked))?;
    }
    let started = start(config, world, found).map_err(|error| error.also("set job.device = \"cpu\""));
    started.map_err(|error| if asked == DeviceName::Gpu { error.within("job.device = \"gpu\"") } else { error })?;
    let checked = checked(config, world, models)?;
    Ok(Opened { gpu: Some(of_ranks(world)), no_gpu, checked })
}

/// Changes a job for GPUs into one for CPUs, for a dry run on a machine without a GPU. It first checks settings and
/// models, as far as that needs no GPU. Returns the reason why no rank sees a GPU, or `None` if any rank sees one or
/// the job does not ask for one. All ranks call this.
pub fn do_without(config: &mut Config, world: &World) -> Result<Option<String>> {
    if config.job.device != DeviceName::Gpu {
        return Ok(None);
    }
    let why = why_nobody_sees_one(world, &devices::devices())?;
    if why.is_some() {
        world.group().agree(suits(config))?;
        (config.job.device, config.job.collectives) = (DeviceName::Cpu, Collectives::Auto);
    }
    Ok(why)
}

/// The reason why no rank sees a GPU; none if any rank does. All ranks call this.
fn why_nobody_sees_one(world: &World, found: &Found) -> Result<Option<String>> {
    let mine = match found {
        Err(NoGpu::Unseen(why)) => Some(why.clone()),
        Ok(_) | Err(NoGpu::Broken(_)) => None,
    };
    let all = records::gather(&world.group(), &[mine])?;
    let why = all.first().cloned().flatten();
    Ok(why.filter(|_| all.iter().all(Option::is_some)))
}

/// The ranks' GPUs, as the plan needs them. All ranks call this.
fn of_ranks(world: &World) -> GpuOfRanks {
    // CUDA has allocated its memory already, NCCL has not.
    let mine = share(world, program_bytes(world.size) - CUDA_BYTES);
    let least = -world.group().max(-(mine as f64));
    // All ranks plan for the first rank's kind of GPU and node, so that they choose the same layout.
    let of_first = || (cuda::gpu().properties().name.clone(), world.local_size);
    let (name, ranks_per_node) = records::of_first(&world.group(), of_first);
    GpuOfRanks { name, memory_bytes: least as u64, ranks_per_node }
}

/// Bytes of its GPU that this rank may use for tensors, if `others` bytes are left for everything else. Ranks that
/// share a GPU share its free memory. All ranks call this.
fn share(world: &World, others: usize) -> u64 {
    let gpu = cuda::gpu();
    // After this gather, every rank has made all earlier allocations that are not tensors.
    let mine = format!("{} {}", world.hosts[world.rank], gpu.properties().uuid);
    let all = world.group().all_gather_bytes(mine.as_bytes());
    let sharers = all.iter().filter(|other| **other == all[world.rank]).count();
    let each = gpu.usage().held + gpu.free_bytes() / sharers.max(1);
    // No rank allocates more before all have read the free memory.
    world.group().barrier();
    (each - others.min(each / OTHERS_SHARE)) as u64
}

/// Runs the self-test if the job wants it and GPUs support its models; other models are rejected elsewhere. All ranks
/// call this.
fn checked(config: &Config, world: &World, models: &Models) -> Result<Option<SelfTest>> {
    let tested = |models: Vec<_>| {
        let test = SelfTest::exact(&models, config.rollout.graphs).map(Some);
        test.map_err(|error| error.within(cuda::gpu().name()))
    };
    let test = || models(config).and_then(tested);
    let compared = if config.job.check && suits(config).is_ok() { test() } else { Ok(None) };
    let hint = "check the driver's log; set job.device = \"cpu\" to run without the GPU, or job.check = false to skip the test";
    world.group().agree(compared.map_err(|error| error.also(hint)))
}

/// Starts this rank's GPU, one of the GPUs in `found`, on the cores near it. All ranks call this.
fn start(config: &Config, world: &World, found: Found) -> Result<()> {
    if cuda::gpu::is_started() {
        return Ok(());
    }
    let (driver, seen) = world.group().agree(found.map_err(|why| Error::usage(why.to_string())))?;
    let index = gpus::mine(world, &seen).ok_or_else(|| Error::usage("this rank sees no GPU"));
    let index = world.group().agree(index)?;
    // Before it allocates, because the system takes memory from the node whose core touches it first.
    if let Some(cores) = gpus::near_cores(world, &seen[index])
        && config.job.threads <= cores.len()
        && affinity::bind(&cores)
    {
        pool::set_threads(pool::pool().threads().min(cores.len()));
    }
    let open = || Gpu::open(index).map_err(|error| error.within(seen[index].address())).map(Some);
    // If kernels must be compiled, the first rank of each host compiles them. The others find them in the cache of our
    // NVRTC or of the driver.
    let compiles = world.group().any(must_compile(seen[index].capability, driver));
    let is_first = !world.hosts[..world.rank].contains(&world.hosts[world.rank]);
    let first = world.group().agree(if !compiles || is_first { open() } else { Ok(None) })?;
    let opened = world.group().agree(first.map_or_else(open, |gpu| Ok(Some(gpu))))?;
    cuda::gpu::start(opened.expect("this rank has opened one"));
    Ok(())
}

/// Whether GPUs can run the job and its models.
fn suits(config: &Config) -> Result<()> {
    check_settings(config)?;
    let model = &config.model;
    let mut dirs =
        [&model.actor, &model.reference, &model.critic].into_iter().filter(|dir| !dir.as_os_str().is_empty());
    dirs.try_for_each(|dir| check_arch(Device::Cuda, &Arch::load(dir)?, 1))
}

/// The axes whose collectives of GPU values have a backend. A rollout that shards matrices as training does uses
/// training's groups, so it has none of its own: `alone` is a group of one.
pub fn axes<'a>(ranks: &'a Ranks, alone: &'a Group) -> [Axis<'a>; 6] {
    let Ranks { axes, rollout_axes, .. } = ranks;
    let apart = if rollout_axes.tensor.size() == axes.tensor.size() { alone } else { &rollout_axes.tensor };
    let zero = if axes.sequence.size() > 1 { "data x sequence" } else { "data" };
    [
        Axis { name: "tensor", group: &axes.tensor, stream: Stream::Tensor },
        Axis { name: "sequence", group: &axes.sequence, stream: Stream::Ring },
        Axis { name: zero, group: &axes.zero, stream: Stream::Zero },
        Axis { name: "expert", group: &axes.expert, stream: Stream::Tensor },
        Axis { name: "expert replicas", group: &axes.replicas, stream: Stream::Zero },
        Axis { name: "rollout tensor", group: apart, stream: Stream::Tensor },
    ]
}

/// Initializes NCCL on each axis for which that is possible. Returns a row of the banner for each axis of several
/// ranks. All ranks call this after `start`.
pub fn join(config: &Config, ranks: &Ranks) -> Result<Vec<String>> {
    let world = &ranks.world;
    ranks.check_code(cuda::gpu().code())?;
    let gpu = format!("{} {}", world.hosts[world.rank], cuda::gpu().properties().pci);
    backends::choose(&ranks.all, &axes(ranks, &Group::one()), &gpu, config.job.collectives)
}

/// Calls each collective of steps of `shape` once at the largest size, and runs their self-test, if the job wants it.
/// Returns a row of the banner for the self-test. All ranks call this after `join`.
pub fn try_collectives(config: &Config, ranks: &Ranks, shape: &StepShape) -> Result<Option<String>> {
    let alone = Group::one();
    let all = axes(ranks, &alone);
    let (order, has_rollout) = (config.gradient.order, shape.has_rollout());
    let [unit, activations] = largest_calls(config, ranks, shape)?;
    let values = |axis: &Axis| if axis.stream == Stream::Zero { unit } else { activations };
    self_test::warm(&all, &ranks.axes, order, has_rollout, values);
    if !config.job.check {
        return Ok(None);
    }
    let start = Instant::now();
    let check = || self_test::check(&ranks.all, &all, &ranks.axes, order, has_rollout);
    let names = phase::before_steps("the self-test of the collectives", check)?;
    let seconds = start.elapsed().as_secs_f64();
    let message = format!("collectives checked over {} in {seconds:.2} s", names.join(", "));
    Ok((!names.is_empty()).then_some(message))
}

/// The most values in one collective: of ZeRO (a unit of weights), and of the other axes (the activations of a
/// micro-batch). Both are limited to a share of the memory that is free on every GPU. The result is the same on all
/// ranks. All ranks call this.
fn largest_calls(config: &Config, ranks: &Ranks, shape: &StepShape) -> Result<[usize; 2]> {
    let (mut unit, mut width) = (0, 0);
    let trained = [&config.model.actor, &config.model.critic];
    for dir in trained.into_iter().filter(|dir| !dir.as_os_str().is_empty()) {
        let arch = Arch::load(dir)?;
        let table = ParamTable::on(Device::Cuda, &arch, Head::LanguageModel, TensorPart::whole());
        let tensor = ranks.layouts_of_actor()[0].mesh.tensor;
        unit = table.units().iter().map(|unit| unit.len().div_ceil(tensor)).fold(unit, usize::max);
        width = width.max(arch.width);
    }
    let free = -ranks.all.max(-(cuda::gpu().free_bytes() as f64));
    // Of four bytes each, in up to four copies, of up to a quarter of the memory.
    let most = free as usize / 64;
    Ok([unit, shape.microbatch_tokens_max * width].map(|values| values.clamp(1, most)))
}

/// Memory of a rank's GPU other than tensors, as the plan declares it: CUDA's context and kernels, cuBLASLt and graphs.
/// With several ranks also NCCL: each communicator takes 0.3 to 1.6 GB, and an all-to-all of 8 GPUs as much again.
pub fn program_bytes(ranks: usize) -> usize {
    if ranks > 1 { 4 << 30 } else { 1536 << 20 }
}

/// The part of it for CUDA's context and the kernels, allocated before any rank reads the free memory.
const CUDA_BYTES: usize = 512 << 20;

/// The divisor of the largest share of free memory that is left for anything but tensors: one 16th.
const OTHERS_SHARE: usize = 16;

/// Limits this rank to its share of the memory that is now free on its GPU, or to `mesh.arena_bytes_max`. All ranks
/// call this after `join`, because NCCL allocates when it joins ranks and in the first exchange, which is in the
/// self-test.
pub fn limit(config: &Config, world: &World) {
    // cuBLASLt and graphs allocate later.
    let later = program_bytes(if config.job.check { 1 } else { world.size }) - CUDA_BYTES;
    let (share, given) = (share(world, later), config.mesh.arena_bytes_max);
    cuda::gpu().set_limit(if given > 0 { given.min(share) } else { share });
}

/// Bytes that the KV cache may take if forwards take `bytes` at most.
pub fn cache_bytes(bytes: u64) -> u64 {
    let left = memory_free();
    left.saturating_sub(bytes + (bytes / 4).max(left / 32))
}

pub fn memory_free() -> u64 {
    null::memory_free().unwrap_or_else(|| cuda::gpu().usage().left() as u64)
}

/// Rejects a model with shapes that no GPU kernel supports, sharded over `tensor` ranks.
pub fn check_arch(device: Device, arch: &Arch, tensor: usize) -> Result<()> {
    if device == Device::Cpu {
        return Ok(());
    }
    let mlps = arch.feeds().map(|mlp| ("intermediate_size", mlp.width()));
    let shared = arch.feeds().map(|mlp| ("the width of the expert for all tokens", mlp.shared_width()));
    let mut widths = [("hidden_size", arch.width)].into_iter().chain(mlps).chain(shared);
    let mut adapters = arch.tuning.iter().flat_map(|tuning| tuning.adapters.iter().map(|(name, of)| (name, of.rank)));
    let limits = [("hidden_size", arch.width, WIDTH_MAX), ("vocab_size", arch.vocabulary, VOCABULARY_MAX)];
    let group_max = |layer: &AttentionSpec| kv_cache::group_max(layer.head_dim);
    let on_gpu = "with job.device = \"gpu\"";
    let what = if let Some(what) = without_kernel(arch) {
        format!("{what} has no GPU kernel")
    } else if let Some(layer) = arch.attentions().find(|layer| !HEAD_DIMS.contains(&layer.head_dim)) {
        let (dim, known) = (layer.head_dim, HEAD_DIMS.map(|dim| dim.to_string()).join(", "));
        format!("the head dim must be one of {known} {on_gpu} (got {dim})")
    } else if let Some((name, width)) = widths.find(|(_, width)| !width.is_multiple_of(8)) {
        format!("{name} must be a multiple of 8 {on_gpu} (got {width})")
    } else if let Some(spec) = arch.feeds().find_map(Feed::experts).filter(|spec| !experts_fit(spec)) {
        let (count, top_k) = (spec.count, spec.top_k);
        format!(
            "the number of experts must be a multiple of 8 up to {EXPERTS_MAX}, at most {CHOSEN_MAX} per token, {on_gpu} (got {count}, {top_k} per token)"
        )
    } else if let Some(matrix) = arch.adapter_of_mixture() {
        format!("adapters of experts, routers and gates have no GPU kernel (lora.exclude may leave out {matrix})")
    } else if let Some((matrix, rank)) = adapters.find(|(_, rank)| !rank.is_multiple_of(8)) {
        format!("lora.rank must be a multiple of 8 {on_gpu} (got {rank} for {matrix})")
    } else if let Some((name, value, most)) = limits.into_iter().find(|(_, value, most)| value > most) {
        format!("{name} must be at most {most} {on_gpu} (got {value})")
    } else if let Some(layer) = arch.attentions().find(|layer| layer.heads / layer.kv_heads > group_max(layer)) {
        let (heads, kv_heads, group_max) = (layer.heads, layer.kv_heads, group_max(layer));
        format!("heads per key/value head must be at most {group_max} {on_gpu} (got {heads} heads on {kv_heads})")
    } else {
        return check_cut(device, arch, tensor);
    };
    Err(Error::usage(what).hint("set job.device = \"cpu\""))
}

fn experts_fit(spec: &ExpertsSpec) -> bool {
    spec.count.is_multiple_of(8) && spec.count <= EXPERTS_MAX && spec.top_k <= CHOSEN_MAX
}

/// What of an architecture no GPU kernel computes, by its key in config.json.
fn without_kernel(arch: &Arch) -> Option<&'static str> {
    if arch.attention().latent.is_some() {
        return Some("kv_lora_rank");
    }
    if arch.attention().sinks != Sinks::None {
        return Some("model_type = \"gpt_oss\" (sinks of attention, biases of experts)");
    }
    let mixtures = || arch.feeds().filter_map(Feed::experts);
    if mixtures().any(|experts| experts.scoring != Scoring::Softmax) {
        return Some("e_score_correction_bias");
    }
    None
}

/// What of the gated delta rule, sharded over `tensor` ranks, no GPU kernel computes.
fn delta_without_kernel(arch: &Arch, tensor: usize) -> Option<String> {
    let on_gpu = "with job.device = \"gpu\"";
    arch.deltas().find_map(|delta| {
        let (key, value, taps, heads) = (delta.key_dim, delta.value_dim, delta.taps, delta.value_heads / tensor);
        if !KEY_DIMS.contains(&key) {
            let known = KEY_DIMS.map(|dim| dim.to_string()).join(", ");
            Some(format!("linear_key_head_dim must be one of {known} {on_gpu} (got {key})"))
        } else if !value.is_multiple_of(8) || value > VALUE_DIM_MAX {
            Some(format!("linear_value_head_dim must be a multiple of 8 up to {VALUE_DIM_MAX} {on_gpu} (got {value})"))
        } else if taps > TAPS_MAX {
            Some(format!("linear_conv_kernel_dim must be at most {TAPS_MAX} {on_gpu} (got {taps})"))
        } else if !heads.is_multiple_of(8) || heads > HEADS_MAX {
            let what = format!("shards of linear_num_value_heads must be multiples of 8 up to {HEADS_MAX} {on_gpu}");
            Some(format!("{what} (got {heads} with tensor = {tensor})"))
        } else {
            None
        }
    })
}

/// Rejects a number of tensor ranks that shards matrices in a way that no GPU kernel supports.
pub fn check_cut(device: Device, arch: &Arch, tensor: usize) -> Result<()> {
    if device == Device::Cpu {
        return Ok(());
    }
    if tensor > PARTS_MAX {
        let message = format!(
            "tensor must be at most {PARTS_MAX} with job.device = \"gpu\", the most vocabulary shards of a kernel (got {tensor})"
        );
        return Err(Error::usage(message).hint(format!("set tensor to {PARTS_MAX} or less")));
    }
    if let Some(what) = delta_without_kernel(arch, tensor) {
        return Err(Error::usage(what).hint("set job.device = \"cpu\""));
    }
    // (the width of an MLP, a rank's share of it)
    let widths = || arch.feeds().flat_map(|mlp| [mlp.width(), mlp.shared_width()]);
    let shares = |size: usize| {
        let of_rank = move |rank| widths().map(move |width| (width, Cut::Even(width).len(TensorPart { rank, size })));
        (0..size).flat_map(of_rank)
    };
    let works = |size: usize| shares(size).all(|(_, share)| share.is_multiple_of(8));
    let Some((width, share)) = shares(tensor).find(|(_, share)| !share.is_multiple_of(8)) else { return Ok(()) };
    let sizes = arch.tensor_sizes().into_iter().filter(|size| works(*size));
    let sizes: Vec<String> = sizes.map(|size| size.to_string()).collect();
    let any_of = if sizes.len() == 1 { "" } else { "one of " };
    Err(Error::usage(format!(
        "shards of intermediate_size = {width} must be multiples of 8 with job.device = \"gpu\" (got {share} with tensor = {tensor})"
    ))
    .hint(format!("set tensor to {any_of}{}", sizes.join(", "))))
}

/// Rows of the banner: the GPU of each rank, and its kernels. All ranks call this.
pub fn describe(all: &Group) -> Vec<String> {
    let gpu = cuda::gpu();
    let p = gpu.properties();
    let (total, limit) = (format_bytes(p.memory_bytes as u64), format_bytes(gpu.usage().limit as u64));
    let (nodes, cores) = (affinity::nodes(), affinity::mask().len());
    let near = match p.numa {
        Some(node) if nodes == [node] => format!(", on {cores} cores of its NUMA node {node}"),
        Some(node) => format!(", NUMA node {node}, on {cores} cores of nodes {nodes:?}"),
        None => String::new(),
    };
    let mine = format!("{}, {total} at {}, {limit} per rank{near}", p.name, p.pci);
    let of_ranks = all.all_gather_bytes(mine.as_bytes());
    let row = |(description, ranks): (&Vec<u8>, Vec<usize>)| {
        format!("{}: {}", list_ranks(&ranks), String::from_utf8_lossy(description))
    };
    let kernels = format!("kernels from {}", gpu.origin());
    alike(&of_ranks).into_iter().map(row).chain([kernels]).collect()
}

/// The distinct values of the ranks, each with the ranks that have it.
pub fn alike<T: PartialEq>(of_ranks: &[T]) -> Vec<(&T, Vec<usize>)> {
    let mut all: Vec<(&T, Vec<usize>)> = Vec::new();
    for (rank, of_rank) in of_ranks.iter().enumerate() {
        match all.iter_mut().find(|(known, _)| *known == of_rank) {
            Some((_, ranks)) => ranks.push(rank),
            None => all.push((of_rank, vec![rank])),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_whose_gpus_have_the_same_description_share_a_row() {
        let ranks = |gpus: &[u8]| alike(gpus).iter().map(|(_, ranks)| list_ranks(ranks)).collect::<Vec<_>>();
        assert_eq!(ranks(&[7, 7, 7]), ["ranks 0 to 2"]);
        assert_eq!(ranks(&[1, 2, 1, 2]), ["ranks 0, 2", "ranks 1, 3"]);
        assert_eq!(ranks(&[7]), ["rank 0"]);
    }

    /// The largest model, but for some keys.
    fn largest(but: &[(&str, usize)]) -> Arch {
        let mut config = serde_json::json!({
            "model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 1,
            "num_attention_heads": 128, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 1 << 20
        });
        for &(key, value) in but {
            config[key] = value.into();
        }
        Arch::from_config(config.as_object().expect("an object")).expect("a known family")
    }

    #[test]
    fn shard_sizes_without_a_kernel_are_rejected_with_the_rank_counts_that_work() {
        let heads = [("num_attention_heads", 8), ("num_key_value_heads", 2), ("head_dim", 64)];
        let small = |mlp| largest(&[&heads[..], &[("hidden_size", 512), ("intermediate_size", mlp)]].concat());
        let arch = small(72);
        assert_eq!(check_arch(Device::Cuda, &arch, 1), Ok(()));
        let error = check_cut(Device::Cuda, &arch, 2).expect_err("36 is not a multiple of 8");
        assert!(
            error.message.contains("must be multiples of 8") && error.message.contains("(got 36 with tensor = 2)"),
            "{error}"
        );
        assert_eq!(error.hint.as_deref(), Some("set tensor to 1"));
        let wider = small(11008);
        assert!([1, 2, 4, 8].into_iter().all(|tensor| check_cut(Device::Cuda, &wider, tensor).is_ok()));
    }

    #[test]
    fn sizes_without_a_kernel_are_rejected_before_the_first_step() {
        let arch = largest(&[]);
        assert_eq!(check_arch(Device::Cuda, &arch, 64), Ok(()), "the largest");
        let message_of = |arch: Arch, tensor| check_arch(Device::Cuda, &arch, tensor).expect_err("too large").message;
        let wide = message_of(Arch { width: 16392, ..arch.clone() }, 1);
        assert!(wide.starts_with("hidden_size must be at most 16384 with") && wide.ends_with("(got 16392)"), "{wide}");
        let message = message_of(Arch { vocabulary: (1 << 20) + 1, ..arch.clone() }, 1);
        assert!(message.starts_with("vocab_size must be") && message.ends_with("(got 1048577)"), "{message}");
        let shared = message_of(largest(&[("num_attention_heads", 129), ("num_key_value_heads", 1)]), 1);
        assert!(shared.contains("must be at most 128") && shared.contains("(got 129 heads on 1)"), "{shared}");
        let parts = message_of(arch, 128);
        assert!(parts.starts_with("tensor must be at most 64 with") && parts.contains("(got 128)"), "{parts}");
    }
}
