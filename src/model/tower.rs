//! Vision towers: from the patches of images to rows of the language model's width, forward and backward.
//!
//! x0 = patches W^T (+ b) (+ positions); each block as in the language model, without a mask (`Block`); then mergers. All
//! parameters are whole on each rank, so a tower needs no collectives but those of sharded weights. There are no kernels
//! for GPUs.

use super::block::{Block, BlockSaved, Keep};
use super::context::{Context, LayerKeys};
use super::linear::Linear;
use super::merger::{Merger, MergerSaved};
use super::naming::TOWER;
use super::params::{ParamId, ParamTable};
use super::part::Cut;
use super::ring::Ring;
use super::routers::Routers;
use super::tower_grid::Grid;
use super::vision_spec::{THETA, TowerKind, VisionSpec};
use super::weights::{Gradients, Unit, Weights};
use crate::comm::{Axes, Group};
use crate::experience::Patches;
use crate::ops::attention::Packed;
use crate::ops::rope::{RopeTable, Rotation};
use crate::ops::{residual, taps};
use crate::tensor::{Indices, Layout, Tensor};
use std::sync::Arc;

/// The most patches on a side of an image, for the table of angles.
const SIDE_MAX: usize = 1 << 16;

#[derive(Clone, Debug)]
pub(super) struct Tower {
    pub spec: Arc<VisionSpec>,
    patches: Linear,
    /// The learned table of positions (side^2, w).
    positions: Option<ParamId>,
    /// The blocks, each with the merger of its result if that goes to a layer of the language model.
    blocks: Vec<(Block, Option<Merger>)>,
    merger: Merger,
    /// The unit of the patches. Each block is the next one, and the merger the last one.
    unit: usize,
    ropes: [Arc<RopeTable>; 1],
    alone: Group,
    ring: Ring,
    routers: Routers,
}

/// The rows of images for a language model of width d.
#[derive(Debug)]
pub struct Merged {
    /// The rows in place of the tokens (n, d), and those after each of the first layers.
    pub rows: Tensor,
    pub deep: Vec<Tensor>,
}

impl Merged {
    /// The same with each tensor changed.
    pub(super) fn each(&self, change: impl Fn(&Tensor) -> Tensor) -> Self {
        Self { rows: change(&self.rows), deep: self.deep.iter().map(change).collect() }
    }

    /// The rows of several images, one after another.
    ///
    /// # Panics
    /// Without images.
    pub(super) fn stacked(all: &[Self]) -> Self {
        let stack = |of: &dyn Fn(&Self) -> &Tensor| Tensor::stacked(&all.iter().map(of).collect::<Vec<_>>());
        let layers = all.first().map_or(0, |merged| merged.deep.len());
        Self {
            rows: stack(&|merged| &merged.rows),
            deep: (0..layers).map(|i| stack(&|merged| &merged.deep[i])).collect(),
        }
    }

    /// The bytes of all rows.
    pub(super) fn bytes(&self) -> usize {
        let of = |rows: &Tensor| rows.rows() * rows.width() * size_of::<f32>();
        of(&self.rows) + self.deep.iter().map(of).sum::<usize>()
    }
}

/// The results of a forward that its backward needs.
#[derive(Debug)]
pub(super) struct TowerSaved {
    grid: Grid,
    /// The patches in the tower's order.
    input: Tensor,
    blocks: Vec<(BlockSaved, Option<MergerSaved>)>,
    merger: MergerSaved,
}

impl Tower {
    /// Declares the parameters of a tower. Patches with positions are a unit, and so are each block and the last merger.
    pub fn declare(table: &mut ParamTable, spec: &Arc<VisionSpec>) -> Self {
        let unit = table.units().len();
        let name = |part: &str| format!("{TOWER}{part}");
        let &VisionSpec { width, heads, frames, patch, .. } = &**spec;
        let dims = [width, 3, frames, patch, patch];
        let patches = Linear::declare_patches(table, &name("patch_embed.proj"), &dims, !spec.is_windowed());
        let positions = match spec.kind {
            TowerKind::Windowed { .. } => None,
            TowerKind::Learned { side } => {
                let dims = [side * side, width].map(Cut::Whole);
                Some(table.add(&name("pos_embed.weight"), &dims, Layout::Row, table.normal()))
            }
        };
        table.end_unit();
        let block = |i: usize| {
            let block = Block::of_tower(table, &name(&format!("blocks.{i}")), spec);
            let deep = spec.deepstack.iter().position(|at| *at == i);
            let merger =
                deep.map(|at| Merger::declare(table, &name(&format!("deepstack_merger_list.{at}")), spec, true));
            table.end_unit();
            (block, merger)
        };
        let blocks = (0..spec.depth).map(block).collect();
        let merger = Merger::declare(table, &name("merger"), spec, false);
        table.end_unit();
        let (axes, alone, routers) = (Axes::one(), Group::one(), Routers::default());
        let (ropes, ring) = ([RopeTable::shared(rotation(width / heads), SIDE_MAX)], Ring::new(&axes));
        Self { spec: spec.clone(), patches, positions, blocks, merger, unit, ropes, alone, ring, routers }
    }

    /// The units of its parameters.
    pub fn units(&self) -> std::ops::Range<usize> {
        self.unit..self.unit + self.blocks.len() + 2
    }

    fn context<'a>(&'a self, weights: &'a Weights, w: &'a Unit<'a>, positions: &'a Indices<'a>) -> Context<'a> {
        let Self { ropes, alone, ring, routers, .. } = self;
        Context { w, weights, positions, ropes, tensor: alone, expert: alone, ring, routers }
    }

    /// The keys of block `i`: the images, or their windows.
    fn keys<'a>(&self, i: usize, [images, windows]: [&'a Packed<'a>; 2]) -> &'a Packed<'a> {
        match &self.spec.kind {
            TowerKind::Windowed { full, .. } if !full.contains(&i) => windows,
            _ => images,
        }
    }

    /// The rows of `images`, one after another. With `keep`, also what the backward needs. If weights are sharded, this is
    /// a collective, also without images.
    pub fn forward(&self, w: &Weights, images: &[Arc<Patches>], keep: Option<Keep>) -> (Merged, Option<TowerSaved>) {
        let grid = Grid::new(&self.spec, images);
        let input = self.input(&grid, images);
        let positions = &Indices::on(input.device(), &grid.positions);
        let packed = [&grid.images, &grid.windows].map(|ends| Packed::unmasked(ends));
        let packed = packed.each_ref();
        let mut x = {
            let unit = w.unit(self.unit);
            let [mut x] = Linear::forward_each(&unit, &input, [&self.patches]);
            if let Some(table) = self.positions {
                taps::forward(unit.weight(table), &grid.taps, &mut x);
            }
            x
        };
        let (mut deep, mut blocks) = (Vec::new(), Vec::new());
        for (i, (block, merger)) in self.blocks.iter().enumerate() {
            let unit = w.unit(self.unit + 1 + i);
            let c = self.context(w, &unit, positions);
            let keys = || LayerKeys::Packed(self.keys(i, packed));
            let saved = block.forward(c, &mut x, keys(), keep.unwrap_or(Keep::Nothing));
            let merged = merger.as_ref().map(|merger| merger.forward(c, &x, &mut keys()));
            let (rows, of_merger) = merged.unzip();
            deep.extend(rows);
            blocks.extend(saved.map(|saved| (saved, of_merger)));
        }
        let unit = w.unit(self.units().end - 1);
        let keys = &mut LayerKeys::Packed(packed[0]);
        let (rows, merger) = self.merger.forward(self.context(w, &unit, positions), &x, keys);
        let in_order = |rows: Tensor| if grid.order.is_empty() { rows } else { grid.order(&rows).undo(&rows) };
        let merged = Merged { rows: in_order(rows), deep: deep.into_iter().map(in_order).collect() };
        (merged, keep.map(|_| TowerSaved { grid, input, blocks, merger }))
    }

    /// Adds the gradient of every parameter that trains, given those of the rows of `forward`.
    pub fn backward(&self, w: &Weights, saved: TowerSaved, dmerged: &Merged, grads: &mut Gradients) {
        let TowerSaved { grid, input, blocks, merger } = saved;
        let positions = &Indices::on(input.device(), &grid.positions);
        let packed = [&grid.images, &grid.windows].map(|ends| Packed::unmasked(ends));
        let packed = packed.each_ref();
        let placed = |dy: &Tensor| if grid.order.is_empty() { residual::copy(dy) } else { grid.order(dy).apply(dy) };
        let mut dx = input.zeros_like(input.rows(), self.spec.width);
        let mut unit = self.units().end - 1;
        grads.begin(unit);
        let values = w.unit(unit);
        let dy = placed(&dmerged.rows);
        self.merger.backward(self.context(w, &values, positions), packed[0], merger, &dy, &mut dx, grads);
        drop(values);
        grads.finish(unit);
        let mut deep = dmerged.deep.iter().rev();
        for (i, ((block, merger), (of_block, of_merger))) in self.blocks.iter().zip(blocks).enumerate().rev() {
            unit -= 1;
            grads.begin(unit);
            let values = w.unit(unit);
            let (c, keys) = (self.context(w, &values, positions), self.keys(i, packed));
            if let (Some(merger), Some(saved)) = (merger, of_merger) {
                let dy = placed(deep.next().expect("a gradient for each merger"));
                merger.backward(c, keys, saved, &dy, &mut dx, grads);
            }
            block.backward(c, keys, of_block, &mut dx, grads);
            grads.finish(unit);
        }
        unit -= 1;
        grads.begin(unit);
        let values = w.unit(unit);
        if let Some(table) = self.positions.filter(|table| !table.is_frozen) {
            taps::backward(&dx, &grid.taps, grads.weight_mut(table));
        }
        self.patches.backward_weight(&values, &input, &dx, None, grads);
        drop(values);
        grads.finish(unit);
    }

    /// The patches in the tower's order.
    fn input(&self, grid: &Grid, images: &[Arc<Patches>]) -> Tensor {
        let (width, each) = (self.spec.patch_values(), self.spec.patches_of_token() * self.spec.patch_values());
        let mut input = Tensor::scratch(grid.patches(), width);
        if crate::device::null::is_active() {
            return input;
        }
        let tokens: Vec<&[f32]> = images.iter().flat_map(|image| image.values.chunks_exact(each)).collect();
        assert_eq!(tokens.len() * each, input.rows() * width, "images with patches of {width} values");
        for (place, to) in input.data_mut().chunks_exact_mut(each).enumerate() {
            to.copy_from_slice(tokens[grid.order.get(place).map_or(place, |token| *token as usize)]);
        }
        input
    }
}

/// The rotation of heads of e columns: e/4 frequencies of the row, then as many of the column.
fn rotation(head_dim: usize) -> Rotation {
    let of_axis = head_dim / 4;
    let frequency = |i: usize| THETA.powf(-(2.0 * (i % of_axis) as f64) / (head_dim / 2) as f64) as f32;
    Rotation {
        head_dim,
        inverse_frequencies: (0..2 * of_axis).map(frequency).collect(),
        axes: (0..2 * of_axis).map(|i| u8::from(i >= of_axis)).collect(),
        attention_factor: 1.0,
        query_scale: None,
    }
}
