//! What a computation of a model gives for one sequence of tokens.

use crate::comm::{Axes, Group};
use crate::config::rollout::RolloutConfig;
use crate::error::{Error, Result};
use crate::experience::Prompt;
use crate::learn::packed::PackedRow;
use crate::model::{Arch, Head, TensorPart, Transformer, Weights};
use crate::ops::zigzag;
use crate::rng::{Purpose, Rng};
use crate::rollout::{Engine, Hooks, Model, requests};
use crate::tensor::DType;
use std::sync::Arc;

/// Results for one sequence of t tokens.
#[derive(Clone, Debug)]
pub struct Computation {
    /// The name that is shown: a directory, a file, a device or a layout.
    pub name: String,
    /// The dtype in which matrices are multiplied.
    pub dtype: DType,
    pub ids: Vec<u32>,
    /// The width of hidden states.
    pub width: usize,
    /// Hidden states (t, width), as `HiddenStates` lists them.
    pub hidden: Vec<Vec<f32>>,
    /// Logits (t, vocabulary), or the values (t, 1) of a value head.
    pub logits: Vec<f32>,
    /// The likeliest token after `ids`, the likeliest after that one, and so on.
    pub greedy: Vec<u32>,
    /// The log-probabilities that the sampler recorded for them; empty if it did not sample.
    pub greedy_logprobs: Vec<f32>,
}

impl Computation {
    /// Runs a forward of a model over `ids`. All ranks of `axes` call this, and get all rows.
    pub fn forward(name: &str, (model, weights): (&Transformer, &Weights), axes: &Axes, ids: &[u32]) -> Self {
        let mut row = PackedRow::new();
        row.push(ids, 1);
        let part = row.part(axes.sequence.rank(), axes.sequence.size());
        let states = model.hidden_states(weights, &part.tokens, &part.positions, part.keys());
        let (width, rows) = (model.arch.width, (0..part.tokens.len() as u32).collect::<Vec<_>>());
        let whole = |values: &[f32], width: usize| whole_rows(&axes.sequence, ids.len(), values, width);
        let (logits, outputs) = match weights.table.head() {
            Head::LanguageModel => {
                let logits = model.logits_part(weights, &states.last, &rows).to_host();
                (whole_columns(&axes.tensor, model.arch.vocabulary, &logits), model.arch.vocabulary)
            }
            Head::Value => (model.values(weights, &states.last, &rows), 1),
        };
        weights.release();
        Self {
            name: name.to_owned(),
            dtype: weights.dtype(),
            ids: ids.to_vec(),
            width,
            hidden: states.values.iter().map(|values| whole(values, width)).collect(),
            logits: whole(&logits, outputs),
            greedy: Vec::new(),
            greedy_logprobs: Vec::new(),
        }
    }

    /// Adds `new` tokens that the sampler takes greedily, with a cache of up to half of `memory` bytes; none without the
    /// head of a language model. The ranks of the model's tensor axis call this.
    ///
    /// # Errors
    /// The errors of `Engine::generate`.
    pub fn sample(&mut self, model: Model, new: usize, memory: u64) -> Result<()> {
        let new = new.min(model.transformer.arch.context.saturating_sub(self.ids.len()));
        if new == 0 || model.weights.table.head() != Head::LanguageModel {
            return Ok(());
        }
        let config = RolloutConfig {
            temperature: 0.0,
            response_tokens_max: new,
            ignore_eos: true,
            graphs: false,
            ..RolloutConfig::default()
        };
        let prompt = Prompt { tokens: self.ids.clone(), ..Prompt::default() };
        let requests = requests(&[prompt], &config, &Arc::default(), model.transformer.arch.context)?;
        let mut hooks = Hooks::default();
        let rng = Rng::new(0, Purpose::Sample);
        let outcome = Engine::new(&config, memory).generate(model, rng, 0, &requests, &mut hooks)?;
        let response = outcome.complete().and_then(|mut all| all.pop());
        let response = response.ok_or_else(|| Error::fault("the response did not finish"))?;
        (self.greedy, self.greedy_logprobs) = (response.tokens, response.logprobs);
        Ok(())
    }

    /// Values of each token's outputs: the vocabulary, or 1.
    pub fn outputs(&self) -> usize {
        self.logits.len() / self.ids.len()
    }

    /// The name of the outputs.
    pub fn name_of_outputs(&self) -> &'static str {
        if self.outputs() > 1 { "logits" } else { "values" }
    }

    /// The name of a hidden state: `embedding`, `layer 3` for its output, `final norm`.
    pub fn name_of(&self, state: usize) -> String {
        match state {
            0 => "embedding".into(),
            n if n + 1 == self.hidden.len() => "final norm".into(),
            n => format!("layer {}", n - 1),
        }
    }
}

/// Tokens for a model without a text: all kinds of them, the same for every model of a vocabulary.
pub fn synthetic_ids(arch: &Arch, count: usize) -> Vec<u32> {
    let rng = Rng::new(49, Purpose::Synthetic);
    let count = count.min(arch.context.saturating_sub(1)).max(1);
    (0..count as u32).map(|i| rng.below(arch.vocabulary as u64, [i, 0, 0, 0]) as u32).collect()
}

/// The rows of a sequence of `count` tokens from the parts of all ranks of the sequence axis.
fn whole_rows(group: &Group, count: usize, mine: &[f32], width: usize) -> Vec<f32> {
    let size = group.size();
    if size == 1 {
        return mine.to_vec();
    }
    let rows: Vec<Vec<usize>> = (0..size).map(|rank| zigzag::rows(&[0, count], rank, size)).collect();
    let counts: Vec<usize> = rows.iter().map(|rows| rows.len() * width).collect();
    let mut all = vec![0.0; count * width];
    for (rows, values) in rows.iter().zip(group.all_gather_counts(mine, &counts)) {
        for (row, values) in rows.iter().zip(values.chunks_exact(width)) {
            all[row * width..(row + 1) * width].copy_from_slice(values);
        }
    }
    all
}

/// The columns of all ranks of the tensor axis, next to each other in each row.
fn whole_columns(group: &Group, columns: usize, mine: &[f32]) -> Vec<f32> {
    let size = group.size();
    let parts: Vec<_> = (0..size).map(|rank| TensorPart { rank, size }.range(columns)).collect();
    let rows = mine.len() / parts[group.rank()].len().max(1);
    let counts: Vec<usize> = parts.iter().map(|part| part.len() * rows).collect();
    let mut all = vec![0.0; rows * columns];
    for (part, values) in parts.iter().zip(group.all_gather_counts(mine, &counts)) {
        for (row, values) in values.chunks_exact(part.len().max(1)).enumerate() {
            all[row * columns + part.start..row * columns + part.end].copy_from_slice(values);
        }
    }
    all
}
