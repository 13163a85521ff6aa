//! The input of a plan: the models of a job, its rows, and the shape of a step.

use super::rows::Rows;
use crate::config::Config;
use crate::config::job::Gemm;
use crate::config::mesh::{Placement, RoleName};
use crate::config::optim::GradientOrder;
use crate::data::RowTokens;
use crate::data::balance::Cost;
use crate::error::{Error, Result};
use crate::launch::layout::Layout;
use crate::launch::step_shape::StepShape;
use crate::learn::accumulation;
use crate::mesh::Mesh;
use crate::rng::{Purpose, Rng};
use crate::train::{self, Archs};
use std::ops::Range;

/// The most minibatches that are counted.
const MINIBATCHES_MAX: usize = 32;

/// A job to plan.
#[derive(Clone, Debug)]
pub struct Job<'a> {
    pub config: &'a Config,
    pub archs: &'a Archs,
    pub shape: StepShape,
    pub rows: Rows,
    /// Whether GEMMs of many rows on a GPU use, or may use, cuBLASLt.
    pub fast: bool,
    /// Whether that library keeps its workspace.
    pub workspace: bool,
}

/// Roles that have a model, and their ranks.
pub type RolesOnRanks = (Vec<RoleName>, Range<usize>);

/// A micro-batch: whole rows in one packed row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Microbatch {
    pub tokens: usize,
    pub rows: usize,
}

impl<'a> Job<'a> {
    /// A job with rows as long as it allows, unless rows are given.
    pub fn new(config: &'a Config, archs: &'a Archs, rows: Option<Rows>) -> Self {
        let mut shape = train::shape(config);
        let rows = rows.unwrap_or_else(|| Rows::longest(config, &shape, archs.actor().context, ""));
        if shape.trained == 0 {
            shape.rows = rows.evaluated.len();
        }
        let fast = config.job.gemm != Gemm::Exact;
        Self { config, archs, shape, rows, fast, workspace: fast }
    }

    /// Whether log-probabilities are recomputed in the training layout.
    pub fn recomputes_logprobs(&self, layout: &Layout) -> bool {
        let fast = self.config.job.may_be_fast();
        self.shape.has_rollout() && self.config.recomputes_old_logprobs(&layout.mesh, &layout.rollout(), fast)
    }

    /// The same job with responses of the expected length, if they are expected to be shorter than the longest.
    pub fn expected(&self) -> Option<(Config, Rows)> {
        let tokens = self.config.rollout.response_tokens_expected;
        let is_shorter = self.rows.drawn.iter().any(|row| row.response > tokens);
        (self.shape.has_rollout() && tokens > 0 && is_shorter).then(|| {
            let (mut config, mut rows) = (self.config.clone(), self.rows.clone());
            let rollout = &mut config.rollout;
            rollout.response_tokens_max = tokens.min(rollout.response_tokens_max);
            rollout.response_tokens_min = tokens.min(rollout.response_tokens_min);
            rollout.response_tokens_schedule.clear();
            for row in rows.drawn.iter_mut().chain(&mut rows.evaluated) {
                row.response = tokens.min(row.response);
            }
            (config, rows)
        })
    }

    /// The number of steps that are counted: steps with known rows, or one if all rows are alike.
    pub fn looked_at(&self) -> usize {
        let known = self.rows.drawn.len() / self.shape.rows.max(1);
        if self.rows.are_alike() { 1 } else { known.max(1) }
    }

    /// Tokens of each sample of step `step`, counted from 0, in the order of their rows.
    fn lengths_of(&self, step: usize) -> Vec<usize> {
        let StepShape { rows, samples_per_row, .. } = self.shape;
        let length = |i: usize| self.rows.at(step * rows + i).all();
        (0..rows).flat_map(|i| std::iter::repeat_n(length(i), samples_per_row)).collect()
    }

    /// The lengths in each minibatch of step `step`. If all rows are alike, there is one minibatch.
    fn minibatches(&self, step: usize) -> Vec<Vec<usize>> {
        let (lengths, size) = (self.lengths_of(step), self.shape.minibatch.max(1));
        if size >= lengths.len() || self.rows.are_alike() {
            return lengths.chunks(size).take(1).map(<[usize]>::to_vec).collect();
        }
        let (rng, epochs) = (Rng::new(self.config.job.seed, Purpose::Shuffle), self.shape.passes());
        // As `train::ppo` deals the samples of a step, which counts from 1.
        let orders = (0..epochs).map(|epoch| rng.permutation(lengths.len(), ((step + 1) * epochs + epoch) as u32));
        let dealt = orders.flat_map(|order| order.chunks(size).map(<[usize]>::to_vec).collect::<Vec<_>>());
        dealt.take(MINIBATCHES_MAX).map(|chosen| chosen.into_iter().map(|i| lengths[i]).collect()).collect()
    }

    /// The micro-batches of the counted minibatches: `[minibatch][data rank][micro-batch]`.
    pub fn training(&self, mesh: &Mesh) -> Vec<Vec<Vec<Microbatch>>> {
        let minibatches = (0..self.looked_at()).flat_map(|step| self.minibatches(step));
        minibatches.take(MINIBATCHES_MAX).map(|lengths| self.cut(&lengths, mesh)).collect()
    }

    fn cut(&self, lengths: &[usize], mesh: &Mesh) -> Vec<Vec<Microbatch>> {
        let (gradient, cost) = (&self.config.gradient, Cost::from_arch(self.archs.actor()));
        // The job itself rejects trees over other numbers of ranks.
        let order = if mesh.data.is_power_of_two() { gradient.order } else { GradientOrder::Fast };
        let tokens_max = (self.shape.microbatch_tokens_max * mesh.sequence).max(1);
        let chunks = accumulation::chunks(order, gradient.chunks, &cost, lengths, mesh.data, tokens_max);
        let of = |rows: &Vec<usize>| Microbatch { tokens: rows.iter().map(|&i| lengths[i]).sum(), rows: rows.len() };
        chunks.iter().map(|own| own.iter().flat_map(|chunk| &chunk.microbatches).map(of).collect()).collect()
    }

    /// The mean number of micro-batches of an update, and of all samples of a step.
    pub fn microbatches(&self, mesh: &Mesh) -> [f64; 2] {
        let training = self.training(mesh);
        let all: usize = training.iter().map(|ranks| ranks.first().map_or(0, Vec::len)).sum();
        let of_update = all as f64 / training.len().max(1) as f64;
        let samples = (self.shape.rows * self.shape.samples_per_row) as f64;
        [of_update.max(1.0), (of_update * samples / self.shape.minibatch.max(1) as f64).max(1.0)]
    }

    /// The first of the data ranks that have the fullest micro-batch.
    pub fn fullest_rank(&self, mesh: &Mesh) -> usize {
        let training = self.training(mesh);
        let fullest = |rank: &usize| training.iter().flat_map(|ranks| &ranks[*rank]).map(|batch| batch.tokens).max();
        (0..mesh.data).rev().max_by_key(fullest).unwrap_or(0)
    }

    /// The fullest micro-batch of training, over all ranks.
    pub fn fullest(&self, mesh: &Mesh) -> Microbatch {
        self.training(mesh).into_iter().flatten().flatten().max().unwrap_or_default()
    }

    /// Prompt and response tokens of a step over all ranks, the mean of the counted steps.
    pub fn tokens_of_a_step(&self) -> usize {
        let steps = self.looked_at();
        (0..steps).flat_map(|step| self.lengths_of(step)).sum::<usize>() / steps
    }

    /// The most images that a rank sees in the whole job: in its rows, and in rows that other ranks sampled.
    pub fn images_of_a_rank(&self, layout: &Layout) -> usize {
        let count = |rows: &[RowTokens]| rows.iter().map(|row| row.images.count).sum::<usize>();
        let (drawn, steps) = (&self.rows.drawn, self.config.job.steps as usize);
        let seen = if steps == 0 || self.shape.trained == 0 {
            self.rows.images
        } else {
            count(&self.rows.evaluated) + (steps * self.shape.rows * count(drawn)).div_ceil(drawn.len())
        };
        let times = if self.shape.has_rollout() { 2 } else { 1 };
        (seen.min(self.rows.images) * times).div_ceil(layout.mesh.data).min(self.rows.images)
    }

    /// The roles that have a model, by their ranks.
    ///
    /// # Errors
    /// `Usage` if a role has no placement.
    pub fn parts(&self, world: usize) -> Result<Vec<RolesOnRanks>> {
        let there = || self.archs.0.iter().map(|(role, ..)| *role);
        let of = |placement: Placement| {
            let roles: Vec<RoleName> = there().filter(|role| placement.roles.contains(role)).collect();
            // A part with only a reward without a model is not planned.
            (!roles.is_empty()).then_some((roles, placement.ranks))
        };
        let parts: Vec<RolesOnRanks> = self.config.mesh.placements(world)?.into_iter().filter_map(of).collect();
        match there().find(|role| !parts.iter().any(|(roles, _)| roles.contains(role))) {
            None => Ok(parts),
            Some(role) => Err(no_place(role)),
        }
    }

    /// Rejects jobs that no layout supports.
    ///
    /// # Errors
    /// `Usage` or `Data`, naming the keys.
    pub fn check(&self) -> Result<()> {
        let context = self.archs.actor().context;
        let wrong = |row: &&RowTokens| row.prompt == 0 || row.response == 0 || row.all() > context;
        let Some(RowTokens { prompt, response, .. }) = self.rows.drawn.iter().find(wrong) else { return Ok(()) };
        let hint = if self.shape.has_rollout() {
            "lower data.prompt_tokens_max or rollout.response_tokens_max"
        } else {
            "lower data.row_tokens_max"
        };
        Err(Error::usage(format!(
            "rows must fit the actor's context of {context} tokens (got {prompt} prompt and {response} response tokens)"
        ))
        .hint(hint))
    }
}

/// The error if `mesh.placement` leaves out a role that the job needs.
pub fn no_place(role: RoleName) -> Error {
    Error::usage(format!("mesh.placement has no place for the {}", role.name()))
        .hint("add it to the roles of one of the entries")
}
