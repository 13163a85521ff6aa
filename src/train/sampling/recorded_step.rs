//! The samples of a step of another run, from its record. Their prompts are read from the data again, so that the next
//! step takes the same rows as in that run.

use super::dynamic_sampling::{History, Rounds};
use super::experience_maker::score_recorded;
use super::models_of_rank::{Sampling, Work};
use super::shares::Key;
use crate::comm::records;
use crate::config::rollout::DynamicSampling;
use crate::error::{Error, Result};
use crate::experience::{Experience, Prompt, Response};
use crate::launch::run::Run;
use crate::metrics::recorded::RecordedStep;
use crate::reward::Scored;
use crate::train::job::Step;
use std::collections::HashMap;

impl Sampling {
    /// The recorded samples of a step with the scores of this run's models. All ranks call this.
    ///
    /// # Errors
    /// `Data` if the record is damaged, lacks something that the job needs, or does not fit the data.
    pub fn recorded(&mut self, run: &mut Run, step: &mut Step) -> Result<Rounds> {
        let replay = run.replay.as_ref().expect("a replay has a record");
        let record = RecordedStep::for_step(&replay.recorded, step.number);
        let keeps_scores = replay.keeps_scores;
        let is_reader = run.ranks.all.rank() == 0;
        let read = if is_reader { record.experience() } else { Ok(Vec::new()) };
        let read = run.ranks.all.agree(read.and_then(|samples| check(run, samples, is_reader)))?;
        let samples = records::of_first(&run.ranks.all, || read);
        let prompts = self.prompts_of(run, &samples).map_err(|e| e.within(format!("step {}", step.number)));
        let prompts = run.ranks.all.agree(prompts)?;
        let known = samples.iter().map(|sample| (key(sample, &prompts), scored(sample)));
        let known: HashMap<Key, Scored> = if keeps_scores { known.collect() } else { HashMap::new() };
        let samples: Vec<Experience> = samples.into_iter().map(|sample| unscored(sample, &prompts)).collect();
        run.make_room(self.actor.as_mut(), self.critic.as_mut());
        let (mut models, collector) = self.models_of_rank();
        let scored = score_recorded(run, &mut models, collector, step.number, samples, known, &mut step.phases)?;
        let (samples, values) = scored;
        let (mut rounds, dynamic) = (Rounds::new(History::default()), DynamicSampling::default());
        rounds.add_round(&dynamic, samples, values?);
        rounds.finish(&dynamic, prompts.len(), prompts.len(), run.config.rollout.samples_per_prompt);
        Ok(rounds)
    }

    /// The prompt of each group of samples, and its index in the step: the next rows of the data, of which some have no
    /// samples.
    fn prompts_of(&mut self, run: &Run, samples: &[Experience]) -> Result<Vec<(usize, Prompt)>> {
        let rollout = &run.config.rollout;
        let (wanted, dynamic) = (rollout.prompts_per_step, &rollout.dynamic_sampling);
        let most = if dynamic.is_on() { wanted * dynamic.prompts_max_factor } else { wanted };
        let mut groups = samples.chunk_by(|a, b| a.response.prompt == b.response.prompt).map(|group| &group[0].prompt);
        let (mut found, mut next) = (Vec::new(), groups.next());
        for index in 0..most {
            // The prompts after the last group that a step needs belong to the next step.
            if dynamic.is_on() && next.is_none() && found.len() == wanted {
                break;
            }
            let prompt: Prompt = self.collector.source.next(1)?.remove(0);
            let Some(recorded) = next.filter(|recorded| recorded.id == prompt.id) else { continue };
            if recorded.tokens != prompt.tokens {
                return Err(Error::data(format!("row {} of the data has other tokens than the record", prompt.id))
                    .hint("restore the data, the tokenizer and the chat template that the run had"));
            }
            found.push((index, prompt));
            next = groups.next();
        }
        match next {
            None => Ok(found),
            Some(missing) => {
                let id = missing.id;
                Err(Error::data(format!(
                    "the record has samples of row {id}, which the data does not have at this point"
                ))
                .hint("restore the data that the run had"))
            }
        }
    }
}

/// Rejects a record without what the job needs.
fn check(run: &Run, samples: Vec<Experience>, is_reader: bool) -> Result<Vec<Experience>> {
    let lacks = |what: &str, key: &str| {
        let message = format!("the record has no {what}, which {key} needs: an older release wrote it");
        Err(Error::data(message).hint("replay a step that this release has recorded"))
    };
    if !is_reader {
        return Ok(samples);
    }
    if samples.is_empty() {
        return Err(Error::data("the record has no samples"));
    }
    if run.config.uses().greedy && samples.iter().any(|sample| sample.greedy.is_none()) {
        return lacks("greedy responses", "ppo.advantage");
    }
    if run.config.rollout.keep_sampling_mask && samples.iter().all(|s| s.response.sampling_masks.is_empty()) {
        return lacks("sampling masks", "rollout.keep_sampling_mask");
    }
    Ok(samples)
}

/// The index of a sample's prompt in the step, and its number among the samples of the prompt.
fn key(sample: &Experience, prompts: &[(usize, Prompt)]) -> Key {
    (prompts[sample.response.prompt].0, sample.response.sample)
}

/// The score that the record holds.
fn scored(Experience { score, scores, .. }: &Experience) -> Scored {
    Scored { score: *score, parts: scores.clone(), ..Scored::default() }
}

/// A sample as it was before models and rewards scored it.
fn unscored(sample: Experience, prompts: &[(usize, Prompt)]) -> Experience {
    let (index, prompt) = &prompts[sample.response.prompt];
    let Experience { response, greedy, mask, .. } = sample;
    let response = Response { prompt: *index, ..response };
    Experience { prompt: prompt.clone(), response, greedy, mask, ..Experience::default() }
}

impl Work {
    /// Whether the work of a checkpoint follows updates of the step that it interrupts.
    pub fn has_updates(bytes: &[u8]) -> Result<bool> {
        Ok(match records::decode(bytes)? {
            Self::Rollout(_) => false,
            Self::Update(work) => work.minibatches > 0,
            Self::Staged(_, rest) => rest.is_some_and(|rest| !rest.is_empty()),
        })
    }
}
