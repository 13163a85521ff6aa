//! Ranks and what they say to each other: the world MPI started, groups of ranks along an axis, their collectives, and
//! how a job ends when one of them fails.
//!
//! From the bottom up: `raw` (the calls of MPI) and `channel` (messages of sums and gathers), `nccl`, `communicator` and
//! `linked` (the same between GPUs); `group`, which is a rank, a size and the collectives over both; `staged` (values of
//! either device), `stream`, `world`; on top `ending`, `watchdog` and `abort`.

pub mod abort;
pub mod accounting;
mod agree;
mod asked;
mod background;
mod channel;
mod communicator;
mod ending;
pub mod gpus;
pub mod group;
mod joining;
mod linked;
pub mod nccl;
pub mod phase;
pub mod plain;
mod raw;
pub mod records;
mod replays;
pub mod self_test;
mod staged;
pub mod stream;
mod watchdog;
pub mod ways;
pub mod world;

pub use abort::shutdown;
pub use accounting::{accounting, exposed_seconds};
pub use group::Group;
pub use linked::{PIECE, SHARE_ALIGN, WHOLE_MAX};
pub use replays::Calls;
pub use stream::{Pending, Stream};
pub use world::{Axes, World};
