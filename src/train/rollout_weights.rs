//! The actor's weights in the layout of the rollout, where training shards them in another one.

use crate::comm::{Axes, Group};
use crate::device::cuda::owned_by;
use crate::error::Result;
use crate::launch::gpu;
use crate::launch::limits::check_sampling;
use crate::launch::run::Run;
use crate::learn::Role;
use crate::metrics::{Phase, Phases};
use crate::model::{Reshard, TensorPart, Transformer, Weights};
use crate::rollout::Model;

/// The layout of the actor's weights in the rollout.
pub struct RolloutWeights {
    /// None where the rollout uses training's weights in place.
    reshard: Option<Reshard>,
    /// Over the ranks that share matrices in the rollout, where those are not training's.
    transformer: Option<Transformer>,
    all: Group,
}

/// Weights that were whole for a phase.
pub struct Gathered<'a> {
    transformer: &'a Transformer,
    training: &'a Weights,
    /// None where those of training are used in place.
    whole: Option<Weights>,
    /// Bytes that the rank received that received the most.
    pub moved: Option<f64>,
}

impl RolloutWeights {
    /// Of the actor, where it is on this rank, for prompts of up to so many tokens; and `bytes` of them. All ranks call this.
    pub fn of(run: &Run, actor: Option<&Role>, prompt_tokens: usize) -> Result<(Option<Self>, usize)> {
        let made = actor.map(|actor| {
            let made = Self::new(actor, &run.ranks.axes, &run.ranks.rollout_axes)?;
            let dtype = actor.weights.dtype();
            check_sampling(&run.config.rollout, made.transformer(actor), dtype, prompt_tokens).map(|()| made)
        });
        let made = run.ranks.all.agree(made.transpose())?;
        let bytes = made.as_ref().zip(actor).map_or(0, |(made, actor)| made.bytes(actor));
        Ok((made, bytes))
    }

    /// From training's layout `training` to `rollout`. All ranks of the actor call this.
    pub fn new(actor: &Role, training: &Axes, rollout: &Axes) -> Result<Self> {
        let (to, arch) = (TensorPart::of(&rollout.tensor), actor.arch());
        let known = gpu::check_cut(actor.weights.device(), arch, to.size);
        arch.check_tensor(to.size).and(known).map_err(|e| e.within("rollout"))?;
        let same = to.size == training.tensor.size();
        let moves = !same || actor.weights.is_sharded();
        let reshard = moves.then(|| Reshard::new(&actor.transformer, &actor.weights.table, training, to));
        let over = |reshard: &Reshard| Transformer::over(arch, reshard.table(), rollout);
        let transformer = reshard.as_ref().filter(|_| !same).map(over);
        Ok(Self { reshard, transformer, all: training.all.clone() })
    }

    /// Ranks decode different numbers of tokens, so that none can wait for another's weights in between: those that training shards
    /// or cuts otherwise are brought together here, once. All ranks of the actor call this.
    pub fn gather<'a>(&'a self, actor: &'a Role, phases: &mut Phases) -> Gathered<'a> {
        let whole = self.reshard.as_ref().map(|reshard| {
            let gather = || owned_by("rollout weights", || reshard.weights(&actor.weights));
            let (weights, bytes) = phases.time(Phase::Reshard, gather);
            (weights, self.all.max(bytes as f64))
        });
        let (whole, moved) = whole.unzip();
        Gathered { transformer: self.transformer(actor), training: &actor.weights, whole, moved }
    }

    /// Bytes of weights that a rank holds in addition to those of training while it samples.
    pub fn bytes(&self, actor: &Role) -> usize {
        self.reshard.as_ref().map_or(0, |reshard| reshard.table().len() * actor.weights.dtype().bytes())
    }

    /// The actor's transformer on the ranks of the rollout.
    pub fn transformer<'a>(&'a self, actor: &'a Role) -> &'a Transformer {
        self.transformer.as_ref().unwrap_or(&actor.transformer)
    }
}

impl Gathered<'_> {
    /// The model that samples, without a tokenizer.
    pub fn model(&self) -> Model<'_> {
        let weights = self.whole.as_ref().unwrap_or(self.training);
        Model { transformer: self.transformer, weights, tokenizer: None }
    }
}
