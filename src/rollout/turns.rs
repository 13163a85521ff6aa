//! Responses of several turns: an environment writes between the turns.

use crate::error::Result;
use crate::experience::{Finish, Image};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The answer to a turn.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// Tokens to append after the turn, if the sequence continues.
    pub tokens: Vec<u32>,
    /// The images among these tokens; `Image::at` counts from the first of them.
    pub images: Vec<Image>,
    pub reward: f64,
    /// Whether the sequence ends here.
    pub is_over: bool,
    /// Named values for the logs.
    pub extra: BTreeMap<String, f32>,
    /// The reason why there is no answer. The sequence ends here, too.
    pub failed: Option<String>,
}

/// The side that answers turns. The first of the ranks that share a schedule calls it.
pub trait Turns {
    /// Called when `finish` has ended a turn of sequence `s`. `tokens` are its new tokens so far, and the turn begins
    /// at `turn`. Does not wait.
    fn ended(&mut self, s: usize, tokens: &[u32], turn: usize, finish: Finish) -> Result<()>;

    /// The answers since the last call, with their sequences. With `waits` it waits briefly for one.
    fn answers(&mut self, waits: bool) -> Result<Vec<(usize, Answer)>>;
}
