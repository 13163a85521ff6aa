//! What a run warns of: settings and numbers that seldom mean what was meant. Each is given once, with the key that changes it.

use crate::config::Config;
use crate::config::job::JobKind;
use crate::config::ppo::Correction;
use crate::data::Rows;
use crate::launch::run::Run;
use crate::launch::step_shape::StepShape;
use crate::metrics::keys::{self, Metrics};

/// A larger share of filtered rows is warned of.
const FILTERED: f64 = 0.1;
/// A larger KL a token is warned of, in nats: the policy answers otherwise than its reference on most tokens.
const KL: f64 = 1.0;
/// A larger fall of the chosen responses' log-probability is warned of, in nats a response.
const CHOSEN_FALL: f64 = 10.0;
/// A larger lead of the accuracy on trained rows over that on held-out ones is warned of, where both are of so many rows.
const OVERFIT: f64 = 0.2;
const OVERFIT_SAMPLES: f64 = 32.0;
/// The KL of fewer rows is noise.
const KTO_SAMPLES: usize = 8;

/// What is known before the first step. `context`: tokens of the longest row of model.actor.
pub fn of_start(run: &Run, shape: &StepShape, rows: &Rows, context: usize) -> Vec<String> {
    let (config, ledger) = (&run.config, rows.ledger());
    let mut found = Vec::new();
    let filtered: u64 = ledger.filtered.iter().filter(|(rule, _)| *rule != "other_split").map(|(_, rows)| rows).sum();
    let share = filtered as f64 / ledger.rows.max(1) as f64;
    if share > FILTERED {
        let rules = ledger.filtered.iter().map(|(rule, rows)| format!("{rule} {rows}"));
        found.push(format!(
            "{:.0} % of the rows are filtered ({}): ledger.jsonl names them; data.prompt_tokens_max, data.long_prompts and \
             data.row_tokens_max say which",
            100.0 * share,
            rules.collect::<Vec<_>>().join(", ")
        ));
    }
    if config.job.kind == JobKind::Ppo {
        found.extend(of_rollout(config, run.ranks.layout().rollout_data(), rows, context));
    } else if !shape.has_rollout() {
        found.extend(of_rows(config, shape.minibatch, run.ranks.axes.data.size(), rows));
    }
    found
}

fn of_rows(config: &Config, minibatch: usize, ranks: usize, rows: &Rows) -> Vec<String> {
    let key = format!("{}.minibatch_samples = {minibatch}", crate::config::name(&config.job.kind));
    let all = [
        (ranks > minibatch).then(|| format!("{key} for {ranks} ranks that train: some of them have none")),
        (minibatch as u64 > rows.epoch_rows())
            .then(|| format!("{key}, and the data has {} rows: steps repeat some", rows.epoch_rows())),
        (config.job.kind == JobKind::Kto && minibatch < KTO_SAMPLES)
            .then(|| format!("{key}: the KL that responses are measured against is a mean over these, and noisy")),
    ];
    all.into_iter().flatten().collect()
}

fn of_rollout(config: &Config, ranks: usize, rows: &Rows, context: usize) -> Vec<String> {
    let (rollout, ppo) = (&config.rollout, &config.ppo);
    let (prompts, samples) = (rollout.prompts_per_step, rollout.prompts_per_step * rollout.samples_per_prompt);
    let (longest, response) = (rows.longest(), rollout.response_tokens_max);
    let changes_draws = rollout.truncates() && !rollout.keep_sampling_mask;
    let all = [
        (longest + response > context).then(|| {
            format!(
                "rollout.response_tokens_max = {response} behind prompts of up to {longest} tokens is more than the context of \
                 {context}: such responses end there"
            )
        }),
        (ranks > prompts).then(|| {
            format!("rollout.prompts_per_step = {prompts} for {ranks} ranks that sample: some of them have none")
        }),
        (ppo.minibatch_samples > samples).then(|| {
            format!(
                "ppo.minibatch_samples = {} is more than the {samples} samples of a step: each epoch is one update",
                ppo.minibatch_samples
            )
        }),
        (prompts as u64 > rows.epoch_rows()).then(|| {
            format!("rollout.prompts_per_step = {prompts}, and the data has {} rows: steps repeat some", rows.epoch_rows())
        }),
        (changes_draws && ppo.correction == Correction::None).then(|| {
            "rollout.top_p, top_k or min_p draw from another distribution than the one that is learned: \
             rollout.keep_sampling_mask (on CPUs) learns the one that is drawn from, ppo.correction weighs the difference"
                .to_string()
        }),
    ];
    all.into_iter().flatten().collect()
}

/// Warnings about the numbers of steps, each of which is given once.
#[derive(Default)]
pub struct Warnings {
    /// Of evaluations, then of steps.
    warned: [bool; 7],
    /// Accuracy of the last step, and the rows it is of.
    trained: (f64, f64),
}

impl Warnings {
    /// What the numbers of a step are to be warned of, that was not before.
    pub fn of_step(&mut self, config: &Config, values: &Metrics) -> Vec<String> {
        let of = |key: &str| value(values, key);
        self.trained = (of(keys::ACCURACY), of(keys::SAMPLES));
        let [low, high] = config.ppo.reward_clip;
        let clipped = of(keys::REWARD_CLIPPED_RATIO);
        let fall = -of(keys::CHOSEN_REWARD_MEAN) / config.dpo.beta;
        let all = [
            (clipped > 0.0).then(|| {
                format!(
                    "ppo.reward_clip = [{low}, {high}] cuts the rewards of {:.0} % of the samples",
                    100.0 * clipped
                )
            }),
            (of(keys::RESPONSE_TRUNCATED_RATIO) >= 1.0).then(|| {
                format!(
                    "all responses are cut at rollout.response_tokens_max = {}: none has ended by itself",
                    config.rollout.response_tokens_max
                )
            }),
            (of(keys::REWARD_STD) == 0.0).then(|| {
                let mean = of(keys::REWARD_MEAN);
                format!("all rewards of a step are equal ({mean}): there is nothing to learn from [reward]")
            }),
            (of(keys::EQUAL_GROUPS_RATIO) > 0.5).then(|| {
                format!(
                    "in {:.0} % of the groups all rewards are equal, which teach nothing: rollout.samples_per_prompt, other \
                     prompts or a finer [reward] help",
                    100.0 * of(keys::EQUAL_GROUPS_RATIO)
                )
            }),
            (config.job.kind == JobKind::Ppo && of(keys::KL_MEAN) > KL).then(|| {
                format!(
                    "kl_mean is {:.2} nats a token: the policy is far from its reference; ppo.kl_coef and optim.actor.lr hold it",
                    of(keys::KL_MEAN)
                )
            }),
            (config.job.kind == JobKind::Dpo && config.dpo.has_reference() && fall > CHOSEN_FALL).then(|| {
                format!(
                    "the log-probability of the chosen responses has fallen by {fall:.0} nats, too: the policy may come to write \
                     neither; dpo.nll_coef holds them"
                )
            }),
        ];
        new_ones(&mut self.warned[1..], all)
    }

    /// The same of an evaluation behind the last step.
    pub fn of_eval(&mut self, values: &Metrics) -> Vec<String> {
        let (accuracy, samples) = self.trained;
        let held_out = value(values, keys::EVAL_ACCURACY);
        let enough = samples.min(value(values, keys::EVAL_SAMPLES)) >= OVERFIT_SAMPLES;
        let overfitted = (enough && accuracy - held_out > OVERFIT).then(|| {
            format!(
                "accuracy is {accuracy:.2} on the rows of the step and {held_out:.2} on held-out ones: overfitted; fewer epochs, a \
                 smaller optim.actor.lr or more rows help, and checkpoint.best_metric keeps the best"
            )
        });
        new_ones(&mut self.warned[..1], [overfitted])
    }
}

/// Those of the warnings that are given for the first time.
fn new_ones<const N: usize>(warned: &mut [bool], all: [Option<String>; N]) -> Vec<String> {
    let new = |(text, warned): (Option<String>, &mut bool)| text.filter(|_| !std::mem::replace(warned, true));
    all.into_iter().zip(warned).filter_map(new).collect()
}

fn value(values: &Metrics, key: &str) -> f64 {
    values.iter().find(|(name, _)| name == key).map_or(f64::NAN, |(_, value)| *value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::keys::named;

    #[test]
    fn a_model_that_is_right_on_trained_rows_alone_is_warned_of_once() {
        let mut warnings = Warnings::default();
        let mut of = |samples: f64, held_out: f64| {
            warnings.of_step(&Config::default(), &named([(keys::ACCURACY, 0.95), (keys::SAMPLES, samples)]));
            let values = named([(keys::EVAL_ACCURACY, held_out), (keys::EVAL_SAMPLES, 64.0)]);
            warnings.of_eval(&values).len()
        };
        assert_eq!([of(16.0, 0.5), of(64.0, 0.9), of(64.0, 0.7), of(64.0, 0.6)], [0, 0, 1, 0]);
    }
}
