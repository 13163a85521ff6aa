//! The merger of a tower: each `merge` x `merge` patches become one row of the language model's width:
//! y = W2 gelu(W1 n + b1) + b2, where n are the patches of a token side by side, normed each alone or together.

use super::block_spec::NormSpec;
use super::branch::Body;
use super::context::{Context, LayerKeys};
use super::norm::Norm;
use super::params::ParamTable;
use super::plain_mlp::{PlainMlp, PlainSaved};
use super::vision_spec::VisionSpec;
use super::weights::Gradients;
use crate::ops::attention::Packed;
use crate::ops::gelu::Gelu;
use crate::ops::residual;
use crate::tensor::Tensor;

/// The number that is added to variances in a tower.
pub(super) const EPS: f32 = 1e-6;

#[derive(Clone, Debug)]
pub(super) struct Merger {
    norm: Norm,
    mlp: PlainMlp,
    /// The width of what is normed: a patch or a token.
    normed: usize,
    /// The width of a token.
    joined: usize,
}

/// The activations that the backward needs.
#[derive(Debug)]
pub(super) struct MergerSaved {
    /// What is normed, and the statistics of it.
    x: Tensor,
    stats: Tensor,
    mlp: PlainSaved,
}

impl Merger {
    /// Declares the merger `name`, which norms the patches of a token together if it `norms_tokens`.
    pub(super) fn declare(table: &mut ParamTable, name: &str, spec: &VisionSpec, norms_tokens: bool) -> Self {
        let joined = spec.width * spec.patches_of_token();
        let normed = if norms_tokens { joined } else { spec.width };
        let part = |part: &str| format!("{name}.{part}");
        let (norm, names) = if spec.is_windowed() {
            (Norm::declare(table, &part("ln_q"), normed, NormSpec { eps: EPS, offset: 0.0 }), ["mlp.0", "mlp.2"])
        } else {
            (Norm::declare_centered(table, &part("norm"), normed, EPS), ["linear_fc1", "linear_fc2"])
        };
        let [first, second] = names.map(part);
        let mlp = PlainMlp::declare(table, [&first, &second], [joined, joined, spec.out], Gelu::Erf);
        Self { norm, mlp, normed, joined }
    }

    /// (t / merge^2, d) from x (t, w), and what the backward needs.
    pub(super) fn forward(&self, c: Context, x: &Tensor, keys: &mut LayerKeys) -> (Tensor, MergerSaved) {
        let x = residual::copy(x).in_rows_of(self.normed);
        let (n, stats) = self.norm.forward(c.w, &x);
        let n = n.in_rows_of(self.joined);
        let saved = self.mlp.forward(c, n, keys);
        let mut y = x.zeros_like(x.rows() * self.normed / self.joined, self.mlp.outputs());
        self.mlp.add(c, &saved, &mut y, false);
        (y, MergerSaved { x, stats, mlp: saved })
    }

    /// dx (t, w) += the gradient of x from dy.
    pub(super) fn backward(
        &self,
        c: Context,
        packed: &Packed,
        saved: MergerSaved,
        dy: &Tensor,
        dx: &mut Tensor,
        grads: &mut Gradients,
    ) {
        let MergerSaved { x, stats, mlp } = saved;
        let dn = self.mlp.backward(c, packed, mlp, dy, grads).in_rows_of(self.normed);
        let width = dx.width();
        let mut rows = std::mem::replace(dx, dn.like(0, 0)).in_rows_of(self.normed);
        self.norm.backward(c, &x, &stats, &dn, &mut rows, grads);
        *dx = rows.in_rows_of(width);
    }
}
