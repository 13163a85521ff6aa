//! Families of models as data: what their config.json leaves unsaid.

use crate::error::{Error, Result};

/// Whether a projection has a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bias {
    Never,
    Always,
    /// As this key of config.json says; absent is false.
    Key(&'static str),
}

/// Which layers attend within a sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Windows {
    Never,
    /// Every layer, where `sliding_window` is not null; this width where the key is absent.
    Everywhere(usize),
    /// Only with `use_sliding_window`, from layer `max_window_layers` on, or as `layer_types` says. (default window,
    /// default max_window_layers)
    Switched(usize, usize),
}

/// One family; every difference between families that the transformer knows is a field here or of `Arch`.
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
    pub windows: Windows,
    /// Where config.json has no `head_dim`; `None`: width / heads.
    pub head_dim: Option<usize>,
    /// Where config.json has no `num_key_value_heads`; `None`: as many as heads.
    pub kv_heads: Option<usize>,
    /// Where config.json has no `max_position_embeddings`.
    pub context: usize,
}

/// Every family this program knows. Defaults are those of the configuration classes of transformers 4 and 5.
static FAMILIES: [Family; 4] = [
    Family {
        name: "llama",
        causal: "LlamaForCausalLM",
        classifier: "LlamaForSequenceClassification",
        qkv_bias: Bias::Key("attention_bias"),
        o_bias: Bias::Key("attention_bias"),
        mlp_bias: Bias::Key("mlp_bias"),
        qk_norm: false,
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
        windows: Windows::Switched(4096, 28),
        head_dim: Some(128),
        kv_heads: Some(32),
        context: 32_768,
    },
];

/// Class names that OpenRLHF writes for reward models and critics of any family.
const VALUE_CLASSES: [&str; 2] = ["RewardModel", "CriticModel"];

impl Family {
    /// The family of that `model_type`.
    fn named(name: &str) -> Result<&'static Self> {
        FAMILIES.iter().find(|f| f.name == name).ok_or_else(|| {
            let known: Vec<&str> = FAMILIES.iter().map(|f| f.name).collect();
            Error::data(format!("unknown model_type \"{name}\"")).hint(format!("known: {}", known.join(", ")))
        })
    }

    /// The family, and whether the model has a value head instead of a language-model head, from `model_type` and
    /// `architectures[0]`; one of them may be absent.
    ///
    /// # Errors
    /// `Data` where neither is known, where they disagree, or where both are absent.
    pub fn identify(model_type: Option<&str>, architecture: Option<&str>) -> Result<(&'static Self, bool)> {
        let Some(class) = architecture else {
            let name = model_type.ok_or_else(|| Error::data("neither model_type nor architectures is given"))?;
            return Ok((Self::named(name)?, false));
        };
        if let (Some(name), true) = (model_type, VALUE_CLASSES.contains(&class)) {
            return Ok((Self::named(name)?, true));
        }
        let found = FAMILIES.iter().find(|f| f.causal == class || f.classifier == class).ok_or_else(|| {
            let known: Vec<&str> = FAMILIES.iter().flat_map(|f| [f.causal, f.classifier]).collect();
            Error::data(format!("unknown architecture \"{class}\"")).hint(format!("known: {}", known.join(", ")))
        })?;
        match model_type {
            Some(name) if name != found.name => {
                Err(Error::data(format!("model_type \"{name}\" does not go with architecture \"{class}\""))
                    .hint(format!("\"{class}\" needs model_type \"{}\"", found.name)))
            }
            _ => Ok((found, found.classifier == class)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_models_are_known_by_their_class() {
        assert!(!Family::identify(Some("llama"), Some("LlamaForCausalLM")).unwrap().1);
        assert!(Family::identify(Some("llama"), Some("LlamaForSequenceClassification")).unwrap().1);
        assert!(Family::identify(Some("qwen2"), Some("RewardModel")).unwrap().1);
    }
}
