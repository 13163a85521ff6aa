//! The gated MLP: y = Wdown (act(Wgate n) * Wup n).

use super::block_spec::DenseSpec;
use super::branch::Body;
use super::context::{Context, LayerKeys};
use super::file_rows::FileRows;
use super::linear::Linear;
use super::params::ParamTable;
use super::part::Cut;
use super::weights::Gradients;
use crate::ops::attention::Packed;
use crate::ops::glu::{self, Activation};
use crate::ops::matmul::Into;
use crate::tensor::Tensor;

#[derive(Clone, Debug)]
pub(super) struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
    activation: Activation,
}

/// The activations that the backward of the MLP needs.
#[derive(Debug)]
pub(super) struct MlpSaved {
    /// The branch's input (t, d)
    n: Tensor,
    inner: Inner,
}

/// The results inside the MLP (t, f).
#[derive(Debug)]
pub(super) struct Inner {
    gate: Tensor,
    up: Tensor,
    /// act(gate) * up
    pub act: Tensor,
}

impl MlpSaved {
    /// The results in the order in which they were computed.
    pub(super) fn results(&self) -> Vec<(&'static str, &Tensor)> {
        vec![
            ("the MLP's norm", &self.n),
            ("the gate", &self.inner.gate),
            ("the up projection", &self.inner.up),
            ("swiglu", &self.inner.act),
        ]
    }
}

impl Mlp {
    /// Declares gate, up and down, named `name.gate_proj` and so on. `width` is that of the hidden state.
    pub(super) fn declare(table: &mut ParamTable, name: &str, width: usize, spec: &DenseSpec) -> Self {
        Self::declare_cut(table, name, (width, Cut::Even(spec.width)), spec)
    }

    /// The same with the cut of the inner width.
    pub(super) fn declare_cut(
        table: &mut ParamTable,
        name: &str,
        (width, inner): (usize, Cut),
        spec: &DenseSpec,
    ) -> Self {
        let hidden = Cut::Whole(width);
        let mut linear = |part: &str, joined: Option<usize>, dims| {
            let (f, tensor) = (spec.width, format!("{name}.gate_up_proj"));
            let file = joined.map(|i| FileRows { first: i * f, ..FileRows::own(&tensor, 2 * f) });
            Linear::declare_in(table, file.as_ref(), &format!("{name}.{part}_proj"), dims, spec.bias)
        };
        let joined = |i| spec.is_joined.then_some(i);
        Self {
            gate: linear("gate", joined(0), [inner, hidden]),
            up: linear("up", joined(1), [inner, hidden]),
            down: linear("down", None, [hidden, inner]),
            activation: spec.activation,
        }
    }

    /// Everything but the last projection, from n (t, d).
    pub(super) fn inner(&self, c: Context, n: &Tensor) -> Inner {
        let [gate, up] = Linear::forward_each(c.w, n, [&self.gate, &self.up]);
        let mut act = gate.like(gate.rows(), gate.width());
        glu::forward(self.activation, &gate, &up, &mut act);
        Inner { gate, up, act }
    }

    /// x += Wdown act, as `Body::add`.
    pub(super) fn add_inner(&self, c: Context, act: &Tensor, x: &mut Tensor, keeps: bool) -> Option<Tensor> {
        self.down.forward_onto(c, act, x, keeps)
    }

    /// The gradient of act (t, f) from dy, and that of Wdown.
    pub(super) fn backward_down(&self, c: Context, act: &Tensor, dy: &Tensor, grads: &mut Gradients) -> Tensor {
        let mut dact = act.like(act.rows(), act.width());
        self.down.backward_onto(c, act, dy, &mut dact, grads);
        dact
    }

    /// This rank's part of dn, written or added, and the gradients of Wgate and Wup.
    pub(super) fn backward_inner(
        &self,
        c: Context,
        n: &Tensor,
        inner: Inner,
        dact: Tensor,
        (dn, into): (&mut Tensor, Into),
        grads: &mut Gradients,
    ) {
        let Inner { gate, up, act } = inner;
        // `act` has served: its memory takes dgate.
        let (mut dgate, mut dup) = (act, gate.like(gate.rows(), gate.width()));
        glu::backward(self.activation, &gate, &up, &dact, &mut dgate, &mut dup);
        drop((gate, up, dact));
        self.gate.backward(c, n, &dgate, dn, into, grads);
        self.up.backward(c, n, &dup, dn, Into::Add, grads);
    }
}

impl Body for Mlp {
    type Saved = MlpSaved;

    fn forward(&self, c: Context, n: Tensor, _: &mut LayerKeys) -> MlpSaved {
        let inner = self.inner(c, &n);
        MlpSaved { n, inner }
    }

    fn add(&self, c: Context, saved: &MlpSaved, x: &mut Tensor, keeps: bool) -> Option<Tensor> {
        self.add_inner(c, &saved.inner.act, x, keeps)
    }

    fn run(&self, c: Context, n: Tensor, _: &mut LayerKeys, x: &mut Tensor, keeps: bool) -> Option<Tensor> {
        let act = Linear::glu(c.w, &n, [&self.gate, &self.up], self.activation);
        drop(n);
        self.down.forward_onto(c, &act, x, keeps)
    }

    fn backward(&self, c: Context, _: &Packed, saved: MlpSaved, dy: &Tensor, grads: &mut Gradients) -> Tensor {
        let MlpSaved { n, inner } = saved;
        let dact = self.backward_down(c, &inner.act, dy, grads);
        let mut dn = n.like(n.rows(), n.width());
        self.backward_inner(c, &n, inner, dact, (&mut dn, Into::Overwrite), grads);
        c.tensor.sum_slice(dn.slice_mut());
        dn
    }
}
