//! An optimizer step of a small model on a GPU, held to the CPU's from the same gradient.

use super::role::Learner;
use super::trial::within;
use crate::comm::Axes;
use crate::config::optim::{OptimConfig, Schedule};
use crate::device::Device;
use crate::error::Result;
use crate::model::ParamSpec;
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

/// Lets `learner` make the step of the gradient that it holds.
///
/// # Errors
/// `Fault`, naming what differs.
pub fn compare(learner: &mut Learner) -> Result<()> {
    let (axes, config) = (Axes::one(), optim());
    let (mut params, gradient) = (master(learner), learner.sum.grads.to_vec());
    let specs = learner.role.weights.table.specs();
    let vectors: Vec<_> = specs.iter().filter(|spec| !spec.decays()).map(ParamSpec::range).collect();
    let partition = learner.zero.partition().clone();
    let mut zero = Zero::on(Device::Cpu, &config, partition.clone(), &vectors);
    let stats = zero.measure(|u| &gradient[partition.own(u)], &axes.zero, &axes.tensor)?;
    let update = zero.begin(LR, stats.clip_scale);
    for u in 0..partition.units() {
        let own = partition.own(u);
        zero.apply(update, u, &mut params[own.clone()], &gradient[own]);
    }
    learner.sum.end_chunk(0);
    learner.step(&axes)?;
    let gap = (learner.report.grad_norm / stats.grad_norm - 1.0).abs();
    within(|| "the norm of a gradient".into(), gap, NORM_APART, "of it")?;
    let (updated, weights) = (master(learner), learner.role.weights.all_f32());
    let specs = learner.role.weights.table.specs();
    for spec in specs {
        for i in spec.range() {
            let (a, b, held) = (updated[i], params[i], weights[i]);
            let most = BY_RATE * LR + BY_WEIGHT * f64::from(b.abs());
            let gap = f64::from((a - b).abs());
            within(|| format!("an updated weight of {}", spec.name), gap / LR, most / LR, "steps")?;
            let rounding = f64::from((half::bf16::from_f32(a).to_f32() - held).abs());
            within(|| format!("a bf16 weight of {}", spec.name), rounding, 0.0, "from its rounded master")?;
        }
    }
    Ok(())
}

/// The f32 weights as they lie.
fn master(learner: &Learner) -> Vec<f32> {
    learner.slices("weights").into_iter().flat_map(|(_, values)| values.into_owned()).collect()
}
