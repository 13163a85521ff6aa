//! Model families as data: the defaults that their config.json leaves out.

use super::block_spec::Norms;
use crate::error::{Error, Result};

/// Whether a projection has a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bias {
    Never,
    Always,
    /// Set by this key of config.json; false if absent.
    Key(&'static str),
}

/// The layers that attend within a sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Windows {
    Never,
    /// Every layer, unless `sliding_window` is null. This is the width if the key is absent.
    Everywhere(usize),
    /// Only with `use_sliding_window`: the layers from `max_window_layers` on, or those of `layer_types`. (default
    /// window, default max_window_layers)
    Switched(usize, usize),
}

/// One family. Every difference between families is a field here or in `Arch`.
#[derive(Debug, PartialEq, Eq)]
pub struct Family {
    /// `model_type` of config.json.
    pub name: &'static str,
    /// `architectures` of config.json for a language model.
    pub causal: &'static str,
    /// `architectures` of config.json for a value or reward model.
    pub classifier: &'static str,
    pub qkv_bias: Bias,
    pub o_bias: Bias,
    pub mlp_bias: Bias,
    pub qk_norm: bool,
    pub norms: Norms,
    pub windows: Windows,
    /// The default of `head_dim`. `None`: width / heads.
    pub head_dim: Option<usize>,
    /// The default of `num_key_value_heads`. `None`: the number of heads.
    pub kv_heads: Option<usize>,
    /// The default of `max_position_embeddings`.
    pub context: usize,
}

/// The supported families. Defaults are those of the configuration classes of transformers 4 and 5.
static FAMILIES: [Family; 4] = [
    Family {
        name: "llama",
        causal: "LlamaForCausalLM",
        classifier: "LlamaForSequenceClassification",
        qkv_bias: Bias::Key("attention_bias"),
        o_bias: Bias::Key("attention_bias"),
        mlp_bias: Bias::Key("mlp_bias"),
        qk_norm: false,
        norms: Norms::Pre,
        windows: Windows::Never,
        head_dim: None,
        kv_heads: None,
        context: 2048,
    },
    Family {
        name: "mistral",
        causal: "MistralForCausalLM",
        classifier: "MistralForSequenceClassification",
        qkv_bias: Bias::Never,
        o_bias: Bias::Never,
        mlp_bias: Bias::Never,
        qk_norm: false,
        norms: Norms::Pre,
        windows: Windows::Everywhere(4096),
        head_dim: None,
        kv_heads: Some(8),
        context: 131_072,
    },
    Family {
        name: "qwen2",
        causal: "Qwen2ForCausalLM",
        classifier: "Qwen2ForSequenceClassification",
        qkv_bias: Bias::Always,
        o_bias: Bias::Never,
        mlp_bias: Bias::Never,
        qk_norm: false,
        norms: Norms::Pre,
        windows: Windows::Switched(4096, 28),
        head_dim: None,
        kv_heads: Some(32),
        context: 32_768,
    },
    Family {
        name: "qwen3",
        causal: "Qwen3ForCausalLM",
        classifier: "Qwen3ForSequenceClassification",
        qkv_bias: Bias::Key("attention_bias"),
        o_bias: Bias::Key("attention_bias"),
        mlp_bias: Bias::Never,
        qk_norm: true,
        norms: Norms::Pre,
        windows: Windows::Switched(4096, 28),
        head_dim: Some(128),
        kv_heads: Some(32),
        context: 32_768,
    },
];

/// Class names that OpenRLHF writes for reward models and critics of any family.
const VALUE_CLASSES: [&str; 2] = ["RewardModel", "CriticModel"];

impl Family {
    /// The family with this `model_type`.
    fn named(name: &str) -> Result<&'static Self> {
        FAMILIES.iter().find(|f| f.name == name).ok_or_else(|| {
            let known: Vec<&str> = FAMILIES.iter().map(|f| f.name).collect();
            Error::data(format!("model_type \"{name}\" is not supported"))
                .hint(format!("use one of {}", known.join(", ")))
        })
    }

    /// Returns the family, and whether the model has a value head instead of a language-model head. They follow from
    /// `model_type` and `architectures[0]`, of which one may be absent.
    ///
    /// # Errors
    /// `Data` if they are unknown, if they disagree, or if both are absent.
    pub fn identify(model_type: Option<&str>, architecture: Option<&str>) -> Result<(&'static Self, bool)> {
        let Some(class) = architecture else {
            let name = model_type.ok_or_else(|| Error::data("neither model_type nor architectures is set"))?;
            return Ok((Self::named(name)?, false));
        };
        if let (Some(name), true) = (model_type, VALUE_CLASSES.contains(&class)) {
            return Ok((Self::named(name)?, true));
        }
        let found = FAMILIES.iter().find(|f| f.causal == class || f.classifier == class).ok_or_else(|| {
            let known: Vec<&str> = FAMILIES.iter().flat_map(|f| [f.causal, f.classifier]).collect();
            Error::data(format!("architecture \"{class}\" is not supported"))
                .hint(format!("use one of {}", known.join(", ")))
        })?;
        match model_type {
            Some(name) if name != found.name => {
                Err(Error::data(format!("model_type \"{name}\" does not match architecture \"{class}\""))
                    .hint(format!("set model_type to \"{}\" for \"{class}\"", found.name)))
            }
            _ => Ok((found, found.classifier == class)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_models_are_recognised_by_their_class() {
        assert!(!Family::identify(Some("llama"), Some("LlamaForCausalLM")).unwrap().1);
        assert!(Family::identify(Some("llama"), Some("LlamaForSequenceClassification")).unwrap().1);
        assert!(Family::identify(Some("qwen2"), Some("RewardModel")).unwrap().1);
    }
}
