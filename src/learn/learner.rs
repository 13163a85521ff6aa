//! A model that learns: its gradients, and its ranges of the optimizer state.

use super::gradient_norms;
use super::gradient_sum::GradientSum;
use super::head_pass::Pass;
use super::non_finite;
use super::packed::PackedRow;
use super::routing::RouterLoss;
use super::sums::Sums;
use crate::comm::Axes;
use crate::config::job::{GradientConfig, Recompute};
use crate::config::optim::OptimConfig;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::learn::Role;
use crate::learn::role::{key, own_pieces};
use crate::model::Saved;
use crate::model::params::ParamSpec;
use crate::model::partition::Shards;
use crate::optim::host_state::Vector;
use crate::optim::schedule::lr_at;
use crate::optim::zero::Zero;
use crate::sys::trace::{self, Category};
use crate::tensor::Slice;
use crate::tensor::arena::Buffer;
use std::ops::Range;

/// The report of the last optimizer step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepReport {
    /// The gradient norm before clipping.
    pub grad_norm: f64,
    pub lr: f64,
}

/// A role with gradients and its ranges of the optimizer state (ZeRO, arXiv:1910.02054).
pub struct Learner {
    pub role: Role,
    pub sum: GradientSum,
    pub zero: Zero,
    pub report: StepReport,
    /// Rows of each micro-batch of this rank in the minibatch accumulated last, in order.
    pub microbatches: Vec<Vec<usize>>,
    /// Measurements of routers and of the schedule in the minibatch accumulated last, over all ranks.
    pub measured: Sums,
    /// The norm of each parameter's gradient in the last update, by name, if `measures_norms`.
    pub norms: Vec<(String, f64)>,
    pub measures_norms: bool,
    /// The coefficient of the load-balancing loss.
    pub(super) router_loss_coef: f64,
    shards: Shards,
    optim: OptimConfig,
    pub(super) recompute: Recompute,
    /// Optimizer steps of the whole run: the length of the schedule.
    updates_total: u64,
}

impl Learner {
    /// Creates a learner. Between updates its optimizer state is on the device `state_on`, which is the role's own
    /// device or the CPU. Master weights are unspecified until `with_masters` or `restore` sets them. `stage` is the
    /// ZeRO stage that the role was loaded with.
    pub fn new(
        state_on: Device,
        role: Role,
        optim: &OptimConfig,
        gradient: &GradientConfig,
        updates_total: u64,
        axes: &Axes,
        stage: usize,
    ) -> Result<Self> {
        let table = &role.weights.table;
        let shards = Shards::new(table, axes, stage);
        let vectors: Vec<_> = table.specs().iter().filter(|s| !s.decays()).map(ParamSpec::range).collect();
        let copies: Vec<_> = table.specs().iter().map(|spec| (spec.range(), spec.copies)).collect();
        let (device, updated) = (table.device(), shards.updated.clone());
        let has_master = role.weights.dtype() == DType::Bf16;
        let zero = Zero::new([device, state_on], optim, updated, &vectors, has_master).with_copies(&copies);
        let zero = zero.with_stages(table.stages_of_units(axes.pipeline.size(), axes.chunks));
        let sum = GradientSum::new(table, gradient, &shards, axes)?;
        let (optim, recompute) = (optim.clone(), gradient.recompute);
        let (report, microbatches, measured) = (StepReport::default(), Vec::new(), Sums::default());
        Ok(Self {
            role,
            sum,
            zero,
            report,
            microbatches,
            measured,
            norms: Vec::new(),
            measures_norms: false,
            router_loss_coef: 0.0,
            shards,
            optim,
            recompute,
            updates_total,
        })
    }

    /// Adds the load-balancing loss with this coefficient, if the model has routers.
    #[must_use]
    pub fn with_router_loss(mut self, coef: f64) -> Self {
        self.router_loss_coef = coef;
        self
    }

    /// A pass that adds the gradient of a packed row.
    pub fn pass<'a>(&'a mut self, row: &'a PackedRow) -> Pass<'a> {
        let router_loss = RouterLoss::None;
        Pass { role: &self.role, row, saved: Saved::new(self.recompute), grads: &mut self.sum.grads, router_loss }
    }

    /// Sets the master weights, if the weights are not their own masters: to the numbers that the weights were rounded
    /// from, read piece by piece, or to the weights if nothing was rounded. Sets the averages to the master weights.
    pub fn with_masters(mut self) -> Result<Self> {
        let Self { role, zero, shards, .. } = &mut self;
        if role.weights.dtype() != DType::F32 {
            let (source, mut values) = (role.source.take(), Vec::new());
            for (u, part, at) in own_pieces(&shards.updated) {
                let Some(source) = &source else {
                    zero.set_master(u, part, &role.weights);
                    continue;
                };
                values.resize(part.len(), 0.0);
                source.fill_f32(part, &mut values).map_err(|e| e.within(key(role.name)))?;
                zero.set_state(Vector::Master, u, at, &values);
            }
        }
        if zero.has_average() {
            own_pieces(&shards.updated).for_each(|(u, part, _)| zero.begin_average(u, part, &role.weights));
        }
        Ok(self)
    }

    /// The vectors that a checkpoint holds of it.
    pub fn vectors(&self) -> impl Iterator<Item = Vector> + use<> {
        Vector::ALL.into_iter().chain(self.zero.has_average().then_some(Vector::Average))
    }

    /// Replaces the weights by their moving average, if one is kept. Used for an export, after which training ends. All
    /// ranks call this.
    pub fn swap_in_average(&mut self) {
        for (u, part, at) in own_pieces(&self.shards.updated) {
            if let Some(average) = self.zero.state(Vector::Average, u) {
                let values = average.part(at..at + part.len()).to_host();
                self.role.weights.store_master(part, &values);
            }
        }
        self.all_gather();
    }

    /// Sums the gradient over ranks, and returns its norm and its clip factor (`Zero::measure`). A collective.
    pub fn measure(&mut self, axes: &Axes) -> (f64, f32) {
        self.sum.finish();
        self.sum.grads.sum_tied(&axes.tied);
        let grads = &self.sum.grads;
        self.zero.measure(|u| grads.own(u), &axes.zero, &axes.pipeline, &axes.tensor)
    }

    /// Sums the gradient over ranks, clips it, and updates the weights of all ranks. A collective.
    ///
    /// # Errors
    /// `Fault`, the same on all ranks, if the gradient is not finite. Then neither weights nor state have changed.
    pub fn step(&mut self, axes: &Axes) -> Result<()> {
        let lr = lr_at(&self.optim, self.zero.updates, self.updates_total);
        let _span = trace::span(Category::Pass, "optimizer step", "", || []);
        let (grad_norm, clip_scale) = self.measure(axes);
        if !grad_norm.is_finite() {
            return Err(non_finite::of_gradient(&self.role, &self.sum, &self.zero, axes));
        }
        if self.measures_norms {
            self.norms = gradient_norms::by_parameter(&self.role, &self.sum, &self.zero, axes);
        }
        let (weights, grads, zero) = (&mut self.role.weights, &self.sum.grads, &mut self.zero);
        zero.buffers_mut().for_each(Buffer::prefetch_mut);
        let update = zero.begin(lr, clip_scale);
        for u in 0..self.shards.updated.units() {
            zero.apply(update, u, weights, grads.own(u));
            weights.all_gather(u, &self.shards);
        }
        weights.finish_update();
        zero.finish_update();
        zero.buffers().for_each(Buffer::evict);
        self.report = StepReport { grad_norm, lr };
        Ok(())
    }

    /// The values of a vector that this rank writes, as (first flat element, values), in order and in place.
    pub fn stretches(&self, what: Vector) -> Vec<(usize, Slice<'_>)> {
        let (saved, updated) = (&self.shards.partition, &self.shards.updated);
        let all = (0..saved.units()).filter(|u| saved.is_counted(*u)).map(|u| {
            let (range, own) = (saved.own(u), updated.own(u));
            // At stage 0 the state covers the unit, and the range is only a part of it.
            let at = range.start - own.start;
            let values = match self.zero.state(what, u) {
                Some(state) => state.part(at..at + range.len()),
                None => Slice::F32(self.role.weights.local(u).part(&range).f32()),
            };
            (range.start, values)
        });
        all.filter(|(_, values)| !values.is_empty()).collect()
    }

    /// Describes element `at` of a vector: `a weight of the actor's lm_head.weight`.
    pub fn describe_element(&self, what: Vector, at: usize) -> String {
        let what = match what {
            Vector::Master => "a weight",
            Vector::First => "a first moment",
            Vector::Second => "a second moment",
            Vector::Average => "the average of a weight",
        };
        format!("{what} of the {}'s {}", self.role.name, self.role.weights.table.name_at(at))
    }

    /// Sets this rank's ranges of weights and optimizer state. `read(what, flat range, out)` returns the numbers of the
    /// vectors, a few MiB at a time. `all_gather` then sends the weights to all ranks.
    pub fn restore(
        &mut self,
        updates: u64,
        mut read: impl FnMut(Vector, Range<usize>, &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        self.zero.updates = updates;
        let (mut room, vectors): (_, Vec<Vector>) = (Vec::new(), self.vectors().collect());
        for (u, part, at) in own_pieces(&self.shards.updated) {
            room.resize(part.len(), 0.0);
            for &what in &vectors {
                read(what, part.clone(), &mut room)?;
                self.zero.set_state(what, u, at, &room);
                if what == Vector::Master {
                    self.role.weights.store_master(part.clone(), &room);
                }
            }
        }
        self.zero.buffers().for_each(Buffer::evict);
        Ok(())
    }

    /// All-gathers the ranges of all ranks, if each rank holds all weights. A collective.
    pub fn all_gather(&mut self) {
        for u in 0..self.shards.updated.units() {
            self.role.weights.all_gather(u, &self.shards);
        }
        self.role.weights.finish_update();
    }
}
