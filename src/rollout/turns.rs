//! Responses of several turns: what another side, an environment, writes between them.

use crate::error::Result;
use crate::experience::Finish;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The answer to a turn.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// What stands behind the turn, where the sequence goes on.
    pub tokens: Vec<u32>,
    pub reward: f64,
    /// The sequence ends here.
    pub is_over: bool,
    /// Named numbers for the logs.
    pub extra: BTreeMap<String, f32>,
    /// Why there is none: the sequence ends here, too.
    pub failed: Option<String>,
}

/// Who answers turns. Of ranks that share a schedule the first one asks.
pub trait Turns {
    /// Hears that `finish` has ended a turn of sequence `s`, whose new tokens so far are `tokens`, those of the turn from `turn` on. Does
    /// not wait.
    fn ended(&mut self, s: usize, tokens: &[u32], turn: usize, finish: Finish) -> Result<()>;

    /// The sequences whose answers have come since the last call; with `waits` it waits for one, though not for long.
    fn answers(&mut self, waits: bool) -> Result<Vec<(usize, Answer)>>;
}
