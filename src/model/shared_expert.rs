//! The expert that all tokens of a mixture use: y = s Wdown (act(Wgate n) * Wup n), where s = sigmoid(w n) for each token,
//! or 1 (arXiv:2401.06066, section 3.2).

use super::block_spec::{DenseSpec, ExpertsSpec, SharedName};
use super::context::Context;
use super::linear::Adapter;
use super::mlp::{Inner, Mlp};
use super::names::SHARED_GATE;
use super::params::{ParamId, ParamTable};
use super::part::Cut;
use super::weights::Gradients;
use crate::ops::matmul::Into;
use crate::ops::row_gate;
use crate::tensor::{Layout, Tensor};

#[derive(Clone, Debug)]
pub(super) struct SharedExpert {
    mlp: Mlp,
    /// w (1, d), the same on each rank, if a token weighs the expert.
    gate: Option<ParamId>,
    gate_adapter: Option<Adapter>,
}

/// The activations that the backward needs, besides n.
#[derive(Debug)]
pub(super) struct SharedSaved {
    inner: Inner,
    /// w n (t, 1)
    logits: Option<Tensor>,
}

impl SharedExpert {
    /// Declares `name.shared_expert.gate_proj` and so on, for `name` = the feed-forward of a layer, if the mixture has
    /// such an expert.
    pub(super) fn declare(table: &mut ParamTable, name: &str, width: usize, spec: &ExpertsSpec) -> Option<Self> {
        let shared = spec.shared?;
        let dense = DenseSpec { width: shared.width, activation: spec.activation, bias: false, is_joined: false };
        let part = if shared.name == SharedName::Gated { "shared_expert" } else { "shared_experts" };
        let mlp = Mlp::declare(table, &format!("{name}.{part}"), width, &dense);
        let (dims, weight) = ([Cut::Whole(1), Cut::Whole(width)], format!("{name}{SHARED_GATE}"));
        let gate = (shared.name == SharedName::Gated).then(|| {
            let gate = table.add(&weight, &dims, Layout::Panel, table.normal());
            table.mark_linear(gate);
            gate
        });
        let module = weight.trim_end_matches(".weight");
        let gate_adapter = gate.and_then(|_| Adapter::declare(table, module, (module, None), dims));
        Some(Self { mlp, gate, gate_adapter })
    }

    /// Everything but the last projection, from n (t, d).
    pub(super) fn forward(&self, c: Context, n: &Tensor) -> SharedSaved {
        let logits = self.gate.map(|gate| {
            let mut logits = row_gate::logits(n, c.w.operand(gate, n.rows()));
            if let Some(adapter) = &self.gate_adapter {
                adapter.forward(c.w, n, &mut logits);
            }
            logits
        });
        SharedSaved { inner: self.mlp.inner(c, n), logits }
    }

    /// act(gate) * up, times s if a token weighs it.
    fn weighed(saved: &SharedSaved) -> Option<Tensor> {
        let act = &saved.inner.act;
        saved.logits.as_ref().map(|logits| {
            let mut y = act.like(act.rows(), act.width());
            row_gate::forward(logits, act, &mut y);
            y
        })
    }

    /// x += y, as `Body::add`.
    pub(super) fn add(&self, c: Context, saved: &SharedSaved, x: &mut Tensor, keeps: bool) -> Option<Tensor> {
        let weighed = Self::weighed(saved);
        self.mlp.add_inner(c, weighed.as_ref().unwrap_or(&saved.inner.act), x, keeps)
    }

    /// dn += this rank's part of the gradient of n through the MLP. Returns the gradient of w n, which all ranks have.
    pub(super) fn backward(
        &self,
        c: Context,
        n: &Tensor,
        saved: SharedSaved,
        dy: &Tensor,
        dn: &mut Tensor,
        grads: &mut Gradients,
    ) -> Option<Tensor> {
        let weighed = Self::weighed(&saved);
        let SharedSaved { inner, logits } = saved;
        let mut dact = self.mlp.backward_down(c, weighed.as_ref().unwrap_or(&inner.act), dy, grads);
        let dlogits = logits.map(|logits| {
            let mut dlogits = row_gate::backward(&logits, &inner.act, &mut dact);
            c.tensor.sum_slice(dlogits.slice_mut());
            dlogits
        });
        self.mlp.backward_inner(c, n, inner, dact, (dn, Into::Add), grads);
        dlogits
    }

    /// dn += dlogits w, which is the same on each rank, and dw += dlogits^T n.
    pub(super) fn backward_gate(
        &self,
        c: Context,
        n: &Tensor,
        dlogits: &Tensor,
        dn: &mut Tensor,
        grads: &mut Gradients,
    ) {
        let gate = self.gate.expect("only a gate has logits");
        let dw = (!gate.is_frozen).then(|| grads.weight_mut(gate));
        row_gate::backward_logits(n, c.w.weight(gate), dlogits, dn, dw, c.w.dtype());
        if let Some(adapter) = &self.gate_adapter {
            adapter.backward(c.w, [n, dlogits], dn, grads);
        }
    }
}
