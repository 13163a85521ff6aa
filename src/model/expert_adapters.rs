//! The adapter of a parameter of all experts: y_i += s (x A_e^T) B_e^T for the rows x of expert e, after the product with
//! the matrix itself. A_e (r, k) is that of all matrices of the parameter, such as gate and up, each of which has its own
//! rows of B_e (n, r).
//!
//! Gates and ups are sharded by outputs, downs by inputs, and their adapters alike (`Linear`). The ranks of the expert
//! axis have the adapters of their experts.

use super::context::Context;
use super::expert_axis::own;
use super::expert_files::ExpertFiles;
use super::params::{Init, ParamId, ParamTable};
use super::part::Cut;
use super::targets::Fused;
use super::tuning::Adapter;
use super::weights::{Gradients, Unit};
use crate::comm::Group;
use crate::ops::experts::Groups;
use crate::ops::scale;
use crate::tensor::{Layout, Tensor, Weight};

#[derive(Clone, Debug)]
pub(super) struct ExpertAdapters {
    /// The name of the parameter, and that of the module with its tensors in the files.
    parameter: String,
    module: String,
    adapter: Adapter,
    init: Init,
    /// A of each expert.
    a: Vec<ParamId>,
    /// B of each expert, by matrix.
    b: Vec<Vec<ParamId>>,
}

impl ExpertAdapters {
    /// Those of gates and ups, and those of downs.
    pub(super) fn of_layer(table: &ParamTable, fused: [&Fused; 2]) -> [Option<Self>; 2] {
        fused.map(|of| {
            let (adapter, init) = table.adapter(&of.module, of.dims[1])?;
            let b = vec![Vec::new(); if of.module.ends_with(".gate_up_proj") { 2 } else { 1 }];
            let module = table.tensor_module(of)?;
            Some(Self { parameter: of.module.clone(), module, adapter, init, a: Vec::new(), b })
        })
    }

    /// Declares that of expert `e`, the next one, for its matrices `parts` with `dims` = [outputs, inputs].
    pub(super) fn declare(
        &mut self,
        table: &mut ParamTable,
        files: ExpertFiles,
        e: usize,
        parts: &[&str],
        [outputs, inputs]: [Cut; 2],
    ) {
        let (rank, prefix) = (self.adapter.rank, format!("model.layers.{}.mlp.experts.{e}", files.layer));
        let last = self.parameter.rsplit('.').next().unwrap_or_default();
        for (part, b) in parts.iter().zip(&mut self.b) {
            let [of_a, of_b] = files.adapter(&self.module, e, part, rank);
            if b.len() == self.a.len() {
                let (name, dims) = (format!("{prefix}.{last}.lora_A.weight"), [Cut::Whole(rank), inputs]);
                self.a.push(table.add_own(Some(of_a), &name, &dims, Layout::Panel, self.init));
            }
            let (name, dims) = (format!("{prefix}.{part}_proj.lora_B.weight"), [outputs, Cut::Whole(rank)]);
            b.push(table.add_own(Some(of_b), &name, &dims, Layout::Panel, Init::Zeros));
        }
    }

    /// s x A_e^T (s, r)
    fn inner(&self, c: Context, unit: &Unit, groups: &Groups, x: &Tensor) -> Tensor {
        let [mut inner] = groups.forward_each(x, [&weights(unit, own(c, &self.a))]);
        scale::by(self.adapter.scale, &mut inner);
        inner
    }

    /// Adds to the rows of gate and up.
    pub(super) fn add_inner(&self, c: Context, unit: &Unit, groups: &Groups, x: &Tensor, y: [&mut Tensor; 2]) {
        let inner = self.inner(c, unit, groups, x);
        for (y, b) in y.into_iter().zip(&self.b) {
            groups.forward_add(&inner, &weights(unit, own(c, b)), y);
        }
    }

    /// Adds to the rows of down, of which the ranks of the tensor axis have a summand each.
    pub(super) fn add_outer(&self, c: Context, unit: &Unit, groups: &Groups, act: &Tensor, y: &mut Tensor) {
        let inner = summed(self.inner(c, unit, groups, act), c.tensor);
        if c.tensor.rank() == 0 {
            groups.forward_add(&inner, &weights(unit, own(c, &self.b[0])), y);
        }
    }

    /// s dy B_e (s, r), and dx += that times A_e.
    pub(super) fn backward_input(
        &self,
        c: Context,
        unit: &Unit,
        groups: &Groups,
        dy: &[&Tensor],
        dx: &mut Tensor,
    ) -> Tensor {
        let mut dinner = dx.like(dx.rows(), self.adapter.rank);
        for (i, (dy, b)) in dy.iter().zip(&self.b).enumerate() {
            groups.backward_input(dy, &weights(unit, own(c, b)), &mut dinner, i > 0);
        }
        scale::by(self.adapter.scale, &mut dinner);
        groups.backward_input(&dinner, &weights(unit, own(c, &self.a)), dx, true);
        dinner
    }

    /// The gradients of A and B from those of y and of the inner result. With `is_cut`, the ranks of the tensor axis share the
    /// inputs x, else the outputs.
    pub(super) fn backward_weights(
        &self,
        c: Context,
        groups: &Groups,
        (x, is_cut): (&Tensor, bool),
        dy: &[&Tensor],
        dinner: Tensor,
        (unit, grads): (&Unit, &mut Gradients),
    ) {
        let inner = self.inner(c, unit, groups, x);
        let (inner, dinner) =
            if is_cut { (summed(inner, c.tensor), dinner) } else { (inner, summed(dinner, c.tensor)) };
        for (dy, b) in dy.iter().zip(&self.b) {
            groups.backward_weight(dy, &inner, grads.weights_mut(own(c, b)), c.w.dtype());
        }
        groups.backward_weight(&dinner, x, grads.weights_mut(own(c, &self.a)), c.w.dtype());
    }
}

/// The sum of a tensor over ranks.
fn summed(mut x: Tensor, group: &Group) -> Tensor {
    group.sum_slice(x.slice_mut());
    x
}

/// The matrices of experts.
pub(super) fn weights<'a>(unit: &'a Unit, ids: &[ParamId]) -> Vec<Weight<'a>> {
    ids.iter().map(|id| unit.weight(*id)).collect()
}
