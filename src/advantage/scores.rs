//! The rewards of a sample's tokens from its score: normalization, length penalties, clipping, placement.

use serde::{Deserialize, Serialize};

use crate::config::method::ppo::PpoConfig;
use crate::experience::{Experience, Finish};

/// Count, mean and sum of squared deviations of all scores so far, merged batch by batch (Chan, Golub, LeVeque 1979).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunningMoments {
    pub count: u64,
    pub mean: f64,
    /// Sum of squared deviations from the mean.
    pub deviation: f64,
}

impl RunningMoments {
    /// Adds the batch, then returns (score - mean) / sqrt(max(variance, 1e-8)) with the population variance.
    pub fn normalize(&mut self, scores: &[f64]) -> Vec<f64> {
        self.merge(scores);
        self.scale(scores)
    }

    /// The same without adding it.
    pub fn scale(&self, scores: &[f64]) -> Vec<f64> {
        let variance = self.deviation / self.count.max(1) as f64;
        let std = variance.max(1e-8).sqrt();
        scores.iter().map(|score| (score - self.mean) / std).collect()
    }

    fn merge(&mut self, scores: &[f64]) {
        if scores.is_empty() {
            return;
        }
        let (old, new) = (self.count as f64, scores.len() as f64);
        let mean = scores.iter().sum::<f64>() / new;
        let gap = mean - self.mean;
        self.deviation += scores.iter().map(|s| (s - mean) * (s - mean)).sum::<f64>();
        self.deviation += gap * gap * old * new / (old + new);
        self.mean += gap * new / (old + new);
        self.count += scores.len() as u64;
    }
}

/// score <- score - min(len - (max - buffer), buffer) / buffer * penalty if len > max - buffer, len in response tokens
/// (arXiv:2503.14476, section 3.4).
pub fn penalize_overlong(config: &PpoConfig, scores: &mut [f64], samples: &[Experience]) {
    let (buffer, max) = (config.overlong_buffer_tokens, config.overlong_tokens_max);
    if buffer == 0 {
        return;
    }
    for (score, sample) in scores.iter_mut().zip(samples) {
        let over = sample.response.tokens.len().saturating_sub(max - buffer).min(buffer);
        *score -= over as f64 / buffer as f64 * f64::from(config.overlong_penalty);
    }
}

/// For samples cut by length: score <- c score if c >= 0, c if c < 0 (arXiv:2505.24864).
pub fn shape_truncated(config: &PpoConfig, scores: &mut [f64], samples: &[Experience]) {
    let c = f64::from(config.truncated_score_coef);
    for (score, _) in scores.iter_mut().zip(samples).filter(|(_, s)| s.response.finish == Finish::Length) {
        *score = if c < 0.0 { c } else { c * *score };
    }
}

/// Leaves samples cut by length out of the losses: their masks become 0 (overlong filtering, arXiv:2503.14476, section
/// 3.4).
pub fn mask_truncated(samples: &mut [Experience]) {
    let cut = samples.iter_mut().filter(|sample| sample.response.finish == Finish::Length);
    cut.for_each(|sample| sample.mask.fill(0));
}

/// rewards_t = -beta kl_t, plus the score at the last learned token; 0 if mask is 0. Without a learned token the score
/// is not placed.
pub fn place(beta: f64, score: f64, sample: &mut Experience) {
    let last = sample.mask.iter().rposition(|&m| m != 0);
    sample.rewards.clear();
    sample.rewards.extend(sample.mask.iter().zip(&sample.kl).enumerate().map(|(t, (&m, &kl))| {
        let penalty = if m == 0 { 0.0 } else { -beta * f64::from(kl) };
        let bonus = if Some(t) == last { score } else { 0.0 };
        (penalty + bonus) as f32
    }));
}
