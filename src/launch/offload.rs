//! Offloading (`mesh.offload`): the optimizer's state between updates, and the weights of models that are not trained
//! between their forwards. On the CPU they are moved to memory-mapped files; with a GPU, to pinned host memory. With a
//! GPU, the critic's weights are offloaded during the rollout, too. The memory of gradients is freed during the
//! rollout. For all other buffers this does nothing.

use super::run::Run;
use crate::config::mesh::{Offload, RoleName};
use crate::device::Device;
use crate::device::cuda::owned_by;
use crate::error::Result;
use crate::learn::Learner;
use crate::learn::role::{Role, owner};
use crate::tensor::arena::Buffer;

impl Run {
    fn roles_wait(&self) -> bool {
        self.device == Device::Cuda && self.ranks.layout().swap.roles
    }

    /// Offloads the state that only training needs, before the rollout on a rank that samples. Does nothing on the CPU.
    pub fn make_room(&self, actor: Option<&mut Learner>, critic: Option<&mut Learner>) {
        let samples = actor.is_some();
        for learner in [actor, critic].into_iter().flatten() {
            learner.sum.grads.free();
            if samples && learner.role.name == RoleName::Critic.name() && self.roles_wait() {
                learner.role.weights.offload(true);
            }
        }
    }

    /// Onloads offloaded weights.
    pub fn onload(&self, role: &mut Role) {
        owned_by(owner(role.name), || role.weights.onload());
    }

    /// Offloads the weights of a model that is not trained, if the job asks for it.
    pub fn offload_weights(&self, role: &mut Role) {
        if self.roles_wait() {
            role.weights.offload(false);
        }
    }

    /// Offloads these weights to pinned memory, or into files. All ranks call this.
    pub fn offload_role(&self, role: &mut Role) -> Result<()> {
        self.offload_weights(role);
        self.offload(Offload::Roles, role.weights.buffers_mut())
    }

    /// Moves buffers into files, if the job asks for it. All ranks of the placement call this.
    pub(super) fn offload<'a>(&self, what: Offload, mut buffers: impl Iterator<Item = &'a mut Buffer>) -> Result<()> {
        if self.device == Device::Cuda || !self.config.mesh.offload.contains(&what) {
            return Ok(());
        }
        let dir = self.dir.join("offload");
        self.ranks.axes.all.agree(buffers.try_for_each(|buffer| buffer.move_to_file(&dir)))
    }
}
