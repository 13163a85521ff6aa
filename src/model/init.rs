//! Random weights: each element is drawn by counter from its parameter's name and its place in the whole matrix, so
//! neither the layout, the dtype, the cut between ranks nor the other parameters have a say.

use super::arch::{Arch, Head};
use super::pack::{Element, pack};
use super::params::{Init, ParamSpec, ParamTable};
use super::part::TensorPart;
use super::weights::{UnitValues, Weights};
use crate::device::Device;
use crate::rng::{Purpose, Rng};
use crate::tensor::DType;
use std::sync::Arc;

/// New weights: matrices normal(0, init_std), norms 1, biases 0, a value head normal(0, 1/(d+1)).
pub fn init(arch: &Arch, head: Head, dtype: DType, seed: u64) -> Weights {
    init_part(arch, head, dtype, seed, TensorPart::whole())
}

/// What a rank of the tensor axis holds of `init`'s weights, bit for bit.
pub fn init_part(arch: &Arch, head: Head, dtype: DType, seed: u64, part: TensorPart) -> Weights {
    init_on(Device::Cpu, arch, head, dtype, seed, part)
}

/// The same, on a device.
pub fn init_on(device: Device, arch: &Arch, head: Head, dtype: DType, seed: u64, part: TensorPart) -> Weights {
    let table = Arc::new(ParamTable::on(device, arch, head, part));
    let mut weights = Weights::zeros(table.clone(), dtype);
    for (u, unit) in table.units().iter().enumerate() {
        let specs = table.specs().iter().filter(|spec| unit.contains(&spec.offset));
        let place = |spec: &ParamSpec| spec.offset - unit.start..spec.offset - unit.start + spec.len;
        if device == Device::Cuda {
            let mut values = vec![0; unit.len()];
            specs.for_each(|spec| fill::<u16>(spec, seed, &mut values[place(spec)]));
            weights.put(u, UnitValues::upload(&table, u, &values));
            continue;
        }
        let values = weights.local_mut(u);
        for spec in specs {
            let place = place(spec);
            match dtype {
                DType::F32 => fill(spec, seed, &mut values.f32_mut()[place]),
                DType::Bf16 => fill(spec, seed, &mut values.bf16_mut()[place]),
            }
        }
        values.refresh();
    }
    weights
}

/// Writes a new parameter into its place `to` in the flat buffer.
pub(super) fn fill<T: Element>(spec: &ParamSpec, seed: u64, to: &mut [T]) {
    let finite = match spec.init {
        Init::Zeros => pack(spec, &|_, to| to.fill(0.0), to),
        Init::Ones => pack(spec, &|_, to| to.fill(1.0), to),
        Init::Normal { std } => {
            let rng = Rng::new(seed, Purpose::Init);
            let name = twox_hash::XxHash3_64::oneshot(spec.name.as_bytes());
            pack(spec, &|start, to| normal(rng, name, std, start, to), to)
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
