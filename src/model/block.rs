//! One layer: x1 = x0 + mixer(norm(x0)), x2 = x1 + mlp(norm(x1)), or with norms at other places (`Norms`).

use super::arch::Arch;
use super::attention::Attention;
use super::block_spec::{BlockSpec, DenseSpec, NormSpec};
use super::branch::{Branch, BranchSaved, KeepBranch};
use super::context::{Context, LayerKeys};
use super::experts::Experts;
use super::feed_forward::{FeedForward, FeedForwardSaved};
use super::merger::EPS;
use super::mixer::{Mixer, MixerSaved};
use super::mlp::Mlp;
use super::norm::Norm;
use super::params::ParamTable;
use super::part::Cut;
use super::plain_mlp::PlainMlp;
use super::vision_spec::{TowerKind, VisionSpec};
use super::weights::Gradients;
use crate::ops::attention::Packed;
use crate::ops::gelu::Gelu;
use crate::ops::glu::Activation;
use crate::tensor::Tensor;

#[derive(Clone, Debug)]
pub(super) struct Block {
    mixer: Branch<Mixer>,
    mlp: Branch<FeedForward>,
}

/// The activations that the backward of a block needs.
#[derive(Debug)]
pub(super) struct BlockSaved {
    mixer: BranchSaved<MixerSaved>,
    /// `None` if it is recomputed from the block's input.
    mlp: Option<BranchSaved<FeedForwardSaved>>,
}

impl BlockSaved {
    /// The kept results of layer `layer`, with names, in the order in which they were computed.
    pub(super) fn results(&self, layer: usize) -> Vec<(String, &Tensor)> {
        let before = match layer {
            0 => "the embedding".to_string(),
            _ => format!("the output of layer {}", layer - 1),
        };
        let mixer = self.mixer.inner.iter().flat_map(|inner| inner.body.results());
        let x1 = self.mlp.iter().map(|mlp| ("attention's output projection", &mlp.x));
        let mlp = self.mlp.iter().filter_map(|mlp| mlp.inner.as_ref()).flat_map(|inner| inner.body.results());
        let inner = mixer.chain(x1).chain(mlp).map(|(what, result)| (format!("{what} of layer {layer}"), result));
        [(before, &self.mixer.x)].into_iter().chain(inner).collect()
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

impl Keep {
    /// The kept parts of attention, and of the MLP.
    fn of_branches(self) -> [KeepBranch; 2] {
        match self {
            Self::Nothing => [KeepBranch::Nothing; 2],
            Self::Input => [KeepBranch::Input, KeepBranch::Nothing],
            Self::AllButAttention => [KeepBranch::Input, KeepBranch::Everything],
            Self::Everything => [KeepBranch::Everything; 2],
        }
    }
}

impl Block {
    /// Declares the parameters of layer `layer`.
    pub(super) fn declare(table: &mut ParamTable, arch: &Arch, layer: usize, spec: &BlockSpec) -> Self {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let norm = |table: &mut ParamTable, part: Option<&str>| {
            part.map(|part| Norm::declare(table, &name(part), arch.width, arch.norm))
        };
        let [before, after] = spec.norms.attention;
        let mixer = Branch {
            pre: norm(table, before),
            body: Mixer::declare(table, &format!("model.layers.{layer}"), arch, &spec.mixer),
            post: norm(table, after),
            scale: spec.residual_scale,
        };
        let [before, after] = spec.norms.mlp;
        let mlp = Branch {
            pre: norm(table, before),
            body: FeedForward::declare(table, layer, arch, &spec.feed),
            post: norm(table, after),
            scale: spec.residual_scale,
        };
        Self { mixer, mlp }
    }

    /// Declares the block `name` of a vision tower.
    pub(super) fn of_tower(table: &mut ParamTable, name: &str, spec: &VisionSpec) -> Self {
        let &VisionSpec { width, heads, inner, .. } = spec;
        let part = |part: &str| format!("{name}.{part}");
        let norm = |table: &mut ParamTable, name: &str| {
            Some(match spec.kind {
                TowerKind::Windowed { .. } => {
                    Norm::declare(table, &part(name), width, NormSpec { eps: EPS, offset: 0.0 })
                }
                TowerKind::Learned { .. } => Norm::declare_centered(table, &part(name), width, EPS),
            })
        };
        let pre = norm(table, "norm1");
        let attention = Attention::declare_whole(table, &part("attn"), width, heads);
        let mixer = Branch { pre, body: Mixer::Attention(Box::new(attention)), post: None, scale: 1.0 };
        let pre = norm(table, "norm2");
        let body = match spec.kind {
            TowerKind::Windowed { .. } => {
                let dense = DenseSpec { width: inner, activation: Activation::Silu, bias: true, is_joined: false };
                let mlp = Mlp::declare_cut(table, &part("mlp"), (width, Cut::Whole(inner)), &dense);
                FeedForward::Mlp(Box::new(mlp))
            }
            TowerKind::Learned { .. } => {
                let names = ["mlp.linear_fc1", "mlp.linear_fc2"].map(part);
                let mlp =
                    PlainMlp::declare(table, names.each_ref().map(String::as_str), [width, inner, width], Gelu::Tanh);
                FeedForward::Plain(Box::new(mlp))
            }
        };
        Self { mixer, mlp: Branch { pre, body, post: None, scale: 1.0 } }
    }

    /// Declares the experts of layer `layer` as units of their own, if it has some.
    pub(super) fn declare_experts(&mut self, table: &mut ParamTable, arch: &Arch, layer: usize) {
        if let FeedForward::Experts(experts) = &mut self.mlp.body {
            experts.declare_experts(table, arch, layer);
        }
    }

    /// The number of units of experts after that of the layer.
    pub(super) fn expert_units(&self) -> usize {
        if matches!(self.mlp.body, FeedForward::Experts(_)) { Experts::UNITS } else { 0 }
    }

    pub(super) fn mixer(&self) -> &Mixer {
        &self.mixer.body
    }

    pub(super) fn mixer_mut(&mut self) -> &mut Mixer {
        &mut self.mixer.body
    }

    /// `x` holds x0 before the call and x2 after it. Kept x0 and x1 are not copied: the next sum gets memory of its
    /// own.
    pub(super) fn forward(&self, c: Context, x: &mut Tensor, mut keys: LayerKeys, keep: Keep) -> Option<BlockSaved> {
        let [keep_mixer, keep_mlp] = keep.of_branches();
        let mixer = self.mixer.forward(c, x, &mut keys, keep_mixer);
        let mlp = self.mlp.forward(c, x, &mut keys, keep_mlp);
        Some(BlockSaved { mixer: mixer?, mlp })
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
        let BlockSaved { mixer, mlp } = saved;
        let (mixer, mlp) = if let Some(mlp) = mlp {
            (mixer, mlp)
        } else {
            let (mut x, keys) = (mixer.x, &mut LayerKeys::Packed(packed));
            let mixer = self.mixer.forward(c, &mut x, keys, KeepBranch::Everything);
            (mixer.expect("everything is kept"), BranchSaved { x, inner: None })
        };
        self.mlp.backward(c, packed, mlp, dx, grads);
        self.mixer.backward(c, packed, mixer, dx, grads);
    }
}
