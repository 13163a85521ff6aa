//! Evaluation of jobs that sample: held-out prompts answered greedily and by sampling, and how many answers are right.

use super::kv_divergence;
use super::rollout::{Answer, Collector, greedy};
use crate::config::Config;
use crate::config::rollout::RolloutConfig;
use crate::data::PromptSource;
use crate::error::Result;
use crate::experience::{Experience, Prompt};
use crate::launch::run::Run;
use crate::metrics::eval_rows::{EvalAnswer, EvalResponses, EvalRow};
use crate::metrics::keys::{self, Metrics, named};
use crate::reward::Reward;
use crate::rollout::{Beams, EarlyStopping, Model};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::time::Instant;

/// Prefix of the metric of one of several rewards: its mean score of greedy responses.
const EVAL_REWARD_OF: &str = "eval_reward/";

/// Separates the random numbers of an evaluation from those of the training step with the same number.
pub const EVAL_STEPS: u32 = 1 << 31;

/// A set of prompts with its own metrics.
struct Set {
    /// The name of one of `data.eval_sets` or of a source. Empty for the eval split.
    name: String,
    /// Its range within all evaluated prompts.
    prompts: Range<usize>,
}

impl Set {
    /// The set's own form of a key: `eval/NAME/accuracy_greedy` for `eval_accuracy_greedy`.
    fn key(&self, key: String) -> String {
        match key.strip_prefix("eval_") {
            Some(of_split) if !self.name.is_empty() => format!("{}{}/{of_split}", keys::EVAL_OF_SET, self.name),
            _ => key,
        }
    }
}

/// Evaluates the actor. `model`: the actor, if it is on this rank. `start`: the time when the preparations began. Also
/// returns the first sampled responses, for `kv_divergence`. All ranks of the run call this.
///
/// # Errors
/// `Stopped` if the run was asked to stop before all prompts were answered.
pub fn evaluate(
    run: &mut Run,
    model: Option<Model>,
    collector: &mut Collector,
    step: u64,
    start: Instant,
) -> Result<(Metrics, Vec<Experience>)> {
    let (prompts, sets) = run.ranks.all.agree(held_out(&run.config, &collector.source))?;
    if prompts.is_empty() {
        return Ok((Vec::new(), Vec::new()));
    }
    let sampled = sampled(&run.config);
    let mut answers = Vec::new();
    let beams = Beams { count: run.config.eval.beams, early_stopping: EarlyStopping::default(), length_penalty: 1.0 };
    let beams = Some(beams).filter(|beams| beams.count > 1);
    collector.reward.steps_done = step;
    for (config, beams) in [(&greedy(&sampled), beams), (&sampled, None)] {
        answers.push(collector.evaluate(run, model, EVAL_STEPS + step as u32, &prompts, config, beams)?);
    }
    let temperatures = [0.0, sampled.temperature];
    let rows = rows(&run.config, step, &prompts, &sets, temperatures.into_iter().zip(&answers));
    let recorded = run.recorder.eval_rows(step, rows.into_iter().map(Ok));
    run.ranks.all.agree(recorded)?;
    let mut all = named([(keys::EVAL_TIME_S, start.elapsed().as_secs_f64())]);
    for set in &sets {
        let of = |answers: &Vec<Answer>| -> Vec<Answer> {
            answers.iter().filter(|(response, _)| set.prompts.contains(&response.prompt)).cloned().collect()
        };
        let found = numbers(&run.config, &collector.reward, &of(&answers[0]), &of(&answers[1]));
        all.extend(found.into_iter().map(|(key, value)| (set.key(key), value)));
    }
    let first = answers[1].iter().take(kv_divergence::RESPONSES_MAX);
    let first = first.map(|(response, _)| Experience {
        prompt: prompts[response.prompt].clone(),
        mask: response.mask(),
        response: response.clone(),
        ..Experience::default()
    });
    Ok((all, first.collect()))
}

/// The sampling settings of the non-greedy answers.
pub fn sampled(Config { eval, rollout, .. }: &Config) -> RolloutConfig {
    let rollout = RolloutConfig { keep_sampling_mask: false, ..rollout.clone() };
    if eval.draws() {
        RolloutConfig { samples_per_prompt: eval.samples_per_prompt, temperature: eval.temperature, ..rollout }
    } else {
        RolloutConfig { samples_per_prompt: 1, ..rollout }
    }
}

/// All held-out prompts, and the sets of them that have their own metrics: the eval split and `data.eval_sets`. An
/// `eval` job with several sources also reports each source.
fn held_out(config: &Config, source: &PromptSource) -> Result<(Vec<Prompt>, Vec<Set>)> {
    let most = config.eval.samples_max;
    let (mut prompts, mut sets) = (source.eval_rows(most)?, Vec::new());
    if !prompts.is_empty() {
        sets.push(Set { name: String::new(), prompts: 0..prompts.len() });
    }
    let by_source: Vec<&[Prompt]> = prompts.chunk_by(|a, b| a.source == b.source).collect();
    if !config.uses().trains && by_source.len() > 1 {
        let mut taken: BTreeSet<String> = config.data.eval_sets.iter().map(|set| set.name.clone()).collect();
        let mut end = 0;
        for rows in by_source {
            let stem = Path::new(&rows[0].source).file_stem().map_or("rows".into(), |stem| stem.to_string_lossy());
            let numbered = (2..).map(|i| format!("{stem}_{i}"));
            let name = std::iter::once(stem.to_string()).chain(numbered).find(|name| taken.insert(name.clone()));
            sets.extend(name.map(|name| Set { name, prompts: end..end + rows.len() }));
            end += rows.len();
        }
    }
    for (name, rows) in source.eval_sets(most)? {
        let start = prompts.len();
        prompts.extend(rows);
        sets.push(Set { name, prompts: start..prompts.len() });
    }
    Ok((prompts, sets))
}

/// Metrics of answers. The answers to a prompt are consecutive.
fn numbers(config: &Config, reward: &Reward, greedy: &[Answer], sampled: &[Answer]) -> Metrics {
    let is_right = |(_, scored): &Answer| scored.score >= config.eval.correct_at;
    let right = |answer: &Answer| f64::from(u8::from(is_right(answer)));
    let mut all = named([
        (keys::EVAL_ACCURACY_GREEDY, mean(greedy.iter().map(right))),
        (keys::EVAL_ACCURACY_SAMPLED, mean(sampled.iter().map(right))),
        (keys::EVAL_REWARD_MEAN, mean(greedy.iter().map(|(_, scored)| f64::from(scored.score)))),
        (keys::EVAL_RESPONSE_TOKENS_MEAN, mean(greedy.iter().map(|(response, _)| response.tokens.len() as f64))),
        (keys::EVAL_SAMPLES, greedy.len() as f64),
    ]);
    if config.reward.sources() > 1 {
        let names: BTreeSet<&String> = greedy.iter().flat_map(|(_, scored)| scored.parts.keys()).collect();
        let of = |name: &String| {
            mean(greedy.iter().map(|(_, scored)| f64::from(scored.parts.get(name).copied().unwrap_or(0.0))))
        };
        all.extend(names.into_iter().map(|name| (format!("{EVAL_REWARD_OF}{name}"), of(name))));
    }
    if !config.eval.draws() && config.uses().trains {
        return all;
    }
    let (n, drawn) = (config.eval.samples_per_prompt, if config.eval.draws() { sampled } else { greedy });
    let of_prompts: Vec<&[Answer]> = drawn.chunk_by(|(a, _), (b, _)| a.prompt == b.prompt).collect();
    let count = |answers: &[Answer]| answers.iter().filter(|answer| is_right(answer)).count();
    for &k in &config.eval.pass_at {
        // If a reward failed on answers, a prompt may have too few left.
        let of_enough = of_prompts.iter().filter(|answers| answers.len() >= k);
        let pass = mean(of_enough.map(|answers| pass_at(answers.len(), count(answers), k)));
        all.push((format!("{}{k}", keys::EVAL_PASS_AT), pass));
    }
    let shares = of_prompts.iter().map(|answers| count(answers) as f64 / answers.len() as f64);
    all.push((format!("{}{n}", keys::EVAL_AVG_AT), mean(shares)));
    if n > 1 {
        let votes = |answers: &&[Answer]| {
            let votes = answers.iter().map(|one| (reward.answer(&one.0.text), is_right(one)));
            f64::from(u8::from(majority(votes)))
        };
        all.push((format!("{}{n}", keys::EVAL_MAJORITY_AT), mean(of_prompts.iter().map(votes))));
    }
    all
}

/// The mean, 0 if empty. Responses on which a reward failed do not count.
fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0u64), |(sum, count), value| (sum + value, count + 1));
    sum / count.max(1) as f64
}

/// The probability that at least one of `k` out of `n` samples is right, if `c` of the `n` are (arXiv:2107.03374,
/// section 2.1):
///
/// pass@k = 1 - C(n - c, k) / C(n, k) = 1 - product over i in n - c + 1 ..= n of (1 - k / i).
fn pass_at(n: usize, c: usize, k: usize) -> f64 {
    if n - c < k {
        return 1.0;
    }
    1.0 - (n - c + 1..=n).map(|i| 1.0 - k as f64 / i as f64).product::<f64>()
}

/// Whether the most frequent answer is right. Of answers with equally many votes, the one sampled first counts. A
/// sample without an answer does not vote.
fn majority(answers: impl Iterator<Item = (Option<String>, bool)>) -> bool {
    let mut votes: Vec<(String, usize, bool)> = Vec::new();
    for (answer, is_right) in answers.filter_map(|(answer, is_right)| Some((answer?, is_right))) {
        match votes.iter_mut().find(|(known, ..)| *known == answer) {
            Some((_, count, _)) => *count += 1,
            None => votes.push((answer, 1, is_right)),
        }
    }
    let most = votes.iter().map(|(_, count, _)| *count).max();
    votes.iter().find(|(_, count, _)| Some(*count) == most).is_some_and(|(.., is_right)| *is_right)
}

/// Readable rows of the first prompts of each set, `metrics.eval_rows_max` in all, from the answers at each
/// temperature.
fn rows<'a>(
    config: &Config,
    step: u64,
    prompts: &[Prompt],
    sets: &[Set],
    answers: impl Iterator<Item = (f32, &'a Vec<Answer>)>,
) -> Vec<EvalRow> {
    let mut of_prompts: BTreeMap<usize, Vec<EvalAnswer>> = BTreeMap::new();
    for (temperature, answers) in answers {
        for (response, scored) in answers {
            let (text, tokens, score) = (response.text.clone(), response.tokens.len(), scored.score);
            let environment = response.written().to_vec();
            let answer = EvalAnswer { response: text, score, tokens, temperature, environment };
            of_prompts.entry(response.prompt).or_default().push(answer);
        }
    }
    let each = config.metrics.eval_rows_max.div_ceil(sets.len());
    let mut rows = Vec::new();
    for set in sets {
        for i in set.prompts.clone().take(each) {
            let Some(answers) = of_prompts.remove(&i) else { continue };
            let (prompt, correct_at) = (&prompts[i], config.eval.correct_at);
            rows.push(EvalRow {
                step,
                row: prompt.id,
                prompt: prompt.text.clone(),
                margin: mean(answers.iter().map(|answer| f64::from(answer.score))) - f64::from(correct_at),
                correct: answers[0].score >= correct_at,
                responses: EvalResponses::Answers { set: set.name.clone(), label: prompt.label.clone(), answers },
            });
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pass_at_k_is_the_share_of_subsets_of_k_samples_that_contain_a_correct_one() {
        for n in 1..=8usize {
            for (c, k) in (0..=n).flat_map(|c| (1..=n).map(move |k| (c, k))) {
                // The first c samples are right.
                let subsets = (0..1u32 << n).filter(|subset| subset.count_ones() as usize == k);
                let holds = subsets.clone().filter(|subset| subset & ((1 << c) - 1) != 0).count();
                let share = holds as f64 / subsets.count() as f64;
                assert!((pass_at(n, c, k) - share).abs() < 1e-12, "n {n}, c {c}, k {k}");
            }
        }
        assert!((pass_at(10_000, 1, 5_000) - 0.5).abs() < 1e-9);
    }

    #[test]
    fn the_majority_counts_only_given_answers_and_the_first_answer_wins_a_tie() {
        let of = |answers: &[(&str, bool)]| {
            majority(answers.iter().map(|(answer, right)| (Some(answer.to_string()).filter(|a| !a.is_empty()), *right)))
        };
        assert!(of(&[("7", false), ("8", true), ("8", true)]));
        assert!(of(&[("8", true), ("7", false)]) && !of(&[("7", false), ("8", true)]));
        assert!(of(&[("", false), ("", false), ("8", true)]));
        assert!(!of(&[("", false)]) && !of(&[]));
    }
}
