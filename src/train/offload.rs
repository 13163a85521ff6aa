//! What waits in mapped files while it is not needed (`mesh.offload`): the optimizer's state between updates, the weights of
//! models that are not trained between their forwards.
//!
//! Whatever is not offloaded lies in ordinary buffers, for which all of this does nothing.

use super::role::{Learner, Role};
use super::setup::Run;
use crate::config::mesh::Offload;
use crate::error::Result;
use crate::sys::files;
use crate::tensor::arena::Buffer;

impl Run {
    /// Moves the optimizer's state of a learner into files, where the job says so. All ranks call this.
    ///
    /// # Errors
    /// `Io` where a disk cannot hold it; the same on all ranks.
    pub fn offload_learner(&self, learner: &mut Learner) -> Result<()> {
        self.offload(Offload::Optimizer, learner.zero.buffers_mut())
    }

    /// As `offload_learner`, the weights of a model that is not trained.
    ///
    /// # Errors
    /// As `offload_learner`.
    pub fn offload_role(&self, role: &mut Role) -> Result<()> {
        self.offload(Offload::Roles, role.weights.buffers_mut())
    }

    /// Warns where files would save nothing.
    pub(super) fn warn_of_offload(&self) {
        if !self.config.mesh.offload.is_empty() && files::is_in_memory(&self.dir) {
            let dir = self.dir.display();
            self.recorder.warn(&format!("mesh.offload saves no memory: {dir} lies in memory itself (tmpfs)"));
        }
    }

    fn offload<'a>(&self, what: Offload, mut buffers: impl Iterator<Item = &'a mut Buffer>) -> Result<()> {
        if !self.config.mesh.offload.contains(&what) {
            return Ok(());
        }
        let dir = self.dir.join("offload");
        self.axes.all.agree(buffers.try_for_each(|buffer| buffer.move_to_file(&dir)))
    }
}
