//! THE parameter table: every parameter of a model with its name, shape, sharding, memory layout and initialization.
//! Loading, initialization, sharding, the optimizer, checkpoints and export all read this one list.

use super::arch::Head;
use super::file_rows::FileRows;
use super::layer_units::LayerUnits;
pub(super) use super::param_spec::tensors;
pub use super::param_spec::{Init, ParamId, ParamSpec};
use super::part::{Cut, TensorPart};
use super::targets::Fused;
use super::tuning::{Adapter, Param, Tuning};
use crate::config::lora::AdapterInit;
use crate::device::Device;
use crate::tensor::{FLAT_ALIGN, Layout};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

/// The parameters in the order of the flat buffer: a vision tower, embedding, layers, final norm, head.
///
/// If only a part of a model trains, the model has two tables with equally many units: its own, of what trains, and the
/// table of its frozen base, which other models may share.
#[derive(Clone, Debug)]
pub struct ParamTable {
    head: Head,
    /// What trains; `None` if all of it does.
    tuning: Option<Arc<Tuning>>,
    /// Where the frozen parameters are. A table that only describes a layout has no base.
    base: Option<Arc<Self>>,
    /// The only parameters that the table of a base lists.
    kept: Option<BTreeSet<String>>,
    specs: Vec<ParamSpec>,
    by_name: HashMap<String, ParamId>,
    units: Vec<Range<usize>>,
    /// The number of units of a vision tower, which come first.
    tower_units: usize,
    /// Whether each unit is of a layer's experts.
    of_experts: Vec<bool>,
    layers: LayerUnits,
    len: usize,
    part: TensorPart,
    device: Device,
    /// Standard deviation of new matrices.
    init_std: f32,
}

impl ParamTable {
    /// A table without parameters, for the part of a rank of the tensor axis, laid out for a device.
    pub(super) fn empty(device: Device, head: Head, part: TensorPart, init_std: f32) -> Self {
        let (specs, by_name, units, of_experts) = (Vec::new(), HashMap::new(), Vec::new(), Vec::new());
        let (tuning, base, kept, layers) = (None, None, None, LayerUnits::default());
        let (len, tower_units) = (0, 0);
        Self {
            head,
            tuning,
            base,
            kept,
            specs,
            by_name,
            units,
            tower_units,
            of_experts,
            layers,
            len,
            part,
            device,
            init_std,
        }
    }

    /// The same, for a model of which only `tuning` trains, with the table of its base if it has one.
    pub(super) fn tuned(mut self, tuning: Option<&Arc<Tuning>>, base: Option<&Arc<Self>>) -> Self {
        self.tuning = tuning.cloned();
        self.base = base.cloned();
        self
    }

    /// The same, for a base of which only the parameters `kept` are used.
    pub(super) fn keeping(mut self, kept: &BTreeSet<String>) -> Self {
        self.kept = Some(kept.clone());
        self
    }

    /// The parameters of a frozen base, if this is its table.
    pub(super) fn kept(&self) -> Option<&BTreeSet<String>> {
        self.kept.as_ref()
    }

    /// The table of the frozen base.
    pub fn base(&self) -> Option<&Arc<Self>> {
        self.base.as_ref()
    }

    /// The adapter of the matrix `name`, and the initial values of its A for `inputs` columns.
    pub(super) fn adapter(&self, name: &str, inputs: usize) -> Option<(Adapter, Init)> {
        let tuning = self.tuning.as_ref()?;
        let adapter = *tuning.adapters.get(name)?;
        let init = match tuning.init {
            AdapterInit::Uniform => Init::Uniform { bound: 1.0 / (inputs as f32).sqrt() },
            AdapterInit::Gaussian => Init::Normal { std: 1.0 / adapter.rank as f32 },
        };
        Some((adapter, init))
    }

    /// The module with the tensors of the adapter of a parameter of all experts in the files.
    pub(super) fn tensor_module(&self, fused: &Fused) -> Option<String> {
        Some(self.tuning.as_ref()?.tensor_module(fused))
    }

    /// The initial values of a matrix.
    pub(super) fn normal(&self) -> Init {
        Init::Normal { std: self.init_std }
    }

    /// Adds a vector or a matrix, unless it is frozen. At most one of its dims is sharded. On a GPU all matrices are in
    /// row layout.
    pub(super) fn add(&mut self, name: &str, dims: &[Cut], layout: Layout, init: Init) -> ParamId {
        self.add_in(None, name, dims, layout, init)
    }

    /// The same for a parameter whose rows are elsewhere in the files than in a tensor of its name.
    pub(super) fn add_in(
        &mut self,
        file: Option<FileRows>,
        name: &str,
        dims: &[Cut],
        layout: Layout,
        init: Init,
    ) -> ParamId {
        let in_files = file.as_ref().map_or(name, |file| &file.tensor);
        let is_frozen = self.tuning.as_ref().is_some_and(|tuning| !tuning.whole.contains(in_files));
        if is_frozen || self.kept.as_ref().is_some_and(|kept| !kept.contains(name)) {
            let found = self.base.as_ref().map(|base| base.find(name).expect("the base has what is frozen"));
            return ParamId { index: found.map_or(usize::MAX, |id| id.index), is_frozen };
        }
        self.add_own(file, name, dims, layout, init)
    }

    /// Adds a vector or a matrix that trains.
    pub(super) fn add_own(
        &mut self,
        file: Option<FileRows>,
        name: &str,
        dims: &[Cut],
        layout: Layout,
        init: Init,
    ) -> ParamId {
        let rows = dims[0].held(self.part);
        let (sharded, inner) = dims[1..].split_first().unwrap_or((&Cut::Whole(1), &[]));
        let [columns] = &sharded.held(self.part)[..] else { unreachable!("columns in several pieces") };
        // Dims after the second are whole.
        let inner: Vec<usize> = inner.iter().map(|cut| cut.size()).collect();
        let each: usize = inner.iter().product();
        let columns = columns.start * each..columns.end * each;
        let copies = dims.iter().map(|dim| dim.copies(self.part.size)).min().unwrap_or(1);
        let held: [usize; 2] = [rows.iter().map(Range::len).sum(), columns.len()];
        let shape = [&[held[0], held[1] / each][..], &inner].concat();
        let layout = layout.on(self.device);
        let len = layout.len(held[0], held[1]);
        debug_assert!(len.is_multiple_of(FLAT_ALIGN));
        let id = ParamId::own(self.specs.len());
        self.by_name.insert(name.to_owned(), id);
        self.specs.push(ParamSpec {
            name: name.to_owned(),
            shape: shape[..dims.len()].to_vec(),
            cuts: dims.to_vec(),
            rows,
            columns,
            copies,
            layout,
            init,
            is_linear: false,
            fused: None,
            file,
            offset: self.len,
            len,
        });
        self.len += len;
        id
    }

    /// Marks a matrix as that of a linear layer.
    pub(super) fn mark_linear(&mut self, id: ParamId) {
        // A base does not list what trains.
        if let Some(spec) = self.specs.get_mut(id.index).filter(|_| !id.is_frozen) {
            spec.is_linear = true;
        }
    }

    /// Notes what a router or the matrix of an expert is in transformers.
    pub(super) fn mark_fused(&mut self, id: ParamId, fused: &Arc<Fused>) {
        if let Some(spec) = self.specs.get_mut(id.index).filter(|_| !id.is_frozen) {
            spec.fused = Some(fused.clone());
        }
    }

    /// Whether both tables list the same parameters at the same places.
    pub(super) fn is_laid_out_as(&self, other: &Self) -> bool {
        let places = |table: &Self| (table.part, table.device, table.head, table.units.clone());
        let same = |(a, b): (&ParamSpec, &ParamSpec)| {
            (&a.name, &a.cuts, a.layout, a.offset) == (&b.name, &b.cuts, b.layout, b.offset)
        };
        let is_same = |(a, b): (&Arc<Self>, &Arc<Self>)| a.is_laid_out_as(b);
        places(self) == places(other)
            && self.specs.iter().zip(&other.specs).all(same)
            && self.base.iter().zip(&other.base).all(is_same)
    }

    /// Ends a unit: the parameters since the one before.
    pub(super) fn end_unit(&mut self) {
        let start = self.units.last().map_or(0, |unit| unit.end);
        self.units.push(start..self.len);
        self.of_experts.push(false);
    }

    /// Ends the units of a vision tower.
    pub(super) fn end_tower(&mut self) {
        self.tower_units = self.units.len();
    }

    /// The unit of the embedding, after those of a vision tower.
    pub fn embedding_unit(&self) -> usize {
        self.tower_units
    }

    /// Ends a unit of a layer's experts, which have equal parts of it.
    pub(super) fn end_experts(&mut self) {
        self.end_unit();
        self.of_experts.pop();
        self.of_experts.push(true);
    }

    /// Sets the units of the layers, after all of them.
    pub(super) fn set_layers(&mut self, layers: LayerUnits) {
        self.layers = layers;
    }

    /// The units of the layers.
    pub(super) fn layer_units(&self) -> &LayerUnits {
        &self.layers
    }

    /// Whether each unit is of a layer's experts, which have equal parts of it.
    pub fn units_of_experts(&self) -> &[bool] {
        &self.of_experts
    }

    /// The device of the layout.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The part of the model that the table lists.
    pub fn tensor_part(&self) -> TensorPart {
        self.part
    }

    /// The head that the table contains.
    pub fn head(&self) -> Head {
        self.head
    }

    pub fn specs(&self) -> &[ParamSpec] {
        &self.specs
    }

    /// The name of the parameter that holds the flat element `at`; "padding" between two parameters.
    pub fn name_at(&self, at: usize) -> &str {
        self.specs.iter().find(|spec| spec.range().contains(&at)).map_or("padding", |spec| &spec.name)
    }

    pub fn spec(&self, id: ParamId) -> &ParamSpec {
        debug_assert!(!id.is_frozen, "a frozen parameter is in the table of the base");
        &self.specs[id.index]
    }

    /// The number of elements of the flat buffer.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The number of parameters, as papers count them: without padding.
    pub fn parameters(&self) -> usize {
        self.specs.iter().map(ParamSpec::elements).sum()
    }

    /// The name and the whole shape of each parameter, as the files of a model have them: parts of one tensor are one.
    pub fn shapes(&self) -> Vec<Param> {
        let param = |parts: &[ParamSpec]| {
            let (name, shape) = (parts[0].file_name().to_owned(), parts[0].file_shape());
            Param { name, shape, is_linear: parts[0].is_linear, fused: parts[0].fused.clone() }
        };
        let mut seen = HashSet::new();
        tensors(&self.specs).filter(|parts| seen.insert(parts[0].file_name())).map(param).collect()
    }

    pub fn find(&self, name: &str) -> Option<ParamId> {
        self.by_name.get(name).copied()
    }

    /// The flat ranges of the units, which are gathered and reduced one at a time: those of a tower, the embedding, each
    /// layer, after it
    /// the gates and ups of its experts and their downs, the final norm with the head. They cover the flat buffer in order.
    pub fn units(&self) -> &[Range<usize>] {
        &self.units
    }

    /// The parameters that a flat range overlaps, with the overlap of each.
    pub(super) fn parts(&self, range: &Range<usize>) -> impl Iterator<Item = (ParamId, Range<usize>)> {
        let Range { start, end } = *range;
        let first = self.specs.partition_point(|s| s.offset + s.len <= start);
        let touched = self.specs[first..].iter().enumerate().take_while(move |(_, s)| s.offset < end);
        touched.map(move |(i, s)| (ParamId::own(first + i), start.max(s.offset)..end.min(s.offset + s.len)))
    }

    /// The unit of a parameter, of the own table or of the base.
    ///
    /// # Panics
    /// If the parameter is frozen, and the table has no base.
    pub fn unit_of(&self, id: ParamId) -> usize {
        if id.is_frozen {
            return self.base.as_ref().expect("a base").unit_of(ParamId::own(id.index));
        }
        let offset = self.spec(id).offset;
        self.units.partition_point(|unit| unit.end <= offset)
    }
}
