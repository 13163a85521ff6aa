//! The norm of each parameter's gradient, to compare two computations of an update.

use super::gradient_sum::GradientSum;
use crate::comm::Axes;
use crate::learn::Role;
use crate::optim::zero::Zero;

/// ||g_p|| over all elements of each parameter p, by its name. `sum` is finished: each rank has its sums of the whole
/// gradient. Ranks that hold copies of a parameter count together as one. All ranks of the role call this.
pub fn by_parameter(role: &Role, sum: &GradientSum, zero: &Zero, axes: &Axes) -> Vec<(String, f64)> {
    let (partition, specs) = (zero.partition(), role.weights.table.specs());
    let mut squares = vec![0.0; specs.len()];
    for unit in (0..partition.units()).filter(|unit| partition.is_counted(*unit)) {
        let (own, values) = (partition.own(unit), sum.grads.own(unit).to_host());
        for (square, spec) in squares.iter_mut().zip(specs) {
            let (start, end) = (spec.range().start.max(own.start), spec.range().end.min(own.end));
            if start < end {
                let part = &values[start - own.start..end - own.start];
                *square += part.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / spec.copies as f64;
            }
        }
    }
    // Without a partition every rank of the axis has the whole sum.
    if partition.ranks() > 1 {
        axes.zero.all_reduce_sum_f64(&mut squares);
    }
    axes.pipeline.all_reduce_sum_f64(&mut squares);
    axes.tensor.all_reduce_sum_f64(&mut squares);
    specs.iter().zip(squares).map(|(spec, square)| (spec.name.clone(), square.sqrt())).collect()
}
