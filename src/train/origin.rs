//! A run that starts with parts of another run's checkpoint (`checkpoint.from`, `checkpoint.restore`). Once it has a
//! checkpoint of its own, it resumes from that one.

use super::saved;
use super::state::{self, State};
use crate::checkpoint::{self, Checkpoint, ModelVectors};
use crate::comm::records;
use crate::config::checkpoint::Part;
use crate::data::{Row, RowSource};
use crate::error::{Error, Result};
use crate::launch::run::Run;
use crate::learn::Learner;
use crate::model::Arch;
use crate::optim::host_state::Vector;

/// The checkpoint that a run starts from.
pub struct Origin {
    checkpoint: Checkpoint,
    state: State,
    /// The names of its models, in the order of `State::updates`.
    roles: Vec<String>,
}

impl Origin {
    /// Finds the checkpoint before any model is read, and sets the position in the rows and the method's state in `begun`
    /// if these are parts to restore. `None` if the job names no checkpoint. `first`: the architecture of the job's first model. `learned`: the names of the
    /// models that learn. All ranks call this.
    ///
    /// # Errors
    /// `Usage` or `Data` if the checkpoint is missing or damaged, or does not fit the job. The error is the same on all
    /// ranks.
    pub fn find<R: Row>(
        run: &Run,
        first: &Arch,
        learned: &[&'static str],
        begun: &mut State,
        source: &mut RowSource<R>,
    ) -> Result<Option<Self>> {
        let (all, config) = (&run.ranks.all, &run.config.checkpoint);
        if config.from.as_os_str().is_empty() || learned.is_empty() {
            return Ok(None);
        }
        // Other hosts may still see an older listing.
        let newest = records::of_first(all, || checkpoint::newest_of(&config.from));
        let checkpoint = all.agree(Checkpoint::open(&newest.unwrap_or_else(|| config.from.clone())).map_err(named))?;
        all.agree(checkpoint.verify(all).map_err(named))?;
        let origin = all.agree(Self::new(run, checkpoint, first, learned).map_err(named))?;
        if config.restores(Part::Data) {
            let restored = source.restore(&origin.state.cursor, &origin.state.ledger);
            let hint = "use the data and the [data] keys of the checkpoint, or remove \"data\" from checkpoint.restore";
            all.agree(restored.map_err(|e| named(e).hint(hint)))?;
            (begun.cursor, begun.ledger) = (origin.state.cursor.clone(), origin.state.ledger.clone());
        }
        if config.restores(Part::State) {
            begun.method = origin.state.method.clone();
        }
        let (dir, step, parts) = (origin.checkpoint.dir.display(), origin.state.step, &config.restore);
        let parts: Vec<String> = parts.iter().map(crate::config::name).collect();
        run.recorder.say(&format!("starting from {dir} (step {step}): {}", parts.join(", ")));
        for role in learned.iter().filter(|role| !origin.has(role)) {
            run.recorder.say(&format!("{role}: the checkpoint has none, so it starts with its model directory"));
        }
        Ok(Some(origin))
    }

    fn new(run: &Run, checkpoint: Checkpoint, first: &Arch, learned: &[&'static str]) -> Result<Self> {
        let state = state::read(&checkpoint)?;
        let roles: Vec<String> = serde_json::from_value(checkpoint.manifest.state["roles"].clone()).unwrap_or_default();
        state::check_model(&checkpoint, first)?;
        let origin = Self { checkpoint, state, roles };
        if !learned.iter().any(|role| origin.has(role)) {
            let (dir, roles) = (origin.checkpoint.dir.display(), &origin.roles);
            return Err(Error::data(format!("{dir} holds {roles:?}, but this job trains {learned:?}")));
        }
        let (was, is) = (saved::config_of(&origin.checkpoint)?.kind(), run.config.kind());
        Error::need(
            was == is || !run.config.checkpoint.restores(Part::State),
            format!("checkpoint.restore must not have \"state\" for a {is} job that starts from a {was} job"),
        )?;
        Ok(origin)
    }

    fn has(&self, role: &str) -> bool {
        self.roles.iter().any(|known| known == role)
    }

    /// Restores the learners' weights and optimizer state, if these are parts to restore. All ranks call this.
    pub fn fill(&self, run: &Run, learners: &mut [&mut Learner]) -> Result<()> {
        let config = &run.config.checkpoint;
        if config.restores(Part::Weights) {
            let with_optimizer = config.restores(Part::Optimizer);
            let filled = learners.iter_mut().try_for_each(|learner| self.restore(learner, with_optimizer));
            run.ranks.all.agree(filled.map_err(named))?;
            for learner in learners {
                learner.all_gather();
            }
        }
        Ok(())
    }

    fn restore(&self, learner: &mut Learner, with_optimizer: bool) -> Result<()> {
        let Some(index) = self.roles.iter().position(|role| role == learner.role.name) else { return Ok(()) };
        let updates = if with_optimizer { self.state.updates.get(index).copied().unwrap_or(0) } else { 0 };
        let (table, arch) = (learner.role.weights.table.clone(), learner.role.arch().clone());
        let vectors = ModelVectors::open(&self.checkpoint, learner.role.name, &arch, &table)?;
        learner.restore(updates, |what, range, out| match what {
            Vector::First | Vector::Second if !with_optimizer => {
                out.fill(0.0);
                Ok(())
            }
            // A new average begins with the weights.
            Vector::Average if !with_optimizer || !vectors.has(what.name()) => {
                vectors.read(Vector::Master.name(), range, out)
            }
            what => vectors.read(what.name(), range, out),
        })
    }
}

fn named(error: Error) -> Error {
    error.within("checkpoint.from")
}
