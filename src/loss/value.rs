//! The critic's loss.

/// Sums of the value loss over a range of tokens, so that ranges add up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ValueSums {
    /// Weighted sum: these tokens' part of the minibatch's loss.
    pub loss: f64,
    /// Tokens with a weight.
    pub tokens: u64,
    /// Tokens at which the clipped term is the larger, so that no gradient flows.
    pub clipped: u64,
}

/// Loss = sum_t w_t 1/2 max((C_t - R_t)^2, (V_t - R_t)^2), C_t = O_t + clamp(V_t - O_t, -clip, clip), with V the
/// values, O the values at rollout and R the returns. `clip` = 0 keeps only the second term. Fills dV_t = w_t (V_t -
/// R_t), or 0 if the first term is the larger. arXiv:1707.06347 and its reference implementation.
///
/// # Panics
/// If the lengths differ.
pub fn value_loss(
    clip: f32,
    values: &[f32],
    old_values: &[f32],
    returns: &[f32],
    weights: &[f32],
    dvalues: &mut [f32],
) -> ValueSums {
    let n = values.len();
    assert!(old_values.len() == n && returns.len() == n && weights.len() == n && dvalues.len() == n, "one length");
    let mut sums = ValueSums::default();
    let clip = f64::from(clip);
    for t in 0..n {
        let w = f64::from(weights[t]);
        dvalues[t] = 0.0;
        if w == 0.0 {
            continue;
        }
        let (v, old, r) = (f64::from(values[t]), f64::from(old_values[t]), f64::from(returns[t]));
        let error = v - r;
        let clipped = old + (v - old).clamp(-clip, clip) - r;
        sums.tokens += 1;
        if clip > 0.0 && (v - old).abs() > clip && clipped * clipped > error * error {
            sums.clipped += 1;
            sums.loss += 0.5 * w * clipped * clipped;
        } else {
            sums.loss += 0.5 * w * error * error;
            dvalues[t] = (w * error) as f32;
        }
    }
    sums
}
