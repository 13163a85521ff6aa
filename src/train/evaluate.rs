//! Evaluation of PPO: held-out prompts answered greedily and by sampling, and how many answers are right.

use super::rollout::{Collector, greedy};
use crate::config::rollout::RolloutConfig;
use crate::error::Result;
use crate::launch::run::Run;
use crate::metrics::keys::{self, Metrics, named};
use crate::reward::Scored;
use crate::rollout::Model;
use std::collections::BTreeSet;
use std::time::Instant;

/// What stands before the name of one of several rewards: its mean score of greedy responses.
const EVAL_REWARD_OF: &str = "eval_reward/";

/// Keeps the random numbers of an evaluation apart from those of the step with the same number.
pub(super) const EVAL_STEPS: u32 = 1 << 31;

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
    let greedy = greedy(&sampled);
    let mut results = Vec::new();
    for config in [&greedy, &sampled] {
        let found = collector.evaluate(run, model, EVAL_STEPS + step as u32, &prompts, config)?;
        let Some(found) = found else { return Ok(None) };
        results.push(found);
    }
    // Where a reward failed on a response, that counts nowhere.
    let mean = |rows: &[(Scored, u64)], of: &dyn Fn(&(Scored, u64)) -> f64| {
        rows.iter().map(of).sum::<f64>() / rows.len().max(1) as f64
    };
    let right = |row: &(Scored, u64)| f64::from(u8::from(row.0.score >= run.config.eval.correct_at));
    let mut all = named([
        (keys::EVAL_ACCURACY_GREEDY, mean(&results[0], &right)),
        (keys::EVAL_ACCURACY_SAMPLED, mean(&results[1], &right)),
        (keys::EVAL_REWARD_MEAN, mean(&results[0], &|row| f64::from(row.0.score))),
        (keys::EVAL_RESPONSE_TOKENS_MEAN, mean(&results[0], &|row| row.1 as f64)),
        (keys::EVAL_SAMPLES, results[0].len() as f64),
        (keys::EVAL_TIME_S, start.elapsed().as_secs_f64()),
    ]);
    if run.config.reward.sources() > 1 {
        let names: BTreeSet<&String> = results[0].iter().flat_map(|(scored, _)| scored.parts.keys()).collect();
        let of =
            |name: &String| mean(&results[0], &|(scored, _)| f64::from(scored.parts.get(name).copied().unwrap_or(0.0)));
        all.extend(names.into_iter().map(|name| (format!("{EVAL_REWARD_OF}{name}"), of(name))));
    }
    Ok(Some(all))
}
