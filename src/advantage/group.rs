//! Shaping a score by the other samples of its prompt.

use super::details::{Details, GroupStd};
use crate::config::method::ppo::Estimator;
use crate::experience::Experience;
use std::collections::{BTreeMap, BTreeSet};

/// The unbiased standard deviation of scores, or the one of the population.
fn deviation(scores: &[f64], is_population: bool) -> f64 {
    let n = scores.len() as f64;
    let mean = scores.iter().sum::<f64>() / n;
    let degrees = if is_population { n } else { n - 1.0 };
    (scores.iter().map(|r| (r - mean) * (r - mean)).sum::<f64>() / degrees).sqrt()
}

/// Shapes the scores R_1 .. R_n of one group in place, with mean m and the standard deviation s of `details`, for a job
/// the unbiased one of the group. `of_batch` is the one of all groups.
///
/// - `rloo`: R_i - mean of the others (arXiv:2402.14740)
/// - `grpo`: (R_i - m) / (s + epsilon), epsilon = 1e-9 (arXiv:2402.03300)
/// - `gdpo`: the same for each reward by itself (arXiv:2601.05242)
/// - `dr-grpo`, `reinforce++-baseline`: R_i - m (arXiv:2503.20783, arXiv:2501.03262)
fn shape_group(estimator: Estimator, details: &Details, of_batch: f64, scores: &mut [f64]) {
    assert!(scores.len() > 1, "a group of one has no baseline");
    let n = scores.len() as f64;
    let sum: f64 = scores.iter().sum();
    let mean = sum / n;
    let std = match details.group_std {
        GroupStd::Batch => of_batch,
        of_group => deviation(scores, of_group == GroupStd::Population),
    };
    for score in scores {
        *score = match estimator {
            Estimator::Rloo => *score - (sum - *score) / (n - 1.0),
            Estimator::Grpo | Estimator::Gdpo => (*score - mean) / (std + details.group_epsilon),
            _ => *score - mean,
        };
    }
}

/// Computes the sum over the rewards k of w_k (R_ik - m_k) / (s_k + 1e-9). Mean and deviation are over the samples of
/// the group that k scored. The part that length penalties removed from the sum of the rewards counts as one more
/// reward of weight 1.
fn shape_decoupled(details: &Details, weights: &BTreeMap<String, f32>, scores: &mut [f64], group: &[Experience]) {
    let names: BTreeSet<&String> = group.iter().flat_map(|sample| sample.scores.keys()).collect();
    let mut sums: Vec<f64> = scores.iter().zip(group).map(|(score, sample)| score - f64::from(sample.score)).collect();
    let of_group = &Details { group_std: GroupStd::Sample, ..*details };
    shape_group(Estimator::Gdpo, of_group, 0.0, &mut sums);
    for name in names {
        let known: Vec<usize> = (0..group.len()).filter(|&i| group[i].scores.contains_key(name)).collect();
        let mut of_reward: Vec<f64> = known.iter().map(|&i| f64::from(group[i].scores[name])).collect();
        // A single scored sample has no others to compare with.
        if known.len() > 1 {
            shape_group(Estimator::Gdpo, of_group, 0.0, &mut of_reward);
            let weight = f64::from(weights.get(name).copied().unwrap_or(1.0));
            known.iter().zip(of_reward).for_each(|(&i, score)| sums[i] += weight * score);
        }
    }
    scores.copy_from_slice(&sums);
}

/// Shapes the scores of the samples of each prompt, which are consecutive.
pub fn shape(
    estimator: Estimator,
    details: &Details,
    weights: &BTreeMap<String, f32>,
    scores: &mut [f64],
    samples: &[Experience],
) {
    assert!(samples.is_sorted_by_key(|sample| sample.response.prompt), "samples of a prompt are consecutive");
    let (mut start, of_batch) = (0, deviation(scores, false));
    for group in samples.chunk_by(|a, b| a.response.prompt == b.response.prompt) {
        let own = &mut scores[start..start + group.len()];
        match estimator {
            Estimator::Gdpo => shape_decoupled(details, weights, own, group),
            _ => shape_group(estimator, details, of_batch, own),
        }
        start += group.len();
    }
}

/// The share of prompts with several samples whose scores are all equal. `None` if no prompt has several.
pub fn equal_ratio(scores: &[f64], samples: &[Experience]) -> Option<f64> {
    let (mut groups, mut equal, mut start) = (0, 0, 0);
    for group in samples.chunk_by(|a, b| a.response.prompt == b.response.prompt) {
        let own = &scores[start..start + group.len()];
        start += group.len();
        groups += usize::from(own.len() > 1);
        equal += usize::from(own.len() > 1 && own.iter().all(|score| *score == own[0]));
    }
    (groups > 0).then(|| equal as f64 / groups as f64)
}
