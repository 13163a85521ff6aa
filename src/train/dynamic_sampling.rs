//! DAPO's dynamic sampling: groups of samples that teach nothing give way to more prompts (arXiv:2503.14476, section 3.2).

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

/// What the rounds of a step came to.
#[derive(Default)]
pub struct Rounds {
    /// Samples to learn from, and how many prompts they answer.
    pub samples: Vec<Experience>,
    pub groups: usize,
    pub dropped: Vec<DroppedGroup>,
    /// Responses of the dropped groups: a step that goes on after a stop asks for them again.
    rejected: Vec<Response>,
    /// Of each round: its samples, and what was measured.
    measured: Vec<(usize, Metrics)>,
    score_sum: f64,
    /// Of all responses.
    pub response_tokens: usize,
    /// What the step reports of them.
    pub values: Metrics,
}

impl Rounds {
    /// Takes the groups of a round that are learned from. Samples of a prompt stand together.
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

    /// All responses so far, with those of a round that did not end.
    pub fn responses(self, unfinished: Vec<Experience>) -> Vec<Response> {
        let samples = self.samples.into_iter().chain(unfinished).map(|sample| sample.response);
        self.rejected.into_iter().chain(samples).collect()
    }

    /// Joins what the rounds measured.
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

/// What several rounds measured: sums of bytes and samples, the largest gap, means of the rest over samples.
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
            // One round's numbers as they are.
            _ if found.len() == 1 => found[0].1,
            _ => found.iter().map(|(n, value)| n * value).sum::<f64>() / found.iter().map(|(n, _)| n).sum::<f64>(),
        };
        (key.to_string(), value)
    };
    all.into_iter().map(join).collect()
}
