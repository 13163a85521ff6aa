//! Decoding with a model of the shape of Llama 2 7B, with CUDA graphs and without. Each token reads all weights, so the
//! target is a share of a copy.

use super::bench::{Bench, Target, Work};
use crate::cli::bench::models::llama;
use crate::comm::Axes;
use crate::config::rollout::RolloutConfig;
use crate::device::Device;
use crate::error::Result;
use crate::experience::Prompt;
use crate::model::partition::Shards;
use crate::model::{Head, ParamTable, TensorPart, Transformer, Weights};
use crate::rng::{Purpose, Rng};
use crate::rollout::{Engine, Hooks, Model, Stop, requests};
use crate::tensor::DType;
use std::sync::Arc;

const CACHE_BYTES: usize = 8 << 30;

pub(super) fn run(bench: &Bench) -> Result<()> {
    let n = |real: usize, small: usize| bench.pick(real, small);
    let (widths, heads) = ([n(4096, 64), n(11008, 96)], n(32, 1));
    let arch = llama(n(32000, 64), widths, n(32, 1), [heads, heads], 1024);
    let table = Arc::new(ParamTable::on(Device::Cuda, &arch, Head::LanguageModel, TensorPart::whole()));
    let transformer = Transformer::for_axes(&arch, &table, &Axes::one());
    // Only the token's row of the embedding is read.
    let read = table.parameters() - arch.vocabulary * arch.width;
    if !bench.has_room("decode 7B", 2 * table.parameters() + CACHE_BYTES) {
        return Ok(());
    }
    let weights = weights(bench, &table);
    let model = Model { transformer: &transformer, weights: &weights, tokenizer: None };
    let new = n(64, 3);
    for batch in [1, n(16, 2), n(64, 3)] {
        let prompts: Vec<Prompt> =
            (0..batch as u64).map(|id| Prompt { id, tokens: vec![id as u32], ..Prompt::default() }).collect();
        for graphs in [true, false] {
            let config = RolloutConfig { response_tokens_max: new, graphs, ..RolloutConfig::default() };
            let requests = requests(&prompts, &config, &Arc::new(Stop::default()), arch.context)?;
            let mut engine = Engine::new(&config, CACHE_BYTES as u64);
            let mut outcome = Ok(());
            let cost = Work::from_bytes((2 * read * new) as f64, (2 * read * new * batch) as f64);
            let target = (batch == 1 && graphs).then_some(Target::Copy(0.75));
            let how = if graphs { "graphs" } else { "ordinary steps" };
            bench.measure(&format!("decode 7B, {batch} x {new} tokens, {how}"), cost, target, || {
                let mut hooks = Hooks::default();
                let done = engine.generate(model, Rng::new(0, Purpose::Sample), 0, &requests, &mut hooks);
                outcome = std::mem::replace(&mut outcome, Ok(())).and(done.map(|_| ()));
            });
            outcome?;
        }
    }
    Ok(())
}

/// A model with random weights.
pub(super) fn weights(bench: &Bench, table: &Arc<ParamTable>) -> Weights {
    let units = table.units().to_vec();
    let mut weights = Weights::scratch(table.clone(), DType::Bf16, &Shards::new(table, &Axes::one(), 0));
    for (u, unit) in units.iter().enumerate() {
        bench.fill_weights(weights.local_mut(u).part_mut(unit).cuda());
    }
    weights
}
