//! The norm of queries or keys before they are rotated. Each head is normed alone, or all heads of a row together.

use super::block_spec::{AttentionSpec, NormSpec, QkNorm};
use super::context::Context;
use super::file_rows::HeadRows;
use super::norm::Norm;
use super::params::ParamTable;
use super::part::{Cut, TensorPart};
use super::weights::Gradients;
use crate::comm::Group;
use crate::ops::columns;
use crate::tensor::Tensor;

#[derive(Clone, Debug)]
pub(super) struct HeadNorm {
    norm: Norm,
    /// How the ranks of the tensor axis see the heads of all of them.
    all: Option<AllHeads>,
}

/// The heads of all ranks of the tensor axis.
#[derive(Clone, Debug)]
struct AllHeads {
    /// The global index of each local head, and whether this copy of it counts.
    held: Vec<(usize, bool)>,
    width: usize,
    head_dim: usize,
}

impl HeadNorm {
    /// Declares `name.weight` for the heads of `cut`, if there is a norm.
    pub(super) fn declare(
        table: &mut ParamTable,
        name: &str,
        spec: &AttentionSpec,
        cut: Cut,
        (norm, rows): (NormSpec, Option<HeadRows>),
    ) -> Option<Self> {
        let part = table.tensor_part();
        match spec.qk_norm {
            QkNorm::None => None,
            QkNorm::PerHead => {
                let heads = cut.heads(part).len();
                Some(Self { norm: Norm::declare_per_head(table, name, (spec.head_dim, rows), norm, heads), all: None })
            }
            QkNorm::Whole => {
                let all = (part.size > 1).then(|| AllHeads::new(cut, part, spec.head_dim));
                Some(Self { norm: Norm::declare(table, name, cut.size(), norm), all })
            }
        }
    }

    /// (y, 1 / rms)
    pub(super) fn forward(&self, c: Context, x: &Tensor) -> (Tensor, Tensor) {
        let Some(all) = &self.all else { return self.norm.forward(c.w, x) };
        let (y, rstd) = self.norm.forward(c.w, &all.gather(c.tensor, x, false));
        (all.own(&y, false), rstd)
    }

    /// dx from dy; adds the gradient of the weight. dx of a head that several ranks hold is the sum over them, as dy is.
    pub(super) fn backward(&self, c: Context, x: &Tensor, rstd: &Tensor, dy: &Tensor, grads: &mut Gradients) -> Tensor {
        let Some(all) = &self.all else {
            let mut dx = x.zeros_like(x.rows(), x.width());
            self.norm.backward(c, x, rstd, dy, &mut dx, grads);
            return dx;
        };
        let (x, dy) = (all.gather(c.tensor, x, false), all.gather(c.tensor, dy, true));
        let mut dx = x.zeros_like(x.rows(), x.width());
        self.norm.backward(c, &x, rstd, &dy, &mut dx, grads);
        all.own(&dx, true)
    }
}

impl AllHeads {
    fn new(cut: Cut, part: TensorPart, head_dim: usize) -> Self {
        let before: Vec<usize> = (0..part.rank).flat_map(|rank| cut.heads(TensorPart { rank, ..part })).collect();
        let own = cut.heads(part);
        let counts = |i: usize| !before.contains(&own[i]) && !own[..i].contains(&own[i]);
        let held = own.iter().enumerate().map(|(i, head)| (*head, counts(i))).collect();
        Self { held, width: cut.size(), head_dim }
    }

    /// The columns of all heads (t, width) from this rank's. With `sums`, copies of a head add up; else they are equal.
    fn gather(&self, tensor: &Group, x: &Tensor, sums: bool) -> Tensor {
        let e = self.head_dim;
        let counted = self.held.iter().enumerate().filter(|(_, (_, counts))| *counts || sums);
        let parts: Vec<_> = counted.map(|(i, (head, _))| (x, i * e, head * e)).collect();
        let mut sum = x.statistics(x.rows(), self.width);
        columns::sum(&parts, &mut sum, e);
        tensor.sum_slice(sum.slice_mut());
        let mut all = x.like(x.rows(), self.width);
        columns::copy(&sum, 0, &mut all, 0, self.width);
        all
    }

    /// This rank's columns of those of all heads. With `once`, copies that do not count are 0.
    fn own(&self, all: &Tensor, once: bool) -> Tensor {
        let e = self.head_dim;
        let mut own = all.zeros_like(all.rows(), self.held.len() * e);
        for (i, (head, _)) in self.held.iter().enumerate().filter(|(_, (_, counts))| *counts || !once) {
            columns::copy(all, head * e, &mut own, i * e, e);
        }
        own
    }
}
