//! Models that learn: from a packed minibatch to losses, gradients and new weights. This module knows no run and no
//! job.

pub mod accumulation;
pub mod gradient_norms;
pub mod gradient_sum;
pub mod head_pass;
pub mod learner;
pub mod non_finite;
pub mod objective;
pub mod packed;
pub mod role;
pub mod routing;
pub mod schedule;
pub mod score;
pub mod sums;
pub mod tree_sum;

pub use head_pass::{HeadPass, Pass};
pub use learner::Learner;
pub use objective::{MicroBatch, Objective};
pub use role::Role;
