//! Importance weights for tokens that were sampled with other probabilities than the old ones of the ratio.

use crate::config::method::ppo::Correction;

/// Appends the factor of each token of one whole sequence to `factors`:
/// w_t = exp(old_logprob_t - sample_logprob_t), then
///
/// - `none`: 1
/// - `tis`: clamp(w_t, low, high)
/// - `icepop`: w_t if low <= w_t <= high, else 0
/// - `sequence_mask`: clamp(w_t, low, high) if low <= exp(mean_t ln w_t) <= high over masked tokens, else 0
///
/// No gradient flows through the factor. Source: "Your efficient RL framework secretly brings you off-policy RL
/// training" (Yao et al., 2025) for `tis`; arXiv:2510.18855 for `icepop`.
pub fn factors(
    correction: Correction,
    [low, high]: [f32; 2],
    old_logprobs: &[f32],
    sample_logprobs: &[f32],
    mask: &[u8],
    factors: &mut Vec<f32>,
) {
    assert!(old_logprobs.len() == mask.len() && sample_logprobs.len() == mask.len(), "one length for all slices");
    let log_weight = |t: usize| f64::from(old_logprobs[t]) - f64::from(sample_logprobs[t]);
    let (low, high) = (f64::from(low), f64::from(high));
    let inside = |w: f64| w >= low && w <= high;
    let keep = correction != Correction::SequenceMask || {
        let masked: Vec<usize> = (0..mask.len()).filter(|&t| mask[t] != 0).collect();
        let mean = masked.iter().map(|&t| log_weight(t)).sum::<f64>() / masked.len().max(1) as f64;
        inside(mean.exp())
    };
    factors.extend((0..mask.len()).map(|t| {
        let w = log_weight(t).exp();
        let factor = match correction {
            Correction::None => 1.0,
            Correction::Tis => w.clamp(low, high),
            Correction::Icepop if inside(w) => w,
            Correction::SequenceMask if keep => w.clamp(low, high),
            Correction::Icepop | Correction::SequenceMask => 0.0,
        };
        factor as f32
    }));
}
