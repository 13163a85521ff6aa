//! THE parameter table: every parameter of a model with its name, shape, sharding, memory layout and initialization.
//! Loading, initialization, sharding, the optimizer, checkpoints and export all read this one list.

use super::arch::{Arch, EMBEDDING, Head};
use super::part::{Dim, TensorPart};
use crate::device::Device;
use crate::tensor::{FLAT_ALIGN, Layout, PANEL};
use std::collections::HashMap;
use std::ops::Range;

/// The initial values of a new parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    Zeros,
    Ones,
    /// Normal with mean 0.
    Normal {
        std: f32,
    },
}

/// Index of a parameter in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub usize);

/// One parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// The Hugging Face name.
    pub name: String,
    /// (outputs, inputs ...) of a matrix, (elements) of a vector: this rank's part.
    pub shape: Vec<usize>,
    /// The shape of the whole parameter, as in the files of a model.
    pub full: Vec<usize>,
    /// The rows (for a vector: elements) of the whole that this rank holds, in its order.
    pub rows: Vec<Range<usize>>,
    /// The columns of the whole that this rank holds; 0..1 for a vector.
    pub columns: Range<usize>,
    /// The number of copies of each element over all tensor ranks. Sums over all ranks count an element this often.
    pub copies: usize,
    pub layout: Layout,
    pub init: Init,
    /// Whether updates change it. A frozen parameter has no gradient and no weight decay.
    pub trainable: bool,
    /// First element in the flat buffer, a multiple of `FLAT_ALIGN`.
    pub offset: usize,
    /// Elements in the flat buffer, padding included.
    pub len: usize,
}

impl ParamSpec {
    /// (rows, columns). All dims but the first are columns; a vector is one row.
    pub fn dims(&self) -> (usize, usize) {
        match &self.shape[..] {
            [k] => (1, *k),
            [n, inner @ ..] => (*n, inner.iter().product()),
            [] => (1, 1),
        }
    }

    /// (rows, columns) of the whole parameter. The elements of a vector are rows of one column.
    pub(super) fn full_dims(&self) -> (usize, usize) {
        let (n, inner) = self.full.split_first().map_or((1, &[][..]), |(n, inner)| (*n, inner));
        (n, inner.iter().product())
    }

    /// Elements without padding.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether weight decay applies: to trainable matrices, not to norms and biases.
    pub fn decays(&self) -> bool {
        self.trainable && self.shape.len() >= 2
    }

    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len
    }

    /// The flat range of some held rows, rounded to whole panels.
    pub(super) fn flat_rows(&self, rows: &Range<usize>) -> Range<usize> {
        let (k, Range { start, end }) = (self.columns.len(), rows.clone());
        let place = match self.layout {
            Layout::Row => start * k..end * k,
            Layout::Panel => {
                let row = k.next_multiple_of(2);
                start / PANEL * PANEL * row..end.next_multiple_of(PANEL) * row
            }
        };
        self.offset + place.start..self.offset + place.end
    }

    /// The held runs of rows of the whole parameter, each with the index of its first row among the held rows.
    pub(super) fn held_rows(&self) -> impl Iterator<Item = (usize, &Range<usize>)> {
        self.rows.iter().scan(0, |end, rows| {
            let start = *end;
            *end += rows.len();
            Some((start, rows))
        })
    }
}

/// The parameters in the order of the flat buffer: embedding, layers, final norm, head.
#[derive(Clone, Debug)]
pub struct ParamTable {
    head: Head,
    specs: Vec<ParamSpec>,
    by_name: HashMap<String, ParamId>,
    units: Vec<Range<usize>>,
    len: usize,
    part: TensorPart,
    device: Device,
}

impl ParamTable {
    /// The whole model on one rank.
    pub fn new(arch: &Arch, head: Head) -> Self {
        Self::on(Device::Cpu, arch, head, TensorPart::whole())
    }

    /// The part of a rank of the tensor axis, laid out for a device. On a GPU all matrices are in row layout.
    ///
    /// # Panics
    /// If the architecture cannot be split into this many parts (`Arch::check_tensor`).
    pub fn on(device: Device, arch: &Arch, head: Head, part: TensorPart) -> Self {
        if let Err(error) = arch.check_tensor(part.size) {
            panic!("{error}");
        }
        let (specs, by_name, units) = (Vec::new(), HashMap::new(), Vec::new());
        let mut table = Self { head, specs, by_name, units, len: 0, part, device };
        let normal = Init::Normal { std: arch.init_std };
        let matrix = [Dim::Vocabulary, Dim::Whole(arch.width)];
        // A matrix that is only looked up lies row by row; one that is also multiplied lies in panels.
        let is_multiplied = arch.tied && head == Head::LanguageModel;
        table.add(arch, EMBEDDING, &matrix, if is_multiplied { Layout::Panel } else { Layout::Row }, normal);
        table.end_unit();
        for layer in 0..arch.layers {
            table.add_layer(arch, &format!("model.layers.{layer}"));
            table.end_unit();
        }
        table.add_norm(arch, "model.norm", arch.width);
        match head {
            Head::LanguageModel if arch.tied => {}
            Head::LanguageModel => table.add(arch, &arch.head_name(head), &matrix, Layout::Panel, normal),
            Head::Value => {
                let init = Init::Normal { std: 1.0 / (arch.width as f32 + 1.0) };
                table.add(arch, &arch.head_name(head), &[Dim::Whole(1), matrix[1]], Layout::Row, init);
            }
        }
        table.end_unit();
        table
    }

    fn add_layer(&mut self, arch: &Arch, layer: &str) {
        let hidden = Dim::Whole(arch.width);
        self.add_norm(arch, &format!("{layer}.input_layernorm"), arch.width);
        for (name, outputs) in [("q_proj", Dim::Heads), ("k_proj", Dim::KvHeads), ("v_proj", Dim::KvHeads)] {
            self.add_linear(arch, &format!("{layer}.self_attn.{name}"), [outputs, hidden], arch.qkv_bias);
        }
        for name in ["q_norm", "k_norm"].into_iter().filter(|_| arch.qk_norm) {
            self.add_norm(arch, &format!("{layer}.self_attn.{name}"), arch.head_dim);
        }
        self.add_linear(arch, &format!("{layer}.self_attn.o_proj"), [hidden, Dim::Heads], arch.o_bias);
        self.add_norm(arch, &format!("{layer}.post_attention_layernorm"), arch.width);
        for name in ["gate_proj", "up_proj"] {
            self.add_linear(arch, &format!("{layer}.mlp.{name}"), [Dim::Mlp, hidden], arch.mlp_bias);
        }
        self.add_linear(arch, &format!("{layer}.mlp.down_proj"), [hidden, Dim::Mlp], arch.mlp_bias);
    }

    fn add_norm(&mut self, arch: &Arch, name: &str, width: usize) {
        self.add(arch, &format!("{name}.weight"), &[Dim::Whole(width)], Layout::Row, Init::Ones);
    }

    /// Adds a matrix of outputs and inputs, and its bias if it has one. The bias is sharded with the outputs. If the
    /// inputs are sharded, it is added once, after the sum over ranks.
    fn add_linear(&mut self, arch: &Arch, name: &str, dims: [Dim; 2], bias: bool) {
        let init = Init::Normal { std: arch.init_std };
        self.add(arch, &format!("{name}.weight"), &dims, Layout::Panel, init);
        if bias {
            self.add(arch, &format!("{name}.bias"), &dims[..1], Layout::Row, Init::Zeros);
        }
    }

    /// Adds a vector or a matrix. At most one of its dims is sharded.
    fn add(&mut self, arch: &Arch, name: &str, dims: &[Dim], layout: Layout, init: Init) {
        let (n, rows) = dims[0].held(arch, self.part);
        let (k, columns) = dims.get(1).unwrap_or(&Dim::Whole(1)).held(arch, self.part);
        let [columns] = &columns[..] else { unreachable!("columns in {} pieces", columns.len()) };
        let columns = columns.clone();
        let copies = dims.iter().map(|dim| dim.copies(arch, self.part)).min().unwrap_or(1);
        let held = [rows.iter().map(Range::len).sum(), columns.len()];
        let layout = layout.on(self.device);
        let len = layout.len(held[0], held[1]);
        debug_assert!(len.is_multiple_of(FLAT_ALIGN));
        self.by_name.insert(name.to_owned(), ParamId(self.specs.len()));
        self.specs.push(ParamSpec {
            name: name.to_owned(),
            shape: held[..dims.len()].to_vec(),
            full: [n, k][..dims.len()].to_vec(),
            rows,
            columns,
            copies,
            layout,
            init,
            trainable: true,
            offset: self.len,
            len,
        });
        self.len += len;
    }

    fn end_unit(&mut self) {
        let start = self.units.last().map_or(0, |unit| unit.end);
        self.units.push(start..self.len);
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
        &self.specs[id.0]
    }

    /// Excludes the parameters that `frozen` selects from training.
    pub fn freeze(&mut self, frozen: impl Fn(&ParamSpec) -> bool) {
        self.specs.iter_mut().for_each(|spec| spec.trainable &= !frozen(spec));
    }

    /// The ranges of a unit's frozen parameters, counted from its start.
    pub fn frozen(&self, unit: usize) -> impl Iterator<Item = Range<usize>> {
        let unit = &self.units[unit];
        let frozen = self.specs.iter().filter(|spec| !spec.trainable && unit.contains(&spec.offset));
        frozen.map(|spec| spec.offset - unit.start..spec.offset - unit.start + spec.len)
    }

    /// The number of elements of the flat buffer.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The number of parameters, as papers count them: without padding.
    pub fn parameters(&self) -> usize {
        self.specs.iter().map(ParamSpec::elements).sum()
    }

    pub fn find(&self, name: &str) -> Option<ParamId> {
        self.by_name.get(name).copied()
    }

    /// The parameter with this name.
    ///
    /// # Panics
    /// If there is none.
    pub(super) fn id(&self, name: &str) -> ParamId {
        self.find(name).unwrap_or_else(|| panic!("the table has no {name}"))
    }

    /// The flat ranges of the units, which are gathered and reduced one at a time: the embedding, each layer, the final
    /// norm with the head. They cover the flat buffer in order.
    pub fn units(&self) -> &[Range<usize>] {
        &self.units
    }

    /// The parameters that a flat range overlaps, with the overlap of each.
    pub(super) fn parts(&self, range: &Range<usize>) -> impl Iterator<Item = (ParamId, Range<usize>)> {
        let Range { start, end } = *range;
        let first = self.specs.partition_point(|s| s.offset + s.len <= start);
        let touched = self.specs[first..].iter().enumerate().take_while(move |(_, s)| s.offset < end);
        touched.map(move |(i, s)| (ParamId(first + i), start.max(s.offset)..end.min(s.offset + s.len)))
    }

    /// The unit of a parameter.
    pub fn unit_of(&self, id: ParamId) -> usize {
        let offset = self.spec(id).offset;
        self.units.partition_point(|unit| unit.end <= offset)
    }
}
