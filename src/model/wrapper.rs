//! Language models inside models that also see images: their config.json has the language model's in `text_config`, and
//! the names of their tensors have a prefix. Only the language model is used. An export keeps the rest as it is.

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
    class: &'static str,
    /// The usual family of the language model.
    pub family: &'static str,
}

pub(super) const WRAPPERS: [Kind; 4] = [
    Kind { name: "gemma3", class: "Gemma3ForConditionalGeneration", family: "gemma3_text" },
    Kind { name: "mistral3", class: "Mistral3ForConditionalGeneration", family: "ministral3" },
    Kind { name: "qwen3_5", class: "Qwen3_5ForConditionalGeneration", family: "qwen3_5_text" },
    Kind { name: "qwen3_5_moe", class: "Qwen3_5MoeForConditionalGeneration", family: "qwen3_5_moe_text" },
];
const TEXT: &str = "text_config";
/// Keys of which the outer one counts, for the language model, too.
const OUTER: [&str; 7] = [
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "quantization_config",
    "tie_word_embeddings",
    "torch_dtype",
];

/// The model around a language model.
#[derive(Clone, Debug, PartialEq)]
pub struct Wrapper {
    /// Its config.json without the language model's.
    config: Map<String, Value>,
}

impl Wrapper {
    /// The language model's config.json, and the model around it, if there is one.
    ///
    /// # Errors
    /// `Data` if the model around it is not supported.
    pub(super) fn split(config: &Map<String, Value>) -> Result<(Map<String, Value>, Option<Self>)> {
        let Some(text) = config.get(TEXT).and_then(Value::as_object) else { return Ok((config.clone(), None)) };
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
            if let Some(value) = config.get(key).filter(|value| !value.is_null()) {
                inner.insert(key.into(), value.clone());
            }
        }
        let mut outer = config.clone();
        outer.shift_remove(TEXT);
        Ok((inner, Some(Self { config: outer })))
    }

    /// Its `model_type`, or its class.
    pub fn name(&self) -> &str {
        let class = self.config.get("architectures").and_then(|all| all.get(0));
        self.config.get("model_type").or(class).and_then(Value::as_str).unwrap_or_default()
    }

    /// config.json around the language model's.
    pub(super) fn wrap(&self, mut inner: Map<String, Value>) -> Map<String, Value> {
        let mut outer = self.config.clone();
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

/// The tensors of `files` that do not belong to the language model.
pub(super) fn others(files: &Checkpoint) -> impl Iterator<Item = (&str, Stored<'_>)> {
    files.names().filter(|name| is_other(name)).map(|name| (name, files.get(name).expect("it has the name")))
}
