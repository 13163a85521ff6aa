//! Losses and gradients that are not finite: named with where that began, before anything is updated by them.
//!
//! What a kernel computed is gone by then. So weights are looked at first, then the forward is computed once more with all that
//! it keeps; where a forward is finite, the gradients themselves tell how far the backward came.

use crate::comm::Axes;
use crate::error::{Error, Result};
use crate::learn::Learner;
use crate::learn::packed::PackedRow;
use crate::model::astray::{Rows, first};

const OF_WEIGHTS: &str =
    "lower the learning rate; an update that was finite has left this: go on from the checkpoint before it";
const OF_COMPUTING: &str = "lower the learning rate, or look at rewards and advantages of this step in rollouts.h5; weights and \
                            checkpoints are as they were before this update";
const OF_MACHINE: &str = "a fault of the GPU or of its memory: nvidia-smi -q -d ECC and lines with Xid in the log of the node's \
                          kernel (dmesg) tell; weights and checkpoints are as they were before this update";

/// Makes the step of `learner` behind a sweep whose loss, the same on all ranks, was `loss`: not where that or the gradient is
/// not finite. `rows` are this rank's micro-batches. All ranks call this.
///
/// # Errors
/// `Fault`, the same on all ranks, naming the first weight, result of the forward or gradient that is not finite.
pub fn step(
    learner: &mut Learner,
    axes: &Axes,
    recompute: bool,
    loss: f64,
    rows: impl FnOnce(&Learner) -> Vec<PackedRow>,
) -> Result<()> {
    let update = learner.zero.updates + 1;
    if loss.is_finite() {
        return learner.step(axes).or_else(|error| {
            forward(learner, axes, recompute, &format!("the gradient of update {update}"), rows(learner))
                .and(Err(error))
        });
    }
    let what = format!("the loss of update {update}");
    forward(learner, axes, recompute, &what, rows(learner))?;
    let again =
        format!("{}: {what} is not finite, and its forward is where it is computed once more", learner.role.name);
    Err(Error::fault(again).hint(OF_MACHINE))
}

/// Why `what` is not finite, as far as weights and forwards of `rows` tell. All ranks call this.
fn forward(learner: &Learner, axes: &Axes, recompute: bool, what: &str, rows: Vec<PackedRow>) -> Result<()> {
    let said = |words: Option<String>, hint: &str| {
        let error = |words| Error::fault(format!("{}: {what} is not finite: {words}", learner.role.name)).hint(hint);
        axes.all.agree(words.map_or(Ok(()), |words| Err(error(words))))
    };
    let (model, w) = (&learner.role.transformer, &learner.role.weights);
    said(w.not_finite(), OF_WEIGHTS)?;
    let mut found = None;
    // Each rank has as many where others wait for what it gathers.
    for row in rows {
        let PackedRow { tokens, positions, cu_seqlens, rows, targets, .. } = &row;
        let of = Rows { tokens, positions, cu_seqlens, rows, targets };
        let here = model.not_finite(w, of, recompute);
        found = found.or(here);
    }
    said(found.map(|place| format!("the first of its forward is {place}, all weights are finite")), OF_COMPUTING)
}

/// Why a gradient, which is not finite on one of the ranks, is none, after a loss that is. All ranks call this.
pub fn of_gradient(learner: &Learner, axes: &Axes) -> Error {
    let (partition, table) = (learner.zero.partition(), &learner.role.weights.table);
    // From the head down, as a backward goes: the first is the nearest to the cause.
    let of_unit = |unit: usize| {
        let (own, values) = (partition.own(unit), learner.sum.grads.own(unit).to_host());
        let begins = table
            .specs()
            .iter()
            .enumerate()
            .rev()
            .filter(|(_, spec)| own.contains(&spec.offset) || spec.range().contains(&own.start));
        begins.map(|(i, spec)| (i, spec.range())).find_map(|(i, range)| {
            let here = range.start.max(own.start) - own.start..range.end.min(own.end) - own.start;
            first(&values[here]).map(|_| i)
        })
    };
    let mine = (0..partition.units()).rev().find_map(of_unit);
    let mut last = [mine.map_or(-1.0, |i| i as f64)];
    axes.all.all_reduce_max_f64(&mut last);
    let what = format!("{}: the gradient of update {} is not finite", learner.role.name, learner.zero.updates + 1);
    let specs = table.specs();
    let words = match (last[0] >= 0.0).then(|| last[0] as usize) {
        Some(i) if i + 1 == specs.len() => format!("from that of {} on, the first of the backward", specs[i].name),
        Some(i) => {
            format!("that of {} is the first, and that of {} before it is finite", specs[i].name, specs[i + 1].name)
        }
        None => "each of its numbers is, and the sum of their squares is too large".to_string(),
    };
    Error::fault(format!("{what}: {words}")).hint(OF_COMPUTING)
}
