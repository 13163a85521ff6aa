//! Warnings of a ppo job.

use crate::config::Config;
use crate::config::method::ppo::Correction;
use crate::data::Rows;
use crate::metrics::keys::{self, Metrics};
use crate::train::warnings::{Warning, value};

/// KL per token, in nats, above which a run warns: the policy differs from its reference on most tokens.
const KL: f64 = 1.0;

/// Warnings before the first step of a ppo job. `ranks` share the prompts of a rollout. `context` is the actor's, in
/// tokens.
pub fn of_start(config: &Config, ranks: usize, rows: &Rows, context: usize) -> Vec<String> {
    let (rollout, ppo) = (&config.rollout, &config.ppo);
    let (prompts, samples) = (rollout.prompts_per_step, rollout.prompts_per_step * rollout.samples_per_prompt);
    let (longest, response) = (rows.longest(), rollout.response_tokens_max);
    let changes_draws = rollout.truncates() && !rollout.keep_sampling_mask;
    let all = [
        (longest + response > context).then(|| {
            format!(
                "rollout.response_tokens_max = {response} after prompts of up to {longest} tokens exceeds the context \
                 of {context}: such responses end there"
            )
        }),
        (ranks > prompts).then(|| {
            format!("rollout.prompts_per_step = {prompts} is below the {ranks} rollout ranks: some get no prompts")
        }),
        (ppo.minibatch_samples > samples).then(|| {
            format!(
                "ppo.minibatch_samples = {} exceeds the {samples} samples of a step: each epoch is one update",
                ppo.minibatch_samples
            )
        }),
        (prompts as u64 > rows.epoch_rows()).then(|| {
            format!(
                "rollout.prompts_per_step = {prompts} exceeds the data's {} rows: steps repeat rows",
                rows.epoch_rows()
            )
        }),
        (changes_draws && ppo.correction == Correction::None).then(|| {
            "rollout.top_p, top_k or min_p sample from a different distribution than training uses: set \
             rollout.keep_sampling_mask (on CPUs) to train on the sampled one, or ppo.correction to weight the \
             difference"
                .to_string()
        }),
    ];
    all.into_iter().flatten().collect()
}

/// Warnings about the metrics of a step.
pub fn of_step(config: &Config, values: &Metrics) -> Vec<Warning> {
    let of = |key: &str| value(values, key);
    let mut all = Vec::new();
    let mut warn = |name, holds: bool, text: &dyn Fn() -> String| all.extend(holds.then(|| (name, text())));
    let ([low, high], clipped) = (config.ppo.reward_clip, of(keys::REWARD_CLIPPED_RATIO));
    warn("clipped", clipped > 0.0, &|| {
        format!("ppo.reward_clip = [{low}, {high}] clips the rewards of {:.0} % of the samples", 100.0 * clipped)
    });
    warn("truncated", of(keys::RESPONSE_TRUNCATED_RATIO) >= 1.0, &|| {
        format!(
            "all responses are cut at rollout.response_tokens_max = {}: none ended by itself",
            config.rollout.response_tokens_max
        )
    });
    warn("equal_rewards", of(keys::REWARD_STD) == 0.0, &|| {
        let mean = of(keys::REWARD_MEAN) as f32;
        format!("all rewards of a step are equal ({mean}), so there is nothing to learn: check [reward]")
    });
    warn("equal_groups", of(keys::EQUAL_GROUPS_RATIO) > 0.5, &|| {
        format!(
            "all rewards are equal in {:.0} % of the groups, which then give no gradient: raise \
             rollout.samples_per_prompt, use other prompts, or use a finer [reward]",
            100.0 * of(keys::EQUAL_GROUPS_RATIO)
        )
    });
    warn("kl", of(keys::KL_MEAN) > KL, &|| {
        format!(
            "kl_mean is {:.2} nats per token, so the policy is far from its reference: raise ppo.kl_coef or lower \
             optim.actor.lr",
            of(keys::KL_MEAN)
        )
    });
    all
}
