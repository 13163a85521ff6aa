//! Prompts with demonstrations. Documents are [prompt, response], alternating for several turns.

use serde_json::{Map, Value};

use super::spec::{Row, RowSpec};
use crate::config::data::DataConfig;
use crate::config::method::RowKind;
use crate::data::cut::{Entries, Entry, cut};
use crate::data::images;
use crate::data::rows::{Place, Reading};
use crate::data::shape::{self, Fields, Turns, is_assistant};
use crate::data::source::Document;
use crate::error::{Error, Result};
use crate::experience::Image;
use crate::text::Tokenizer;
use crate::text::images::Sequences;

/// Prompt and demonstration in one row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SftRow {
    /// Identity of the row over the whole run.
    pub id: u64,
    pub tokens: Vec<u32>,
    /// 1 for tokens of a response, which are learned, 0 for tokens of a prompt. As long as `tokens`.
    pub mask: Vec<u8>,
    /// The images among its tokens, in order.
    pub images: Vec<Image>,
}

pub struct Demonstrations;

impl RowSpec for Demonstrations {
    fn fields(&self) -> Fields {
        Fields::Response
    }

    fn names_shards(&self) -> bool {
        false
    }

    /// Prompt and response, alternating for several turns. If a row has a response of its own, only that is learned.
    fn encode(&self, row: &Map<String, Value>, reading: Reading) -> Result<Sequences> {
        let config = reading.config;
        let missing = |key: &str| shape::missing(row, config, self.fields(), key);
        let [prompt, response] = shape::prompt_and_response(row, config)?;
        let Some(prompt) = &prompt else { return Err(missing(&config.prompt_key)) };
        let turns = match &response {
            Some(response) => Turns::join(Some(prompt), response, config.chat_template)?,
            None => match prompt.content.messages("user", config.chat_template) {
                Some(messages) if messages.iter().any(is_assistant) => Turns::Chat { messages, first: 0 },
                messages => {
                    if messages.is_none() {
                        reading.tokens(prompt, Place::Prompt)?;
                    }
                    return Err(missing(&config.response_key));
                }
            },
        };
        match turns {
            Turns::Chat { messages, first } => {
                if first > 0 && messages[first - 1..].iter().take(2).filter(|m| is_assistant(m)).count() == 2 {
                    return Err(Error::data(format!(
                        "fields {:?} and {:?} end with different answers",
                        prompt.key, config.response_key
                    ))
                    .hint("remove one of them, or set data.response_key to a field that the rows do not have"));
                }
                let learned = |i: usize, message: &Value| i >= first && is_assistant(message) && !is_left_out(message);
                reading.conversation(row, messages, learned)
            }
            Turns::Plain { answer: response, .. } => {
                let tokens = vec![reading.tokens(prompt, Place::Prompt)?, reading.tokens(response, Place::Answer)?];
                Ok(Sequences { tokens, images: images::of_columns(row)? })
            }
        }
    }

    fn entries(&self, document: Document, prompt: usize, config: &DataConfig) -> Result<Entries> {
        let rest: usize = document.lengths()?[1..].iter().sum();
        if rest == 0 {
            return Err(document
                .error("has a prompt but no response")
                .hint("shard the rows with --response-key, or with --chat-template and assistant turns"));
        }
        Ok(cut(config, document, prompt, rest))
    }

    fn response_tokens(&self, entry: &Entry, document: Option<Document>) -> Result<usize> {
        let (mut left, mut response) = (entry.rest as usize, 0);
        let Some(document) = document else { return Ok(left) };
        // Prompts and responses alternate.
        for (i, tokens) in document.lengths()?.into_iter().enumerate().skip(1) {
            let kept = tokens.min(left);
            left -= kept;
            response += if i % 2 == 1 { kept } else { 0 };
        }
        Ok(response)
    }
}

/// Whether a message is marked as not learned.
fn is_left_out(message: &Value) -> bool {
    message.get("train") == Some(&Value::Bool(false)) || message.get("weight").and_then(Value::as_f64) == Some(0.0)
}

impl Row for SftRow {
    const KIND: RowKind = RowKind::Demonstration;

    fn parts(&self) -> Vec<(&[u32], bool)> {
        let mut rest = &self.tokens[..];
        let mut parts = Vec::new();
        for run in self.mask.chunk_by(|a, b| a == b) {
            let (own, behind) = rest.split_at(run.len());
            parts.push((own, run[0] != 0));
            rest = behind;
        }
        parts
    }

    fn read(entry: &Entry, document: Option<Document>, _tokenizer: &Tokenizer) -> Result<Self> {
        let Some(document) = document else {
            let prompt = (entry.end - entry.start) as usize;
            let mask = (0..entry.tokens()).map(|i| u8::from(i >= prompt)).collect();
            let images = entry.images(None)?;
            return Ok(SftRow { tokens: vec![0; entry.tokens()], mask, images, ..SftRow::default() });
        };
        let sequences = document.sequences()?;
        let mut tokens = sequences[0][entry.start as usize..entry.end as usize].to_vec();
        let mut mask = vec![0; tokens.len()];
        // Prompts and responses alternate.
        for (i, sequence) in sequences.iter().enumerate().skip(1) {
            tokens.extend_from_slice(sequence);
            mask.resize(tokens.len(), (i % 2) as u8);
        }
        tokens.truncate(entry.tokens());
        mask.truncate(entry.tokens());
        Ok(SftRow { id: document.id(), tokens, mask, images: entry.images(Some(document))? })
    }
}
