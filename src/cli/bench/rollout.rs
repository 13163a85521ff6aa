//! Sampling: 16 prompts of 64 tokens, 128 new tokens each, without early ends.

use super::measure::Meter;
use super::models::{Source, tokens};
use crate::config::rollout::RolloutConfig;
use crate::error::Result;
use crate::experience::{Prompt, Response};
use crate::learn::Role;
use crate::model::{Head, cost};
use crate::rng::{Purpose, Rng};
use crate::rollout::{self, Engine, Hooks, Model, Stop};
use crate::sys::memory;
use std::sync::Arc;

const BATCH: usize = 16;
const PROMPT: usize = 64;
const NEW: usize = 128;

/// The prompts that are sampled, and the engine.
pub struct RolloutBench {
    pub prompts: Vec<Prompt>,
    config: RolloutConfig,
    engine: Engine,
}

impl RolloutBench {
    /// `batch` random prompts of `prompt` tokens, with `new` tokens after each.
    pub fn new(role: &Role, batch: usize, prompt: usize, new: usize, temperature: f32) -> Self {
        let vocabulary = role.arch().vocabulary;
        let prompts = (0..batch)
            .map(|id| Prompt { id: id as u64, tokens: tokens(prompt, id, vocabulary), ..Prompt::default() })
            .collect();
        let config = RolloutConfig {
            prompts_per_step: batch,
            response_tokens_max: new,
            temperature,
            ignore_eos: true,
            ..RolloutConfig::default()
        };
        let engine = Engine::new(&config, memory::available_bytes());
        Self { prompts, config, engine }
    }

    pub fn sample(&mut self, role: &Role, step: u32) -> Result<Vec<Response>> {
        let stop = Arc::new(Stop::default());
        let requests = rollout::requests(&self.prompts, &self.config, &stop, role.arch().context)?;
        let model = Model { transformer: &role.transformer, weights: &role.weights, tokenizer: None };
        let mut hooks = Hooks::default();
        let outcome = self.engine.generate(model, Rng::new(0, Purpose::Sample), step, &requests, &mut hooks)?;
        Ok(outcome.complete().expect("nothing stops the call"))
    }
}

pub fn run(meter: &mut Meter, source: &Source) -> Result<()> {
    let role = source.role("actor", Head::LanguageModel, meter.dtype)?;
    let cost = cost::sampling(role.arch(), meter.dtype, BATCH, PROMPT, NEW);
    for (mode, temperature) in [("sampling", 1.0), ("greedy", 0.0)] {
        let mut rollout = RolloutBench::new(&role, BATCH, PROMPT, NEW, temperature);
        let mut step = 0;
        let measured = meter.long(|_| {
            step += 1;
            rollout.sample(&role, step).map(|_| ())
        })?;
        let work = format!("{} {mode} {BATCH} x ({PROMPT} + {NEW})", source.name);
        meter.show(&work, &measured, Some(BATCH * NEW), cost, &[]);
        if mode == "greedy" {
            meter.show_peaks(&measured);
        }
    }
    Ok(())
}
