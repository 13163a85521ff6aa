//! RMSNorm: y = x / rms(x) * (w + offset), over a whole row or over each head in it. In vision towers also LayerNorm, with
//! a bias.

use super::block_spec::NormSpec;
use super::context::Context;
use super::file_rows::{FileRows, HeadRows};
use super::params::{Init, ParamId, ParamTable};
use super::part::Cut;
use super::weights::{Gradients, Unit};
use crate::ops::{layernorm, rmsnorm};
use crate::tensor::{Flat, Layout, Tensor};

#[derive(Clone, Debug)]
pub(super) struct Norm {
    weight: ParamId,
    spec: NormSpec,
    /// The number of runs of a row that are normed separately.
    heads: usize,
    /// Whether the ranks of the tensor axis have other heads with the same weight.
    is_per_head: bool,
    /// The bias of a LayerNorm.
    bias: Option<ParamId>,
}

impl Norm {
    /// Declares `name.weight`, a norm over whole rows of `width` elements.
    pub(super) fn declare(table: &mut ParamTable, name: &str, width: usize, spec: NormSpec) -> Self {
        Self::declare_in(table, name, (width, None), spec)
    }

    /// The same with the order of its elements in the files, if it is another one.
    fn declare_in(
        table: &mut ParamTable,
        name: &str,
        (width, rows): (usize, Option<HeadRows>),
        spec: NormSpec,
    ) -> Self {
        let (init, name) = (if spec.offset == 0.0 { Init::Ones } else { Init::Zeros }, format!("{name}.weight"));
        let file = rows.map(|heads| FileRows { heads: Some(heads), ..FileRows::own(&name, width) });
        let weight = table.add_in(file, &name, &[Cut::Whole(width)], Layout::Row, init);
        Self { weight, spec, heads: 1, is_per_head: false, bias: None }
    }

    /// Declares `name.weight` and `name.bias`, a LayerNorm over whole rows of `width` elements.
    pub(super) fn declare_centered(table: &mut ParamTable, name: &str, width: usize, eps: f32) -> Self {
        let norm = Self::declare(table, name, width, NormSpec { eps, offset: 0.0 });
        let bias = table.add(&format!("{name}.bias"), &[Cut::Whole(width)], Layout::Row, Init::Zeros);
        Self { bias: Some(bias), ..norm }
    }

    /// Declares `name.weight`, a norm over each of this rank's `heads` heads of a row.
    pub(super) fn declare_per_head(
        table: &mut ParamTable,
        name: &str,
        head: (usize, Option<HeadRows>),
        spec: NormSpec,
        heads: usize,
    ) -> Self {
        Self { heads, is_per_head: true, ..Self::declare_in(table, name, head, spec) }
    }

    /// (y, 1 / rms(x) of each head (t, heads)), or with the statistics of a LayerNorm (t, 2).
    pub(super) fn forward(&self, w: &Unit, x: &Tensor) -> (Tensor, Tensor) {
        let mut y = x.like(x.rows(), x.width());
        if let Some(bias) = self.bias {
            let mut stats = x.statistics(x.rows(), 2);
            let [weight, bias] = [self.weight, bias].map(|id| w.vector(id).f32());
            layernorm::forward(x, weight, bias, self.spec.eps, &mut y, &mut stats);
            return (y, stats);
        }
        let mut rstd = x.statistics(x.rows(), self.heads);
        let NormSpec { eps, offset } = self.spec;
        rmsnorm::forward(x, w.vector(self.weight), offset, eps, &mut y, &mut rstd);
        (y, rstd)
    }

    /// dx += (dy / dx)^T dy, dw += (dy / dw)^T dy if w trains. Each rank's heads add to dw: the sum starts from the first rank's
    /// dw.
    pub(super) fn backward(
        &self,
        c: Context,
        x: &Tensor,
        rstd: &Tensor,
        dy: &Tensor,
        dx: &mut Tensor,
        grads: &mut Gradients,
    ) {
        let w = c.w.vector(self.weight);
        if let Some(bias) = self.bias {
            let [mut dw, mut db] = [(); 2].map(|()| vec![0.0; w.len()]);
            layernorm::backward(x, w.f32(), rstd, dy, dx, &mut dw, &mut db);
            grads.add_vector(self.weight, &dw[..]);
            grads.add_vector(bias, &db[..]);
            return;
        }
        if self.weight.is_frozen {
            // The operation has no form without dw, whose cost is small compared with dx.
            let mut unused = Flat::zeros(x.device(), w.len());
            rmsnorm::backward(x, w, self.spec.offset, rstd, dy, dx, unused.all_mut());
            return;
        }
        let mut dw = grads.vector_mut(self.weight);
        if self.is_per_head && c.tensor.rank() > 0 {
            dw.clear();
        }
        rmsnorm::backward(x, w, self.spec.offset, rstd, dy, dx, dw.reborrow());
        if self.is_per_head {
            c.tensor.sum_slice(dw);
        }
    }
}
