//! THE parameter table: every parameter of a model with its name, shape, sharding, memory layout and initialisation.
//! Loading, initialisation, sharding, the optimizer, checkpoints and export all read this one list.

use super::arch::{Arch, Head};
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
    /// (outputs, inputs) of a matrix, (elements) of a vector.
    pub shape: Vec<usize>,
    pub shard: Shard,
    pub layout: Layout,
    pub init: Init,
    /// First element in the flat buffer, a multiple of `FLAT_ALIGN`.
    pub offset: usize,
    /// Elements in the flat buffer, padding included.
    pub len: usize,
}

impl ParamSpec {
    /// (rows, columns); a vector is one row.
    pub fn dims(&self) -> (usize, usize) {
        match *self.shape {
            [k] => (1, k),
            [n, k] => (n, k),
            _ => unreachable!("parameters are vectors or matrices"),
        }
    }

    /// Elements without padding.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether weight decay applies: matrices yes, norms and biases no.
    pub fn decays(&self) -> bool {
        self.shape.len() == 2
    }

    pub fn range(&self) -> std::ops::Range<usize> {
        self.offset..self.offset + self.len
    }
}

/// The parameters of attention in one layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionSlots {
    pub norm: ParamId,
    pub q: ParamId,
    pub k: ParamId,
    pub v: ParamId,
    pub o: ParamId,
    pub q_bias: Option<ParamId>,
    pub k_bias: Option<ParamId>,
    pub v_bias: Option<ParamId>,
    pub o_bias: Option<ParamId>,
    pub q_norm: Option<ParamId>,
    pub k_norm: Option<ParamId>,
}

/// The parameters of the MLP in one layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct MlpSlots {
    pub norm: ParamId,
    pub gate: ParamId,
    pub up: ParamId,
    pub down: ParamId,
    pub gate_bias: Option<ParamId>,
    pub up_bias: Option<ParamId>,
    pub down_bias: Option<ParamId>,
}

/// Where the transformer finds its parameters.
#[derive(Clone, Debug)]
pub(super) struct Slots {
    pub embedding: ParamId,
    pub layers: Vec<(AttentionSlots, MlpSlots)>,
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
}

impl ParamTable {
    pub fn new(arch: &Arch, head: Head) -> Self {
        let mut list = Listing { specs: Vec::new(), offset: 0, std: arch.init_std };
        let (v, d) = (arch.vocabulary, arch.width);
        let shares_head = arch.tied && head == Head::LanguageModel;
        // A matrix that is only looked up lies row by row; one that is also multiplied lies in panels.
        let layout = if shares_head { Layout::Panel } else { Layout::Row };
        let embedding = list.add("model.embed_tokens.weight", &[v, d], Shard::Vocab, layout, list.normal());
        let mut ends = vec![list.offset];
        let layers = (0..arch.layers).map(|i| {
            let slots = list.layer(i, arch);
            ends.push(list.offset);
            slots
        });
        let layers = layers.collect();
        let norm = list.norm("model.norm.weight", d);
        let head_id = match head {
            Head::LanguageModel if shares_head => embedding,
            Head::LanguageModel => list.add("lm_head.weight", &[v, d], Shard::Vocab, Layout::Panel, list.normal()),
            Head::Value => {
                let init = Init::Normal { std: 1.0 / (d as f32 + 1.0) };
                list.add(&format!("{}.weight", arch.value_head), &[1, d], Shard::Replicate, Layout::Row, init)
            }
        };
        let by_name = list.specs.iter().enumerate().map(|(i, s)| (s.name.clone(), ParamId(i))).collect();
        let slots = Slots { embedding, layers, norm, head: head_id };
        ends.push(list.offset);
        let starts = std::iter::once(0).chain(ends.iter().copied());
        let units = starts.zip(&ends).map(|(start, &end)| start..end).collect();
        Self { head, specs: list.specs, by_name, slots, units, len: list.offset }
    }

    /// The head that the table was made for.
    pub fn head(&self) -> Head {
        self.head
    }

    pub fn specs(&self) -> &[ParamSpec] {
        &self.specs
    }

    pub fn spec(&self, id: ParamId) -> &ParamSpec {
        &self.specs[id.0]
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
}

impl Listing {
    fn normal(&self) -> Init {
        Init::Normal { std: self.std }
    }

    fn add(&mut self, name: &str, shape: &[usize], shard: Shard, layout: Layout, init: Init) -> ParamId {
        let (n, k) = if let [n, k] = *shape { (n, k) } else { (1, shape[0]) };
        let len = layout.len(n, k);
        debug_assert!(len.is_multiple_of(FLAT_ALIGN));
        let spec =
            ParamSpec { name: name.to_owned(), shape: shape.to_vec(), shard, layout, init, offset: self.offset, len };
        self.offset += len;
        self.specs.push(spec);
        ParamId(self.specs.len() - 1)
    }

    fn norm(&mut self, name: &str, width: usize) -> ParamId {
        self.add(name, &[width], Shard::Replicate, Layout::Row, Init::Ones)
    }

    /// A matrix (n, k) and, where there is one, its bias (n).
    fn linear(&mut self, name: &str, n: usize, k: usize, shard: Shard, bias: bool) -> (ParamId, Option<ParamId>) {
        let id = self.add(&format!("{name}.weight"), &[n, k], shard, Layout::Panel, self.normal());
        // A bias is cut with the outputs; where the inputs are cut it is added once, after the sum over ranks.
        let bias_shard = if shard == Shard::Column { Shard::Column } else { Shard::Replicate };
        let bias = bias.then(|| self.add(&format!("{name}.bias"), &[n], bias_shard, Layout::Row, Init::Zeros));
        (id, bias)
    }

    fn layer(&mut self, index: usize, arch: &Arch) -> (AttentionSlots, MlpSlots) {
        let (d, f) = (arch.width, arch.mlp_width);
        let (qw, kvw) = (arch.q_width(), arch.kv_width());
        let base = format!("model.layers.{index}");
        let name = |part: &str| format!("{base}.{part}");
        let norm = self.norm(&name("input_layernorm.weight"), d);
        let (q, q_bias) = self.linear(&name("self_attn.q_proj"), qw, d, Shard::Column, arch.qkv_bias);
        let (k, k_bias) = self.linear(&name("self_attn.k_proj"), kvw, d, Shard::Column, arch.qkv_bias);
        let (v, v_bias) = self.linear(&name("self_attn.v_proj"), kvw, d, Shard::Column, arch.qkv_bias);
        let q_norm = arch.qk_norm.then(|| self.norm(&name("self_attn.q_norm.weight"), arch.head_dim));
        let k_norm = arch.qk_norm.then(|| self.norm(&name("self_attn.k_norm.weight"), arch.head_dim));
        let (o, o_bias) = self.linear(&name("self_attn.o_proj"), d, qw, Shard::Row, arch.o_bias);
        let attention = AttentionSlots { norm, q, k, v, o, q_bias, k_bias, v_bias, o_bias, q_norm, k_norm };
        let norm = self.norm(&name("post_attention_layernorm.weight"), d);
        let (gate, gate_bias) = self.linear(&name("mlp.gate_proj"), f, d, Shard::Column, arch.mlp_bias);
        let (up, up_bias) = self.linear(&name("mlp.up_proj"), f, d, Shard::Column, arch.mlp_bias);
        let (down, down_bias) = self.linear(&name("mlp.down_proj"), d, f, Shard::Row, arch.mlp_bias);
        (attention, MlpSlots { norm, gate, up, down, gate_bias, up_bias, down_bias })
    }
}
