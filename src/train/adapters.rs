//! Measures how large the adapters of a job are relative to their matrices.

use crate::config::Config;
use crate::error::Result;
use crate::launch::run::Run;
use crate::learn::Learner;
use crate::metrics::adapter_ratios::{AdapterRatios, MatrixRatio, RoleRatios};
use crate::metrics::keys::Metrics;
use crate::model::AdapterNorms;

/// The adapters of the models that learn.
pub struct Adapters {
    /// Those on this rank, by role.
    here: Vec<(&'static str, AdapterNorms)>,
    /// Whether any rank has adapters.
    exist: bool,
}

impl Adapters {
    /// Measures the frozen matrices. All ranks call this.
    pub fn new(run: &Run, learners: &[&mut Learner]) -> Self {
        let of = |learner: &&mut Learner| {
            let role = &learner.role;
            (role.name, AdapterNorms::new(role.arch(), &role.weights, &run.ranks.axes))
        };
        let here: Vec<_> = learners.iter().map(of).filter(|(_, norms)| !norms.is_empty()).collect();
        Self { exist: run.ranks.all.any(!here.is_empty()), here }
    }

    /// The metrics of the adapters after `step` of `steps`, which are also written to `adapters.json`. Empty unless the
    /// step is the first one, or is followed by an evaluation or a checkpoint: these cost more. All ranks call this.
    pub fn measure(&self, run: &Run, step: u64, steps: u64, learners: &[&mut Learner]) -> Result<Metrics> {
        let Config { eval, checkpoint, .. } = &run.config;
        if !self.exist || !(step == 1 || eval.due(step, steps) || checkpoint.due(step, steps)) {
            return Ok(Metrics::new());
        }
        let of = |(role, norms): &(&str, AdapterNorms)| {
            let learner = learners.iter().find(|learner| learner.role.name == *role).expect("it was measured before");
            let ratios = norms.ratios(&learner.role.weights, &run.ranks.axes);
            let matrices = ratios.into_iter().map(|(name, ratio)| MatrixRatio { name, ratio }).collect();
            RoleRatios { role: (*role).to_string(), matrices }
        };
        let here: Vec<RoleRatios> = self.here.iter().map(of).collect();
        let roles = run.ranks.of_placements(&run.ranks.all, here)?.into_iter().flatten().collect();
        let ratios = AdapterRatios { step, roles };
        let written = if run.ranks.world.rank == 0 { ratios.write(&run.dir) } else { Ok(()) };
        run.ranks.all.agree(written)?;
        Ok(ratios.metrics())
    }
}
