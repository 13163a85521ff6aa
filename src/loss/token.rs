//! Supervised cross-entropy at the tokens of a text.

/// Loss = sum_t w_t (-l_t), with l the log-probability of the token and w its weight (`aggregation::weights`). Fills
/// dl_t = -w_t.
///
/// With the mask over all tokens this is the loss of pretraining, with the mask over response tokens the loss of SFT.
///
/// # Panics
/// If the lengths differ.
pub fn cross_entropy(logprobs: &[f32], weights: &[f32], dlogprobs: &mut [f32]) -> f64 {
    assert!(weights.len() == logprobs.len() && dlogprobs.len() == logprobs.len(), "one length for all slices");
    let mut loss = 0.0;
    for ((&l, &w), dl) in logprobs.iter().zip(weights).zip(dlogprobs) {
        *dl = -w;
        // A masked token may have any log-probability, -inf included.
        if w != 0.0 {
            loss -= f64::from(w) * f64::from(l);
        }
    }
    loss
}
