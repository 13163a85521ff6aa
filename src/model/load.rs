//! Weights from the safetensors of a Hugging Face directory into the flat buffer: all of them, or unit by unit what one
//! rank holds, of which it alone is read.

use super::arch::{Arch, Head};
use super::files::Checkpoint;
use super::init;
use super::pack::{self, stored, whole_rows};
use super::params::{ParamId, ParamSpec, ParamTable};
use super::part::TensorPart;
use super::partition::Shards;
use super::unit::UnitValues;
use super::weights::Weights;
use crate::comm::Axes;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{DType, SliceMut};
use safetensors::Dtype;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Loads a model onto `device`, with the head `head`, widening or rounding f32, bf16 or f16 on disk to `dtype`. A value head that the
/// directory does not have (because it holds a language model) starts as normal(0, 1/(d+1)) from `seed`; everything
/// else must be there.
///
/// # Errors
/// `Data`, naming the file and tensor: pickles, files cut short, tensors missing, unknown, of the wrong shape or with
/// NaN or infinite values; a language model asked for where the directory holds a reward model.
pub fn load(device: Device, dir: &Path, head: Head, dtype: DType, seed: u64) -> Result<(Arch, Weights)> {
    let source = open(device, dir, head, seed, TensorPart::whole())?;
    let alone = Shards::new(&source.table, &Axes::one(), 0);
    let weights = Weights::build(source.table.clone(), dtype, &alone, |values| source.fill_unit(values))?;
    Ok((source.arch, weights))
}

/// A model directory whose files were found to fit its config.json, and what a rank of the tensor axis takes from it.
pub struct Source {
    pub arch: Arch,
    /// What this rank holds.
    pub table: Arc<ParamTable>,
    checkpoint: Checkpoint,
    /// The value head, where it is not in the files but new.
    new_head: Option<ParamId>,
    seed: u64,
}

/// Opens a model directory for weights on `device`, and checks all but the values, before anything is allocated.
///
/// # Errors
/// As `load`, but for values; `Usage` where the model cannot be cut into `part.size` parts.
pub fn open(device: Device, dir: &Path, head: Head, seed: u64, part: TensorPart) -> Result<Source> {
    let arch = Arch::load(dir)?;
    let table = table_on(device, dir, &arch, head, part)?;
    let checkpoint = Checkpoint::open(dir)?;
    let new_head = check(dir, &arch, &table, &checkpoint)?;
    Ok(Source { arch, table, checkpoint, new_head, seed })
}

/// What weights of the model in `dir` would be, of which nothing but config.json is read: they come from elsewhere.
///
/// # Errors
/// As `open` for what config.json says.
pub fn table_on(device: Device, dir: &Path, arch: &Arch, head: Head, part: TensorPart) -> Result<Arc<ParamTable>> {
    if head == Head::LanguageModel && arch.head == Head::Value {
        return Err(Error::data(format!(
            "{} holds a value or reward model, which has no language head",
            dir.display()
        ))
        .hint("give the directory of a causal language model"));
    }
    arch.check_tensor(part.size).map_err(|e| e.within(dir.display()))?;
    Ok(Arc::new(ParamTable::on(device, arch, head, part)))
}

impl Source {
    /// Fills a unit of the table, or a range of one: of the files no more is read than that.
    ///
    /// # Errors
    /// `Data` where a value is NaN or infinite.
    pub fn fill_unit(&self, values: UnitValues) -> Result<UnitValues> {
        let range = values.range();
        self.will_need(&range);
        if let Some(next) = self.table.units().iter().skip_while(|unit| **unit != range).nth(1) {
            self.will_need(next);
        }
        values.filled(|range, to| self.fill(&range, to))
    }

    /// Has the system read what a flat range is made of while something else is done.
    fn will_need(&self, range: &Range<usize>) {
        for (id, part) in self.table.parts(range) {
            let spec = self.table.spec(id);
            if let Some(tensor) = self.checkpoint.get(&spec.name) {
                tensor.will_need(whole_rows(spec, part.start - spec.offset..part.end - spec.offset));
            }
        }
    }

    /// Whether weights of `dtype` are other numbers than those of the files, or of the head that is drawn.
    pub fn is_rounded(&self, dtype: DType) -> bool {
        let is_finer = |spec: &ParamSpec| self.checkpoint.get(&spec.name).is_none_or(|t| t.dtype != Dtype::BF16);
        dtype == DType::Bf16 && self.table.specs().iter().any(is_finer)
    }

    /// The parameters of a flat range that is cut at multiples of `FLAT_ALIGN`, padding included.
    ///
    /// # Errors
    /// `Data` where a value is NaN or infinite.
    pub fn fill_f32(&self, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        self.will_need(&range);
        self.fill(&range, SliceMut::F32(out))
    }

    /// Fills a range of the flat vector.
    fn fill(&self, range: &Range<usize>, to: SliceMut) -> Result<()> {
        let stored_of = |name: &str| self.checkpoint.get(name).expect("`check` found every parameter");
        let not_finite = pack::fill(&self.table, range, to, |spec| {
            if self.new_head.is_some_and(|id| self.table.spec(id).name == spec.name) {
                return init::drawn(spec, self.seed);
            }
            let tensor = stored_of(&spec.name);
            Box::new(stored(tensor.dtype, tensor.bytes))
        });
        // Else the files would lie in memory beside what is made of them.
        self.checkpoint.release();
        let Some(id) = not_finite else { return Ok(()) };
        let name = &self.table.spec(id).name;
        Err(Error::data(format!("{}: tensor {name} holds NaN or infinite values", stored_of(name).path.display()))
            .hint("the model is damaged, or its training diverged"))
    }
}

/// Compares names, shapes and types of the files with the table, before anything is allocated. Returns the value head
/// if it is to be made new.
fn check(dir: &Path, arch: &Arch, table: &ParamTable, checkpoint: &Checkpoint) -> Result<Option<ParamId>> {
    let is_new = |spec: &ParamSpec| spec.name == arch.head_name(Head::Value) && arch.head == Head::LanguageModel;
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
        let (path, name, dtype) = (stored.path.display(), &spec.name, stored.dtype);
        if !matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) {
            return Err(
                Error::data(format!("{path}: tensor {name} has dtype {dtype:?}")).hint("supported: F32, BF16, F16")
            );
        }
        if stored.shape != spec.full {
            return Err(Error::data(format!(
                "{path}: tensor {name} has shape {:?}, config.json needs {:?}",
                stored.shape, spec.full
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
