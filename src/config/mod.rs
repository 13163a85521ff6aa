//! To be written.
pub mod metrics;
