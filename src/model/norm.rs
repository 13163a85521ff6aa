//! RMSNorm: y = x / rms(x) * w, over all of a row or over each head in it.

use super::params::{ParamId, ParamTable};
use super::weights::{Gradients, Unit};
use crate::comm::Group;
use crate::ops::rmsnorm;
use crate::tensor::Tensor;

#[derive(Clone, Debug)]
pub(super) struct Norm {
    weight: ParamId,
    eps: f32,
    /// Runs of a row that are normed apart.
    heads: usize,
}

impl Norm {
    /// That whose parameter is `name.weight`, over each of `heads` runs of a row; none where the table does not have it.
    pub(super) fn find(table: &ParamTable, name: &str, eps: f32, heads: usize) -> Option<Self> {
        table.find(&format!("{name}.weight")).map(|weight| Self { weight, eps, heads })
    }

    /// One over all of a row.
    pub(super) fn new(table: &ParamTable, name: &str, eps: f32) -> Self {
        Self::find(table, name, eps, 1).unwrap_or_else(|| panic!("the table has no {name}.weight"))
    }

    /// (y, 1 / rms(x) of each head (t, heads))
    pub(super) fn forward(&self, w: &Unit, x: &Tensor) -> (Tensor, Tensor) {
        let mut y = x.like(x.rows(), x.width());
        let mut rstd = x.statistics(x.rows(), self.heads);
        rmsnorm::forward(x, w.vector(self.weight), self.eps, &mut y, &mut rstd);
        (y, rstd)
    }

    /// dx += (dy / dx)^T dy, dw += (dy / dw)^T dy
    pub(super) fn backward(
        &self,
        w: &Unit,
        x: &Tensor,
        rstd: &Tensor,
        dy: &Tensor,
        dx: &mut Tensor,
        grads: &mut Gradients,
    ) {
        rmsnorm::backward(x, w.vector(self.weight), rstd, dy, dx, grads.vector_mut(self.weight));
    }

    /// The same where every rank of `tensor` has heads of its own that add to the norm's gradient: their sum starts from
    /// what the first rank's gradient holds.
    pub(super) fn backward_shared(
        &self,
        w: &Unit,
        x: &Tensor,
        rstd: &Tensor,
        dy: &Tensor,
        dx: &mut Tensor,
        (grads, tensor): (&mut Gradients, &Group),
    ) {
        if tensor.rank() > 0 {
            grads.vector_mut(self.weight).clear();
        }
        self.backward(w, x, rstd, dy, dx, grads);
        // All ranks of the axis hold it.
        tensor.sum_slice(grads.vector_mut(self.weight));
    }
}
