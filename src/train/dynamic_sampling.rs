//! DAPO's dynamic sampling: groups of samples that give no gradient are replaced by more prompts (arXiv:2503.14476,
//! section 3.2).

use crate::advantage::whitening::moments;
use crate::config::rollout::DynamicSampling;
use crate::device::null;
use crate::experience::{Experience, Response};
use crate::learn::sums::larger;
use crate::metrics::keys::{self, Metrics, named};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A prompt whose samples are not learned from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DroppedGroup {
    pub prompt_id: u64,
    pub score_mean: f64,
}

/// The result of the rounds of a step.
#[derive(Default)]
pub struct Rounds {
    /// Samples to learn from, and the number of prompts they answer.
    pub samples: Vec<Experience>,
    pub groups: usize,
    pub dropped: Vec<DroppedGroup>,
    /// Responses of the dropped groups. A step resumed after a stop reuses them.
    rejected: Vec<Response>,
    /// For each round: its number of samples and its measurements.
    measured: Vec<(usize, Metrics)>,
    score_sum: f64,
    /// Tokens of all responses.
    pub response_tokens: usize,
    /// The metrics of the step about them.
    pub values: Metrics,
}

impl Rounds {
    /// Adds the groups of a round that are learned from. The samples of a prompt are consecutive.
    pub fn take(&mut self, dynamic: &DynamicSampling, samples: Vec<Experience>, measured: Metrics) {
        self.measured.push((samples.len(), measured));
        self.response_tokens += samples.iter().map(|sample| sample.response.tokens.len()).sum::<usize>();
        self.score_sum += samples.iter().map(|sample| f64::from(sample.score)).sum::<f64>();
        let mut samples = samples.into_iter().peekable();
        while let Some(first) = samples.next() {
            let prompt = first.response.prompt;
            let mut group = vec![first];
            while let Some(sample) = samples.next_if(|sample| sample.response.prompt == prompt) {
                group.push(sample);
            }
            let score_mean = moments(group.iter().map(|sample| f64::from(sample.score))).0;
            let are_equal = group.iter().all(|sample| sample.score == group[0].score);
            let is_within = f64::from(dynamic.low) < score_mean && score_mean < f64::from(dynamic.high);
            // A null device has no scores.
            if !dynamic.is_on() || is_within && !are_equal || null::is_active() {
                self.groups += 1;
                self.samples.extend(group);
            } else {
                self.dropped.push(DroppedGroup { prompt_id: group[0].prompt.id, score_mean });
                self.rejected.extend(group.into_iter().map(|sample| sample.response));
            }
        }
    }

    /// All responses so far, including the responses of an unfinished round.
    pub fn responses(self, unfinished: Vec<Experience>) -> Vec<Response> {
        let samples = self.samples.into_iter().chain(unfinished).map(|sample| sample.response);
        self.rejected.into_iter().chain(samples).collect()
    }

    /// Joins the measurements of the rounds.
    pub fn finish(&mut self, dynamic: &DynamicSampling) {
        self.values = joined(&self.measured);
        if dynamic.is_on() {
            let samples: usize = self.measured.iter().map(|(samples, _)| samples).sum();
            self.values.extend(named([
                (keys::GROUPS_DROPPED, self.dropped.len() as f64),
                (keys::ROLLOUT_ROUNDS, self.measured.len() as f64),
                (keys::SCORE_SAMPLED_MEAN, self.score_sum / samples.max(1) as f64),
            ]));
        }
    }
}

/// The joined measurements of several rounds: sums of bytes and samples, the largest gap, and means over samples for
/// the rest.
fn joined(rounds: &[(usize, Metrics)]) -> Metrics {
    let mut all: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
    for (samples, measured) in rounds {
        for (key, value) in measured {
            all.entry(key).or_default().push((*samples as f64, *value));
        }
    }
    let join = |(key, found): (&str, Vec<(f64, f64)>)| {
        let value = match key {
            keys::RESHARD_BYTES
            | keys::SAMPLES_DROPPED
            | keys::ROLLOUT_PREEMPTIONS
            | keys::ROLLOUT_PROMPTS_STOLEN
            | keys::IDLE_TAIL_S => found.iter().map(|(_, value)| value).sum(),
            keys::SAMPLER_GAP_MAX => found.iter().fold(0.0, |largest, (_, value)| larger(largest, *value)),
            // With one round, its values are used as they are.
            _ if found.len() == 1 => found[0].1,
            _ => found.iter().map(|(n, value)| n * value).sum::<f64>() / found.iter().map(|(n, _)| n).sum::<f64>(),
        };
        (key.to_string(), value)
    };
    all.into_iter().map(join).collect()
}
