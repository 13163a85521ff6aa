//! Attention: x1 = x0 + Wo attend(rope(norm(Wq n)), rope(norm(Wk n)), Wv n), n = rmsnorm(x0).
//!
//! Dims: t tokens, d width, h query heads, g key/value heads, e head dim.

use super::arch::Arch;
use super::params::{AttentionSlots, ParamId};
use super::part::TensorPart;
use super::ring::Ring;
use super::weights::{Gradients, Unit};
use crate::comm::Group;
use crate::device::Device;
use crate::device::cuda::copy;
use crate::ops::attention::{self, AttentionShape, KvLayer, Packed, Paged};
use crate::ops::matmul::{self, Into, Output};
use crate::ops::rmsnorm;
use crate::ops::rope::{self, RopeTable};
use crate::tensor::{Indices, Tensor};

/// Where the keys of one layer come from.
pub(super) enum LayerKeys<'a> {
    Packed(&'a Packed<'a>),
    Paged(&'a mut KvLayer, &'a Paged<'a>),
}

/// What does not differ between the calls of one forward.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    pub w: &'a Unit<'a>,
    pub positions: &'a Indices<'a>,
    pub rope: &'a RopeTable,
    pub norm_eps: f32,
}

/// One layer's attention: parameters, shape, the ranks that share its heads, and those that share its sequences.
#[derive(Clone, Debug)]
pub(super) struct Attention {
    slots: AttentionSlots,
    /// Heads as far as this rank holds them.
    shape: AttentionShape,
    copies: KvCopies,
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

impl AttentionSaved {
    /// What was computed, in order.
    pub(super) fn results(&self) -> [(&'static str, &Tensor); 5] {
        let [n, q, k, v, o] = [&self.n, &self.q, &self.k, &self.v, &self.o];
        [("attention's norm", n), ("queries", q), ("keys", k), ("values", v), ("attention", o)]
    }
}

/// The input of a qk-norm and 1 / rms of each head.
#[derive(Debug)]
struct Raw {
    x: Tensor,
    rstd: Tensor,
}

impl Attention {
    pub(super) fn new(arch: &Arch, layer: usize, slots: AttentionSlots, tensor: Group, ring: Ring) -> Self {
        let part = TensorPart::of(&tensor);
        let copies = KvCopies::new(arch, part);
        let shape = AttentionShape {
            heads: part.heads(arch).len(),
            kv_heads: copies.held.len(),
            head_dim: arch.head_dim,
            window: arch.windows[layer],
            scale: 1.0 / (arch.head_dim as f32).sqrt(),
        };
        Self { slots, shape, copies, tensor, ring }
    }

    pub(super) fn shape(&self) -> &AttentionShape {
        &self.shape
    }

    /// x1 = x0 + attention(x0): `x` holds x0 before and x1 behind. What the backward needs; and x0, where it is kept.
    pub(super) fn forward(
        &self,
        c: Context,
        x: &mut Tensor,
        keys: LayerKeys,
        keeps: bool,
    ) -> (AttentionSaved, Option<Tensor>) {
        let (s, shape, t) = (&self.slots, &self.shape, x.rows());
        let (n, rstd) = norm(c, s.norm, x);
        let [mut q, mut k, mut v] = [s.q, s.k, s.v].map(|weight| n.like(t, c.w.weight(weight).n));
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
        rope::forward(&mut q, &mut k, c.positions, c.rope);
        let (o, lse) = match keys {
            LayerKeys::Packed(packed) => self.ring.forward(packed, shape, [&q, &k, &v]),
            LayerKeys::Paged(cache, paged) => {
                let mut o = q.like(t, q.width());
                attention::kv_append(cache, &k, &v, paged, shape);
                attention::forward_paged(&q, cache, paged, shape, &mut o);
                // Only packed keys have a backward, which asks for lse.
                (o, q.statistics(0, shape.heads))
            }
        };
        let x0 = add_linear(c.w, &self.tensor, &o, (s.o, s.o_bias), x, keeps);
        (AttentionSaved { rstd, n, q_raw, k_raw, q, k, v, o, lse }, x0)
    }

    /// dx0 = dx1 + (d attention / dx0)^T dx1, in place in `dx`; `x0` is the block's input.
    pub(super) fn backward(
        &self,
        c: Context,
        packed: &Packed,
        x0: &Tensor,
        saved: AttentionSaved,
        dx: &mut Tensor,
        grads: &mut Gradients,
    ) {
        let (s, t) = (&self.slots, dx.rows());
        let AttentionSaved { rstd, n, q_raw, k_raw, q, k, v, o, lse } = saved;
        let mut d_o = o.like(t, o.width());
        linear_backward(c.w, (s.o, s.o_bias), &o, dx, &mut d_o, Into::Overwrite, grads);
        let [mut dq, mut dk, mut dv] = self.ring.backward(packed, &self.shape, [&q, &k, &v], [&o, &lse, &d_o]);
        drop((q, k, v, o, d_o));
        rope::backward(&mut dq, &mut dk, c.positions, c.rope);
        let dq = unnorm(c, &self.tensor, s.q_norm, q_raw, dq, grads);
        let mut dk = unnorm(c, &self.tensor, s.k_norm, k_raw, dk, grads);
        let mut dn = n.like(t, n.width());
        linear_backward(c.w, (s.q, s.q_bias), &n, &dq, &mut dn, Into::Overwrite, grads);
        matmul::backward_input(&dk, c.w.weight(s.k), &mut dn, Into::Add);
        matmul::backward_input(&dv, c.w.weight(s.v), &mut dn, Into::Add);
        self.copies.sum(&self.tensor, [&mut dk, &mut dv]);
        weight_backward(c.w, (s.k, s.k_bias), &n, &dk, grads);
        weight_backward(c.w, (s.v, s.v_bias), &n, &dv, grads);
        self.tensor.sum_ordered(&mut dn);
        rmsnorm::backward(x0, c.w.vector(s.norm), &rstd, &dn, dx, grads.vector_mut(s.norm));
    }
}

/// A projection, normed per head where the model has qk-norm (then what came before is kept).
fn normed(c: Context, x: Tensor, norm: Option<ParamId>, heads: usize) -> (Tensor, Option<Raw>) {
    let Some(norm) = norm else { return (x, None) };
    let mut y = x.like(x.rows(), x.width());
    let mut rstd = x.statistics(x.rows(), heads);
    rmsnorm::forward(&x, c.w.vector(norm), c.norm_eps, &mut y, &mut rstd);
    (y, Some(Raw { x, rstd }))
}

/// The backward of a qk-norm; dy itself where there is none. Every rank has heads of its own that add to the norm's
/// gradient: their sum starts from what the first rank's gradient holds.
fn unnorm(
    c: Context,
    tensor: &Group,
    norm: Option<ParamId>,
    raw: Option<Raw>,
    dy: Tensor,
    grads: &mut Gradients,
) -> Tensor {
    let (Some(norm), Some(Raw { x, rstd })) = (norm, raw) else { return dy };
    let mut dx = x.zeros_like(x.rows(), x.width());
    if tensor.rank() > 0 {
        grads.clear_vector(norm);
    }
    rmsnorm::backward(&x, c.w.vector(norm), &rstd, &dy, &mut dx, grads.vector_mut(norm));
    grads.sum_vector(norm, tensor);
    dx
}

/// Which key/value heads this rank holds, some of them copies of another rank's.
#[derive(Clone, Debug)]
struct KvCopies {
    /// The head of each local head.
    held: Vec<usize>,
    heads: usize,
    head_dim: usize,
    /// Copies of each head on all ranks.
    copies: usize,
}

impl KvCopies {
    fn new(arch: &Arch, part: TensorPart) -> Self {
        let (held, copies) = (part.kv_heads(arch), part.kv_copies(arch));
        Self { held, heads: arch.kv_heads, head_dim: arch.head_dim, copies }
    }

    /// Every copy of a head is attended to by other query heads: the gradient of each copy becomes the sum over all, so
    /// that the weights behind them move alike. It is added in f32, this rank's copies first.
    fn sum(&self, tensor: &Group, gradients: [&mut Tensor; 2]) {
        let rows = gradients[0].rows();
        if self.copies == 1 || rows == 0 {
            return;
        }
        let mut all = gradients[0].statistics(rows, 2 * self.heads * self.head_dim);
        match all.device() {
            Device::Cpu => self.collect(&gradients, &mut all),
            Device::Cuda => self.collect_on_gpu(&gradients, &mut all),
        }
        tensor.sum_ordered(&mut all);
        for (i, gradient) in gradients.into_iter().enumerate() {
            match gradient.device() {
                Device::Cpu => self.spread(&all, i, gradient.data_mut()),
                Device::Cuda => self.spread_on_gpu(&all, i, gradient),
            }
        }
    }

    /// Where each local head's columns of gradient `i` stand among those of all heads.
    fn places(&self, i: usize) -> impl Iterator<Item = (usize, usize)> {
        let e = self.head_dim;
        self.held.iter().map(move |head| (i * self.heads + head) * e).enumerate()
    }

    /// Columns of the heads that this rank holds.
    fn columns(&self) -> usize {
        self.held.len() * self.head_dim
    }

    fn collect(&self, gradients: &[&mut Tensor; 2], all: &mut Tensor) {
        let e = self.head_dim;
        all.data_mut().fill(0.0);
        for (i, gradient) in gradients.iter().enumerate() {
            for (row, from) in gradient.data().chunks_exact(self.columns()).enumerate() {
                let to = all.row_mut(row);
                for (local, at) in self.places(i) {
                    let from = &from[local * e..(local + 1) * e];
                    to[at..at + e].iter_mut().zip(from).for_each(|(sum, x)| *sum += x);
                }
            }
        }
    }

    fn collect_on_gpu(&self, gradients: &[&mut Tensor; 2], all: &mut Tensor) {
        let (e, rows, columns, width) = (self.head_dim, all.rows(), self.columns(), all.width());
        all.cuda_mut().clear();
        // The nth copies of all heads lie side by side, so that one sum adds them.
        let copy_of = |local: usize| self.held[..local].iter().filter(|head| **head == self.held[local]).count();
        for n in 0..=(0..self.held.len()).map(copy_of).max().unwrap_or(0) {
            let mut copies = all.statistics(rows, width);
            copies.cuda_mut().clear();
            for (i, gradient) in gradients.iter().enumerate() {
                for (local, at) in self.places(i).filter(|(local, _)| copy_of(*local) == n) {
                    let from = gradient.cuda().part(local * e..rows * columns);
                    copy::columns(from, columns, copies.cuda_mut().part(at..rows * width), width, rows, e);
                }
            }
            copy::add(copies.cuda(), all.cuda_mut());
        }
    }

    fn spread(&self, all: &Tensor, i: usize, gradient: &mut [f32]) {
        let e = self.head_dim;
        for (row, to) in gradient.chunks_exact_mut(self.columns()).enumerate() {
            let from = all.row(row);
            self.places(i).for_each(|(local, at)| to[local * e..(local + 1) * e].copy_from_slice(&from[at..at + e]));
        }
    }

    fn spread_on_gpu(&self, all: &Tensor, i: usize, gradient: &mut Tensor) {
        let (e, rows, columns, width) = (self.head_dim, all.rows(), self.columns(), all.width());
        for (local, at) in self.places(i) {
            let to = gradient.cuda_mut().part(local * e..rows * columns);
            copy::columns(all.cuda().part(at..rows * width), width, to, columns, rows, e);
        }
    }
}

/// (rmsnorm(x), 1 / rms(x))
pub(super) fn norm(c: Context, weight: ParamId, x: &Tensor) -> (Tensor, Tensor) {
    let mut y = x.like(x.rows(), x.width());
    let mut rstd = x.statistics(x.rows(), 1);
    rmsnorm::forward(x, c.w.vector(weight), c.norm_eps, &mut y, &mut rstd);
    (y, rstd)
}

/// y = x W^T + b as one of several products of an x.
pub(super) fn output<'a>(w: &'a Unit, weight: ParamId, bias: Option<ParamId>, y: &'a mut Tensor) -> Output<'a> {
    Output { w: w.weight(weight), bias: bias.map(|b| w.vector(b)), y }
}

/// y += x W^T + b, where the ranks of `tensor` hold parts of x and of the columns of W: the sum of their products
/// starts from the first rank's residual and bias. Where what y holds `keeps`, it is given back and the sum stands in memory of
/// its own.
pub(super) fn add_linear(
    w: &Unit,
    tensor: &Group,
    x: &Tensor,
    (weight, bias): (ParamId, Option<ParamId>),
    y: &mut Tensor,
    keeps: bool,
) -> Option<Tensor> {
    let (weight, bias) = (w.weight(weight), bias.map(|b| w.vector(b)));
    let before = keeps.then(|| {
        let apart = y.like(y.rows(), y.width());
        std::mem::replace(y, apart)
    });
    match &before {
        _ if tensor.rank() > 0 => matmul::forward(x, weight, None, y, Into::Overwrite),
        Some(before) => matmul::forward_onto(before, x, weight, bias, y),
        None => matmul::forward(x, weight, bias, y, Into::Add),
    }
    tensor.sum_ordered(y);
    before
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
    weight_backward(w, (weight, bias), x, dy, grads);
}

/// dW += dy^T x, db += sum dy
fn weight_backward(
    w: &Unit,
    (weight, bias): (ParamId, Option<ParamId>),
    x: &Tensor,
    dy: &Tensor,
    grads: &mut Gradients,
) {
    matmul::backward_weight(dy, x, grads.weight_mut(weight), w.dtype());
    if let Some(bias) = bias {
        matmul::backward_bias(dy, grads.vector_mut(bias));
    }
}
