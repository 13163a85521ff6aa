//! What a run warns of: settings and numbers that seldom mean what was meant. Each is said once, with the key that changes it.

use crate::config::Config;
use crate::config::job::JobKind;
use crate::config::ppo::Correction;
use crate::data::Rows;
use crate::launch::run::Run;
use crate::metrics::keys::{self, Metrics};

/// A larger share of filtered rows is warned of.
const FILTERED: f64 = 0.1;
/// A larger KL a token is warned of, in nats: the policy answers otherwise than its reference on most tokens.
const KL: f64 = 1.0;

/// What is known before the first step. `context`: tokens of the longest row of model.actor.
pub fn of_start(run: &Run, rows: &Rows, context: usize) -> Vec<String> {
    let (config, ledger) = (&run.config, rows.ledger());
    let mut found = Vec::new();
    let filtered: u64 = ledger.filtered.iter().filter(|(rule, _)| *rule != "other_split").map(|(_, rows)| rows).sum();
    let share = filtered as f64 / ledger.rows.max(1) as f64;
    if share > FILTERED {
        let rules = ledger.filtered.iter().map(|(rule, rows)| format!("{rule} {rows}"));
        found.push(format!(
            "{:.0} % of the rows are filtered ({}): ledger.jsonl names them; data.prompt_tokens_max, data.long_prompts and \
             data.row_tokens_max say which",
            100.0 * share,
            rules.collect::<Vec<_>>().join(", ")
        ));
    }
    if config.job.kind == JobKind::Ppo {
        found.extend(of_rollout(config, run.ranks.layout().rollout_data(), rows, context));
    }
    found
}

fn of_rollout(config: &Config, ranks: usize, rows: &Rows, context: usize) -> Vec<String> {
    let (rollout, ppo) = (&config.rollout, &config.ppo);
    let (prompts, samples) = (rollout.prompts_per_step, rollout.prompts_per_step * rollout.samples_per_prompt);
    let (longest, response) = (rows.longest(), rollout.response_tokens_max);
    let changes_draws = rollout.top_p < 1.0 || rollout.top_k > 0 || rollout.min_p > 0.0;
    let all = [
        (longest + response > context).then(|| {
            format!(
                "rollout.response_tokens_max = {response} behind prompts of up to {longest} tokens is more than the context of \
                 {context}: such responses end there"
            )
        }),
        (ranks > prompts).then(|| {
            format!("rollout.prompts_per_step = {prompts} for {ranks} ranks that sample: some of them have none")
        }),
        (ppo.minibatch_samples > samples).then(|| {
            format!(
                "ppo.minibatch_samples = {} is more than the {samples} samples of a step: each epoch is one update",
                ppo.minibatch_samples
            )
        }),
        (prompts as u64 > rows.epoch_rows()).then(|| {
            format!("rollout.prompts_per_step = {prompts}, and the data has {} rows: steps repeat some", rows.epoch_rows())
        }),
        (changes_draws && ppo.correction == Correction::None).then(|| {
            "rollout.top_p, top_k or min_p draw from another distribution than the one that is learned: ppo.correction weighs \
             that"
                .to_string()
        }),
    ];
    all.into_iter().flatten().collect()
}

/// Warnings about the numbers of steps, each of which is said once.
#[derive(Default)]
pub struct Warnings {
    said: Vec<&'static str>,
}

impl Warnings {
    /// What the numbers of a step are to be warned of, that was not before.
    pub fn of_step(&mut self, config: &Config, values: &Metrics) -> Vec<String> {
        let of = |key: &str| values.iter().find(|(name, _)| name == key).map_or(f64::NAN, |(_, value)| *value);
        let [low, high] = config.ppo.reward_clip;
        let clipped = of(keys::REWARD_CLIPPED_RATIO);
        let all: [(&'static str, bool, String); 5] = [
            (
                "clipped",
                clipped > 0.0,
                format!(
                    "ppo.reward_clip = [{low}, {high}] cuts the rewards of {:.0} % of the samples",
                    100.0 * clipped
                ),
            ),
            (
                "truncated",
                of(keys::RESPONSE_TRUNCATED_RATIO) >= 1.0,
                format!(
                    "all responses are cut at rollout.response_tokens_max = {}: none has ended by itself",
                    config.rollout.response_tokens_max
                ),
            ),
            (
                "equal",
                of(keys::REWARD_STD) == 0.0,
                format!(
                    "all rewards of a step are equal ({}): there is nothing to learn from [reward]",
                    of(keys::REWARD_MEAN)
                ),
            ),
            (
                "groups",
                of(keys::EQUAL_GROUPS_RATIO) > 0.5,
                format!(
                    "in {:.0} % of the groups all rewards are equal, which teach nothing: rollout.samples_per_prompt, other \
                     prompts or a finer [reward] help",
                    100.0 * of(keys::EQUAL_GROUPS_RATIO)
                ),
            ),
            (
                "kl",
                config.job.kind == JobKind::Ppo && of(keys::KL_MEAN) > KL,
                format!(
                    "kl_mean is {:.2} nats a token: the policy is far from its reference; ppo.kl_coef and optim.actor.lr hold it",
                    of(keys::KL_MEAN)
                ),
            ),
        ];
        let new = all.into_iter().filter(|(name, holds, _)| *holds && !self.said.contains(name));
        let new: Vec<_> = new.collect();
        self.said.extend(new.iter().map(|(name, ..)| *name));
        new.into_iter().map(|(.., text)| text).collect()
    }
}
