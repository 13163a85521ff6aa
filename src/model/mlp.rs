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
    /// (t, f)
    gate: Tensor,
    up: Tensor,
    /// act(gate) * up (t, f)
    act: Tensor,
}

impl MlpSaved {
    /// The results in the order in which they were computed.
    pub(super) fn results(&self) -> Vec<(&'static str, &Tensor)> {
        vec![
            ("the MLP's norm", &self.n),
            ("the gate", &self.gate),
            ("the up projection", &self.up),
            ("swiglu", &self.act),
        ]
    }
}

impl Mlp {
    /// Declares gate, up and down, named `name.gate_proj` and so on. `width` is that of the hidden state.
    pub(super) fn declare(table: &mut ParamTable, name: &str, width: usize, spec: &DenseSpec) -> Self {
        let (hidden, inner) = (Cut::Whole(width), Cut::Even(spec.width));
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
}

impl Body for Mlp {
    type Saved = MlpSaved;

    fn forward(&self, c: Context, n: Tensor, _: &mut LayerKeys) -> MlpSaved {
        let [gate, up] = Linear::forward_each(c.w, &n, [&self.gate, &self.up]);
        let mut act = gate.like(gate.rows(), gate.width());
        glu::forward(self.activation, &gate, &up, &mut act);
        MlpSaved { n, gate, up, act }
    }

    fn add(&self, c: Context, saved: &MlpSaved, x: &mut Tensor, keeps: bool) -> Option<Tensor> {
        self.down.forward_onto(c, &saved.act, x, keeps)
    }

    fn run(&self, c: Context, n: Tensor, _: &mut LayerKeys, x: &mut Tensor, keeps: bool) -> Option<Tensor> {
        let act = Linear::glu(c.w, &n, [&self.gate, &self.up], self.activation);
        drop(n);
        self.down.forward_onto(c, &act, x, keeps)
    }

    fn backward(&self, c: Context, _: &Packed, saved: MlpSaved, dy: &Tensor, grads: &mut Gradients) -> Tensor {
        let MlpSaved { n, gate, up, act } = saved;
        let (t, f) = (gate.rows(), gate.width());
        let mut dact = gate.like(t, f);
        self.down.backward_onto(c, &act, dy, &mut dact, grads);
        // `act` has served: its memory takes dgate.
        let (mut dgate, mut dup) = (act, gate.like(t, f));
        glu::backward(self.activation, &gate, &up, &dact, &mut dgate, &mut dup);
        drop((gate, up, dact));
        let mut dn = n.like(t, n.width());
        self.gate.backward(c, &n, &dgate, &mut dn, Into::Overwrite, grads);
        self.up.backward(c, &n, &dup, &mut dn, Into::Add, grads);
        c.tensor.sum_slice(dn.slice_mut());
        dn
    }
}
