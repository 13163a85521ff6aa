//! Latent attention (arXiv:2412.19437, section 2.1.1): keys and values of all heads are one compressed vector c of each
//! token, and one rotated key r. With q = [q_n | q_r] for each head, k = [Wk c | r] and v = Wv c:
//!
//! q . k = (q_n Wk) . c + q_r . r, and sum p v = Wv (sum p c)
//!
//! So attention sees query heads [q_n Wk | q_r], and one key head [c | r] whose values are the same vectors. Training and
//! sampling use this form, and a cache keeps c and r only.
//!
//! Dims: t tokens, d width, h query heads of this rank, n and r the columns of q_n and q_r, k those of c, e = k + r, f those
//! of a head of values. `ops::rope` turns the first r/2 columns of each half of a head, so a head of e columns is
//! [r's first half | c's first half | r's second half | c's second half].

use super::arch::Arch;
use super::block_spec::{AttentionSpec, LatentSpec, NormSpec};
use super::branch::Body;
use super::context::{Context, LayerKeys};
use super::file_rows::{FileRows, HeadRows};
use super::head_linear::HeadLinear;
use super::linear::Linear;
use super::norm::Norm;
use super::params::ParamTable;
use super::part::Cut;
use super::weights::Gradients;
use crate::ops::attention::{self, AttentionShape, Packed};
use crate::ops::experts::Groups;
use crate::ops::matmul::Into;
use crate::ops::{columns, residual, rope, rows};
use crate::tensor::{Indices, Tensor};

/// The norms of compressed vectors have this eps, whatever that of the model.
const EPS: f32 = 1e-6;

#[derive(Clone, Debug)]
pub(super) struct Latent {
    queries: Queries,
    /// The projection to [c | r], before the norm of c.
    kv: Linear,
    kv_norm: Norm,
    /// Wk and Wv.
    keys: HeadLinear,
    values: HeadLinear,
    o: Linear,
    spec: LatentSpec,
    /// The index of the rotary table.
    rope: usize,
    /// The heads that this rank holds.
    pub(super) shape: AttentionShape,
}

/// The projection to queries.
#[derive(Clone, Debug)]
enum Queries {
    Plain(Linear),
    /// Compressed, normed, and expanded.
    Compressed {
        a: Linear,
        norm: Norm,
        b: Linear,
    },
}

/// A vector before and after its norm, and 1 / rms.
#[derive(Debug)]
struct Normed {
    x: Tensor,
    y: Tensor,
    rstd: Tensor,
}

/// The activations that the backward of attention needs.
#[derive(Debug)]
pub(super) struct LatentSaved {
    /// The branch's input (t, d)
    input: Tensor,
    compressed: Option<Normed>,
    /// q_n of all heads, sorted by head (h*t, n)
    plain: Tensor,
    /// c before its norm (t, k), and 1 / rms
    c_raw: Tensor,
    c_rstd: Tensor,
    /// Inputs and results of attention: (t, h*e), (t, e), (t, h*e), (t, h)
    q: Tensor,
    k: Tensor,
    o: Tensor,
    lse: Tensor,
    /// sum p c, sorted by head (h*t, k)
    mixed: Tensor,
    /// The input of the last projection (t, h*f)
    y: Tensor,
}

impl LatentSaved {
    /// The results in the order in which they were computed.
    pub(super) fn results(&self) -> Vec<(&'static str, &Tensor)> {
        let [n, q, k, o] = [&self.input, &self.q, &self.k, &self.o];
        vec![("attention's norm", n), ("queries", q), ("compressed keys", k), ("attention", o), ("values", &self.y)]
    }
}

impl Latent {
    /// Declares the parameters in `name`.
    pub(super) fn declare(
        table: &mut ParamTable,
        name: &str,
        arch: &Arch,
        spec: &AttentionSpec,
        latent: &LatentSpec,
    ) -> Self {
        let (shape, hidden) = (spec.shape(table.tensor_part()), Cut::Whole(arch.width));
        let LatentSpec { q_rank, kv_rank, plain, rotated, value, is_interleaved } = *latent;
        let name = |part: &str| format!("{name}.{part}");
        let norm_spec = NormSpec { eps: EPS, offset: 0.0 };
        // Rotated columns come after the others.
        let order = |tensor: &str, skipped: usize, rows: usize| {
            let heads = HeadRows::new(rotated, rotated, is_interleaved).map(|heads| HeadRows { skipped, ..heads });
            heads.map(|_| FileRows { heads, ..FileRows::own(tensor, rows) })
        };
        let expanded = |table: &mut ParamTable, part: &str, inputs: usize| {
            let (cut, name) = (heads(spec, latent.query()), name(part));
            let file = order(&name, plain, cut.size());
            Linear::declare_in(table, file.as_ref(), &name, [cut, Cut::Whole(inputs)], false)
        };
        let queries = match q_rank {
            None => Queries::Plain(expanded(table, "q_proj", arch.width)),
            Some(rank) => Queries::Compressed {
                a: Linear::declare(table, &name("q_a_proj"), [Cut::Whole(rank), hidden], spec.qkv_bias),
                norm: Norm::declare(table, &name("q_a_layernorm"), rank, norm_spec),
                b: expanded(table, "q_b_proj", rank),
            },
        };
        let (kv_name, rows) = (name("kv_a_proj_with_mqa"), kv_rank + rotated);
        let file = order(&kv_name, kv_rank, rows);
        let kv = Linear::declare_in(table, file.as_ref(), &kv_name, [Cut::Whole(rows), hidden], spec.qkv_bias);
        let kv_norm = Norm::declare(table, &name("kv_a_layernorm"), kv_rank, norm_spec);
        let (sizes, parts) = ((spec.heads, kv_rank), [("key", plain), ("value", value)]);
        let [keys, values] = HeadLinear::declare_joined(table, &name("kv_b_proj"), sizes, parts);
        let o = Linear::declare(table, &name("o_proj"), [hidden, heads(spec, value)], spec.o_bias);
        Self { queries, kv, kv_norm, keys, values, o, spec: *latent, rope: spec.rope, shape }
    }

    /// The rows of each head.
    fn groups(&self, tokens: usize) -> Groups {
        Groups::new(vec![tokens; self.shape.heads])
    }

    /// Rows of heads (h*t, w), sorted by head, from rows of tokens (t, h*w).
    fn by_head(&self, x: &Tensor) -> Tensor {
        let (h, t, width) = (self.shape.heads, x.rows(), x.width() / self.shape.heads);
        let order: Vec<u32> = (0..h).flat_map(|head| (0..t).map(move |row| (row * h + head) as u32)).collect();
        gathered(x, width, &order)
    }

    /// The reverse of `by_head`.
    fn by_token(&self, x: &Tensor) -> Tensor {
        let (h, t) = (self.shape.heads, x.rows() / self.shape.heads);
        let order: Vec<u32> = (0..t).flat_map(|row| (0..h).map(move |head| (head * t + row) as u32)).collect();
        gathered(x, x.width(), &order).in_rows_of(h * x.width())
    }

    /// A head of attention from c and r, or q_n Wk and q_r, which begins at column `at`.
    fn head(&self, c: &Tensor, r: &Tensor, at: usize) -> Tensor {
        let (k, r_half) = (self.spec.kv_rank / 2, self.spec.rotated / 2);
        joined(&[(r, at, r_half), (c, 0, k), (r, at + r_half, r_half), (c, k, k)])
    }

    /// c of a head of attention.
    fn c_of(&self, head: &Tensor) -> Tensor {
        let (k, r_half) = (self.spec.kv_rank / 2, self.spec.rotated / 2);
        joined(&[(head, r_half, k), (head, 2 * r_half + k, k)])
    }

    /// [before | r of a head of attention]
    fn with_r_of(&self, before: &Tensor, head: &Tensor) -> Tensor {
        let (k, r_half) = (self.spec.kv_rank / 2, self.spec.rotated / 2);
        joined(&[(before, 0, before.width()), (head, 0, r_half), (head, r_half + k, r_half)])
    }

    /// Queries before compression and rotation (t, h*(n + r)) and [c | r] before the norm of c.
    fn project(&self, c: Context, input: &Tensor) -> (Tensor, Option<Normed>, Tensor) {
        match &self.queries {
            Queries::Plain(q) => {
                let [q, kv] = Linear::forward_each(c.w, input, [q, &self.kv]);
                (q, None, kv)
            }
            Queries::Compressed { a, norm, b } => {
                let [x, kv] = Linear::forward_each(c.w, input, [a, &self.kv]);
                let (y, rstd) = norm.forward(c.w, &x);
                let [q] = Linear::forward_each(c.w, &y, [b]);
                (q, Some(Normed { x, y, rstd }), kv)
            }
        }
    }

    /// dn from the gradients of queries and of [c | r] before the norm of c.
    fn backward_projections(
        &self,
        c: Context,
        (input, compressed): (&Tensor, Option<Normed>),
        [dq, dkv]: [&Tensor; 2],
        grads: &mut Gradients,
    ) -> Tensor {
        let mut dn = input.like(input.rows(), input.width());
        match (&self.queries, compressed) {
            (Queries::Plain(q), _) => {
                q.backward(c, input, dq, &mut dn, Into::Overwrite, grads);
                c.tensor.sum_slice(dn.slice_mut());
            }
            (Queries::Compressed { a, norm, b }, Some(Normed { x, y, rstd })) => {
                let mut dy = y.like(y.rows(), y.width());
                b.backward(c, &y, dq, &mut dy, Into::Overwrite, grads);
                c.tensor.sum_slice(dy.slice_mut());
                let mut dx = x.zeros_like(x.rows(), x.width());
                norm.backward(c, &x, &rstd, &dy, &mut dx, grads);
                a.backward(c, input, &dx, &mut dn, Into::Overwrite, grads);
            }
            (Queries::Compressed { .. }, None) => unreachable!("compressed queries are kept"),
        }
        self.kv.backward(c, input, dkv, &mut dn, Into::Add, grads);
        dn
    }
}

impl Body for Latent {
    type Saved = LatentSaved;

    fn forward(&self, c: Context, input: Tensor, keys: &mut LayerKeys) -> LatentSaved {
        let (t, shape, groups) = (input.rows(), &self.shape, self.groups(input.rows()));
        let LatentSpec { kv_rank, plain, .. } = self.spec;
        let (q, compressed, kv) = self.project(c, &input);
        let by_head = self.by_head(&q);
        let plain = joined(&[(&by_head, 0, plain)]);
        let absorbed = self.keys.transposed(c.w, &groups, &plain);
        let mut q = self.by_token(&self.head(&absorbed, &by_head, self.spec.plain));
        let c_raw = joined(&[(&kv, 0, kv_rank)]);
        let (normed, c_rstd) = self.kv_norm.forward(c.w, &c_raw);
        let mut k = self.head(&normed, &kv, kv_rank);
        let (o, lse) = match keys {
            LayerKeys::Packed(packed) => {
                rope::forward(&mut q, &mut k, c.positions, &c.ropes[self.rope]);
                attention::round_as_cached(&mut k, c.w.dtype(), shape);
                c.ring.forward(packed, shape, [&q, &k, &k])
            }
            LayerKeys::Paged(cache, paged) => {
                let mut o = q.like(t, q.width());
                attention::kv_append(cache, [&mut q, &mut k], None, (c.positions, &c.ropes[self.rope]), paged, shape);
                attention::forward_paged(&q, cache, paged, shape, &mut o, None);
                // Only packed keys have a backward, which asks for lse.
                (o, q.statistics(0, shape.heads))
            }
            LayerKeys::State(..) => unreachable!("attention has a cache of keys"),
        };
        let mixed = self.c_of(&self.by_head(&o));
        let y = self.by_token(&self.values.forward(c.w, &groups, &mixed));
        LatentSaved { input, compressed, plain, c_raw, c_rstd, q, k, o, lse, mixed, y }
    }

    fn add(&self, c: Context, saved: &LatentSaved, x: &mut Tensor, keeps: bool) -> Option<Tensor> {
        self.o.forward_onto(c, &saved.y, x, keeps)
    }

    fn backward(&self, c: Context, packed: &Packed, saved: LatentSaved, dy: &Tensor, grads: &mut Gradients) -> Tensor {
        let LatentSaved { input, compressed, plain, c_raw, c_rstd, q, k, o, lse, mixed, y } = saved;
        let groups = self.groups(input.rows());
        let mut d_y = y.like(y.rows(), y.width());
        self.o.backward_onto(c, &y, dy, &mut d_y, grads);
        let d_y = self.by_head(&d_y);
        self.values.backward_weights(c, &groups, &mixed, &d_y, grads);
        let d_mixed = self.values.transposed(c.w, &groups, &d_y);
        let none = d_mixed.zeros_like(d_mixed.rows(), self.spec.rotated);
        let d_o = self.by_token(&self.head(&d_mixed, &none, 0));
        let [mut dq, mut dk, dv] = c.ring.backward(packed, &self.shape, [&q, &k, &k], [&o, &lse, &d_o]);
        drop((q, k, o, d_o));
        rope::backward(&mut dq, &mut dk, c.positions, &c.ropes[self.rope]);
        // Values have no rotated columns: those of their gradient are 0.
        residual::add(1.0, &dv, &mut dk);
        c.tensor.sum_slice(dk.slice_mut());
        let dq = self.by_head(&dq);
        let d_absorbed = self.c_of(&dq);
        self.keys.backward_weights(c, &groups, &d_absorbed, &plain, grads);
        let d_plain = self.keys.forward(c.w, &groups, &d_absorbed);
        let dq = self.by_token(&self.with_r_of(&d_plain, &dq));
        let mut dc = c_raw.zeros_like(c_raw.rows(), c_raw.width());
        self.kv_norm.backward(c, &c_raw, &c_rstd, &self.c_of(&dk), &mut dc, grads);
        let dkv = self.with_r_of(&dc, &dk);
        self.backward_projections(c, (&input, compressed), [&dq, &dkv], grads)
    }
}

/// The cut of heads of `columns`.
fn heads(spec: &AttentionSpec, columns: usize) -> Cut {
    Cut::Heads { queries: spec.heads, group: 1, head_dim: columns }
}

/// Runs of columns (x, from, width), side by side.
fn joined(parts: &[(&Tensor, usize, usize)]) -> Tensor {
    let (first, width) = (parts[0].0, parts.iter().map(|(.., width)| width).sum());
    let mut all = first.like(first.rows(), width);
    let mut at = 0;
    for (x, from, width) in parts {
        columns::copy(x, *from, &mut all, at, *width);
        at += width;
    }
    all
}

/// The runs of `width` values of x in another order.
fn gathered(x: &Tensor, width: usize, order: &[u32]) -> Tensor {
    let mut y = x.like(order.len(), width);
    rows::gather_runs(x, width, &Indices::from(order), &mut y);
    y
}
