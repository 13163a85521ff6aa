//! Loading of a job's models. Models that learn also get gradients and optimizer state.

use super::models::{JobModel, ModelSpec};
use crate::config::mesh::RoleName;
use crate::error::Result;
use crate::launch::pixels;
use crate::launch::run::{Run, WeightsFrom};
use crate::launch::step_shape::StepShape;
use crate::learn::{Learner, Role};
use crate::model::load::ModelFiles;
use crate::model::{Head, Weights};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;

/// The frozen bases of a rank's models, by their directories.
#[derive(Default)]
struct Bases(BTreeMap<PathBuf, Rc<Weights>>);

impl Bases {
    /// The base of `model`, with all that this rank's models of the same directory keep frozen.
    fn of(&mut self, run: &Run, all: &[JobModel], model: &JobModel, values: WeightsFrom) -> Result<Rc<Weights>> {
        let dir = model.spec.base();
        if let Some(base) = self.0.get(&dir) {
            return Ok(base.clone());
        }
        let sharing: Vec<&JobModel> =
            all.iter().filter(|other| run.ranks.has(other.spec.role) && other.spec.base() == dir).collect();
        let kept = sharing.iter().flat_map(|model| model.files().frozen()).collect();
        let heads = sharing.iter().filter(|model| model.arch.tuning.is_some()).map(|model| model.spec.head);
        let head = heads.fold(Head::Value, |all, head| if head == Head::LanguageModel { head } else { all });
        let base = run.base(&ModelFiles { adapter: None, head, ..model.files() }, &kept, values)?;
        self.0.insert(dir, base.clone());
        Ok(base)
    }
}

/// Loads the models that are on this rank, in their order. All ranks call this.
pub fn load(run: &Run, models: &[JobModel], values: WeightsFrom) -> Result<Vec<Role>> {
    let (mut roles, mut bases) = (Vec::new(), Bases::default());
    let pixels = models.first().and_then(|first| pixels::of_model(&first.spec.dir));
    let loaded = models.iter().filter(|model| run.ranks.has(model.spec.role)).try_for_each(|model| {
        let JobModel { spec: ModelSpec { role, optim, saved, .. }, arch } = model;
        let learns = optim.is_some();
        let saved = saved.as_ref().filter(|_| values != WeightsFrom::Nowhere);
        let values = match learns {
            true => values,
            false if values == WeightsFrom::Nowhere => values,
            false if saved.is_some() => WeightsFrom::Checkpoint,
            false => WeightsFrom::ModelDir,
        };
        let base = if arch.tuning.is_some() { Some(bases.of(run, models, model, values)?) } else { None };
        let mut role = run.role(role.name(), &model.files(), values, base)?;
        if let Some(pixels) = &pixels {
            role.transformer.read_images_with(pixels.clone());
        }
        if let Some(saved) = saved {
            saved.fill(run, &mut role)?;
        }
        if !learns {
            // Only master weights are made from the files.
            role.source = None;
        }
        if !learns && model.spec.role != RoleName::Rollout {
            run.offload_role(&mut role)?;
        }
        roles.push(role);
        Ok(())
    });
    run.ranks.all.agree(loaded)?;
    Ok(roles)
}

/// Adds gradients and optimizer state to the models that learn, for a run of `steps` steps of this shape. Returns the
/// frozen models as well.
pub fn learners(
    run: &Run,
    models: &[JobModel],
    roles: Vec<Role>,
    (steps, shape): (u64, &StepShape),
    values: WeightsFrom,
) -> Result<(Vec<Learner>, Vec<Role>)> {
    let (mut learners, mut frozen) = (Vec::new(), Vec::new());
    // One after the other: if state is offloaded, the first model's state is out of memory before the second needs the
    // memory.
    for role in roles {
        let spec = models.iter().map(|model| &model.spec).find(|spec| spec.role.name() == role.name);
        match spec.and_then(|spec| spec.optim.as_ref()) {
            Some(optim) => {
                let is_critic = role.name == RoleName::Critic.name();
                let epochs = if is_critic { shape.critic_epochs } else { shape.epochs };
                learners.push(run.learner(role, optim, steps * shape.updates_in(epochs) as u64, values)?);
            }
            None => frozen.push(role),
        }
    }
    Ok((learners, frozen))
}
