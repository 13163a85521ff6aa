//! The actor's weights in the layout of the rollout, where training shards them in another one.

use crate::comm::{Axes, Group};
use crate::device::cuda::owned_by;
use crate::error::Result;
use crate::launch::gpu;
use crate::launch::limits::check_sampling;
use crate::launch::run::Run;
use crate::learn::Role;
use crate::metrics::{Phase, Phases};
use crate::model::{ParamTable, Reshard, TensorPart, Transformer, Weights};

/// The model that samples.
#[derive(Clone, Copy)]
pub struct RolloutModel<'a> {
    pub transformer: &'a Transformer,
    pub weights: &'a Weights,
}

/// The layout of the actor's weights in the rollout.
pub struct RolloutWeights {
    /// None where the rollout uses training's weights in place.
    reshard: Option<Reshard>,
    /// Over the ranks that share matrices in the rollout, where those are not training's.
    transformer: Option<Transformer>,
    all: Group,
}

impl Run {
    /// The actor's weights in the layout of the rollout, where the actor is on this rank; prompts have up to `prompt_tokens`. All
    /// ranks call this.
    pub fn rollout_weights(&self, actor: Option<&Role>, prompt_tokens: usize) -> Result<Option<RolloutWeights>> {
        let rollout_weights = actor.map(|actor| {
            let rollout_weights = RolloutWeights::new(actor, &self.ranks.axes, &self.ranks.rollout_axes)?;
            check_sampling(&self.config.rollout, rollout_weights.transformer(actor), prompt_tokens)
                .map(|()| rollout_weights)
        });
        self.ranks.all.agree(rollout_weights.transpose())
    }
}

/// Weights that were gathered for a phase.
pub struct Gathered<'a> {
    actor: &'a Role,
    transformer: &'a Transformer,
    /// None where those of training are used in place.
    weights: Option<Weights>,
    /// Received by the rank that received the most.
    bytes: usize,
}

impl RolloutWeights {
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

    /// Ranks decode different numbers of tokens, so that none can wait for another's weights in between: where training
    /// shards them, or cuts them otherwise, they are brought together here, once. Else they are used where they are. All ranks
    /// of the actor call this.
    pub fn gather<'a>(&'a self, actor: &'a Role, phases: &mut Phases) -> Gathered<'a> {
        let transformer = self.transformer(actor);
        let Some(reshard) = &self.reshard else { return Gathered { actor, transformer, weights: None, bytes: 0 } };
        let (weights, bytes) =
            phases.time(Phase::Reshard, || owned_by("rollout weights", || reshard.weights(&actor.weights)));
        let mut received = [bytes as f64];
        self.all.all_reduce_max_f64(&mut received);
        Gathered { actor, transformer, weights: Some(weights), bytes: received[0] as usize }
    }

    /// The actor's transformer on the ranks of the rollout.
    pub fn transformer<'a>(&'a self, actor: &'a Role) -> &'a Transformer {
        self.transformer.as_ref().unwrap_or(&actor.transformer)
    }
}

impl Gathered<'_> {
    pub fn model(&self) -> RolloutModel<'_> {
        RolloutModel { transformer: self.transformer, weights: self.weights.as_ref().unwrap_or(&self.actor.weights) }
    }

    /// Bytes that a rank received for gathered weights; none where they are used in place.
    pub fn moved(&self) -> Option<f64> {
        self.weights.as_ref().map(|_| self.bytes as f64)
    }
}

/// Bytes of weights that a rank holds in addition to those of training while it samples.
pub fn rollout_bytes(run: &Run, actor: &Role) -> usize {
    let to = TensorPart::of(&run.ranks.rollout_axes.tensor);
    if to.size == run.ranks.axes.tensor.size() && !actor.weights.is_sharded() {
        return 0;
    }
    let held = ParamTable::on(actor.weights.device(), actor.arch(), actor.weights.table.head(), to);
    held.len() * actor.weights.dtype().bytes()
}
