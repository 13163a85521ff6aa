//! Scores of responses: rules on the text, a user's Python file, and mixtures of them.
//!
//! A reward that fails is an error: there is no score that nobody gave.

mod context;
pub mod mixture;
pub mod python;
pub mod rules;

pub use context::{Lookup, RewardContext};
pub use mixture::{RewardOutput, Scored};

use std::path::Path;

use crate::config::{self, reward::RewardConfig};
use crate::error::Result;
use crate::experience::{Prompt, Response};

#[derive(Debug)]
pub struct Reward {
    parts: Vec<Part>,
    /// Whether reward models score beside them.
    has_models: bool,
}

#[derive(Debug)]
struct Part {
    name: String,
    weight: f32,
    source: Source,
}

#[derive(Debug)]
enum Source {
    Rule(Box<rules::Rule>),
    Python(Box<python::PythonReward>),
}

impl Reward {
    /// Checks the configuration, compiles patterns, and starts each Python file far enough to know its function. Paths
    /// are relative to `base_dir`, the job file's directory. A job that needs no reward may name none.
    pub fn new(config: &RewardConfig, base_dir: &Path, context: &RewardContext) -> Result<Self> {
        if config.is_set() {
            config.check()?;
        }
        let mut parts: Vec<Part> = Vec::new();
        for rule in &config.rule {
            let name = if rule.name.is_empty() { config::name(&rule.kind) } else { rule.name.clone() };
            let source = Source::Rule(Box::new(rules::Rule::new(rule)?));
            parts.push(Part { name, weight: rule.weight, source });
        }
        for python in &config.python {
            let source = python::PythonReward::new(config, python, base_dir, context)?;
            let name = if python.name.is_empty() { source.function() } else { &python.name }.to_string();
            parts.push(Part { name, weight: python.weight, source: Source::Python(Box::new(source)) });
        }
        for i in 0..parts.len() {
            let same = parts[..i].iter().filter(|p| p.name == parts[i].name).count();
            if same > 0 {
                parts[i].name = format!("{}_{}", parts[i].name, same + 1);
            }
        }
        Ok(Self { parts, has_models: !config.models.is_empty() })
    }

    /// Scores `responses[i]` to `prompts[i]`, in that order. With several rewards `extra` also holds the score of each
    /// under its name. Without any reward all scores are 0.
    ///
    /// # Errors
    /// `Service` where a Python reward failed after its retries, or every reward abstained from a response; `Data`
    /// where a rule needs a label that a prompt does not have.
    ///
    /// # Panics
    /// Where the two slices differ in length.
    pub fn score(&mut self, prompts: &[&Prompt], responses: &[&Response]) -> Result<Vec<Scored>> {
        assert_eq!(prompts.len(), responses.len(), "one prompt per response");
        if prompts.is_empty() {
            return Ok(Vec::new());
        }
        if self.parts.is_empty() && !self.has_models {
            return Ok(vec![Scored::default(); prompts.len()]);
        }
        let mut outputs = Vec::with_capacity(self.parts.len());
        for part in &mut self.parts {
            outputs.push(match &mut part.source {
                Source::Rule(rule) => rule.score(prompts, responses)?,
                Source::Python(python) => python.score(prompts, responses)?,
            });
        }
        let names: Vec<(&str, f32)> = self.parts.iter().map(|p| (p.name.as_str(), p.weight)).collect();
        mixture::mix(&names, outputs, prompts, self.has_models)
    }
}
