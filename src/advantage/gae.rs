//! Generalized advantage estimation. arXiv:1506.02438

/// delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lambda A_{t+1}; returns R_t = A_t + V_t.
///
/// Only tokens with mask 1 are steps. Other tokens (written by the environment) are skipped, so t+1 is the next masked
/// token, and their A and R are 0. `last_value` is V after the last step: 0 for a response that ended. All slices have
/// the response's length. Returns (advantages, returns).
pub fn gae(
    gamma: f64,
    lambda: f64,
    rewards: &[f32],
    values: &[f32],
    last_value: f32,
    mask: &[u8],
) -> (Vec<f32>, Vec<f32>) {
    let mut advantages = vec![0.0; mask.len()];
    let mut returns = vec![0.0; mask.len()];
    let (mut next_value, mut advantage) = (f64::from(last_value), 0.0);
    for t in (0..mask.len()).rev().filter(|&t| mask[t] != 0) {
        let value = f64::from(values[t]);
        let delta = f64::from(rewards[t]) + gamma * next_value - value;
        advantage = delta + gamma * lambda * advantage;
        advantages[t] = advantage as f32;
        returns[t] = (advantage + value) as f32;
        next_value = value;
    }
    (advantages, returns)
}
