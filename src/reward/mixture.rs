//! Mixing of several rewards into one score.

use crate::error::{Error, Result};
use crate::experience::Prompt;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The result of the rewards for one response.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Scored {
    pub score: f32,
    /// The score of each reward by its name, before mixing, except rewards that abstained.
    pub parts: BTreeMap<String, f32>,
    /// Named values for the logs. Names without a value are left out.
    pub extra: BTreeMap<String, f32>,
    /// The reason why there is no score: a reward failed on this response.
    pub failed: Option<String>,
}

impl Scored {
    /// The sum of two mixtures. It failed if either failed.
    #[must_use]
    pub fn plus(mut self, other: Self) -> Self {
        self.score += other.score;
        self.parts.extend(other.parts);
        self.extra.extend(other.extra);
        self.failed = self.failed.or(other.failed);
        self
    }
}

/// The score of one reward for one response, before mixing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RewardOutput {
    /// `None` if this reward abstains.
    pub score: Option<f32>,
    pub extra: BTreeMap<String, f32>,
    /// The reason why it has no score, if it failed.
    pub failed: Option<String>,
}

/// Computes score_i = sum over the rewards that do not abstain of weight * score. A reward that abstains is left out of
/// the sum, and weights are not rescaled (as in TRL). `parts` are (name, weight); `outputs[reward][response]`.
///
/// If all abstain, the score is 0 if there are `others` that score. Otherwise that is an error.
///
/// With several rewards, `extra` holds each reward's score under its name, and its own extra values as `NAME_KEY`.
pub fn mix(
    parts: &[(&str, f32)],
    outputs: Vec<Vec<RewardOutput>>,
    prompts: &[&Prompt],
    others: bool,
) -> Result<Vec<Scored>> {
    let mut sums = vec![None::<f64>; prompts.len()];
    let mut scored = vec![Scored::default(); prompts.len()];
    for (&(name, weight), outputs) in parts.iter().zip(outputs) {
        assert_eq!(outputs.len(), prompts.len(), "one output per response");
        for ((output, sum), scored) in outputs.into_iter().zip(&mut sums).zip(&mut scored) {
            if let Some(score) = output.score {
                *sum = Some(sum.unwrap_or(0.0) + f64::from(weight) * f64::from(score));
                scored.parts.insert(name.to_string(), score);
            }
            scored.failed = scored.failed.take().or(output.failed.map(|why| format!("{name}: {why}")));
            if parts.len() == 1 && !others {
                scored.extra = output.extra;
            } else {
                scored.extra.extend(output.score.map(|score| (name.to_string(), score)));
                scored.extra.extend(output.extra.into_iter().map(|(key, x)| (format!("{name}_{key}"), x)));
            }
        }
    }
    for (i, sum) in sums.into_iter().enumerate() {
        if scored[i].failed.is_some() {
            continue;
        }
        let id = prompts[i].id;
        let Some(sum) = sum.or(others.then_some(0.0)) else {
            return Err(Error::service(format!("every reward abstained from a response to prompt {id}"))
                .hint("return None only if another reward scores the response"));
        };
        scored[i].score = sum as f32;
        if !scored[i].score.is_finite() {
            return Err(Error::service(format!(
                "the sum of rewards of a response to prompt {id} is out of the range of f32 ({sum:e})"
            )));
        }
    }
    Ok(scored)
}
