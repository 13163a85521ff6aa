//! Random weights. Each element is a function of the seed, its parameter's name and its index in the whole matrix. It
//! does not depend on the layout, the dtype, the number of ranks or the other parameters.

use super::arch::{Arch, Head};
use super::params::{Init, ParamSpec, ParamTable};
use super::part::TensorPart;
use super::weights::UnitValues;
use super::weights::Weights;
use super::weights::pack;
use crate::device::Device;
use crate::rng::{Purpose, Rng};
use crate::tensor::DType;
use std::convert::Infallible;
use std::sync::Arc;

/// New weights: matrices normal(0, init_std), norms 1, biases 0, a value head normal(0, 1/(d+1)).
pub fn init(arch: &Arch, head: Head, dtype: DType, seed: u64) -> Weights {
    init_on(Device::Cpu, arch, head, dtype, seed, TensorPart::whole())
}

/// The part of `init`'s weights that a rank of the tensor axis holds, bit for bit, on a device.
pub fn init_on(device: Device, arch: &Arch, head: Head, dtype: DType, seed: u64, part: TensorPart) -> Weights {
    let table = Arc::new(ParamTable::on(device, arch, head, part));
    let units = (0..table.units().len()).map(|u| unit(&table, u, dtype, seed)).collect();
    Weights::from_units(table, dtype, units)
}

/// One unit of new weights.
pub fn unit(table: &Arc<ParamTable>, unit: usize, dtype: DType, seed: u64) -> UnitValues {
    let filled = UnitValues::scratch(table, unit, dtype).filled(|range, to| {
        let not_finite = pack::fill(table, &range, to, |spec| drawn(spec, seed));
        debug_assert!(not_finite.is_none());
        Ok::<_, Infallible>(())
    });
    let Ok(values) = filled;
    values
}

/// The values of a new parameter.
pub(super) fn drawn<'a>(spec: &ParamSpec, seed: u64) -> Box<pack::Source<'a>> {
    match spec.init {
        Init::Zeros => Box::new(|_, to| to.fill(0.0)),
        Init::Ones => Box::new(|_, to| to.fill(1.0)),
        Init::Normal { std } => {
            let (rng, name) = stream(spec, seed);
            Box::new(move |start, to| normal(rng, name, std, start, to))
        }
        Init::Uniform { bound } => {
            let uniform = uniform(spec, seed);
            Box::new(move |start, to| (start..).zip(to).for_each(|(i, x)| *x = (2.0 * uniform(i) - 1.0) * bound))
        }
        Init::LogUniform { low, high } => {
            let uniform = uniform(spec, seed);
            Box::new(move |start, to| (start..).zip(to).for_each(|(i, x)| *x = (low + (high - low) * uniform(i)).ln()))
        }
    }
}

/// The random numbers of a parameter: their generator, and the hash of its name.
fn stream(spec: &ParamSpec, seed: u64) -> (Rng, u64) {
    (Rng::new(seed, Purpose::Init), twox_hash::XxHash3_64::oneshot(spec.name.as_bytes()))
}

/// A uniform number in [0, 1) for each element.
fn uniform(spec: &ParamSpec, seed: u64) -> impl Fn(usize) -> f32 + Send + Sync + use<> {
    let (rng, name) = stream(spec, seed);
    move |i| rng.uniform(counter(i as u64, name))
}

fn counter(i: u64, name: u64) -> [u32; 4] {
    [i as u32, (i >> 32) as u32, name as u32, (name >> 32) as u32]
}

/// The elements from `start` on. Elements 2i and 2i + 1 are a pair.
fn normal(rng: Rng, name: u64, std: f32, start: usize, to: &mut [f32]) {
    let pair = |i: usize| rng.normal_pair(counter(i as u64 / 2, name));
    let (head, pairs) = to.split_at_mut((start % 2).min(to.len()));
    for x in head {
        *x = pair(start)[1] * std;
    }
    for (i, to) in pairs.chunks_mut(2).enumerate() {
        let drawn = pair(start + start % 2 + 2 * i);
        to.iter_mut().zip(drawn).for_each(|(x, drawn)| *x = drawn * std);
    }
}
