//! Communication between ranks: the MPI world, groups of ranks along an axis, their collectives, and the end of a job
//! if a rank fails.
//!
//! The modules from the bottom up:
//!
//! - `raw` (MPI calls) and `channel` (messages of sums and gathers)
//! - `nccl`, `communicator` and `nccl_collectives` (the same between GPUs)
//! - `group`: a rank, a size and the collectives over either
//! - `host_staged` (values on either device), `point_to_point`, `queue`, `stream`, `links` and `world`
//! - `ending`, `watchdog` and `abort`

pub mod abort;
pub mod accounting;
mod agree;
pub mod backends;
mod background;
mod channel;
mod clocks;
mod communicator;
mod communicator_init;
mod ending;
pub mod gpus;
pub mod group;
pub mod group_id;
mod host_staged;
pub mod links;
pub mod nccl;
mod nccl_collectives;
pub mod phase;
mod point_to_point;
mod queue;
mod raw;
pub mod records;
pub mod self_test;
pub mod stream;
mod watchdog;
pub mod world;

pub use abort::shutdown;
pub use accounting::{Calls, accounting, exposed_seconds};
pub use clocks::{Clock, Reading};
pub use group::Group;
pub use links::{Links, Way};
pub use queue::Next;
pub use stream::{Pending, Stream};
pub use world::{Axes, World};
