//! The safetensors of an export: one file, or several with an index. They are written unit by unit, a few MiB at a
//! time.

use super::corrections::Corrections;
use super::file_rows::FileRows;
use super::files::{Checkpoint, Stored};
use super::naming::Naming;
use super::params::{ParamSpec, ParamTable, tensors};
use super::weights::UnitValues;
use super::weights::pack::unpack_rows;
use super::wrapper;
use crate::dtype::round_bf16;
use crate::error::Result;
use crate::sys::files::{self, LargeFile};
use crate::tensor::{DType, Layout, PANEL};
use rayon::prelude::*;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The number of elements written at a time.
const PIECE: usize = 1 << 20;
/// The number of elements that one task rounds.
const CHUNK: usize = 1 << 16;

/// The files of an export in progress, in the order of the table.
#[derive(Debug)]
pub(super) struct TensorFiles {
    dir: PathBuf,
    names: Names,
    table: Arc<ParamTable>,
    dtype: DType,
    /// The parameters of each file.
    files: Vec<Range<usize>>,
    /// The next parameter.
    next: usize,
    /// The number of its elements that are written.
    written: usize,
    open: Option<LargeFile>,
    staging: Staging,
    /// The files of a model around the language model, whose other tensors are copied.
    pub(super) others: Option<Checkpoint>,
    /// Numbers of routers, which the last file of the table has, too.
    pub(super) corrections: Corrections,
    /// Whether each parameter is in a tensor whose values have another order in the files, or are apart in the table. Each
    /// matrix of it is written as a whole.
    holds: Vec<bool>,
    /// The values so far of such matrices, by their tensors.
    held: BTreeMap<String, Held>,
}

/// The values so far of a matrix, and their number.
#[derive(Debug, Default)]
struct Held {
    values: Vec<f32>,
    placed: usize,
}

/// The names in an export.
#[derive(Clone, Copy, Debug)]
pub(super) struct Names {
    /// The start of the files' names.
    pub file: &'static str,
    /// The text before each parameter's name.
    pub prefix: &'static str,
    pub naming: Naming,
}

impl Names {
    fn of(self, spec: &ParamSpec) -> String {
        format!("{}{}", self.prefix, self.naming.in_files(spec.file_name()))
    }
}

pub(super) const OF_MODEL: Names = Names { file: "model", prefix: "", naming: Naming::Plain };

/// A piece of a parameter: in memory order, row by row, and in bf16.
#[derive(Debug, Default)]
struct Staging {
    flat: Vec<f32>,
    rows: Vec<f32>,
    bits: Vec<u16>,
}

impl TensorFiles {
    /// Files of at most `shard_bytes_max` bytes of tensors each. A larger tensor gets a file of its own.
    pub(super) fn new(dir: &Path, names: Names, table: &Arc<ParamTable>, dtype: DType, shard_bytes_max: usize) -> Self {
        let (mut files, mut holds): (Vec<Range<usize>>, Vec<bool>) = (Vec::new(), Vec::new());
        let (mut bytes, mut end) = (0, 0);
        let mut runs: BTreeMap<&str, usize> = BTreeMap::new();
        tensors(table.specs()).for_each(|parts| *runs.entry(parts[0].file_name()).or_default() += 1);
        for parts in tensors(table.specs()) {
            let (start, size) = (end, parts.iter().map(ParamSpec::elements).sum::<usize>() * dtype.bytes());
            end += parts.len();
            let is_scattered = |spec: &ParamSpec| spec.file.as_ref().is_some_and(FileRows::is_scattered);
            let is_apart = runs[parts[0].file_name()] > 1;
            holds.resize(end, is_apart || parts.iter().any(is_scattered));
            match files.last_mut() {
                Some(file) if bytes + size <= shard_bytes_max || bytes == 0 => file.end = end,
                _ => {
                    files.push(start..end);
                    bytes = 0;
                }
            }
            bytes += size;
        }
        Self {
            dir: dir.into(),
            names,
            table: table.clone(),
            dtype,
            files,
            next: 0,
            written: 0,
            open: None,
            staging: Staging::default(),
            others: None,
            corrections: Corrections::default(),
            holds,
            held: BTreeMap::new(),
        }
    }

    /// The same with another limit.
    pub(super) fn cut_at(&mut self, shard_bytes_max: usize) -> Self {
        Self {
            others: self.others.take(),
            corrections: std::mem::take(&mut self.corrections),
            ..Self::new(&self.dir, self.names, &self.table, self.dtype, shard_bytes_max)
        }
    }

    fn name(&self, file: usize) -> String {
        let stem = self.names.file;
        match self.files.len() + usize::from(self.others.is_some()) {
            1 => format!("{stem}.safetensors"),
            n => format!("{stem}-{:05}-of-{n:05}.safetensors", file + 1),
        }
    }

    /// Writes the parameters of a unit.
    ///
    /// # Panics
    /// If the values are not the whole next unit.
    pub(super) fn unit(&mut self, values: &UnitValues) -> Result<()> {
        let (table, mut staging) = (self.table.clone(), std::mem::take(&mut self.staging));
        for (id, part) in table.parts(&values.range()) {
            let spec = table.spec(id);
            assert!(id.index == self.next && part == spec.range(), "{} is written out of order", spec.name);
            let (n, k) = spec.full_dims();
            let each = (PIECE / k.max(1) / PANEL).max(1) * PANEL;
            for first in (0..n).step_by(each) {
                let rows = first..(first + each).min(n);
                if self.holds[id.index] {
                    self.hold(staging.rows(spec, values, rows))?;
                } else {
                    let elements = rows.len() * k;
                    self.piece(elements, staging.bytes(spec, values, rows, self.dtype))?;
                }
            }
        }
        self.staging = staging;
        Ok(())
    }

    /// Writes the next rows of parameter `index`.
    ///
    /// # Panics
    /// If `index` is not the next parameter.
    pub(super) fn rows(&mut self, index: usize, rows: &[f32]) -> Result<()> {
        assert_eq!(index, self.next, "{} is written out of order", self.table.specs()[index].name);
        if self.holds[index] {
            return self.hold(rows);
        }
        let mut bits = std::mem::take(&mut self.staging.bits);
        self.piece(rows.len(), in_dtype(rows, self.dtype, &mut bits))?;
        self.staging.bits = bits;
        Ok(())
    }

    /// Puts the next rows of the current parameter in the order of their matrix of the tensor, which is written once it is
    /// whole.
    fn hold(&mut self, rows: &[f32]) -> Result<()> {
        let spec = &self.table.specs()[self.next];
        let (file, width) = (spec.file_rows().in_matrix(), spec.file_width());
        let held = self.held.entry(file.tensor.clone()).or_default();
        held.values.resize(file.of * file.width(width), 0.0);
        file.write(width, self.written / width, rows, &mut held.values);
        held.placed += rows.len();
        if held.placed < held.values.len() {
            return self.piece(rows.len(), &[]);
        }
        let held = self.held.remove(&file.tensor).expect("it was added");
        let mut bits = std::mem::take(&mut self.staging.bits);
        self.piece(rows.len(), in_dtype(&held.values, self.dtype, &mut bits))?;
        self.staging.bits = bits;
        Ok(())
    }

    /// Writes the next elements of the current parameter, whose `bytes` are written here or later.
    fn piece(&mut self, elements: usize, bytes: &[u8]) -> Result<()> {
        if self.written == 0
            && let Some(file) = self.files.iter().position(|file| file.start == self.next)
        {
            self.begin(file)?;
        }
        self.open.as_mut().expect("a file was begun").write(bytes)?;
        self.written += elements;
        if self.written == self.table.specs()[self.next].elements() {
            (self.written, self.next) = (0, self.next + 1);
            if self.files.iter().any(|file| file.end == self.next) {
                let mut file = self.open.take().expect("a file was begun");
                if self.next == self.table.specs().len() {
                    self.corrections.tensors().try_for_each(|(_, values)| file.write(bytemuck::cast_slice(values)))?;
                }
                file.finish()?;
            }
        }
        Ok(())
    }

    fn begin(&mut self, file: usize) -> Result<()> {
        let corrections = (file + 1 == self.files.len()).then_some(&self.corrections);
        let header = header(self.names, &self.table.specs()[self.files[file].clone()], corrections, self.dtype);
        let file = self.open.insert(LargeFile::create(&self.dir.join(self.name(file)))?);
        file.write(&(header.len() as u64).to_le_bytes())?;
        file.write(&header)
    }

    /// Writes the index if there are several files.
    ///
    /// # Panics
    /// If a unit is missing.
    pub(super) fn finish(&mut self) -> Result<()> {
        let specs = self.table.specs();
        assert_eq!(self.next, specs.len(), "the number of written parameters");
        if self.files.len() == 1 && self.others.is_none() {
            return Ok(());
        }
        let mut weight_map = Map::new();
        for (i, file) in self.files.iter().enumerate() {
            let name = self.name(i);
            weight_map.extend(specs[file.clone()].iter().map(|spec| (self.names.of(spec), json!(name))));
        }
        for (tensor, _) in self.corrections.tensors() {
            weight_map.insert(self.names.naming.in_files(tensor), json!(self.name(self.files.len() - 1)));
        }
        let corrections: usize = self.corrections.tensors().map(|(_, values)| size_of_val(values)).sum();
        let weights: usize = specs.iter().map(|s| s.elements() * self.dtype.bytes()).sum();
        let mut total = weights + corrections;
        if let Some(others) = &self.others {
            let name = self.name(self.files.len());
            total += self.copy_others(others, &name)?;
            weight_map.extend(self.others_of(others).map(|(tensor, _)| (tensor.to_owned(), json!(name))));
        }
        let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        write_json(&self.dir.join("model.safetensors.index.json"), &index)
    }
}

impl TensorFiles {
    /// The tensors outside the language model that are not in the table.
    pub(super) fn others_of<'a>(&'a self, others: &'a Checkpoint) -> impl Iterator<Item = (&'a str, Stored<'a>)> {
        wrapper::others(others, |name| self.table.specs().iter().any(|spec| spec.file_name() == name))
    }

    /// Copies the tensors outside the language model to a file of their own, as they are. Returns their bytes.
    fn copy_others(&self, others: &Checkpoint, name: &str) -> Result<usize> {
        let mut entries = Map::new();
        entries.insert("__metadata__".into(), json!({"format": "pt"}));
        let mut start = 0;
        for (tensor, stored) in self.others_of(others) {
            let end = start + stored.bytes.len();
            let entry = json!({"dtype": stored.dtype, "shape": stored.shape, "data_offsets": [start, end]});
            entries.insert(tensor.to_owned(), entry);
            start = end;
        }
        let header = padded(entries);
        let mut file = LargeFile::create(&self.dir.join(name))?;
        file.write(&(header.len() as u64).to_le_bytes())?;
        file.write(&header)?;
        for (_, stored) in self.others_of(others) {
            stored.bytes.chunks(PIECE).try_for_each(|piece| file.write(piece))?;
        }
        file.finish()?;
        others.release();
        Ok(start)
    }
}

impl Staging {
    /// The bytes of a parameter's rows in the format of a file. The rows start at a panel boundary.
    fn bytes(&mut self, spec: &ParamSpec, values: &UnitValues, rows: Range<usize>, dtype: DType) -> &[u8] {
        if [values.dtype(), dtype] == [DType::Bf16; 2] && spec.layout == Layout::Row {
            self.bits.resize(rows.len() * spec.columns.len(), 0);
            values.read_bits(&spec.flat_rows(&rows), &mut self.bits);
            return bytemuck::cast_slice(&self.bits);
        }
        self.rows(spec, values, rows);
        in_dtype(&self.rows, dtype, &mut self.bits)
    }

    /// The values of a parameter's rows, which start at a panel boundary.
    fn rows(&mut self, spec: &ParamSpec, values: &UnitValues, rows: Range<usize>) -> &[f32] {
        let range = spec.flat_rows(&rows);
        self.flat.resize(range.len(), 0.0);
        self.rows.resize(rows.len() * spec.columns.len(), 0.0);
        values.to_master(&range, &mut self.flat);
        unpack_rows(spec, &self.flat, &mut self.rows);
        &self.rows
    }
}

/// The bytes of `rows` in the format of a file. `bits` is scratch memory.
fn in_dtype<'a>(rows: &'a [f32], dtype: DType, bits: &'a mut Vec<u16>) -> &'a [u8] {
    if dtype == DType::F32 {
        return bytemuck::cast_slice(rows);
    }
    bits.resize(rows.len(), 0);
    let chunks = bits.par_chunks_mut(CHUNK).zip(rows.par_chunks(CHUNK));
    chunks.for_each(|(to, from)| to.iter_mut().zip(from).for_each(|(t, &x)| *t = round_bf16(x)));
    bytemuck::cast_slice(bits)
}

/// The JSON header of a safetensors file, padded so that the data starts at a multiple of 8.
fn header(names: Names, specs: &[ParamSpec], corrections: Option<&Corrections>, dtype: DType) -> Vec<u8> {
    let name = match dtype {
        DType::F32 => "F32",
        DType::Bf16 => "BF16",
    };
    let mut entries = Map::new();
    entries.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut start = 0;
    // In the order in which they are complete, which is that of their bytes.
    let mut ends: BTreeMap<&str, usize> = BTreeMap::new();
    ends.extend(specs.iter().enumerate().map(|(i, spec)| (spec.file_name(), i)));
    for (_, first) in specs.iter().enumerate().filter(|(i, spec)| ends[spec.file_name()] == *i) {
        let shape = if first.file.is_some() { first.file_shape() } else { first.shape.clone() };
        let end = start + shape.iter().product::<usize>() * dtype.bytes();
        let entry = json!({"dtype": name, "shape": shape, "data_offsets": [start, end]});
        entries.insert(names.of(first), entry);
        start = end;
    }
    for (tensor, values) in corrections.into_iter().flat_map(Corrections::tensors) {
        let end = start + size_of_val(values);
        let entry = json!({"dtype": "F32", "shape": [values.len()], "data_offsets": [start, end]});
        entries.insert(names.naming.in_files(tensor), entry);
        start = end;
    }
    padded(entries)
}

fn padded(entries: Map<String, Value>) -> Vec<u8> {
    let mut header = Value::Object(entries).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    header
}

pub(super) fn write_json(path: &Path, value: &Value) -> Result<()> {
    files::write_atomic(path, format!("{value:#}\n").as_bytes())
}
