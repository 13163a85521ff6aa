//! The models of a run: those that only answer (`Role`) and those that learn (`Learner`).

use crate::comm::Axes;
use crate::config::job::GradientConfig;
use crate::config::optim::OptimConfig;
use crate::error::Result;
use crate::gradient::sum::GradientSum;
use crate::model::params::ParamSpec;
use crate::model::{Arch, Gradients, Head, Transformer, Weights, load};
use crate::optim::schedule::lr_at;
use crate::optim::zero::Zero1;
use crate::tensor::DType;
use crate::tensor::arena::Buffer;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A model with a part to play: actor, critic or reference.
pub struct Role {
    pub name: &'static str,
    pub dir: PathBuf,
    pub transformer: Transformer,
    pub weights: Weights,
}

impl Role {
    pub fn load(name: &'static str, dir: &Path, head: Head, dtype: DType, seed: u64) -> Result<Self> {
        let (arch, weights) = load::load(dir, head, dtype, seed).map_err(|e| e.within(format!("model.{name}")))?;
        let transformer = Transformer::new(&arch, &weights.table);
        Ok(Self { name, dir: dir.to_path_buf(), transformer, weights })
    }

    pub fn arch(&self) -> &Arch {
        &self.transformer.arch
    }
}

/// What the last optimiser step reports.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepReport {
    /// Before clipping.
    pub grad_norm: f64,
    pub lr: f64,
}

/// A role with gradients and its slice of the optimiser state (ZeRO-1, arXiv:1910.02054).
pub struct Learner {
    pub role: Role,
    pub sum: GradientSum,
    pub zero: Zero1,
    pub report: StepReport,
    optim: OptimConfig,
    /// Optimiser steps of the whole run: the length of the schedule.
    updates_total: u64,
}

impl Learner {
    pub fn new(
        role: Role,
        optim: &OptimConfig,
        gradient: &GradientConfig,
        updates_total: u64,
        axes: &Axes,
    ) -> Result<Self> {
        let group = &axes.zero;
        let table = &role.weights.table;
        let vectors: Vec<_> = table.specs().iter().filter(|s| !s.decays()).map(ParamSpec::range).collect();
        let zero = match role.weights.dtype() {
            DType::F32 => Zero1::new(optim, table.len(), group, &vectors),
            DType::Bf16 => Zero1::with_master(optim, &role.weights.to_master(0..table.len()), group, &vectors),
        };
        let sum = GradientSum::new(Gradients::new(table.clone()), gradient, group.size())?;
        Ok(Self { role, sum, zero, report: StepReport::default(), optim: optim.clone(), updates_total })
    }

    /// Sums the gradient over ranks, clips it, and updates the weights of all ranks.
    pub fn step(&mut self, axes: &Axes) -> Result<()> {
        let lr = lr_at(&self.optim, self.zero.updates, self.updates_total);
        let group = &axes.zero;
        self.sum.finish();
        let order = self.sum.order;
        let (weights, grads) = (&mut self.role.weights, &mut self.sum.grads.flat);
        let stats = match weights.dtype() {
            DType::F32 => self.zero.step(weights.flat_f32_mut(), grads, group, lr, order),
            DType::Bf16 => {
                let stats =
                    self.zero.step_master(grads, group, lr, order, |range, master| weights.store_master(range, master));
                self.publish(axes);
                stats
            }
        };
        let stats = stats.map_err(|e| e.within(self.role.name))?;
        self.report = StepReport { grad_norm: stats.grad_norm, lr };
        Ok(())
    }

    /// f32 values of this rank's slice of the weights.
    pub fn master(&self) -> Buffer {
        match &self.zero.master {
            Some(master) => master.clone(),
            None => self.role.weights.to_master(self.zero.own()),
        }
    }

    /// Sets this rank's slice of weights and optimiser state: `read(what, flat range, out)` gives the numbers of
    /// `weights`, `m` and `v`. `publish` then makes the weights everyone's.
    pub fn restore(
        &mut self,
        updates: u64,
        mut read: impl FnMut(&str, Range<usize>, &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        let own = self.zero.own();
        self.zero.updates = updates;
        read("m", own.clone(), &mut self.zero.m)?;
        read("v", own.clone(), &mut self.zero.v)?;
        let mut master = Buffer::scratch(own.len());
        read("weights", own.clone(), &mut master)?;
        self.role.weights.store_master(own, &master);
        if self.zero.master.is_some() {
            self.zero.master = Some(master);
        }
        Ok(())
    }

    /// Gathers the slices of all ranks into everyone's weights.
    pub fn publish(&mut self, axes: &Axes) {
        let group = &axes.zero;
        let weights = &mut self.role.weights;
        match weights.dtype() {
            DType::F32 => group.all_gather(weights.flat_f32_mut(), self.zero.partition().ranges()),
            DType::Bf16 => {
                group.all_gather_u16(weights.flat_bf16_mut(), self.zero.partition().ranges());
                weights.refresh();
            }
        }
    }
}
