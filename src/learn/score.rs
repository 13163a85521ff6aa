//! Forward passes without a backward: log-probabilities of the actor or the reference, and values of the critic.
//!
//! Every rank of the mesh holds all samples, and scores its micro-batches of the plan over all data ranks, independent
//! of who sampled them. All ranks get all results.

use crate::comm::Axes;
use crate::data::balance::{self, Cost};
use crate::device::null;
use crate::learn::packed::{PackedRow, Tokens};
use crate::learn::{HeadPass, Role, head_pass};
use crate::ops::linear_logprob::Extra;
use crate::ops::zigzag;
use crate::sys::trace::{self, Category};
use crate::tensor::arena::Buffer;
use crate::tensor::{Flat, Later};

/// Log-probabilities of each sample's response tokens at the rollout's temperature. All ranks of the mesh call this.
pub fn logprobs(role: &Role, axes: &Axes, samples: &[Tokens], temperature: f32, tokens_max: usize) -> Vec<Vec<f32>> {
    over_plan(role, axes, samples, tokens_max, 0, |head| head.logprobs_on_device(temperature, Extra::Nothing))
}

/// The values of each sample: before each response token, and one after the last. All ranks of the mesh call this.
pub fn values(role: &Role, axes: &Axes, samples: &[Tokens], tokens_max: usize) -> Vec<Vec<f32>> {
    over_plan(role, axes, samples, tokens_max, 1, |head| head.values_on_device())
}

/// Packs the samples' tokens. The states before response tokens are scored and, if `last` is 1, the state after the
/// last one.
fn pack(samples: &[Tokens], rows: &[usize], last: usize) -> PackedRow {
    let mut packed = PackedRow::new();
    for Tokens { tokens, prompt_tokens, masks, images } in rows.iter().map(|&i| &samples[i]) {
        packed.push_response(tokens, *prompt_tokens, masks);
        packed.see(images);
        if last == 1 {
            packed.push_last_state();
        }
    }
    packed
}

/// One value for each state of every sample that `pack` scores. `score` returns the values of a packed row.
fn over_plan(
    role: &Role,
    axes: &Axes,
    samples: &[Tokens],
    tokens_max: usize,
    last: usize,
    score: impl Fn(HeadPass) -> Flat,
) -> Vec<Vec<f32>> {
    let lengths: Vec<usize> = samples.iter().map(|sample| sample.tokens.len()).collect();
    let parts = axes.sequence.size();
    let plan = balance::plan(&lengths, axes.data.size(), tokens_max * parts, &Cost::from_arch(role.arch()));
    role.weights.buffers().for_each(Buffer::prefetch);
    let mut mine = Vec::new();
    // The values of a micro-batch are read after the GPU has started the next one.
    let mut before: Option<Later> = None;
    let own = &plan[axes.data.rank()];
    let times = null::represented(own, &lengths, 1);
    let own: Vec<_> = own.iter().zip(times).filter(|(_, times)| *times > 0.0).collect();
    for (i, chunk) in role.transformer.passes(own.len()) {
        let (rows, times) = own[i];
        let numbers = || [rows.iter().map(|&row| lengths[row]).sum(), rows.len()];
        let _span = trace::span(Category::Pass, "micro-batch", "tokens rows", numbers);
        let row = pack(samples, rows, last).shard(&axes.sequence);
        if !role.transformer.has_head(chunk) {
            null::times(times, || head_pass::relay(role, chunk, &row));
            continue;
        }
        let found = null::times(times, || score(HeadPass::forward(role, &row))).later();
        mine.extend(before.replace(found).map(Later::into_values).unwrap_or_default());
    }
    mine.extend(before.map(Later::into_values).unwrap_or_default());
    role.weights.release();
    role.weights.buffers().for_each(Buffer::evict);
    let room = |s: &Tokens| vec![0.0; s.tokens.len() - s.prompt_tokens + last];
    let mut found: Vec<Vec<f32>> = samples.iter().map(room).collect();
    // The sample and the state of each value of a rank.
    let places = |rank: usize| -> Vec<(usize, usize)> {
        let of_sample = |&i: &usize| {
            let (first, states) = (samples[i].prompt_tokens.saturating_sub(1), found[i].len());
            let positions = zigzag::positions(&[0, lengths[i]], rank % parts, parts).into_iter();
            let of_state = move |position: u32| (position as usize).wrapping_sub(first);
            positions.map(of_state).filter(move |state| *state < states).map(move |state| (i, state))
        };
        plan[rank / parts].iter().flatten().flat_map(of_sample).collect()
    };
    let places: Vec<Vec<(usize, usize)>> = (0..axes.zero.size()).map(places).collect();
    let counts: Vec<usize> = places.iter().map(Vec::len).collect();
    let values = axes.of_last_stage(|| axes.zero.all_gather_counts(&mine, &counts).concat());
    for ((i, state), value) in places.concat().into_iter().zip(values) {
        found[i][state] = value;
    }
    found
}
