//! Losses and advantages: against OpenRLHF's numbers, against finite differences, and their properties.

mod advantages;
mod against_openrlhf;
mod golden;
mod labelled;
mod losses;
mod preference;
mod single_rollout;

use rlhf_hpc::advantage::{AdvantageState, AdvantageStats, compute_step};
use rlhf_hpc::config::method::ppo::PpoConfig;
use rlhf_hpc::error::Result;
use rlhf_hpc::experience::Experience;
use std::collections::BTreeMap;

/// The advantages of a first step, with `beta` as the coefficient of the KL.
fn compute(config: &PpoConfig, beta: f32, samples: &mut [Experience]) -> Result<AdvantageStats> {
    let mut state = AdvantageState::new(config);
    state.kl.beta = beta;
    compute_step(config, &BTreeMap::new(), &mut state, samples)
}
