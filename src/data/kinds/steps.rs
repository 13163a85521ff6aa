//! Texts with a list of labels, one for each of their steps. Documents are [text].

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::prompt::encode_prompt;
use super::spec::{Row, RowSpec, needed_label};
use crate::config::data::DataConfig;
use crate::config::method::RowKind;
use crate::data::cut::{Entries, Entry, cut};
use crate::data::rows::{Reading, empty};
use crate::data::shape::{Fields, Unread};
use crate::data::source::Document;
use crate::error::{Error, Result};
use crate::experience::Image;
use crate::text::images::Sequences;
use crate::text::{Tokenizer, kind_of};

/// A text, and the labels of its steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepRow {
    /// Identity of the row over the whole run.
    pub id: u64,
    pub tokens: Vec<u32>,
    /// The labels of all steps, including steps whose tokens were cut off.
    pub labels: Vec<StepLabel>,
    pub is_cut: bool,
    /// The images among its tokens, in order.
    pub images: Vec<Image>,
    /// The labels as written in the data.
    label: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum StepLabel {
    /// The text of a token.
    Token(String),
    /// Probability of the first of two tokens.
    Soft(f64),
}

/// The number of tokens of a step in a plan, whose rows have no text.
const PLANNED_STEP_TOKENS: usize = 16;

pub struct StepTexts;

impl RowSpec for StepTexts {
    fn fields(&self) -> Fields {
        Fields::Prompt
    }

    fn unread(&self) -> &'static [Unread] {
        &[(&["completions"], "write each step into the prompt, followed by step_reward.placeholder")]
    }

    /// The text: a prompt that no answer follows.
    fn encode(&self, row: &Map<String, Value>, reading: Reading) -> Result<Sequences> {
        encode_prompt(row, reading, false)
    }

    /// The labels of the steps as JSON: strings of tokens, or numbers. TRL has true for 1 and false for 0.
    fn label(&self, row: &Map<String, Value>, config: &DataConfig) -> Result<String> {
        let (key, value) = (&config.label_key, needed_label(row, config)?);
        let Value::Array(labels) = value else {
            return Err(Error::data(format!("field {key:?} must be a list of labels (got {})", kind_of(value))));
        };
        let labels: Vec<Value> = labels
            .iter()
            .map(|label| label.as_bool().map_or_else(|| label.clone(), |is_right| u8::from(is_right).into()))
            .collect();
        let is_soft = |label: &Value| label.as_f64().is_some_and(|p| (0.0..=1.0).contains(&p));
        match labels.iter().find(|label| !label.is_string() && !is_soft(label)) {
            _ if labels.is_empty() => Err(empty(key)),
            Some(label) => {
                Err(Error::data(format!("field {key:?} must hold strings, or numbers from 0 to 1 (got {label})")))
            }
            None => Ok(Value::Array(labels).to_string()),
        }
    }

    /// All tokens but the first count as learned, so that a text that is too long loses its end.
    fn entries(&self, document: Document, prompt: usize, config: &DataConfig) -> Result<Entries> {
        let [_] = document.lengths_of("one text", "--steps")?;
        Ok(cut(config, document, prompt.min(1), prompt.saturating_sub(1)))
    }
}

impl Row for StepRow {
    const KIND: RowKind = RowKind::Steps;

    fn parts(&self) -> Vec<(&[u32], bool)> {
        vec![(&self.tokens, false)]
    }

    fn label(&self) -> String {
        self.label.clone()
    }

    fn read(entry: &Entry, document: Option<Document>, _tokenizer: &Tokenizer) -> Result<Self> {
        let Some(document) = document else {
            // A plan's tokenizer reads a placeholder as token 0. The last step ends with the row.
            let ends = |i: usize| (entry.tokens() - 1 - i).is_multiple_of(PLANNED_STEP_TOKENS);
            let tokens: Vec<u32> = (0..entry.tokens()).map(|i| u32::from(!ends(i))).collect();
            let labels = vec![StepLabel::Token("0".to_owned()); tokens.iter().filter(|token| **token == 0).count()];
            return Ok(Self { tokens, labels, images: entry.images(None)?, ..Self::default() });
        };
        let mut tokens = document.prompt()?;
        tokens.truncate(entry.tokens());
        let label = document.label()?;
        let labels = serde_json::from_str(&label).map_err(|_| {
            Error::data(format!("the label must be a list of strings or numbers (got {label:?})"))
                .hint("shard the rows with --steps and --label-key")
        })?;
        Ok(Self {
            id: document.id(),
            tokens,
            labels,
            is_cut: entry.cut > 0,
            images: entry.images(Some(document))?,
            label,
        })
    }
}
