//! What memory and time of a job follow from: its models, its rows, and how a step is cut.

use super::rows::{Row, Rows};
use super::shape::Layout;
use crate::config::Config;
use crate::config::job::{Gemm, JobKind};
use crate::config::mesh::{Placement, RoleName};
use crate::config::optim::GradientOrder;
use crate::data::RowTokens;
use crate::error::{Error, Result};
use crate::learn::tree_sum::waiting_max;
use crate::model::{Arch, Head};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The models of a job, from the config.json of their directories alone.
#[derive(Clone, Debug, PartialEq)]
pub struct Archs {
    pub actor: Arch,
    pub critic: Option<Arch>,
    pub reference: Option<Arch>,
    pub reward: Option<Arch>,
}

impl Archs {
    /// Reads the directories that `config` names; `reward` is that of a reward model, where there is one (else the first
    /// of `reward.models`).
    ///
    /// # Errors
    /// `Data` where a config.json is missing or cannot be used.
    pub fn load(config: &Config, reward: Option<&Path>) -> Result<Self> {
        let read = |name: &str, dir: &Path| Arch::load(dir).map_err(|e| e.within(format!("model.{name}")));
        let actor = read("actor", &config.model.actor)?;
        if config.job.kind != JobKind::Ppo {
            return Ok(Self { actor, critic: None, reference: None, reward: None });
        }
        let critic =
            config.ppo.advantage.has_critic().then(|| read("critic", config.model.critic_dir())).transpose()?;
        let reference =
            config.needs_reference().then(|| read("reference", config.model.reference_dir())).transpose()?;
        let named: Option<PathBuf> = config.reward.models.first().map(|dir| config.base.join(dir));
        let dir = reward.map(Path::to_path_buf).or(named);
        let reward = dir.map(|dir| Arch::load(&dir).map_err(|e| e.within("reward model"))).transpose()?;
        Ok(Self { actor, critic, reference, reward })
    }

    /// The roles that have a model, in the order in which they are loaded.
    pub fn roles(&self) -> Vec<(RoleName, &Arch)> {
        let others = [
            (RoleName::Reference, &self.reference),
            (RoleName::Critic, &self.critic),
            (RoleName::Reward, &self.reward),
        ];
        let others = others.into_iter().filter_map(|(role, arch)| Some((role, arch.as_ref()?)));
        std::iter::once((RoleName::Actor, &self.actor)).chain(others).collect()
    }

    pub fn of(&self, role: RoleName) -> Option<&Arch> {
        self.roles().into_iter().find(|(r, _)| *r == role).map(|(_, arch)| arch)
    }
}

/// The head that a role has.
pub fn head_of(role: RoleName) -> Head {
    match role {
        RoleName::Actor | RoleName::Reference => Head::LanguageModel,
        RoleName::Critic | RoleName::Reward => Head::Value,
    }
}

/// Whether a role is trained.
pub fn learns(role: RoleName) -> bool {
    matches!(role, RoleName::Actor | RoleName::Critic)
}

/// A job as a rank of it would run it.
#[derive(Clone, Debug)]
pub struct Planned<'a> {
    pub config: &'a Config,
    pub archs: &'a Archs,
    pub placements: Vec<(Placement, Layout)>,
    pub rank: usize,
    /// Rows in the order in which the job draws them, and those that it evaluates.
    pub rows: Vec<RowTokens>,
    pub eval: Vec<RowTokens>,
    pub steps: u64,
    /// Where the job runs on GPUs: how these compute.
    pub gpu: Option<PlannedGpu>,
}

/// A GPU of a planned job.
#[derive(Clone, Copy, Debug)]
pub struct PlannedGpu {
    /// Whether products of many rows are cuBLASLt's, and whether its workspace is kept.
    pub fast: bool,
    pub workspace: bool,
    /// What CUDA and its libraries keep.
    pub program_bytes: usize,
    /// Bytes that the rollout's forwards take beside the cache, at most.
    pub forward_bytes: usize,
}

/// Opens a job on a null device and takes its steps: `train::planned::run`.
pub type Runner = fn(Planned) -> Result<()>;

/// A step of a job.
#[derive(Clone, Debug)]
pub struct Job<'a> {
    pub config: &'a Config,
    pub archs: &'a Archs,
    pub rows: Rows,
    /// Whether products of many rows on a GPU are, or may be, those of a library.
    pub fast: bool,
    /// Whether that library keeps what it works in.
    pub workspace: bool,
    /// Takes steps of a job on a null device.
    pub runner: Runner,
}

impl<'a> Job<'a> {
    /// A job with rows as long as it allows where none are given.
    pub fn new(config: &'a Config, archs: &'a Archs, rows: Option<Rows>, runner: Runner) -> Self {
        let rows = rows.unwrap_or_else(|| Rows::longest(config, archs.actor.context, ""));
        let fast = config.job.gemm != Gemm::Exact;
        Self { config, archs, rows, fast, workspace: fast, runner }
    }

    pub fn is_ppo(&self) -> bool {
        self.config.job.kind == JobKind::Ppo
    }

    /// Rows of one step, over all ranks.
    pub fn samples(&self) -> usize {
        match self.config.job.kind {
            JobKind::Ppo => self.config.rollout.prompts_per_step * self.config.rollout.samples_per_prompt,
            JobKind::Sft => self.config.sft.minibatch_samples,
        }
    }

    /// Rows of one optimiser step, over all ranks.
    pub fn minibatch(&self) -> usize {
        match self.config.job.kind {
            JobKind::Ppo => self.config.ppo.minibatch_samples.min(self.samples()),
            JobKind::Sft => self.samples(),
        }
    }

    /// Optimiser steps of one step.
    pub fn updates(&self) -> usize {
        match self.config.job.kind {
            JobKind::Ppo => self.config.ppo.epochs * self.samples().div_ceil(self.minibatch()),
            JobKind::Sft => 1,
        }
    }

    /// Rows that go through training in one step, over all ranks.
    pub fn trained(&self) -> usize {
        match self.config.job.kind {
            JobKind::Ppo => self.config.ppo.epochs * self.samples(),
            JobKind::Sft => self.samples(),
        }
    }

    /// The budget of a micro-batch.
    pub fn tokens_max(&self) -> usize {
        match self.config.job.kind {
            JobKind::Ppo => self.config.ppo.microbatch_tokens_max,
            JobKind::Sft => self.config.sft.microbatch_tokens_max,
        }
    }

    /// Whether log-probabilities are computed once more in the layout of training.
    pub fn recomputes_logprobs(&self, layout: &Layout) -> bool {
        let fast = self.config.job.may_be_fast();
        self.is_ppo() && self.config.ppo.recomputes_old_logprobs(&layout.mesh, &layout.rollout(), fast)
    }

    /// Copies of the gradient that one learner holds during a forward and backward: that of the chunk at work and, under
    /// `gradient.order = "fixed"`, the sums that wait for it in the binary tree.
    pub fn gradient_copies(&self, data_ranks: usize) -> usize {
        match self.config.gradient.order {
            GradientOrder::Fast => 1,
            GradientOrder::Fixed => 1 + waiting_max(self.config.gradient.chunks, data_ranks),
        }
    }

    /// The roles that have a model, by the ranks that they are on.
    ///
    /// # Errors
    /// `Usage` where a role has no placement.
    pub fn parts(&self, world: usize) -> Result<Vec<(Vec<RoleName>, Range<usize>)>> {
        let there: Vec<RoleName> = self.archs.roles().into_iter().map(|(role, _)| role).collect();
        let of = |placement: Placement| {
            let roles: Vec<RoleName> = there.iter().copied().filter(|role| placement.roles.contains(role)).collect();
            // Where there is only the reward, and no model for it, nothing is planned.
            (!roles.is_empty()).then_some((roles, placement.ranks))
        };
        let parts: Vec<(Vec<RoleName>, Range<usize>)> =
            self.config.mesh.placements(world)?.into_iter().filter_map(of).collect();
        let placed = |role: &&RoleName| parts.iter().any(|(roles, _)| roles.contains(role));
        match there.iter().find(|role| !placed(role)) {
            None => Ok(parts),
            Some(role) => Err(Error::usage(format!("mesh.placement has no place for the {}", role.name()))
                .hint("name it in the roles of one of the entries")),
        }
    }

    /// Refuses what no layout could do.
    ///
    /// # Errors
    /// `Usage` or `Data`, naming the keys.
    pub fn check(&self) -> Result<()> {
        let context = self.archs.actor.context;
        let wrong = |row: &&Row| row.prompt == 0 || row.response == 0 || row.tokens() > context;
        let Some(Row { prompt, response, .. }) = self.rows.all().iter().find(wrong) else { return Ok(()) };
        let hint = match self.config.job.kind {
            JobKind::Ppo => "lower data.prompt_tokens_max or rollout.response_tokens_max",
            JobKind::Sft => "lower data.row_tokens_max",
        };
        Err(Error::usage(format!(
            "rows of {prompt} prompt and {response} response tokens, the actor's context is {context}"
        ))
        .hint(hint))
    }
}
