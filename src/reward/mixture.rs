//! Several rewards as one score.

use crate::error::{Error, Result};
use crate::experience::Prompt;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What the rewards say about one response.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Scored {
    pub score: f32,
    /// The score of each reward by its name, before mixing; without those that abstained.
    pub parts: BTreeMap<String, f32>,
    /// Named numbers for the logs; a name may be missing where it has no number.
    pub extra: BTreeMap<String, f32>,
    /// Why there is no score: a reward failed on this response.
    pub failed: Option<String>,
}

impl Scored {
    /// The sum of two mixtures; failed where either is.
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
    /// None: this reward abstains.
    pub score: Option<f32>,
    pub extra: BTreeMap<String, f32>,
    /// Why it has no score, where it should have one.
    pub failed: Option<String>,
}

/// score_i = sum over the rewards that do not abstain of weight * score. Abstention takes a reward out of the sum;
/// weights are not rescaled (as TRL does). `parts` are (name, weight); `outputs[reward][response]`.
///
/// Where all abstain the score is 0, if there are `others` that score; else that is an error.
///
/// With several rewards, `extra` holds each reward's score under its name and its own extras as `NAME_KEY`.
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
                .hint("a function may return None only where another reward scores the response"));
        };
        scored[i].score = sum as f32;
        if !scored[i].score.is_finite() {
            return Err(Error::service(format!("the rewards of a response to prompt {id} sum to {sum:e}")));
        }
    }
    Ok(scored)
}
