//! `--device`, `--dtype` and `--no-check` of the verbs that run a model. They work like `job.device`, `model.dtype` and
//! `job.check` of a job.

use super::model_dirs::ModelDirs;
use super::ranks::Ranks;
use crate::config::Config;
use crate::config::job::{DeviceName, JobConfig};
use crate::config::model::{DTypeName, ModelConfig};
use crate::config::rollout::RolloutConfig;
use crate::error::{Error, Result};
use crate::launch::inference::InferenceModel;
use crate::launch::snapshots;
use crate::model::{Head, unapplied_sampling};

#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub device: DeviceName,
    pub dtype: DTypeName,
    pub check: bool,
}

/// The options that correspond to keys of a job.
const OPTION_OF_KEY: [(&str, &str); 6] = [
    ("job.device = \"gpu\"", "--device gpu"),
    ("job.device = \"cpu\"", "--device cpu"),
    ("model.dtype = \"f32\"", "--dtype f32"),
    ("model.dtype = \"bf16\"", "--dtype bf16"),
    ("job.check = false", "--no-check"),
    ("raise rollout.kv_bytes_max, or use", "use"),
];

fn with_options(text: &str) -> String {
    OPTION_OF_KEY.iter().fold(text.to_string(), |text, (key, option)| text.replace(key, option))
}

/// Replaces the keys of a job in an error by the options.
pub fn with_option_names(mut error: Error) -> Error {
    error.message = with_options(&error.message);
    error.hint = error.hint.map(|hint| with_options(&hint));
    error
}

/// Loads the model of a verb on each rank; the first one logs its device. All ranks call this.
pub fn open(
    verb: &str,
    dirs: &ModelDirs,
    options: Options,
    head: Head,
    (rollout, seed): (RolloutConfig, u64),
    ranks: &Ranks,
) -> Result<InferenceModel> {
    let Options { device, dtype, check } = options;
    let used = [
        ("temperature", rollout.temperature.into()),
        ("top_p", rollout.top_p.into()),
        ("top_k", rollout.top_k as f64),
        ("min_p", rollout.min_p.into()),
        ("repetition_penalty", rollout.repetition_penalty.into()),
    ];
    let wanted = rollout.response_tokens_max;
    let config = Config {
        job: JobConfig { seed, device, check, ..JobConfig::default() },
        model: ModelConfig {
            actor: dirs.model.clone(),
            adapter: dirs.adapter.clone().unwrap_or_default(),
            dtype,
            ..ModelConfig::default()
        },
        rollout,
        ..Config::default()
    };
    ranks.agree(snapshots::compare(&ranks.world, &config.snapshots()))?;
    let opened = InferenceModel::open(config, head, &ranks.world).map_err(with_option_names);
    let inference = ranks.agree(opened)?;
    let each = if ranks.world.size > 1 { format!("{} ranks, the first on ", ranks.world.size) } else { String::new() };
    ranks.say(&format!("{verb}: {each}{}", with_options(&inference.description)));
    if !["generate", "chat"].contains(&verb) {
        return Ok(inference);
    }
    if let Some(unapplied) = unapplied_sampling(&dirs.model, &used)? {
        ranks.say(&format!("{verb}: not applied: {unapplied} of generation_config.json"));
    }
    let context = inference.transformer.arch.context;
    if wanted > context {
        ranks.say(&format!(
            "{verb}: --max-new-tokens = {wanted} exceeds the model's context of {context} tokens, where a response ends at \
             the latest"
        ));
    }
    Ok(inference)
}
