//! Decode steps as CUDA graphs: while the same sequences run, each step is one launch.
//!
//! The `DecodeState` on the GPU (`device::cuda::decode`) advances from token to token by itself, including sampling and
//! all ends that only tokens decide. The host reads the tokens of a step while the next step runs. It records tokens,
//! searches for stop texts, and adds pages before they are needed. Results of the next step for a sequence that has
//! ended meanwhile are dropped. Before other sequences run, the row tables are filled again.
//!
//! A token costs a download of 16 bytes, and an upload of 4 bytes per row in steps in which a row reaches a new page (4
//! bytes for each cache group). A
//! step without graphs starts every kernel (21 for two layers of a Llama), makes 14 uploads and waits for 3 downloads.
//!
//! # Ranks that share matrices
//!
//! The tensor ranks launch the same graphs in the same order, which the collectives in them require, without exchanging
//! messages in each step:
//!
//! - They have the same requests, the same schedule (`Engine::make_cache` agrees on its pages) and the same sampled
//!   tokens in each step. Each row is sampled by one rank, with the counter (step, prompt, sample, token) as its key,
//!   and gathered to all. So `Live`, `Scheduler` and the tables are equal on all ranks before each step. Decisions that
//!   depend only on them are equal, too: the sequences that decode (`batch`), the `Shape` of each step, and the ends of
//!   rows and of batches (`accept_draws`). An error of `accept_draws` occurs on all ranks.
//! - Facts that only one rank may know are shared by MPI, at the same step on all ranks: that its caller wants to end
//!   (`goes_on`, every `ASKED_EVERY` steps), that its weights have moved (`make_room`), and that a capture failed
//!   (`capture`).
//!
//! A graph is captured on all ranks before it is launched on any. If one rank cannot capture it, all ranks permanently
//! continue without graphs.
//!
//! Graphs read weights at fixed addresses. The weights of one call do not move. Between calls they may: with ZeRO-3 or
//! another layout of training, the rollout gathers weights again for each phase. Then the graphs are captured again.

use super::Request;
use super::blocks::GroupPages;
use super::hooks::Hooks;
use super::run::{Decoder, Run, Shape};
use super::steps::DecodeSteps;
use crate::comm::Calls;
use crate::device::cuda::decode::{Capacity, DecodeSlot, DecodeState, Draw, ENDED, UNCHANGED};
use crate::device::cuda::gpu;
use crate::device::cuda::graph::Graphs;
use crate::device::cuda::kv_cache::is_split_best;
use crate::device::cuda::readback::Late;
use crate::device::null;
use crate::error::{Error, Result};
use crate::experience::Finish;
use crate::model::Kept;
use crate::ops::attention::PAGE;
use crate::ops::sample::{SampleParams, Sampled};
use crate::rng::Rng;
use crate::sys::trace::{self, Category};

/// Limits for idle slots while prompts wait: fewer than one slot in this many may be idle, for fewer steps than this.
/// Reading a prompt costs a forward outside of graphs, which is worth it for several prompts. This value is estimated,
/// not measured.
const IDLE_SHARE: usize = 16;

/// The number of steps after which ranks that share matrices check whether one of them wants to end, because none may
/// end alone. A message between hosts takes much less time than this many steps.
const ASKED_EVERY: usize = 16;

/// The sequences that decode together, row by row.
struct DecodeBatch {
    rows: Vec<Row>,
    /// Rows of the graph.
    bucket: usize,
    launched: usize,
    /// Steps since a slot became idle while a prompt waited.
    idle: usize,
    /// Whether the batch must end because other sequences have to run.
    is_over: bool,
}

struct Row {
    sequence: usize,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    GoesOn,
    /// Ended by the host; the GPU does not know yet.
    EndedByHost,
    Ended,
}

/// The number of rows of the graph that decodes `rows`: 1, 2, 4, 8 and multiples of 8, at most `most`.
pub fn bucket(rows: usize, most: usize) -> usize {
    let padded = if rows <= 8 { rows.next_power_of_two() } else { rows.next_multiple_of(8) };
    padded.min(most).max(rows)
}

impl Run<'_> {
    /// Decodes with graphs while the same sequences run. Returns false, with nothing done, if graphs cannot be used
    /// now.
    pub(super) fn decode(&mut self, hooks: &mut Hooks) -> Result<bool> {
        let Some(mut batch) = self.batch() else { return Ok(false) };
        let mut in_flight: Option<Late> = None;
        loop {
            let next = if self.goes_on(&batch, in_flight.is_some(), hooks) {
                self.launch(&mut batch, usize::from(in_flight.is_some()))
            } else {
                None
            };
            let is_last = next.is_none();
            let _span = trace::span(Category::Pass, "decode with a graph", "sequences", || [batch.rows.len()]);
            if let Some(step) = std::mem::replace(&mut in_flight, next) {
                self.accept_draws(bytemuck::cast_slice(&step.wait_values()), &mut batch, hooks)?;
                self.report(hooks);
            }
            if is_last {
                return Ok(batch.launched > 0);
            }
        }
    }

    fn decoder(&mut self) -> &mut Decoder {
        self.decoder.as_mut().and_then(|kept| kept.as_mut()).expect("a batch has a decoder")
    }

    /// The running sequences, on the GPU, if all of them only decode and their pages are available.
    fn batch(&mut self) -> Option<DecodeBatch> {
        let model = self.model;
        self.decoder.as_ref()?;
        if model.transformer.check_graphs(model.weights).is_err() || self.refused.is_some() {
            return None;
        }
        let sequences = self.scheduler.decoding()?.to_vec();
        if sequences.iter().any(|&s| self.requests[s].needs_host()) {
            return None;
        }
        if !sequences.iter().all(|&s| self.scheduler.extend(s, self.live[s].tokens.len())) {
            return None;
        }
        let bucket = bucket(sequences.len(), self.limits.batch_max);
        for (group, from, to) in self.scheduler.take_copies() {
            model.transformer.kv_copy_page(self.cache, group, from, to);
        }
        self.fill(&sequences, bucket);
        let rows = sequences.into_iter().map(|sequence| Row { sequence, state: State::GoesOn }).collect();
        Some(DecodeBatch { rows, bucket, launched: 0, idle: 0, is_over: false })
    }

    /// Writes the sequences into the tables: for each 64 bytes, its parameters, stop tokens and pages, and the tokens
    /// to penalize.
    fn fill(&mut self, sequences: &[usize], bucket: usize) {
        let (mut lanes, mut params) = (Vec::with_capacity(bucket), Vec::with_capacity(bucket));
        let (mut stops, mut seen) = (Stops::default(), Vec::new());
        // Tables of the groups are equally long, so a row's pages begin at the same place in each.
        let mut pages: Vec<Vec<u32>> = vec![Vec::new(); self.limits.pages.len()];
        for &s in sequences {
            let (request, tokens) = (&self.requests[s], &self.live[s].tokens);
            let new = self.live[s].new_tokens(request);
            let (rng, prompt_id) = self.draws(request);
            let penalised = if is_penalised(request) { &tokens[..] } else { &[] };
            lanes.push(DecodeSlot {
                counter: Rng::sample_counter(request.step.unwrap_or(self.step), prompt_id, request.sample, new as u32),
                key: rng.key(),
                token: *tokens.last().expect("a sequence that decodes has tokens"),
                past: tokens.len() as u32 - 1,
                left: (request.new_tokens_max - new) as u32,
                banned: request.new_tokens_min.saturating_sub(new) as u32,
                stops: stops.range(&request.stop.tokens),
                pages: pages[0].len() as u32,
                ended: 0,
                seen: each_once(&mut seen, penalised),
            });
            params.push(request.params);
            seen.resize(seen.len() + if is_penalised(request) { request.new_tokens_max - new } else { 0 }, 0);
            for (group, pages) in pages.iter_mut().enumerate() {
                let end = pages.len() + self.scheduler.pages_max(s);
                pages.extend_from_slice(self.scheduler.tables(s).of_group(group));
                pages.resize(end.max(pages.len()), 0);
            }
        }
        lanes.resize(bucket, DecodeSlot::idle());
        params.resize(bucket, SampleParams::greedy());
        self.make_room(Capacity { rows: bucket, pages: pages[0].len(), stops: stops.tokens.len(), seen: seen.len() });
        self.decoder().tables.fill(&lanes, &params, &stops.tokens, &seen, &pages);
    }

    /// Makes a decoder, unless there is one whose graphs fit this model.
    fn make_room(&mut self, needed: Capacity) {
        let model = self.model.transformer;
        let places = (model.arch.clone(), model.addresses(self.model.weights));
        let kept = self.decoder.as_mut().expect("graphs are wanted");
        let serves = kept.as_ref().is_some_and(|kept| kept.model == places && kept.tables.room().holds(&needed));
        // Addresses differ between ranks. If they have changed on one rank, all capture their graphs again.
        if !model.tensor().any(!serves) {
            return;
        }
        // The old graphs and tables are freed first.
        **kept = None;
        let longest = (0..self.requests.len()).map(|s| self.scheduler.pages_max(s)).max().unwrap_or(0);
        let rows = bucket(self.limits.batch_max.min(self.requests.len()), self.limits.batch_max).max(needed.rows);
        let pages = (rows * longest).max(needed.pages);
        let penalised = self.requests.iter().filter(|r| is_penalised(r)).map(|r| r.tokens.len() + r.new_tokens_max);
        let seen = (rows * penalised.max().unwrap_or(0)).max(needed.seen);
        let room = Capacity { rows, pages, stops: needed.stops.next_multiple_of(64), seen };
        // A row without a window is not longer than its cache.
        let pages_max = |group: &GroupPages| if group.kept == Kept::All { group.pages } else { usize::MAX };
        let longest = self.limits.pages.iter().map(pages_max).fold(pages, usize::min) * PAGE;
        let cache_pages: Vec<usize> = self.limits.pages.iter().map(|group| group.pages).collect();
        **kept = Some(Decoder {
            changes: vec![UNCHANGED; rows * cache_pages.len()],
            tables: DecodeState::new(room, cache_pages, longest),
            graphs: Graphs::default(),
            calls: Vec::new(),
            ends: model.ends_on_gpu(),
            // The most that a rank has of them, as all ranks must have the same graphs.
            multiprocessors: model.tensor().max(gpu().properties().multiprocessors as f64) as usize,
            model: places,
        });
    }

    /// Whether a further step may be started. The caller of `decode` has checked before the first one.
    fn goes_on(&mut self, batch: &DecodeBatch, asks: bool, hooks: &Hooks) -> bool {
        // A null device needs the results of a step before it skips the following steps.
        if batch.is_over || (asks && self.steps != DecodeSteps::All) {
            return false;
        }
        let tensor = self.model.transformer.tensor();
        if tensor.size() == 1 {
            self.stopped |= asks && self.failed.is_ok() && hooks.stops();
            return !self.stopped && self.failed.is_ok();
        }
        // The number of steps is the same on all ranks. `is_over` then finds out which rank ends and why.
        if batch.launched == 0 || !batch.launched.is_multiple_of(ASKED_EVERY) {
            return true;
        }
        self.stopped |= hooks.stops();
        !tensor.any(self.stopped || self.failed.is_err())
    }

    /// Starts a step, if some row has a next token and pages are available. `ahead` steps are in flight.
    fn launch(&mut self, batch: &mut DecodeBatch, ahead: usize) -> Option<Late> {
        let mut shape = Shape { rows: batch.bucket, longest: None, bans: false, sees: false };
        let (mut longest, mut is_changed) = (0, false);
        let mut changes = std::mem::take(&mut self.decoder().changes);
        changes.fill(UNCHANGED);
        let groups = self.limits.pages.len();
        for (row, change) in batch.rows.iter_mut().zip(changes.chunks_exact_mut(groups)) {
            if row.state == State::EndedByHost {
                (row.state, change[0], is_changed) = (State::Ended, ENDED, true);
            }
            let (request, s) = (&self.requests[row.sequence], row.sequence);
            let new = self.live[s].new_tokens(request) + ahead;
            if row.state != State::GoesOn || new >= request.new_tokens_max {
                continue;
            }
            let tokens = self.live[s].tokens.len() + ahead;
            if !self.scheduler.extend(s, tokens) {
                longest = 0;
                break;
            }
            longest = longest.max(tokens);
            shape.bans |= new < request.new_tokens_min && !request.stop.tokens.is_empty();
            shape.sees |= is_penalised(request);
            if (tokens - 1).is_multiple_of(PAGE) {
                change.copy_from_slice(&self.scheduler.tables(s).pages_at((tokens - 1) / PAGE));
                is_changed = true;
            }
        }
        let transformer = self.model.transformer;
        // The most that a rank has of them, as all ranks must have the same graphs.
        let kv_heads = transformer.arch.attentions().map(|layer| layer.kv_heads).max().unwrap_or(1);
        let kv_heads = kv_heads.div_ceil(transformer.tensor().size());
        let multiprocessors = self.decoder().multiprocessors;
        shape.longest =
            is_split_best(shape.rows, kv_heads, longest, multiprocessors).then(|| longest.next_power_of_two());
        let times = self.begin_forward(true, batch.rows.iter().map(|row| row.sequence));
        let starts = longest > 0 && null::times(times, || self.capture(shape, ahead));
        if starts && is_changed {
            self.decoder().tables.change(&changes[..batch.bucket * groups]);
        }
        self.decoder().changes = changes;
        starts.then(|| {
            batch.launched += 1;
            self.start(shape)
        })
    }

    /// Captures the graph of a shape, unless it exists. `ahead` steps are in flight. Returns false if a rank cannot
    /// capture it: then none tries again in this call of `generate`.
    fn capture(&mut self, shape: Shape, ahead: usize) -> bool {
        let model = self.model;
        let decoder = self.decoder.as_mut().and_then(|kept| kept.as_mut()).expect("a batch has a decoder");
        if decoder.graphs.has(&shape) {
            return true;
        }
        // A graph must not read what a prefill dequantized: it is freed before the replays end.
        model.weights.release();
        let Shape { rows, longest, bans, sees } = shape;
        let (tables, ends, cache) = (&mut decoder.tables, &decoder.ends, &mut *self.cache);
        let mut step = |tables: &mut DecodeState| {
            model.transformer.decode(model.weights, tables, rows, longest, (ends, bans || sees), cache);
            if sees {
                tables.see(rows);
            }
        };
        let tensor = model.transformer.tensor();
        // GPUs join and allocate memory at their first calls of each kind, so the calls are made here. Within a batch
        // they were made before, and no call may be launched next to a graph.
        if tensor.size() > 1 && ahead == 0 {
            null::times(0.0, || tables.rehearse(&mut step));
        }
        let (made, calls) = Calls::capture(|| decoder.graphs.capture(shape, || step(tables)));
        decoder.calls.retain(|(of, _)| decoder.graphs.has(of));
        decoder.calls.push((shape, calls));
        let why = made.err().map(|why| format!("{why} (rank {} of the tensor axis)", tensor.rank()));
        *self.refused = tensor.first_words(why.as_deref().unwrap_or_default());
        self.refused.is_none()
    }

    /// One launch, followed by one copy of 16 bytes per row to the host.
    fn start(&mut self, shape: Shape) -> Late {
        let decoder = self.decoder();
        decoder.graphs.replay(&shape);
        if let Some((_, calls)) = decoder.calls.iter().find(|(of, _)| *of == shape) {
            calls.launched();
        }
        let drawn = decoder.tables.fetch(shape.rows);
        self.outcome.forwards += 1;
        self.outcome.graph_steps += 1;
        drawn
    }

    /// Records the sampled tokens of a step. The next step may be in flight.
    fn accept_draws(&mut self, drawn: &[Draw], batch: &mut DecodeBatch, hooks: &mut Hooks) -> Result<()> {
        for (i, row) in batch.rows.iter_mut().enumerate() {
            if row.state != State::GoesOn {
                continue;
            }
            let (s, Draw { token, logprob, sample_logprob, state }) = (row.sequence, drawn[i]);
            self.outcome.tokens_fed += 1;
            self.scheduler.decoded(s);
            let sampled = Sampled { token, logprob, sample_logprob };
            if self.accept(s, sampled, hooks)? {
                row.state = if state == Draw::ENDS { State::Ended } else { State::EndedByHost };
            }
            self.skip(s, sampled);
            // Ends that depend only on tokens are the same on the GPU and on the host.
            let finish = self.outcome.responses[s].as_ref().map(|response| response.finish);
            let is_known = match finish {
                // A GPU that runs no step knows no ends.
                _ if self.steps != DecodeSteps::All => true,
                None => state == Draw::GOES_ON,
                Some(Finish::StopString) => state != Draw::IDLE,
                Some(_) => state == Draw::ENDS,
            };
            if !is_known {
                let id = self.requests[s].prompt_id;
                return Err(Error::fault(format!(
                    "prompt {id}: GPU and host disagree on its end (state {state} on the GPU, {finish:?} on the host)"
                )));
            }
        }
        let left = batch.rows.iter().filter(|row| row.state == State::GoesOn).count();
        batch.is_over = left == 0 || bucket(left, self.limits.batch_max) < batch.bucket || self.is_one_to_admit(batch);
        Ok(())
    }

    /// Whether waiting prompts are worth an ordinary forward.
    fn is_one_to_admit(&self, batch: &mut DecodeBatch) -> bool {
        let Some(lanes) = self.scheduler.admissible() else { return false };
        batch.idle += 1;
        lanes * IDLE_SHARE >= self.limits.batch_max || batch.idle >= IDLE_SHARE
    }
}

fn is_penalised(request: &Request) -> bool {
    request.params.repetition_penalty != 1.0
}

/// Adds the tokens of `list`, each once, to the tokens of all rows. Returns their range.
fn each_once(all: &mut Vec<u32>, list: &[u32]) -> [u32; 2] {
    let mut list = list.to_vec();
    list.sort_unstable();
    list.dedup();
    let start = all.len();
    all.append(&mut list);
    [start, all.len()].map(|at| at as u32)
}

/// Stop tokens of all rows. Equal lists are stored once.
#[derive(Default)]
struct Stops<'a> {
    lists: Vec<(&'a [u32], [u32; 2])>,
    tokens: Vec<u32>,
}

impl<'a> Stops<'a> {
    /// The range of the tokens of `list`, each once.
    fn range(&mut self, list: &'a [u32]) -> [u32; 2] {
        if let Some((_, range)) = self.lists.iter().find(|(known, _)| *known == list) {
            return *range;
        }
        let range = each_once(&mut self.tokens, list);
        self.lists.push((list, range));
        range
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_hold_their_rows_and_are_few() {
        assert_eq!([1, 2, 3, 5, 8, 9, 17, 64].map(|rows| bucket(rows, 256)), [1, 2, 4, 8, 8, 16, 24, 64]);
        assert_eq!([5, 9, 10].map(|rows| bucket(rows, 10)), [8, 10, 10]);
    }

    #[test]
    fn rows_with_equal_stop_tokens_share_one_list() {
        let mut stops = Stops::default();
        let ranges = [&[5, 2, 5][..], &[], &[5, 2, 5], &[7]].map(|list| stops.range(list));
        assert_eq!((ranges, stops.tokens), ([[0, 2], [2, 2], [0, 2], [2, 3]], vec![2, 5, 7]));
    }
}
