//! One layer: x1 = x0 + attention(norm(x0)), x2 = x1 + mlp(norm(x1)). The block owns the residual stream: it norms the
//! input of each branch and adds the branch's output.

use super::arch::Arch;
use super::attention::{Attention, AttentionSaved, Context, LayerKeys};
use super::mlp::{Mlp, MlpSaved};
use super::norm::Norm;
use super::params::ParamTable;
use super::ring::Ring;
use super::weights::Gradients;
use crate::comm::Group;
use crate::ops::attention::{AttentionShape, Packed};
use crate::tensor::Tensor;

#[derive(Clone, Debug)]
pub(super) struct Block {
    attention_norm: Norm,
    attention: Attention,
    mlp_norm: Norm,
    mlp: Mlp,
}

/// The activations that the backward of a block needs.
#[derive(Debug)]
pub(super) enum BlockSaved {
    /// Only the block's input. The rest is recomputed.
    Input(Tensor),
    Everything(Box<Activations>),
}

#[derive(Debug)]
pub(super) struct Activations {
    /// Input of the block (t, d)
    x0: Tensor,
    /// `None` if it is recomputed.
    attention: Option<Branch<AttentionSaved>>,
    /// The residual stream after attention (t, d)
    x1: Tensor,
    mlp: Branch<MlpSaved>,
}

/// The activations that the backward of a norm and of its branch needs.
#[derive(Debug)]
struct Branch<T> {
    /// 1 / rms of the norm's input (t, 1)
    rstd: Tensor,
    saved: T,
}

impl BlockSaved {
    /// The kept results of layer `layer`, with names, in the order in which they were computed.
    pub(super) fn results(&self, layer: usize) -> Vec<(String, &Tensor)> {
        let before = match layer {
            0 => "the embedding".to_string(),
            _ => format!("the output of layer {}", layer - 1),
        };
        let Activations { x0, attention, x1, mlp } = match self {
            Self::Input(x0) => return vec![(before, x0)],
            Self::Everything(all) => &**all,
        };
        let attention = attention.iter().flat_map(|attention| attention.saved.results());
        let inner = attention.chain([("attention's output projection", x1)]).chain(mlp.saved.results());
        let inner = inner.map(|(what, result)| (format!("{what} of layer {layer}"), result));
        [(before, x0)].into_iter().chain(inner).collect()
    }
}

/// The activations of a forward that are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keep {
    Nothing,
    Input,
    AllButAttention,
    Everything,
}

impl Block {
    pub(super) fn new(arch: &Arch, table: &ParamTable, layer: usize, tensor: &Group, ring: &Ring) -> Self {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let norm = |part| Norm::new(table, &name(part), arch.norm_eps);
        Self {
            attention_norm: norm("input_layernorm"),
            attention: Attention::new(arch, table, layer, &name("self_attn"), tensor, ring),
            mlp_norm: norm("post_attention_layernorm"),
            mlp: Mlp::new(table, &name("mlp"), tensor),
        }
    }

    /// The shape of this rank's part of the attention.
    pub(super) fn shape(&self) -> &AttentionShape {
        &self.attention.shape
    }

    /// `x` holds x0 before the call and x2 after it. Kept x0 and x1 are not copied: the next sum gets memory of its
    /// own.
    pub(super) fn forward(&self, c: Context, x: &mut Tensor, keys: LayerKeys, keep: Keep) -> Option<BlockSaved> {
        let attention = self.attend(c, x, keys);
        let x0 = self.attention.add(c, &attention.saved, x, keep != Keep::Nothing);
        let attention = (keep == Keep::Everything).then_some(attention);
        if matches!(keep, Keep::Nothing | Keep::Input) {
            let (n, _) = self.mlp_norm.forward(c.w, x);
            let act = self.mlp.activate(c, &n);
            drop(n);
            self.mlp.add(c, &act, x, false);
            return x0.map(BlockSaved::Input);
        }
        let mlp = self.activate(c, x);
        let x1 = self.mlp.add(c, &mlp.saved.act, x, true);
        let [x0, x1] = [x0, x1].map(|kept| kept.expect("a kept value is returned"));
        Some(BlockSaved::Everything(Box::new(Activations { x0, attention, x1, mlp })))
    }

    fn attend(&self, c: Context, x0: &Tensor, keys: LayerKeys) -> Branch<AttentionSaved> {
        let (n, rstd) = self.attention_norm.forward(c.w, x0);
        Branch { rstd, saved: self.attention.forward(c, n, keys) }
    }

    fn activate(&self, c: Context, x1: &Tensor) -> Branch<MlpSaved> {
        let (n, rstd) = self.mlp_norm.forward(c.w, x1);
        Branch { rstd, saved: self.mlp.forward(c, n) }
    }

    /// Recomputes from x0 the activations that the backward needs. x2 is not among them.
    fn recompute(&self, c: Context, packed: &Packed, x0: Tensor) -> Activations {
        let mut x1 = x0;
        let attention = self.attend(c, &x1, LayerKeys::Packed(packed));
        let x0 = self.attention.add(c, &attention.saved, &mut x1, true).expect("a kept value is returned");
        let mlp = self.activate(c, &x1);
        Activations { x0, attention: Some(attention), x1, mlp }
    }

    /// dx0 from dx2, in place in `dx`.
    pub(super) fn backward(
        &self,
        c: Context,
        packed: &Packed,
        saved: BlockSaved,
        dx: &mut Tensor,
        grads: &mut Gradients,
    ) {
        let Activations { x0, attention, x1, mlp } = match saved {
            BlockSaved::Everything(all) => *all,
            BlockSaved::Input(x0) => self.recompute(c, packed, x0),
        };
        let dn = self.mlp.backward(c, mlp.saved, dx, grads);
        self.mlp_norm.backward(c.w, &x1, &mlp.rstd, &dn, dx, grads);
        drop((x1, dn));
        let attention = attention.unwrap_or_else(|| self.attend(c, &x0, LayerKeys::Packed(packed)));
        let dn = self.attention.backward(c, packed, attention.saved, dx, grads);
        self.attention_norm.backward(c.w, &x0, &attention.rstd, &dn, dx, grads);
    }
}
