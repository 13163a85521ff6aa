//! The metrics of a step, and rows of the banner.

use crate::advantage::AdvantageStats;
use crate::experience::{Experience, Finish};
use crate::launch::run::Run;
use crate::metrics::keys::{self, Metrics, named};

/// Numbers that are known before training begins.
pub fn rollout_values(stats: &AdvantageStats, samples: &[Experience], kl_beta: f32) -> Metrics {
    let n = samples.len() as f64;
    let (mut tokens, mut responses, mut cut, mut values) = (0usize, 0usize, 0usize, 0.0);
    for sample in samples {
        tokens += sample.length();
        responses += sample.response.tokens.len();
        cut += usize::from(sample.response.finish == Finish::Length);
        values += sample.values.iter().map(|v| f64::from(*v)).sum::<f64>();
    }
    let mut all = vec![
        (keys::REWARD_MEAN, stats.reward_mean),
        (keys::REWARD_STD, stats.reward_std),
        (keys::SCORE_MEAN, stats.score_mean),
        (keys::KL_MEAN, stats.kl_mean),
        (keys::KL_COEF, f64::from(kl_beta)),
        (keys::ADVANTAGE_MEAN, stats.advantage_mean),
        (keys::ADVANTAGE_STD, stats.advantage_std),
        (keys::RETURN_MEAN, stats.return_mean),
        (keys::SAMPLES, n),
        (keys::TOKENS, tokens as f64),
        (keys::RESPONSE_TOKENS_MEAN, responses as f64 / n),
        (keys::RESPONSE_TRUNCATED_RATIO, cut as f64 / n),
    ];
    if samples.iter().any(|s| !s.values.is_empty()) {
        all.push((keys::VALUE_MEAN, values / responses.max(1) as f64));
    }
    named(all)
}

/// Rows of the banner about the rollout.
pub fn rollout_notes(run: &Run) -> Vec<(String, String)> {
    let old = match run.recomputes_old_logprobs() {
        true => Some("recomputed by a forward of training (time_old_logprobs_s, sampler_gap_max)".to_string()),
        false if run.has_fast_gemm() => Some("as drawn, with other bits than training's (logprob_gap_max)".to_string()),
        false => None,
    };
    let reason = run.plan.rollout_reason.clone().filter(|_| run.ranks.axes.all.size() > 1);
    let notes = [("old logprobs", old), ("decoding", run.decoding()), ("rollout", reason)];
    notes.into_iter().filter_map(|(name, text)| Some((name.to_string(), text?))).collect()
}
