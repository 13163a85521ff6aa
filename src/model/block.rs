//! One layer: attention, then the MLP, each added to the residual stream.

use super::attention::{Attention, AttentionSaved, Context, LayerKeys};
use super::mlp::{Mlp, MlpSaved};
use super::weights::Gradients;
use crate::ops::attention::Packed;
use crate::tensor::Tensor;

#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) attention: Attention,
    pub(super) mlp: Mlp,
}

/// What the backward of a block needs.
#[derive(Debug)]
pub(super) enum BlockSaved {
    /// The block's input only; the rest is computed again.
    Input(Tensor),
    Everything(Box<Activations>),
}

#[derive(Debug)]
pub(super) struct Activations {
    /// Input of the block (t, d)
    x0: Tensor,
    attention: AttentionSaved,
    /// Input of the MLP (t, d)
    x1: Tensor,
    mlp: MlpSaved,
}

/// How much of a forward is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keep {
    Nothing,
    Input,
    Everything,
}

impl Block {
    /// x2 = x1 + mlp(x1), x1 = x0 + attention(x0), in place in `x`.
    pub(super) fn forward(&self, c: Context, x: &mut Tensor, keys: LayerKeys, keep: Keep) -> Option<BlockSaved> {
        if keep == Keep::Everything {
            return Some(BlockSaved::Everything(Box::new(self.forward_keeping(c, x, keys))));
        }
        let saved = (keep == Keep::Input).then(|| BlockSaved::Input(x.clone()));
        drop(self.attention.forward(c, x, keys));
        drop(self.mlp.forward(c, x));
        saved
    }

    fn forward_keeping(&self, c: Context, x: &mut Tensor, keys: LayerKeys) -> Activations {
        let x0 = x.clone();
        let attention = self.attention.forward(c, x, keys);
        let x1 = x.clone();
        let mlp = self.mlp.forward(c, x);
        Activations { x0, attention, x1, mlp }
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
            BlockSaved::Input(x0) => self.forward_keeping(c, &mut x0.clone(), LayerKeys::Packed(packed)),
        };
        self.mlp.backward(c, &x1, mlp, dx, grads);
        self.attention.backward(c, packed, &x0, attention, dx, grads);
    }
}
