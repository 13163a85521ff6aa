//! Loads weights from the safetensors files of a Hugging Face directory into the flat buffer: all of them, or unit by
//! unit the part of one rank. Only that part is read.

use super::adapter_files::{self, AdapterFiles};
use super::arch::{Arch, Head};
use super::bitsandbytes::{self, Quantized};
use super::corrections;
use super::decode::stored;
use super::file_rows::FileRows;
use super::files::{Checkpoint, Stored, listed};
use super::fp8::{self, Fp8};
use super::init;
use super::mxfp4::{self, Mxfp4};
use super::names::LM_HEAD;
use super::params::{ParamSpec, ParamTable, tensors};
use super::part::{Cut, TensorPart};
use super::weights::pack::{self, whole_rows};
use super::weights::partition::Shards;
use super::weights::quantized::QuantizedUnit;
use super::weights::{UnitValues, Weights};
use crate::comm::Axes;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::nf4::{Held, Nf4};
use crate::tensor::{DType, SliceMut};
use safetensors::Dtype;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

/// Loads a model onto `device` with the head `head`. Values on disk (f32, bf16 or f16) are widened or rounded to
/// `dtype`. A value head that the directory lacks, because it contains a language model, starts as normal(0, 1/(d+1))
/// from `seed`. Everything else must exist.
///
/// # Errors
/// `Data`, naming the file and tensor: pickles; truncated files; tensors that are missing, unknown, of the wrong shape
/// or not finite; a language model is requested, but the directory contains a reward model.
pub fn load(device: Device, dir: &Path, head: Head, dtype: DType, seed: u64) -> Result<(Arch, Weights)> {
    load_with(device, dir, None, head, dtype, seed)
}

/// The same with the adapter in a directory.
///
/// # Errors
/// The errors of `load`, and of `AdapterFiles::open`.
pub fn load_with(
    device: Device,
    dir: &Path,
    adapter: Option<&Path>,
    head: Head,
    dtype: DType,
    seed: u64,
) -> Result<(Arch, Weights)> {
    let arch = adapted(dir, adapter, head)?;
    let (files, axes) = (ModelFiles { dir, adapter, arch: &arch, head }, Axes::one());
    let kept = files.frozen();
    let base = adapter.map(|_| load_base(device, &files, &kept, dtype, &axes, 0, true, false)).transpose()?;
    let weights = files.weights(device, base, dtype, seed, &axes, 0)?.0;
    Ok((arch, weights))
}

/// The architecture of the model in `dir`. If it has an adapter, only that trains.
///
/// # Errors
/// The errors of `Arch::load`, and of `AdapterFiles::open`.
pub fn adapted(dir: &Path, adapter: Option<&Path>, head: Head) -> Result<Arch> {
    let mut arch = Arch::load(dir)?;
    if let Some(adapter) = adapter {
        if adapter_files::has_tower(adapter)? {
            arch = arch.with_tower().map_err(|e| e.within(dir.display()))?;
        }
        arch.tuning = Some(Arc::new(AdapterFiles::open(adapter, &ParamTable::new(&arch, head).shapes())?.tuning));
    }
    Ok(arch)
}

/// The files of a model, and the head that it gets.
#[derive(Clone, Copy)]
pub struct ModelFiles<'a> {
    pub dir: &'a Path,
    pub adapter: Option<&'a Path>,
    pub arch: &'a Arch,
    pub head: Head,
}

impl ModelFiles<'_> {
    /// The table of all parameters of the model, without adapters.
    pub fn whole(&self) -> ParamTable {
        ParamTable::new(&Arch { tuning: None, ..self.arch.clone() }, self.head)
    }

    /// The names of the parameters that do not train.
    pub fn frozen(&self) -> BTreeSet<String> {
        let Some(tuning) = &self.arch.tuning else { return BTreeSet::new() };
        let whole = self.whole();
        let frozen = whole.specs().iter().filter(|spec| !tuning.whole.contains(spec.file_name()));
        frozen.map(|spec| spec.name.clone()).collect()
    }

    /// The files, which are checked.
    ///
    /// # Errors
    /// The errors of `open`, and of `AdapterFiles::open`.
    pub fn source(&self) -> Result<Source> {
        open_table(self, Arc::new(self.whole()), 0)
    }

    /// This rank's part of the table of what trains, on the base `base`.
    ///
    /// # Errors
    /// The errors of `open` about config.json.
    pub fn table(&self, device: Device, base: Option<&Weights>, axes: &Axes) -> Result<Arc<ParamTable>> {
        self.arch.check_pipeline(axes.pipeline.size() * axes.chunks).map_err(|e| e.within(self.dir.display()))?;
        let table = table_on(device, self.dir, self.arch, self.head, TensorPart::from_group(&axes.tensor))?;
        Ok(base.map_or_else(|| table.clone(), |base| Arc::new(table.on_base(self.arch, &base.table))))
    }

    /// This rank's weights at ZeRO stage `stage`, and their source.
    ///
    /// # Errors
    /// The errors of `load`.
    pub fn weights(
        &self,
        device: Device,
        base: Option<Rc<Weights>>,
        dtype: DType,
        seed: u64,
        axes: &Axes,
        stage: usize,
    ) -> Result<(Weights, Source)> {
        let source = open_table(self, self.table(device, base.as_deref(), axes)?, seed)?;
        let shards = Shards::new(&source.table, axes, stage);
        let weights = Weights::build(source.table.clone(), dtype, &shards, |values| source.fill_unit(values))?;
        Ok((weights.on_base(base), source))
    }
}

/// The parameters `kept` of a frozen base, which several models may share. Without `reads`, their values are
/// unspecified. With `quantize`, layers are in nf4.
///
/// # Errors
/// The errors of `load`.
pub fn load_base(
    device: Device,
    files: &ModelFiles,
    kept: &BTreeSet<String>,
    dtype: DType,
    axes: &Axes,
    stage: usize,
    reads: bool,
    quantize: bool,
) -> Result<Rc<Weights>> {
    let ModelFiles { dir, head, .. } = *files;
    let arch = Arch { tuning: None, ..files.arch.clone() };
    let part = TensorPart::from_group(&axes.tensor);
    arch.check_tensor(part.size)
        .and_then(|()| arch.check_pipeline(axes.pipeline.size() * axes.chunks))
        .map_err(|e| e.within(dir.display()))?;
    let table = Arc::new(ParamTable::of_base(device, &arch, head, part, kept));
    let shards = Shards::new(&table, axes, stage);
    let source = || open_table(&ModelFiles { dir, adapter: None, arch: &arch, head }, table.clone(), 0);
    let source = if reads { Some(source()?) } else { None };
    let fill = |values| match &source {
        Some(source) => source.fill_unit(values),
        None => Ok(values),
    };
    let weights = if quantize {
        let of_unit = |unit| match &source {
            None => Ok(QuantizedUnit::planned(&table, unit, dtype, &shards)),
            Some(source) => QuantizedUnit::build(&table, unit, dtype, &shards, |spec| source.quantized(spec), fill),
        };
        Weights::quantized(table.clone(), dtype, &shards, of_unit, fill)
    } else {
        Weights::build(table.clone(), dtype, &shards, fill)
    };
    weights.map(Rc::new)
}

/// A model directory whose files match its config.json, and the part that a rank of the tensor axis reads.
pub struct Source {
    pub arch: Arch,
    /// The parameters of this rank.
    pub table: Arc<ParamTable>,
    checkpoint: Checkpoint,
    /// The matrices in nf4 by name.
    quantized: HashMap<String, Quantized>,
    adapter: Option<AdapterFiles>,
    /// The parameters of the whole model that train, if it has adapters.
    adapters: Option<ParamTable>,
    seed: u64,
}

/// Opens a model directory for weights on `device`, with its architecture, which may leave off padding of the
/// vocabulary. Checks everything but the values before anything is allocated.
///
/// # Errors
/// The errors of `load`, except those about values; `Usage` if the model cannot be split into `part.size` parts.
pub fn open(device: Device, dir: &Path, arch: &Arch, head: Head, seed: u64, part: TensorPart) -> Result<Source> {
    let table = table_on(device, dir, arch, head, part)?;
    open_table(&ModelFiles { dir, adapter: None, arch, head }, table, seed)
}

/// The same for the parameters of `table`, which are all that trains, or a frozen base.
///
/// # Errors
/// The errors of `open`, and of `AdapterFiles::open`.
pub(super) fn open_table(files: &ModelFiles, table: Arc<ParamTable>, seed: u64) -> Result<Source> {
    let checkpoint = Checkpoint::open(files.dir)?;
    let whole = files.whole();
    let adapter = files.adapter.map(|dir| AdapterFiles::open(dir, &whole.shapes())).transpose()?;
    let is_elsewhere =
        |name: &str| table.find(name).is_none() || adapter.as_ref().is_some_and(|adapter| adapter.get(name).is_some());
    let quantized = check(files.dir, files.arch, &whole, &checkpoint, is_elsewhere)?;
    let adapters = files.arch.tuning.as_ref().map(|_| ParamTable::new(files.arch, files.head));
    Ok(Source { arch: files.arch.clone(), table, checkpoint, quantized, adapter, adapters, seed })
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
            if let Some(tensor) = self.stored(spec.file_name()).filter(|tensor| tensor.dtype != Dtype::U8) {
                let (k, elements) =
                    (spec.full_dims().1, whole_rows(spec, part.start - spec.offset..part.end - spec.offset));
                let rows = spec.file_rows().span(elements.start / k..elements.end.div_ceil(k));
                tensor.will_need(rows.start * k..rows.end * k);
            }
        }
    }

    /// Whether weights of `dtype` differ from the values in the files or from the new head.
    pub fn is_rounded(&self, dtype: DType) -> bool {
        let is_finer = |spec: &ParamSpec| match self.stored(spec.file_name()) {
            Some(stored) => stored.dtype != Dtype::BF16,
            None => self.mxfp4(spec.file_name()).is_none(),
        };
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

    /// This rank's part of a matrix in nf4: as in the files, or quantized now.
    fn quantized(&self, spec: &ParamSpec) -> Result<Nf4<'static>> {
        let (name, file) = (spec.file_name(), spec.file_rows());
        let ((n, k), mut rows) = (spec.full_dims(), spec.rows.clone());
        let whole = if let Some(checked) = self.quantized.get(name) {
            if file.is_scattered() {
                let family = self.arch.family.name;
                let message = format!("matrices in nf4 cannot be read for {family}, whose rows are reordered ({name})");
                return Err(Error::data(message).hint("use the unquantized model with model.quantize = \"nf4\""));
            }
            for rows in &mut rows {
                *rows = rows.start + file.first..rows.end + file.first;
            }
            checked.matrix(&self.checkpoint, name)
        } else {
            if let Some(tensor) = self.checkpoint.get(name) {
                let in_file = file.span(0..n);
                tensor.will_need(in_file.start * k..in_file.end * k);
            }
            Nf4::quantize(n, k, &*self.values(&spec.name).expect("it is there"))
                .ok_or_else(|| self.not_finite(name))?
                .double_quantized()
        };
        self.checkpoint.release();
        if spec.elements() == whole.n * k {
            return Ok(whole.into_owned());
        }
        whole.held(&Held { rows: &rows, columns: spec.columns.clone() }).ok_or_else(|| {
            let (columns, ranks) = (&spec.columns, self.table.tensor_part().size);
            Error::usage(format!(
                "model.quantize = \"nf4\" needs parts of whole blocks of 64 columns on each of {ranks} tensor ranks (got columns \
                 {} to {} of {k} in {name})",
                columns.start, columns.end
            ))
            .hint("lower mesh.tensor")
        })
    }

    /// A matrix as a frozen base in nf4 has it; `None` for parameters that are not quantized.
    ///
    /// # Errors
    /// `Data` if a value is NaN or infinite.
    pub fn nf4(&self, name: &str) -> Result<Option<Nf4<'static>>> {
        let quantized = self
            .table
            .find(name)
            .filter(|id| self.table.is_quantized(self.table.unit_of(*id)) && self.table.spec(*id).is_projection());
        quantized.map(|id| self.quantized(self.table.spec(id))).transpose()
    }

    /// Fills `out` with row-major elements of a parameter, from element `start` on.
    ///
    /// # Errors
    /// `Data` if a value is NaN or infinite.
    ///
    /// # Panics
    /// If the files lack the parameter.
    pub fn read(&self, name: &str, start: usize, out: &mut [f32]) -> Result<()> {
        self.values(name).expect("the files have the parameter")(start, out);
        self.checkpoint.release();
        if out.iter().all(|x| x.is_finite()) { Ok(()) } else { Err(self.not_finite(&self.file_rows(name).tensor)) }
    }

    /// A parameter, or one of an adapter, which is not in the table of the whole model.
    fn spec(&self, name: &str) -> Option<&ParamSpec> {
        let of = |table: &'_ ParamTable| table.find(name).filter(|id| !id.is_frozen);
        let of_adapter = || self.adapters.as_ref().and_then(|table| Some(table.spec(of(table)?)));
        self.table.find(name).map(|id| self.table.spec(id)).or_else(of_adapter)
    }

    /// The place of a parameter in the files.
    fn file_rows(&self, name: &str) -> FileRows {
        self.spec(name).map_or_else(|| FileRows::own(name, 0), ParamSpec::file_rows)
    }

    /// The values of a parameter in the files, those of the adapter first.
    fn stored(&self, name: &str) -> Option<Stored<'_>> {
        self.adapter.as_ref().and_then(|adapter| adapter.get(name)).or_else(|| self.checkpoint.get(name))
    }

    /// The experts of a tensor in MXFP4.
    fn mxfp4(&self, name: &str) -> Option<Mxfp4<'_>> {
        Mxfp4::find(&self.checkpoint, name)
    }

    /// Fills slices with row-major values of a parameter in the files. `check` found them in a known format.
    fn values(&self, name: &str) -> Option<Box<pack::Source<'_>>> {
        let file = self.file_rows(name);
        let spec = self.spec(name);
        if let Some(values) = self.adapter.as_ref().and_then(|adapter| adapter.joined(&file.tensor)) {
            let width = spec?.file_width();
            return Some(Box::new(move |start, to: &mut [f32]| {
                file.read(width, start, to, &|at, to| to.copy_from_slice(&values[at..at + to.len()]));
            }));
        }
        let Some(tensor) = self.stored(&file.tensor) else {
            let (codes, width) = (self.mxfp4(&file.tensor)?, spec?.file_width());
            // Unlike other matrices of the family, they are not transposed.
            let file = FileRows { is_transposed: false, ..file };
            return Some(Box::new(move |start, to: &mut [f32]| {
                file.read(width, start, to, &|start, to| codes.read(start, to));
            }));
        };
        if let Some(matrix) = Fp8::open(&self.checkpoint, &file.tensor).expect("`check` found its factors") {
            let columns = tensor.shape[1];
            return Some(Box::new(move |start, to: &mut [f32]| {
                file.read(columns, start, to, &|at, to| matrix.read(at, to));
            }));
        }
        if tensor.dtype != Dtype::U8 {
            let of_tensor = || tensor.shape[1..].last().copied().unwrap_or(1);
            let width = spec.map_or_else(of_tensor, ParamSpec::file_width);
            let read = stored(tensor.dtype, tensor.bytes);
            return Some(Box::new(move |start, to: &mut [f32]| file.read(width, start, to, &read)));
        }
        let checked = self.quantized.get(&file.tensor).expect("`check` found codes");
        let nf4 = checked.matrix(&self.checkpoint, &file.tensor);
        Some(Box::new(move |start, to: &mut [f32]| file.read(nf4.k, start, to, &|start, to| nf4.read(start, to))))
    }

    /// Fills a range of the flat vector.
    fn fill(&self, range: &Range<usize>, to: SliceMut) -> Result<()> {
        // `check` found every parameter that does not begin with new values.
        let damaged = pack::fill(&self.table, range, to, |spec| {
            self.values(&spec.name).unwrap_or_else(|| init::drawn(spec, self.seed))
        });
        // Else the file contents would stay in memory together with the weights.
        self.checkpoint.release();
        let Some(id) = damaged else { return Ok(()) };
        Err(self.not_finite(self.table.spec(id).file_name()))
    }

    /// The error for a tensor of the files.
    fn not_finite(&self, name: &str) -> Error {
        let path = self.stored(name).map(|stored| stored.path).or_else(|| Some(self.mxfp4(name)?.path()));
        let path = path.expect("new values are finite").display();
        Error::data(format!("{path}: tensor {name} contains NaN or infinite values"))
            .hint("use another model: this one is damaged, or its training diverged")
    }
}

fn wrong_shape(stored: &Stored, name: &str, shape: &[usize], needed: &[usize]) -> Error {
    let path = stored.path.display();
    Error::data(format!("{path}: tensor {name} has shape {shape:?}, but config.json needs {needed:?}"))
        .hint("use the config.json that belongs to these weights")
}

/// Compares names, shapes and types in the files with the table of the whole model, before anything is allocated. Only a
/// value head may be missing: it begins with new values, or `is_elsewhere` than in these files. Returns the matrices in
/// nf4.
fn check(
    dir: &Path,
    arch: &Arch,
    table: &ParamTable,
    checkpoint: &Checkpoint,
    is_elsewhere: impl Fn(&str) -> bool,
) -> Result<HashMap<String, Quantized>> {
    let is_new = |spec: &ParamSpec| {
        spec.name == arch.head_name(Head::Value) && (arch.head == Head::LanguageModel || is_elsewhere(&spec.name))
    };
    let (mut missing, mut quantized) = (Vec::new(), HashMap::new());
    for spec in tensors(table.specs()).map(|parts| &parts[0]) {
        let name = spec.file_name();
        let Some(stored) = checkpoint.get(name) else {
            if Mxfp4::check(checkpoint, &spec.file_rows(), spec.file_width())? {
                continue;
            }
            if table.head() != Head::Value || !is_new(spec) {
                missing.push(name);
            }
            continue;
        };
        let (path, dtype, full) = (stored.path.display(), stored.dtype, spec.file_shape());
        if let Some(found) = Quantized::check(checkpoint, name)? {
            if found.shape[..] != full[..] {
                return Err(wrong_shape(&stored, name, &found.shape, &full));
            }
            quantized.insert(name.to_owned(), found);
            continue;
        }
        let is_fp8 = Fp8::open(checkpoint, name)?.is_some();
        if !is_fp8 && !matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) {
            return Err(Error::data(format!("{path}: tensor {name} must be F32, BF16 or F16 (got {dtype:?})"))
                .hint("convert the model to one of these types"));
        }
        let is_vocabulary = matches!(spec.cuts[0], Cut::Vocabulary(_));
        let fits = |rows: usize| stored.shape.first() == Some(&rows) && stored.shape[1..] == full[1..];
        if stored.shape != full && !(is_vocabulary && arch.padded_from.is_some_and(fits)) {
            return Err(wrong_shape(&stored, name, stored.shape, &full));
        }
    }
    // What other heads need, and what older checkpoints store although it follows from config.json.
    let shares = arch.tied || table.head() == Head::Value;
    let of_table: BTreeSet<&str> = table.specs().iter().map(ParamSpec::file_name).collect();
    let known = |name: &str| {
        of_table.contains(name)
            || name.ends_with("rotary_emb.inv_freq")
            || bitsandbytes::is_part(name)
            || corrections::is_correction(name)
            || fp8::matrix_of(name).is_some_and(|matrix| of_table.contains(&*matrix))
            || arch.is_further(name)
            || arch.is_other(name)
            || mxfp4::matrix_of(name).is_some_and(|of| of_table.contains(of) && checkpoint.get(of).is_none())
            || (shares && name == LM_HEAD)
    };
    let unknown: Vec<&str> = checkpoint.names().filter(|name| !known(name)).collect();
    for (what, names) in [("missing from", &missing), ("unknown in", &unknown)] {
        if !names.is_empty() {
            let (class, layers, plural) =
                (arch.family.causal, arch.blocks.len(), if arch.blocks.len() == 1 { "" } else { "s" });
            return Err(Error::data(format!("{}: {what} the safetensors files: {}", dir.display(), listed(names)))
                .hint(format!("check config.json, which describes a {class} with {layers} layer{plural}")));
        }
    }
    Ok(quantized)
}
