//! Communication between ranks: the world that MPI started, groups of ranks along an axis, their collectives, and how a job
//! ends when one of them fails.
//!
//! From the bottom up: `raw` (calls of MPI) and `channel` (messages of sums and gathers); `nccl`, `communicator` and
//! `nccl_collectives` (the same between GPUs); `group`, which is a rank, a size and the collectives over both; `host_staged`
//! (values of either device), `queue`, `stream`, `world`; on top `ending`, `watchdog` and `abort`.

pub mod abort;
pub mod accounting;
mod agree;
pub mod backends;
mod background;
mod channel;
mod communicator;
mod communicator_init;
mod ending;
pub mod gpus;
pub mod group;
mod host_staged;
pub mod mpi_baseline;
pub mod nccl;
mod nccl_collectives;
pub mod phase;
mod queue;
mod raw;
pub mod records;
pub mod self_test;
pub mod stream;
mod watchdog;
pub mod world;

pub use abort::shutdown;
pub use accounting::{Calls, accounting, exposed_seconds};
pub use group::Group;
pub use queue::Next;
pub use stream::{Pending, Stream};
pub use world::{Axes, World};
