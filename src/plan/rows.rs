//! The lengths of a job's rows: from its data, from the command line, or the longest that the job allows.

use crate::config::Config;
use crate::data::{self, Reading, RowImages, RowTokens};
use crate::error::Result;
use crate::launch::step_shape::StepShape;
use crate::rollout::new_tokens_max;
use crate::text::Tokenizer;
use crate::train::Archs;
use serde::{Deserialize, Serialize};

/// The most rows with images of an evaluation that a plan counts.
const EVALUATED_MAX: usize = 1024;

/// The source of lengths.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Origin {
    /// All rows count as the longest that the job allows, for this reason.
    Longest(String),
    /// The command line.
    Given,
    /// The rows that the job uses first, in its order.
    Drawn,
    /// Some of the job's rows, spread over its data.
    Sampled,
}

/// Rows in the order in which a job uses them. A job that uses more starts over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rows {
    pub drawn: Vec<RowTokens>,
    /// The rows of an evaluation: all prompts in order, or the longest demonstration, which is not truncated.
    pub evaluated: Vec<RowTokens>,
    pub origin: Origin,
    /// Whether the command line sets the lengths of responses; otherwise they are as long as allowed.
    pub responses_are_given: bool,
    /// The number of images in all rows of the job.
    #[serde(default)]
    pub images: usize,
    /// The source of `rollout.response_tokens_expected`, if the job does not set it.
    pub expected_from: String,
}

impl Rows {
    fn new(drawn: Vec<RowTokens>, origin: Origin) -> Self {
        let expected_from = String::new();
        Self { drawn, evaluated: Vec::new(), origin, responses_are_given: false, images: 0, expected_from }
    }

    /// The longest rows that a job allows, because other lengths are missing: `why`.
    pub fn longest(config: &Config, shape: &StepShape, context: usize, why: impl Into<String>) -> Self {
        let row = if shape.has_rollout() {
            let response = config.rollout.response_tokens_max.min(context.saturating_sub(1));
            RowTokens {
                prompt: config.data.prompt_tokens_max.min(context - response),
                response,
                ..RowTokens::default()
            }
        } else {
            let most = config.data.row_tokens_max;
            let tokens = if most == 0 { shape.microbatch_tokens_max } else { most }.min(context).max(2);
            RowTokens { prompt: tokens / 2, response: tokens - tokens / 2, ..RowTokens::default() }
        };
        let longest = Self::new(vec![row], Origin::Longest(why.into()));
        if shape.trained == 0 { Self { evaluated: vec![row; shape.rows], ..longest } } else { longest }
    }

    /// Rows with these lengths: the rows that the job uses first, and in `eval` the rows of the eval split. Sampled
    /// responses have unknown lengths, and count as long as allowed.
    ///
    /// A job without training uses its evaluation rows. The prompts of one step represent the others.
    ///
    /// # Panics
    /// If there are none.
    pub fn from_tokens(
        config: &Config,
        shape: &StepShape,
        context: usize,
        tokens: &[RowTokens],
        eval: &[RowTokens],
    ) -> Self {
        let only_evaluates = shape.trained == 0;
        let most = if config.eval.samples_max == 0 { eval.len() } else { config.eval.samples_max };
        let eval = &eval[..if only_evaluates { shape.rows.min(most).min(eval.len()) } else { eval.len() }];
        let tokens = if only_evaluates { eval } else { tokens };
        assert!(!tokens.is_empty(), "a job has rows");
        let row = |&RowTokens { prompt, response, images }: &RowTokens| {
            let sampled = || new_tokens_max(&config.rollout, prompt, context);
            RowTokens { prompt, response: if shape.has_rollout() { sampled() } else { response }, images }
        };
        let evaluated = if config.eval.every_steps == 0 && !only_evaluates {
            Vec::new()
        } else if shape.has_rollout() {
            eval.iter().take(most).map(row).collect()
        } else {
            let longest = eval.iter().max_by_key(|tokens| tokens.all()).map(row);
            // A forward of the tower over the images of many rows may need more than an update of few.
            let count = |row: RowTokens| if row.images.count > 0 { eval.len().min(EVALUATED_MAX) } else { 1 };
            longest.into_iter().flat_map(|row| std::iter::repeat_n(row, count(row))).collect()
        };
        Self { evaluated, ..Self::new(tokens.iter().map(row).collect(), Origin::Drawn) }
    }

    /// Reads the rows that the job uses first from its data, with the tokenizer in the actor's directory.
    ///
    /// # Errors
    /// `Data`, `Usage` or `Io` if they cannot be read.
    pub fn read(config: &Config, shape: &StepShape, archs: &Archs) -> Result<Self> {
        let tokenizer = Tokenizer::load(&config.model.actor)?;
        let (cache, wanted) = (config.job.dir.join("data"), shape.rows_ahead(config));
        let (actor, seed) = (archs.actor(), config.job.seed);
        let reading =
            Reading { config: &config.data, kind: shape.kind, tokenizer: &tokenizer, vocabulary: actor.vocabulary };
        let ahead = data::look_ahead(reading, &cache, seed, wanted)?;
        let origin = if ahead.is_sample { Origin::Sampled } else { Origin::Drawn };
        let rows = Self::from_tokens(config, shape, actor.context, &ahead.rows, &ahead.eval);
        Ok(Self { origin, images: ahead.images, ..rows })
    }

    /// The same rows with these lengths instead.
    #[must_use]
    pub fn with(mut self, prompt: Option<usize>, response: Option<usize>) -> Self {
        for row in self.drawn.iter_mut().chain(&mut self.evaluated) {
            row.prompt = prompt.unwrap_or(row.prompt);
            if row.images.tokens > row.prompt {
                row.images = RowImages::default();
            }
            row.response = response.unwrap_or(row.response);
        }
        self.responses_are_given |= response.is_some();
        if prompt.is_some() && response.is_some() {
            self.drawn.truncate(1);
            self.origin = Origin::Given;
        }
        self
    }

    /// The `i`-th row that the job uses.
    pub fn at(&self, i: usize) -> RowTokens {
        self.drawn[i % self.drawn.len()]
    }

    /// Whether all rows have the same length.
    pub fn are_alike(&self) -> bool {
        self.drawn.iter().all(|row| *row == self.drawn[0])
    }

    /// The row with the most tokens.
    pub fn longest_row(&self) -> RowTokens {
        *self.drawn.iter().max_by_key(|row| row.all()).expect("there are rows")
    }

    /// The mean of prompts and of responses.
    pub fn mean(&self) -> (f64, f64) {
        let mean =
            |of: fn(&RowTokens) -> usize| self.drawn.iter().map(of).sum::<usize>() as f64 / self.drawn.len() as f64;
        (mean(|row| row.prompt), mean(|row| row.response))
    }
}
