//! The hidden states between the layers of a forward, as transformers lists them.

use super::arch::Head;
use super::transformer::{Keys, Saved, Transformer};
use super::weights::Weights;
use crate::config::job::Recompute;
use crate::tensor::Tensor;

/// The hidden states of a forward.
pub struct HiddenStates {
    /// Values (t, d) of each: the embedding, the output of every layer but the last, and that of the final norm. These
    /// are the `hidden_states` of transformers.
    pub values: Vec<Vec<f32>>,
    /// The state that the head reads.
    pub last: Tensor,
}

impl Transformer {
    /// Runs a forward over packed rows and keeps the state between any two layers. All ranks that share matrices, units
    /// or rows call this.
    pub fn hidden_states(&self, w: &Weights, tokens: &[u32], positions: &[u32], keys: Keys) -> HiddenStates {
        let mut saved = Saved::new(Recompute::Block);
        let last = self.forward(w, tokens, positions, keys, Some(&mut saved));
        let (inputs, _) = saved.results(0);
        let mut values: Vec<Vec<f32>> = inputs.into_iter().map(|(_, input)| input.to_host()).collect();
        let mut normed = last.to_host();
        // The factor on logits is on the state that the head reads; transformers has it on the logits.
        if w.table.head() == Head::LanguageModel && self.arch.logit_scale != 1.0 {
            for x in &mut normed {
                *x /= self.arch.logit_scale;
            }
        }
        values.push(normed);
        HiddenStates { values, last }
    }
}
