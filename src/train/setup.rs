//! What every job has: its configuration, its ranks, its directory, its records; and the checks before work starts.

use super::gpu;
use super::layout::{self, Expected, Layout};
use super::products::{self, Chosen};
use super::role::Role;
use crate::comm::{Axes, Group, World};
use crate::config::Config;
use crate::config::job::JobKind;
use crate::config::mesh::{Place, RoleName};
use crate::data::RowTokens;
use crate::device::{self, Device};
use crate::error::{Error, Kind, Result, size_words};
use crate::mesh::Mesh;
use crate::metrics::{self, Banner, BannerModel, Recorder, keys};
use crate::model::{Arch, Head};
use crate::plan::Rows;
use crate::plan::shape::Swap;
use crate::sys;
use crate::tensor::arena;
use crate::text::Tokenizer;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

pub struct Run {
    pub config: Config,
    pub dir: PathBuf,
    pub world: World,
    pub mesh: Mesh,
    /// ZeRO stage, 0 to 3.
    pub stage: usize,
    /// The layout of the rollout.
    pub rollout: Mesh,
    /// All ranks of the run.
    pub all: Group,
    /// Who plays what where.
    pub places: Vec<Place>,
    /// This rank's of `places`.
    pub place: usize,
    /// This rank's groups within its place.
    pub axes: Axes,
    /// Its groups in the rollout: training's, where both cut matrices alike.
    pub rollout_axes: Axes,
    pub recorder: Recorder,
    /// What the models are put on.
    pub device: Device,
    /// Why that is no GPU, where one was looked for.
    no_gpu: Option<String>,
    /// How collectives of values on GPUs go, a row an axis.
    ways: Vec<String>,
    /// How a GPU computes matrix products.
    pub products: Option<Chosen>,
    /// What was checked of its kernels and of what goes over its axes, in words.
    checked: [Option<String>; 2],
    /// What waits in the host's memory while the GPU does not need it.
    pub swap: Swap,
    /// Which tensor size the rollout has where the plan chose it, and why.
    rollout_words: Option<String>,
    /// What the plan expects this rank to hold.
    pub planned: Option<Expected>,
    /// Hash of the resolved configuration.
    pub config_hash: String,
    /// Check everything, then stop before the first step.
    pub dry_run: bool,
    pub started: Instant,
    /// Resident memory before the first model.
    resident_at_start: u64,
}

/// What is said where no layout fits.
const TIGHT: &str = "for the longest rows that the job allows the plan finds no layout that fits this memory (rlhf-hpc plan \
                     shows why); starting with mesh.tensor and mesh.zero as low as they go";

impl Run {
    /// Makes the run directory and opens its records.
    pub fn open(mut config: Config, world: World, dry_run: bool) -> Result<Self> {
        // What the job asks for wrongly is said before what this machine lacks.
        let opened = gpu::open(&mut config, &world);
        let layouts = Layout::of_places(&config, &world, opened.as_ref().ok().and_then(|opened| opened.gpu.as_ref()))?;
        let all = world.group();
        let mut own = None;
        for (i, (place, layout)) in layouts.iter().enumerate() {
            own = own.or(world.axes_of(place.ranks.clone(), &layout.mesh)?.map(|axes| (i, axes)));
        }
        let (place, axes) = own.expect("every rank has a place");
        let layout = layouts[place].1.clone();
        let Layout { mesh, stage, rollout, swap, is_tight, rollout_words, expected } = layout.clone();
        let places = layouts.into_iter().map(|(place, _)| place).collect();
        let alike = rollout.tensor == mesh.tensor;
        let rollout_axes = if alike { axes.clone() } else { Axes::of(&axes.all, &rollout) };
        all.agree(gpu::check(&config))?;
        let gpu::Opened { gpu, no_gpu, checked } = all.agree(opened)?;
        let device = if gpu.is_some() { Device::Cuda } else { Device::Cpu };
        // What these measure and check with gives its memory back, before any is reserved.
        let products = products::settle(&mut config, &all, device, checked.as_ref(), (&mesh, &rollout))?;
        let (ways, checked_axes) = match device {
            Device::Cpu => (Vec::new(), None),
            Device::Cuda => gpu::join(&config, checked.as_ref(), &world, &layout, &axes, &rollout_axes)?,
        };
        match device {
            Device::Cpu => arena::set_limit(config.mesh.arena_bytes_max),
            Device::Cuda => gpu::limit(&config, expected.as_ref().map(|expected| &expected.memory)),
        }
        let planned = expected.map(|e| e.with_products(products.as_ref().map(|products| products.fast)));
        let dir = config.job.dir.clone();
        let text = config.to_toml();
        let config_hash = config.hash();
        let made = if world.rank == 0 { make_dir(&dir, &text, dry_run) } else { Ok(()) };
        all.agree(made)?;
        let recorder = Recorder::open(&dir, &config.metrics, world.rank, metrics::stderr_is_terminal());
        let recorder = all.agree(recorder)?;
        if is_tight {
            recorder.warn(TIGHT);
        }
        let started = Instant::now();
        let run = Self {
            config,
            dir,
            world,
            mesh,
            stage,
            rollout,
            all,
            places,
            place,
            axes,
            rollout_axes,
            recorder,
            device,
            no_gpu,
            ways,
            products,
            checked: [checked.map(|checked| checked.words), checked_axes],
            swap,
            rollout_words,
            planned,
            config_hash,
            dry_run,
            started,
            resident_at_start: sys::memory::resident_bytes(),
        };
        run.warn_of_offload();
        Ok(run)
    }

    /// Whether this rank plays a role.
    pub fn plays(&self, role: RoleName) -> bool {
        self.places[self.place].roles.contains(&role)
    }

    /// Whether the log-probabilities before the update are those of one more forward in the layout of training.
    pub fn recomputes_old_logprobs(&self) -> bool {
        let fast = self.products.as_ref().is_some_and(|products| products.fast);
        self.config.ppo.recomputes_old_logprobs(&self.mesh, &self.rollout, fast)
    }

    pub fn checkpoints(&self) -> PathBuf {
        self.dir.join("checkpoints")
    }

    /// The tokenizer of the actor's directory.
    pub fn tokenizer(&self) -> Result<Arc<Tokenizer>> {
        let dir = &self.config.model.actor;
        Ok(Arc::new(self.all.agree(Tokenizer::load(dir))?))
    }

    /// Loads a role on every rank of this place.
    pub fn role(&self, name: &'static str, dir: &Path, head: Head) -> Result<Role> {
        let (dtype, seed) = (self.config.model.dtype(), self.config.job.seed);
        let on_gpu = self.device == Device::Cuda;
        let fits = |arch| gpu::check_arch(&arch, self.axes.tensor.size());
        let known = if on_gpu { Arch::load(dir).and_then(fits) } else { Ok(()) };
        let known = known.map_err(|e| e.within(format!("model.{name}")));
        let load = || Role::load_on(self.device, name, dir, head, dtype, seed, &self.axes, self.stage);
        let loaded = known.and_then(|()| load());
        self.axes.all.agree(loaded)
    }

    /// Whether any rank was asked to stop, or the hours are over. The same on all ranks; a collective.
    pub fn stop_requested(&self) -> bool {
        let mut any = [f64::from(u8::from(self.stop_requested_here()))];
        self.all.all_reduce_max_f64(&mut any);
        any[0] > 0.0
    }

    /// Whether this rank was asked to stop, or its hours are over.
    pub fn stop_requested_here(&self) -> bool {
        let hours = self.config.checkpoint.max_hours;
        sys::signals::stop_requested() || (hours > 0.0 && self.started.elapsed().as_secs_f64() > hours * 3600.0)
    }

    /// The error that a run ends with after it saved on request.
    pub fn stopped(&self, step: u64) -> Error {
        let over = self.config.checkpoint.max_hours > 0.0 && !sys::signals::stop_requested();
        let why = sys::signals::received().unwrap_or(if over { "checkpoint.max_hours are over" } else { "on request" });
        Error::new(
            Kind::Stopped,
            format!("stopped at step {step} ({why}) with a checkpoint; run the same line to go on"),
        )
    }

    /// Counts what this rank will hold for rows of these lengths, the first that the job draws, and for the longest that it
    /// evaluates. On every rank alike.
    pub fn expect(&mut self, tokens: &[RowTokens], longest_eval: Option<RowTokens>) {
        let (config, context) = (&self.config, Arch::load(&self.config.model.actor).map(|arch| arch.context));
        if let (Some(planned), Ok(context)) = (&mut self.planned, context) {
            planned.count(config, Rows::of(config, context, tokens, false).evaluating(config, longest_eval));
        }
    }

    /// Tells what will run where.
    pub fn banner(
        &mut self,
        steps: u64,
        resumed_from: Option<u64>,
        models: &[(&str, usize, &Path)],
        plan: &[(&'static str, usize)],
    ) {
        let dtype = format!("{:?}", self.config.model.dtype()).to_lowercase();
        let models = models
            .iter()
            .map(|(role, parameters, dir)| BannerModel {
                role: (*role).to_string(),
                parameters: *parameters as u64,
                dtype: dtype.clone(),
                path: dir.display().to_string(),
            })
            .collect();
        let mut hosts: Vec<(String, usize)> = Vec::new();
        for host in &self.world.hosts {
            match hosts.iter_mut().find(|(name, _)| name == host) {
                Some((_, ranks)) => *ranks += 1,
                None => hosts.push((host.clone(), 1)),
            }
        }
        let devices = match self.device {
            Device::Cpu => {
                let no_gpu = self.no_gpu.iter().map(|why| format!("no GPU: {why}"));
                std::iter::once(device::describe()).chain(no_gpu).collect()
            }
            Device::Cuda => gpu::describe(&self.all, self.checked.each_ref().map(Option::as_deref), &self.ways),
        };
        self.recorder.banner(&Banner {
            job_kind: self.config.job.kind.name().to_string(),
            job_name: self.config.job.name.clone(),
            run_dir: self.dir.display().to_string(),
            seed: self.config.job.seed,
            steps,
            resumed_from,
            hosts,
            threads_per_rank: device::cpu::pool::pool().threads(),
            devices,
            mesh: self.mesh,
            models,
            memory: match &self.planned {
                Some(planned) => planned.memory.groups(),
                None => plan.to_vec(),
            }
            .into_iter()
            .map(|(name, bytes)| (name.to_string(), bytes as u64))
            .collect(),
            notes: self.notes(),
        });
    }

    fn notes(&self) -> Vec<(String, String)> {
        let mut notes = vec![("zero".to_string(), layout::zero_words(&self.mesh, self.stage))];
        if let Some(Chosen { words, measured, .. }) = &self.products {
            notes.push(("products".to_string(), words.clone()));
            notes.extend(measured.map(|times| ("measured".to_string(), times.words())));
        }
        let fast = self.products.as_ref().is_some_and(|products| products.fast);
        let words = match (self.config.job.kind, self.recomputes_old_logprobs()) {
            (JobKind::Ppo, true) => Some("recomputed by a forward of training (time_old_logprobs_s, sampler_gap_max)"),
            (JobKind::Ppo, false) if fast => Some("as drawn, with other bits than training's (logprob_gap_max)"),
            _ => None,
        };
        notes.extend(words.map(|words| ("old logprobs".to_string(), words.to_string())));
        if self.device == Device::Cuda && self.config.job.kind == JobKind::Ppo {
            notes.push(("decoding".to_string(), gpu::decoding(&self.config, &self.rollout_axes)));
        }
        let words =
            self.rollout_words.as_ref().filter(|_| self.config.job.kind == JobKind::Ppo && self.axes.all.size() > 1);
        notes.extend(words.map(|words| ("rollout".to_string(), words.clone())));
        if self.device == Device::Cuda && self.swap != Swap::default() {
            let waiting = match (self.swap.optimizer, self.swap.roles) {
                (true, true) => "optimizer state, and weights of idle roles",
                (true, false) => "optimizer state",
                _ => "weights of idle roles",
            };
            let most = self.planned.as_ref().map_or(0, |planned| planned.memory.swapped) as u64;
            let pinned = self.planned.as_ref().map_or(0, |planned| planned.memory.pinned) as u64;
            let words = format!(
                "pinned memory holds {waiting}: {} at most, {} of the host's memory pinned",
                size_words(most),
                size_words(pinned)
            );
            notes.push(("host".to_string(), words));
        }
        if self.places.len() > 1 {
            let words = |place: &Place| {
                let roles: Vec<&str> = place.roles.iter().map(|role| role.name()).collect();
                format!("{} on {}..{}", roles.join(", "), place.ranks.start, place.ranks.end)
            };
            notes.push(("places".to_string(), self.places.iter().map(words).collect::<Vec<_>>().join("; ")));
        }
        notes
    }

    /// Memory of the fullest rank: of its device, and with a GPU also of the host. A collective.
    pub fn memory_peaks(&self) -> Vec<(&'static str, f64)> {
        let (resident, start) = (metrics::memory_peak_bytes(), self.resident_at_start);
        let mut values = match self.device {
            Device::Cpu => vec![
                (keys::MEMORY_PEAK_BYTES, resident as f64),
                (keys::MEMORY_ARENA_PEAK_BYTES, arena::usage().peak as f64),
                (keys::MEMORY_START_BYTES, start as f64),
            ],
            Device::Cuda => gpu::memory_values(resident),
        };
        let mut numbers: Vec<f64> = values.iter().map(|(_, bytes)| *bytes).collect();
        self.all.all_reduce_max_f64(&mut numbers);
        values.iter_mut().zip(numbers).for_each(|((_, value), most)| *value = most);
        values
    }
}

/// Makes the run directory. A dry run leaves the configuration of a run that has begun there as it is.
fn make_dir(dir: &Path, config: &str, dry_run: bool) -> Result<()> {
    std::fs::create_dir_all(dir).map_err(|e| Error::io("create", dir, &e))?;
    if dry_run && dir.join("checkpoints").exists() {
        return Ok(());
    }
    sys::files::write_atomic(&dir.join("config.resolved.toml"), config.as_bytes())
}

/// Refuses a tokenizer that knows more tokens than the model of `dir` embeds.
pub fn check_vocabulary(arch: &Arch, dir: &Path, tokenizer: &Tokenizer) -> Result<()> {
    let (known, embedded) = (tokenizer.vocabulary(), arch.vocabulary);
    if known <= embedded {
        return Ok(());
    }
    Err(Error::data(format!("the tokenizer of {} has {known} tokens, its model embeds {embedded}", dir.display()))
        .hint("put the tokenizer that belongs to the model into its directory"))
}

/// Refuses a second model, `name`, that cannot see the longest rows that the actor may make.
pub fn check_context(actor: &Arch, other: &Arch, name: &str, config: &Config) -> Result<()> {
    let (prompt, response) = (config.data.prompt_tokens_max, config.rollout.response_tokens_max);
    let (longest, context) = ((prompt + response).min(actor.context), other.context);
    if longest <= context {
        return Ok(());
    }
    Err(Error::data(format!(
        "prompts of {prompt} and responses of {response} tokens may make rows of {longest}, model.{name} has a context of {context}"
    ))
    .hint("lower data.prompt_tokens_max or rollout.response_tokens_max"))
}

/// Refuses a second model, `name`, whose tokens are not the first one's.
pub fn check_same_vocabulary(actor: &Arch, other: &Arch, name: &str) -> Result<()> {
    let (a, b) = (actor.vocabulary, other.vocabulary);
    if a == b {
        return Ok(());
    }
    Err(Error::data(format!("model.{name} has a vocabulary of {b}, model.actor of {a}"))
        .hint("both must come from models with the same tokenizer"))
}
