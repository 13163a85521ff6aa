//! Scores of responses: rules on the text, a user's Python file, a service, and mixtures of them. Each response is sent
//! to them as soon as it is finished.
//!
//! A reward that fails is an error. No score is ever made up.

pub mod environment;
pub mod feedback;
mod http;
pub mod mixture;
pub mod pool;
mod python;
mod reply;
pub mod rules;
pub mod tls;

pub use mixture::{RewardOutput, Scored};
pub use pool::{Lookup, Notes, RewardContext};

use crate::config::{self, reward::RewardConfig};
use crate::error::Result;
use crate::experience::{Prompt, Response};
use crate::sys::trace::{self, Category};
use pool::{Asked, Pool};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Debug)]
pub struct Reward {
    parts: Vec<Part>,
    /// Whether reward models score in addition.
    has_models: bool,
    /// Weights in the sum by name, including reward models.
    weights: BTreeMap<String, f32>,
    /// The responses of this round, by position.
    asked: Vec<Option<Arc<Asked>>>,
    /// The number of steps that the run has finished.
    pub steps_done: u64,
    notes: Notes,
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
    /// Scores turns during sampling.
    Environment,
    Pool(Box<Pool>),
}

impl Reward {
    /// Checks the configuration, compiles patterns, starts each Python file to find its function, and connects to each
    /// server once. Paths are relative to `base_dir`, the job file's directory. Jobs that need no reward may have none.
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
            let (function, file, workers) = python::workers(config, python, false, base_dir, context)?;
            let about = format!("reward {function} of {}", file.display());
            let source = Source::Pool(Box::new(Pool::new(config, about, python.batch, workers)?));
            let name = if python.name.is_empty() { function } else { python.name.clone() };
            parts.push(Part { name, weight: python.weight, source });
        }
        for http in &config.http {
            let mut workers = http::workers(config, "reward.http", &http.url, &http.header_env, context)?;
            for worker in &mut workers {
                worker.logprobs = http.logprobs;
            }
            let name = if http.name.is_empty() { "http".to_string() } else { http.name.clone() };
            let source = Source::Pool(Box::new(Pool::new(config, format!("reward {name}"), http.batch, workers)?));
            parts.push(Part { name, weight: http.weight, source });
        }
        for environment in &config.environment {
            let name = if environment.name.is_empty() { "environment" } else { &environment.name };
            parts.push(Part { name: name.to_string(), weight: environment.weight, source: Source::Environment });
        }
        for i in 0..parts.len() {
            let same = parts[..i].iter().filter(|p| p.name == parts[i].name).count();
            if same > 0 {
                parts[i].name = format!("{}_{}", parts[i].name, same + 1);
            }
        }
        let mut weights: BTreeMap<String, f32> = parts.iter().map(|part| (part.name.clone(), part.weight)).collect();
        weights.extend(config.models.iter().enumerate().map(|(i, model)| (model.name(i), model.weight)));
        weights.extend(
            config.judge.iter().enumerate().map(|(i, judge)| (judge.name(config.models.len() + i), judge.weight)),
        );
        Ok(Self {
            parts,
            has_models: config.has_models(),
            weights,
            asked: Vec::new(),
            steps_done: 0,
            notes: context.notes.clone(),
        })
    }

    /// A note about values that rewards returned and that are not kept. Each is returned once.
    pub fn next_note(&self) -> Option<String> {
        self.notes.next()
    }

    pub fn weights(&self) -> &BTreeMap<String, f32> {
        &self.weights
    }

    /// The answer in a response, used to count equal answers. It is the text that the first rule with an answer
    /// compares with the label, or `None` if that rule finds nothing. Without such a rule, it is the stripped text.
    pub fn answer(&self, text: &str) -> Option<String> {
        let rule = self.parts.iter().find_map(|part| match &part.source {
            Source::Rule(rule) if rule.has_answer() => Some(rule),
            _ => None,
        });
        rule.map_or_else(|| Some(text.trim().to_string()), |rule| rule.compared(text))
    }

    fn pools(&mut self) -> impl Iterator<Item = &mut Pool> {
        self.parts.iter_mut().filter_map(|part| match &mut part.source {
            Source::Pool(pool) => Some(&mut **pool),
            Source::Rule(_) | Source::Environment => None,
        })
    }

    /// Reserves `count` more positions for responses of this round, and returns the first.
    pub fn expect(&mut self, count: usize) -> usize {
        let first = self.asked.len();
        self.asked.resize(first + count, None);
        self.pools().for_each(|pool| pool.expect(first..first + count));
        first
    }

    /// Sends a finished response to its rewards, and does not wait.
    pub fn push(&mut self, place: usize, prompt: &Prompt, response: &Response) {
        let Self { parts, asked, steps_done, .. } = self;
        let (prompt, response, steps_done) = (prompt.clone(), response.clone(), *steps_done);
        asked[place] = Some(Arc::new(Asked { prompt, response, steps_done }));
        for part in parts {
            if let Source::Pool(pool) = &mut part.source {
                pool.push(place, asked);
            }
        }
    }

    /// Ends the current requests: later responses are not scored in one call with these.
    pub fn flush(&mut self) {
        for part in &mut self.parts {
            if let Source::Pool(pool) = &mut part.source {
                pool.flush(&self.asked);
            }
        }
    }

    /// Waits until `until`. Returns whether all responses are scored, or no more will be. Call `flush` before.
    pub fn wait(&mut self, until: Instant) -> bool {
        self.pools().all(|pool| pool.wait(until)) || self.has_failed()
    }

    /// Whether `finish` will return an error.
    pub fn has_failed(&mut self) -> bool {
        self.pools().any(|pool| pool.has_failed())
    }

    /// The scores in the order of positions, after `wait` returned true. Then the next round begins. With several
    /// rewards, `extra` also holds the score of each under its name. Without rewards all scores are 0.
    ///
    /// # Errors
    /// `Service` if a function or a service failed after its retries, or every reward abstained from a response. `Data`
    /// if a rule needs a label that a prompt does not have.
    pub fn finish(&mut self) -> Result<Vec<Scored>> {
        let asked = std::mem::take(&mut self.asked);
        let asked = asked.iter().map(|asked| asked.as_deref().expect("each was handed over"));
        let (prompts, responses): (Vec<_>, Vec<_>) = asked.map(|asked| (&asked.prompt, &asked.response)).unzip();
        let failed = self.pools().find(|pool| pool.has_failed()).map(Pool::finish);
        if let Some(failed) = failed {
            self.cancel();
            failed?;
        }
        if self.parts.is_empty() && !self.has_models {
            return Ok(vec![Scored::default(); prompts.len()]);
        }
        let mut outputs = Vec::with_capacity(self.parts.len());
        for part in &mut self.parts {
            outputs.push(match &mut part.source {
                Source::Rule(rule) => {
                    let name = || format!("rule {}", part.name);
                    let _span = trace::named(Category::Reward, name, "responses", [responses.len()]);
                    rule.score(&prompts, &responses)?
                }
                Source::Environment => responses.iter().map(|r| environment::output(r.episode.as_ref())).collect(),
                Source::Pool(pool) => pool.finish()?,
            });
        }
        let names: Vec<(&str, f32)> = self.parts.iter().map(|p| (p.name.as_str(), p.weight)).collect();
        mixture::mix(&names, outputs, &prompts, self.has_models)
    }

    /// Drops the responses of this round.
    pub fn cancel(&mut self) {
        self.asked.clear();
        self.pools().for_each(Pool::cancel);
    }

    /// Scores `responses[i]` to `prompts[i]`, in that order, like `finish`.
    ///
    /// # Panics
    /// If the two slices differ in length.
    pub fn score(&mut self, prompts: &[&Prompt], responses: &[&Response]) -> Result<Vec<Scored>> {
        assert_eq!(prompts.len(), responses.len(), "one prompt per response");
        let first = self.expect(prompts.len());
        for (i, (prompt, response)) in prompts.iter().zip(responses).enumerate() {
            self.push(first + i, prompt, response);
        }
        self.flush();
        while !self.wait(Instant::now() + Duration::from_secs(1)) {}
        self.finish()
    }
}
