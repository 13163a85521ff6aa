//! DAPO's dynamic sampling: groups of samples that give no gradient are replaced by more prompts (arXiv:2503.14476,
//! section 3.2).
//!
//! A round asks for as many prompts as the share of kept groups predicts. A step learns from the first groups that are
//! kept, in the order of prompts. The prompts after the last of them belong to the next step, even if they were
//! answered. So the prompts of a step do not depend on the sizes of its rounds.

use crate::advantage::whitening::moments;
use crate::config::rollout::DynamicSampling;
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

/// The prompts answered before a step, and the ones among them whose samples were kept.
#[derive(Clone, Copy, Debug, Default)]
pub struct History {
    pub answered: u64,
    pub kept: u64,
}

/// The result of the rounds of a step.
#[derive(Default)]
pub struct Rounds {
    history: History,
    /// Samples to learn from, and the number of prompts they answer.
    pub samples: Vec<Experience>,
    pub groups: usize,
    pub dropped: Vec<DroppedGroup>,
    /// For each of `dropped`: the index of its prompt in the step.
    dropped_prompts: Vec<usize>,
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
    pub fn new(history: History) -> Self {
        Self { history, ..Self::default() }
    }

    /// The number of prompts that the next round needs to reach `wanted` groups. The predicted share of kept groups is
    /// that of this step so far and of the steps before, which weigh at most as much as `wanted` prompts, plus one kept
    /// group. The expected number of kept groups is a standard deviation above the number of missing ones.
    pub fn prompts_needed(&self, wanted: usize) -> usize {
        let History { answered, kept } = self.history;
        let weight = answered.min(wanted as u64) as f64;
        let past = weight * kept as f64 / answered.max(1) as f64;
        let (groups, answered) = (self.groups as f64, (self.groups + self.dropped.len()) as f64);
        let share = (past + groups + 1.0) / (weight + answered + 1.0);
        let missing = wanted as f64 - groups;
        ((missing + (missing * (1.0 - share)).sqrt()) / share).ceil() as usize
    }

    /// Adds the groups of a round that are learned from. The samples of a prompt are consecutive.
    pub fn add_round(&mut self, dynamic: &DynamicSampling, samples: Vec<Experience>, measured: Metrics) {
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
            if !dynamic.is_on() || is_within && !are_equal {
                self.groups += 1;
                self.samples.extend(group);
            } else {
                self.dropped.push(DroppedGroup { prompt_id: group[0].prompt.id, score_mean });
                self.dropped_prompts.push(prompt);
                self.rejected.extend(group.into_iter().map(|sample| sample.response));
            }
        }
    }

    /// All responses so far, including the responses of an unfinished round.
    pub fn responses(self, unfinished: Vec<Experience>) -> Vec<Response> {
        let samples = self.samples.into_iter().chain(unfinished).map(|sample| sample.response);
        self.rejected.into_iter().chain(samples).collect()
    }

    /// Keeps the first `wanted` groups, and joins the measurements of the rounds. Returns the number of prompts that
    /// the step takes, of `prompts` that were answered with `each` samples.
    pub fn finish(&mut self, dynamic: &DynamicSampling, wanted: usize, prompts: usize, each: usize) -> usize {
        self.values = joined(&self.measured);
        if !dynamic.is_on() {
            return prompts;
        }
        let samples: usize = self.measured.iter().map(|(samples, _)| samples).sum();
        let surplus = self.groups.saturating_sub(wanted);
        let used: usize = self.samples.chunk_by(is_same_prompt).take(wanted).map(<[Experience]>::len).sum();
        self.samples.truncate(used);
        self.groups -= surplus;
        let last = self.samples.last().map(|sample| sample.response.prompt + 1);
        let taken = last.filter(|_| self.groups == wanted).unwrap_or(prompts);
        let dropped = self.dropped_prompts.partition_point(|&prompt| prompt < taken);
        self.dropped.truncate(dropped);
        let rejected = self.rejected.iter().filter(|response| response.prompt < taken).count();
        let failed = self.values.iter_mut().find(|(key, _)| key == keys::SAMPLES_DROPPED);
        if let Some((_, failed)) = failed {
            *failed = (taken * each - used - rejected) as f64;
        }
        self.values.extend(named([
            (keys::GROUPS_DROPPED, dropped as f64),
            (keys::GROUPS_SURPLUS, surplus as f64),
            (keys::ROLLOUT_ROUNDS, self.measured.len() as f64),
            (keys::SCORE_SAMPLED_MEAN, self.score_sum / samples.max(1) as f64),
        ]));
        taken
    }
}

fn is_same_prompt(a: &Experience, b: &Experience) -> bool {
    a.response.prompt == b.response.prompt
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

#[cfg(test)]
mod tests {
    use super::*;

    const WANTED: usize = 4;

    /// Two samples of each of `prompts`. Their scores differ for three prompts of ten.
    fn round(prompts: std::ops::Range<usize>) -> Vec<Experience> {
        let sample = |prompt: usize, sample: u32| {
            let differs = [1, 4, 5].contains(&(prompt % 10));
            let response = Response { prompt, sample, tokens: vec![7], ..Response::default() };
            let score = if differs && sample == 0 { 1.0 } else { 0.0 };
            let mut experience = Experience { response, score, ..Experience::default() };
            experience.prompt.id = 100 + prompt as u64;
            experience
        };
        prompts.flat_map(|prompt| (0..2).map(move |i| sample(prompt, i))).collect()
    }

    #[test]
    fn a_step_uses_the_same_prompts_and_groups_for_any_sizes_of_its_rounds() {
        let dynamic = DynamicSampling { prompts_max_factor: 8, ..DynamicSampling::default() };
        for sizes in [vec![1; 12], vec![4, 8], vec![4, 10, 6], vec![30]] {
            let (mut rounds, mut asked) = (Rounds::default(), 0);
            for size in sizes.iter().filter(|size| **size > 0) {
                rounds.add_round(&dynamic, round(asked..asked + size), vec![(keys::SAMPLES_DROPPED.to_string(), 0.0)]);
                asked += size;
            }
            let kept = rounds.groups;
            assert_eq!(rounds.finish(&dynamic, WANTED, asked, 2), 12, "{sizes:?}");
            let learned: Vec<_> = rounds.samples.iter().map(Experience::key).collect();
            assert_eq!(learned, [1, 4, 5, 11].into_iter().flat_map(|p| [(p, 0), (p, 1)]).collect::<Vec<_>>());
            let dropped: Vec<u64> = rounds.dropped.iter().map(|group| group.prompt_id).collect();
            assert_eq!(dropped, [100, 102, 103, 106, 107, 108, 109, 110], "{sizes:?}");
            let of = |key: &str| rounds.values.iter().find(|(found, _)| found == key).expect("measured").1;
            assert_eq!(of(keys::GROUPS_SURPLUS) as usize, kept - WANTED, "{sizes:?}");
            assert_eq!((of(keys::GROUPS_DROPPED), of(keys::SAMPLES_DROPPED)), (8.0, 0.0), "{sizes:?}");
        }
    }

    #[test]
    fn a_round_requests_as_many_prompts_as_the_share_of_kept_groups_predicts() {
        let dynamic = DynamicSampling { prompts_max_factor: 8, ..DynamicSampling::default() };
        let needed = |answered: u64, kept: u64, prompts: usize| {
            let mut rounds = Rounds::new(History { answered, kept });
            rounds.add_round(&dynamic, round(0..prompts), Metrics::new());
            rounds.prompts_needed(WANTED)
        };
        assert_eq!(needed(0, 0, 0), WANTED, "nothing is known");
        // All were kept before; then one of four was: (3 + sqrt(3 / 3)) / (2 / 3).
        assert_eq!((needed(100, 100, 0), needed(100, 100, 4)), (WANTED, 6));
        assert!(needed(1000, 100, 0) > 2 * needed(1000, 500, 0));
        // Enough in the first round, as one of ten is kept.
        assert!((20..60).contains(&needed(1000, 100, 0)), "{}", needed(1000, 100, 0));
    }
}
