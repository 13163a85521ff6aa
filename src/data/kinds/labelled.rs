//! Prompts with a response that is labeled true or false. Documents are [prompt, response].

use serde_json::{Map, Value};

use super::demonstration::SftRow;
use super::spec::{Row, RowSpec, needed_label};
use crate::config::data::DataConfig;
use crate::config::method::RowKind;
use crate::data::cut::{Entries, Entry, cut};
use crate::data::rows::Reading;
use crate::data::shape::{self, Content, Field, Fields, is_assistant};
use crate::data::source::Document;
use crate::error::{Error, Result};
use crate::experience::Image;
use crate::text::Tokenizer;
use crate::text::images::Sequences;

/// A response to a prompt, labeled good or bad.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelledRow {
    /// Identity of the row over the whole run.
    pub id: u64,
    pub tokens: Vec<u32>,
    pub prompt_tokens: usize,
    pub is_desirable: bool,
    /// The images among its tokens, in order.
    pub images: Vec<Image>,
}

pub struct LabelledResponses;

impl RowSpec for LabelledResponses {
    fn fields(&self) -> Fields {
        Fields::Response
    }

    /// Prompt and response. If a row has no response, its messages end with it.
    fn encode(&self, row: &Map<String, Value>, reading: Reading) -> Result<Sequences> {
        let config = reading.config;
        let missing = |key: &str| shape::missing(row, config, self.fields(), key);
        let [prompt, response] = shape::prompt_and_response(row, config)?;
        let is_whole =
            |prompt: &&Field| matches!(&prompt.content, Content::Messages(all) if all.last().is_some_and(is_assistant));
        let side = match (&response, prompt.as_ref().filter(is_whole)) {
            (Some(response), _) => reading.side(row, prompt.as_ref(), response)?,
            (None, Some(whole)) => reading.side(row, None, whole)?,
            (None, None) => return Err(missing(&config.response_key)),
        };
        if side.prompt.is_empty() {
            return Err(missing(&config.prompt_key));
        }
        Ok(Sequences { tokens: vec![side.prompt, side.answer], images: side.images })
    }

    fn label(&self, row: &Map<String, Value>, config: &DataConfig) -> Result<String> {
        let (key, value) = (&config.label_key, needed_label(row, config)?);
        let is_desirable = match value {
            Value::Bool(label) => *label,
            Value::Number(label) if label.as_f64() == Some(1.0) => true,
            Value::Number(label) if label.as_f64() == Some(0.0) => false,
            Value::String(label) if label == "true" => true,
            Value::String(label) if label == "false" => false,
            other => return Err(Error::data(format!("field {key:?} must be true or false (got {other})"))),
        };
        Ok(is_desirable.to_string())
    }

    fn entries(&self, document: Document, prompt: usize, config: &DataConfig) -> Result<Entries> {
        let [_, response] = document.lengths_of("prompt and response", "--labelled")?;
        Ok(cut(config, document, prompt, response))
    }
}

impl Row for LabelledRow {
    const KIND: RowKind = RowKind::Labelled;

    fn parts(&self) -> Vec<(&[u32], bool)> {
        let (prompt, response) = self.tokens.split_at(self.prompt_tokens);
        vec![(prompt, false), (response, true)]
    }

    fn label(&self) -> String {
        self.is_desirable.to_string()
    }

    fn read(entry: &Entry, document: Option<Document>, tokenizer: &Tokenizer) -> Result<Self> {
        let SftRow { id, tokens, images, .. } = SftRow::read(entry, document, tokenizer)?;
        let label = document.map_or_else(|| Ok("true".to_owned()), Document::label)?;
        let is_desirable = match label.as_str() {
            "true" | "1" => true,
            "false" | "0" => false,
            other => {
                return Err(Error::data(format!("the label must be true or false (got {other:?})"))
                    .hint("shard the rows with --labelled and --label-key"));
            }
        };
        Ok(Self { id, tokens, prompt_tokens: (entry.end - entry.start) as usize, is_desirable, images })
    }
}
