//! An MLP without a gate: y = W2 gelu(W1 n + b1) + b2, whole on each rank.

use super::branch::Body;
use super::context::{Context, LayerKeys};
use super::linear::Linear;
use super::params::ParamTable;
use super::part::Cut;
use super::weights::Gradients;
use crate::ops::attention::Packed;
use crate::ops::gelu::{self, Gelu};
use crate::ops::matmul::Into;
use crate::tensor::Tensor;

#[derive(Clone, Debug)]
pub(super) struct PlainMlp {
    first: Linear,
    second: Linear,
    gelu: Gelu,
    outputs: usize,
}

/// The activations that the backward needs.
#[derive(Debug)]
pub(super) struct PlainSaved {
    /// The input (t, k)
    n: Tensor,
    /// W1 n + b1, and its gelu (t, f)
    inner: Tensor,
    act: Tensor,
}

impl PlainSaved {
    /// The results in the order in which they were computed.
    pub(super) fn results(&self) -> Vec<(&'static str, &Tensor)> {
        vec![("the MLP's norm", &self.n), ("the first projection", &self.inner), ("gelu", &self.act)]
    }
}

impl PlainMlp {
    /// Declares both matrices with their biases: `widths` = [inputs, inner, outputs].
    pub(super) fn declare(table: &mut ParamTable, names: [&str; 2], widths: [usize; 3], gelu: Gelu) -> Self {
        let [inputs, inner, outputs] = widths.map(Cut::Whole);
        let first = Linear::declare(table, names[0], [inner, inputs], true);
        let second = Linear::declare(table, names[1], [outputs, inner], true);
        Self { first, second, gelu, outputs: widths[2] }
    }

    /// The width of y.
    pub(super) fn outputs(&self) -> usize {
        self.outputs
    }
}

impl Body for PlainMlp {
    type Saved = PlainSaved;

    fn forward(&self, c: Context, n: Tensor, _: &mut LayerKeys) -> PlainSaved {
        let [inner] = Linear::forward_each(c.w, &n, [&self.first]);
        let mut act = inner.like(inner.rows(), inner.width());
        gelu::forward(self.gelu, &inner, &mut act);
        PlainSaved { n, inner, act }
    }

    fn add(&self, c: Context, saved: &PlainSaved, x: &mut Tensor, keeps: bool) -> Option<Tensor> {
        self.second.forward_onto(c, &saved.act, x, keeps)
    }

    fn backward(&self, c: Context, _: &Packed, saved: PlainSaved, dy: &Tensor, grads: &mut Gradients) -> Tensor {
        let PlainSaved { n, inner, act } = saved;
        let mut dinner = act.like(act.rows(), act.width());
        self.second.backward_onto(c, &act, dy, &mut dinner, grads);
        gelu::backward(self.gelu, &inner, &mut dinner);
        let mut dn = n.like(n.rows(), n.width());
        self.first.backward(c, &n, &dinner, &mut dn, Into::Overwrite, grads);
        dn
    }
}
