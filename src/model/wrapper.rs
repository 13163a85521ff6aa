//! Language models inside models that also see images: their config.json has the language model's in `text_config`, and
//! the names of their tensors have a prefix. Only the language model is used. An export keeps the rest as it is.

use super::files::{Checkpoint, Stored};
use super::names::LM_HEAD;
use crate::error::{Error, Result};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// (`model_type`, `architectures`) of config.json.
const WRAPPERS: [(&str, &str); 2] =
    [("gemma3", "Gemma3ForConditionalGeneration"), ("mistral3", "Mistral3ForConditionalGeneration")];
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

/// The names of a language model's tensors in the files of a model, instead of `model.*` and `lm_head.*`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Naming {
    #[default]
    Plain,
    /// `model.language_model.*` and `lm_head.*` (transformers 5)
    Inner,
    /// `language_model.model.*` and `language_model.lm_head.*` (transformers 4)
    Outer,
}

impl Naming {
    /// The name in the files of a tensor of the language model.
    pub fn in_files(self, name: &str) -> String {
        match (self, name.strip_prefix("model.")) {
            (Self::Inner, Some(rest)) => format!("model.language_model.{rest}"),
            (Self::Outer, _) => format!("language_model.{name}"),
            _ => name.to_owned(),
        }
    }

    /// The tensor of the language model that has this name in the files, and the naming that gives it another one.
    pub fn from_files(name: &str) -> (String, Self) {
        if let Some(rest) = name.strip_prefix("model.language_model.") {
            return (format!("model.{rest}"), Self::Inner);
        }
        match name.strip_prefix("language_model.") {
            Some(rest) if rest.starts_with("model.") || rest == LM_HEAD => (rest.to_owned(), Self::Outer),
            _ => (name.to_owned(), Self::Plain),
        }
    }
}

/// The model around a language model.
#[derive(Clone, Debug, PartialEq)]
pub struct Wrapper {
    /// Its config.json without the language model's.
    config: Map<String, Value>,
    /// The directory with its other tensors.
    dir: Option<PathBuf>,
    pub naming: Naming,
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
        if !WRAPPERS.iter().any(|(name, of)| kind == Some(name) || (kind.is_none() && class == Some(of))) {
            let kind = kind.or(class).unwrap_or_default();
            let known = WRAPPERS.map(|(name, _)| name).join(", ");
            return Err(Error::data(format!("config.json: model_type \"{kind}\" with {TEXT} is not supported"))
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
        Ok((inner, Some(Self { config: outer, dir: None, naming: Naming::Inner })))
    }

    /// The same with the files of `dir`.
    #[must_use]
    pub(super) fn located(self, dir: &Path) -> Self {
        let naming = Checkpoint::open(dir).map_or(Naming::Inner, |found| found.naming());
        Self { dir: Some(dir.to_owned()), naming, ..self }
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

    /// The files with its other tensors.
    ///
    /// # Errors
    /// `Data` or `Io` if they are gone or damaged.
    pub(super) fn others(&self) -> Result<Checkpoint> {
        let dir = self.dir.as_deref().ok_or_else(|| Error::fault("the model's directory is not known"))?;
        Checkpoint::open(dir)
    }
}

/// The tensors of `files` that do not belong to the language model.
pub(super) fn others(files: &Checkpoint) -> impl Iterator<Item = (&str, Stored<'_>)> {
    files.names().filter(|name| is_other(name)).map(|name| (name, files.get(name).expect("it has the name")))
}

/// Whether a tensor is one of another part than the language model.
pub(super) fn is_other(name: &str) -> bool {
    let text = ["model.embed_tokens.", "model.layers.", "model.norm.", "lm_head."];
    !text.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_a_language_model_are_found_again_in_either_naming() {
        for naming in [Naming::Inner, Naming::Outer] {
            for name in ["model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"] {
                assert_eq!(Naming::from_files(&naming.in_files(name)).0, name);
            }
        }
        assert_eq!(Naming::Outer.in_files("lm_head.weight"), "language_model.lm_head.weight");
        assert_eq!(Naming::from_files("model.vision_tower.x").1, Naming::Plain);
        assert!(is_other("model.vision_tower.x") && !is_other("model.layers.3.mlp.up_proj.weight"));
    }
}
