//! What functions and services are given of a run.

use crate::error::Result;
use crate::experience::RowFields;
use std::path::PathBuf;
use std::sync::Arc;

/// What functions and services are given of a run.
#[derive(Default)]
pub struct RewardContext {
    /// The row of a prompt, by its id.
    pub rows: Option<Lookup>,
    /// Fields that a row has besides the prompt.
    pub columns: Vec<String>,
    /// Where what the functions print goes; nowhere, but for errors, where there is none.
    pub log: Option<PathBuf>,
    /// Whether no server is asked: a job is only checked.
    pub offline: bool,
}

pub type Lookup = Arc<dyn Fn(u64) -> Result<RowFields> + Send + Sync>;
