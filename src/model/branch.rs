//! One branch of a layer: x += s post(body(pre(x))), with its backward. Each norm may be absent.

use super::context::{Context, LayerKeys};
use super::norm::Norm;
use super::weights::Gradients;
use crate::ops::attention::Packed;
use crate::ops::{residual, scale};
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
    pub pre: Option<Norm>,
    pub body: B,
    pub post: Option<Norm>,
    /// The factor s on what the branch adds.
    pub scale: f32,
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
    /// 1 / rms of the input of the norm in front (t, 1)
    rstd: Option<Tensor>,
    pub body: S,
    /// The input of the norm after the body (t, d), and its 1 / rms
    after: Option<(Tensor, Tensor)>,
}

impl<B: Body> Branch<B> {
    /// x += s post(body(pre(x))).
    pub(super) fn forward(
        &self,
        c: Context,
        x: &mut Tensor,
        keys: &mut LayerKeys,
        keep: KeepBranch,
    ) -> Option<BranchSaved<B::Saved>> {
        let (n, rstd) = self.input(c, x);
        if keep != KeepBranch::Everything {
            let keeps = keep == KeepBranch::Input;
            let (x, _) = self.add_to(c, x, keeps, |y, keeps| self.body.run(c, n, keys, y, keeps));
            return Some(BranchSaved { x: x?, inner: None });
        }
        let body = self.body.forward(c, n, keys);
        let (x, after) = self.add_to(c, x, true, |y, keeps| self.body.add(c, &body, y, keeps));
        Some(BranchSaved { x: x?, inner: Some(Inner { rstd, body, after }) })
    }

    /// The body's input, and 1 / rms of the norm in front.
    fn input(&self, c: Context, x: &Tensor) -> (Tensor, Option<Tensor>) {
        match &self.pre {
            Some(pre) => {
                let (n, rstd) = pre.forward(c.w, x);
                (n, Some(rstd))
            }
            None => (residual::copy(x), None),
        }
    }

    /// x += s post(y), where `body` adds y to its argument, as `Body::add`. Returns the previous value of x if it is
    /// kept, and the input of the norm after the body with its 1 / rms.
    fn add_to(
        &self,
        c: Context,
        x: &mut Tensor,
        keeps: bool,
        body: impl FnOnce(&mut Tensor, bool) -> Option<Tensor>,
    ) -> (Option<Tensor>, Option<(Tensor, Tensor)>) {
        if self.post.is_none() && self.scale == 1.0 {
            return (body(x, keeps), None);
        }
        let mut y = x.zeros_like(x.rows(), x.width());
        body(&mut y, false);
        let before = keeps.then(|| {
            let apart = residual::copy(x);
            std::mem::replace(x, apart)
        });
        let Some(post) = &self.post else {
            residual::add(self.scale, &y, x);
            return (before, None);
        };
        let (n, rstd) = post.forward(c.w, &y);
        residual::add(self.scale, &n, x);
        (before, Some((y, rstd)))
    }

    /// The activations of a branch whose input alone was kept.
    fn recomputed(&self, c: Context, x: &Tensor, packed: &Packed) -> Inner<B::Saved> {
        let (n, rstd) = self.input(c, x);
        let body = self.body.forward(c, n, &mut LayerKeys::Packed(packed));
        let after = self.post.as_ref().map(|post| {
            let mut y = x.zeros_like(x.rows(), x.width());
            self.body.add(c, &body, &mut y, false);
            let (_, rstd) = post.forward(c.w, &y);
            (y, rstd)
        });
        Inner { rstd, body, after }
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
        let Inner { rstd, body, after } = inner.unwrap_or_else(|| self.recomputed(c, &x, packed));
        let dn = match self.slope(c, after, dx, grads) {
            Some(dy) => self.body.backward(c, packed, body, &dy, grads),
            None => self.body.backward(c, packed, body, dx, grads),
        };
        match (&self.pre, rstd) {
            (Some(pre), Some(rstd)) => pre.backward(c, &x, &rstd, &dn, dx, grads),
            _ => residual::add(1.0, &dn, dx),
        }
    }

    /// The gradient dy of the body's result from that of the sum; `None` if they are equal.
    fn slope(&self, c: Context, after: Option<(Tensor, Tensor)>, dx: &Tensor, grads: &mut Gradients) -> Option<Tensor> {
        let scaled = (self.scale != 1.0).then(|| {
            let mut dx = residual::copy(dx);
            scale::by(self.scale, &mut dx);
            dx
        });
        let (Some(post), Some((y, rstd))) = (&self.post, after) else { return scaled };
        let mut dy = y.zeros_like(y.rows(), y.width());
        post.backward(c, &y, &rstd, scaled.as_ref().unwrap_or(dx), &mut dy, grads);
        Some(dy)
    }
}
