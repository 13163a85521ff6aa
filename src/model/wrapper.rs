//! Language models inside models that also see images: their config.json has the language model's in `text_config`, and
//! the names of their tensors have a prefix. An export keeps what is not used as it is. Vision towers that are known
//! (`vision_spec`) can be used, too.

use super::files::{Checkpoint, Stored};
use super::naming::is_other;
use super::unsupported::refused;
use crate::error::Result;
use serde_json::{Map, Value};

/// A kind of model around a language model.
pub(super) struct Kind {
    /// `model_type` of config.json.
    pub name: &'static str,
    /// `architectures` of config.json.
    pub class: &'static str,
    /// The usual family of the language model.
    pub family: &'static str,
}

pub(super) const WRAPPERS: [Kind; 6] = [
    Kind { name: "gemma3", class: "Gemma3ForConditionalGeneration", family: "gemma3_text" },
    Kind { name: "mistral3", class: "Mistral3ForConditionalGeneration", family: "ministral3" },
    Kind { name: FLAT, class: "Qwen2_5_VLForConditionalGeneration", family: "qwen2_5_vl_text" },
    Kind { name: "qwen3_vl", class: "Qwen3VLForConditionalGeneration", family: "qwen3_vl_text" },
    Kind { name: "qwen3_5", class: "Qwen3_5ForConditionalGeneration", family: "qwen3_5_text" },
    Kind { name: "qwen3_5_moe", class: "Qwen3_5MoeForConditionalGeneration", family: "qwen3_5_moe_text" },
];
pub(super) const TEXT: &str = "text_config";
/// The kind whose old files have the keys of the language model next to those of the model around it.
const FLAT: &str = "qwen2_5_vl";
/// The keys of the model around it there.
const FLAT_OUTER: [&str; 9] = [
    "architectures",
    "image_token_id",
    "model_type",
    "transformers_version",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_start_token_id",
    "vision_token_id",
];
/// The object of the vision tower.
pub(super) const VISION: &str = "vision_config";
const TIED: &str = "tie_word_embeddings";
/// Keys of which the outer one counts, for the language model, too.
const OUTER: [&str; 7] =
    ["bos_token_id", "dtype", "eos_token_id", "pad_token_id", "quantization_config", TIED, "torch_dtype"];

/// The model around a language model.
#[derive(Clone, Debug, PartialEq)]
pub struct Wrapper {
    /// Its config.json without the language model's.
    config: Map<String, Value>,
    /// Whether the language model's keys are next to its own.
    is_flat: bool,
}

impl Wrapper {
    /// The language model's config.json, and the model around it, if there is one.
    ///
    /// # Errors
    /// `Data` if the model around it is not supported.
    pub(super) fn split(config: &Map<String, Value>) -> Result<(Map<String, Value>, Option<Self>)> {
        let Some(text) = config.get(TEXT).and_then(Value::as_object) else { return Ok(Self::split_flat(config)) };
        let [kind, class] = [config.get("model_type"), config.get("architectures").and_then(|all| all.get(0))]
            .map(|v| v.and_then(Value::as_str));
        let is_known = |of: &Kind| kind == Some(of.name) || (kind.is_none() && class == Some(of.class));
        if !WRAPPERS.iter().any(is_known) {
            let kind = kind.or(class).unwrap_or_default();
            let known = WRAPPERS.map(|wrapper| wrapper.name).join(", ");
            return Err(refused("model_type", kind, &format!(" with {TEXT}"))
                .within("config.json")
                .hint(format!("use a language model, or one of {known}")));
        }
        let mut inner = text.clone();
        inner.shift_remove("architectures");
        for key in OUTER {
            let is_tied = key == TIED && kind == Some(FLAT) && inner.get(key) == Some(&Value::Bool(true));
            if let Some(value) = config.get(key).filter(|value| !value.is_null() && !is_tied) {
                inner.insert(key.into(), value.clone());
            }
        }
        let mut outer = config.clone();
        outer.shift_remove(TEXT);
        Ok((inner, Some(Self { config: outer, is_flat: false })))
    }

    /// The same for a config.json without `text_config`.
    fn split_flat(config: &Map<String, Value>) -> (Map<String, Value>, Option<Self>) {
        if config.get("model_type").and_then(Value::as_str) != Some(FLAT) {
            return (config.clone(), None);
        }
        let is_outer = |key: &str| FLAT_OUTER.contains(&key);
        let part = |of_outer: bool| config.iter().filter(move |(key, _)| is_outer(key) == of_outer);
        let [mut inner, outer]: [Map<String, Value>; 2] =
            [false, true].map(|of_outer| part(of_outer).map(|(key, value)| (key.clone(), value.clone())).collect());
        let family = WRAPPERS.iter().find(|kind| kind.name == FLAT).map(|kind| kind.family);
        inner.insert("model_type".into(), family.into());
        (inner, Some(Self { config: outer, is_flat: true }))
    }

    /// All keys of the model around the language model.
    pub(super) fn keys(&self) -> &Map<String, Value> {
        &self.config
    }

    /// Its `model_type`, or its class.
    pub fn name(&self) -> &str {
        let class = self.config.get("architectures").and_then(|all| all.get(0));
        self.config.get("model_type").or(class).and_then(Value::as_str).unwrap_or_default()
    }

    /// config.json around the language model's.
    pub fn wrap(&self, mut inner: Map<String, Value>) -> Map<String, Value> {
        let mut outer = self.config.clone();
        if self.is_flat {
            inner.retain(|key, _| !FLAT_OUTER.contains(&&**key));
            outer.extend(inner);
            return outer;
        }
        for key in OUTER {
            let value = inner.get(key).cloned();
            if let Some(value) = value.filter(|_| outer.contains_key(key) || key.ends_with("dtype")) {
                outer.insert(key.into(), value);
            }
        }
        let is_old = outer.contains_key("torch_dtype");
        outer.retain(|key, _| *key != "dtype" || !is_old);
        inner.shift_remove("architectures");
        outer.insert(TEXT.into(), Value::Object(inner));
        outer
    }
}

/// The tensors of `files` that do not belong to the language model, and that are not `known`, by their names in the
/// files.
pub(super) fn others(files: &Checkpoint, known: impl Fn(&str) -> bool) -> impl Iterator<Item = (&str, Stored<'_>)> {
    let others = files.names().filter(move |name| is_other(name) && !known(name));
    others.map(|name| (files.stored_name(name), files.get(name).expect("it has the name")))
}
