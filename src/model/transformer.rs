//! The transformer that training, scoring and rollout share; only where attention's keys come from differs.

use super::arch::Arch;
use super::attention::{Context, LayerKeys};
use super::block::{Block, BlockSaved, Keep};
use super::norm::Norm;
use super::params::{self, ParamId, ParamTable};
use super::part::TensorPart;
use super::ring::Ring;
use super::rope::Rope;
use super::weights::{Gradients, Unit, Weights};
use crate::comm::{Axes, Group};
use crate::config::job::Recompute;
use crate::device::cuda::{Arg, Memory, decode};
use crate::device::{Device, null};
use crate::dtype::DType;
use crate::ops::attention::{KvLayer, PAGE, Packed, Paged, kv_copy_page};
use crate::ops::embedding;
use crate::ops::rope::RopeTable;
use crate::sys::lock::lock;
use crate::tensor::{Indices, Tensor};
use std::sync::{Arc, Mutex, Weak};
use std::thread::ThreadId;

/// Units of the parameter table, in order: the embedding, each layer, the final norm with the head.
const EMBEDDING: usize = 0;
const FIRST_LAYER: usize = 1;

/// Where the keys and values come from.
pub enum Keys<'a> {
    /// Whole sequences, one behind the other.
    Packed(Packed<'a>),
    /// New rows behind the cached tokens of their sequences; one cache a layer.
    Paged(&'a mut [KvLayer], Paged<'a>),
}

impl Keys<'_> {
    fn of_layer(&mut self, layer: usize) -> LayerKeys<'_> {
        match self {
            Self::Packed(packed) => LayerKeys::Packed(packed),
            Self::Paged(cache, paged) => LayerKeys::Paged(&mut cache[layer], paged),
        }
    }
}

/// A model without its weights: architecture, where each parameter is found, and the rotary table.
#[derive(Clone, Debug)]
pub struct Transformer {
    pub arch: Arch,
    embedding: ParamId,
    /// The language-model head (the embedding where tied), or the value head's vector.
    pub(super) head: ParamId,
    /// The ranks that share the rows of embedding and head.
    pub(super) tensor: Group,
    blocks: Vec<Block>,
    /// Behind the last block.
    norm: Norm,
    rope: Arc<RopeTable>,
    device: Device,
}

/// What a backward needs of its forward.
#[derive(Debug)]
pub struct Saved {
    keep: Keep,
    tokens: Vec<u32>,
    positions: Vec<u32>,
    blocks: Vec<BlockSaved>,
    /// Output of the last block (t, d) and its 1 / rms (t, 1).
    last: Option<(Tensor, Tensor)>,
}

impl Saved {
    /// Of `recompute` nothing is kept but what it is computed from again in the backward; all is kept where that is open.
    pub fn new(recompute: impl Into<Recompute>) -> Self {
        let keep = match recompute.into() {
            Recompute::Auto | Recompute::None => Keep::Everything,
            Recompute::Attention => Keep::AllButAttention,
            Recompute::Block => Keep::Input,
        };
        Self { keep, tokens: Vec::new(), positions: Vec::new(), blocks: Vec::new(), last: None }
    }

    /// What a forward kept of its layers, in the order in which it was computed, each with its name; and the last layer's result.
    ///
    /// # Panics
    /// If it went through no forward.
    pub(super) fn results(&self) -> (Vec<(String, &Tensor)>, &Tensor) {
        let last = &self.last.as_ref().expect("a forward fills it").0;
        (self.blocks.iter().enumerate().flat_map(|(layer, kept)| kept.results(layer)).collect(), last)
    }
}

impl Transformer {
    pub fn new(arch: &Arch, table: &ParamTable) -> Self {
        Self::over(arch, table, &Axes::one())
    }

    /// The same on ranks that share each matrix (`axes.tensor`; `table` lists this rank's parts) and each sequence
    /// (`axes.sequence`).
    ///
    /// # Panics
    /// If the table lists another rank's parts.
    pub fn over(arch: &Arch, table: &ParamTable, axes: &Axes) -> Self {
        let (tensor, ring) = (&axes.tensor, Ring::new(axes));
        assert_eq!(table.tensor_part(), TensorPart::of(tensor), "the table's part and this rank's");
        let embedding = table.id(params::EMBEDDING);
        Self {
            arch: arch.clone(),
            embedding,
            head: table.find(&arch.head_name(table.head())).unwrap_or(embedding),
            tensor: tensor.clone(),
            blocks: (0..arch.layers).map(|layer| Block::new(arch, table, layer, tensor, &ring)).collect(),
            norm: Norm::new(table, "model.norm", arch.norm_eps),
            rope: rope_table(arch),
            device: table.device(),
        }
    }

    /// The hidden state (t, d) after the final norm, of `tokens` at `positions` (t each).
    ///
    /// # Panics
    /// If a token is outside the vocabulary, a position outside the context, or `saved` comes with paged keys.
    pub fn forward(
        &self,
        w: &Weights,
        tokens: &[u32],
        positions: &[u32],
        mut keys: Keys,
        saved: Option<&mut Saved>,
    ) -> Tensor {
        self.check_rows(tokens, positions);
        assert!(saved.is_none() || matches!(keys, Keys::Packed(_)), "only packed keys have a backward");
        let keep = saved.as_ref().map_or(Keep::Nothing, |saved| saved.keep);
        let x = self.embedded(w, Indices::on(self.device, tokens));
        let positions = &Indices::on(self.device, positions);
        let (hidden, last, kept) = self.through(w, x, positions, &mut keys, keep);
        if let Some(saved) = saved {
            saved.tokens = tokens.to_vec();
            saved.positions = positions.to_vec();
            saved.blocks = kept;
            saved.last = Some(last);
        }
        hidden
    }

    /// One step of the first `rows` rows of `tables`, which only the GPU reads: nothing here depends on what they hold, so a graph
    /// of it serves every step. Tokens and log-probabilities are bitwise those of `forward`, `logits_part` and `sample`. With
    /// `longest`, attention is split for contexts of up to as many tokens; `edits` as `DecodeState::draw`, `ends` of `ends`. All positions
    /// are below those that `reserve_positions` made room for. The ranks of the tensor axis call this together, and have the same
    /// tables.
    ///
    /// # Panics
    /// If weights are sharded, or the tables are too small.
    pub fn decode(
        &self,
        w: &Weights,
        tables: &mut decode::DecodeState,
        rows: usize,
        longest: Option<usize>,
        (ends, edits): (&Memory, bool),
        cache: &mut [KvLayer],
    ) {
        assert!(self.check_graphs(w).is_ok(), "decode: weights that are gathered as they are used");
        tables.begin(rows);
        let x = self.embedded(w, Indices::on_gpu(tables.tokens(), rows));
        let hidden = {
            let positions = &Indices::on_gpu(tables.positions(), rows);
            let mut keys = Keys::Paged(cache, Paged::on_gpu(tables, rows, longest));
            self.through(w, x, positions, &mut keys, Keep::Nothing).0
        };
        self.draw_on_gpu(&self.logits_of(w, &hidden), rows, ends, edits, tables);
        tables.end(rows, self.tensor.size());
    }

    /// Whether `decode` can be a graph, the same on all ranks of the tensor axis.
    ///
    /// # Errors
    /// Why not.
    pub fn check_graphs(&self, w: &Weights) -> Result<(), String> {
        match () {
            () if !self.device.has_graphs() => Err("the model is not on a GPU".into()),
            () if w.is_sharded() => Err("weights are gathered as they are used".into()),
            () => self.tensor.check_graphs(),
        }
    }

    /// Makes the rotary table hold `positions`, before `decode` reads some that the host does not know.
    pub fn reserve_positions(&self, positions: usize) {
        self.rope.reserve(positions.min(self.arch.context));
    }

    /// Where `decode` reads weights and angles: a graph of it serves while these are the same.
    pub fn places(&self, w: &Weights) -> Vec<Arg> {
        let units = (0..w.table.units().len()).filter_map(|unit| w.local(unit).address());
        units.chain([self.rope.place()]).collect()
    }

    /// The rows of the embedding (t, d) that `tokens` name.
    fn embedded(&self, w: &Weights, tokens: Indices) -> Tensor {
        let unit = w.unit(EMBEDDING);
        let mut x = Tensor::scratch_on(self.device, tokens.len(), self.arch.width);
        w.prefetch(FIRST_LAYER);
        embedding::forward_part(&tokens, self.vocabulary().start, unit.weight(self.embedding), &mut x);
        drop((unit, tokens));
        self.tensor.sum_slice(x.slice_mut());
        x
    }

    /// All layers and the final norm: the hidden state, the norm's input with its 1 / rms, and what blocks keep.
    fn through(
        &self,
        w: &Weights,
        mut x: Tensor,
        positions: &Indices,
        keys: &mut Keys,
        keep: Keep,
    ) -> (Tensor, (Tensor, Tensor), Vec<BlockSaved>) {
        let mut kept = Vec::new();
        for (i, block) in self.blocks.iter().enumerate() {
            let unit = w.unit(FIRST_LAYER + i);
            self.prefetch_after(w, FIRST_LAYER + i);
            kept.extend(block.forward(self.context(&unit, positions), &mut x, keys.of_layer(i), keep));
        }
        let (hidden, rstd) = self.norm.forward(&w.unit(self.last_unit()), &x);
        (hidden, (x, rstd), kept)
    }

    /// Adds the gradient of every parameter below the head, given the gradient `dhidden` (t, d) of the forward's result.
    ///
    /// # Panics
    /// If `saved` went through no forward.
    pub fn backward(
        &self,
        w: &Weights,
        mut saved: Saved,
        cu_seqlens: &[usize],
        dhidden: Tensor,
        grads: &mut Gradients,
    ) {
        let (x, rstd) = saved.last.take().expect("the forward filled what the backward needs");
        let mut dx = x.zeros_like(x.rows(), x.width());
        let packed = &Packed::from(cu_seqlens);
        let positions = &Indices::on(x.device(), &saved.positions);
        let last = self.last_unit();
        grads.begin(last);
        let unit = w.unit(last);
        self.prefetch_backward(w);
        self.norm.backward(&unit, &x, &rstd, &dhidden, &mut dx, grads);
        drop(unit);
        grads.finish(last);
        drop((x, dhidden));
        for (i, (block, kept)) in self.blocks.iter().zip(saved.blocks.drain(..)).enumerate().rev() {
            let unit = FIRST_LAYER + i;
            grads.begin(unit);
            let values = w.unit(unit);
            if unit > FIRST_LAYER {
                w.prefetch(unit - 1);
            }
            block.backward(self.context(&values, positions), packed, kept, &mut dx, grads);
            grads.finish(unit);
        }
        grads.begin(EMBEDDING);
        let dw = grads.weight_mut(self.embedding);
        embedding::backward_part(&saved.tokens, self.vocabulary().start, &dx, dw);
        grads.finish(EMBEDDING);
    }

    /// An empty KV cache of `pages` pages for each layer, with weights of `dtype`.
    pub fn kv_cache(&self, dtype: DType, pages: usize) -> Vec<KvLayer> {
        self.blocks.iter().map(|block| KvLayer::new(self.device, dtype, pages, block.shape())).collect()
    }

    /// Copies page `from` to page `to` in every layer.
    pub fn kv_copy_page(&self, cache: &mut [KvLayer], from: u32, to: u32) {
        for (block, layer) in self.blocks.iter().zip(cache) {
            kv_copy_page(layer, from, to, block.shape());
        }
    }

    /// Bytes of one KV page over all layers, with weights of `dtype`: keys and values of `PAGE` tokens, of the heads that this rank
    /// holds.
    pub fn kv_page_bytes(&self, dtype: DType) -> usize {
        let shapes = self.blocks.iter().map(Block::shape);
        let width: usize = shapes.map(|shape| shape.kv_heads * shape.head_dim).sum();
        2 * width * PAGE * KvLayer::value_bytes(self.device, dtype)
    }

    /// The ranks that hold the other parts of each matrix, and this one.
    pub fn tensor(&self) -> &Group {
        &self.tensor
    }

    /// The tokens whose rows of embedding and head this rank holds.
    pub(super) fn vocabulary(&self) -> std::ops::Range<usize> {
        TensorPart::of(&self.tensor).range(self.arch.vocabulary)
    }

    /// The unit of the final norm and of a head of its own.
    fn last_unit(&self) -> usize {
        FIRST_LAYER + self.blocks.len()
    }

    /// Starts to gather what a forward uses after layer unit `unit`: behind the last layer a tied head, too.
    fn prefetch_after(&self, w: &Weights, unit: usize) {
        w.prefetch(unit + 1);
        if unit + 1 == self.last_unit() {
            w.prefetch(w.table.unit_of(self.head));
        }
    }

    /// Starts to gather what a backward uses first, behind the head: the final norm and the last layer.
    pub(super) fn prefetch_backward(&self, w: &Weights) {
        w.prefetch(self.last_unit());
        w.prefetch(self.last_unit() - 1);
    }

    fn context<'a>(&'a self, w: &'a Unit<'a>, positions: &'a Indices<'a>) -> Context<'a> {
        Context { w, positions, rope: &self.rope }
    }

    fn check_rows(&self, tokens: &[u32], positions: &[u32]) {
        assert_eq!(tokens.len(), positions.len(), "a position for each token");
        let (v, context) = (self.arch.vocabulary, self.arch.context);
        if let Some(token) = tokens.iter().find(|&&t| t as usize >= v) {
            panic!("token {token} is outside the vocabulary of {v}");
        }
        if let Some(position) = positions.iter().find(|&&p| p as usize >= context) {
            panic!("position {position} is outside the context of {context}");
        }
    }
}

/// The rotary table of an architecture. Actor, critic and reference of one shape share one: a long context needs much.
fn rope_table(arch: &Arch) -> Arc<RopeTable> {
    type Shared = ((Rope, usize, usize, Option<ThreadId>), Weak<RopeTable>);
    static TABLES: Mutex<Vec<Shared>> = Mutex::new(Vec::new());
    // Those of a null device have no angles.
    let key = (arch.rope.clone(), arch.head_dim, arch.context, null::is_active().then(|| std::thread::current().id()));
    let mut tables = lock(&TABLES);
    tables.retain(|(_, table)| table.strong_count() > 0);
    if let Some(table) = tables.iter().find(|(k, _)| *k == key).and_then(|(_, table)| table.upgrade()) {
        return table;
    }
    let frequencies = arch.rope.inverse_frequencies(arch.head_dim);
    let table = Arc::new(RopeTable::new(&frequencies, arch.rope.attention_factor(), arch.context));
    tables.push((key, Arc::downgrade(&table)));
    table
}

/// The positions of packed rows: each sequence counts from 0.
pub fn packed_positions(cu_seqlens: &[usize]) -> Vec<u32> {
    cu_seqlens.windows(2).flat_map(|w| 0..(w[1] - w[0]) as u32).collect()
}
