//! The gated MLP: y = Wdown (silu(Wgate n) * Wup n).

use super::attention::Context;
use super::linear::Linear;
use super::params::ParamTable;
use super::weights::Gradients;
use crate::comm::Group;
use crate::ops::glu::{self, Activation};
use crate::ops::matmul::Into;
use crate::tensor::Tensor;

/// One layer's MLP, and the ranks that share its width.
#[derive(Clone, Debug)]
pub(super) struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
    tensor: Group,
}

/// The activations that the backward of the MLP needs.
#[derive(Debug)]
pub(super) struct MlpSaved {
    /// The branch's input (t, d)
    n: Tensor,
    /// (t, f)
    gate: Tensor,
    up: Tensor,
    /// silu(gate) * up (t, f)
    pub(super) act: Tensor,
}

impl MlpSaved {
    /// The results in the order in which they were computed.
    pub(super) fn results(&self) -> [(&'static str, &Tensor); 4] {
        [("the MLP's norm", &self.n), ("the gate", &self.gate), ("the up projection", &self.up), ("swiglu", &self.act)]
    }
}

impl Mlp {
    pub(super) fn new(table: &ParamTable, name: &str, tensor: &Group) -> Self {
        let linear = |part| Linear::new(table, &format!("{name}.{part}_proj"), tensor);
        Self { gate: linear("gate"), up: linear("up"), down: linear("down"), tensor: tensor.clone() }
    }

    /// The MLP without its last GEMM, which `add` computes: silu(gate) * up. Nothing is kept for a backward.
    pub(super) fn activate(&self, c: Context, n: &Tensor) -> Tensor {
        Linear::glu(Activation::Silu, c.w, n, [&self.gate, &self.up])
    }

    /// The same, with all activations that the backward needs.
    pub(super) fn forward(&self, c: Context, n: Tensor) -> MlpSaved {
        let [gate, up] = Linear::forward_each(c.w, &n, [&self.gate, &self.up]);
        let mut act = gate.like(gate.rows(), gate.width());
        glu::forward(Activation::Silu, &gate, &up, &mut act);
        MlpSaved { n, gate, up, act }
    }

    /// x += y from silu(gate) * up. With `keeps`, returns the previous value of x.
    pub(super) fn add(&self, c: Context, act: &Tensor, x: &mut Tensor, keeps: bool) -> Option<Tensor> {
        self.down.forward_onto(c.w, act, x, keeps)
    }

    /// dn from dy.
    pub(super) fn backward(&self, c: Context, saved: MlpSaved, dy: &Tensor, grads: &mut Gradients) -> Tensor {
        let MlpSaved { n, gate, up, act } = saved;
        let (t, f) = (gate.rows(), gate.width());
        let mut dact = gate.like(t, f);
        self.down.backward(c.w, &act, dy, &mut dact, Into::Overwrite, grads);
        // `act` has served: its memory takes dgate.
        let (mut dgate, mut dup) = (act, gate.like(t, f));
        glu::backward(Activation::Silu, &gate, &up, &dact, &mut dgate, &mut dup);
        drop((gate, up, dact));
        let mut dn = n.like(t, n.width());
        self.gate.backward(c.w, &n, &dgate, &mut dn, Into::Overwrite, grads);
        self.up.backward(c.w, &n, &dup, &mut dn, Into::Add, grads);
        self.tensor.sum_slice(dn.slice_mut());
        dn
    }
}
