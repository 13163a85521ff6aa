//! A model put together from the ranks that share it: units over the ZeRO axes, matrices over the tensor axis.

use super::arch::Arch;
use super::cut::{Flat, join};
use super::params::ParamTable;
use super::part::TensorPart;
use super::unit::UnitValues;
use super::weights::Weights;
use crate::comm::{Axes, Group};
use crate::tensor::DType;
use std::ops::Range;
use std::sync::Arc;

/// The tables of a whole model and of all its tensor parts.
pub struct Whole {
    table: Arc<ParamTable>,
    parts: Vec<ParamTable>,
    tensor: Group,
}

impl Whole {
    pub fn new(arch: &Arch, weights: &Weights, tensor: &Group) -> Self {
        let (head, size) = (weights.table.head(), tensor.size());
        let parts = (0..size).map(|rank| ParamTable::part(arch, head, TensorPart { rank, size })).collect();
        Self { table: Arc::new(ParamTable::new(arch, head)), parts, tensor: tensor.clone() }
    }

    /// All values of unit `unit`, on every rank. A collective of the ranks that share the weights; where they are
    /// sharded, all ask for the same units in the same order.
    pub fn unit(&self, weights: &Weights, unit: usize) -> UnitValues {
        let held = weights.unit(unit);
        let mut values = UnitValues::scratch(&self.table, unit, weights.dtype());
        match weights.dtype() {
            DType::F32 => {
                let all = self.gathered(unit, held.f32(), |group, x, ranges| group.all_gather(x, ranges));
                self.join(unit, &all, values.f32_mut());
            }
            DType::Bf16 => {
                let all = self.gathered(unit, held.bf16(), |group, x, ranges| group.all_gather_u16(x, ranges));
                self.join(unit, &all, values.bf16_mut());
            }
        }
        values
    }

    /// Where each rank's values of a unit lie, one rank behind the other.
    fn ranges(&self, unit: usize) -> Vec<Range<usize>> {
        let mut end = 0;
        let range = |part: &ParamTable| {
            let start = end;
            end += part.units()[unit].len();
            start..end
        };
        self.parts.iter().map(range).collect()
    }

    fn gathered<T: Flat>(&self, unit: usize, own: &[T], gather: impl Fn(&Group, &mut [T], &[Range<usize>])) -> Vec<T> {
        let ranges = self.ranges(unit);
        let mut all = vec![T::default(); ranges.last().map_or(0, |range| range.end)];
        all[ranges[self.tensor.rank()].clone()].copy_from_slice(own);
        gather(&self.tensor, &mut all, &ranges);
        all
    }

    fn join<T: Flat>(&self, unit: usize, all: &[T], out: &mut [T]) {
        let (ranges, whole) = (self.ranges(unit), &self.table.units()[unit]);
        for (i, spec) in self.table.specs().iter().enumerate() {
            if !whole.contains(&spec.offset) {
                continue;
            }
            let part = |(table, range): (&'_ ParamTable, &Range<usize>)| {
                let start = range.start - table.units()[unit].start;
                let at = table.specs()[i].range();
                start + at.start..start + at.end
            };
            let parts: Vec<_> = self.parts.iter().zip(&ranges).collect();
            let parts: Vec<_> = parts.into_iter().map(|pair| (&pair.0.specs()[i], &all[part(pair)])).collect();
            join(&parts, spec, &mut out[spec.offset - whole.start..][..spec.len]);
        }
    }
}

/// The whole model on the first rank of the mesh, and nothing on the others; nothing at all where the first rank holds all
/// of it anyway. All ranks of the mesh call this.
pub fn on_first(arch: &Arch, weights: &Weights, axes: &Axes) -> Option<Weights> {
    if axes.tensor.size() == 1 && !weights.is_sharded() {
        return None;
    }
    let parts = Whole::new(arch, weights, &axes.tensor);
    let mut whole = (axes.all.rank() == 0).then(|| Weights::zeros(parts.table.clone(), weights.dtype()));
    for unit in 0..parts.table.units().len() {
        let mut values = parts.unit(weights, unit);
        if let Some(whole) = &mut whole {
            values.refresh();
            whole.put(unit, values);
        }
    }
    weights.release();
    whole
}
