//! Errors for losses and gradients that are not finite. They name the first non-finite value, before any update.
//!
//! The results of kernels are gone by then. So weights are checked first, then the forward is computed again, keeping
//! all its results. If these are finite, the gradients show how far the backward got.

use super::gradient_sum::GradientSum;
use super::packed::PackedRow;
use crate::comm::Axes;
use crate::config::job::Recompute;
use crate::error::{Error, Result};
use crate::learn::Role;
use crate::model::non_finite::{Rows, first};
use crate::optim::zero::Zero;

const OF_WEIGHTS: &str =
    "lower the learning rate and resume from an earlier checkpoint: a finite update produced this weight";
const OF_COMPUTING: &str = "lower the learning rate, or check rewards and advantages of this step in rollouts.h5; \
                            weights and checkpoints are unchanged by this update";
pub const OF_MACHINE: &str = "check the GPU and its memory for faults, with nvidia-smi -q -d ECC and for Xid lines in \
                              the node's kernel log (dmesg); weights and checkpoints are unchanged by this update";

/// Reports why `what` is not finite, from the weights and the forward passes of `rows`: a `Fault`, the same on all
/// ranks, that names the first weight or forward result that is not finite. All ranks call this.
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
    // If ranks wait for what others gather, each has the same number of rows.
    for row in rows {
        let PackedRow { tokens, positions, pictures, cu_seqlens, rows, targets, .. } = &row;
        let of = Rows { tokens, positions, pictures, cu_seqlens, rows, targets };
        let here = model.not_finite(w, of, recompute);
        found = found.or(here);
    }
    agreed(
        found.map(|place| format!("its first non-finite forward result is {place}; all weights are finite")),
        OF_COMPUTING,
    )
}

/// Reports the reason for a non-finite gradient after a finite loss, if it can be located. All ranks call this.
pub fn of_gradient(role: &Role, sum: &GradientSum, zero: &Zero, axes: &Axes) -> Error {
    let (partition, specs) = (zero.partition(), role.weights.table.specs());
    // From the head down, like a backward pass: the first one is nearest to the cause.
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
        Some(i) if i + 1 == specs.len() => format!("first in {}, where the backward pass begins", specs[i].name),
        Some(i) => {
            format!("first in {}, while {} before it in the backward pass is finite", specs[i].name, specs[i + 1].name)
        }
        None => "each of its numbers is finite, but the sum of their squares overflows".to_string(),
    };
    Error::fault(format!("{what}: {message}")).hint(OF_COMPUTING)
}
