//! The metrics that every kind of job adds to a step: times, throughput and memory.

use super::placement;
use super::timers::Timers;
use crate::data::balance::Cost;
use crate::error::Result;
use crate::launch::run::Run;
use crate::launch::step_shape::StepShape;
use crate::metrics::keys::{Metrics, named};
use crate::metrics::{Phases, keys};
use crate::model::{Arch, Head, ParamTable};

/// Model FLOPs of a step with samples of `lengths` tokens, as if all its models had the shape `arch`.
pub fn flops(run: &Run, arch: &Arch, shape: &StepShape, lengths: &[usize]) -> f64 {
    let cost = Cost::from_arch(arch);
    let forward: f64 = lengths.iter().map(|&tokens| cost.flops(tokens)).sum();
    let old = shape.has_rollout() && run.recomputes_old_logprobs();
    let forwards = usize::from(shape.has_rollout()) + usize::from(old) + shape.scored;
    forward * (forwards as f64 + passes(arch) * shape.trained_passes() as f64)
}

/// What training costs, in forwards: the forward, the gradients of its inputs, and those of the weights that train.
fn passes(arch: &Arch) -> f64 {
    let parameters = |arch: &Arch| ParamTable::new(arch, Head::LanguageModel).parameters() as f64;
    let share = |_| parameters(arch) / parameters(&Arch { tuning: None, ..arch.clone() });
    2.0 + arch.tuning.as_ref().map_or(1.0, share)
}

/// Records the metrics of a step, with its times, its throughput and the memory.
pub fn record(
    run: &mut Run,
    step: u64,
    (phases, timers): (&Phases, &Timers),
    mut metrics: Metrics,
    flops: f64,
) -> Result<()> {
    let tokens = metrics.iter().find(|(key, _)| key == keys::TOKENS).map_or(0.0, |(_, tokens)| *tokens);
    metrics.extend(named(placement::phases(&run.ranks, phases)?.values(tokens as u64)));
    let seconds = metrics.iter().find(|(key, _)| key == keys::TIME_STEP_S).map_or(0.0, |(_, seconds)| *seconds);
    let peak = seconds * run.peak_flops;
    metrics.extend((peak > 0.0).then(|| (keys::MFU.to_string(), flops / peak)));
    metrics.extend(named(timers.values(&run.ranks)));
    metrics.extend(named(run.memory_peaks()));
    let recorded = run.recorder.step(step, &metrics);
    run.ranks.all.agree(recorded)
}
