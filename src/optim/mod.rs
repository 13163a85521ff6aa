//! From a summed gradient to an update: learning-rate schedule, global norm and clip, AdamW with its state sharded
//! over the data axis (ZeRO-1).

pub mod partition;
pub mod schedule;
pub mod zero;

pub use partition::{BLOCK, Partition};
pub use schedule::lr_at;
pub use zero::{StepStats, Zero1};
