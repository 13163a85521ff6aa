//! What the operating system and the launcher say and allow.

pub mod environment;
pub mod host;
pub mod map;
pub mod process;
pub mod signals;
