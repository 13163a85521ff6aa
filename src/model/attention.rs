//! Attention: x1 = x0 + Wo attend(rope(norm(Wq n)), rope(norm(Wk n)), Wv n), n = rmsnorm(x0).
//!
//! Dims: t tokens, d width, h query heads, g key/value heads, e head dim.

use super::arch::Arch;
use super::params::{AttentionSlots, ParamId};
use super::ring::Ring;
use super::weights::{Gradients, Unit};
use crate::comm::Group;
use crate::ops::attention::{self, AttentionShape, KvLayer, PagedSequence};
use crate::ops::matmul::{self, Into, Output};
use crate::ops::rmsnorm;
use crate::ops::rope::{self, RopeTable};
use crate::tensor::Tensor;

/// Where the keys of one layer come from.
pub(super) enum LayerKeys<'a> {
    Packed(&'a [usize]),
    Paged(&'a mut KvLayer, &'a [PagedSequence<'a>]),
}

/// What does not differ between the calls of one forward.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    pub w: &'a Unit<'a>,
    pub positions: &'a [u32],
    pub rope: &'a RopeTable,
    pub norm_eps: f32,
}

/// One layer's attention: parameters, shape, the ranks that share its heads, and those that share its sequences.
#[derive(Clone, Debug)]
pub(super) struct Attention {
    slots: AttentionSlots,
    shape: AttentionShape,
    tensor: Group,
    ring: Ring,
}

/// What the backward of attention needs besides the block's input x0.
#[derive(Debug)]
pub(super) struct AttentionSaved {
    rstd: Tensor,
    /// rmsnorm(x0) (t, d)
    n: Tensor,
    /// Projections before their norm, where the model has qk-norm.
    q_raw: Option<Raw>,
    k_raw: Option<Raw>,
    /// As attended: normed and rotated. (t, h*e), (t, g*e)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
}

/// The input of a qk-norm and 1 / rms of each head.
#[derive(Debug)]
struct Raw {
    x: Tensor,
    rstd: Tensor,
}

impl Attention {
    pub(super) fn new(arch: &Arch, layer: usize, slots: AttentionSlots, tensor: Group, ring: Ring) -> Self {
        let shape = AttentionShape {
            heads: arch.heads,
            kv_heads: arch.kv_heads,
            head_dim: arch.head_dim,
            window: arch.windows[layer],
            scale: 1.0 / (arch.head_dim as f32).sqrt(),
        };
        Self { slots, shape, tensor, ring }
    }

    pub(super) fn shape(&self) -> &AttentionShape {
        &self.shape
    }

    /// x1 = x0 + attention(x0); `x1` holds x0 on entry (the residual is added to in place).
    pub(super) fn forward(&self, c: Context, x1: &mut Tensor, keys: LayerKeys) -> AttentionSaved {
        let (s, shape, t) = (&self.slots, &self.shape, x1.rows());
        let (n, rstd) = norm(c, s.norm, x1);
        let [mut q, mut k, mut v] = [s.q, s.k, s.v].map(|weight| Tensor::scratch(t, c.w.weight(weight).n));
        matmul::forward_each(
            &n,
            [
                output(c.w, s.q, s.q_bias, &mut q),
                output(c.w, s.k, s.k_bias, &mut k),
                output(c.w, s.v, s.v_bias, &mut v),
            ],
        );
        let (mut q, q_raw) = normed(c, q, s.q_norm, shape.heads);
        let (mut k, k_raw) = normed(c, k, s.k_norm, shape.kv_heads);
        let mut o = Tensor::scratch(t, q.width());
        let mut lse = Tensor::scratch(t, shape.heads);
        rope::forward(&mut q, c.positions, c.rope);
        rope::forward(&mut k, c.positions, c.rope);
        match keys {
            LayerKeys::Packed(cu_seqlens) => {
                self.ring.forward(cu_seqlens, shape, [&q, &k, &v], &mut o, &mut lse);
            }
            LayerKeys::Paged(cache, sequences) => {
                attention::kv_append(cache, &k, &v, sequences, shape);
                attention::forward_paged(&q, cache, sequences, shape, &mut o);
            }
        }
        add_linear(c.w, &self.tensor, &o, (s.o, s.o_bias), x1);
        AttentionSaved { rstd, n, q_raw, k_raw, q, k, v, o, lse }
    }

    /// dx0 = dx1 + (d attention / dx0)^T dx1, in place in `dx`; `x0` is the block's input.
    pub(super) fn backward(
        &self,
        c: Context,
        cu_seqlens: &[usize],
        x0: &Tensor,
        saved: AttentionSaved,
        dx: &mut Tensor,
        grads: &mut Gradients,
    ) {
        let (s, t) = (&self.slots, dx.rows());
        let AttentionSaved { rstd, n, q_raw, k_raw, q, k, v, o, lse } = saved;
        let mut d_o = Tensor::scratch(t, o.width());
        linear_backward(c.w, (s.o, s.o_bias), &o, dx, &mut d_o, Into::Overwrite, grads);
        let mut dq = Tensor::scratch(t, q.width());
        let mut dk = Tensor::scratch(t, k.width());
        let mut dv = Tensor::scratch(t, v.width());
        let gradients = [&mut dq, &mut dk, &mut dv];
        self.ring.backward(cu_seqlens, &self.shape, [&q, &k, &v], [&o, &lse, &d_o], gradients);
        drop((q, k, v, o, d_o));
        rope::backward(&mut dq, c.positions, c.rope);
        rope::backward(&mut dk, c.positions, c.rope);
        let dq = unnorm(c, s.q_norm, q_raw, dq, grads);
        let dk = unnorm(c, s.k_norm, k_raw, dk, grads);
        let mut dn = Tensor::scratch(t, n.width());
        linear_backward(c.w, (s.q, s.q_bias), &n, &dq, &mut dn, Into::Overwrite, grads);
        linear_backward(c.w, (s.k, s.k_bias), &n, &dk, &mut dn, Into::Add, grads);
        linear_backward(c.w, (s.v, s.v_bias), &n, &dv, &mut dn, Into::Add, grads);
        self.tensor.all_reduce_sum(dn.data_mut());
        rmsnorm::backward(x0, c.w.vector(s.norm), &rstd, &dn, dx, grads.vector_mut(s.norm));
    }
}

/// A projection, normed per head where the model has qk-norm (then what came before is kept).
fn normed(c: Context, x: Tensor, norm: Option<ParamId>, heads: usize) -> (Tensor, Option<Raw>) {
    let Some(norm) = norm else { return (x, None) };
    let mut y = Tensor::scratch(x.rows(), x.width());
    let mut rstd = Tensor::scratch(x.rows(), heads);
    rmsnorm::forward(&x, c.w.vector(norm), c.norm_eps, &mut y, &mut rstd);
    (y, Some(Raw { x, rstd }))
}

/// The backward of a qk-norm; dy itself where there is none.
fn unnorm(c: Context, norm: Option<ParamId>, raw: Option<Raw>, dy: Tensor, grads: &mut Gradients) -> Tensor {
    let (Some(norm), Some(Raw { x, rstd })) = (norm, raw) else { return dy };
    let mut dx = Tensor::zeros(x.rows(), x.width());
    rmsnorm::backward(&x, c.w.vector(norm), &rstd, &dy, &mut dx, grads.vector_mut(norm));
    dx
}

/// (rmsnorm(x), 1 / rms(x))
pub(super) fn norm(c: Context, weight: ParamId, x: &Tensor) -> (Tensor, Tensor) {
    let mut y = Tensor::scratch(x.rows(), x.width());
    let mut rstd = Tensor::scratch(x.rows(), 1);
    rmsnorm::forward(x, c.w.vector(weight), c.norm_eps, &mut y, &mut rstd);
    (y, rstd)
}

/// y = x W^T + b as one of several products of an x.
pub(super) fn output<'a>(w: &'a Unit, weight: ParamId, bias: Option<ParamId>, y: &'a mut Tensor) -> Output<'a> {
    Output { w: w.weight(weight), bias: bias.map(|b| w.vector(b)), y }
}

/// y = x W^T + b
pub(super) fn linear(w: &Unit, x: &Tensor, weight: ParamId, bias: Option<ParamId>) -> Tensor {
    let weight = w.weight(weight);
    let mut y = Tensor::scratch(x.rows(), weight.n);
    matmul::forward(x, weight, bias.map(|b| w.vector(b)), &mut y, Into::Overwrite);
    y
}

/// y += x W^T + b, where the ranks of `tensor` hold parts of x and of the columns of W: the sum of their products
/// starts from the first rank's residual and bias.
pub(super) fn add_linear(
    w: &Unit,
    tensor: &Group,
    x: &Tensor,
    (weight, bias): (ParamId, Option<ParamId>),
    y: &mut Tensor,
) {
    let (into, bias) = if tensor.rank() == 0 { (Into::Add, bias) } else { (Into::Overwrite, None) };
    matmul::forward(x, w.weight(weight), bias.map(|b| w.vector(b)), y, into);
    tensor.all_reduce_sum(y.data_mut());
}

/// dx (+)= dy W, dW += dy^T x, db += sum dy
pub(super) fn linear_backward(
    w: &Unit,
    (weight, bias): (ParamId, Option<ParamId>),
    x: &Tensor,
    dy: &Tensor,
    dx: &mut Tensor,
    into: Into,
    grads: &mut Gradients,
) {
    matmul::backward_input(dy, w.weight(weight), dx, into);
    matmul::backward_weight(dy, x, &mut grads.weight_mut(weight), w.dtype());
    if let Some(bias) = bias {
        matmul::backward_bias(dy, grads.vector_mut(bias));
    }
}
