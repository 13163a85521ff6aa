//! The gated MLP: x2 = x1 + Wdown (silu(Wgate n) * Wup n), n = rmsnorm(x1).

use super::attention::{Context, add_linear, linear_backward, norm, output};
use super::params::MlpSlots;
use super::weights::Gradients;
use crate::comm::Group;
use crate::ops::matmul::{self, Into};
use crate::ops::{rmsnorm, swiglu};
use crate::tensor::Tensor;

/// One layer's MLP: parameters, and the ranks that share its width.
#[derive(Clone, Debug)]
pub(super) struct Mlp {
    pub(super) slots: MlpSlots,
    pub(super) tensor: Group,
}

/// What the backward of the MLP needs besides its input x1.
#[derive(Debug)]
pub(super) struct MlpSaved {
    rstd: Tensor,
    /// rmsnorm(x1) (t, d)
    n: Tensor,
    /// (t, f)
    gate: Tensor,
    up: Tensor,
    /// silu(gate) * up (t, f)
    act: Tensor,
}

impl MlpSaved {
    /// What was computed, in order.
    pub(super) fn results(&self) -> [(&'static str, &Tensor); 4] {
        [("the MLP's norm", &self.n), ("the gate", &self.gate), ("the up projection", &self.up), ("swiglu", &self.act)]
    }
}

impl Mlp {
    /// x2 = x1 + mlp(x1): `x` holds x1 before and x2 behind. What the backward needs; and x1, where it is kept.
    pub(super) fn forward(&self, c: Context, x: &mut Tensor, keeps: bool) -> (MlpSaved, Option<Tensor>) {
        let (s, saved) = (&self.slots, self.activations(c, x));
        let x1 = add_linear(c.w, &self.tensor, &saved.act, (s.down, s.down_bias), x, keeps);
        (saved, x1)
    }

    /// What the backward needs: all of the forward but its last product.
    pub(super) fn activations(&self, c: Context, x1: &Tensor) -> MlpSaved {
        let s = &self.slots;
        let (n, rstd) = norm(c, s.norm, x1);
        let [mut gate, mut up] = [s.gate, s.up].map(|weight| n.like(n.rows(), c.w.weight(weight).n));
        matmul::forward_each(&n, [output(c.w, s.gate, s.gate_bias, &mut gate), output(c.w, s.up, s.up_bias, &mut up)]);
        let mut act = gate.like(gate.rows(), gate.width());
        swiglu::forward(&gate, &up, &mut act);
        MlpSaved { rstd, n, gate, up, act }
    }

    /// dx1 = dx2 + (d mlp / dx1)^T dx2, in place in `dx`.
    pub(super) fn backward(&self, c: Context, x1: &Tensor, saved: MlpSaved, dx: &mut Tensor, grads: &mut Gradients) {
        let s = &self.slots;
        let MlpSaved { rstd, n, gate, up, act } = saved;
        let (t, f) = (gate.rows(), gate.width());
        let mut dact = gate.like(t, f);
        linear_backward(c.w, (s.down, s.down_bias), &act, dx, &mut dact, Into::Overwrite, grads);
        // `act` has served: its memory takes dgate.
        let (mut dgate, mut dup) = (act, gate.like(t, f));
        swiglu::backward(&gate, &up, &dact, &mut dgate, &mut dup);
        drop((gate, up, dact));
        let mut dn = n.like(t, n.width());
        linear_backward(c.w, (s.gate, s.gate_bias), &n, &dgate, &mut dn, Into::Overwrite, grads);
        linear_backward(c.w, (s.up, s.up_bias), &n, &dup, &mut dn, Into::Add, grads);
        self.tensor.sum_ordered(&mut dn);
        rmsnorm::backward(x1, c.w.vector(s.norm), &rstd, &dn, dx, grads.vector_mut(s.norm));
    }
}
