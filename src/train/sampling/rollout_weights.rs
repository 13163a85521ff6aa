//! The actor's weights in the layout of the rollout, if training shards them differently.

use crate::comm::{Axes, Group};
use crate::device::cuda::owned_by;
use crate::error::{Error, Result};
use crate::launch::gpu;
use crate::launch::limits::check_sampling;
use crate::launch::run::Run;
use crate::learn::Role;
use crate::metrics::{Phase, Phases};
use crate::model::{Reshard, TensorPart, Transformer, Weights};
use crate::rollout::Model;
use std::rc::Rc;

/// The layout of the actor's weights in the rollout.
pub struct RolloutWeights {
    /// `None` if the rollout uses training's weights in place.
    reshard: Option<Reshard>,
    /// The same for the frozen base of weights that have one.
    reshard_base: Option<Reshard>,
    /// The transformer over the ranks that share matrices in the rollout, if they differ from training's, and without an
    /// expert axis.
    transformer: Option<Transformer>,
    all: Group,
}

/// Weights gathered for a phase.
pub struct Gathered<'a> {
    transformer: &'a Transformer,
    training: &'a Weights,
    /// `None` if training's weights are used in place.
    whole: Option<Weights>,
    /// Bytes received by the rank that received the most.
    pub moved: Option<f64>,
}

impl RolloutWeights {
    /// Creates the rollout weights of the actor, if it is on this rank, for prompts of up to `prompt_tokens` tokens.
    /// Also returns their bytes. All ranks call this.
    pub fn for_sampler(run: &Run, actor: Option<&Role>, prompt_tokens: usize) -> Result<(Option<Self>, usize)> {
        let made = actor.map(|actor| {
            let made = Self::new(actor, &run.ranks.axes, &run.ranks.rollout_axes)?;
            let dtype = actor.weights.dtype();
            check_sampling(&run.config.rollout, made.transformer(actor), dtype, prompt_tokens).map(|()| made)
        });
        let made = run.ranks.all.agree(made.transpose())?;
        let bytes = made.as_ref().zip(actor).map_or(0, |(made, actor)| made.bytes(actor));
        Ok((made, bytes))
    }

    /// Creates the weights from training's layout `training` to `rollout`. All ranks of the actor call this.
    pub fn new(actor: &Role, training: &Axes, rollout: &Axes) -> Result<Self> {
        let (to, arch) = (TensorPart::from_group(&rollout.tensor), actor.arch());
        let known = gpu::check_cut(actor.weights.device(), arch, to.size);
        arch.check_tensor(to.size).and(known).map_err(|e| e.within("rollout"))?;
        let same = to.size == training.tensor.size();
        let is_staged = training.pipeline.size() > 1;
        let moves = !same || is_staged || actor.weights.is_sharded();
        let base = actor.weights.base.as_ref();
        if !same && base.is_some_and(|base| base.is_quantized()) {
            let (rollout, training) = (to.size, training.tensor.size());
            return Err(Error::usage(format!(
                "rollout.tensor must equal mesh.tensor = {training} with model.quantize (got {rollout})"
            )));
        }
        let over = |weights: &Weights, base| Reshard::new(&actor.transformer, &weights.table, training, to, base);
        let reshard_base = base.filter(|_| moves).map(|base| over(base, None));
        let base = reshard_base.as_ref().map(Reshard::table);
        let reshard = moves.then(|| over(&actor.weights, base));
        let on_rollout = |reshard: &Reshard| Transformer::for_axes(arch, reshard.table(), rollout);
        // No rank waits for another's tokens either.
        let is_apart = !same || is_staged || training.expert.size() > 1;
        let transformer = reshard.as_ref().filter(|_| is_apart).map(on_rollout);
        Ok(Self { reshard, reshard_base, transformer, all: training.all.clone() })
    }

    /// Gathers the weights that training shards or splits differently. Ranks decode different numbers of tokens, so no
    /// rank can wait for another's weights in between. All weights are therefore gathered here, once. All ranks of the
    /// actor call this.
    pub fn gather<'a>(&'a self, actor: &'a Role, phases: &mut Phases) -> Gathered<'a> {
        let whole = self.reshard.as_ref().map(|reshard| {
            let gather = |reshard: &Reshard, weights| owned_by("rollout weights", || reshard.weights(weights));
            let (weights, bytes) = phases.time(Phase::Reshard, || {
                let base = self.reshard_base.as_ref().zip(actor.weights.base.as_deref());
                let base = base.map(|(reshard, base)| gather(reshard, base));
                let (own, bytes) = gather(reshard, &actor.weights);
                let (base, of_base) = base.unzip();
                let base = base.map(Rc::new).or_else(|| actor.weights.base.clone());
                (own.on_base(base), bytes + of_base.unwrap_or(0))
            });
            (weights, self.all.max(bytes as f64))
        });
        let (whole, moved) = whole.unzip();
        Gathered { transformer: self.transformer(actor), training: &actor.weights, whole, moved }
    }

    /// Bytes of weights that a rank holds in addition to training's while it samples.
    pub fn bytes(&self, actor: &Role) -> usize {
        let of = |(reshard, weights): (&Reshard, &Weights)| weights.whole_bytes(reshard.table());
        let base = self.reshard_base.as_ref().zip(actor.weights.base.as_deref());
        self.reshard.iter().map(|own| (own, &actor.weights)).chain(base).map(of).sum()
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
