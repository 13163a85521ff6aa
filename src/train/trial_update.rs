//! Optimizer steps of a small model on a GPU, held to the CPU's from the same gradients. Ranks that divide the model between them
//! each look at what they update.

use super::role::Learner;
use super::trial::within;
use crate::comm::Axes;
use crate::config::optim::{OptimConfig, Schedule};
use crate::device::Device;
use crate::error::Result;
use crate::model::ParamSpec;
use crate::optim::away::Vector;
use crate::optim::zero::Zero;

/// f32 on both sides: apart by the learning rate, and by the weight; and norms of the gradient, by the CPU's.
const BY_RATE: f64 = 1e-3;
const BY_WEIGHT: f64 = 1e-6;
const NORM_APART: f64 = 1e-4;
const LR: f64 = 1e-2;

/// With all that a step may do: decay, clipping, moments.
pub fn optim() -> OptimConfig {
    OptimConfig {
        weight_decay: 0.1,
        clip_norm: 0.5,
        schedule: Schedule::Constant,
        warmup_ratio: 0.0,
        ..OptimConfig::with_lr(LR)
    }
}

/// What a learner updates, on the CPU.
pub struct Beside {
    zero: Zero,
    /// Master weights of the own range of each unit.
    params: Vec<Vec<f32>>,
}

impl Beside {
    /// Of a learner that has made no step yet.
    pub fn new(learner: &Learner) -> Self {
        let specs = learner.role.weights.table.specs();
        let vectors: Vec<_> = specs.iter().filter(|spec| !spec.decays()).map(ParamSpec::range).collect();
        let copies: Vec<_> = specs.iter().map(|spec| (spec.range(), spec.copies)).collect();
        let partition = learner.zero.partition().clone();
        let params = (0..partition.units()).map(|u| master(learner, u)).collect();
        Self { zero: Zero::on(Device::Cpu, &optim(), partition, &vectors).with_copies(&copies), params }
    }

    /// Lets `learner` make the step of the gradient that it holds, and makes it here. All ranks of `axes` call this.
    ///
    /// # Errors
    /// `Fault`, naming what differs.
    pub fn compare(&mut self, learner: &mut Learner, axes: &Axes) -> Result<()> {
        let stepped = learner.step(axes);
        let partition = self.zero.partition().clone();
        let own: Vec<Vec<f32>> = (0..partition.units()).map(|u| learner.sum.grads.own(u).to_host()).collect();
        let stats = self.zero.measure(|u| &own[u][..], &axes.zero, &axes.tensor);
        let stats = stepped.and(stats)?;
        let update = self.zero.begin(LR, stats.clip_scale);
        for (u, params) in self.params.iter_mut().enumerate() {
            self.zero.apply(update, u, params, &own[u][..]);
        }
        let gap = (learner.report.grad_norm / stats.grad_norm - 1.0).abs();
        within(|| "the norm of a gradient".into(), gap, NORM_APART, "of it")?;
        for (u, params) in self.params.iter().enumerate() {
            let range = partition.own(u);
            let (updated, weights) = (master(learner, u), learner.role.weights.to_master(range.clone()));
            let name = |i: usize| {
                let specs = learner.role.weights.table.specs();
                specs.iter().find(|spec| spec.range().contains(&(range.start + i))).map_or("", |spec| &spec.name)
            };
            for (i, ((a, b), held)) in updated.iter().zip(params).zip(&weights[..]).enumerate() {
                let most = BY_RATE * LR + BY_WEIGHT * f64::from(b.abs());
                let gap = f64::from((a - b).abs());
                within(|| format!("an updated weight of {}", name(i)), gap / LR, most / LR, "steps")?;
                let rounding = f64::from((half::bf16::from_f32(*a).to_f32() - held).abs());
                within(|| format!("a bf16 weight of {}", name(i)), rounding, 0.0, "from its rounded master")?;
            }
        }
        Ok(())
    }
}

/// The f32 weights of the own range of a unit.
fn master(learner: &Learner, unit: usize) -> Vec<f32> {
    learner.zero.state(Vector::Master, unit).expect("weights in bf16 have a master").to_host()
}
