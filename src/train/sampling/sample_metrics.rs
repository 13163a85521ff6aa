//! The metrics of a step's samples before anything is learned from them.

use crate::advantage::AdvantageStats;
use crate::experience::{Experience, Finish};
use crate::metrics::keys::{self, Metrics, named};

/// Metrics of samples, independent of the loss.
pub fn sampled_values(samples: &[Experience]) -> Metrics {
    let n = samples.len() as f64;
    let (mut tokens, mut responses, mut cut) = (0usize, 0usize, 0usize);
    for sample in samples {
        tokens += sample.length();
        responses += sample.response.tokens.len();
        cut += usize::from(sample.response.finish == Finish::Length);
    }
    named([
        (keys::SAMPLES, n),
        (keys::TOKENS, tokens as f64),
        (keys::RESPONSE_TOKENS_MEAN, responses as f64 / n),
        (keys::RESPONSE_TRUNCATED_RATIO, cut as f64 / n),
    ])
}

/// Metrics of rewards and advantages that are known before training begins.
pub fn advantage_values(stats: &AdvantageStats, samples: &[Experience], kl_beta: f32) -> Metrics {
    let mut all = vec![
        (keys::REWARD_MEAN, stats.reward_mean),
        (keys::REWARD_STD, stats.reward_std),
        (keys::REWARD_CLIPPED_RATIO, stats.clipped_ratio),
        (keys::SCORE_MEAN, stats.score_mean),
        (keys::KL_MEAN, stats.kl_mean),
        (keys::KL_COEF, f64::from(kl_beta)),
        (keys::ADVANTAGE_MEAN, stats.advantage_mean),
        (keys::ADVANTAGE_STD, stats.advantage_std),
        (keys::RETURN_MEAN, stats.return_mean),
    ];
    all.extend(stats.greedy_mean.map(|mean| (keys::SCORE_GREEDY_MEAN, mean)));
    all.extend(stats.equal_groups_ratio.map(|ratio| (keys::EQUAL_GROUPS_RATIO, ratio)));
    if samples.iter().any(|s| !s.values.is_empty()) {
        // Tokens of an environment are not learned from.
        let tokens = samples.iter().flat_map(|s| s.values.iter().zip(&s.mask)).filter(|(_, mask)| **mask != 0);
        let (sum, count) = tokens.fold((0.0, 0usize), |(sum, count), (value, _)| (sum + f64::from(*value), count + 1));
        all.push((keys::VALUE_MEAN, sum / count.max(1) as f64));
    }
    named(all)
}
