//! Ranks and what they say to each other: the world MPI started, groups of ranks along an axis, their collectives, and
//! how a job ends when one of them fails.

pub mod abort;
pub mod accounting;
mod asked;
pub mod check;
mod check_host;
mod communicator;
mod exchange;
mod flights;
pub mod gpus;
pub mod group;
mod joining;
mod linked;
pub mod nccl;
mod ordered;
mod pattern;
pub mod phase;
pub mod plain;
mod raw;
mod replays;
mod staged;
pub mod stream;
mod watchdog;
pub mod ways;
pub mod world;

pub use accounting::{accounting, exposed_seconds};
pub use group::Group;
pub use linked::{PIECE, SHARE_ALIGN, WHOLE_MAX};
pub use replays::Calls;
pub use stream::{Pending, Stream};
pub use world::{Axes, World, shutdown};
