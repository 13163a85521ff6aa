//! Weights from the safetensors of a Hugging Face directory into the flat buffer.

use super::arch::{Arch, Head};
use super::files::Checkpoint;
use super::init;
use super::pack::{Element, pack};
use super::params::{ParamId, ParamSpec, ParamTable};
use super::weights::Weights;
use crate::error::{Error, Result};
use crate::tensor::DType;
use rayon::prelude::*;
use std::path::Path;
use std::sync::Arc;

/// Loads a model with the head `head`, widening or rounding f32, bf16 or f16 on disk to `dtype`. A value head that the
/// directory does not have (because it holds a language model) starts as normal(0, 1/(d+1)) from `seed`; everything
/// else must be there.
///
/// # Errors
/// `Data`, naming the file and tensor: pickles, files cut short, tensors missing, unknown, of the wrong shape or with
/// NaN or infinite values; a language model asked for where the directory holds a reward model.
pub fn load(dir: &Path, head: Head, dtype: DType, seed: u64) -> Result<(Arch, Weights)> {
    let arch = Arch::load(dir)?;
    if head == Head::LanguageModel && arch.head == Head::Value {
        return Err(Error::data(format!(
            "{} holds a value or reward model, which has no language head",
            dir.display()
        ))
        .hint("give the directory of a causal language model"));
    }
    let checkpoint = Checkpoint::open(dir)?;
    if arch.layers > checkpoint.len() {
        let (layers, tensors) = (arch.layers, checkpoint.len());
        return Err(Error::data(format!(
            "{}: config.json has {layers} layers, the files {tensors} tensors",
            dir.display()
        )));
    }
    let table = Arc::new(ParamTable::new(&arch, head));
    let new_head = check(dir, &arch, &table, &checkpoint)?;
    let mut weights = Weights::zeros(table.clone(), dtype);
    for u in 0..table.units().len() {
        let values = weights.local_mut(u);
        match dtype {
            DType::F32 => fill(&table, u, &checkpoint, values.f32_mut())?,
            DType::Bf16 => fill(&table, u, &checkpoint, values.bf16_mut())?,
        }
        values.refresh();
    }
    if let Some(id) = new_head {
        init::init_one(&mut weights, id, seed);
    }
    Ok((arch, weights))
}

/// Compares names, shapes and types of the files with the table, before anything is allocated. Returns the value head
/// if it is to be made new.
fn check(dir: &Path, arch: &Arch, table: &ParamTable, checkpoint: &Checkpoint) -> Result<Option<ParamId>> {
    let value_head = format!("{}.weight", arch.value_head);
    let is_new = |spec: &ParamSpec| spec.name == value_head && arch.head == Head::LanguageModel;
    let mut missing = Vec::new();
    let mut new_head = None;
    for (i, spec) in table.specs().iter().enumerate() {
        let Some(stored) = checkpoint.get(&spec.name) else {
            if table.head() == Head::Value && is_new(spec) {
                new_head = Some(ParamId(i));
            } else {
                missing.push(spec.name.as_str());
            }
            continue;
        };
        stored.disk(&spec.name)?;
        if stored.shape != spec.shape {
            let (path, name) = (stored.path.display(), &spec.name);
            return Err(Error::data(format!(
                "{path}: tensor {name} has shape {:?}, config.json needs {:?}",
                stored.shape, spec.shape
            ))
            .hint("config.json and the weights are of different models"));
        }
    }
    // What other heads need, and what older checkpoints store although it follows from config.json.
    let shares = arch.tied || table.head() == Head::Value;
    let known = |name: &str| {
        table.find(name).is_some() || name.ends_with("rotary_emb.inv_freq") || (shares && name == "lm_head.weight")
    };
    let unknown: Vec<&str> = checkpoint.names().filter(|name| !known(name)).collect();
    for (what, names) in [("missing", &missing), ("unknown", &unknown)] {
        if !names.is_empty() {
            return Err(Error::data(format!("{}: {what} in the safetensors: {}", dir.display(), listed(names)))
                .hint(format!("config.json describes a {} with {} layers", arch.family.causal, arch.layers)));
        }
    }
    Ok(new_head)
}

fn listed(names: &[&str]) -> String {
    let shown = names[..names.len().min(4)].join(", ");
    match names.len() {
        0..=4 => shown,
        n => format!("{shown} and {} more", n - 4),
    }
}

fn fill<T: Element>(table: &ParamTable, unit: usize, checkpoint: &Checkpoint, flat: &mut [T]) -> Result<()> {
    let mut rest = flat;
    let mut parts = Vec::with_capacity(table.specs().len());
    let unit = &table.units()[unit];
    for spec in table.specs().iter().filter(|spec| unit.contains(&spec.offset)) {
        let (part, after) = rest.split_at_mut(spec.len);
        parts.push((spec, part));
        rest = after;
    }
    parts.into_par_iter().try_for_each(|(spec, part)| {
        let Some(stored) = checkpoint.get(&spec.name) else { return Ok(()) };
        if pack(spec, stored.disk(&spec.name)?, stored.bytes, part) {
            return Ok(());
        }
        Err(Error::data(format!("{}: tensor {} holds NaN or infinite values", stored.path.display(), spec.name))
            .hint("the model is damaged, or its training diverged"))
    })
}
