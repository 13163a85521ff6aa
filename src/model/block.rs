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

impl BlockSaved {
    /// What is kept of layer `layer`, in the order in which it was computed, each with its name.
    pub(super) fn results(&self, layer: usize) -> Vec<(String, &Tensor)> {
        let before = match layer {
            0 => "the embedding".to_string(),
            _ => format!("the result of layer {}", layer - 1),
        };
        let Activations { x0, attention, x1, mlp } = match self {
            Self::Input(x0) => return vec![(before, x0)],
            Self::Everything(all) => &**all,
        };
        let inner = attention.results().into_iter().chain([("attention's output projection", x1)]).chain(mlp.results());
        let inner = inner.map(|(what, result)| (format!("{what} of layer {layer}"), result));
        [(before, x0)].into_iter().chain(inner).collect()
    }
}

/// How much of a forward is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keep {
    Nothing,
    Input,
    Everything,
}

impl Block {
    /// x2 = x1 + mlp(x1), x1 = x0 + attention(x0): `x` holds x0 before and x2 behind. What is kept of x0 and x1 is not copied:
    /// the next sum goes to memory of its own.
    pub(super) fn forward(&self, c: Context, x: &mut Tensor, keys: LayerKeys, keep: Keep) -> Option<BlockSaved> {
        let (attention, x0) = self.attention.forward(c, x, keys, keep != Keep::Nothing);
        if keep != Keep::Everything {
            drop(attention);
            drop(self.mlp.forward(c, x, false));
            return x0.map(BlockSaved::Input);
        }
        let (mlp, x1) = self.mlp.forward(c, x, true);
        let [x0, x1] = [x0, x1].map(|kept| kept.expect("what is kept is given back"));
        Some(BlockSaved::Everything(Box::new(Activations { x0, attention, x1, mlp })))
    }

    /// What the backward needs, from x0; x2 is not part of that.
    fn again(&self, c: Context, packed: &Packed, x0: Tensor) -> Activations {
        let mut x = x0;
        let (attention, x0) = self.attention.forward(c, &mut x, LayerKeys::Packed(packed), true);
        let mlp = self.mlp.activations(c, &x);
        Activations { x0: x0.expect("what is kept is given back"), attention, x1: x, mlp }
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
            BlockSaved::Input(x0) => self.again(c, packed, x0),
        };
        self.mlp.backward(c, &x1, mlp, dx, grads);
        self.attention.backward(c, packed, &x0, attention, dx, grads);
    }
}
