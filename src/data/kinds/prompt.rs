//! Prompts alone, whose responses the model samples. Documents are [prompt].

use serde_json::{Map, Value};

use super::spec::{Row, RowSpec};
use crate::config::method::RowKind;
use crate::data::cut::{Entry, PIECE_SHIFT};
use crate::data::images;
use crate::data::rows::{Place, Reading, template_variables};
use crate::data::shape::{self, Fields, is_assistant};
use crate::data::source::Document;
use crate::error::{Error, Result};
use crate::experience::Prompt;
use crate::text::Tokenizer;
use crate::text::images::Sequences;

pub struct Prompts;

impl RowSpec for Prompts {
    fn fields(&self) -> Fields {
        Fields::Prompt
    }

    fn keeps_fields(&self) -> bool {
        true
    }

    fn names_shards(&self) -> bool {
        false
    }

    fn has_windows(&self) -> bool {
        true
    }

    /// The prompt. Answers at the end of its messages are left out, because the model writes the answer itself.
    fn encode(&self, row: &Map<String, Value>, reading: Reading) -> Result<Sequences> {
        encode_prompt(row, reading, true)
    }
}

/// Encodes the prompt alone. `is_open`: an answer follows it.
pub fn encode_prompt(row: &Map<String, Value>, reading: Reading, is_open: bool) -> Result<Sequences> {
    let Reading { config, tokenizer, .. } = reading;
    let Some(prompt) = shape::prompt(row, config, None)? else {
        return Err(shape::missing(row, config, Fields::Prompt, &config.prompt_key));
    };
    let Some(mut messages) = prompt.content.messages("user", config.chat_template) else {
        let tokens = vec![reading.tokens(&prompt, Place::Prompt)?];
        return Ok(Sequences { tokens, images: images::of_columns(row)? });
    };
    while is_open && messages.last().is_some_and(is_assistant) {
        messages.pop();
    }
    if messages.is_empty() {
        return Err(Error::data("the messages must have one before the assistant's answer"));
    }
    let images = images::lift(&mut messages, row, tokenizer)?;
    let more = template_variables(row, &config.chat_template_args)?;
    Ok(Sequences { tokens: vec![tokenizer.encode_chat(&Value::Array(messages), &more, is_open)?], images })
}

impl Row for Prompt {
    const KIND: RowKind = RowKind::Prompt;
    // One token for a response.
    const FREE: usize = 1;

    fn hint(context: usize) -> String {
        let most = context.saturating_sub(1);
        format!("set data.prompt_tokens_max to at most {most}, and data.long_prompts for longer prompts")
    }

    fn parts(&self) -> Vec<(&[u32], bool)> {
        vec![(&self.tokens[..], false)]
    }

    fn label(&self) -> String {
        self.label.clone()
    }

    fn read(entry: &Entry, document: Option<Document>, tokenizer: &Tokenizer) -> Result<Self> {
        let Some(document) = document else {
            let images = entry.images(None)?;
            return Ok(Prompt { tokens: vec![0; entry.tokens()], images, ..Prompt::default() });
        };
        let tokens = document.prompt()?[entry.start as usize..entry.end as usize].to_vec();
        Ok(Prompt {
            id: document.id() + (u64::from(entry.piece) << PIECE_SHIFT),
            text: tokenizer.decode_prompt(&tokens)?,
            label: document.label()?,
            source: document.source.name.clone(),
            images: entry.images(Some(document))?,
            tokens,
        })
    }
}
