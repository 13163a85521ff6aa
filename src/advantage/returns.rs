//! Returns without a critic.

/// R_t = r_t + gamma R_{t+1} over tokens with mask 1, others skipped over; R is 0 where mask is 0. Gamma 1 is the
/// reverse cumulative sum.
pub fn discounted(gamma: f64, rewards: &[f32], mask: &[u8]) -> Vec<f32> {
    let mut returns = vec![0.0; mask.len()];
    let mut sum = 0.0;
    for t in (0..mask.len()).rev().filter(|&t| mask[t] != 0) {
        sum = f64::from(rewards[t]) + gamma * sum;
        returns[t] = sum as f32;
    }
    returns
}
