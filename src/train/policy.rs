//! The actor as the rollout needs it: every weight of its part at hand, whatever training shards.

use super::role::Role;
use crate::comm::Group;
use crate::metrics::{Phase, Phases};
use crate::model::{Transformer, Weights};

/// What samples.
#[derive(Clone, Copy)]
pub struct Policy<'a> {
    pub transformer: &'a Transformer,
    pub weights: &'a Weights,
}

/// Weights that were brought together for a phase, and go with it.
pub struct Gathered {
    weights: Option<Weights>,
    /// Received by the rank that received the most.
    bytes: usize,
}

impl Gathered {
    /// Ranks decode different numbers of tokens, so that none can wait for another's weights in between: where training
    /// shards them, they are gathered here, once. Else they are used where they are. All ranks call this.
    pub fn of(role: &Role, all: &Group, phases: &mut Phases) -> Self {
        if !role.weights.is_sharded() {
            return Self { weights: None, bytes: 0 };
        }
        let weights = phases.time(Phase::Reshard, || role.weights.whole());
        let mut received = [(weights.bytes() - role.weights.bytes()) as f64];
        all.all_reduce_max_f64(&mut received);
        Self { weights: Some(weights), bytes: received[0] as usize }
    }

    /// Where weights moved: how many bytes.
    pub fn moved(&self) -> Option<f64> {
        self.weights.as_ref().map(|_| self.bytes as f64)
    }

    pub fn policy<'a>(&'a self, role: &'a Role) -> Policy<'a> {
        Policy { transformer: &role.transformer, weights: self.weights.as_ref().unwrap_or(&role.weights) }
    }
}
