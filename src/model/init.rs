//! Random weights: each element is drawn by counter from its parameter's name and its place in the matrix, so neither
//! the layout, the dtype nor the other parameters have a say.

use super::arch::{Arch, Head};
use super::pack::{Disk, pack};
use super::params::{Init, ParamId, ParamSpec, ParamTable};
use super::weights::Weights;
use crate::rng::{Purpose, Rng};
use crate::tensor::DType;
use crate::tensor::arena::Buffer;
use rayon::prelude::*;
use std::sync::Arc;

/// New weights: matrices normal(0, init_std), norms 1, biases 0, a value head normal(0, 1/(d+1)).
pub fn init(arch: &Arch, head: Head, dtype: DType, seed: u64) -> Weights {
    let table = Arc::new(ParamTable::new(arch, head));
    let mut weights = Weights::zeros(table.clone(), dtype);
    for id in (0..table.specs().len()).map(ParamId) {
        init_one(&mut weights, id, seed);
    }
    weights
}

pub(super) fn init_one(weights: &mut Weights, id: ParamId, seed: u64) {
    let table = weights.table.clone();
    let spec = table.spec(id);
    let mut packed = Buffer::zeros(spec.len);
    pack(spec, Disk::F32, bytemuck::cast_slice(&values(spec, seed)), &mut packed[..]);
    weights.store_master(spec.range(), &packed);
}

/// The parameter's values, row-major.
fn values(spec: &ParamSpec, seed: u64) -> Vec<f32> {
    match spec.init {
        Init::Zeros => vec![0.0; spec.elements()],
        Init::Ones => vec![1.0; spec.elements()],
        Init::Normal { std } => {
            let rng = Rng::new(seed, Purpose::Init);
            let name = twox_hash::XxHash3_64::oneshot(spec.name.as_bytes());
            let mut values = vec![0.0; spec.elements()];
            values.par_chunks_mut(2).enumerate().for_each(|(pair, values)| {
                let counter = [pair as u32, (pair as u64 >> 32) as u32, name as u32, (name >> 32) as u32];
                let drawn = rng.normal_pair(counter);
                values.iter_mut().zip(drawn).for_each(|(v, x)| *v = x * std);
            });
            values
        }
    }
}
