//! The common parts of every job: configuration, ranks, devices, records, and the checks before the first step.

use super::gemm::{self, GemmChoice};
use super::gpu;
use super::layout::{Count, Expectations, Expected, Layout, StateSwap};
use super::ranks::Ranks;
use super::replay::Replay;
use super::run_lock::{PREPARED, link_prepared, working_dir};
use super::step_shape::StepShape;
use crate::comm::{Axes, Group, World};
use crate::config::Config;
use crate::config::job::Recompute;
use crate::config::mesh::{Offload, Placement, RoleName};
use crate::config::model::Quantize;
use crate::config::optim::OptimConfig;
use crate::data::RowTokens;
use crate::device::cpu::peak;
use crate::device::cuda::owned_by;
use crate::device::{Device, cuda, null};
use crate::dtype::DType;
use crate::error::{Error, Kind, Result, format_bytes};
use crate::learn::{Learner, Role, role};
use crate::metrics::{Recorder, Terminal, keys};
use crate::model::export::remove_leftovers;
use crate::model::load::{ModelFiles, load_base};
use crate::model::{Arch, Feed, Head, ParamTable, Scoring, TensorPart, Weights};
use crate::sys;
use crate::sys::host::median;
use crate::tensor::arena;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Instant;

/// What a dry run lacks on this machine. Then it checks everything that does not need it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lacks {
    /// Why a job for GPUs has none.
    pub gpu: Option<String>,
    /// The number of ranks of a job for several, of which one was started.
    pub ranks: Option<usize>,
}

/// A job that runs or is about to run: its configuration, its ranks, its devices and its records.
pub struct Run {
    pub config: Config,
    pub config_hash: String,
    /// The output directory of this start: `job.dir`, or a dry run's own directory.
    pub dir: PathBuf,
    pub ranks: Ranks,
    /// The device of this rank.
    pub device: Device,
    /// The reason why `job.device = "auto"` chose CPUs.
    pub no_gpu: Option<String>,
    /// Rows of the banner about the device that are known before the first model.
    pub device_rows: Vec<String>,
    /// The backend of GEMMs; none on CPUs.
    pub gemm: Option<GemmChoice>,
    pub plan: Expectations,
    pub recorder: Recorder,
    /// Whether to check everything, then stop before the first step.
    pub dry_run: bool,
    /// The recorded steps that this run computes again, instead of steps of its own.
    pub replay: Option<Replay>,
    /// What a dry run lacks.
    pub lacks: Lacks,
    pub started: Instant,
    /// Whether this start has made an optimizer step. Only then can `checkpoint.max_hours` end the run.
    pub has_learned: bool,
    /// Whether the rollout is ahead of the updates.
    pub runs_ahead: bool,
    /// Whether a started rollout must be finished before the run can stop.
    pub must_finish: Cell<bool>,
    /// Whether a trace of the next step was requested. The same on all ranks.
    pub trace_asked: Cell<bool>,
    /// The seconds for which this rank has waited for rewards or the environment in this step.
    pub reward_wait_s: Cell<f64>,
    /// Resident memory before the first model, which the plan does not count.
    pub resident_at_start: u64,
    /// FLOP/s of all ranks' devices at their peaks.
    pub peak_flops: f64,
}

/// The source of a model's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightsFrom {
    /// A plan has no files: the values are unspecified.
    Nowhere,
    ModelDir,
    /// A checkpoint.
    Checkpoint,
}

/// The file in `job.dir` that requests a trace of the next step.
pub const TRACE_REQUEST: &str = "trace.request";

/// A rank's request to stop, which goes before that of a trace (1).
const STOP: f64 = 2.0;

/// Multiply-adds of a sample of a processor's peak: about a millisecond.
const PEAK_ROUNDS: usize = 400_000;

/// Seconds of a step above which a job runs on CPUs only if it asks for them.
const STEP_S_MAX: f64 = 2.0 * 3600.0;

/// The warning if no layout fits.
const TIGHT: &str = "the plan finds no layout that fits this memory for the longest rows that the job allows (run rlhf-hpc plan \
                     to see why); starting with the lowest possible mesh.tensor and mesh.zero";

impl Run {
    /// Makes the run directory and opens its records, for steps of `shape` on `opened` devices with roles `placed` by a
    /// plan.
    pub fn open(
        mut config: Config,
        shape: &StepShape,
        opened: Result<gpu::Opened>,
        (placed, plan): (Vec<(Placement, Layout)>, Expectations),
        world: World,
        dry_run: bool,
    ) -> Result<Self> {
        if config.gradient.recompute == Recompute::Auto {
            config.gradient.recompute = plan.recompute;
        }
        let ranks = Ranks::new(world, placed, config.mesh.async_updates_max > 0)?;
        let all = &ranks.all;
        all.agree(gpu::check(&config))?;
        let opened = all.agree(opened)?;
        let (device, gemm, device_rows) = if opened.gpu.is_none() {
            arena::set_limit(config.mesh.arena_bytes_max);
            begin_peaks(all, Device::Cpu);
            (Device::Cpu, None, opened.no_gpu.iter().map(|why| format!("no GPU: {why}")).collect())
        } else {
            // Timings and self-tests free their memory before the run reserves any.
            let gemm = gemm::choose(&mut config, &ranks, opened.checked.as_ref(), shape)?;
            let backends = gpu::join(&config, &ranks)?;
            let checked_axes = gpu::try_collectives(&config, &ranks, shape)?;
            gpu::limit(&config, &ranks.world);
            // One range, so that no phase fragments the memory for the next one.
            cuda::gpu().reserve();
            let start_peak = begin_peaks(all, Device::Cuda);
            let peak = format!("self-test and GEMM timing used up to {} of GPU memory", format_bytes(start_peak));
            let mut rows = vec![opened.describe_kernels()];
            rows.extend(checked_axes.into_iter().chain((start_peak > 0).then_some(peak)));
            rows.extend(backends.iter().map(|backend| format!("collectives over {backend}")));
            (Device::Cuda, Some(gemm), rows)
        };
        let peak_flops = peak_flops(&config, &plan, all);
        let dir = working_dir(&config.job.dir, dry_run);
        let recorder = open_records(&config, &dir, all)?;
        for warning in warnings_of_start(&config, &plan, &ranks, device, &dir) {
            recorder.warn(&warning);
        }
        Ok(Self {
            runs_ahead: config.mesh.async_updates_max > 0,
            config_hash: config.hash(),
            config,
            dir,
            ranks,
            device,
            no_gpu: opened.no_gpu,
            device_rows,
            gemm,
            plan,
            recorder,
            dry_run,
            replay: None,
            lacks: Lacks::default(),
            started: Instant::now(),
            has_learned: false,
            must_finish: Cell::new(false),
            trace_asked: Cell::new(false),
            reward_wait_s: Cell::new(0.0),
            resident_at_start: 0,
            peak_flops,
        })
    }

    /// Whether GEMMs of many rows use cuBLASLt.
    pub fn has_fast_gemm(&self) -> bool {
        self.gemm.as_ref().is_some_and(|gemm| gemm.fast)
    }

    /// Whether another forward in the training layout computes the log-probabilities before the update.
    pub fn recomputes_old_logprobs(&self) -> bool {
        let [training, rollout] = self.ranks.layouts_of_actor();
        self.config.recomputes_old_logprobs(&training.mesh, &rollout.rollout(), self.has_fast_gemm())
    }

    pub fn checkpoints(&self) -> PathBuf {
        self.config.job.dir.join("checkpoints")
    }

    /// The frozen parameters `kept` of a model. All ranks of the placement call this.
    pub fn base(&self, files: &ModelFiles, kept: &BTreeSet<String>, values: WeightsFrom) -> Result<Rc<Weights>> {
        let (axes, stage, dtype) = (&self.ranks.axes, self.ranks.layout().zero, self.config.model.dtype());
        let reads = values != WeightsFrom::Nowhere;
        let quantize = self.config.model.quantize == Quantize::Nf4;
        let base = gpu::check_arch(self.device, files.arch, axes.tensor.size()).and_then(|()| {
            let _files = null::hold("mapped files", if reads { 0 } else { file_bytes(files.arch, files.head, axes) });
            owned_by("weights of the frozen base", || {
                load_base(self.device, files, kept, dtype, axes, stage, reads, quantize)
            })
        });
        axes.all.agree(base)
    }

    /// A role of a model, on its frozen base if it has one: loaded, or allocated for a checkpoint's values. All ranks of the placement call
    /// this.
    pub fn role(
        &self,
        name: &'static str,
        files: &ModelFiles,
        values: WeightsFrom,
        base: Option<Rc<Weights>>,
    ) -> Result<Role> {
        let ModelFiles { arch, head, .. } = *files;
        let (device, axes, stage) = (self.device, &self.ranks.axes, self.ranks.layout().zero);
        let (dtype, seed) = (self.config.model.dtype(), self.config.job.seed);
        let role = gpu::check_arch(device, arch, axes.tensor.size()).and_then(|()| {
            if values == WeightsFrom::ModelDir {
                return Role::load(device, name, files, base, dtype, seed, axes, stage);
            }
            let _files = null::hold("mapped files", file_bytes(arch, head, axes));
            Role::allocate(device, name, files, base, dtype, axes, stage)
        });
        axes.all.agree(role.map_err(|e| e.within(role::key(name))))
    }

    /// A learner of a role, for a run of `updates` optimizer steps. All ranks of the role's placement call this.
    pub fn learner(&self, role: Role, optim: &OptimConfig, updates: u64, values: WeightsFrom) -> Result<Learner> {
        let (axes, gradient, layout) = (&self.ranks.axes, &self.config.gradient, self.ranks.layout());
        let state_on = if layout.swap.has_state() { Device::Cpu } else { self.device };
        let coef = self.config.model.router_aux_loss_coef;
        // The loss is one of the probabilities of a softmax.
        let has_softmax =
            || role.arch().feeds().filter_map(Feed::experts).any(|experts| experts.scoring == Scoring::Softmax);
        if coef > 0.0 && role.name == RoleName::Actor.name() && !has_softmax() {
            let family = role.arch().family.name;
            return Err(Error::usage(format!(
                "model.router_aux_loss_coef needs a model with experts whose routers have a softmax (got {family})"
            ))
            .hint("set it to 0"));
        }
        let made = Learner::new(state_on, role, optim, gradient, updates, axes, layout.zero)
            .map(|learner| learner.with_router_loss(coef));
        let made = if values == WeightsFrom::Checkpoint { made } else { made.and_then(Learner::with_masters) };
        let mut learner = axes.all.agree(made)?;
        self.offload(Offload::Optimizer, learner.zero.buffers_mut())?;
        if layout.swap.state == StateSwap::BetweenSteps {
            learner.zero.keep_resident();
        }
        Ok(learner)
    }

    /// Whether any rank was asked to stop, or has reached `checkpoint.max_hours`. The same on all ranks; a collective.
    /// Without a stop, it also finds the request of a trace.
    pub fn stop_requested(&self) -> bool {
        let wants_trace = || self.ranks.all.rank() == 0 && self.dir.join(TRACE_REQUEST).exists();
        let here = if self.stop_requested_here() { STOP } else { f64::from(u8::from(wants_trace())) };
        let all = self.ranks.all.max(here);
        self.trace_asked.set(self.trace_asked.get() || all > 0.0 && all < STOP);
        all == STOP
    }

    /// Whether this rank was asked to stop, or has reached `checkpoint.max_hours`.
    pub fn stop_requested_here(&self) -> bool {
        let hours = self.config.checkpoint.max_hours;
        let over = || hours > 0.0 && self.started.elapsed().as_secs_f64() > hours * 3600.0;
        // Otherwise a start could end without progress, for example in an evaluation that is due.
        !self.must_finish.get() && (sys::signals::stop_requested() || (self.has_learned && over()))
    }

    /// The error that ends a run after it saved on request.
    pub fn stopped(&self, step: u64) -> Error {
        let over = self.config.checkpoint.max_hours > 0.0 && !sys::signals::stop_requested();
        let why = sys::signals::received().unwrap_or(if over { "checkpoint.max_hours reached" } else { "on request" });
        let message =
            format!("stopped at step {step} ({why}) and saved a checkpoint; run the same command again to resume");
        Error::new(Kind::Stopped, message)
    }

    /// Updates the plan for the lengths of the job's first rows, and of its evaluation rows. The same on all ranks.
    ///
    /// Layouts do not change. They are chosen for the longest rows that the job allows, so every start and resume has
    /// the same.
    pub fn expect(&mut self, rows: &[RowTokens], eval: &[RowTokens], images: usize) {
        let fast = self.gemm.as_ref().map(|gemm| [gemm.fast, gemm.is_open]);
        let count = |count: &Count| count(&self.config, fast, [rows, eval], images);
        self.plan.expected = self.plan.count.as_ref().map(count).unwrap_or_default();
    }

    /// Rejects a job with steps of several hours that runs on CPUs because no rank sees a GPU. On a cluster that is a
    /// mistake that shows only after the first step. All ranks call this after `expect`.
    pub fn check_step_time(&self) -> Result<()> {
        let step_s = self.plan.expected.iter().flatten().map(|expected| expected.step_s).fold(0.0, f64::max);
        let refused = self.no_gpu.as_ref().filter(|_| step_s > STEP_S_MAX);
        self.ranks.all.agree(refused.map_or(Ok(()), |why| {
            let hours = step_s / 3600.0;
            Err(Error::usage(format!(
                "no GPU: {why}; on these CPUs a step would take about {hours:.0} hours, according to the plan"
            ))
            .hint("start it on nodes with a GPU for each rank, or set job.device = \"cpu\""))
        }))
    }

    /// The expectations for this rank; none for a rank without a model.
    pub fn expected(&self) -> Option<&Expected> {
        self.plan.expected.get(self.ranks.placement)?.as_ref()
    }

    /// The expectations for the fullest rank.
    pub fn expected_of_fullest(&self) -> Option<&Expected> {
        self.plan.expected.iter().flatten().max_by_key(|expected| expected.taken)
    }

    /// Free bytes of this rank's device.
    pub fn memory_free(&self) -> u64 {
        let of_machine = || sys::memory::available_bytes() / self.ranks.world.local_size as u64;
        match self.device {
            Device::Cpu => {
                null::device().map_or_else(of_machine, |device| device.memory_bytes).min(arena::usage().left() as u64)
            }
            Device::Cuda => gpu::memory_free(),
        }
    }

    /// Bytes of a GPU that the rollout's cache may take in addition to its forwards, which the plan counts; none on the
    /// CPU.
    pub fn cache_bytes(&self) -> Option<u64> {
        let forwards = || self.expected().map(|expected| expected.forwards as u64);
        // Half of the free memory, if the plan does not count them.
        (self.device == Device::Cuda).then(|| forwards().map_or_else(|| gpu::memory_free() / 2, gpu::cache_bytes))
    }

    /// Describes how a GPU launches decoding; the same on all ranks.
    pub fn decoding(&self) -> Option<String> {
        let tensor = &self.ranks.rollout_axes.tensor;
        let launched = || match tensor.check_graphs() {
            _ if !self.config.rollout.graphs => "no CUDA graphs (rollout.graphs = false)".into(),
            Err(why) => format!("no CUDA graphs, because {why}"),
            Ok(()) if tensor.size() > 1 => "CUDA graphs, including the collectives of the tensor axis".into(),
            Ok(()) => "CUDA graphs".into(),
        };
        (self.device == Device::Cuda).then(launched)
    }

    /// The peak memory of the fullest rank, on its device and with a GPU also on the host. A collective.
    pub fn memory_peaks(&self) -> Vec<(&'static str, f64)> {
        let resident = sys::memory::peak_bytes();
        let mut values = match self.device {
            Device::Cpu => vec![
                (keys::MEMORY_PEAK_BYTES, resident as f64),
                (keys::MEMORY_ARENA_PEAK_BYTES, arena::usage().peak as f64),
                (keys::MEMORY_START_BYTES, self.resident_at_start as f64),
            ],
            Device::Cuda => {
                let (gpu, usage) = (cuda::gpu(), cuda::gpu().usage());
                vec![
                    (keys::MEMORY_PEAK_BYTES, usage.peak as f64),
                    (keys::MEMORY_ARENA_PEAK_BYTES, usage.peak as f64),
                    (keys::MEMORY_HOST_PEAK_BYTES, resident as f64),
                    (keys::MEMORY_PINNED_BYTES, usage.pinned as f64),
                    (keys::MEMORY_REQUESTS, (usage.requests + usage.pinned_requests) as f64),
                    (keys::GPU_GRAPH_LAUNCHES, gpu.counts.replayed.get() as f64),
                    (keys::GPU_HOST_WAITS, gpu.counts.drained.get() as f64),
                ]
            }
        };
        let mut numbers: Vec<f64> = values.iter().map(|(_, bytes)| *bytes).collect();
        self.ranks.all.all_reduce_max_f64(&mut numbers);
        values.iter_mut().zip(numbers).for_each(|((_, value), most)| *value = most);
        values.extend(self.expected_of_fullest().map(|planned| (keys::MEMORY_PLANNED_BYTES, planned.taken as f64)));
        values
    }
}

/// The warnings about the layout and about the directory of the run.
fn warnings_of_start(config: &Config, plan: &Expectations, ranks: &Ranks, device: Device, dir: &Path) -> Vec<String> {
    let in_memory = device == Device::Cpu && !config.mesh.offload.is_empty() && sys::files::is_in_memory(dir);
    let dir = dir.display();
    let tight = plan.is_tight.then(|| TIGHT.to_owned());
    let saves_nothing =
        in_memory.then(|| format!("mesh.offload saves no memory, because {dir} is in memory itself (tmpfs)"));
    [tight, ranks.warn_of_split_tensors(), saves_nothing].into_iter().flatten().collect()
}

/// Bytes of a rank's shard of a model's files.
fn file_bytes(arch: &Arch, head: Head, axes: &Axes) -> usize {
    let named = arch.source.get("torch_dtype").or_else(|| arch.source.get("dtype"));
    let bytes = if named.and_then(serde_json::Value::as_str) == Some("float32") { 4 } else { 2 };
    ParamTable::on(Device::Cpu, arch, head, TensorPart::from_group(&axes.tensor)).parameters() * bytes
}

/// The sum of all devices' peak FLOP/s. The peak of this rank's CPU is measured, in a few milliseconds. A collective.
fn peak_flops(config: &Config, plan: &Expectations, all: &Group) -> f64 {
    let products = || match config.model.dtype() {
        DType::Bf16 => peak::bf16_gflops(PEAK_ROUNDS).unwrap_or_else(|| peak::fma_gflops(PEAK_ROUNDS)),
        DType::F32 => peak::fma_gflops(PEAK_ROUNDS),
    };
    let mine = plan.gpu_flops.unwrap_or_else(|| 1e9 * median([(); 3].map(|()| products())));
    let mut sum = [mine];
    all.all_reduce_sum_f64(&mut sum);
    sum[0]
}

/// Resets the peaks of memory. Returns the most that a rank's GPU has held until now. A collective.
fn begin_peaks(all: &Group, device: Device) -> u64 {
    arena::trim();
    arena::begin_peak();
    sys::memory::begin_peak();
    all.max(if device == Device::Cuda { cuda::gpu().begin_peak() as f64 } else { 0.0 }) as u64
}

/// Opens the records in `dir`, and removes the leftovers of a killed export. All ranks call this.
fn open_records(config: &Config, dir: &Path, all: &Group) -> Result<Recorder> {
    let begun = || {
        sys::files::create_dir_all(dir)?;
        if *dir != config.job.dir {
            return link_prepared(&config.job.dir, dir);
        }
        let rows = dir.join(PREPARED);
        let removed = if rows.is_dir() { sys::files::remove_partial(&rows) } else { Ok(()) };
        removed.and_then(|()| remove_leftovers(&dir.join("export")))
    };
    all.agree(if all.rank() == 0 { begun() } else { Ok(()) })?;
    let opened = match all.rank() {
        0 => Recorder::open(dir, &config.metrics, Terminal::stderr()),
        _ => Ok(Recorder::silent(&config.metrics)),
    };
    all.agree(opened.map(|recorder| recorder.of_job(config.to_toml())))
}
