//! Forward passes that only look: log-probabilities of the reference and values of the critic.

use super::role::Role;
use crate::data::packing;
use crate::experience::Experience;
use crate::gradient::microbatch::PackedRow;
use crate::tensor::arena::Buffer;

/// Calls `each(indices of the samples, their packed row)` for rows of at most `tokens_max` tokens.
fn packed(samples: &[Experience], tokens_max: usize, mut each: impl FnMut(&[usize], &PackedRow)) {
    let lengths: Vec<usize> = samples.iter().map(Experience::length).collect();
    for part in packing::microbatches(&lengths, tokens_max) {
        let mut row = PackedRow::new();
        for &i in &part {
            row.push(&samples[i].tokens(), samples[i].prompt.tokens.len());
        }
        each(&part, &row);
    }
}

/// Fills `ref_logprobs`: of the response tokens, at the rollout's temperature.
pub fn reference_logprobs(role: &Role, samples: &mut [Experience], temperature: f32, tokens_max: usize) {
    let mut found = vec![Vec::new(); samples.len()];
    role.weights.buffers().for_each(Buffer::prefetch);
    packed(samples, tokens_max, |part, row| {
        let hidden = role.transformer.forward(&role.weights, &row.tokens, &row.positions, row.keys(), None);
        let (logprobs, _) =
            role.transformer.logprobs(&role.weights, &hidden, &row.rows, &row.targets, temperature, false);
        for (i, ends) in part.iter().zip(row.row_offsets.windows(2)) {
            found[*i] = logprobs[ends[0]..ends[1]].to_vec();
        }
    });
    role.weights.buffers().for_each(Buffer::evict);
    samples.iter_mut().zip(found).for_each(|(sample, logprobs)| sample.ref_logprobs = logprobs);
}

/// Fills `values` (before each response token) and `last_value` (after the last).
pub fn values(role: &Role, samples: &mut [Experience], tokens_max: usize) {
    let mut found = vec![(Vec::new(), 0.0); samples.len()];
    packed(samples, tokens_max, |part, row| {
        let hidden = role.transformer.forward(&role.weights, &row.tokens, &row.positions, row.keys(), None);
        let values = role.transformer.values(&role.weights, &hidden, &row.rows);
        let lasts: Vec<u32> = row.cu_seqlens[1..].iter().map(|end| (end - 1) as u32).collect();
        let last_values = role.transformer.values(&role.weights, &hidden, &lasts);
        for ((i, ends), last) in part.iter().zip(row.row_offsets.windows(2)).zip(last_values) {
            found[*i] = (values[ends[0]..ends[1]].to_vec(), last);
        }
    });
    for (sample, (values, last)) in samples.iter_mut().zip(found) {
        sample.values = values;
        sample.last_value = last;
    }
}
