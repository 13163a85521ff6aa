//! What the operating system lends: memory maps.

pub mod map;
