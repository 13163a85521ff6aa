//! Attention: y = Wo (attend(rope(norm(Wq n)), rope(norm(Wk n)), Wv n) sigmoid(g)), where g is the gate of each query head
//! or absent. A softmax may have sinks (`ops::sinks`).
//!
//! Dims: t tokens, d width, h query heads, g key/value heads, e head dim.

use super::arch::Arch;
use super::block_spec::{AttentionSpec, Sinks};
use super::branch::Body;
use super::context::{Context, LayerKeys};
use super::file_rows::{FileRows, HeadRows};
use super::head_norm::HeadNorm;
use super::kv_copies::KvCopies;
use super::linear::Linear;
use super::params::{ParamId, ParamTable};
use super::part::{Cut, TensorPart};
use super::weights::Gradients;
use crate::ops::attention::{self, AttentionShape, Packed};
use crate::ops::columns;
use crate::ops::glu::{self, Activation};
use crate::ops::matmul::Into;
use crate::ops::rope;
use crate::ops::sinks;
use crate::tensor::{Layout, Tensor};

/// One layer's attention: parameters and shape.
#[derive(Clone, Debug)]
pub(super) struct Attention {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    q_norm: Option<HeadNorm>,
    k_norm: Option<HeadNorm>,
    /// Whether each head of q has a gate after it.
    has_gate: bool,
    /// A logit for each query head.
    sinks: Option<ParamId>,
    /// The index of the rotary table.
    rope: usize,
    /// The heads that this rank holds.
    pub(super) shape: AttentionShape,
    copies: KvCopies,
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
    /// The gate, and the gated result (t, h*e)
    gated: Option<[Tensor; 2]>,
}

impl AttentionSaved {
    /// The results in the order in which they were computed.
    pub(super) fn results(&self) -> [(&'static str, &Tensor); 5] {
        let [n, q, k, v, o] = [&self.n, &self.q, &self.k, &self.v, &self.o];
        [("attention's norm", n), ("queries", q), ("keys", k), ("values", v), ("attention", o)]
    }
}

/// The input of a qk-norm and 1 / rms of what it norms.
#[derive(Debug)]
struct Raw {
    x: Tensor,
    rstd: Tensor,
}

impl Attention {
    /// Declares q, k and v, their norms, and o, named `name.q_proj` and so on.
    pub(super) fn declare(table: &mut ParamTable, name: &str, arch: &Arch, spec: &AttentionSpec) -> Self {
        let (part, hidden) = (table.tensor_part(), Cut::Whole(arch.width));
        let shape = spec.shape(part);
        let joined = [spec.queries(), spec.keys(), spec.keys()].map(Cut::size);
        let queries = if spec.has_gate { spec.gated_queries() } else { spec.queries() };
        let mut linear = |i: usize, part: &str, outputs: Cut| {
            let name_of = |part: &str| format!("{name}.{part}_proj");
            // Values are not rotated.
            let heads = arch.head_rows(spec).filter(|_| part != "v");
            let heads = heads.map(|heads| HeadRows { has_gate: spec.has_gate && part == "q", ..heads });
            let file = if arch.family.files.joins_qkv {
                let (first, of) = (joined[..i].iter().sum(), joined.iter().sum());
                Some(FileRows { first, heads, ..FileRows::own(&name_of("qkv"), of) })
            } else {
                heads.map(|_| FileRows { heads, ..FileRows::own(&name_of(part), outputs.size()) })
            };
            Linear::declare_in(table, file.as_ref(), &name_of(part), [outputs, hidden], spec.qkv_bias)
        };
        let (q, k, v) = (linear(0, "q", queries), linear(1, "k", spec.keys()), linear(2, "v", spec.keys()));
        let rows = arch.head_rows(spec);
        let mut norm =
            |part: &str, cut| HeadNorm::declare(table, &format!("{name}.{part}_norm"), spec, cut, (arch.norm, rows));
        let (q_norm, k_norm) = (norm("q", spec.queries()), norm("k", spec.keys()));
        let o = Linear::declare(table, &format!("{name}.o_proj"), [hidden, spec.queries()], spec.o_bias);
        let has_gate = spec.has_gate;
        let normal = table.normal();
        let sinks = match spec.sinks {
            Sinks::None => None,
            Sinks::PerHead => Some(table.add(&format!("{name}.sinks"), &[spec.per_head()], Layout::Row, normal)),
        };
        Self { q, k, v, o, q_norm, k_norm, has_gate, sinks, rope: spec.rope, shape, copies: KvCopies::new(spec, part) }
    }
}

impl Attention {
    /// Declares the attention of a tower, whole on each rank: q, k and v are parts of `name.qkv`, and o is `name.proj`.
    pub(super) fn declare_whole(table: &mut ParamTable, name: &str, width: usize, heads: usize) -> Self {
        let (spec, whole) = (AttentionSpec::of_tower(width, heads), TensorPart::whole());
        let names = ["q", "k", "v"].map(|part| format!("{name}.{part}"));
        let names = names.each_ref().map(String::as_str);
        let [q, k, v] = Linear::declare_joined(table, &format!("{name}.qkv"), names, [width; 2]);
        let o = Linear::declare(table, &format!("{name}.proj"), [Cut::Whole(width); 2], true);
        let (shape, copies) = (spec.shape(whole), KvCopies::new(&spec, whole));
        Self { q, k, v, o, q_norm: None, k_norm: None, has_gate: false, sinks: None, rope: 0, shape, copies }
    }
}

impl Body for Attention {
    type Saved = AttentionSaved;

    fn forward(&self, c: Context, n: Tensor, keys: &mut LayerKeys) -> AttentionSaved {
        let (shape, t, rope_table) = (&self.shape, n.rows(), &c.ropes[self.rope]);
        let [q, k, mut v] = Linear::forward_each(c.w, &n, [&self.q, &self.k, &self.v]);
        let (q, gate) = if self.has_gate {
            // Heads of q and their gates.
            let [q, gate] = columns::split(&q, shape.head_dim);
            (q, Some(gate))
        } else {
            (q, None)
        };
        let (mut q, q_raw) = normed(c, q, self.q_norm.as_ref());
        let (mut k, k_raw) = normed(c, k, self.k_norm.as_ref());
        let (mut o, mut lse) = match keys {
            LayerKeys::Packed(packed) => {
                rope::forward(&mut q, &mut k, c.positions, rope_table);
                attention::round_as_cached(&mut k, c.w.dtype(), shape);
                attention::round_as_cached(&mut v, c.w.dtype(), shape);
                c.ring.forward(packed, shape, [&q, &k, &v])
            }
            LayerKeys::Paged(cache, paged) => {
                let mut o = q.like(t, q.width());
                attention::kv_append(cache, [&mut q, &mut k], Some(&v), (c.positions, rope_table), paged, shape);
                // Only packed keys have a backward, which asks for k and lse. Sinks ask for lse.
                let mut lse = q.statistics(if self.sinks.is_some() { t } else { 0 }, shape.heads);
                attention::forward_paged(&q, cache, paged, shape, &mut o, self.sinks.map(|_| &mut lse));
                (o, lse)
            }
            LayerKeys::State(..) => unreachable!("attention has a cache of keys"),
        };
        if let Some(id) = self.sinks {
            sinks::forward(&mut o, &mut lse, c.w.vector(id).f32());
        }
        let gated = gate.map(|gate| {
            let mut y = o.like(t, o.width());
            glu::forward(Activation::Sigmoid, &gate, &o, &mut y);
            [gate, y]
        });
        AttentionSaved { n, q_raw, k_raw, q, k, v, o, lse, gated }
    }

    fn add(&self, c: Context, saved: &AttentionSaved, x: &mut Tensor, keeps: bool) -> Option<Tensor> {
        let o = saved.gated.as_ref().map_or(&saved.o, |[_, y]| y);
        self.o.forward_onto(c, o, x, keeps)
    }

    fn backward(
        &self,
        c: Context,
        packed: &Packed,
        saved: AttentionSaved,
        dy: &Tensor,
        grads: &mut Gradients,
    ) -> Tensor {
        let AttentionSaved { n, q_raw, k_raw, q, k, v, o, lse, gated } = saved;
        let mut d_o = o.like(o.rows(), o.width());
        self.o.backward_onto(c, gated.as_ref().map_or(&o, |[_, y]| y), dy, &mut d_o, grads);
        let d_gate = gated.map(|[gate, y]| {
            let (mut d_gate, d_y) = (y, std::mem::replace(&mut d_o, o.like(o.rows(), o.width())));
            glu::backward(Activation::Sigmoid, &gate, &o, &d_y, &mut d_gate, &mut d_o);
            d_gate
        });
        if let Some(id) = self.sinks.filter(|id| !id.is_frozen) {
            let mut slopes = vec![0.0; self.shape.heads];
            sinks::backward([&o, &lse, &d_o], c.w.vector(id).f32(), &mut slopes);
            grads.add_vector(id, &slopes);
        }
        let [mut dq, mut dk, mut dv] = c.ring.backward(packed, &self.shape, [&q, &k, &v], [&o, &lse, &d_o]);
        drop((q, k, v, o, d_o));
        rope::backward(&mut dq, &mut dk, c.positions, &c.ropes[self.rope]);
        let dq = unnorm(c, self.q_norm.as_ref(), q_raw, dq, grads);
        let dq = if let Some(d_gate) = d_gate { columns::join([&dq, &d_gate], self.shape.head_dim) } else { dq };
        let mut dk = unnorm(c, self.k_norm.as_ref(), k_raw, dk, grads);
        let mut dn = n.like(n.rows(), n.width());
        self.q.backward(c, &n, &dq, &mut dn, Into::Overwrite, grads);
        let dk_inner = self.k.backward_input(c, &dk, &mut dn, Into::Add);
        let dv_inner = self.v.backward_input(c, &dv, &mut dn, Into::Add);
        self.copies.sum(c.tensor, [&mut dk, &mut dv]);
        self.k.backward_weight(c.w, &n, &dk, dk_inner, grads);
        self.v.backward_weight(c.w, &n, &dv, dv_inner, grads);
        c.tensor.sum_slice(dn.slice_mut());
        dn
    }
}

/// A projection, normed if the model has qk-norm (the input of the norm is kept then).
fn normed(c: Context, x: Tensor, norm: Option<&HeadNorm>) -> (Tensor, Option<Raw>) {
    let Some(norm) = norm else { return (x, None) };
    let (y, rstd) = norm.forward(c, &x);
    (y, Some(Raw { x, rstd }))
}

/// The backward of a qk-norm, or dy itself without one.
fn unnorm(c: Context, norm: Option<&HeadNorm>, raw: Option<Raw>, dy: Tensor, grads: &mut Gradients) -> Tensor {
    let (Some(norm), Some(Raw { x, rstd })) = (norm, raw) else { return dy };
    norm.backward(c, &x, &rstd, &dy, grads)
}
