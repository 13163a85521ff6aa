//! The transformer that training, scoring and rollout share. Only the source of attention's keys differs.

use super::arch::{Arch, Head};
use super::block::{Block, BlockSaved, Keep};
use super::context::Context;
use super::eyes::{Eyes, Seen, Slopes};
pub use super::forward::{Keys, Saved, packed_positions};
use super::layer_cache::{CacheGroup, LayerCache};
use super::layers::Layers;
use super::norm::Norm;
use super::params::{ParamId, ParamTable};
use super::part::TensorPart;
use super::pixels::Pixels;
use super::ring::Ring;
use super::routers::Routers;
use super::stages::Stage;
use super::tower::Merged;
use super::weights::{Gradients, Unit, Weights};
use crate::comm::{Axes, Group, Way};
use crate::device::Device;
use crate::device::cuda::{Arg, Memory, decode, traced};
use crate::error::Result;
use crate::experience::Image;
use crate::ops::attention::{Packed, Paged};
use crate::ops::rope::RopeTable;
use crate::ops::{embedding, scale};
use crate::pictures::{AXES, Picture};
use crate::sys::trace::{self, Category};
use crate::tensor::{Indices, Tensor};
use std::sync::Arc;

/// The most hidden states that a stage sends at a time in forwards without a backward.
const SENDING_MAX: usize = 2;

/// A model without its weights: architecture, parameter ids, and the rotary table.
#[derive(Clone, Debug)]
pub struct Transformer {
    pub arch: Arch,
    embedding: ParamId,
    /// The unit of the embedding.
    embedding_unit: usize,
    eyes: Eyes,
    /// The language-model head (the embedding if tied), or the value head's vector.
    pub(super) head: ParamId,
    /// The ranks that share the rows of embedding and head.
    pub(super) tensor: Group,
    /// The ranks that hold the other experts of each layer.
    expert: Group,
    pub(super) blocks: Vec<Block>,
    /// The unit of each block, and of the last norm. A block's experts are in the units after it.
    units: Vec<usize>,
    pub(super) cache_groups: Vec<CacheGroup>,
    /// The norm after the last block.
    norm: Norm,
    ring: Ring,
    pub routers: Routers,
    pub(super) stage: Stage,
    ropes: Vec<Arc<RopeTable>>,
    pub(super) device: Device,
}

impl Transformer {
    pub fn new(arch: &Arch, table: &ParamTable) -> Self {
        Self::for_axes(arch, table, &Axes::one())
    }

    /// The same on ranks that share each matrix (`axes.tensor`) and each sequence (`axes.sequence`). `table` lists this
    /// rank's parts.
    ///
    /// # Panics
    /// If the table lists another rank's parts.
    pub fn for_axes(arch: &Arch, table: &ParamTable, axes: &Axes) -> Self {
        let (device, part) = (table.device(), TensorPart::from_group(&axes.tensor));
        let (own, layers) = ParamTable::with_layers(device, arch, table.head(), part, table.base());
        assert!(own.is_laid_out_as(table), "the table must list this rank's part");
        let Layers { tower, embedding, blocks, units, norm, head } = layers;
        Self {
            arch: arch.clone(),
            embedding,
            embedding_unit: own.embedding_unit(),
            eyes: Eyes::new(tower),
            head,
            tensor: axes.tensor.clone(),
            expert: axes.expert.clone(),
            blocks,
            units,
            cache_groups: CacheGroup::of_arch(arch),
            norm,
            ring: Ring::new(axes),
            routers: Routers::default(),
            stage: Stage::new(table, axes),
            ropes: rope_tables(arch),
            device,
        }
    }

    /// The hidden state (t, d) after the final norm, for `tokens` at `positions` (t each). On several stages this is the
    /// last one.
    ///
    /// # Panics
    /// If a token is outside the vocabulary, if a position is outside the context, if `saved` is given with paged keys,
    /// or on another stage than the last.
    pub fn forward(
        &self,
        w: &Weights,
        tokens: &[u32],
        positions: &[u32],
        keys: Keys,
        saved: Option<&mut Saved>,
    ) -> Tensor {
        self.forward_seeing(w, &[], tokens, positions, keys, saved)
    }

    /// The same with `pictures` among the tokens. Then positions may be (t, h, w) of each token (`pictures::position`).
    ///
    /// # Panics
    /// The panics of `forward`; on a GPU; with the error of a tower that cannot be loaded (`open_tower`).
    pub fn forward_seeing(
        &self,
        w: &Weights,
        pictures: &[Picture],
        tokens: &[u32],
        positions: &[u32],
        keys: Keys,
        saved: Option<&mut Saved>,
    ) -> Tensor {
        let last = self.stage.chunks.len() - 1;
        self.forward_stage(w, last, pictures, [tokens, positions], keys, saved).expect("the last stage")
    }

    /// The same for a chunk of any stage: `None` if it is not the last. The hidden state comes from the stage before, and
    /// goes to the next one.
    ///
    /// # Panics
    /// As `forward`.
    pub fn forward_stage(
        &self,
        w: &Weights,
        chunk: usize,
        pictures: &[Picture],
        [tokens, positions]: [&[u32]; 2],
        mut keys: Keys,
        saved: Option<&mut Saved>,
    ) -> Option<Tensor> {
        self.check_rows(tokens, positions);
        assert!(saved.is_none() || matches!(keys, Keys::Packed(_)), "only packed keys have a backward");
        let keep = saved.as_ref().map_or(Keep::Nothing, |saved| saved.keep);
        let seen = self.seen(w, chunk, pictures, saved.as_ref().map(|saved| saved.keep));
        let x = if self.stage.is_first(chunk) {
            let mut x = self.embedded(w, Indices::on(self.device, tokens));
            if let Some(seen) = &seen {
                seen.place(&mut x);
            }
            x
        } else {
            self.stage.links.receive(Way::Forward, self.device, tokens.len(), self.arch.width)
        };
        let rows = positions;
        let positions = &Indices::on(self.device, positions);
        let (x, blocks) = self.run_layers(w, x, positions, &mut keys, (keep, seen.as_ref()), chunk);
        // A rank that only sends forward could get far ahead. The window of a schedule limits one that learns.
        let pending = if saved.is_some() { usize::MAX } else { SENDING_MAX };
        let (hidden, last) = if self.stage.is_last(chunk) {
            let (hidden, rstd) = self.normed(w, &x);
            (Some(hidden), Some((x, rstd)))
        } else {
            self.stage.links.send(Way::Forward, x, pending);
            (None, None)
        };
        if let Some(saved) = saved {
            *saved = Saved { keep, chunk, tokens: tokens.to_vec(), positions: rows.to_vec(), seen, blocks, last };
        }
        hidden
    }

    /// Starts to receive the hidden state of a chunk's forward of `rows` tokens, if it comes from another stage. Forwards
    /// follow in the order of the calls.
    pub fn expect_forward(&self, chunk: usize, rows: usize) {
        if !self.stage.is_first(chunk) {
            self.stage.links.expect(Way::Forward, self.device, rows, self.arch.width);
        }
    }

    /// The same for the gradient of a backward.
    pub fn expect_backward(&self, chunk: usize, rows: usize) {
        if !self.stage.is_last(chunk) {
            self.stage.links.expect(Way::Backward, self.device, rows, self.arch.width);
        }
    }

    /// Whether this rank has all layers.
    pub fn is_whole(&self) -> bool {
        self.stage.size == 1
    }

    /// Whether a chunk of this rank's stage has the head.
    pub fn has_head(&self, chunk: usize) -> bool {
        self.stage.is_last(chunk)
    }

    /// The passes of `count` forwards without a backward on this stage, as (forward, chunk): chunk by chunk for as many
    /// forwards as there are stages, so that none waits for all others.
    pub fn passes(&self, count: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (group, chunks) = (self.stage.size, self.stage.chunks.len());
        let of_group = move |first: usize| {
            let end = (first + group).min(count);
            (0..chunks).flat_map(move |chunk| (first..end).map(move |i| (i, chunk)))
        };
        (0..count).step_by(group).flat_map(of_group)
    }

    /// Decodes one step for the first `rows` rows of `tables`. Only the GPU reads the tables, so a graph of this call
    /// serves every step. Tokens and log-probabilities are bitwise those of `forward`, `logits_part` and `sample`.
    ///
    /// With `longest`, attention is split for contexts of up to that many tokens. `edits` is as in `DecodeState::draw`,
    /// and `ends` comes from `ends_on_gpu`. All positions are below the limit of `reserve_positions`. The ranks of the
    /// tensor axis call this together, with the same tables.
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
        cache: &mut [LayerCache],
    ) {
        assert!(self.check_graphs(w).is_ok(), "decode: the weights are gathered as they are used");
        tables.begin(rows);
        let x = self.embedded(w, Indices::on_gpu(tables.tokens(), rows));
        let hidden = {
            let positions = &Indices::on_gpu(tables.positions(), rows);
            let groups = 0..self.cache_groups.len();
            let paged: Vec<Paged> = groups.map(|group| Paged::on_gpu(tables, group, rows, longest)).collect();
            let mut keys = Keys::Paged(cache, &paged);
            let x = self.run_layers(w, x, positions, &mut keys, (Keep::Nothing, None), 0).0;
            self.normed(w, &x).0
        };
        self.draw_on_gpu(&self.logits_of(w, &hidden), rows, ends, edits, tables);
        tables.end(rows, self.tensor.size());
        // A graph keeps only memory that it frees, and dequantizes again at each replay.
        w.release();
    }

    /// Checks whether `decode` can be a graph. The result is the same on all ranks of the tensor axis.
    ///
    /// # Errors
    /// The reason if it cannot.
    pub fn check_graphs(&self, w: &Weights) -> std::result::Result<(), String> {
        match () {
            () if !self.device.has_graphs() => Err("the model is not on a GPU".into()),
            () if w.is_sharded() || w.base.as_ref().is_some_and(|base| base.is_sharded()) => {
                Err("the weights are gathered as they are used".into())
            }
            () => self.tensor.check_graphs(),
        }
    }

    /// Extends the rotary table to `positions`. Needed before `decode` reads positions that only the GPU knows.
    pub fn reserve_positions(&self, positions: usize) {
        self.ropes.iter().for_each(|rope| rope.reserve(positions.min(self.arch.context)));
    }

    /// The addresses from which `decode` reads weights and angles. A graph of it is valid while they stay the same.
    pub fn addresses(&self, w: &Weights) -> Vec<Arg> {
        w.addresses().into_iter().chain(self.ropes.iter().map(|rope| rope.place())).collect()
    }

    /// The images of a forward, on the first stage and on those with layers that get rows of a tower.
    fn seen(&self, w: &Weights, chunk: usize, pictures: &[Picture], keep: Option<Keep>) -> Option<Seen> {
        let deep = self.arch.sight.as_ref().map_or(0, |sight| sight.spec.deepstack.len());
        let sees = self.stage.is_first(chunk) || (!pictures.is_empty() && self.stage.chunks[chunk].start < deep);
        if sees { self.eyes.see(&self.arch, w, pictures, keep) } else { None }
    }

    /// The rows of the embedding (t, d) that `tokens` name.
    fn embedded(&self, w: &Weights, tokens: Indices) -> Tensor {
        let unit = w.unit(self.embedding_unit);
        let mut x = Tensor::scratch_on(self.device, tokens.len(), self.arch.width);
        w.prefetch(self.units[0]);
        embedding::forward_part(&tokens, self.vocabulary().start, unit.weight(self.embedding), &mut x);
        drop((unit, tokens));
        self.tensor.sum_slice(x.slice_mut());
        scale::by(self.arch.embed_scale.of(w.dtype()), &mut x);
        x
    }

    /// The factor on the hidden state: that on logits, if the head is a language model's.
    fn hidden_scale(&self, w: &Weights) -> f32 {
        if w.table.head() == Head::LanguageModel { self.arch.logit_scale } else { 1.0 }
    }

    /// Runs the layers of a chunk. Returns their output and the kept results.
    fn run_layers(
        &self,
        w: &Weights,
        mut x: Tensor,
        positions: &Indices,
        keys: &mut Keys,
        (keep, seen): (Keep, Option<&Seen>),
        chunk: usize,
    ) -> (Tensor, Vec<BlockSaved>) {
        let mut kept = Vec::new();
        for i in self.stage.chunks[chunk].clone() {
            let block = &self.blocks[i];
            let _span = trace::span(Category::Layer, "layer", "layer tokens", || [i, x.rows()]);
            let _of_gpu = traced::span(self.device, "layer", "layer tokens", || [i, x.rows()]);
            let unit = w.unit(self.units[i]);
            self.prefetch_after(w, i);
            kept.extend(block.forward(
                self.context(w, &unit, positions),
                &mut x,
                keys.of_layer(i, self.group_of(i)),
                keep,
            ));
            if let Some(seen) = seen {
                seen.add_after(i, &mut x);
            }
        }
        (x, kept)
    }

    /// The hidden state after the final norm of `x`, and 1 / rms of `x`.
    fn normed(&self, w: &Weights, x: &Tensor) -> (Tensor, Tensor) {
        let (mut hidden, rstd) = self.norm.forward(&w.unit(self.last_unit()), x);
        scale::by(self.hidden_scale(w), &mut hidden);
        (hidden, rstd)
    }

    /// Adds the gradient of every parameter below the head, given the gradient `dhidden` (t, d) of the forward's result.
    /// On several stages this is the last one.
    ///
    /// # Panics
    /// If no forward has filled `saved`.
    pub fn backward(
        &self,
        w: &Weights,
        mut saved: Saved,
        cu_seqlens: &[usize],
        mut dhidden: Tensor,
        grads: &mut Gradients,
    ) {
        scale::by(self.hidden_scale(w), &mut dhidden);
        let (x, rstd) = saved.last.take().expect("a forward has filled `saved`");
        let mut dx = x.zeros_like(x.rows(), x.width());
        let positions = &Indices::on(x.device(), &saved.positions);
        let last = self.last_unit();
        grads.begin(last);
        let unit = w.unit(last);
        self.prefetch_backward(w);
        self.norm.backward(self.context(w, &unit, positions), &x, &rstd, &dhidden, &mut dx, grads);
        drop(unit);
        grads.finish(last);
        drop((x, dhidden));
        self.backward_layers(w, saved, cu_seqlens, dx, grads);
    }

    /// The same for a chunk without the head: the gradient comes from the next stage.
    pub fn backward_stage(&self, w: &Weights, saved: Saved, cu_seqlens: &[usize], grads: &mut Gradients) {
        let dx = self.stage.links.receive(Way::Backward, self.device, saved.tokens.len(), self.arch.width);
        self.backward_layers(w, saved, cu_seqlens, dx, grads);
    }

    /// Adds the gradients of a chunk's layers, given that of their output. Sends the gradient of their input to the
    /// stage before, or adds that of the embedding.
    fn backward_layers(&self, w: &Weights, saved: Saved, cu_seqlens: &[usize], mut dx: Tensor, grads: &mut Gradients) {
        let packed = &Packed::from(cu_seqlens);
        let positions = &Indices::on(dx.device(), &saved.positions);
        let mut slopes = Slopes::new();
        for (i, kept) in self.stage.chunks[saved.chunk].clone().zip(saved.blocks).rev() {
            let block = &self.blocks[i];
            let _span = trace::span(Category::Layer, "layer backward", "layer tokens", || [i, dx.rows()]);
            let _of_gpu = traced::span(self.device, "layer backward", "layer tokens", || [i, dx.rows()]);
            if let Some(seen) = &saved.seen {
                seen.slope_after(i, &dx, &mut slopes);
            }
            let unit = self.units[i];
            let values = w.unit(unit);
            // The gradients of experts come first. They begin those of the rest of the layer.
            let last = unit + block.expert_units();
            grads.begin(last);
            let before = if i > 0 { self.units[i - 1] } else { unit };
            (unit + 1..=last).rev().chain([before]).for_each(|unit| w.prefetch(unit));
            block.backward(self.context(w, &values, positions), packed, kept, &mut dx, grads);
            grads.finish(unit);
        }
        if !self.stage.is_first(saved.chunk) {
            return self.stage.links.send(Way::Backward, dx, usize::MAX);
        }
        grads.begin(self.embedding_unit);
        if let Some(seen) = &saved.seen {
            seen.take_slope(&mut dx, &mut slopes);
        }
        if !self.embedding.is_frozen {
            scale::by(self.arch.embed_scale.of(w.dtype()), &mut dx);
            let dw = grads.weight_mut(self.embedding);
            embedding::backward_part(&saved.tokens, self.vocabulary().start, &dx, dw);
        }
        grads.finish(self.embedding_unit);
        self.eyes.backward(w, saved.seen, slopes, grads);
    }

    /// Sets the source of the patches of images. Without one, a model reads text only.
    pub fn read_images_with(&mut self, pixels: Pixels) {
        self.eyes.read_with(pixels);
    }

    /// The rows that replace the tokens of images, one image after another, and those after layers.
    ///
    /// # Errors
    /// The errors of `open_tower`.
    pub fn tower_rows(&self, w: &Weights, images: &[Image]) -> Result<Merged> {
        self.eyes.rows(&self.arch, w, images)
    }

    /// Loads the tower that images need, if it does not train. A forward with images does so, too.
    ///
    /// # Errors
    /// `Data` if the model has no tower that is known, or its files are damaged; `Usage` on a GPU.
    pub fn open_tower(&self, w: &Weights) -> Result<()> {
        self.eyes.open(&self.arch, self.device, w.dtype())
    }

    /// The cache group of a layer.
    pub(super) fn group_of(&self, layer: usize) -> usize {
        let holds = |group: &CacheGroup| group.layers.binary_search(&layer).is_ok();
        self.cache_groups.iter().position(holds).expect("each layer has a group")
    }

    /// The tensor axis: the ranks that share each matrix.
    pub fn tensor(&self) -> &Group {
        &self.tensor
    }

    /// The tokens whose rows of embedding and head this rank holds.
    pub(super) fn vocabulary(&self) -> std::ops::Range<usize> {
        TensorPart::from_group(&self.tensor).range(self.arch.vocabulary)
    }

    /// The unit of the final norm and of an untied head.
    fn last_unit(&self) -> usize {
        self.units[self.blocks.len()]
    }

    /// Starts to gather the units that a forward uses after that of layer `layer`: its experts and the next layer. After
    /// the last layer, this includes a tied head.
    fn prefetch_after(&self, w: &Weights, layer: usize) {
        (self.units[layer] + 1..=self.units[layer + 1]).for_each(|unit| w.prefetch(unit));
        if layer + 1 == self.blocks.len() {
            w.prefetch(w.table.unit_of(self.head));
        }
    }

    /// Starts to gather the first units of a backward after the head: the final norm and the last layer.
    pub(super) fn prefetch_backward(&self, w: &Weights) {
        w.prefetch(self.last_unit());
        w.prefetch(self.units[self.blocks.len() - 1]);
    }

    fn context<'a>(&'a self, weights: &'a Weights, w: &'a Unit<'a>, positions: &'a Indices<'a>) -> Context<'a> {
        let Self { ropes, tensor, expert, ring, routers, .. } = self;
        Context { w, weights, positions, ropes, tensor, expert, ring, routers }
    }

    fn check_rows(&self, tokens: &[u32], positions: &[u32]) {
        let (all, given) = (tokens.len(), positions.len());
        assert!(given == all || given == AXES * all, "a position for each token (got {given} for {all})");
        let (v, context) = (self.arch.vocabulary, self.arch.context);
        if let Some(token) = tokens.iter().find(|&&t| t as usize >= v) {
            panic!("token {token} is outside the vocabulary of {v}");
        }
        if let Some(position) = positions.iter().find(|&&p| p as usize >= context) {
            panic!("position {position} is outside the context of {context}");
        }
    }
}

/// The rotary tables of an architecture.
fn rope_tables(arch: &Arch) -> Vec<Arc<RopeTable>> {
    let rotations = arch.rotations().expect("checked when config.json was read");
    rotations.into_iter().map(|rotation| RopeTable::shared(rotation, arch.context)).collect()
}
