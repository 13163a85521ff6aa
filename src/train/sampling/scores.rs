//! The scores of samples by the roles of each placement: joining them, and storing them in the samples.

use super::rollout::Collector;
use super::shares::Key;
use crate::config::reward::OnFailure;
use crate::error::{Error, Result};
use crate::experience::{Experience, Greedy};
use crate::launch::run::Run;
use crate::learn::sums::larger;
use crate::reward::Scored;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap, HashSet};

/// The scores of samples, in their order, by the roles of this placement. Scores of other roles are empty.
#[derive(Clone, Default, Serialize, Deserialize)]
pub struct Scores {
    pub scored: Vec<Scored>,
    /// The actor's log-probabilities, if they are recomputed.
    pub logprobs: Vec<Vec<f32>>,
    pub ref_logprobs: Vec<Vec<f32>>,
    /// The values before each response token, and one after the last.
    pub values: Vec<Vec<f32>>,
}

impl Scores {
    pub fn with(mut self, more: Self) -> Self {
        self.scored.extend(more.scored);
        self.logprobs.extend(more.logprobs);
        self.ref_logprobs.extend(more.ref_logprobs);
        self.values.extend(more.values);
        self
    }

    /// Removes the greedy responses from the samples. They are the baselines of the other samples. If a reward failed
    /// on a greedy response, all samples of its prompt count as failed.
    pub fn split_greedy(&mut self, run: &Run, samples: &mut Vec<Experience>) {
        if !run.config.uses().greedy {
            return;
        }
        let all = std::mem::take(samples).into_iter().zip(std::mem::take(&mut self.scored));
        let is_sample = |(sample, _): &(Experience, Scored)| {
            (sample.response.sample as usize) < run.config.rollout.samples_per_prompt
        };
        let (sampled, greedy): (Vec<_>, Vec<_>) = all.partition(is_sample);
        let known = greedy.into_iter().map(|(Experience { response, .. }, scored)| {
            let greedy = Greedy { score: scored.score, tokens: response.tokens.len(), finish: response.finish };
            (response.prompt, (greedy, scored.failed))
        });
        let known: BTreeMap<usize, (Greedy, Option<String>)> = known.collect();
        for (mut sample, mut scored) in sampled {
            if let Some((greedy, failed)) = known.get(&sample.response.prompt) {
                sample.greedy = Some(*greedy);
                scored.failed = scored.failed.or_else(|| failed.clone());
            }
            samples.push(sample);
            self.scored.push(scored);
        }
    }

    /// Adds the scores of rewards that arrived while other ranks worked.
    pub fn add(&mut self, collector: &Collector, samples: &[Experience], mut streamed: HashMap<Key, Scored>) {
        self.scored.resize(samples.len(), Scored::default());
        for (sample, scored) in samples.iter().zip(&mut self.scored) {
            *scored = collector.take_score(&mut streamed, sample.key()).plus(std::mem::take(scored));
        }
    }

    /// Fills in zeros for the scores of placements that a plan does not run.
    pub fn complete(&mut self, samples: &[Experience]) {
        for (scores, last) in [(&mut self.ref_logprobs, 0), (&mut self.values, 1)] {
            if scores.is_empty() {
                *scores = samples.iter().map(|sample| vec![0.0; sample.response.tokens.len() + last]).collect();
            }
        }
    }

    /// Stores the scores in the samples. Returns the largest change of a log-probability, if they were recomputed.
    pub fn fill(&self, samples: &mut [Experience]) -> Option<f64> {
        for (sample, scored) in samples.iter_mut().zip(&self.scored) {
            sample.score = scored.score;
            sample.scores.clone_from(&scored.parts);
        }
        for (sample, logprobs) in samples.iter_mut().zip(&self.ref_logprobs) {
            sample.ref_logprobs.clone_from(logprobs);
        }
        for (sample, values) in samples.iter_mut().zip(&self.values) {
            let (last, before) = values.split_last().expect("a value after the last token");
            (sample.values, sample.last_value) = (before.to_vec(), *last);
        }
        let mut gap = (!self.logprobs.is_empty()).then_some(0.0);
        for (sample, logprobs) in samples.iter_mut().zip(&self.logprobs) {
            let learned = sample.response.logprobs.iter().zip(logprobs).zip(&sample.mask).filter(|(_, m)| **m != 0);
            let gaps = learned.map(|((a, b), _)| f64::from((a - b).abs()));
            gap = gap.map(|gap| gaps.fold(gap, larger));
            sample.response.logprobs.clone_from(logprobs);
        }
        gap
    }

    /// Removes the samples on which a reward failed, and the other samples of their prompts if the estimator compares
    /// them. Returns their number, if the job drops failed samples.
    pub fn drop_failed(&self, run: &Run, samples: &mut Vec<Experience>) -> Result<Option<f64>> {
        if run.config.reward.on_failure == OnFailure::Stop {
            return Ok(None);
        }
        let failed =
            |(sample, scored): (&Experience, &Scored)| scored.failed.is_some().then_some(sample.response.prompt);
        let failed: Vec<usize> = samples.iter().zip(&self.scored).filter_map(failed).collect();
        let prompts: HashSet<usize> = failed.iter().copied().collect();
        let (before, is_grouped) = (samples.len(), run.config.ppo.advantage.is_grouped());
        let mut scored = self.scored.iter();
        samples.retain(|sample| {
            let own = scored.next().is_some_and(|scored| scored.failed.is_some());
            let in_group = is_grouped && prompts.contains(&sample.response.prompt);
            !(own || in_group)
        });
        let dropped = before - samples.len();
        if let Some(why) = self.scored.iter().find_map(|scored| scored.failed.as_ref()) {
            let message =
                format!("dropped {dropped} of {before} samples, because a reward failed on {}: {why}", failed.len());
            if samples.is_empty() {
                return Err(Error::service(message).hint("fix the reward: no samples are left to learn from"));
            }
            run.recorder.warn(&message);
        }
        Ok(Some(dropped as f64))
    }

    /// The mean of each extra number of the rewards.
    pub fn extra(&self) -> impl Iterator<Item = (String, f64)> {
        let mut sums: BTreeMap<&str, (f64, u64)> = BTreeMap::new();
        for (name, value) in self.scored.iter().flat_map(|scored| &scored.extra) {
            let sum = sums.entry(name).or_default();
            *sum = (sum.0 + f64::from(*value), sum.1 + 1);
        }
        sums.into_iter().map(|(name, (sum, count))| (format!("reward/{name}"), sum / count as f64))
    }
}
