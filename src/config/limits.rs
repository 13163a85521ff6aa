//! The range of every number of a job, in one table: a value outside it is refused by name before anything is allocated or timed
//! by it.
//!
//! Upper bounds are far beyond any use. They keep products of a few of these numbers, and the bytes that they come to, within
//! what the machine's integers hold, and seconds within what a clock can add.

use crate::error::{Error, Result};
use serde::Serialize;
use serde_json::Value;

/// Steps, rows and other counts that run through a job.
const COUNT: f64 = 1e9;
const TOKENS: f64 = TOKENS_MAX as f64;
/// Rows of a step, and responses of it.
pub const SAMPLES_MAX: usize = 1 << 24;
const SAMPLES: f64 = SAMPLES_MAX as f64;
/// More than any cluster has.
pub const RANKS_MAX: usize = 1 << 16;
/// Threads of a rank.
pub const THREADS_MAX: usize = 4096;
/// Tokens of a row, of a forward, or of a response.
pub const TOKENS_MAX: usize = 1 << 27;
/// Tokens that a model may know.
pub const VOCABULARY_MAX: usize = 1 << 24;
/// Rows of a corpus that is made.
pub const ROWS_MAX: usize = 100_000_000;
/// A petabyte.
const BYTES: f64 = 1_125_899_906_842_624.0;
const YEAR_S: f64 = 31_536_000.0;
const FINITE: f64 = f32::MAX as f64;
/// The smallest f32 above 0 that is no subnormal: for ranges that leave 0 out.
const ABOVE_0: f64 = f32::MIN_POSITIVE as f64;

/// Key, least and largest value. `optim` stands for each of its tables.
const RANGES: &[(&str, f64, f64)] = &[
    ("job.seed", 0.0, i64::MAX as f64),
    ("job.steps", 0.0, COUNT),
    ("job.threads", 0.0, THREADS_MAX as f64),
    ("sft.epochs", 0.0, 1e6),
    ("sft.minibatch_samples", 1.0, SAMPLES),
    ("sft.microbatch_tokens_max", 1.0, TOKENS),
    ("gradient.chunks", 1.0, 65_536.0),
    ("eval.every_steps", 0.0, COUNT),
    ("eval.samples_max", 0.0, COUNT),
    ("eval.correct_at", -FINITE, FINITE),
    ("mesh.arena_bytes_max", 0.0, BYTES),
    ("mesh.collective_timeout_s", 0.0, YEAR_S),
    ("data.split.eval_ratio", 0.0, 1.0),
    ("data.split.seed", 0.0, i64::MAX as f64),
    ("data.prompt_tokens_max", 1.0, TOKENS),
    ("data.window_overlap_tokens", 0.0, TOKENS),
    ("data.row_tokens_max", 0.0, TOKENS),
    ("data.length_group_rows", 1.0, COUNT),
    ("rollout.prompts_per_step", 1.0, SAMPLES),
    ("rollout.samples_per_prompt", 1.0, 65_536.0),
    ("rollout.response_tokens_max", 1.0, TOKENS),
    ("rollout.response_tokens_min", 0.0, TOKENS),
    ("rollout.temperature", 0.0, FINITE),
    ("rollout.top_k", 0.0, COUNT),
    ("rollout.top_p", 0.0, 1.0),
    ("rollout.min_p", 0.0, 1.0),
    ("rollout.repetition_penalty", ABOVE_0, FINITE),
    ("rollout.batch_max", 1.0, 65_536.0),
    ("rollout.prefill_tokens_max", 1.0, TOKENS),
    ("rollout.kv_bytes_max", 0.0, BYTES),
    ("reward.timeout_s", ABOVE_0, YEAR_S),
    ("reward.start_timeout_s", ABOVE_0, YEAR_S),
    ("reward.retries", 0.0, 1000.0),
    ("ppo.gamma", 0.0, 1.0),
    ("ppo.lambda", 0.0, 1.0),
    ("ppo.clip_low", 0.0, 1.0),
    ("ppo.clip_high", 0.0, FINITE),
    ("ppo.dual_clip", 0.0, FINITE),
    ("ppo.value_clip", 0.0, FINITE),
    ("ppo.entropy_coef", -FINITE, FINITE),
    ("ppo.correction_low", 0.0, FINITE),
    ("ppo.correction_high", 0.0, FINITE),
    ("ppo.kl_coef", 0.0, FINITE),
    ("ppo.kl_target", 0.0, FINITE),
    ("ppo.kl_horizon", 1.0, FINITE),
    ("ppo.overlong_buffer_tokens", 0.0, TOKENS),
    ("ppo.overlong_tokens_max", 0.0, TOKENS),
    ("ppo.overlong_penalty", 0.0, FINITE),
    ("ppo.truncated_score_coef", -FINITE, 1.0),
    ("ppo.epochs", 1.0, 10_000.0),
    ("ppo.minibatch_samples", 1.0, SAMPLES),
    ("ppo.microbatch_tokens_max", 1.0, TOKENS),
    ("optim.lr", 0.0, 1000.0),
    ("optim.eps", f64::MIN_POSITIVE, FINITE),
    ("optim.weight_decay", 0.0, FINITE),
    ("optim.clip_norm", 0.0, FINITE),
    ("optim.warmup_ratio", 0.0, 1.0),
    ("optim.floor_ratio", 0.0, 1.0),
    ("checkpoint.every_steps", 0.0, COUNT),
    ("checkpoint.keep_last", 0.0, COUNT),
    ("checkpoint.max_hours", 0.0, 87_600.0),
    ("metrics.rollouts_every_steps", 0.0, COUNT),
    ("metrics.rollouts_keep_last", 0.0, COUNT),
    ("metrics.samples_every_steps", 0.0, COUNT),
    ("metrics.samples_count", 0.0, COUNT),
];

/// Refuses the first number of `table`, which holds the settings `settings`, that is outside its range.
pub fn check(table: &str, settings: &impl Serialize) -> Result<()> {
    let value = serde_json::to_value(settings).map_err(|e| Error::fault(format!("[{table}]: {e}")))?;
    walk(table, &value)
}

/// The same of a number of the command line: `option` is at least `low` and at most `high`.
pub fn check_option(option: &str, value: usize, low: usize, high: usize) -> Result<()> {
    refuse_outside(option, &value.into(), low as f64, high as f64)
}

fn walk(key: &str, value: &Value) -> Result<()> {
    match value {
        Value::Object(fields) => fields.iter().try_for_each(|(name, value)| walk(&below(key, name), value)),
        value => match range_of(key) {
            // A float that is not finite is null here.
            Some((low, high)) if value.is_number() || value.is_null() => refuse_outside(key, value, low, high),
            _ => Ok(()),
        },
    }
}

/// The key `name` of the table `key`; the whole configuration is the table "".
fn below(key: &str, name: &str) -> String {
    if key.is_empty() { name.to_string() } else { format!("{key}.{name}") }
}

fn range_of(key: &str) -> Option<(f64, f64)> {
    let known = |key: &str| RANGES.iter().find(|(name, ..)| *name == key).map(|&(_, low, high)| (low, high));
    let optim = || key.strip_prefix("optim.")?.split_once('.').and_then(|(_, key)| known(&format!("optim.{key}")));
    known(key).or_else(optim)
}

fn refuse_outside(key: &str, value: &Value, low: f64, high: f64) -> Result<()> {
    if value.as_f64().is_some_and(|x| (low..=high).contains(&x)) {
        return Ok(());
    }
    // An f32 as it was written: 0.1, not 0.10000000149.
    let text = value.as_f64().filter(|_| value.is_f64()).map(|x| match x as f32 {
        short if f64::from(short) == x => short.to_string(),
        _ => x.to_string(),
    });
    let text = text.unwrap_or_else(|| if value.is_null() { "not finite".into() } else { value.to_string() });
    let needed = match (low, high) {
        (low, high) if low == -FINITE && high == FINITE => "a finite number".to_string(),
        (low, high) if low == -FINITE => format!("a number up to {high}"),
        (low, high) if low > 0.0 && low < 1e-30 && high == FINITE => "a number above 0".to_string(),
        (low, high) if low > 0.0 && low < 1e-30 => format!("a number above 0, up to {high}"),
        (low, high) if high == FINITE => format!("a number from {low} up"),
        (1.0, high) => format!("at least 1 and at most {high}"),
        (low, high) => format!("a number from {low} to {high}"),
    };
    Err(Error::usage(format!("{key} is {text}, needed {needed}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn numbers(key: &str, value: &Value, into: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                for (name, value) in fields {
                    numbers(&below(key, name), value, into);
                }
            }
            Value::Number(_) => into.push(key.to_string()),
            _ => {}
        }
    }

    #[test]
    fn every_number_of_a_job_has_a_range_that_holds_its_default() {
        let mut keys = Vec::new();
        numbers("", &serde_json::to_value(Config::default()).expect("JSON"), &mut keys);
        let without: Vec<&String> = keys.iter().filter(|key| range_of(key).is_none()).collect();
        // Those depend on the ranks that there are.
        assert_eq!(without, ["mesh.pipeline", "mesh.sequence"]);
        let unknown = RANGES.iter().filter(|(name, ..)| {
            let of_optim = name.strip_prefix("optim.").map(|key| format!("optim.actor.{key}"));
            !keys.contains(&of_optim.unwrap_or_else(|| (*name).to_string()))
        });
        assert_eq!(unknown.count(), 0, "every range is of a key");
    }

    #[test]
    fn an_f32_outside_its_range_is_named_as_it_was_written() {
        let error = walk("ppo.gamma", &f64::from(1.1f32).into()).expect_err("above 1");
        assert_eq!(error.message, "ppo.gamma is 1.1, needed a number from 0 to 1");
    }
}
