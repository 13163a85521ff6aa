//! The settings of a batch: keys of a job, and the points in which other systems differ from it.

use crate::advantage::details::Details;
use crate::cli::hub;
use crate::config::method::ppo::Aggregation;
use crate::config::{self, Config};
use crate::error::{Error, Result};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The metadata that are not keys of a job.
const OWN: &[&str] = &[
    "system",
    "model",
    "reference",
    "critic",
    "batch.group_epsilon",
    "batch.group_std",
    "batch.whitening",
    "batch.loss_tokens",
    "batch.loss_sequences",
    "batch.mean_of_microbatches",
    "batch.value_aggregation",
    "batch.value_loss_coef",
    "batch.end_tokens",
];

/// The tables of a job whose keys a batch may have.
const TABLES: [&str; 2] = ["ppo.", "rollout."];

#[derive(Clone)]
pub struct Settings {
    pub config: Config,
    pub details: Details,
    /// Divides the sum over tokens instead of the number of tokens of the batch.
    pub loss_tokens: Option<f64>,
    /// Divides the sum over sequences instead of the number of sequences of the batch.
    pub loss_sequences: Option<f64>,
    /// The loss is the mean of the losses of the micro-batches.
    pub mean_of_microbatches: bool,
    pub value_aggregation: Aggregation,
    /// A factor of the value loss, which has a factor of 1/2 already.
    pub value_loss_coef: f64,
    /// Tokens that end a response.
    pub end_tokens: Vec<u32>,
}

/// The models that the file names.
#[derive(Default)]
pub struct Named {
    pub system: String,
    pub model: Option<PathBuf>,
    pub reference: Option<PathBuf>,
    pub critic: Option<PathBuf>,
}

/// Reads the metadata of a file in folder `base`.
///
/// # Errors
/// `Data` that names each key that is not known or has a wrong value.
pub fn read(mut metadata: BTreeMap<String, String>, base: &Path) -> Result<(Settings, Named)> {
    let own: BTreeMap<String, String> =
        OWN.iter().filter_map(|key| Some(((*key).to_owned(), metadata.remove(*key)?))).collect();
    let dir = |key: &str| own.get(key).filter(|dir| !dir.is_empty()).map(|dir| hub::model_dir_from(base, dir));
    let named = Named {
        system: own.get("system").cloned().unwrap_or_else(|| "another system".into()),
        model: dir("model"),
        reference: dir("reference"),
        critic: dir("critic"),
    };
    let unknown = metadata.keys().find(|key| !TABLES.iter().any(|table| key.starts_with(table)));
    if let Some(key) = unknown {
        return Err(Error::data(format!("the metadata have the unknown key {key}"))
            .hint("use keys of [ppo] and [rollout], and the keys that `rlhf-hpc help equality` lists"));
    }
    let given = metadata.iter().map(|(key, value)| format!("{key}={value}"));
    // The keys without a default have no meaning in a batch.
    let needed = ["job.kind=ppo", "model.actor=MODEL", "data.prompts=PROMPTS"].map(str::to_owned);
    let config = config::parse("", &needed.into_iter().chain(given).collect::<Vec<_>>())?;
    let default = Details::default();
    let settings = Settings {
        details: Details {
            group_epsilon: number(&own, "batch.group_epsilon")?.unwrap_or(default.group_epsilon),
            group_std: word(&own, "batch.group_std")?.unwrap_or(default.group_std),
            whitening: word(&own, "batch.whitening")?.unwrap_or(default.whitening),
        },
        loss_tokens: number(&own, "batch.loss_tokens")?,
        loss_sequences: number(&own, "batch.loss_sequences")?,
        mean_of_microbatches: number(&own, "batch.mean_of_microbatches")?.unwrap_or(false),
        value_aggregation: word(&own, "batch.value_aggregation")?.unwrap_or_default(),
        value_loss_coef: number(&own, "batch.value_loss_coef")?.unwrap_or(1.0),
        end_tokens: match own.get("batch.end_tokens") {
            Some(list) => list
                .split(',')
                .filter(|id| !id.trim().is_empty())
                .map(|id| parsed("batch.end_tokens", id.trim()))
                .collect::<Result<_>>()?,
            None => Vec::new(),
        },
        config,
    };
    Ok((settings, named))
}

fn parsed<T: FromStr>(key: &str, text: &str) -> Result<T> {
    text.parse().map_err(|_| Error::data(format!("the metadata have {key} = {text:?}, which is not a value of it")))
}

fn number<T: FromStr>(own: &BTreeMap<String, String>, key: &str) -> Result<Option<T>> {
    own.get(key).map(|text| parsed(key, text)).transpose()
}

fn word<T: DeserializeOwned>(own: &BTreeMap<String, String>, key: &str) -> Result<Option<T>> {
    let read = |text: &String| {
        serde_json::from_value(Value::String(text.clone()))
            .map_err(|e| Error::data(format!("the metadata have {key} = {text:?}: {e}")))
    };
    own.get(key).map(read).transpose()
}
