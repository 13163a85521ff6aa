//! One branch of a layer: x += body(pre(x)), with its backward.

use super::context::{Context, LayerKeys};
use super::norm::Norm;
use super::weights::Gradients;
use crate::ops::attention::Packed;
use crate::tensor::Tensor;

/// The function y = f(n) of a branch. Its last projection adds y to the residual stream.
pub(super) trait Body {
    /// The activations that the backward needs.
    type Saved;

    /// Computes everything but the last projection.
    fn forward(&self, c: Context, n: Tensor, keys: &mut LayerKeys) -> Self::Saved;

    /// x += y. With `keeps`, returns the previous value of x: the sum gets memory of its own.
    fn add(&self, c: Context, saved: &Self::Saved, x: &mut Tensor, keeps: bool) -> Option<Tensor>;

    /// `forward` and `add`, if no backward needs the activations.
    fn run(&self, c: Context, n: Tensor, keys: &mut LayerKeys, x: &mut Tensor, keeps: bool) -> Option<Tensor> {
        let saved = self.forward(c, n, keys);
        self.add(c, &saved, x, keeps)
    }

    /// dn from dy.
    fn backward(&self, c: Context, packed: &Packed, saved: Self::Saved, dy: &Tensor, grads: &mut Gradients) -> Tensor;
}

#[derive(Clone, Debug)]
pub(super) struct Branch<B> {
    pub pre: Norm,
    pub body: B,
}

/// The parts of a branch's activations that a forward keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeepBranch {
    Nothing,
    Input,
    Everything,
}

/// The activations that the backward of a branch needs.
#[derive(Debug)]
pub(super) struct BranchSaved<S> {
    /// The residual stream before the branch (t, d)
    pub x: Tensor,
    /// `None` if it is recomputed.
    pub inner: Option<Inner<S>>,
}

#[derive(Debug)]
pub(super) struct Inner<S> {
    /// 1 / rms of the norm's input (t, 1)
    rstd: Tensor,
    pub body: S,
}

impl<B: Body> Branch<B> {
    /// x += body(pre(x)).
    pub(super) fn forward(
        &self,
        c: Context,
        x: &mut Tensor,
        keys: &mut LayerKeys,
        keep: KeepBranch,
    ) -> Option<BranchSaved<B::Saved>> {
        if keep != KeepBranch::Everything {
            let (n, _) = self.pre.forward(c.w, x);
            let x = self.body.run(c, n, keys, x, keep == KeepBranch::Input)?;
            return Some(BranchSaved { x, inner: None });
        }
        let inner = self.inner(c, x, keys);
        let x = self.body.add(c, &inner.body, x, true)?;
        Some(BranchSaved { x, inner: Some(inner) })
    }

    fn inner(&self, c: Context, x: &Tensor, keys: &mut LayerKeys) -> Inner<B::Saved> {
        let (n, rstd) = self.pre.forward(c.w, x);
        Inner { rstd, body: self.body.forward(c, n, keys) }
    }

    /// The gradient of x before the branch from that after it, in place in `dx`.
    pub(super) fn backward(
        &self,
        c: Context,
        packed: &Packed,
        saved: BranchSaved<B::Saved>,
        dx: &mut Tensor,
        grads: &mut Gradients,
    ) {
        let BranchSaved { x, inner } = saved;
        let Inner { rstd, body } = inner.unwrap_or_else(|| self.inner(c, &x, &mut LayerKeys::Packed(packed)));
        let dn = self.body.backward(c, packed, body, dx, grads);
        self.pre.backward(c, &x, &rstd, &dn, dx, grads);
    }
}
