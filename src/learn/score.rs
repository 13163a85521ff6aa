//! Forward passes without a backward: log-probabilities of the actor or the reference, and values of the critic.
//!
//! Every rank of the mesh holds all samples and takes the micro-batches that the plan over all data ranks gives it,
//! whoever sampled them; all ranks get all results.

use crate::comm::Axes;
use crate::data::balance::{self, Cost};
use crate::device::null;
use crate::experience::{Experience, SamplingMask};
use crate::learn::Role;
use crate::learn::packed::PackedRow;
use crate::ops::linear_logprob::Extra;
use crate::ops::zigzag;
use crate::tensor::arena::Buffer;
use crate::tensor::{Flat, Later, Tensor};
use std::borrow::Cow;

/// A sequence whose tokens behind a prompt are scored.
pub trait Sequence {
    fn tokens(&self) -> Vec<u32>;
    fn prompt_tokens(&self) -> usize;
    fn length(&self) -> usize;

    /// What its scored tokens were drawn among, where that was kept.
    fn masks(&self) -> &[SamplingMask] {
        &[]
    }
}

impl Sequence for Experience {
    fn tokens(&self) -> Vec<u32> {
        Experience::tokens(self)
    }

    fn prompt_tokens(&self) -> usize {
        self.prompt.tokens.len()
    }

    fn length(&self) -> usize {
        Experience::length(self)
    }

    fn masks(&self) -> &[SamplingMask] {
        &self.response.sampling_masks
    }
}

/// Tokens, of which the first `prompt_tokens` are the prompt.
pub struct Tokens<'a> {
    pub tokens: Cow<'a, [u32]>,
    pub prompt_tokens: usize,
}

impl Sequence for Tokens<'_> {
    fn tokens(&self) -> Vec<u32> {
        self.tokens.to_vec()
    }

    fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    fn length(&self) -> usize {
        self.tokens.len()
    }
}

/// Log-probabilities of each sample's response tokens at the rollout's temperature. All ranks of the mesh call this.
pub fn logprobs(
    role: &Role,
    axes: &Axes,
    samples: &[impl Sequence],
    temperature: f32,
    tokens_max: usize,
) -> Vec<Vec<f32>> {
    let (model, w) = (&role.transformer, &role.weights);
    over_plan(role, axes, samples, tokens_max, 0, |row, hidden| {
        model.logprobs_on_device(w, hidden, &row.rows, row.masked_targets(), temperature, Extra::Nothing)
    })
}

/// Values of each sample: before each response token, and one after the last. All ranks of the mesh call this.
pub fn values(role: &Role, axes: &Axes, samples: &[impl Sequence], tokens_max: usize) -> Vec<Vec<f32>> {
    over_plan(role, axes, samples, tokens_max, 1, |row, hidden| {
        role.transformer.values_on_device(&role.weights, hidden, &row.rows)
    })
}

/// The samples' tokens; scored are the states before response tokens and, where `last` is 1, that after the last one.
fn pack(samples: &[impl Sequence], rows: &[usize], last: usize) -> PackedRow {
    let mut packed = PackedRow::new();
    for &i in rows {
        packed.push_response(&samples[i].tokens(), samples[i].prompt_tokens(), samples[i].masks());
        if last == 1 {
            packed.look_at_end();
        }
    }
    packed
}

/// One value for each state of every sample that `pack` scores: `score` gives those of a packed row from its hidden state.
fn over_plan(
    role: &Role,
    axes: &Axes,
    samples: &[impl Sequence],
    tokens_max: usize,
    last: usize,
    score: impl Fn(&PackedRow, &Tensor) -> Flat,
) -> Vec<Vec<f32>> {
    let lengths: Vec<usize> = samples.iter().map(Sequence::length).collect();
    let parts = axes.sequence.size();
    let plan = balance::plan(&lengths, axes.data.size(), tokens_max * parts, &Cost::of(role.arch()));
    role.weights.buffers().for_each(Buffer::prefetch);
    let mut mine = Vec::new();
    // The values of a micro-batch are read when the GPU has started the next one.
    let mut before: Option<Later> = None;
    let own = &plan[axes.data.rank()];
    for (rows, times) in own.iter().zip(null::represented(own, &lengths)).filter(|(_, times)| *times > 0.0) {
        let row = pack(samples, rows, last).shard(&axes.sequence);
        let forward = || role.transformer.forward(&role.weights, &row.tokens, &row.positions, row.keys(), None);
        let found = null::times(times, || score(&row, &forward())).later();
        mine.extend(before.replace(found).map(Later::take).unwrap_or_default());
    }
    mine.extend(before.map(Later::take).unwrap_or_default());
    role.weights.release();
    role.weights.buffers().for_each(Buffer::evict);
    let mut found: Vec<Vec<f32>> = samples.iter().map(|s| vec![0.0; s.length() - s.prompt_tokens() + last]).collect();
    let gathered = axes.zero.all_gather_numbers(&mine);
    if null::is_active() {
        // No rank is there but this one.
        return found;
    }
    for (rank, values) in gathered.into_iter().enumerate() {
        let (data, part) = (rank / parts, rank % parts);
        let mut values = values.into_iter();
        for &i in plan[data].iter().flatten() {
            let first = samples[i].prompt_tokens().saturating_sub(1);
            for position in zigzag::positions(&[0, lengths[i]], part, parts) {
                let state = (position as usize).wrapping_sub(first);
                if state < found[i].len() {
                    found[i][state] = values.next().expect("a value for each state held there");
                }
            }
        }
        assert!(values.next().is_none(), "a state for each value");
    }
    found
}
