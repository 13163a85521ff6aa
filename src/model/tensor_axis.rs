//! The sizes of the tensor and sequence axes that an architecture allows.

use super::arch::Arch;
use super::block_spec::Feed;
use super::part::{TensorPart, gcd};
use super::tuning::Tuning;
use crate::error::{Error, Result};
use std::sync::Arc;

impl TensorPart {
    /// The part of the rank, among `size`, with the largest share of a model's matrices.
    pub fn fullest(arch: &Arch, size: usize) -> Self {
        let share = |part: &Self| {
            let mlps: usize = arch.feeds().map(|mlp| mlp.cut().len(*part)).sum();
            mlps + part.range(arch.vocabulary).len()
        };
        (0..size).map(|rank| Self { rank, size }).max_by_key(share).unwrap_or_else(Self::whole)
    }
}

impl Arch {
    /// The sizes of the tensor axis that this architecture allows, ascending.
    pub fn tensor_sizes(&self) -> Vec<usize> {
        let heads = self.heads_together();
        let most = heads.min(self.vocabulary).min(self.narrowest_mlp());
        (1..=most).filter(|&size| heads.is_multiple_of(size)).collect()
    }

    /// Rejects a size of the tensor axis that this architecture does not allow.
    ///
    /// # Errors
    /// `Usage`, naming the allowed sizes.
    pub fn check_tensor(&self, size: usize) -> Result<()> {
        self.check_tensor_where(size, |_| true)
    }

    /// The same. The hint names only the allowed sizes that are also `possible`.
    ///
    /// # Errors
    /// The errors of `check_tensor`.
    pub fn check_tensor_where(&self, size: usize, possible: impl Fn(usize) -> bool) -> Result<()> {
        let of_heads = |tuning: &Arc<Tuning>| tuning.adapters.keys().any(|module| module.ends_with(".kv_b_proj"));
        if size > 1 && self.tuning.as_ref().is_some_and(of_heads) {
            let message = format!("tensor = {size} is not supported with adapters of kv_b_proj");
            return Err(Error::usage(message).hint("set tensor to 1, or add \"kv_b_proj\" to lora.exclude"));
        }
        let mut works = self.tensor_sizes();
        if works.contains(&size) {
            return Ok(());
        }
        works.retain(|&size| possible(size));
        let (heads, vocabulary, mlp_width) = (self.heads_together(), self.vocabulary, self.narrowest_mlp());
        let message = if size == 0 || !heads.is_multiple_of(size) {
            format!("tensor = {size} does not divide the model's {heads} attention heads")
        } else {
            format!("tensor = {size} is larger than the model's vocabulary ({vocabulary}) or MLP width ({mlp_width})")
        };
        let any_of = if works.len() == 1 { "" } else { "one of " };
        let works: Vec<String> = works.iter().map(usize::to_string).collect();
        Err(Error::usage(message).hint(format!("set tensor to {any_of}{}", works.join(", "))))
    }

    /// Rejects a sequence axis if a layer's state passes from token to token.
    ///
    /// # Errors
    /// `Usage`.
    pub fn check_sequence(&self, size: usize) -> Result<()> {
        if size <= 1 || self.deltas().next().is_none() {
            return Ok(());
        }
        let message = format!(
            "sequence = {size} is not supported for {}, which has layers of linear attention",
            self.family.name
        );
        Err(Error::usage(message).hint("set mesh.sequence to 1"))
    }

    /// Rejects an expert axis that does not divide the experts of each layer, or one without a use if the model
    /// `needs_experts`.
    ///
    /// # Errors
    /// `Usage`.
    pub fn check_expert(&self, size: usize, needs_experts: bool) -> Result<()> {
        let count = self.feeds().filter_map(Feed::experts).map(|experts| experts.count).fold(0, gcd);
        if size <= 1 || (count == 0 && !needs_experts) {
            return Ok(());
        }
        if count == 0 {
            let message = format!("expert = {size} has no use for {}, which has no experts", self.family.name);
            return Err(Error::usage(message).hint("set mesh.expert to 1"));
        }
        if !count.is_multiple_of(size) {
            let works: Vec<String> = (1..=count).filter(|n| count.is_multiple_of(*n)).map(|n| n.to_string()).collect();
            let message = format!("expert = {size} does not divide the model's {count} experts");
            return Err(Error::usage(message).hint(format!("set mesh.expert to one of {}", works.join(", "))));
        }
        if self.tuning.as_ref().is_some_and(|tuning| !tuning.has_equal_experts(count)) {
            let message = format!("expert = {size} needs experts that all train or are all frozen");
            return Err(Error::usage(message).hint("set mesh.expert to 1, or change model.freeze"));
        }
        Ok(())
    }

    /// The query heads of a layer, and the key heads of a delta rule. If layers differ, the greatest common divisor of
    /// their numbers.
    fn heads_together(&self) -> usize {
        let heads = self.attentions().map(|attention| attention.heads);
        heads.chain(self.deltas().map(|delta| delta.key_heads)).fold(0, gcd)
    }

    fn narrowest_mlp(&self) -> usize {
        let shared = self.feeds().map(Feed::shared_width).filter(|width| *width > 0);
        self.feeds().map(Feed::width).chain(shared).min().unwrap_or(usize::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arch(heads: usize, kv_heads: usize) -> Arch {
        let config = serde_json::json!({
            "model_type": "llama", "hidden_size": 8 * heads, "intermediate_size": 100, "num_hidden_layers": 1,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": 50
        });
        Arch::from_config(config.as_object().expect("an object")).expect("a known family")
    }

    #[test]
    fn an_invalid_tensor_size_is_rejected_with_the_valid_sizes() {
        let arch = arch(12, 3);
        let error = arch.check_tensor(8).expect_err("8 does not divide 12");
        assert!(error.message.contains("12 attention heads"), "{error}");
        assert_eq!(error.hint.as_deref(), Some("set tensor to one of 1, 2, 3, 4, 6, 12"));
        assert!(arch.check_tensor(0).is_err() && arch.check_tensor(6).is_ok());
        let narrow = Arch { vocabulary: 5, ..arch };
        let error = narrow.check_tensor(6).expect_err("5 tokens over 6 ranks");
        assert!(error.message.contains("vocabulary (5)"), "{error}");
        assert_eq!(error.hint.as_deref(), Some("set tensor to one of 1, 2, 3, 4"));
    }
}
