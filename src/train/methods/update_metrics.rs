//! The metrics of PPO's updates.

use crate::experience::{Experience, Response};
use crate::learn::Learner;
use crate::learn::packed::PackedRow;
use crate::learn::sums::Sums;
use crate::metrics::keys;
use crate::model::Head;

/// The counts that divide sums: tokens that are learned from, and optimizer steps.
pub const POLICY_TOKENS: &str = "policy_tokens";
pub const VALUE_TOKENS: &str = "value_tokens";
const ROUTED_TOKENS: &str = "routed_tokens";
const ACTOR_STEPS: &str = "actor_steps";
const CRITIC_STEPS: &str = "critic_steps";

/// Keys of a model's steps, norm of the gradient, its maximum, and learning rate.
const OF_ACTOR: [&str; 4] = [ACTOR_STEPS, keys::GRAD_NORM_ACTOR, keys::GRAD_NORM_ACTOR_MAX, keys::LR_ACTOR];
const OF_CRITIC: [&str; 4] = [CRITIC_STEPS, keys::GRAD_NORM_CRITIC, keys::GRAD_NORM_CRITIC_MAX, keys::LR_CRITIC];

/// The update metrics of a step: keys, and the counts that divide their sums.
pub const REPORTED: &[(&str, &str)] = &[
    (keys::LOSS, ACTOR_STEPS),
    (keys::POLICY_LOSS, ACTOR_STEPS),
    (keys::ENTROPY, POLICY_TOKENS),
    (keys::CLIP_RATIO, POLICY_TOKENS),
    (keys::POLICY_KL, POLICY_TOKENS),
    (keys::KL_LOSS, POLICY_TOKENS),
    (keys::PTX_LOSS, ACTOR_STEPS),
    (keys::LOGPROB_GAP_MAX, ""),
    (keys::EXPERTS_EQUAL, ROUTED_TOKENS),
    (keys::GRAD_NORM_ACTOR, ACTOR_STEPS),
    (keys::GRAD_NORM_ACTOR_MAX, ""),
    (keys::LR_ACTOR, ACTOR_STEPS),
    (keys::VALUE_LOSS, CRITIC_STEPS),
    (keys::VALUE_CLIP_RATIO, VALUE_TOKENS),
    (keys::GRAD_NORM_CRITIC, CRITIC_STEPS),
    (keys::GRAD_NORM_CRITIC_MAX, ""),
    (keys::LR_CRITIC, CRITIC_STEPS),
];

/// Compares the experts of the tokens before the predicted ones in `own`, a part of the samples `rows`, with their experts
/// at sampling: the number of equal ones, and of known ones.
pub fn same_experts(samples: &[&Experience], rows: &[usize], own: &PackedRow, experts: &[u32]) -> Sums {
    // The token before the first one is the prompt's.
    let sampled = rows.iter().flat_map(|&i| {
        let Response { tokens, experts, .. } = &samples[i].response;
        (0..tokens.len()).map(|at| at.checked_sub(1).and_then(|at| experts.get(at)).copied().unwrap_or(0))
    });
    let sampled = own.select(&sampled.collect::<Vec<u32>>());
    let known = sampled.iter().zip(experts).filter(|(sampled, _)| **sampled != 0);
    let (equal, all) = known.fold((0.0, 0.0), |(equal, all), (a, b)| (equal + f64::from(u8::from(a == b)), all + 1.0));
    if all == 0.0 { Sums::default() } else { Sums::from_list([(keys::EXPERTS_EQUAL, equal), (ROUTED_TOKENS, all)]) }
}

/// The measurements that compare training with sampling.
pub const COMPARED: &[&str] = &[keys::LOGPROB_GAP_MAX, keys::EXPERTS_EQUAL, ROUTED_TOKENS];

/// The measurements of the last optimizer step of the actor or the critic.
pub fn of_step(learner: &Learner) -> Sums {
    let [steps, norm, norm_max, lr] = match learner.role.weights.table.head() {
        Head::LanguageModel => OF_ACTOR,
        Head::Value => OF_CRITIC,
    };
    let report = learner.report;
    Sums::from_list([(steps, 1.0), (norm, report.grad_norm), (norm_max, report.grad_norm), (lr, report.lr)])
}
