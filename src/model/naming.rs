//! The names of a language model's tensors in the files of a model that also sees images.

use super::names::LM_HEAD;

/// The start of the names of a vision tower's tensors.
pub(super) const TOWER: &str = "model.visual.";
/// The same in old files.
const OLD_TOWER: &str = "visual.";

/// The names of a language model's tensors in the files of a model, instead of `model.*` and `lm_head.*`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Naming {
    #[default]
    Plain,
    /// `model.language_model.*` and `lm_head.*`; a tower is `model.visual.*` (transformers 5)
    Inner,
    /// `language_model.model.*` and `language_model.lm_head.*` (transformers 4)
    Outer,
    /// `model.*` and `lm_head.*`, and a tower is `visual.*` (Qwen2.5-VL in transformers 4)
    Beside,
}

impl Naming {
    /// The name in the files of a tensor of the language model, or of a tower in the parameter table.
    pub fn in_files(self, name: &str) -> String {
        match (self, name.strip_prefix("model.")) {
            (Self::Beside, Some(rest)) if name.starts_with(TOWER) => rest.to_owned(),
            (Self::Inner, Some(rest)) if !name.starts_with(TOWER) => format!("model.language_model.{rest}"),
            (Self::Outer, _) => format!("language_model.{name}"),
            _ => name.to_owned(),
        }
    }

    /// The tensor of the language model that has this name in the files, and the naming that gives it another one.
    pub fn from_files(name: &str) -> (String, Self) {
        if let Some(rest) = name.strip_prefix("model.language_model.") {
            return (format!("model.{rest}"), Self::Inner);
        }
        if name.starts_with(OLD_TOWER) {
            return (format!("model.{name}"), Self::Beside);
        }
        match name.strip_prefix("language_model.") {
            Some(rest) if rest.starts_with("model.") || rest == LM_HEAD => (rest.to_owned(), Self::Outer),
            _ => (name.to_owned(), Self::Plain),
        }
    }
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
        for naming in [Naming::Inner, Naming::Outer, Naming::Beside] {
            for name in ["model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"] {
                assert_eq!(Naming::from_files(&naming.in_files(name)).0, name);
            }
        }
        for naming in [Naming::Plain, Naming::Inner, Naming::Beside] {
            let name = "model.visual.blocks.0.norm1.weight";
            assert_eq!(Naming::from_files(&naming.in_files(name)).0, name);
        }
        assert_eq!(Naming::Beside.in_files("model.visual.x"), "visual.x");
        assert_eq!(Naming::Outer.in_files("lm_head.weight"), "language_model.lm_head.weight");
        assert_eq!(Naming::from_files("model.vision_tower.x").1, Naming::Plain);
        assert!(is_other("model.vision_tower.x") && !is_other("model.layers.3.mlp.up_proj.weight"));
    }
}
