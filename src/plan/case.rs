//! A rank of a job on a layout, and the cache that it answers with.

use super::devices::Device;
use super::job::Job;
use super::shape::Layout;

/// What memory and time are counted of.
#[derive(Clone, Copy, Debug)]
pub struct Case<'a> {
    pub job: &'a Job<'a>,
    pub layout: &'a Layout,
    pub device: &'a Device,
    /// Threads of a rank, on the CPU.
    pub threads: usize,
}

/// The cache of keys and values of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvCache {
    /// Keys and values of one token over all layers.
    pub token_bytes: usize,
    /// Samples of this rank's group in a step.
    pub samples: usize,
    /// Samples that run at once.
    pub at_once: usize,
    pub waves: usize,
    pub bytes: usize,
    /// What all samples at once would need.
    pub bytes_wanted: usize,
}
