//! Differences between the configuration of a resumed run and the one that its checkpoint was saved with.

use crate::config::{self, Config};
use crate::error::{Error, Result};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;
use toml::{Table, Value};

/// Keys that determine the meaning of the saved state.
const OF_THE_STATE: &[&str] = &[
    "job.kind",
    "job.seed",
    "model.actor",
    "model.reference",
    "model.critic",
    "model.teachers",
    "ppo.advantage",
    "data.",
];
/// Keys of `[data]` that training does not read.
const NOT_OF_THE_STATE: &[&str] = &["data.eval_split"];
/// Keys that set the run directory and how the run resumes.
const NOT_OF_THE_RUN: &[&str] = &["job.dir", "checkpoint.changed_inputs", "checkpoint.from", "checkpoint.restore"];
/// Keys that must not change until an unfinished step is done.
const OF_A_STEP: &[&str] =
    &["rollout.", "ppo.epochs", "ppo.critic_epochs", "ppo.minibatch_samples", "distill.minibatch_samples"];
/// Keys of `[rollout]` that do not change results, except by rounding.
const NOT_OF_A_STEP: &[&str] = &[
    "rollout.batch_max",
    "rollout.response_tokens_expected",
    "rollout.prefill_tokens_max",
    "rollout.kv_bytes_max",
    "rollout.graphs",
    "rollout.tensor",
    "rollout.data",
];
/// Values that name a file or a directory.
const PATHS: &[&str] = &["model.", "data.prompts", "data.pretrain", "data.eval_sets", "data.split.eval_files"];

/// Returns the changes from `saved` (TOML) to `now` if a run may be resumed with them. With `unfinished`, the resumed
/// run must first finish a step.
pub fn check(saved: &str, now: &Config, unfinished: bool) -> Result<Vec<String>> {
    let (before, after) = (flat(saved), flat(&settled(now.clone()).to_toml()));
    let keys: std::collections::BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let (mut refused, mut accepted) = (Vec::new(), Vec::new());
    for key in keys {
        let (was, is) = (before.get(key), after.get(key));
        if was == is || NOT_OF_THE_RUN.contains(&key.as_str()) {
            continue;
        }
        let is_in = |list: &[&str]| list.iter().any(|k| key == k || (k.ends_with('.') && key.starts_with(k)));
        let text = |value: Option<&Value>| value.map_or_else(|| "not set".to_string(), ToString::to_string);
        let change = format!("{key} = {} (was {})", text(is), text(was));
        let of_state = is_in(OF_THE_STATE) && !is_in(NOT_OF_THE_STATE) && !(is_in(PATHS) && moved(was, is));
        let of_step = unfinished && is_in(OF_A_STEP) && !is_in(NOT_OF_A_STEP);
        if of_state || of_step { refused.push(change) } else { accepted.push(change) }
    }
    if refused.is_empty() {
        return Ok(accepted);
    }
    let hint = if unfinished {
        "restore the old values at least until the interrupted step is done, or set another job.dir"
    } else {
        "restore the old values, or set another job.dir for the changed job"
    };
    Err(Error::usage(format!("the run in job.dir cannot resume with {}", refused.join(", "))).hint(hint))
}

/// Fills in the keys that default to the value of another key.
fn settled(mut config: Config) -> Config {
    config.model.reference = config.model.reference_dir().to_path_buf();
    config.model.critic = config.critic_dir().to_path_buf();
    config
}

fn flat(text: &str) -> BTreeMap<String, Value> {
    // Keys newer than the checkpoint have their defaults.
    let read = |text: &str| text.parse::<Table>().unwrap_or_default();
    let known = Config::deserialize(read(text)).map(|config| settled(config).to_toml());
    config::flat(&read(known.as_deref().unwrap_or(text)))
}

/// Whether both name the same path, or the old path no longer exists.
fn moved(was: Option<&Value>, is: Option<&Value>) -> bool {
    let (Some(was), Some(is)) = (was, is) else { return false };
    match (was, is) {
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| moved(Some(a), Some(b)))
        }
        // A set of rows.
        (Value::Table(a), Value::Table(b)) => a.iter().all(|(key, was)| match (key.as_str(), b.get(key)) {
            ("prompts", is) => moved(Some(was), is),
            (_, is) => is == Some(was),
        }),
        (Value::String(a), Value::String(b)) => {
            // Shards are named by their prefix.
            let real = |path: &str| {
                [path.to_string(), format!("{path}.idx")].iter().find_map(|p| Path::new(p).canonicalize().ok())
            };
            a == b || real(a).is_none_or(|a| real(b).is_some_and(|b| a == b))
        }
        _ => false,
    }
}
