//! The biases of a router and of its experts. They are few, so each rank of the expert axis has all of them, as the rest of
//! the layer. Each computes the gradients of its own experts, and the sum over ranks completes them.
//!
//! Dims: s rows of experts, d width, f inner width.

use super::context::Context;
use super::expert_axis::own;
use super::expert_files::ExpertFiles;
use super::params::{Init, ParamId, ParamTable};
use super::part::Cut;
use super::weights::{Gradients, Unit};
use crate::ops::experts::Groups;
use crate::ops::matmul;
use crate::tensor::{Layout, Slice, Tensor};

#[derive(Clone, Debug)]
pub(super) struct Biases {
    router: ParamId,
    /// Those of each expert: (f) of gate and up, (d) of down.
    gate: Vec<ParamId>,
    up: Vec<ParamId>,
    down: Vec<ParamId>,
}

impl Biases {
    /// Declares the biases of a layer.
    pub(super) fn declare(table: &mut ParamTable, files: ExpertFiles) -> Self {
        let (layer, spec) = (files.layer, files.spec);
        let router = format!("model.layers.{layer}.mlp.router.bias");
        let router = table.add(&router, &[Cut::Whole(spec.count)], Layout::Row, Init::Zeros);
        let mut add = |e: usize, part: &str, cut: Cut| {
            let own = format!("model.layers.{layer}.mlp.experts.{e}.{part}_proj.bias");
            table.add_in(Some(files.bias(e, part)), &own, &[cut], Layout::Row, Init::Zeros)
        };
        let (mut gate, mut up) = (Vec::new(), Vec::new());
        for e in 0..spec.count {
            gate.push(add(e, "gate", Cut::Even(spec.width)));
            up.push(add(e, "up", Cut::Even(spec.width)));
        }
        let down = (0..spec.count).map(|e| add(e, "down", Cut::Whole(files.width))).collect();
        Self { router, gate, up, down }
    }

    /// The bias of the router's logits.
    pub(super) fn of_router<'a>(&self, w: &'a Unit) -> Slice<'a> {
        w.vector(self.router)
    }

    /// Adds the biases to the rows of gate and up (s, f).
    pub(super) fn add_inner(&self, c: Context, groups: &Groups, [gate, up]: [&mut Tensor; 2]) {
        groups.add_bias(&vectors(c, &self.gate), gate);
        groups.add_bias(&vectors(c, &self.up), up);
    }

    /// Adds the biases to the rows of down (s, d), of which the ranks of the tensor axis have a summand each.
    pub(super) fn add_outer(&self, c: Context, groups: &Groups, rows: &mut Tensor) {
        if c.tensor.rank() == 0 {
            groups.add_bias(&vectors(c, &self.down), rows);
        }
    }

    /// Adds what the biases of down contribute to the gradients of row weights (s, 1), and returns the gradients of these
    /// biases (experts, d) unless they are frozen, from the gradients of y by row (s, d) and the row weights.
    pub(super) fn outer(
        &self,
        c: Context,
        groups: &Groups,
        [dy, weights]: [&Tensor; 2],
        slopes: &mut Tensor,
    ) -> Option<Tensor> {
        if c.tensor.rank() == 0 {
            groups.add_bias_slopes(&vectors(c, &self.down), dy, slopes);
        }
        trains(&self.down).then(|| groups.bias_gradients(dy, Some(weights)))
    }

    /// Adds the gradients of the biases of experts, from those of gate and up (s, f) and of the biases of down.
    pub(super) fn backward(
        &self,
        c: Context,
        groups: &Groups,
        [dgate, dup]: [&Tensor; 2],
        outer: Option<Tensor>,
        grads: &mut Gradients,
    ) {
        let mut add = |ids: &[ParamId], sums: &Tensor| {
            own(c, ids).iter().enumerate().for_each(|(e, id)| grads.add_vector(*id, sums.row(e)));
        };
        for (ids, slopes) in [(&self.gate, dgate), (&self.up, dup)] {
            if trains(ids) {
                add(ids, &groups.bias_gradients(slopes, None));
            }
        }
        if let Some(outer) = outer {
            add(&self.down, &outer);
        }
    }

    /// Adds the gradient of the router's bias from that of its logits.
    pub(super) fn backward_router(&self, dlogits: &Tensor, grads: &mut Gradients) {
        if !self.router.is_frozen {
            matmul::backward_bias(dlogits, grads.vector_mut(self.router));
        }
    }
}

/// Whether the biases of all experts train.
fn trains(ids: &[ParamId]) -> bool {
    ids.iter().all(|id| !id.is_frozen)
}

/// The values of this rank's experts.
fn vectors<'a>(c: Context<'a>, ids: &[ParamId]) -> Vec<&'a [f32]> {
    own(c, ids).iter().map(|id| c.w.vector(*id).f32()).collect()
}
