//! THE parameter table: every parameter of a model with its name, shape, sharding, memory layout and initialisation.
//! Loading, initialisation, sharding, the optimizer, checkpoints and export all read this one list.

use super::arch::{Arch, Head};
use super::part::{Dim, Held, Parts, TensorPart};
use crate::device::Device;
use crate::tensor::{FLAT_ALIGN, Layout};
use std::collections::HashMap;
use std::ops::Range;

/// How the tensor axis cuts a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shard {
    /// By outputs (rows of W, or elements of a bias).
    Column,
    /// By inputs (columns of W).
    Row,
    /// By rows of the vocabulary.
    Vocab,
    /// Every rank holds all of it.
    Replicate,
}

/// How a new parameter starts.
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
    /// (outputs, inputs ...) of a matrix, (elements) of a vector, as far as this rank holds it.
    pub shape: Vec<usize>,
    /// The shape of the whole parameter, as in the files of a model.
    pub full: Vec<usize>,
    /// Rows (of a vector: elements) of the whole that this rank holds, in the order in which it holds them.
    pub rows: Vec<Range<usize>>,
    /// Columns of the whole that this rank holds; 0..1 of a vector.
    pub columns: Range<usize>,
    /// How many copies of each element the tensor ranks hold together: sums over all ranks count it so often.
    pub copies: usize,
    pub shard: Shard,
    pub layout: Layout,
    pub init: Init,
    /// Whether updates change it: a frozen one has no gradient and no weight decay.
    pub trainable: bool,
    /// First element in the flat buffer, a multiple of `FLAT_ALIGN`.
    pub offset: usize,
    /// Elements in the flat buffer, padding included.
    pub len: usize,
}

impl ParamSpec {
    /// (rows, columns): all dims but the first are columns; a vector is one row.
    pub fn dims(&self) -> (usize, usize) {
        match &self.shape[..] {
            [k] => (1, *k),
            [n, inner @ ..] => (*n, inner.iter().product()),
            [] => (1, 1),
        }
    }

    /// (rows, columns) of the whole; the elements of a vector are rows of one column.
    pub(super) fn full_dims(&self) -> (usize, usize) {
        let (n, inner) = self.full.split_first().map_or((1, &[][..]), |(n, inner)| (*n, inner));
        (n, inner.iter().product())
    }

    /// Elements without padding.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether weight decay applies: to matrices that are trained, not to norms and biases.
    pub fn decays(&self) -> bool {
        self.trainable && self.shape.len() >= 2
    }

    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len
    }

    /// The runs of rows of the whole that this rank holds, each with the index of its first row among those held.
    pub(super) fn held_rows(&self) -> impl Iterator<Item = (usize, &Range<usize>)> {
        self.rows.iter().scan(0, |end, rows| {
            let start = *end;
            *end += rows.len();
            Some((start, rows))
        })
    }
}

/// The parameters of a projection.
#[derive(Clone, Copy, Debug)]
pub(super) struct LinearSlots {
    pub weight: ParamId,
    pub bias: Option<ParamId>,
}

/// The parameters of attention in one layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionSlots {
    pub q: LinearSlots,
    pub k: LinearSlots,
    pub v: LinearSlots,
    pub o: LinearSlots,
    pub q_norm: Option<ParamId>,
    pub k_norm: Option<ParamId>,
}

/// The parameters of the MLP in one layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct MlpSlots {
    pub gate: LinearSlots,
    pub up: LinearSlots,
    pub down: LinearSlots,
}

/// The parameters of one layer: each branch has a norm before it.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerSlots {
    pub attention_norm: ParamId,
    pub attention: AttentionSlots,
    pub mlp_norm: ParamId,
    pub mlp: MlpSlots,
}

/// Where the transformer finds its parameters.
#[derive(Clone, Debug)]
pub(super) struct Slots {
    pub embedding: ParamId,
    pub layers: Vec<LayerSlots>,
    pub norm: ParamId,
    /// The language-model head (the embedding where tied), or the value head's vector.
    pub head: ParamId,
}

/// The list, in the order of the flat buffer: embedding, layers, final norm, head.
#[derive(Clone, Debug)]
pub struct ParamTable {
    head: Head,
    specs: Vec<ParamSpec>,
    by_name: HashMap<String, ParamId>,
    slots: Slots,
    units: Vec<Range<usize>>,
    len: usize,
    part: TensorPart,
    device: Device,
}

impl ParamTable {
    /// The whole model on one rank.
    pub fn new(arch: &Arch, head: Head) -> Self {
        Self::part(arch, head, TensorPart::whole())
    }

    /// What a rank of the tensor axis holds.
    ///
    /// # Panics
    /// If the architecture cannot be cut into so many parts (`Arch::check_tensor`).
    pub fn part(arch: &Arch, head: Head, part: TensorPart) -> Self {
        Self::on(Device::Cpu, arch, head, part)
    }

    /// The same, laid out for a device: on a GPU all matrices lie row by row.
    ///
    /// # Panics
    /// As `part`.
    pub fn on(device: Device, arch: &Arch, head: Head, part: TensorPart) -> Self {
        if let Err(error) = arch.check_tensor(part.size) {
            panic!("{error}");
        }
        let parts = Parts::new(arch, part);
        let mut list = Listing { specs: Vec::new(), offset: 0, std: arch.init_std, parts, device };
        let d = Dim::Whole(arch.width);
        let full = [arch.vocabulary, arch.width];
        let shares_head = arch.tied && head == Head::LanguageModel;
        // A matrix that is only looked up lies row by row; one that is also multiplied lies in panels.
        let layout = if shares_head { Layout::Panel } else { Layout::Row };
        let held = list.parts.held(Dim::Vocabulary, d);
        let embedding =
            list.add("model.embed_tokens.weight", &full, held.clone(), (Shard::Vocab, layout), list.normal());
        let mut ends = vec![list.offset];
        let layers = (0..arch.layers).map(|i| {
            let slots = list.layer(i, arch);
            ends.push(list.offset);
            slots
        });
        let layers = layers.collect();
        let norm = list.norm("model.norm.weight", arch.width);
        let head_id = match head {
            Head::LanguageModel if shares_head => embedding,
            Head::LanguageModel => {
                list.add("lm_head.weight", &full, held, (Shard::Vocab, Layout::Panel), list.normal())
            }
            Head::Value => {
                let init = Init::Normal { std: 1.0 / (arch.width as f32 + 1.0) };
                let (name, held) = (format!("{}.weight", arch.value_head), list.parts.held(Dim::Whole(1), d));
                list.add(&name, &[1, arch.width], held, (Shard::Replicate, Layout::Row), init)
            }
        };
        let by_name = list.specs.iter().enumerate().map(|(i, s)| (s.name.clone(), ParamId(i))).collect();
        let slots = Slots { embedding, layers, norm, head: head_id };
        ends.push(list.offset);
        let starts = std::iter::once(0).chain(ends.iter().copied());
        let units = starts.zip(&ends).map(|(start, &end)| start..end).collect();
        Self { head, specs: list.specs, by_name, slots, units, len: list.offset, part, device }
    }

    /// What parameters are laid out for.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Which part of the model the table lists.
    pub fn tensor_part(&self) -> TensorPart {
        self.part
    }

    /// The head that the table was made for.
    pub fn head(&self) -> Head {
        self.head
    }

    pub fn specs(&self) -> &[ParamSpec] {
        &self.specs
    }

    /// The name of the parameter that holds the flat element `at`; "padding" between two.
    pub fn name_at(&self, at: usize) -> &str {
        self.specs.iter().find(|spec| spec.range().contains(&at)).map_or("padding", |spec| &spec.name)
    }

    pub fn spec(&self, id: ParamId) -> &ParamSpec {
        &self.specs[id.0]
    }

    /// Takes the parameters that `frozen` names out of training.
    pub fn freeze(&mut self, frozen: impl Fn(&ParamSpec) -> bool) {
        self.specs.iter_mut().for_each(|spec| spec.trainable &= !frozen(spec));
    }

    /// The ranges of a unit's frozen parameters, counted from where it begins.
    pub fn frozen(&self, unit: usize) -> impl Iterator<Item = Range<usize>> {
        let unit = &self.units[unit];
        let frozen = self.specs.iter().filter(|spec| !spec.trainable && unit.contains(&spec.offset));
        frozen.map(|spec| spec.offset - unit.start..spec.offset - unit.start + spec.len)
    }

    /// Elements of the flat buffer.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Parameters as papers count them: without padding.
    pub fn parameters(&self) -> usize {
        self.specs.iter().map(ParamSpec::elements).sum()
    }

    pub fn find(&self, name: &str) -> Option<ParamId> {
        self.by_name.get(name).copied()
    }

    /// Flat ranges of the units that are gathered and reduced at a time: the embedding, each layer, the final norm with
    /// the head. They cover the flat buffer in order.
    pub fn units(&self) -> &[Range<usize>] {
        &self.units
    }

    /// The unit that a parameter is in.
    pub fn unit_of(&self, id: ParamId) -> usize {
        let offset = self.spec(id).offset;
        self.units.partition_point(|unit| unit.end <= offset)
    }

    pub(super) fn slots(&self) -> &Slots {
        &self.slots
    }
}

struct Listing {
    specs: Vec<ParamSpec>,
    offset: usize,
    std: f32,
    parts: Parts,
    device: Device,
}

impl Listing {
    fn normal(&self) -> Init {
        Init::Normal { std: self.std }
    }

    /// A parameter whose whole shape is `full`.
    fn add(&mut self, name: &str, full: &[usize], held: Held, kind: (Shard, Layout), init: Init) -> ParamId {
        let ((shard, panels), Held { rows, columns, copies }) = (kind, held);
        let layout = panels.on(self.device);
        let (n, k) = (rows.iter().map(Range::len).sum(), columns.len());
        let (_, inner) = full.split_first().expect("a parameter has a dim");
        let shape = match inner {
            [] => vec![n],
            // Of columns that are cut one dim is left.
            _ if k < inner.iter().product() => vec![n, k],
            _ => [&[n], inner].concat(),
        };
        let len = layout.len(n, k);
        debug_assert!(len.is_multiple_of(FLAT_ALIGN));
        let (name, full, offset) = (name.to_owned(), full.to_vec(), self.offset);
        let trainable = true;
        self.specs.push(ParamSpec {
            name,
            shape,
            full,
            rows,
            columns,
            copies,
            shard,
            layout,
            init,
            trainable,
            offset,
            len,
        });
        self.offset += len;
        ParamId(self.specs.len() - 1)
    }

    fn norm(&mut self, name: &str, width: usize) -> ParamId {
        let held = self.parts.held(Dim::Whole(width), Dim::Whole(1));
        self.add(name, &[width], held, (Shard::Replicate, Layout::Row), Init::Ones)
    }

    /// A matrix of `full` outputs and inputs, which are `dims`, and, where there is one, its bias.
    fn linear(&mut self, name: &str, full: [usize; 2], dims: (Dim, Dim), bias: bool) -> LinearSlots {
        let (outputs, inputs) = dims;
        // A bias is cut with the outputs; where the inputs are cut it is added once, after the sum over ranks.
        let (shard, bias_shard) = if matches!(outputs, Dim::Whole(_)) {
            (Shard::Row, Shard::Replicate)
        } else {
            (Shard::Column, Shard::Column)
        };
        let held = self.parts.held(outputs, inputs);
        let weight = self.add(&format!("{name}.weight"), &full, held, (shard, Layout::Panel), self.normal());
        let bias = bias.then(|| {
            let held = self.parts.held(outputs, Dim::Whole(1));
            self.add(&format!("{name}.bias"), &full[..1], held, (bias_shard, Layout::Row), Init::Zeros)
        });
        LinearSlots { weight, bias }
    }

    fn layer(&mut self, index: usize, arch: &Arch) -> LayerSlots {
        let (d, f) = (arch.width, arch.mlp_width);
        let (qw, kvw) = (arch.q_width(), arch.kv_width());
        let base = format!("model.layers.{index}");
        let name = |part: &str| format!("{base}.{part}");
        let hidden = Dim::Whole(d);
        let attention_norm = self.norm(&name("input_layernorm.weight"), d);
        let q = self.linear(&name("self_attn.q_proj"), [qw, d], (Dim::Heads, hidden), arch.qkv_bias);
        let k = self.linear(&name("self_attn.k_proj"), [kvw, d], (Dim::KvHeads, hidden), arch.qkv_bias);
        let v = self.linear(&name("self_attn.v_proj"), [kvw, d], (Dim::KvHeads, hidden), arch.qkv_bias);
        let q_norm = arch.qk_norm.then(|| self.norm(&name("self_attn.q_norm.weight"), arch.head_dim));
        let k_norm = arch.qk_norm.then(|| self.norm(&name("self_attn.k_norm.weight"), arch.head_dim));
        let o = self.linear(&name("self_attn.o_proj"), [d, qw], (hidden, Dim::Heads), arch.o_bias);
        let attention = AttentionSlots { q, k, v, o, q_norm, k_norm };
        let mlp_norm = self.norm(&name("post_attention_layernorm.weight"), d);
        let gate = self.linear(&name("mlp.gate_proj"), [f, d], (Dim::Mlp, hidden), arch.mlp_bias);
        let up = self.linear(&name("mlp.up_proj"), [f, d], (Dim::Mlp, hidden), arch.mlp_bias);
        let down = self.linear(&name("mlp.down_proj"), [d, f], (hidden, Dim::Mlp), arch.mlp_bias);
        LayerSlots { attention_norm, attention, mlp_norm, mlp: MlpSlots { gate, up, down } }
    }
}
