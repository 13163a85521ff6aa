//! From prompts to scored samples. Where critic, reference or reward have ranks of their own, the prompts are answered in
//! batches: those ranks score a batch while the actor answers the next one.

use super::rollout::{self, Collector, Load, RankResponses};
use super::rollout_weights::RolloutWeights;
use super::shares::Key;
use crate::comm::{Group, Stream, phase, records};
use crate::config::mesh::RoleName;
use crate::config::reward::OnFailure;
use crate::device::cpu::pool::share;
use crate::device::null;
use crate::error::{Error, Result};
use crate::experience::{Experience, Greedy, Prompt, Response};
use crate::launch::run::Run;
use crate::learn::Role;
use crate::learn::score as forward;
use crate::learn::sums::larger;
use crate::metrics::keys::{self, Metrics};
use crate::metrics::{Phase, Phases};
use crate::reward::Scored;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Waits for the responses of all ranks to a batch.
type Responses = Box<dyn FnOnce() -> Result<Vec<RankResponses>>>;

fn all_gather(all: &Group, pipeline: Option<&Stream>, mine: &RankResponses) -> Responses {
    let mine = records::encode(mine);
    let decode = |of_ranks: Vec<Vec<u8>>| of_ranks.iter().map(|bytes| records::decode(bytes)).collect();
    let Some(stream) = pipeline else {
        let gathered = all.all_gather_bytes(&mine);
        return Box::new(move || decode(gathered));
    };
    let pending = stream.submit(move |groups| groups[0].all_gather_bytes(&mine));
    Box::new(move || decode(pending.wait()))
}

/// The models of this rank that generate and score.
pub struct RolloutModels<'a> {
    pub actor: Option<(&'a Role, &'a RolloutWeights)>,
    pub critic: Option<&'a mut Role>,
    pub reference: Option<&'a mut Role>,
}

/// The experience of a step, the same on all ranks.
pub struct Collected {
    /// In the order of prompts and samples.
    pub samples: Vec<Experience>,
    /// False where ranks were asked to stop before all prompts were answered; then nothing is scored.
    pub complete: bool,
    /// What was measured, and the means of the extra numbers that rewards returned; an error leaves the samples without scores.
    pub values: Result<Metrics>,
}

/// Answers and scores `prompts` from the place `first` on; responses in `finished` are kept. Responses reach all ranks over the collector's pipeline; without one
/// all roles are on the same ranks: then there is one batch, and no rank waits. All ranks of the run call this.
pub fn make_experience(
    run: &Run,
    models: &mut RolloutModels,
    collector: &mut Collector,
    step: u64,
    prompts: &[Prompt],
    first: usize,
    finished: &[Response],
    phases: &mut Phases,
) -> Result<Collected> {
    let gathered = models.actor.map(|(actor, rollout_weights)| rollout_weights.gather(actor, phases));
    let mut batch = Batch {
        complete: true,
        samples: Vec::new(),
        scores: Ok(Scores::default()),
        load: Load::default(),
        tail_s: 0.0,
    };
    let mut pending = Vec::new();
    let asked = prompts.len() - first;
    let count = run.config.mesh.rollout_batches(asked);
    for part in (0..count).map(|part| share(asked, 1, part, count)) {
        let part = first + part.start..first + part.end;
        phase::set(step, "rollout");
        let mine = match &gathered {
            Some(gathered) => {
                let rollout = || collector.rollout(run, gathered.model(), step as u32, prompts, &part, finished);
                phases.time(Phase::Rollout, rollout)?
            }
            None => RankResponses { complete: true, responses: Vec::new(), load: None },
        };
        let responses: Responses = if null::is_active() {
            let all = collector.responses_of_all(&run.config, prompts, &part);
            Box::new(move || Ok(vec![all]))
        } else {
            all_gather(&run.ranks.all, collector.pipeline.as_ref(), &mine)
        };
        if gathered.is_some() {
            pending.push(responses);
        } else {
            let from = batch.samples.len();
            batch.add(responses, prompts)?;
            batch.score(from, |samples| score(run, models, collector, samples, step, phases));
        }
    }
    let moved = gathered.as_ref().and_then(|gathered| gathered.moved);
    drop(gathered);
    for responses in pending {
        phases.time(Phase::Rollout, || batch.add(responses, prompts))?;
    }
    let _held = hold(&batch.samples);
    if models.actor.is_some() {
        batch.score(0, |samples| score(run, models, collector, samples, step, phases));
    }
    batch.finish(run, collector, moved, phases)
}

struct Batch {
    samples: Vec<Experience>,
    complete: bool,
    scores: Result<Scores>,
    /// Of all ranks and batches.
    load: Load,
    /// Waits of ranks for the slowest one, the mean over ranks.
    tail_s: f64,
}

impl Batch {
    fn add(&mut self, responses: Responses, prompts: &[Prompt]) -> Result<()> {
        let (mut loads, from) = (Vec::new(), self.samples.len());
        for RankResponses { complete, responses, load } in responses()? {
            self.complete &= complete;
            loads.extend(load);
            self.samples.extend(responses.into_iter().map(|response| Experience {
                prompt: prompts[response.prompt].clone(),
                mask: response.mask(),
                response,
                ..Experience::default()
            }));
        }
        // Whichever ranks drew them.
        self.samples[from..].sort_by_key(Experience::key);
        let slowest = loads.iter().fold(0.0, |most, load| f64::max(most, load.seconds));
        self.tail_s += loads.iter().map(|load| slowest - load.seconds).sum::<f64>() / loads.len().max(1) as f64;
        for load in loads {
            self.load.preemptions += load.preemptions;
            self.load.drawn += load.drawn;
            self.load.places += load.places;
            self.load.stolen += load.stolen;
            self.load.prompt_tokens += load.prompt_tokens;
            self.load.found_tokens += load.found_tokens;
        }
        Ok(())
    }

    /// Adds the scores of the samples from `from` on. All ranks of the placement call this.
    fn score(&mut self, from: usize, score: impl FnOnce(&[Experience]) -> Result<Scores>) {
        // An incomplete batch is scored on resume.
        if self.complete
            && let Ok(scores) = &mut self.scores
        {
            self.scores = score(&self.samples[from..]).map(|more| std::mem::take(scores).with(more));
        }
    }

    /// Waits for the rewards, and joins the scores of all placements. `moved`: bytes that a rank received of the actor's weights for
    /// the rollout.
    fn finish(
        mut self,
        run: &Run,
        collector: &mut Collector,
        moved: Option<f64>,
        phases: &mut Phases,
    ) -> Result<Collected> {
        let streamed = if self.complete {
            phases.time(Phase::Reward, || collector.scored(run))
        } else {
            collector.cancel().map(|()| None)
        };
        self.complete &= !matches!(streamed, Ok(None));
        let scores = self.scores.and_then(|scores| Ok((scores, streamed?)));
        let values = match run.ranks.all.agree(scores) {
            Ok((scores, Some(streamed))) => {
                // All ranks of a placement have the same scores.
                let mut scores = run.ranks.of_placements(scores)?.into_iter().fold(Scores::default(), Scores::with);
                scores.add(&self.samples, streamed);
                scores.take_greedy(run, &mut self.samples);
                if null::is_active() {
                    scores.complete(&self.samples);
                }
                let gap = scores.fill(&mut self.samples);
                let dropped = scores.drop_failed(run, &mut self.samples)?;
                let Load { preemptions, drawn, places, stolen, prompt_tokens, found_tokens, .. } = self.load;
                let ratio = |part: usize, all: usize| (all > 0).then_some(part as f64 / all as f64);
                let measured = [
                    (keys::RESHARD_BYTES, moved),
                    (keys::SAMPLER_GAP_MAX, gap),
                    (keys::SAMPLES_DROPPED, dropped),
                    (keys::ROLLOUT_PREEMPTIONS, Some(preemptions as f64)),
                    (keys::ROLLOUT_OCCUPANCY, ratio(drawn, places)),
                    (keys::ROLLOUT_PREFIX_HIT_RATIO, ratio(found_tokens, prompt_tokens)),
                    (keys::ROLLOUT_PROMPTS_STOLEN, Some(stolen as f64)),
                    (keys::IDLE_TAIL_S, Some(self.tail_s)),
                ];
                let measured = measured.into_iter().filter_map(|(key, value)| Some((key.to_string(), value?)));
                Ok(measured.chain(scores.extra()).collect())
            }
            scores => scores.map(|_| Metrics::new()),
        };
        Ok(Collected { samples: self.samples, complete: self.complete, values })
    }
}

/// Counts samples on a null device: encoded here, as received, and as experience.
pub fn hold(samples: &[Experience]) -> null::Held {
    null::hold("experience", 3 * samples.iter().map(Experience::bytes).sum::<usize>())
}

/// The scores of samples, in their order, by the roles of this placement; none by others.
#[derive(Default, Serialize, Deserialize)]
struct Scores {
    scored: Vec<Scored>,
    /// The actor's, where they are recomputed.
    logprobs: Vec<Vec<f32>>,
    ref_logprobs: Vec<Vec<f32>>,
    /// Before each response token, and one after the last.
    values: Vec<Vec<f32>>,
}

/// By the roles of this placement, all of whose ranks call this.
fn score(
    run: &Run,
    models: &mut RolloutModels,
    collector: &mut Collector,
    samples: &[Experience],
    step: u64,
    phases: &mut Phases,
) -> Result<Scores> {
    let (tokens_max, temperature) = (run.config.ppo.microbatch_tokens_max, run.config.rollout.temperature);
    let mut scores = Scores::default();
    phase::set(step, "reward");
    if run.ranks.has(RoleName::Reward) {
        if models.actor.is_none() {
            collector.push(run, samples);
        }
        scores.scored = phases.time(Phase::Reward, || collector.reward(run, samples))?;
    }
    // Greedy responses are not learned from.
    let is_sample = |sample: &&Experience| (sample.response.sample as usize) < run.config.rollout.samples_per_prompt;
    let samples = &if run.config.has_greedy() {
        Cow::Owned(samples.iter().filter(is_sample).cloned().collect::<Vec<_>>())
    } else {
        Cow::Borrowed(samples)
    };
    let logprobs = |role: &Role| forward::logprobs(role, &run.ranks.axes, samples, temperature, tokens_max);
    phase::set(step, "score");
    phases.time(Phase::Score, || {
        if let Some(reference) = &mut models.reference {
            run.onload(reference);
            scores.ref_logprobs = logprobs(reference);
            run.offload_weights(reference);
        }
        if let Some(critic) = &mut models.critic {
            run.onload(critic);
            scores.values = forward::values(critic, &run.ranks.axes, samples, tokens_max);
        }
    });
    if run.recomputes_old_logprobs()
        && let Some((actor, _)) = models.actor
    {
        scores.logprobs = phases.time(Phase::OldLogprobs, || logprobs(actor));
    }
    Ok(scores)
}

impl Scores {
    fn with(mut self, more: Self) -> Self {
        self.scored.extend(more.scored);
        self.logprobs.extend(more.logprobs);
        self.ref_logprobs.extend(more.ref_logprobs);
        self.values.extend(more.values);
        self
    }

    /// Takes the greedy responses from between the samples, whose baselines they are. Where a reward failed on one, it failed on
    /// all samples of its prompt.
    fn take_greedy(&mut self, run: &Run, samples: &mut Vec<Experience>) {
        if !run.config.has_greedy() {
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

    /// Adds what the rewards said while others worked.
    fn add(&mut self, samples: &[Experience], mut streamed: HashMap<Key, Scored>) {
        self.scored.resize(samples.len(), Scored::default());
        for (sample, scored) in samples.iter().zip(&mut self.scored) {
            *scored = rollout::take(&mut streamed, sample.key()).plus(std::mem::take(scored));
        }
    }

    /// Zeros for the scores of placements that a null device does not have.
    fn complete(&mut self, samples: &[Experience]) {
        for (scores, last) in [(&mut self.ref_logprobs, 0), (&mut self.values, 1)] {
            if scores.is_empty() {
                *scores = samples.iter().map(|sample| vec![0.0; sample.response.tokens.len() + last]).collect();
            }
        }
    }

    /// Moves the scores into the samples; returns the largest change of a log-probability, where they were recomputed.
    fn fill(&self, samples: &mut [Experience]) -> Option<f64> {
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

    /// Takes out the samples on which a reward failed, and with each the others of its prompt where the estimator compares them;
    /// how many, where the job allows it.
    fn drop_failed(&self, run: &Run, samples: &mut Vec<Experience>) -> Result<Option<f64>> {
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
                format!("{dropped} of {before} samples are dropped, as a reward failed on {}: {why}", failed.len());
            if samples.is_empty() {
                return Err(Error::service(message).hint("nothing is left to learn from: mend the reward"));
            }
            run.recorder.warn(&message);
        }
        Ok(Some(dropped as f64))
    }

    /// The mean of each extra number of the rewards.
    fn extra(&self) -> impl Iterator<Item = (String, f64)> {
        let mut sums: BTreeMap<&str, (f64, u64)> = BTreeMap::new();
        for (name, value) in self.scored.iter().flat_map(|scored| &scored.extra) {
            let sum = sums.entry(name).or_default();
            *sum = (sum.0 + f64::from(*value), sum.1 + 1);
        }
        sums.into_iter().map(|(name, (sum, count))| (format!("reward/{name}"), sum / count as f64))
    }
}
