//! A process reward model on one page: texts with labeled steps -> log-probabilities of reward tokens -> loss ->
//! gradient -> step (arXiv:2305.20050). The prediction of the language model's head after a placeholder is the label of
//! the step before it.

use crate::config::Config;
use crate::config::method::labelled::StepRewardConfig;
use crate::data::{RowSource, StepLabel, StepRow};
use crate::error::{Error, Result};
use crate::launch::run::Run;
use crate::learn::packed::PackedRow;
use crate::learn::sums::Sums;
use crate::learn::{Learner, Role};
use crate::loss::labelled::{step_loss, step_margin};
use crate::metrics::eval_rows::EvalResponses;
use crate::metrics::{Phases, keys};
use crate::text::Tokenizer;
use crate::train::supervised::{self, ExampleLoss, ExampleSums, LossInput, Method, Minibatch, Numbers};
use serde_json::json;

/// The number of steps, and the probability of the first reward token in each.
const STEPS: &str = "steps";
const REWARD: &str = "reward";

/// The tokens that steps and labels are written with.
pub struct StepReward {
    config: StepRewardConfig,
    placeholder: u32,
    rewards: Vec<u32>,
}

/// The position of a placeholder, and the target probabilities of the reward tokens there.
type Placed = (u32, Vec<f64>);

impl Method for StepReward {
    type Row = StepRow;
    /// The steps of each row.
    type Precomputed = Vec<Vec<Placed>>;

    fn shape(Config { step_reward, .. }: &Config) -> [usize; 3] {
        [step_reward.minibatch_samples, step_reward.microbatch_tokens_max, 0]
    }

    fn check_rows(config: &Config, source: &RowSource<StepRow>, tokenizer: &Tokenizer) -> Result<()> {
        let method = Self::new(config, Vec::new(), tokenizer)?;
        source.check_each(|row| method.steps(&row).map(|_| ()))
    }

    /// Rejects placeholders and reward tokens that are not one token.
    fn new(Config { step_reward: config, .. }: &Config, _frozen: Vec<Role>, tokenizer: &Tokenizer) -> Result<Self> {
        let id = |key: &str, text: &String| match tokenizer.encode(text, false)?[..] {
            [id] => Ok(id),
            ref many => {
                Err(Error::usage(format!("step_reward.{key}: {text:?} must be one token (got {})", many.len())).hint(
                    "choose a text that is one token of the model's tokenizer, or add it there as a special token",
                ))
            }
        };
        let rewards = config.reward_tokens.iter().map(|text| id("reward_tokens", text)).collect::<Result<_>>()?;
        Ok(Self { config: config.clone(), placeholder: id("placeholder", &config.placeholder)?, rewards })
    }

    fn precompute(&mut self, _: &Run, _: &Role, rows: &mut [StepRow], _: &mut Phases) -> Result<Vec<Vec<Placed>>> {
        rows.iter().map(|row| self.steps(row)).collect()
    }

    fn update(&mut self, run: &Run, learner: &mut Learner, batch: &Minibatch<Self>) -> Result<Numbers> {
        let steps = batch.precomputed.iter().flatten().count();
        if steps == 0 {
            return Err(Error::data("a minibatch has no steps to learn")
                .hint("raise data.row_tokens_max, which cut all of them off"));
        }
        let sums = supervised::update(self, run, learner, batch, 1.0 / steps as f64)?;
        Ok(sums.means(&[(keys::ACCURACY, STEPS), (keys::LOSS, "")]))
    }

    /// Loss and accuracy of the steps of held-out rows.
    fn evaluate(&mut self, run: &mut Run, learner: &mut Learner, batch: &Minibatch<Self>) -> Result<Numbers> {
        let (_, sums) = supervised::evaluate_examples(self, run, &learner.role, batch, 1.0)?;
        let of_step = |key| sums.get(key) / sums.get(STEPS).max(1.0);
        Ok(vec![(keys::EVAL_LOSS, of_step(keys::LOSS)), (keys::EVAL_ACCURACY, of_step(keys::ACCURACY))])
    }
}

impl ExampleLoss for StepReward {
    /// Each placeholder predicts every reward token.
    fn pack(&self, batch: &Minibatch<Self>, chosen: &[usize]) -> PackedRow {
        let mut packed = PackedRow::new();
        for &i in chosen {
            let of_step = |&(at, _): &Placed| self.rewards.iter().map(move |&reward| (at, reward));
            packed.push_at(&batch.rows[i].tokens, batch.precomputed[i].iter().flat_map(of_step));
            packed.see(&batch.rows[i].images);
        }
        packed
    }

    /// The log-probabilities of the reward tokens of a step are consecutive, and on one rank.
    fn loss(&self, packed: &LossInput<Self>) -> (Vec<ExampleSums>, Vec<f32>) {
        let steps_of = |&i: &usize| {
            packed.batch.precomputed[i].iter().enumerate().map(move |(step, (_, wanted))| (i, step, wanted))
        };
        let steps: Vec<(usize, usize, &Vec<f64>)> = packed.chosen.iter().flat_map(steps_of).collect();
        let (mut examples, mut slopes) = (Vec::new(), Vec::with_capacity(packed.numbers.len()));
        let rewards = steps.first().map_or(1, |(.., wanted)| wanted.len());
        for (logprobs, indices) in packed.numbers.chunks(rewards).zip(packed.row.row_indices.chunks(rewards)) {
            let (row, step, wanted) = steps[indices[0] / rewards];
            let (loss, by_logprob, p) = step_loss(logprobs, wanted);
            slopes.extend(by_logprob.into_iter().map(|slope| (packed.weight * slope) as f32));
            let (is_right, margin) = step_margin(&p, wanted);
            let of_step = [
                (keys::LOSS, packed.weight * loss),
                (keys::ACCURACY, f64::from(u8::from(is_right))),
                (keys::MARGIN_MEAN, margin),
                (STEPS, 1.0),
                (REWARD, p[0]),
            ];
            examples.push((row, step, Sums::from_list(of_step)));
        }
        (examples, slopes)
    }

    /// Each step with the text up to its placeholder.
    fn read(batch: &Minibatch<Self>, examples: &[&ExampleSums]) -> Result<(u64, String, EvalResponses)> {
        let Minibatch { rows, precomputed, tokenizer, .. } = batch;
        let (row, placed) = (&rows[examples[0].0], &precomputed[examples[0].0]);
        let mut from = 0;
        let text_to = |(at, _): &Placed| {
            let tokens = &row.tokens[from..=*at as usize];
            from = *at as usize + 1;
            tokenizer.decode_prompt(tokens)
        };
        let steps: Vec<String> = placed.iter().map(text_to).collect::<Result<_>>()?;
        let labels = row.labels[..steps.len()].iter().map(|label| json!(label)).collect();
        let rewards = examples.iter().map(|(.., of_step)| of_step.get(REWARD)).collect();
        Ok((row.id, tokenizer.decode_prompt(&row.tokens)?, EvalResponses::Steps { steps, labels, rewards }))
    }
}

impl StepReward {
    /// The steps of a row, each with its label. A row that was cut has only its remaining steps.
    fn steps(&self, row: &StepRow) -> Result<Vec<Placed>> {
        let places = (0..row.tokens.len()).filter(|&i| row.tokens[i] == self.placeholder);
        let (steps, labels, placeholder) = (places.clone().count(), row.labels.len(), &self.config.placeholder);
        if steps == 0 && !row.is_cut {
            return Err(Error::data(format!("the text has no placeholder {placeholder:?}"))
                .hint("end each step with step_reward.placeholder, as a token of its own"));
        }
        if labels < steps || labels > steps && !row.is_cut {
            return Err(Error::data(format!(
                "each placeholder {placeholder:?} needs one label (labels: {labels}, placeholders: {steps})"
            )));
        }
        places.zip(&row.labels).map(|(i, label)| Ok((i as u32, self.wanted(label)?))).collect()
    }

    /// The target probabilities of the reward tokens.
    fn wanted(&self, label: &StepLabel) -> Result<Vec<f64>> {
        let names = &self.config.reward_tokens;
        match label {
            StepLabel::Token(text) if names.contains(text) => {
                Ok(names.iter().map(|name| f64::from(u8::from(name == text))).collect())
            }
            StepLabel::Token(text) => Err(Error::data(format!("label {text:?} is not a reward token"))
                .hint(format!("use one of step_reward.reward_tokens: {names:?}"))),
            StepLabel::Soft(p) if names.len() == 2 => Ok(vec![*p, 1.0 - p]),
            StepLabel::Soft(p) => Err(Error::data(format!(
                "a number as a label ({p}) needs exactly two reward tokens (got {})",
                names.len()
            ))
            .hint(
                "use a reward token as the label, or set two step_reward.reward_tokens: the number is the \
                 probability of the first",
            )),
        }
    }
}
