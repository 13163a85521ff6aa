//! Errors for losses and gradients that are not finite. They name the first value that is not, before any update is made.
//!
//! The results of kernels are gone by then. So weights are checked first, then the forward is computed again with all that it
//! keeps. Where that is finite, the gradients show how far the backward came.

use super::gradient_sum::GradientSum;
use super::packed::PackedRow;
use crate::comm::Axes;
use crate::config::job::Recompute;
use crate::error::{Error, Result};
use crate::learn::Role;
use crate::model::non_finite::{Rows, first};
use crate::optim::zero::Zero;

const OF_WEIGHTS: &str =
    "lower the learning rate; an update that was finite has left this: go on from the checkpoint before it";
const OF_COMPUTING: &str = "lower the learning rate, or look at rewards and advantages of this step in rollouts.h5; weights and \
                            checkpoints are as they were before this update";
pub const OF_MACHINE: &str = "a fault of the GPU or of its memory: nvidia-smi -q -d ECC and lines with Xid in the log of the node's \
                          kernel (dmesg) tell; weights and checkpoints are as they were before this update";

/// Why `what` is not finite, as far as weights and forwards of `rows` tell: a `Fault`, the same on all ranks, that names the first
/// weight or result of the forward that is not finite. All ranks call this.
pub fn forward(
    role: &Role,
    axes: &Axes,
    recompute: Recompute,
    what: &str,
    rows: impl Iterator<Item = PackedRow>,
) -> Result<()> {
    let agreed = |message: Option<String>, hint: &str| {
        let error = |message| Error::fault(format!("{}: {what} is not finite: {message}", role.name)).hint(hint);
        axes.all.agree(message.map_or(Ok(()), |message| Err(error(message))))
    };
    let (model, w) = (&role.transformer, &role.weights);
    agreed(w.not_finite(), OF_WEIGHTS)?;
    let mut found = None;
    // Each rank has as many where others wait for what it gathers.
    for row in rows {
        let PackedRow { tokens, positions, cu_seqlens, rows, targets, .. } = &row;
        let of = Rows { tokens, positions, cu_seqlens, rows, targets };
        let here = model.not_finite(w, of, recompute);
        found = found.or(here);
    }
    agreed(found.map(|place| format!("the first of its forward is {place}, all weights are finite")), OF_COMPUTING)
}

/// Why a gradient, which is not finite on one of the ranks, is none, after a loss that is. All ranks call this.
pub fn of_gradient(role: &Role, sum: &GradientSum, zero: &Zero, axes: &Axes) -> Error {
    let (partition, specs) = (zero.partition(), role.weights.table.specs());
    // From the head down, as a backward goes: the first is the nearest to the cause.
    let of_unit = |unit: usize| {
        let (own, values) = (partition.own(unit), sum.grads.own(unit).to_host());
        (0..specs.len()).rev().find(|&i| {
            let (start, end) = (specs[i].range().start.max(own.start), specs[i].range().end.min(own.end));
            start < end && first(&values[start - own.start..end - own.start]).is_some()
        })
    };
    let mine = (0..partition.units()).rev().find_map(of_unit);
    let last = axes.all.max(mine.map_or(-1.0, |i| i as f64));
    let what = format!("{}: the gradient of update {} is not finite", role.name, zero.updates + 1);
    let message = match (last >= 0.0).then_some(last as usize) {
        Some(i) if i + 1 == specs.len() => format!("from that of {} on, the first of the backward", specs[i].name),
        Some(i) => {
            format!("that of {} is the first, and that of {} before it is finite", specs[i].name, specs[i + 1].name)
        }
        None => "each of its numbers is, and the sum of their squares is too large".to_string(),
    };
    Error::fault(format!("{what}: {message}")).hint(OF_COMPUTING)
}
