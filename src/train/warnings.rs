//! Warnings of a run about settings and metrics that are rarely intended. Each is given once and names the key to
//! change.

use crate::config::Config;
use crate::config::job::JobKind;
use crate::config::ppo::Correction;
use crate::data::Rows;
use crate::launch::run::Run;
use crate::launch::step_shape::StepShape;
use crate::metrics::keys::{self, Metrics};

/// Share of filtered rows above which a run warns.
const FILTERED: f64 = 0.1;
/// KL per token, in nats, above which a run warns: the policy differs from its reference on most tokens.
const KL: f64 = 1.0;
/// Fall of the chosen responses' log-probability, in nats per response, above which a run warns.
const CHOSEN_FALL: f64 = 10.0;
/// Lead of the accuracy on trained rows over held-out rows above which a run warns, if both have at least
/// `OVERFIT_SAMPLES` rows.
const OVERFIT: f64 = 0.2;
const OVERFIT_SAMPLES: f64 = 32.0;
/// The wait for rewards in a step above which a run warns, in seconds. Shorter ones are not worth a change.
const WAITING_S: f64 = 0.5;
/// Minibatch size below which the KL is mostly noise.
const KTO_SAMPLES: usize = 8;

/// Warnings before the first step. `context`: tokens of the longest row of model.actor.
pub fn of_start(run: &Run, shape: &StepShape, rows: &Rows, context: usize) -> Vec<String> {
    let (config, ledger) = (&run.config, rows.ledger());
    let mut found = Vec::new();
    let (filtered, rules) = ledger.losses();
    let share = filtered as f64 / ledger.rows.max(1) as f64;
    if share > FILTERED {
        found.push(format!(
            "{:.0} % of the rows are filtered, as listed in ledger.jsonl ({})",
            100.0 * share,
            rules.join("; ")
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
        (ranks > minibatch).then(|| format!("{key} is below the {ranks} data ranks: some get no samples")),
        (minibatch as u64 > rows.epoch_rows())
            .then(|| format!("{key} exceeds the data's {} rows: steps repeat rows", rows.epoch_rows())),
        (config.job.kind == JobKind::Kto && minibatch < KTO_SAMPLES)
            .then(|| format!("{key} is small: the KL of the loss is a mean over these samples and is noisy")),
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
                "rollout.response_tokens_max = {response} after prompts of up to {longest} tokens exceeds the context \
                 of {context}: such responses end there"
            )
        }),
        (ranks > prompts).then(|| {
            format!("rollout.prompts_per_step = {prompts} is below the {ranks} rollout ranks: some get no prompts")
        }),
        (ppo.minibatch_samples > samples).then(|| {
            format!(
                "ppo.minibatch_samples = {} exceeds the {samples} samples of a step: each epoch is one update",
                ppo.minibatch_samples
            )
        }),
        (prompts as u64 > rows.epoch_rows()).then(|| {
            format!(
                "rollout.prompts_per_step = {prompts} exceeds the data's {} rows: steps repeat rows",
                rows.epoch_rows()
            )
        }),
        (changes_draws && ppo.correction == Correction::None).then(|| {
            "rollout.top_p, top_k or min_p sample from a different distribution than training uses: set \
             rollout.keep_sampling_mask (on CPUs) to train on the sampled one, or ppo.correction to weight the \
             difference"
                .to_string()
        }),
    ];
    all.into_iter().flatten().collect()
}

/// Warnings about the numbers of steps, each of which is given once.
#[derive(Default)]
pub struct Warnings {
    /// Warnings given so far: about evaluations, then about steps, then about waiting for rewards.
    warned: [bool; 8],
    /// Accuracy of the last step, and its number of rows.
    trained: (f64, f64),
}

impl Warnings {
    /// New warnings about the metrics of a step.
    pub fn of_step(&mut self, config: &Config, values: &Metrics) -> Vec<String> {
        let of = |key: &str| value(values, key);
        self.trained = (of(keys::ACCURACY), of(keys::SAMPLES));
        let [low, high] = config.ppo.reward_clip;
        let clipped = of(keys::REWARD_CLIPPED_RATIO);
        let fall = -of(keys::CHOSEN_REWARD_MEAN) / config.dpo.beta;
        let all = [
            (clipped > 0.0).then(|| {
                format!(
                    "ppo.reward_clip = [{low}, {high}] clips the rewards of {:.0} % of the samples",
                    100.0 * clipped
                )
            }),
            (of(keys::RESPONSE_TRUNCATED_RATIO) >= 1.0).then(|| {
                format!(
                    "all responses are cut at rollout.response_tokens_max = {}: none ended by itself",
                    config.rollout.response_tokens_max
                )
            }),
            (of(keys::REWARD_STD) == 0.0).then(|| {
                let mean = of(keys::REWARD_MEAN) as f32;
                format!("all rewards of a step are equal ({mean}), so there is nothing to learn: check [reward]")
            }),
            (of(keys::EQUAL_GROUPS_RATIO) > 0.5).then(|| {
                format!(
                    "all rewards are equal in {:.0} % of the groups, which then teach nothing: raise \
                     rollout.samples_per_prompt, use other prompts, or use a finer [reward]",
                    100.0 * of(keys::EQUAL_GROUPS_RATIO)
                )
            }),
            (config.job.kind == JobKind::Ppo && of(keys::KL_MEAN) > KL).then(|| {
                format!(
                    "kl_mean is {:.2} nats per token, so the policy is far from its reference: raise ppo.kl_coef or \
                     lower optim.actor.lr",
                    of(keys::KL_MEAN)
                )
            }),
            (config.job.kind == JobKind::Dpo && config.dpo.has_reference() && fall > CHOSEN_FALL).then(|| {
                format!(
                    "the log-probability of the chosen responses has also fallen, by {fall:.0} nats, so the policy may \
                     end up writing neither response: raise dpo.nll_coef"
                )
            }),
        ];
        new_ones(&mut self.warned[1..7], all)
    }

    /// A new warning about a step of `seconds` that `waited` for rewards or the environment.
    pub fn of_waiting(&mut self, config: &Config, waited: f64, seconds: f64) -> Option<String> {
        let reward = &config.reward;
        let batch = match (reward.python.is_empty(), reward.http.is_empty()) {
            (true, true) => "",
            (false, _) => ", raise batch in [[reward.python]], or make the function async",
            (true, false) => ", or raise batch in [[reward.http]]",
        };
        let is_slow = waited > WAITING_S && waited > 0.5 * seconds;
        let warning = is_slow.then(|| {
            let share = 100.0 * waited / seconds;
            format!("{share:.0} % of a step was spent waiting for rewards: raise reward.workers{batch}")
        });
        new_ones(&mut self.warned[7..], [warning]).pop()
    }

    /// New warnings about an evaluation after the last step.
    pub fn of_eval(&mut self, values: &Metrics) -> Vec<String> {
        let (accuracy, samples) = self.trained;
        let held_out = value(values, keys::EVAL_ACCURACY);
        let enough = samples.min(value(values, keys::EVAL_SAMPLES)) >= OVERFIT_SAMPLES;
        let overfitted = (enough && accuracy - held_out > OVERFIT).then(|| {
            format!(
                "accuracy is {accuracy:.2} on the rows of the step and {held_out:.2} on held-out rows, so the model \
                 overfits: use fewer epochs, a smaller optim.actor.lr or more rows, or keep the best checkpoint with \
                 checkpoint.best_metric"
            )
        });
        new_ones(&mut self.warned[..1], [overfitted])
    }
}

/// The warnings that are given for the first time.
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
