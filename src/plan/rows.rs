//! How long the rows of a job are: as its data says, as was asked for, or the longest that it allows.

use super::job::Archs;
use crate::config::Config;
use crate::config::job::{JobKind, LossOn};
use crate::data::{self, Part, RowTokens};
use crate::error::Result;
use crate::rollout::new_tokens_max;
use crate::text::Tokenizer;
use serde::{Deserialize, Serialize};

/// Rows that are looked at, where a step has no more.
const ROWS: usize = 512;

/// Tokens of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Row {
    pub prompt: usize,
    pub response: usize,
    /// Those that a head predicts in training.
    pub learned: usize,
}

impl Row {
    pub fn tokens(self) -> usize {
        self.prompt + self.response
    }
}

/// Where lengths come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Origin {
    /// All count as the longest that the job allows, for this reason.
    Longest(String),
    /// Said on the command line.
    Given,
    /// The rows that the job draws first, in its order.
    Drawn,
    /// Some of the job's rows, spread over its data.
    Sampled,
}

/// Rows in the order in which a job draws them (a PPO job: its prompts). One that draws more begins again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rows {
    drawn: Vec<Row>,
    /// The longest row that is evaluated, where it is known and a forward goes over it as a whole.
    evaluated: Option<Row>,
    /// The prompts that a PPO job answers to be evaluated, with the longest responses, in order.
    answered: Vec<Row>,
    pub origin: Origin,
    /// Responses are as long as was said, not as long as they may be.
    pub responses_are_given: bool,
}

impl Rows {
    /// The longest that a job allows, for want of better: `why`.
    pub fn longest(config: &Config, context: usize, why: impl Into<String>) -> Self {
        let origin = Origin::Longest(why.into());
        if config.job.kind == JobKind::Ppo {
            let response = config.rollout.response_tokens_max.min(context.saturating_sub(1));
            let prompt = config.data.prompt_tokens_max.min(context - response);
            return Self {
                drawn: vec![Row { prompt, response, learned: response }],
                evaluated: None,
                answered: Vec::new(),
                origin,
                responses_are_given: false,
            };
        }
        let row = match config.data.row_tokens_max {
            0 => config.sft.microbatch_tokens_max,
            row => row,
        };
        let row = row.min(context).max(2);
        let (prompt, response) = (row / 2, row - row / 2);
        Self {
            drawn: vec![learned(config, Row { prompt, response, learned: response })],
            evaluated: None,
            answered: Vec::new(),
            origin,
            responses_are_given: false,
        }
    }

    /// Rows of one length.
    pub fn alike(prompt: usize, response: usize) -> Self {
        Self {
            drawn: vec![Row { prompt, response, learned: response }],
            evaluated: None,
            answered: Vec::new(),
            origin: Origin::Given,
            responses_are_given: true,
        }
    }

    /// Rows of these lengths; `is_sample` where they are not those that the job draws first. Responses of a PPO job, whose
    /// lengths nobody knows before, count as long as they may be.
    ///
    /// # Panics
    /// If there are none.
    pub fn of(config: &Config, context: usize, tokens: &[RowTokens], is_sample: bool) -> Self {
        assert!(!tokens.is_empty(), "a job has rows");
        let row = |tokens: &RowTokens| match config.job.kind {
            JobKind::Ppo => prompt(config, context, *tokens),
            JobKind::Sft => demonstration(config, *tokens),
        };
        let origin = if is_sample { Origin::Sampled } else { Origin::Drawn };
        let drawn = tokens.iter().map(row).collect();
        Self { drawn, evaluated: None, answered: Vec::new(), origin, responses_are_given: false }
    }

    /// The same with the rows `eval` of the eval split, where the job evaluates: the longest demonstration, which nothing cuts, or
    /// as many prompts as are answered.
    #[must_use]
    pub fn evaluating(mut self, config: &Config, context: usize, eval: &[RowTokens]) -> Self {
        if config.eval.every_steps == 0 {
            return self;
        }
        match config.job.kind {
            JobKind::Sft => {
                let longest = eval.iter().max_by_key(|tokens| tokens.all);
                self.evaluated = longest.map(|tokens| demonstration(config, *tokens));
            }
            JobKind::Ppo => {
                let most = if config.eval.samples_max == 0 { eval.len() } else { config.eval.samples_max };
                self.answered = eval.iter().take(most).map(|tokens| prompt(config, context, *tokens)).collect();
            }
        }
        self
    }

    /// How many rows to look at: those of whole steps, of no more than the job does.
    pub fn wanted(config: &Config) -> usize {
        let step = drawn_per_step(config).max(1);
        let steps = (ROWS / step).max(1);
        let all = if config.job.steps > 0 { config.job.steps as usize } else { steps };
        steps.min(all) * step
    }

    /// Reads the rows that the job draws first from its data, with the tokenizer in the actor's directory.
    ///
    /// # Errors
    /// `Data`, `Usage` or `Io` where they cannot be read.
    pub fn read(config: &Config, archs: &Archs) -> Result<Self> {
        let tokenizer = Tokenizer::load(&config.model.actor)?;
        let part = if config.job.kind == JobKind::Ppo { Part::Prompt } else { Part::Demonstration };
        let (cache, wanted) = (config.job.dir.join("data"), Self::wanted(config));
        let (vocabulary, seed) = (archs.actor.vocabulary, config.job.seed);
        let ahead = data::look_ahead(&config.data, part, &tokenizer, vocabulary, &cache, seed, wanted)?;
        let rows = Self::of(config, archs.actor.context, &ahead.rows, ahead.is_sample);
        Ok(rows.evaluating(config, archs.actor.context, &ahead.eval))
    }

    /// The same rows with these lengths instead.
    #[must_use]
    pub fn with(mut self, config: &Config, prompt: Option<usize>, response: Option<usize>) -> Self {
        for row in &mut self.drawn {
            row.prompt = prompt.unwrap_or(row.prompt);
            row.learned = response.unwrap_or(row.learned);
            row.response = response.unwrap_or(row.response);
            *row = learned(config, *row);
        }
        self.responses_are_given |= response.is_some();
        if prompt.is_some() && response.is_some() {
            self.drawn.truncate(1);
            self.origin = Origin::Given;
        }
        self
    }

    /// Row `i` of those that are drawn.
    pub fn at(&self, i: usize) -> Row {
        self.drawn[i % self.drawn.len()]
    }

    pub fn all(&self) -> &[Row] {
        &self.drawn
    }

    /// Whether all are of one length.
    pub fn are_alike(&self) -> bool {
        self.drawn.iter().all(|row| *row == self.drawn[0])
    }

    /// The row of most tokens.
    pub fn longest_row(&self) -> Row {
        *self.drawn.iter().max_by_key(|row| row.tokens()).expect("there are rows")
    }

    /// The longest row that is evaluated, if it has more tokens than any that trains.
    pub fn evaluated(&self) -> Option<Row> {
        self.evaluated.filter(|row| row.tokens() > self.longest_row().tokens())
    }

    /// The prompts that are answered in an evaluation.
    pub fn answered(&self) -> &[Row] {
        &self.answered
    }

    /// Tokens of the longest row that a forward goes over.
    pub fn tokens_max(&self) -> usize {
        self.evaluated().unwrap_or_else(|| self.longest_row()).tokens()
    }

    /// The mean of prompts and of responses.
    pub fn mean(&self) -> (f64, f64) {
        let mean = |of: fn(&Row) -> usize| self.drawn.iter().map(of).sum::<usize>() as f64 / self.drawn.len() as f64;
        (mean(|row| row.prompt), mean(|row| row.response))
    }
}

/// Rows that a step draws: of a PPO job, its prompts.
pub fn drawn_per_step(config: &Config) -> usize {
    match config.job.kind {
        JobKind::Ppo => config.rollout.prompts_per_step,
        JobKind::Sft => config.sft.minibatch_samples,
    }
}

/// A prompt with the longest response that it may get.
fn prompt(config: &Config, context: usize, tokens: RowTokens) -> Row {
    let response = new_tokens_max(&config.rollout, tokens.all, context);
    Row { prompt: tokens.all, response, learned: response }
}

fn demonstration(config: &Config, RowTokens { all, response }: RowTokens) -> Row {
    learned(config, Row { prompt: all - response, response, learned: response })
}

/// The row with what is learned of it: nothing predicts the first token.
fn learned(config: &Config, row: Row) -> Row {
    let everything = config.job.kind == JobKind::Sft && config.sft.loss_on == LossOn::All;
    if everything { Row { learned: row.tokens() - 1, ..row } } else { row }
}
