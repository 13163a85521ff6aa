//! Random weights: each element is a function of the seed, its parameter's name and its index in the whole matrix. So it does
//! not depend on the layout, the dtype, the number of ranks or the other parameters.

use super::arch::{Arch, Head};
use super::pack::{Element, pack_part};
use super::params::{Init, ParamSpec, ParamTable};
use super::part::TensorPart;
use super::unit::{UnitValues, parts};
use super::weights::Weights;
use crate::device::Device;
use crate::rng::{Purpose, Rng};
use crate::tensor::{DType, SliceMut};
use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;

/// New weights: matrices normal(0, init_std), norms 1, biases 0, a value head normal(0, 1/(d+1)).
pub fn init(arch: &Arch, head: Head, dtype: DType, seed: u64) -> Weights {
    init_on(Device::Cpu, arch, head, dtype, seed, TensorPart::whole())
}

/// What a rank of the tensor axis holds of `init`'s weights, bit for bit, on a device.
pub fn init_on(device: Device, arch: &Arch, head: Head, dtype: DType, seed: u64, part: TensorPart) -> Weights {
    let table = Arc::new(ParamTable::on(device, arch, head, part));
    let units = (0..table.units().len()).map(|u| unit(&table, u, dtype, seed)).collect();
    Weights::of(table, dtype, units)
}

/// One unit of them.
pub fn unit(table: &Arc<ParamTable>, unit: usize, dtype: DType, seed: u64) -> UnitValues {
    let filled = UnitValues::scratch(table, unit, dtype).filled(|range, to| {
        match to {
            SliceMut::F32(to) => fill_range(table, range, seed, to),
            SliceMut::Bf16(to) => fill_range(table, range, seed, to),
            SliceMut::Cuda(_) => unreachable!("values are made on the host"),
        }
        Ok::<_, Infallible>(())
    });
    let Ok(values) = filled;
    values
}

fn fill_range<T: Element>(table: &ParamTable, range: Range<usize>, seed: u64, to: &mut [T]) {
    for (id, part) in parts(table, &range) {
        let spec = table.spec(id);
        let place = &mut to[part.start - range.start..part.end - range.start];
        fill(spec, seed, part.start - spec.offset..part.end - spec.offset, place);
    }
}

/// Writes elements `part` of a new parameter's place in the flat buffer.
pub(super) fn fill<T: Element>(spec: &ParamSpec, seed: u64, part: Range<usize>, to: &mut [T]) {
    let finite = match spec.init {
        Init::Zeros => pack_part(spec, &|_, to| to.fill(0.0), part, to),
        Init::Ones => pack_part(spec, &|_, to| to.fill(1.0), part, to),
        Init::Normal { std } => {
            let rng = Rng::new(seed, Purpose::Init);
            let name = twox_hash::XxHash3_64::oneshot(spec.name.as_bytes());
            pack_part(spec, &|start, to| normal(rng, name, std, start, to), part, to)
        }
    };
    debug_assert!(finite);
}

/// Elements `start` and on; elements 2i and 2i + 1 are a pair.
fn normal(rng: Rng, name: u64, std: f32, start: usize, to: &mut [f32]) {
    let pair = |i: usize| {
        let pair = i as u64 / 2;
        rng.normal_pair([pair as u32, (pair >> 32) as u32, name as u32, (name >> 32) as u32])
    };
    let (head, pairs) = to.split_at_mut((start % 2).min(to.len()));
    for x in head {
        *x = pair(start)[1] * std;
    }
    for (i, to) in pairs.chunks_mut(2).enumerate() {
        let drawn = pair(start + start % 2 + 2 * i);
        to.iter_mut().zip(drawn).for_each(|(x, drawn)| *x = drawn * std);
    }
}
