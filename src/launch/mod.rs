//! The start of a job from its configuration and ranks: layout, device, memory limits, self-test, banner, run lock.

pub mod banner;
pub mod gemm;
pub mod gpu;
mod gpu_settings;
pub mod inference;
pub mod layout;
pub mod limits;
mod offload;
pub mod pixels;
pub mod ranks;
pub mod replay;
mod resolved;
pub mod run;
pub mod run_lock;
mod self_test;
pub mod snapshots;
pub mod step_shape;
