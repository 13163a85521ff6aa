//! Typed reading of config.json. A key is absent (or null) or has the right type; else the error names it.

use crate::error::{Error, Result};
use crate::sys::files::read_object;
use crate::sys::stderr;
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::LazyLock;

pub(super) const GENERATION: &str = "generation_config.json";
/// The key of config.json that says how the job that exported the model used its chat template.
pub(super) const OF_JOB: &str = "rlhf_hpc";

/// One object of config.json, or of a file of the same form.
pub(super) struct Reader<'a> {
    /// The name of the file.
    file: &'static str,
    object: &'a Map<String, Value>,
    /// The prefix of keys in messages, e.g. `rope_scaling.`.
    prefix: String,
}

impl<'a> Reader<'a> {
    pub(super) fn new(object: &'a Map<String, Value>) -> Self {
        Self::for_file("config.json", object)
    }

    pub(super) fn for_file(file: &'static str, object: &'a Map<String, Value>) -> Self {
        Self { file, object, prefix: String::new() }
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|v| !v.is_null())
    }

    /// Whether the object has the key, even with the value null.
    pub(super) fn has(&self, key: &str) -> bool {
        self.object.contains_key(key)
    }

    /// A key whose value is an object.
    pub(super) fn nested(&self) -> Option<&'a str> {
        self.object.iter().find(|(_, value)| value.is_object()).map(|(key, _)| key.as_str())
    }

    /// An object without keys, at the place of this one.
    pub(super) fn empty(&self) -> Reader<'static> {
        static EMPTY: LazyLock<Map<String, Value>> = LazyLock::new(Map::new);
        Reader { file: self.file, object: &EMPTY, prefix: self.prefix.clone() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.object.is_empty()
    }

    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.object == other.object
    }

    pub(super) fn wrong(&self, key: &str, what: &str) -> Error {
        Error::data(format!("{}: {}{key} {what}", self.file, self.prefix))
    }

    fn typed<T>(&self, key: &str, kind: &str, as_type: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        as_type(value).map(Some).ok_or_else(|| self.wrong(key, &format!("must be {kind}, got {value}")))
    }

    pub(super) fn object(&self, key: &str) -> Result<Option<Reader<'a>>> {
        let object = self.typed(key, "an object", Value::as_object)?;
        Ok(object.map(|object| Reader { object, prefix: format!("{}{key}.", self.prefix), ..*self }))
    }

    /// A count: an integer from 1 to 2^31 - 1.
    pub(super) fn count(&self, key: &str) -> Result<Option<usize>> {
        let as_count = |v: &Value| v.as_u64().filter(|n| (1..1 << 31).contains(n)).map(|n| n as usize);
        self.typed(key, "a positive integer below 2^31", as_count)
    }

    /// An integer from 0 to 2^31 - 1.
    pub(super) fn whole(&self, key: &str) -> Result<Option<usize>> {
        let as_whole = |v: &Value| v.as_u64().filter(|n| *n < 1 << 31).map(|n| n as usize);
        self.typed(key, "an integer from 0 to 2^31 - 1", as_whole)
    }

    pub(super) fn count_needed(&self, key: &str) -> Result<usize> {
        self.count(key)?.ok_or_else(|| self.wrong(key, "is missing"))
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", |v| v.as_f64().filter(|x| x.is_finite()))
    }

    /// A list of positive numbers.
    pub(super) fn numbers(&self, key: &str) -> Result<Vec<f64>> {
        let number = |v: &Value| v.as_f64().filter(|x| x.is_finite() && *x > 0.0);
        let list = |v: &Value| v.as_array()?.iter().map(number).collect::<Option<Vec<f64>>>();
        self.typed(key, "a list of positive numbers", list)?.ok_or_else(|| self.wrong(key, "is missing"))
    }

    pub(super) fn needed(&self, key: &str) -> Result<f64> {
        self.number(key)?.ok_or_else(|| self.wrong(key, "is missing"))
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<String>> {
        self.typed(key, "a string", |v| v.as_str().map(str::to_owned))
    }

    /// One token id or a list of them.
    pub(super) fn tokens(&self, key: &str) -> Result<Vec<u32>> {
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        let found = self.typed(key, "a token id or a list of token ids", |v| match v {
            Value::Array(list) => list.iter().map(id).collect::<Option<Vec<u32>>>(),
            // transformers writes -1 for "none".
            Value::Number(n) if n.as_i64() == Some(-1) => Some(Vec::new()),
            one => id(one).map(|n| vec![n]),
        })?;
        Ok(found.unwrap_or_default())
    }
}

/// Keys of config.json that `Arch` and `Rope` read, or that `init` and `export` use.
const USED: [&str; 37] = [
    "architectures",
    "attention_bias",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "mean",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "pad_token_id",
    "partial_rotary_factor",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "std",
    "tie_word_embeddings",
    "tokenizer_class",
    "torch_dtype",
    "use_sliding_window",
    "value_head_prefix",
    "vocab_size",
    // A score is one number; another shape of the head is an error.
    "id2label",
    "num_labels",
];
/// Keys that change no result of these families.
const IRRELEVANT: [&str; 23] = [
    // Names, versions and origin.
    "_name_or_path",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_sliding_window_pattern",
    "finetuning_task",
    "label2id",
    "name_or_path",
    "problem_type",
    "task_specific_params",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    // The cache and the form of results in transformers.
    "chunk_size_feed_forward",
    "keys_to_ignore_at_inference",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "torchscript",
    "use_cache",
    // The order of sums, and the padding of batches, which this program does not need.
    "pretraining_tp",
    "sep_token_id",
    "unk_token_id",
    "is_decoder",
];
/// The kinds of layers that may have rotary embeddings of their own.
pub(super) const FULL: &str = "full_attention";
pub(super) const SLIDING: &str = "sliding_attention";
/// Layers without attention.
pub(super) const LINEAR: &str = "linear_attention";
/// Keys of a rotary embedding that `Rope` reads, or that only describe its origin.
const ROPE: [&str; 19] = [
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "finetuned",
    "high_freq_factor",
    "llama_4_scaling_beta",
    "long_factor",
    "low_freq_factor",
    "max_position_embeddings",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "short_factor",
    "truncate",
    "type",
];

/// Warnings about keys of config.json that nothing reads. Rates of dropout and windows count if they are not zero.
pub(super) fn warnings(dir: &Path, config: &Map<String, Value>, of_family: &[&str], has_windows: bool) -> Vec<String> {
    let is_zero = |key: &str| config.get(key).and_then(Value::as_f64) == Some(0.0);
    let is_empty = |key: &str| config[key].as_array().is_some_and(Vec::is_empty);
    let is_off = |key: &str| {
        is_empty(key) || ["dropout", "_pdrop", "_jitter_noise"].iter().any(|end| key.ends_with(end)) && is_zero(key)
    };
    let is_full =
        || config["layer_types"].as_array().is_some_and(|all| all.iter().all(|kind| kind == "full_attention"));
    let known = |key: &str| match key {
        "sliding_window" | "max_window_layers" | "use_sliding_window" => has_windows,
        "layer_types" => has_windows || is_full() || of_family.contains(&key),
        _ => {
            key == OF_JOB || USED.contains(&key) || IRRELEVANT.contains(&key) || of_family.contains(&key) || is_off(key)
        }
    };
    let path = dir.join("config.json");
    let ropes = ["rope_parameters", "rope_scaling"]
        .into_iter()
        .flat_map(|name| config.get(name).map(|rope| of_rope(&path.join(name), rope, of_family)).unwrap_or_default());
    stderr::unknown_keys(&path, config, known).into_iter().chain(ropes).collect()
}

/// The same for a rotary embedding, or one of each kind of layers.
fn of_rope(path: &Path, rope: &Value, of_family: &[&str]) -> Vec<String> {
    let Some(rope) = rope.as_object() else { return Vec::new() };
    let is_known = |key: &str| ROPE.contains(&key) || of_family.contains(&key);
    let known = |key: &str| is_known(key) || (rope[key].is_object() && [FULL, SLIDING].contains(&key));
    let kinds = rope.iter().flat_map(|(kind, of_kind)| of_rope(&path.join(kind), of_kind, of_family));
    stderr::unknown_keys(path, rope, known).into_iter().chain(kinds).collect()
}

/// Keys of generation_config.json that change no sample: what `Arch` reads, versions, lengths, and the cache.
const NO_SAMPLING: [&str; 16] = [
    "_from_model_config",
    "bos_token_id",
    "cache_implementation",
    "do_sample",
    "eos_token_id",
    "max_length",
    "max_new_tokens",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "pad_token_id",
    "return_dict_in_generate",
    "transformers_version",
    "trust_remote_code",
    "use_cache",
];
/// Keys that count only if `do_sample` is true, and the values with which they do nothing.
const SAMPLING: [(&str, f64); 5] =
    [("temperature", 1.0), ("top_p", 1.0), ("top_k", 0.0), ("min_p", 0.0), ("typical_p", 1.0)];

/// The sampling settings of a directory's generation_config.json that differ from those in use: `top_k = 20, ...`.
/// None if there are no such settings.
///
/// # Errors
/// `Data` if the file is not a JSON object.
pub fn unapplied_sampling(dir: &Path, used: &[(&str, f64)]) -> Result<Option<String>> {
    let Some(file) = read_object(&dir.join(GENERATION))? else { return Ok(None) };
    let is_greedy = used.contains(&("temperature", 0.0));
    let samples = file.get("do_sample") == Some(&Value::Bool(true)) && !is_greedy;
    let differs = |(key, value): &(&String, &Value)| {
        let key = key.as_str();
        let neutral = SAMPLING.iter().find(|(name, _)| *name == key).map(|(_, neutral)| *neutral);
        let of_penalty = key.ends_with("_penalty").then_some(1.0);
        let used = used.iter().find(|(name, _)| *name == key).map(|(_, used)| *used);
        let is_empty = value.is_null() || **value == Value::Bool(false) || value.as_array().is_some_and(Vec::is_empty);
        let is_same = value.as_f64().is_some_and(|x| {
            // The options are f32.
            used.or(neutral).or(of_penalty).unwrap_or(0.0) as f32 == x as f32
        });
        !NO_SAMPLING.contains(&key) && !is_empty && !is_same && (samples || neutral.is_none())
    };
    let named: Vec<String> = file.iter().filter(differs).map(|(key, value)| format!("{key} = {value}")).collect();
    Ok(if named.is_empty() { None } else { Some(named.join(", ")) })
}
