//! RMSNorm: y = x / rms(x) * w, over a whole row or over each head in it.

use super::params::{ParamId, ParamTable};
use super::weights::{Gradients, Unit};
use crate::comm::Group;
use crate::ops::rmsnorm;
use crate::tensor::Tensor;

#[derive(Clone, Debug)]
pub(super) struct Norm {
    weight: ParamId,
    eps: f32,
    /// The number of runs of a row that are normed separately.
    heads: usize,
    /// The ranks that have other heads with the same weight.
    tensor: Group,
}

impl Norm {
    /// The norm with the parameter `name.weight`, over each of `heads` runs of a row. The ranks of `tensor` have other
    /// runs. `None` if the table lacks the parameter.
    pub(super) fn find(table: &ParamTable, name: &str, eps: f32, heads: usize, tensor: &Group) -> Option<Self> {
        table.find(&format!("{name}.weight")).map(|weight| Self { weight, eps, heads, tensor: tensor.clone() })
    }

    /// A norm over whole rows.
    pub(super) fn new(table: &ParamTable, name: &str, eps: f32) -> Self {
        Self::find(table, name, eps, 1, &Group::one()).unwrap_or_else(|| panic!("the table has no {name}.weight"))
    }

    /// (y, 1 / rms(x) of each head (t, heads))
    pub(super) fn forward(&self, w: &Unit, x: &Tensor) -> (Tensor, Tensor) {
        let mut y = x.like(x.rows(), x.width());
        let mut rstd = x.statistics(x.rows(), self.heads);
        rmsnorm::forward(x, w.vector(self.weight), self.eps, &mut y, &mut rstd);
        (y, rstd)
    }

    /// dx += (dy / dx)^T dy, dw += (dy / dw)^T dy. Each rank's heads add to dw: the sum starts from the first rank's
    /// dw.
    pub(super) fn backward(
        &self,
        w: &Unit,
        x: &Tensor,
        rstd: &Tensor,
        dy: &Tensor,
        dx: &mut Tensor,
        grads: &mut Gradients,
    ) {
        let mut dw = grads.vector_mut(self.weight);
        if self.tensor.rank() > 0 {
            dw.clear();
        }
        rmsnorm::backward(x, w.vector(self.weight), rstd, dy, dx, dw.reborrow());
        self.tensor.sum_slice(dw);
    }
}
