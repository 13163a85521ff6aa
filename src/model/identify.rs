//! The family of a model, from the names in its config.json.

use super::families::Family;
use super::family_list::FAMILIES;
use super::unsupported::{reason, refused};
use super::wrapper::WRAPPERS;
use crate::error::{Error, Result};

/// Class names that OpenRLHF writes for reward models and critics of any family.
const VALUE_CLASSES: [&str; 2] = ["RewardModel", "CriticModel"];

impl Family {
    /// The names of all families.
    pub fn names() -> impl Iterator<Item = &'static str> {
        FAMILIES.iter().map(|f| f.name)
    }

    /// The family with this `model_type`.
    fn named(name: &str) -> Result<&'static Self> {
        FAMILIES.iter().find(|f| f.name == name).ok_or_else(|| {
            let known: Vec<&str> = Self::names().collect();
            refused("model_type", name, "").hint(format!("use one of {}", known.join(", ")))
        })
    }

    /// The family with this `model_type`, or that of the language model inside a model with this `model_type`.
    ///
    /// # Errors
    /// `Data` if there is none, with all names.
    pub fn named_or_inside(name: &str) -> Result<&'static Self> {
        let inside = WRAPPERS.iter().find(|wrapper| wrapper.name == name).map(|wrapper| wrapper.family);
        Self::named(inside.unwrap_or(name)).map_err(|error| {
            let known: Vec<&str> = Self::names().chain(WRAPPERS.iter().map(|wrapper| wrapper.name)).collect();
            error.hint(format!("use one of {}, or a model directory", known.join(", ")))
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
            refused("architecture", class, "").hint(format!("use one of {}", known.join(", ")))
        })?;
        match model_type {
            // Kimi K2 names the class of DeepSeek-V3.
            Some(name) if reason(name).is_some() => Err(Self::named(name).expect_err("it is not supported")),
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
