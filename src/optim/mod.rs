//! From a summed gradient to an update: learning-rate schedule, global norm and clip, AdamW with its state sharded
//! (ZeRO).

pub mod host_state;
pub mod schedule;
pub mod zero;
