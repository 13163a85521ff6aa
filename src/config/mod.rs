//! To be written.

pub mod data;
