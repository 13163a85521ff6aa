//! The settings for reading rows, and how their texts and messages become tokens.

use serde_json::{Map, Value};

pub use super::fields::{field, required, token_ids};
use super::images;
use super::shape::{Content, Field, Turns, is_assistant};
use crate::config::data::DataConfig;
use crate::config::method::RowKind;
use crate::error::{Error, Result};
use crate::experience::RowFields;
use crate::text::images::Sequences;
use crate::text::{Tokenizer, kind_of};

/// The settings for reading the rows of a job: their fields, and their splits.
#[derive(Clone, Copy, Debug)]
pub struct Reading<'a> {
    pub config: &'a DataConfig,
    pub kind: RowKind,
    pub tokenizer: &'a Tokenizer,
    /// The size of the model's vocabulary.
    pub vocabulary: usize,
}

/// The place of a text in its row. It decides whether the text gets the tokens that begin and end a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Begins the row, and a response follows.
    Prompt,
    /// Ends the row after a prompt.
    Answer,
    /// The whole row.
    Whole,
}

impl<'a> Reading<'a> {
    /// The same settings for the rows of `data.pretrain`, whose configuration is `config`.
    pub(super) fn of_pretrain(self, config: &'a DataConfig) -> Self {
        Self { config, kind: RowKind::Text, ..self }
    }

    /// A prompt, if there is one, and an answer to it. Without a prompt, a text or a list of token ids is all answer.
    pub(super) fn side(self, row: &Map<String, Value>, prompt: Option<&Field>, answer: &Field) -> Result<Side> {
        match Turns::join(prompt, answer, self.config.chat_template)? {
            Turns::Chat { messages: mut all, .. } => {
                let images = images::lift(&mut all, row, self.tokenizer)?;
                let last = all.len() - 1;
                // A template that rewrites earlier turns still prints a whole conversation.
                let mut sequences = match self.turns(row, &all, |i| is_assistant(&all[i]))? {
                    Some(sequences) => sequences,
                    None => self.turns(row, &all, |i| i == last)?.ok_or_else(rewrites)?,
                };
                all.pop();
                let answer = sequences.pop().unwrap_or_default();
                Ok(Side { before: Some(all), prompt: sequences.concat(), answer, images })
            }
            Turns::Plain { prompt: Some(prompt), answer } => {
                let (prompt, answer) = (self.tokens(prompt, Place::Prompt)?, self.tokens(answer, Place::Answer)?);
                Ok(Side { before: None, prompt, answer, images: images::of_columns(row)? })
            }
            Turns::Plain { prompt: None, answer } => Ok(Side {
                before: None,
                prompt: Vec::new(),
                answer: self.tokens(answer, Place::Whole)?,
                images: images::of_columns(row)?,
            }),
        }
    }

    /// The tokens of a field, which holds token ids or text. All texts except prompts get an end token.
    pub(super) fn tokens(self, field: &Field, place: Place) -> Result<Vec<u32>> {
        let tokens = match &field.content {
            Content::Ids(ids) => ids.clone(),
            Content::Text(text) if text.is_empty() => return Err(empty(field.key)),
            Content::Text(text) if place == Place::Prompt => self.tokenizer.encode(text, true)?,
            Content::Text(text) => {
                let eos = self.tokenizer.eos_ids().first().ok_or_else(|| {
                    Error::data("the tokenizer has no end token, so demonstrations could not end")
                        .hint("set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json")
                })?;
                let mut tokens = self.tokenizer.encode(text, place == Place::Whole)?;
                // The model learns to stop where the demonstration does.
                tokens.push(*eos);
                tokens
            }
            Content::Messages(_) => {
                return Err(Error::data(format!(
                    "field {:?} holds messages, and the other field token ids",
                    field.key
                ))
                .hint("give prompt and answer in the same form"));
            }
        };
        if tokens.is_empty() { Err(empty(field.key)) } else { Ok(tokens) }
    }

    /// A conversation through the chat template, with its images: the sequences of `turns`.
    pub(super) fn conversation(
        self,
        row: &Map<String, Value>,
        mut messages: Vec<Value>,
        is_learned: impl Fn(usize, &Value) -> bool,
    ) -> Result<Sequences> {
        let images = images::lift(&mut messages, row, self.tokenizer)?;
        let tokens = self.turns(row, &messages, |i| is_learned(i, &messages[i]))?.ok_or_else(rewrites)?;
        Ok(Sequences { tokens, images })
    }

    /// Messages through the chat template. A learned turn is a response, and everything before it is its prompt. `None`
    /// if the template rewrites earlier turns, so that several turns cannot be separated.
    pub(super) fn turns(
        self,
        row: &Map<String, Value>,
        messages: &[Value],
        is_learned: impl Fn(usize) -> bool,
    ) -> Result<Option<Vec<Vec<u32>>>> {
        let Reading { config, tokenizer, .. } = self;
        let more = template_variables(row, &config.chat_template_args)?;
        let render = |n: usize, open: bool| tokenizer.chat()?.apply(&Value::Array(messages[..n].to_vec()), &more, open);
        let mut sequences: Vec<Vec<u32>> = Vec::new();
        let (mut done, mut tail) = (String::new(), Vec::new());
        for end in (0..messages.len()).filter(|i| is_learned(*i)) {
            let (before, with) = (render(end, true)?, render(end + 1, false)?);
            let (Some(prompt), Some(rest)) = (before.strip_prefix(&*done), with.strip_prefix(&*done)) else {
                return Ok(None);
            };
            let mut prompt_tokens = std::mem::take(&mut tail);
            let mut response_tokens = if let Some(response) = with.strip_prefix(&before) {
                prompt_tokens.extend(tokenizer.encode(prompt, false)?);
                tokenizer.encode(response, false)?
            } else if with.starts_with(&render(end, false)?) {
                // The generation prompt begins a thought that a finished answer does not have. Their common beginning
                // is the prompt.
                let (opened, mut tokens) = (tokenizer.encode(prompt, false)?, tokenizer.encode(rest, false)?);
                let alike = tokens.iter().zip(&opened).take_while(|(a, b)| a == b).count();
                let response = tokens.split_off(alike);
                prompt_tokens.extend(tokens);
                response
            } else {
                return Ok(None);
            };
            // Text that a template prints after the end token (a line break) is never sampled: it opens the next
            // prompt.
            tail = response_tokens.split_off(tokenizer.turn_end(&response_tokens));
            if prompt_tokens.is_empty() || response_tokens.is_empty() {
                return Err(Error::data("an assistant message is empty, or two follow each other"));
            }
            sequences.push(prompt_tokens);
            sequences.push(response_tokens);
            done = with;
        }
        if sequences.is_empty() {
            return Err(Error::data("all assistant messages have train = false or weight = 0"));
        }
        Ok(Some(sequences))
    }
}

/// A prompt and an answer, as tokens.
pub(super) struct Side {
    /// The messages before the answer, in a chat.
    pub before: Option<Vec<Value>>,
    pub prompt: Vec<u32>,
    pub answer: Vec<u32>,
    /// Its images as the row gives them, in the order of their places.
    pub images: Vec<Value>,
}

pub(super) fn rewrites() -> Error {
    Error::data("the chat template rewrites earlier turns, so the turns cannot be separated").hint(
        "write one turn per row, put the last answer into data.response_key, or use a training template: a \
         chat_template.jinja that prints each turn the same, whatever follows",
    )
}

/// The variables that a row and the job pass to the chat template in addition to the messages. A row passes its
/// `chat_template_kwargs`, as in TRL, and its `tools`.
pub fn template_variables(row: &Map<String, Value>, args: &Map<String, Value>) -> Result<Map<String, Value>> {
    let mut variables = args.clone();
    match row.get("chat_template_kwargs") {
        None | Some(Value::Null) => {}
        Some(Value::Object(own)) => variables.extend(own.clone()),
        Some(other) => {
            let what = kind_of(other);
            return Err(Error::data(format!("field \"chat_template_kwargs\" must be an object (got {what})")));
        }
    }
    let tools = match row.get("tools") {
        None | Some(Value::Null) => return Ok(variables),
        // Arrow has one type per column, so schemas of different shapes are stored as strings.
        Some(Value::String(text)) => serde_json::from_str(text).unwrap_or_else(|_| Value::from(&**text)),
        Some(tools) => tools.clone(),
    };
    if !tools.as_array().is_some_and(|tools| tools.iter().all(Value::is_object)) {
        return Err(Error::data(format!("field \"tools\" must be a list of JSON schemas (got {})", kind_of(&tools))));
    }
    variables.insert("tools".to_owned(), tools);
    Ok(variables)
}

/// The row of a prompt document as in its file, from the fields that its shard keeps.
pub(super) fn row_fields(mut fields: Map<String, Value>, config: &DataConfig) -> RowFields {
    let messages = config.chat_template.then(|| fields.remove(&config.messages_key)).flatten();
    let prompt = messages.or_else(|| fields.remove(&config.prompt_key));
    let mut prompt = prompt.or_else(|| field(&fields, &config.prompt_key).cloned()).unwrap_or_default();
    if let Value::Array(items) = &mut prompt {
        while items.last().is_some_and(is_assistant) {
            items.pop();
        }
    }
    RowFields { prompt, columns: fields }
}

pub(super) fn empty(key: &str) -> Error {
    Error::data(format!("field {key:?} is empty"))
}
