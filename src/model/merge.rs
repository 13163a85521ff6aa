//! Whole models of parts: adapters merged into their base (W + scale B A, in f32, rounded once by the writer), and
//! trained with frozen parameters.

use super::params::ParamTable;
use super::tuning::{Adapter, Tuning};
use super::weights::Weights;
use super::weights::collect::Collector;
use crate::comm::Axes;
use crate::error::Result;
use crate::model::Arch;
use std::ops::Range;

/// The number of elements merged at a time.
const PIECE: usize = 1 << 20;

/// The values of an adapter, row by row.
struct Delta {
    adapter: Adapter,
    /// (rank, in)
    a: Vec<f32>,
    /// (out, rank)
    b: Vec<f32>,
}

impl Delta {
    /// # Panics
    /// If the values do not have the adapter's rank.
    fn new(adapter: Adapter, a: Vec<f32>, b: Vec<f32>) -> Self {
        assert!(a.len().is_multiple_of(adapter.rank) && b.len().is_multiple_of(adapter.rank), "values of an adapter");
        Self { adapter, a, b }
    }

    /// Adds rows of scale B A, from row `first` of the matrix on.
    fn add_to(&self, first: usize, rows: &mut [f32]) {
        let Self { adapter: Adapter { rank, scale }, a, b } = self;
        let width = a.len() / rank;
        for (row, b) in rows.chunks_exact_mut(width).zip(b[first * rank..].chunks_exact(*rank)) {
            for (b, a) in b.iter().zip(a.chunks_exact(width)) {
                row.iter_mut().zip(a).for_each(|(w, a)| *w += scale * b * a);
            }
        }
    }
}

/// Calls `take` with all rows of all parameters of `whole`, the table of the model without adapters, some at a time and in
/// order. The adapters of `tuning` are merged. `read(name, start, out)` fills `out` with row-major elements of a
/// parameter of the base or of what trains.
///
/// # Errors
/// The errors of `read` and `take`.
pub fn merge(
    whole: &ParamTable,
    tuning: &Tuning,
    mut read: impl FnMut(&str, usize, &mut [f32]) -> Result<()>,
    mut take: impl FnMut(usize, &[f32]) -> Result<()>,
) -> Result<()> {
    for (index, spec) in whole.specs().iter().enumerate() {
        let (n, width) = spec.full_dims();
        let mut read = |name: &str, rows: Range<usize>, width: usize| {
            let mut values = vec![0.0; rows.len() * width];
            read(name, rows.start * width, &mut values).map(|()| values)
        };
        let delta = match spec.adapter(tuning) {
            Some((adapter, [a, b])) => {
                Some(Delta::new(adapter, read(&a, 0..adapter.rank, width)?, read(&b, 0..n, adapter.rank)?))
            }
            None => None,
        };
        let each = (PIECE / width).max(1);
        for first in (0..n).step_by(each) {
            let mut rows = read(&spec.name, first..(first + each).min(n), width)?;
            if let Some(delta) = &delta {
                delta.add_to(first, &mut rows);
            }
            take(index, &rows)?;
        }
    }
    Ok(())
}

/// Calls `take` on the first rank of `axes` with all rows of all parameters of `whole`, the table of a model of which a
/// part is frozen, without adapters. Its arguments are those of `collect`. All ranks of `axes` call this.
pub fn collect_whole(
    arch: &Arch,
    weights: &Weights,
    whole: &ParamTable,
    axes: &Axes,
    mut take: impl FnMut(usize, &[f32]),
) {
    let base = weights.base.as_deref().expect("a part of it is frozen");
    let base_arch = Arch { tuning: None, ..arch.clone() };
    let (mut own, mut frozen) = (Collector::new(arch, weights, axes), Collector::new(&base_arch, base, axes));
    for (index, spec) in whole.specs().iter().enumerate() {
        let (from, found) = match weights.table.find(&spec.name) {
            Some(id) => (&mut own, id),
            None => (&mut frozen, base.table.find(&spec.name).expect("the base has what is frozen")),
        };
        from.parameter(found.index, |rows| take(index, rows));
    }
}
