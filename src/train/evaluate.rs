//! Evaluation of PPO: held-out prompts answered greedily and by sampling, and how many answers are right.

use super::rollout::Collector;
use crate::config::rollout::RolloutConfig;
use crate::error::Result;
use crate::launch::run::Run;
use crate::metrics::keys::{self, Metrics, named};
use crate::rollout::Model;
use std::time::Instant;

/// Keeps the random numbers of an evaluation apart from those of the step with the same number.
const EVAL_STEPS: u32 = 1 << 31;

/// `model`: the actor, where it is on this rank; `start`: when its preparations began. None where the run was asked to stop
/// before all prompts were answered. All ranks of the run call this.
pub fn evaluate(
    run: &Run,
    model: Option<Model>,
    collector: &mut Collector,
    step: u64,
    start: Instant,
) -> Result<Option<Metrics>> {
    let prompts = run.ranks.all.agree(collector.source.eval_rows(run.config.eval.samples_max))?;
    if prompts.is_empty() {
        return Ok(Some(Vec::new()));
    }
    let sampled = RolloutConfig { samples_per_prompt: 1, ..run.config.rollout.clone() };
    let greedy = RolloutConfig { temperature: 0.0, ..sampled.clone() };
    let mut results = Vec::new();
    for config in [&greedy, &sampled] {
        let found = collector.evaluate(run, model, EVAL_STEPS + step as u32, &prompts, config)?;
        let Some(found) = found else { return Ok(None) };
        results.push(found);
    }
    let n = prompts.len() as f64;
    let right = |rows: &[(f32, u64)]| rows.iter().filter(|r| r.0 >= run.config.eval.correct_at).count() as f64 / n;
    Ok(Some(named([
        (keys::EVAL_ACCURACY_GREEDY, right(&results[0])),
        (keys::EVAL_ACCURACY_SAMPLED, right(&results[1])),
        (keys::EVAL_REWARD_MEAN, results[0].iter().map(|r| f64::from(r.0)).sum::<f64>() / n),
        (keys::EVAL_RESPONSE_TOKENS_MEAN, results[0].iter().map(|r| r.1 as f64).sum::<f64>() / n),
        (keys::EVAL_SAMPLES, n),
        (keys::EVAL_TIME_S, start.elapsed().as_secs_f64()),
    ])))
}
