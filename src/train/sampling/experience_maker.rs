//! The path from prompts to scored samples. If the critic, reference or reward have their own ranks, the prompts are
//! answered in batches, and those ranks score one batch while the actor answers the next. A rollout that runs ahead
//! answers the prompts of later steps while the other ranks learn (`draw_ahead`). The other ranks add the scores of
//! their roles when the step is due (`score_ahead`).

use super::rollout::{Collector, Load, RankResponses};
use super::rollout_weights::RolloutWeights;
use super::scores::Scores;
use super::shares::{Key, StepSlice};
use crate::comm::{Group, Stream, phase, records};
use crate::config::mesh::RoleName;
use crate::device::cpu::pool::share;
use crate::device::null;
use crate::error::{Error, Kind, Result};
use crate::experience::{Experience, Prompt, Response};
use crate::launch::run::Run;
use crate::learn::Role;
use crate::learn::packed::Tokens;
use crate::learn::score as forward;
use crate::metrics::keys::{self, Metrics, named};
use crate::metrics::{Phase, Phases};
use crate::reward::Scored;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, VecDeque};
use std::time::Instant;

/// Waits for the responses of all ranks to a batch.
type Responses = Box<dyn FnOnce() -> Result<Vec<RankResponses>>>;

fn all_gather(all: &Group, pipeline: Option<&Stream>, mine: &RankResponses) -> Responses {
    let mine = records::encode(mine);
    let decode = |of_ranks: Vec<Vec<u8>>| of_ranks.into_iter().map(|bytes| records::decode(&bytes)).collect();
    let Some(stream) = pipeline else {
        let gathered = all.all_gather_bytes(&mine);
        return Box::new(move || decode(gathered));
    };
    let pending = stream.submit(move |group| group.all_gather_bytes(&mine));
    Box::new(move || decode(pending.wait()))
}

/// The models of this rank that generate and score.
pub struct RolloutModels<'a> {
    /// The actor or its copy, if this rank samples.
    pub sampler: Option<(&'a Role, &'a RolloutWeights)>,
    pub actor: Option<&'a Role>,
    pub critic: Option<&'a mut Role>,
    pub reference: Option<&'a mut Role>,
}

/// The experience of a step in the order of prompts and samples, the same on all ranks, and its metrics. These include
/// the means of the extra values that rewards returned. After an error the samples have no scores. The error is
/// `Stopped` if ranks were asked to stop before everything was ready.
pub type Collected = (Vec<Experience>, Result<Metrics>);

/// Answers and scores `prompts` from index `first` on. Responses in `finished` are kept. Responses reach all ranks over
/// the collector's pipeline. Without a pipeline all roles are on the same ranks: there is one batch, and no rank waits.
/// All ranks of the run call this.
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
    let gathered = models.sampler.map(|(sampler, rollout_weights)| rollout_weights.gather(sampler, phases));
    let mut batch = Batch::new();
    let mut pending = Vec::new();
    let asked = prompts.len() - first;
    let count = run.config.mesh.rollout_batches(asked);
    let whole = [StepSlice::whole(step as u32, prompts.len())];
    for part in (0..count).map(|part| share(asked, 1, part, count)) {
        let part = first + part.start..first + part.end;
        phase::set(step, phase::Phase::Rollout);
        let mine = match &gathered {
            Some(gathered) => {
                let rollout = || collector.rollout(run, gathered.model(), &whole, prompts, &part, finished);
                phases.time(Phase::Rollout, rollout)?
            }
            None => RankResponses { complete: true, responses: Vec::new(), load: None },
        };
        let responses: Responses = match &collector.planned {
            Some(planned) => {
                let responses = planned.to(&run.config, prompts, &part);
                Box::new(move || Ok(vec![RankResponses { complete: true, responses, load: None }]))
            }
            None => all_gather(&run.ranks.all, collector.pipeline.as_ref(), &mine),
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
    if models.sampler.is_some() {
        batch.score(0, |samples| score(run, models, collector, samples, step, phases));
    }
    batch.finish(run, collector, moved, HashMap::new(), phases)
}

/// The results of ranks that run ahead for the prompts of one step.
#[derive(Clone, Default, Serialize, Deserialize)]
pub struct StagedBatch {
    pub responses: Vec<Response>,
    load: Load,
    tail_s: f64,
    /// Seconds of the slowest rank in the last phase, and the number of tokens sampled in it.
    rollout_s: f64,
    drawn: usize,
    /// `None` if responses continue in a later phase, or if a reward or the environment failed.
    scores: Option<(Scores, Vec<(Key, Scored)>)>,
    /// The error of the reward or the environment.
    #[serde(skip)]
    pub error: Option<Error>,
}

impl StagedBatch {
    /// Responses without scores.
    pub fn from_responses(responses: Vec<Response>) -> Self {
        Self { responses, ..Self::default() }
    }

    pub fn is_scored(&self) -> bool {
        self.scores.is_some()
    }
}

/// Continues the responses in `partial` of several steps with the weights of step `weights_step`. `prompts` holds the
/// prompts of all `pieces`, in order. Then scores the samples of the first step, which are complete, by the roles of
/// these ranks. Does not stop before everything is done, because these weights are gone afterwards. All ranks that
/// sample call this.
pub fn draw_ahead(
    run: &Run,
    models: &mut RolloutModels,
    collector: &mut Collector,
    weights_step: u64,
    (pieces, prompts): (&[StepSlice], &[Prompt]),
    partial: VecDeque<StagedBatch>,
    phases: &mut Phases,
) -> Result<Vec<StagedBatch>> {
    let (sampler, rollout_weights) = models.sampler.expect("this rank samples");
    let (here, step) = (&run.ranks.axes.all, u64::from(pieces[0].step));
    let known = pieces.iter().zip(partial).flat_map(|(piece, ahead)| {
        let moved = move |response: Response| Response { prompt: response.prompt + piece.prompts.start, ..response };
        ahead.responses.into_iter().map(moved)
    });
    let known: Vec<Response> = known.collect();
    phase::set(step, phase::Phase::Rollout);
    let gathered = rollout_weights.gather(sampler, phases);
    let start = Instant::now();
    run.must_finish.set(true);
    let mine = phases.time(Phase::Rollout, || {
        collector.rollout(run, gathered.model(), pieces, prompts, &(0..prompts.len()), &known)
    });
    let rollout_s = here.max(start.elapsed().as_secs_f64());
    drop(gathered);
    let mut batch = Batch::new();
    batch.add(all_gather(here, None, &mine?), prompts)?;
    let drawn = batch.load.drawn;
    for response in batch.samples.iter_mut().map(|sample| &mut sample.response) {
        let new = response.tokens_without_weights();
        response.weights.extend((new > 0).then_some((weights_step, new)));
    }
    let first = batch.samples.partition_point(|sample| sample.response.prompt < pieces[0].prompts.end);
    let later = batch.samples.split_off(first);
    batch.score(0, |samples| score(run, models, collector, samples, step, phases));
    let streamed = if batch.complete {
        phases.time(Phase::Reward, || collector.scored(run, here))
    } else {
        collector.cancel().map(|()| None)
    };
    run.must_finish.set(false);
    let scores = here.agree(batch.scores.and_then(|scores| Ok(streamed?.map(|streamed| (scores, streamed)))));
    let (scores, error) = match scores {
        Err(error) if error.kind != Kind::Service => return Err(error),
        Err(error) => (None, Some(error)),
        Ok(scores) => (scores.map(|(scores, streamed)| (scores, streamed.into_iter().collect())), None),
    };
    let of = |samples: Vec<Experience>| samples.into_iter().map(|sample| sample.response).collect();
    let (responses, load, tail_s) = (of(batch.samples), batch.load, batch.tail_s);
    let mut all = vec![StagedBatch { responses, load, tail_s, rollout_s, drawn, scores, error }];
    let mut later: Vec<Response> = of(later);
    for piece in &pieces[1..] {
        let rest = later.split_off(later.partition_point(|response| response.prompt < piece.prompts.end));
        for response in &mut later {
            response.prompt -= piece.prompts.start;
        }
        all.push(StagedBatch::from_responses(std::mem::replace(&mut later, rest)));
    }
    Ok(all)
}

/// The samples of `step` that were sampled and scored ahead, with the scores of these ranks added. All of them call
/// this.
pub fn score_ahead(
    run: &Run,
    models: &mut RolloutModels,
    collector: &mut Collector,
    step: u64,
    prompts: &[Prompt],
    ahead: StagedBatch,
    phases: &mut Phases,
) -> Result<Collected> {
    let StagedBatch { responses, load, tail_s, rollout_s, drawn: tokens, scores, .. } = ahead;
    let (drawn, streamed) = scores.expect("what is learned from was scored");
    let lag = lag(step, &responses);
    let mut batch = Batch { load, tail_s, ..Batch::new() };
    batch.add_responses(responses, prompts);
    let _held = hold(&batch.samples);
    batch.score(0, |samples| score(run, models, collector, samples, step, phases));
    batch.scores = batch.scores.map(|scores| drawn.with(scores));
    let (samples, mut values) = batch.finish(run, collector, None, streamed.into_iter().collect(), phases)?;
    if let Ok(values) = &mut values {
        values.extend(rollout_speed(rollout_s, tokens));
        values.extend(named([(keys::ROLLOUT_LAG_MEAN, lag)]));
    }
    Ok((samples, values))
}

/// Recorded `samples` of `step` with scores of these models. Scores in `known` are not computed again. All ranks of the
/// run call this.
pub fn score_recorded(
    run: &Run,
    models: &mut RolloutModels,
    collector: &mut Collector,
    step: u64,
    samples: Vec<Experience>,
    known: HashMap<Key, Scored>,
    phases: &mut Phases,
) -> Result<Collected> {
    let mut batch = Batch { samples, ..Batch::new() };
    // No rank has sent its responses to the reward while it sampled them.
    models.sampler = None;
    let _held = hold(&batch.samples);
    batch.score(0, |samples| score(run, models, collector, samples, step, phases));
    batch.finish(run, collector, None, known, phases)
}

/// The mean age, in updates, of the weights that sampled the tokens of `step`.
fn lag(step: u64, responses: &[Response]) -> f64 {
    let runs = || responses.iter().flat_map(|response| &response.weights);
    let behind: f64 = runs().map(|(weights, tokens)| (step - 1 - weights) as f64 * *tokens as f64).sum();
    behind / runs().map(|(_, tokens)| tokens).sum::<usize>().max(1) as f64
}

/// Throughput of a rollout of `seconds` that sampled `sampled` tokens.
pub fn rollout_speed(seconds: f64, sampled: usize) -> Metrics {
    let sampled = sampled as f64;
    let values =
        [(keys::ROLLOUT_TOKENS_PER_S, sampled / seconds), (keys::TIME_PER_TOKEN_MS, 1e3 * seconds / sampled.max(1.0))];
    named(values.into_iter().filter(|_| seconds > 0.0))
}

struct Batch {
    samples: Vec<Experience>,
    complete: bool,
    scores: Result<Scores>,
    /// Load of all ranks and batches.
    load: Load,
    /// Time that ranks waited for the slowest one, as a mean over ranks.
    tail_s: f64,
}

impl Batch {
    fn new() -> Self {
        Self { complete: true, samples: Vec::new(), scores: Ok(Scores::default()), load: Load::default(), tail_s: 0.0 }
    }

    fn add_responses(&mut self, responses: Vec<Response>, prompts: &[Prompt]) {
        self.samples.extend(responses.into_iter().map(|response| Experience {
            prompt: prompts[response.prompt].clone(),
            mask: response.mask(),
            response,
            ..Experience::default()
        }));
    }

    fn add(&mut self, responses: Responses, prompts: &[Prompt]) -> Result<()> {
        let (mut loads, from) = (Vec::new(), self.samples.len());
        for RankResponses { complete, responses, load } in responses()? {
            self.complete &= complete;
            loads.extend(load);
            self.add_responses(responses, prompts);
        }
        // Independent of the ranks that sampled them.
        self.samples[from..].sort_by_key(Experience::key);
        let slowest = loads.iter().fold(0.0, |most, load| f64::max(most, load.seconds));
        self.tail_s += loads.iter().map(|load| slowest - load.seconds).sum::<f64>() / loads.len().max(1) as f64;
        for load in loads {
            self.load.preemptions += load.preemptions;
            self.load.drawn += load.drawn;
            self.load.places += load.places;
            self.load.stolen += load.stolen;
            self.load.prompt_tokens += load.prompt_tokens;
            self.load.prefix_hit_tokens += load.prefix_hit_tokens;
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

    /// Waits for the rewards, except the ones `known` already, and joins the scores of all placements. `moved`: bytes
    /// of actor weights that a rank received for the rollout.
    fn finish(
        mut self,
        run: &Run,
        collector: &mut Collector,
        moved: Option<f64>,
        known: HashMap<Key, Scored>,
        phases: &mut Phases,
    ) -> Result<Collected> {
        let streamed = if self.complete {
            phases.time(Phase::Reward, || collector.scored(run, &run.ranks.together))
        } else {
            collector.cancel().map(|()| None)
        };
        let scores = self.scores.and_then(|scores| Ok((scores, streamed?)));
        let values = match run.ranks.together.agree(scores) {
            Ok((scores, Some(mut streamed))) => {
                streamed.extend(known);
                // All ranks of a placement have the same scores.
                let mut scores = run
                    .ranks
                    .of_placements(&run.ranks.together, scores)?
                    .into_iter()
                    .fold(Scores::default(), Scores::with);
                scores.add(collector, &self.samples, streamed);
                scores.split_greedy(run, &mut self.samples);
                if collector.planned.is_some() {
                    scores.complete(&self.samples);
                }
                let gap = scores.fill(&mut self.samples);
                let dropped = scores.drop_failed(run, &mut self.samples)?;
                let Load { preemptions, drawn, places, stolen, prompt_tokens, prefix_hit_tokens, .. } = self.load;
                let ratio = |part: usize, all: usize| (all > 0).then_some(part as f64 / all as f64);
                let measured = [
                    (keys::RESHARD_BYTES, moved),
                    (keys::SAMPLER_GAP_MAX, gap),
                    (keys::SAMPLES_DROPPED, dropped),
                    (keys::ROLLOUT_PREEMPTIONS, Some(preemptions as f64)),
                    (keys::ROLLOUT_OCCUPANCY, ratio(drawn, places)),
                    (keys::ROLLOUT_PREFIX_HIT_RATIO, ratio(prefix_hit_tokens, prompt_tokens)),
                    (keys::ROLLOUT_PROMPTS_STOLEN, Some(stolen as f64)),
                    (keys::IDLE_TAIL_S, Some(self.tail_s)),
                ];
                let measured = measured.into_iter().filter_map(|(key, value)| Some((key.to_string(), value?)));
                Ok(measured.chain(scores.extra()).collect())
            }
            Ok((_, None)) => Err(Error::new(Kind::Stopped, "stopped before all responses were ready and scored")),
            Err(error) => Err(error),
        };
        Ok((self.samples, values))
    }
}

/// Accounts for samples on a null device: encoded here, as received, and as experience. Copies of a sampling mask share
/// its bytes, so it counts as received and as experience.
pub fn hold(samples: &[Experience]) -> [null::Held; 2] {
    let sum = |of: fn(&Experience) -> usize| samples.iter().map(of).sum::<usize>();
    [
        null::hold("experience", 3 * sum(Experience::bytes)),
        null::hold("sampling masks", 2 * sum(Experience::mask_bytes)),
    ]
}

/// Scores by the roles of this placement. All its ranks call this.
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
    phase::set(step, phase::Phase::Reward);
    if run.ranks.has(RoleName::Reward) {
        if models.sampler.is_none() {
            collector.push(run, samples, step);
        }
        scores.scored = phases.time(Phase::Reward, || collector.reward(run, samples))?;
    }
    // Greedy responses are not learned from.
    let is_sample = |sample: &&Experience| (sample.response.sample as usize) < run.config.rollout.samples_per_prompt;
    let samples: Vec<Tokens> = samples.iter().filter(is_sample).map(Tokens::from_sample).collect();
    let logprobs = |role: &Role| forward::logprobs(role, &run.ranks.axes, &samples, temperature, tokens_max);
    phase::set(step, phase::Phase::Score);
    phases.time(Phase::Score, || {
        if let Some(reference) = &mut models.reference {
            run.onload(reference);
            scores.ref_logprobs = logprobs(reference);
            run.offload_weights(reference);
        }
        if let Some(critic) = &mut models.critic {
            run.onload(critic);
            scores.values = forward::values(critic, &run.ranks.axes, &samples, tokens_max);
        }
    });
    if run.recomputes_old_logprobs()
        && let Some(actor) = models.actor
    {
        scores.logprobs = phases.time(Phase::OldLogprobs, || logprobs(actor));
    }
    Ok(scores)
}
