//! A projection: y = x W^T + b, for attention and the MLP.
//!
//! W is sharded over the ranks of the tensor axis, by outputs or by inputs (arXiv:1909.08053, section 3). With sharded
//! outputs, each rank has outputs of its own and the gradient of x is a sum over ranks. With sharded inputs, y is a sum
//! over ranks.

use super::context::Context;
use super::params::{Init, ParamId, ParamTable};
use super::part::Cut;
use super::weights::{Gradients, Unit};
use crate::ops::glu::{self, Activation};
use crate::ops::matmul::{self, Factor, Into, Output};
use crate::tensor::{Layout, Tensor};

#[derive(Clone, Debug)]
pub(super) struct Linear {
    weight: ParamId,
    bias: Option<ParamId>,
}

impl Linear {
    /// Declares `name.weight` with `dims` = [outputs, inputs] and, with `bias`, `name.bias`. The bias is sharded with the
    /// outputs. If the inputs are sharded, it is added once, after the sum over ranks.
    pub(super) fn declare(table: &mut ParamTable, name: &str, dims: [Cut; 2], bias: bool) -> Self {
        let weight = table.add(&format!("{name}.weight"), &dims, Layout::Panel, table.normal());
        let bias = bias.then(|| table.add(&format!("{name}.bias"), &dims[..1], Layout::Row, Init::Zeros));
        Self { weight, bias }
    }

    /// y_i = x W_i^T + b_i, for projections with sharded outputs.
    pub(super) fn forward_each<const N: usize>(w: &Unit, x: &Tensor, linears: [&Self; N]) -> [Tensor; N] {
        let mut results = linears.map(|linear| x.like(x.rows(), w.weight(linear.weight).n));
        let mut each = results.iter_mut().zip(linears);
        let outputs: [Output; N] = std::array::from_fn(|_| {
            let (y, linear) = each.next().expect("as many results as projections");
            Output { w: w.weight(linear.weight), bias: linear.bias.map(|bias| w.vector(bias)), y }
        });
        matmul::forward_each(x, outputs);
        results
    }

    /// act(x Wgate^T + b) * (x Wup^T + b), for projections with sharded outputs.
    pub(super) fn glu(w: &Unit, x: &Tensor, linears: [&Self; 2], activation: Activation) -> Tensor {
        let factors =
            linears.map(|linear| Factor { w: w.weight(linear.weight), bias: linear.bias.map(|bias| w.vector(bias)) });
        let mut act = x.like(x.rows(), factors[0].w.n);
        glu::of_products(activation, x, factors, &mut act);
        act
    }

    /// y += x W^T + b, for a projection with sharded inputs. The sum over ranks starts from the first rank's y and b.
    /// With `keeps`, the previous y is returned and the sum gets memory of its own.
    pub(super) fn forward_onto(&self, c: Context, x: &Tensor, y: &mut Tensor, keeps: bool) -> Option<Tensor> {
        let (weight, bias) = (c.w.weight(self.weight), self.bias.map(|bias| c.w.vector(bias)));
        let before = keeps.then(|| {
            let apart = y.like(y.rows(), y.width());
            std::mem::replace(y, apart)
        });
        match &before {
            _ if c.tensor.rank() > 0 => matmul::forward(x, weight, None, y, Into::Overwrite),
            Some(before) => matmul::forward_onto(before, x, weight, bias, y),
            None => matmul::forward(x, weight, bias, y, Into::Add),
        }
        c.tensor.sum_slice(y.slice_mut());
        before
    }

    /// dx (+)= dy W, dW += dy^T x, db += sum dy. With sharded outputs, dx is this rank's part of the sum.
    pub(super) fn backward(
        &self,
        w: &Unit,
        x: &Tensor,
        dy: &Tensor,
        dx: &mut Tensor,
        into: Into,
        grads: &mut Gradients,
    ) {
        self.backward_input(w, dy, dx, into);
        self.backward_weight(w, x, dy, grads);
    }

    /// dx (+)= dy W
    pub(super) fn backward_input(&self, w: &Unit, dy: &Tensor, dx: &mut Tensor, into: Into) {
        matmul::backward_input(dy, w.weight(self.weight), dx, into);
    }

    /// dW += dy^T x, db += sum dy
    pub(super) fn backward_weight(&self, w: &Unit, x: &Tensor, dy: &Tensor, grads: &mut Gradients) {
        matmul::backward_weight(dy, x, grads.weight_mut(self.weight), w.dtype());
        if let Some(bias) = self.bias {
            matmul::backward_bias(dy, grads.vector_mut(bias));
        }
    }
}
