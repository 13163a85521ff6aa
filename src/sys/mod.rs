//! Interfaces to the operating system and the launcher.

pub mod affinity;
pub mod bounded_log;
pub mod environment;
mod faults;
pub mod files;
pub mod free_list;
pub mod hdf5_image;
pub mod host;
pub mod lock;
pub mod map;
pub mod memory;
pub mod pages;
pub mod patterns;
pub mod process;
pub mod reexec;
pub mod sandbox;
pub mod signals;
pub mod stderr;
pub mod terminal;
pub mod trace;
