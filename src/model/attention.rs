//! Attention: y = Wo attend(rope(norm(Wq n)), rope(norm(Wk n)), Wv n).
//!
//! Dims: t tokens, d width, h query heads, g key/value heads, e head dim.

use super::arch::Arch;
use super::linear::Linear;
use super::norm::Norm;
use super::params::ParamTable;
use super::part::TensorPart;
use super::ring::Ring;
use super::weights::{Gradients, Unit};
use crate::comm::Group;
use crate::ops::attention::{self, AttentionShape, KvLayer, Packed, Paged};
use crate::ops::columns;
use crate::ops::matmul::Into;
use crate::ops::rope::{self, RopeTable};
use crate::tensor::{Indices, Tensor};

/// The source of one layer's keys.
pub(super) enum LayerKeys<'a> {
    Packed(&'a Packed<'a>),
    Paged(&'a mut KvLayer, &'a Paged<'a>),
}

/// The inputs that all calls of one forward share.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    pub w: &'a Unit<'a>,
    pub positions: &'a Indices<'a>,
    pub rope: &'a RopeTable,
}

/// One layer's attention: parameters, shape, and the groups of ranks that share its heads and its sequences.
#[derive(Clone, Debug)]
pub(super) struct Attention {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    q_norm: Option<Norm>,
    k_norm: Option<Norm>,
    /// The heads that this rank holds.
    pub(super) shape: AttentionShape,
    copies: KvCopies,
    tensor: Group,
    ring: Ring,
}

/// The activations that the backward of attention needs.
#[derive(Debug)]
pub(super) struct AttentionSaved {
    /// The branch's input (t, d)
    n: Tensor,
    /// Projections before their norm, if the model has qk-norm.
    q_raw: Option<Raw>,
    k_raw: Option<Raw>,
    /// Inputs of attention, normed and rotated: (t, h*e), (t, g*e)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
}

impl AttentionSaved {
    /// The results in the order in which they were computed.
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
    pub(super) fn new(arch: &Arch, table: &ParamTable, layer: usize, name: &str, tensor: &Group, ring: &Ring) -> Self {
        let part = TensorPart::from_group(tensor);
        let copies = KvCopies::new(arch, part);
        let shape = AttentionShape {
            heads: part.heads(arch).len(),
            kv_heads: copies.held.len(),
            head_dim: arch.head_dim,
            window: arch.windows[layer],
            scale: 1.0 / (arch.head_dim as f32).sqrt(),
        };
        let linear = |part| Linear::new(table, &format!("{name}.{part}_proj"), tensor);
        let norm = |part, heads| Norm::find(table, &format!("{name}.{part}_norm"), arch.norm_eps, heads, tensor);
        Self {
            q: linear("q"),
            k: linear("k"),
            v: linear("v"),
            o: linear("o"),
            q_norm: norm("q", shape.heads),
            k_norm: norm("k", shape.kv_heads),
            shape,
            copies,
            tensor: tensor.clone(),
            ring: ring.clone(),
        }
    }

    /// Attention without the output projection, which `add` computes.
    pub(super) fn forward(&self, c: Context, n: Tensor, keys: LayerKeys) -> AttentionSaved {
        let (shape, t) = (&self.shape, n.rows());
        let [q, k, mut v] = Linear::forward_each(c.w, &n, [&self.q, &self.k, &self.v]);
        let (mut q, q_raw) = normed(c.w, q, self.q_norm.as_ref());
        let (mut k, k_raw) = normed(c.w, k, self.k_norm.as_ref());
        let (o, lse) = match keys {
            LayerKeys::Packed(packed) => {
                rope::forward(&mut q, &mut k, c.positions, c.rope);
                attention::round_as_cached(&mut k, c.w.dtype());
                attention::round_as_cached(&mut v, c.w.dtype());
                self.ring.forward(packed, shape, [&q, &k, &v])
            }
            LayerKeys::Paged(cache, paged) => {
                let mut o = q.like(t, q.width());
                attention::kv_append(cache, [&mut q, &mut k], &v, (c.positions, c.rope), paged, shape);
                attention::forward_paged(&q, cache, paged, shape, &mut o);
                // Only packed keys have a backward, which asks for k and lse.
                (o, q.statistics(0, shape.heads))
            }
        };
        AttentionSaved { n, q_raw, k_raw, q, k, v, o, lse }
    }

    /// x += y. With `keeps`, returns the previous value of x.
    pub(super) fn add(&self, c: Context, saved: &AttentionSaved, x: &mut Tensor, keeps: bool) -> Option<Tensor> {
        self.o.forward_onto(c.w, &saved.o, x, keeps)
    }

    /// dn from dy.
    pub(super) fn backward(
        &self,
        c: Context,
        packed: &Packed,
        saved: AttentionSaved,
        dy: &Tensor,
        grads: &mut Gradients,
    ) -> Tensor {
        let AttentionSaved { n, q_raw, k_raw, q, k, v, o, lse } = saved;
        let mut d_o = o.like(o.rows(), o.width());
        self.o.backward(c.w, &o, dy, &mut d_o, Into::Overwrite, grads);
        let [mut dq, mut dk, mut dv] = self.ring.backward(packed, &self.shape, [&q, &k, &v], [&o, &lse, &d_o]);
        drop((q, k, v, o, d_o));
        rope::backward(&mut dq, &mut dk, c.positions, c.rope);
        let dq = unnorm(c.w, self.q_norm.as_ref(), q_raw, dq, grads);
        let mut dk = unnorm(c.w, self.k_norm.as_ref(), k_raw, dk, grads);
        let mut dn = n.like(n.rows(), n.width());
        self.q.backward(c.w, &n, &dq, &mut dn, Into::Overwrite, grads);
        self.k.backward_input(c.w, &dk, &mut dn, Into::Add);
        self.v.backward_input(c.w, &dv, &mut dn, Into::Add);
        self.copies.sum(&self.tensor, [&mut dk, &mut dv]);
        self.k.backward_weight(c.w, &n, &dk, grads);
        self.v.backward_weight(c.w, &n, &dv, grads);
        self.tensor.sum_slice(dn.slice_mut());
        dn
    }
}

/// A projection, normed per head if the model has qk-norm (the input of the norm is kept then).
fn normed(w: &Unit, x: Tensor, norm: Option<&Norm>) -> (Tensor, Option<Raw>) {
    let Some(norm) = norm else { return (x, None) };
    let (y, rstd) = norm.forward(w, &x);
    (y, Some(Raw { x, rstd }))
}

/// The backward of a qk-norm, or dy itself without one.
fn unnorm(w: &Unit, norm: Option<&Norm>, raw: Option<Raw>, dy: Tensor, grads: &mut Gradients) -> Tensor {
    let (Some(norm), Some(Raw { x, rstd })) = (norm, raw) else { return dy };
    let mut dx = x.zeros_like(x.rows(), x.width());
    norm.backward(w, &x, &rstd, &dy, &mut dx, grads);
    dx
}

/// The key/value heads that this rank holds. Some may be copies of another rank's.
#[derive(Clone, Debug)]
struct KvCopies {
    /// The global head of each local head.
    held: Vec<usize>,
    heads: usize,
    head_dim: usize,
    /// The number of copies of each head over all ranks.
    copies: usize,
}

impl KvCopies {
    fn new(arch: &Arch, part: TensorPart) -> Self {
        let (held, copies) = (part.kv_heads(arch), part.kv_copies(arch));
        Self { held, heads: arch.kv_heads, head_dim: arch.head_dim, copies }
    }

    /// Sums the gradients over all copies of a head, so that the weights of all copies get the same update. Each copy
    /// serves different query heads. The sum is in f32, this rank's copies first.
    fn sum(&self, tensor: &Group, gradients: [&mut Tensor; 2]) {
        let rows = gradients[0].rows();
        if self.copies == 1 || rows == 0 {
            return;
        }
        let mut all = gradients[0].statistics(rows, 2 * self.heads * self.head_dim);
        let of = |(i, gradient)| {
            let gradient: &Tensor = gradient;
            self.places(i).map(move |(own, at)| (gradient, own, at))
        };
        let parts: Vec<_> = gradients.iter().map(|gradient| &**gradient).enumerate().flat_map(of).collect();
        columns::sum(&parts, &mut all, self.head_dim);
        tensor.sum_slice(all.slice_mut());
        for (i, gradient) in gradients.into_iter().enumerate() {
            self.places(i).for_each(|(own, at)| columns::copy(&all, at, gradient, own, self.head_dim));
        }
    }

    /// The first column of each local head: on this rank, and in gradient `i` among the columns of all heads.
    fn places(&self, i: usize) -> impl Iterator<Item = (usize, usize)> {
        let e = self.head_dim;
        self.held.iter().enumerate().map(move |(local, head)| (local * e, (i * self.heads + head) * e))
    }
}
