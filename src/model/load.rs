//! Loads weights from the safetensors files of a Hugging Face directory into the flat buffer: all of them, or unit by
//! unit the part of one rank. Only that part is read.

use super::arch::{Arch, Head, LM_HEAD};
use super::files::Checkpoint;
use super::init;
use super::params::{ParamId, ParamSpec, ParamTable};
use super::part::{Cut, TensorPart};
use super::weights::UnitValues;
use super::weights::Weights;
use super::weights::pack::{self, stored, whole_rows};
use super::weights::partition::Shards;
use crate::comm::Axes;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{DType, SliceMut};
use safetensors::Dtype;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Loads a model onto `device` with the head `head`. Values on disk (f32, bf16 or f16) are widened or rounded to
/// `dtype`. A value head that the directory lacks, because it contains a language model, starts as normal(0, 1/(d+1))
/// from `seed`. Everything else must exist.
///
/// # Errors
/// `Data`, naming the file and tensor: pickles; truncated files; tensors that are missing, unknown, of the wrong shape
/// or not finite; a language model is requested, but the directory contains a reward model.
pub fn load(device: Device, dir: &Path, head: Head, dtype: DType, seed: u64) -> Result<(Arch, Weights)> {
    let source = open(device, dir, Arch::load(dir)?, head, seed, TensorPart::whole())?;
    let alone = Shards::new(&source.table, &Axes::one(), 0);
    let weights = Weights::build(source.table.clone(), dtype, &alone, |values| source.fill_unit(values))?;
    Ok((source.arch, weights))
}

/// A model directory whose files match its config.json, and the part that a rank of the tensor axis reads.
pub struct Source {
    pub arch: Arch,
    /// The parameters of this rank.
    pub table: Arc<ParamTable>,
    checkpoint: Checkpoint,
    /// The value head, if it is new and not in the files.
    new_head: Option<ParamId>,
    seed: u64,
}

/// Opens a model directory for weights on `device`, with its architecture, which may leave off padding of the
/// vocabulary. Checks everything but the values before anything is allocated.
///
/// # Errors
/// The errors of `load`, except those about values; `Usage` if the model cannot be split into `part.size` parts.
pub fn open(device: Device, dir: &Path, arch: Arch, head: Head, seed: u64, part: TensorPart) -> Result<Source> {
    let table = table_on(device, dir, &arch, head, part)?;
    let checkpoint = Checkpoint::open(dir)?;
    let new_head = check(dir, &arch, &table, &checkpoint)?;
    Ok(Source { arch, table, checkpoint, new_head, seed })
}

/// The parameter table of the model in `dir`. Only config.json is read: the weights come from elsewhere.
///
/// # Errors
/// The errors of `open` about config.json.
pub fn table_on(device: Device, dir: &Path, arch: &Arch, head: Head, part: TensorPart) -> Result<Arc<ParamTable>> {
    if head == Head::LanguageModel && arch.head == Head::Value {
        return Err(Error::data(format!(
            "{} is a value or reward model and has no language-model head",
            dir.display()
        ))
        .hint("use the directory of a causal language model"));
    }
    arch.check_tensor(part.size).map_err(|e| e.within(dir.display()))?;
    Ok(Arc::new(ParamTable::on(device, arch, head, part)))
}

impl Source {
    /// Fills a unit of the table, or a range of one. Only that part of the files is read.
    ///
    /// # Errors
    /// `Data` if a value is NaN or infinite.
    pub fn fill_unit(&self, values: UnitValues) -> Result<UnitValues> {
        let range = values.range();
        self.will_need(&range);
        if let Some(next) = self.table.units().iter().skip_while(|unit| **unit != range).nth(1) {
            self.will_need(next);
        }
        values.filled(|range, to| self.fill(&range, to))
    }

    /// Asks the system to read the file contents of a flat range ahead.
    fn will_need(&self, range: &Range<usize>) {
        for (id, part) in self.table.parts(range) {
            let spec = self.table.spec(id);
            if let Some(tensor) = self.checkpoint.get(&spec.name) {
                tensor.will_need(whole_rows(spec, part.start - spec.offset..part.end - spec.offset));
            }
        }
    }

    /// Whether weights of `dtype` differ from the values in the files or from the new head.
    pub fn is_rounded(&self, dtype: DType) -> bool {
        let is_finer = |spec: &ParamSpec| self.checkpoint.get(&spec.name).is_none_or(|t| t.dtype != Dtype::BF16);
        dtype == DType::Bf16 && self.table.specs().iter().any(is_finer)
    }

    /// Fills `out` with a flat range, padding included. The range is cut at multiples of `FLAT_ALIGN`.
    ///
    /// # Errors
    /// `Data` if a value is NaN or infinite.
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
        // Else the file contents would stay in memory together with the weights.
        self.checkpoint.release();
        let Some(id) = not_finite else { return Ok(()) };
        let name = &self.table.spec(id).name;
        Err(Error::data(format!("{}: tensor {name} contains NaN or infinite values", stored_of(name).path.display()))
            .hint("use another model: this one is damaged, or its training diverged"))
    }
}

/// Compares names, shapes and types in the files with the table, before anything is allocated. Returns the value head
/// if it must be initialized.
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
            return Err(Error::data(format!("{path}: tensor {name} must be F32, BF16 or F16 (got {dtype:?})"))
                .hint("convert the model to one of these types"));
        }
        let (full, is_vocabulary) = (spec.full(), matches!(spec.cuts[0], Cut::Vocabulary(_)));
        let fits = |rows: usize| stored.shape.first() == Some(&rows) && stored.shape[1..] == full[1..];
        if stored.shape != full && !(is_vocabulary && arch.padded_from.is_some_and(fits)) {
            return Err(Error::data(format!(
                "{path}: tensor {name} has shape {:?}, but config.json needs {:?}",
                stored.shape, full
            ))
            .hint("use the config.json that belongs to these weights"));
        }
    }
    // What other heads need, and what older checkpoints store although it follows from config.json.
    let shares = arch.tied || table.head() == Head::Value;
    let known =
        |name: &str| table.find(name).is_some() || name.ends_with("rotary_emb.inv_freq") || (shares && name == LM_HEAD);
    let unknown: Vec<&str> = checkpoint.names().filter(|name| !known(name)).collect();
    for (what, names) in [("missing from", &missing), ("unknown in", &unknown)] {
        if !names.is_empty() {
            let (class, layers, plural) =
                (arch.family.causal, arch.blocks.len(), if arch.blocks.len() == 1 { "" } else { "s" });
            return Err(Error::data(format!("{}: {what} the safetensors files: {}", dir.display(), listed(names)))
                .hint(format!("check config.json, which describes a {class} with {layers} layer{plural}")));
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
