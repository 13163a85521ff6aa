//! Adapters of each expert, as PEFT saved them with transformers 4, read as PEFT 0.21 does: as one adapter of all experts.
//!
//! A of gate and up, each of rank r, are the rows of one A of rank 2 r, and B has their B on its diagonal. The scale is
//! the same, as alpha is doubled with the rank.

use super::decode::stored;
use super::files::Checkpoint;
use super::targets::{Fused, module_of};
use super::tuning::{Tuning, adapter_names};
use crate::error::{Error, Result};
use std::collections::BTreeMap;

/// Joins the tensors of experts that have one each, and takes them from `names`, the names in the file by those of
/// parameters. Returns the values of the tensors of all experts: A (E r, in) and B (out, r E).
///
/// # Errors
/// `Data`, naming a tensor of a wrong shape or type.
pub(super) fn join(
    file: &Checkpoint,
    names: &mut BTreeMap<String, String>,
    tuning: &Tuning,
    all: &[&Fused],
) -> Result<BTreeMap<String, Vec<f32>>> {
    let mut joined = BTreeMap::new();
    for fused in all {
        let (Some(experts), Some(adapter)) = (fused.experts, tuning.adapters.get(&fused.module)) else { continue };
        let (parts, [outputs, inputs]) = (fused.old.len(), fused.dims);
        let around = module_of(&fused.module);
        let of = |e: usize, part: usize| adapter_names(&format!("{around}.{e}.{}", fused.old[part]));
        let each: Vec<(usize, usize)> = (0..experts).flat_map(|e| (0..parts).map(move |part| (e, part))).collect();
        let has_all = each.iter().all(|(e, part)| of(*e, *part).iter().all(|name| names.contains_key(name)));
        if parts == 0 || !has_all || !adapter.rank.is_multiple_of(parts) {
            continue;
        }
        let (rank, own) = (adapter.rank, adapter.rank / parts);
        let (rows, mut a, mut b) =
            (outputs / parts, vec![0.0; experts * rank * inputs], vec![0.0; outputs * rank * experts]);
        for (e, part) in each {
            let [name_a, name_b] = of(e, part).map(|name| names.remove(&name).expect("it is there"));
            let first = (e * rank + part * own) * inputs;
            read(file, &name_a, [own, inputs], &mut a[first..first + own * inputs])?;
            let mut of_part = vec![0.0; rows * own];
            read(file, &name_b, [rows, own], &mut of_part)?;
            for (i, x) in of_part.into_iter().enumerate() {
                let (row, column) = (part * rows + i / own, part * own + i % own);
                b[row * rank * experts + column * experts + e] = x;
            }
        }
        let [name_a, name_b] = adapter_names(&tuning.tensor_module(fused));
        joined.extend([(name_a, a), (name_b, b)]);
    }
    Ok(joined)
}

/// The values of a tensor of an expert.
fn read(file: &Checkpoint, name: &str, needed: [usize; 2], out: &mut [f32]) -> Result<()> {
    use safetensors::Dtype;
    let tensor = file.get(name).expect("it is listed");
    let (path, shape, dtype) = (tensor.path.display(), tensor.shape, tensor.dtype);
    if shape != needed {
        return Err(Error::data(format!("{path}: tensor {name} has shape {shape:?}, but needs {needed:?}"))
            .hint("use the adapter's base model, and check r and rank_pattern"));
    }
    if !matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) {
        return Err(Error::data(format!("{path}: tensor {name} must be F32, BF16 or F16 (got {dtype:?})")));
    }
    stored(dtype, tensor.bytes)(0, out);
    if out.iter().all(|x| x.is_finite()) {
        return Ok(());
    }
    Err(Error::data(format!("{path}: tensor {name} contains NaN or infinite values"))
        .hint("use another adapter: this one is damaged, or its training diverged"))
}
