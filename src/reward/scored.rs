//! What rewards say about a response.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What the rewards say about one response.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Scored {
    pub score: f32,
    /// Named numbers for the logs; a name may be missing where it has no number.
    pub extra: BTreeMap<String, f32>,
}

/// The score of one reward for one response, before mixing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RewardOutput {
    /// None: this reward abstains.
    pub score: Option<f32>,
    pub extra: BTreeMap<String, f32>,
}
