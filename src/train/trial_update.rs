//! Optimizer steps of a small model on a GPU, held to the CPU's from the same gradients. Ranks that divide the model between them
//! each look at what they update.

use super::trial::within;
use crate::comm::Axes;
use crate::config::optim::{OptimConfig, Schedule};
use crate::device::Device;
use crate::device::cuda::Memory;
use crate::error::{Error, Result};
use crate::learn::Learner;
use crate::model::ParamSpec;
use crate::optim::away::Vector;
use crate::optim::zero::Zero;
use crate::tensor::{DType, Flat};

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
    /// The same state on the GPU, for a learner's that waits in the host's memory between updates.
    there: Option<Zero>,
}

impl Beside {
    /// Of a learner that has made no step yet; `away`: its state waits in the host's memory.
    pub fn new(learner: &Learner, away: bool) -> Self {
        let specs = learner.role.weights.table.specs();
        let vectors: Vec<_> = specs.iter().filter(|spec| !spec.decays()).map(ParamSpec::range).collect();
        let copies: Vec<_> = specs.iter().map(|spec| (spec.range(), spec.copies)).collect();
        let partition = learner.zero.partition().clone();
        let params: Vec<Vec<f32>> = (0..partition.units()).map(|u| master(learner, u)).collect();
        let there = away.then(|| {
            let master = Flat::scratch(Device::Cuda, partition.own_len());
            let there = Zero::on(Device::Cuda, &optim(), partition.clone(), &vectors).with_copies(&copies);
            let mut there = there.with_master(master);
            params.iter().enumerate().for_each(|(u, params)| there.set_state(Vector::Master, u, 0, params));
            there
        });
        Self { zero: Zero::on(Device::Cpu, &optim(), partition, &vectors).with_copies(&copies), params, there }
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
        let there = self.there.as_mut().map_or(Ok(()), |there| step(there, learner, axes));
        let stats = stepped.and(stats)?;
        there?;
        if let Some(there) = &self.there {
            same_state(learner, there)?;
        }
        let update = self.zero.begin(LR, stats.clip_scale);
        for (u, params) in self.params.iter_mut().enumerate() {
            self.zero.apply(update, u, params, &own[u][..]);
        }
        let gap = (learner.report.grad_norm / stats.grad_norm - 1.0).abs();
        within(|| "the norm of a gradient".into(), gap, NORM_APART, "of it")?;
        for (u, params) in self.params.iter().enumerate() {
            let range = partition.own(u);
            let (updated, weights) = (master(learner, u), learner.role.weights.to_master(range.clone()));
            let name = |i: usize| learner.role.weights.table.name_at(range.start + i);
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

/// Makes the step of the gradient that `learner` holds on the GPU alone. All ranks of `axes` call this.
fn step(there: &mut Zero, learner: &Learner, axes: &Axes) -> Result<()> {
    let grads = &learner.sum.grads;
    let stats = there.measure(|u| grads.own(u), &axes.zero, &axes.tensor)?;
    let update = there.begin(LR, stats.clip_scale);
    for u in 0..there.partition().units() {
        let len = there.partition().own(u).len();
        let mut weights = Memory::scratch(len * DType::Bf16.bytes());
        there.apply_cuda(update, u, weights.view_mut(DType::Bf16), grads.own(u));
    }
    there.settle();
    Ok(())
}

/// State that has waited in the host's memory is, bit by bit, that which stayed on the GPU.
fn same_state(learner: &Learner, there: &Zero) -> Result<()> {
    let (partition, table) = (there.partition(), &learner.role.weights.table);
    for u in 0..partition.units() {
        for (what, vector) in
            [("master weight", Vector::Master), ("first moment", Vector::First), ("second moment", Vector::Second)]
        {
            let of = |zero: &Zero| zero.state(vector, u).expect("weights in bf16 have a master").to_host();
            let (got, want) = (of(&learner.zero), of(there));
            let Some(i) = got.iter().zip(&want).position(|(a, b)| a.to_bits() != b.to_bits()) else { continue };
            let name = table.name_at(partition.own(u).start + i);
            let words = format!("a {what} of {name} is {:e}, and {:e} where it never left the GPU", got[i], want[i]);
            return Err(Error::fault(words));
        }
    }
    Ok(())
}

/// The f32 weights of the own range of a unit.
fn master(learner: &Learner, unit: usize) -> Vec<f32> {
    learner.zero.state(Vector::Master, unit).expect("weights in bf16 have a master").to_host()
}
