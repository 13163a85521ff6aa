//! A job on a null device. It is opened without files, ranks or text, and runs some steps, so that a plan can read the
//! memory it held. Nothing here depends on the kind of job.

use super::job::{Ended, Job, Step};
use super::load;
use super::models::{self, Archs, JobModel, ModelSpec};
use super::timers::Timers;
use crate::comm::{World, phase};
use crate::config::Config;
use crate::config::mesh::{Placement, RoleName};
use crate::config::reward::{ModelRewardConfig, RewardConfig, RuleConfig, RuleKind};
use crate::config::rollout::DynamicSampling;
use crate::data::{Prepared, RowSource, RowTokens};
use crate::device::{Device, cuda, null};
use crate::error::{Error, Result};
use crate::launch::gemm::GemmChoice;
use crate::launch::gpu;
use crate::launch::layout::{Expectations, Expected, Layout};
use crate::launch::ranks::Ranks;
use crate::launch::run::{Lacks, Run, WeightsFrom};
use crate::metrics::{Phases, Recorder};
use crate::model::Pixels;
use crate::text::Tokenizer;
use std::cell::Cell;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// A GPU of a planned job.
#[derive(Clone, Copy, Debug)]
pub struct PlannedGpu {
    /// Whether GEMMs of many rows use cuBLASLt, and whether its workspace is kept.
    pub fast: bool,
    pub workspace: bool,
    /// The maximum bytes of the rollout's forward passes in addition to the KV cache.
    pub forward_bytes: usize,
}

/// A job as one of its ranks would run it.
#[derive(Clone, Debug)]
pub struct Planned<'a> {
    pub config: &'a Config,
    pub archs: &'a Archs,
    pub placements: Vec<(Placement, Layout)>,
    pub rank: usize,
    /// Training rows in the order in which the job reads them, and held-out rows.
    pub rows: Vec<RowTokens>,
    pub eval: Vec<RowTokens>,
    /// The number of images that the rank sees in the whole job.
    pub images: usize,
    pub steps: u64,
    /// The settings of a GPU, if the job runs on GPUs.
    pub gpu: Option<PlannedGpu>,
}

/// Opens a job on a null device and runs its steps.
pub fn drive<J: Job>(planned: Planned) -> Result<()> {
    let ranks = planned.placements.iter().map(|(placement, _)| placement.ranks.end).max().unwrap_or(1);
    let _program = planned.gpu.map(|gpu| start_gpu(gpu, ranks)).transpose()?;
    let mut run = open(&planned, ranks)?;
    let mut config = run.config.clone();
    let tokenizer = Arc::new(Tokenizer::none());
    let model = |(i, spec): (usize, ModelSpec)| {
        let spec = spec.located(planned.config)?;
        let missing = || Error::fault(format!("the plan has no {}", spec.role.name()));
        let same_place = planned.archs.0.get(i).filter(|(role, ..)| *role == spec.role).map(|(.., arch)| arch);
        let arch = same_place.or_else(|| planned.archs.find(spec.role)).cloned();
        Ok(JobModel { arch: arch.ok_or_else(missing)?, spec })
    };
    let mut models: Vec<JobModel> = J::models(&config).into_iter().enumerate().map(model).collect::<Result<_>>()?;
    models::tune(&config, &mut models)?;
    let arch = models[0].arch.clone();
    let is_given = |model: &&JobModel| has_given_reward(&planned) && model.spec.role == RoleName::Reward;
    let own = models[1..].iter().filter(|model| !is_given(model));
    own.into_iter().try_for_each(|model| J::check_models(&config, &arch, model))?;
    // A run rejects longer texts, so the longest that the plan counts is one that fits.
    config.data.pretrain_tokens_max = config.data.pretrain_tokens_max.min(arch.context);
    let prepared = Prepared::of_lengths(planned.rows, planned.eval);
    let source = RowSource::open(&config.data, &tokenizer, arch.vocabulary, &prepared, config.job.seed)?;
    source.check_context(arch.context)?;
    let values = WeightsFrom::Nowhere;
    let mut roles = load::load(&run, &models, values)?;
    for role in &mut roles {
        role.transformer.read_images_with(Pixels::planned(planned.images));
    }
    let (learners, frozen) = load::learners(&run, &models, roles, (planned.steps, &J::shape(&config)), values)?;
    let mut job = J::new(&run, &arch, learners, frozen, source, tokenizer)?;
    if config.eval.every_steps > 0 {
        null::evaluation(|| job.evaluate(&mut run, 0))?;
    }
    for number in 1..=planned.steps {
        let mut step = Step { number, phases: Phases::start(), timers: Timers::start(), lengths: Vec::new() };
        let made = job.step(&mut run, &mut step);
        job.learners().into_iter().for_each(|learner| learner.zero.offload());
        if let Err(Ended::Failed(error) | Ended::Unfinished { error: Some(error), .. }) = made {
            return Err(error);
        }
    }
    phase::set(planned.steps, phase::Phase::Checkpoint);
    for buffer in job.learners().into_iter().flat_map(|learner| learner.zero.buffers()) {
        // State offloaded to files is read one vector at a time.
        buffer.prefetch();
        buffer.evict();
    }
    Ok(())
}

/// Whether the plan's caller gives a reward model that the job does not name.
fn has_given_reward(planned: &Planned) -> bool {
    !planned.config.reward.has_models() && planned.archs.find(RoleName::Reward).is_some()
}

/// Starts a null GPU, including the memory that CUDA and its libraries keep for the whole job.
fn start_gpu(planned: PlannedGpu, ranks: usize) -> Result<Vec<cuda::Memory>> {
    cuda::gpu::start_null()?;
    cuda::fast::turn(planned.fast).map_err(Error::fault)?;
    let workspace = planned.workspace.then_some(("gemm workspace", cuda::fast::WORKSPACE_BYTES));
    let all = [Some(("program", gpu::program_bytes(ranks))), workspace].into_iter().flatten();
    Ok(all.map(|(owner, bytes)| cuda::owned_by(owner, || cuda::Memory::scratch(bytes))).collect())
}

/// Like `Run::open`, for ranks that do not exist.
fn open(planned: &Planned, size: usize) -> Result<Run> {
    let mut config = planned.config.clone();
    // Responses have their maximum length, and no reward starts a process.
    config.rollout.ignore_eos = true;
    config.rollout.stop.clear();
    config.rollout.stop_token_ids.clear();
    // There are no other ranks to take prompts from, no scores to drop groups by, and no warm-up in later steps.
    config.rollout.work_stealing = false;
    config.rollout.dynamic_sampling = DynamicSampling::default();
    config.ppo.critic_warmup_steps = 0;
    // The labels of planned rows are the first reward token.
    let rewards = config.step_reward.reward_tokens.len();
    config.step_reward.reward_tokens = (0..rewards).map(|i| i.to_string()).collect();
    let swap = planned.placements.first().map(|(_, layout)| layout.swap).unwrap_or_default();
    config.mesh.offload = swap.offload();
    let rule = vec![RuleConfig { kind: RuleKind::Length, ..RuleConfig::default() }];
    let RewardConfig { mut models, judge, .. } = std::mem::take(&mut config.reward);
    let given = || ModelRewardConfig { dir: "the given reward model".into(), ..ModelRewardConfig::default() };
    models.extend(has_given_reward(planned).then(given));
    config.reward = RewardConfig { rule, models, judge, ..RewardConfig::default() };
    let world = World::null(planned.rank, size);
    let ranks = Ranks::new(world, planned.placements.clone(), false)?;
    let recorder = Recorder::silent(&config.metrics);
    if planned.gpu.is_some() {
        gpu::join(&config, &ranks)?;
    }
    let forwards = planned.gpu.map(|gpu| Expected { forwards: gpu.forward_bytes, ..Expected::default() });
    Ok(Run {
        config,
        config_hash: String::new(),
        dir: PathBuf::new(),
        device: if planned.gpu.is_some() { Device::Cuda } else { Device::Cpu },
        no_gpu: None,
        device_rows: Vec::new(),
        gemm: planned.gpu.map(|PlannedGpu { fast, .. }| GemmChoice { fast, ..GemmChoice::default() }),
        plan: Expectations { expected: vec![forwards; ranks.placements.len()], ..Expectations::default() },
        ranks,
        recorder,
        dry_run: false,
        replay: None,
        lacks: Lacks::default(),
        started: Instant::now(),
        has_learned: false,
        // The ranks of a plan run in turn, so each counts its own memory.
        runs_ahead: false,
        must_finish: Cell::new(false),
        trace_asked: Cell::new(false),
        reward_wait_s: Cell::new(0.0),
        resident_at_start: 0,
        peak_flops: 0.0,
    })
}
