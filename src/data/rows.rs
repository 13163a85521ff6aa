//! Encoding of one row into one document of tokens.

use serde_json::{Map, Value, json};

use super::shard::Meta;
use super::split::{TEST, TRAIN, is_test};
use crate::config::data::{DataConfig, SplitBy};
use crate::error::{Error, Result};
use crate::experience::RowFields;
use crate::text::{Tokenizer, kind_of};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// The prompt alone: documents are [prompt].
    Prompt,
    /// Prompt and demonstration: documents are [prompt, response], alternating for several turns.
    Demonstration,
    /// Prompt and two responses: documents are [prompt, chosen, rejected].
    Pair,
    /// Prompt and a response labeled true or false: documents are [prompt, response].
    Labelled,
    /// A text with a list of labels, one for each of its steps: documents are [text].
    Steps,
    /// Plain text, all of which is learned: documents are [text].
    Text,
}

/// The settings for reading the rows of a job: their fields, and their splits.
#[derive(Clone, Copy, Debug)]
pub struct Reading<'a> {
    pub config: &'a DataConfig,
    pub part: Part,
    pub tokenizer: &'a Tokenizer,
    /// The size of the model's vocabulary.
    pub vocabulary: usize,
}

/// Used instead of field names for a shard that keeps all fields.
pub const ALL_FIELDS: &str = "all";

/// A row for the shard.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Encoded {
    pub sequences: Vec<Vec<u32>>,
    pub meta: Meta,
    pub split: Option<String>,
}

/// Turns rows into tokens. Shared by the encoding threads.
pub(super) struct Encoder<'a> {
    pub reading: Reading<'a>,
    /// Fields kept in the shard's meta lines. `ALL_FIELDS` alone keeps all.
    pub kept: &'a [String],
}

impl Encoder<'_> {
    /// The document of one row. `source` is its file and line. `split` is the input's own split, if it has one.
    pub fn encode(&self, row: Map<String, Value>, source: String, split: Option<&str>) -> Result<Encoded> {
        let sequences = self.sequences(&row)?;
        let config = self.reading.config;
        let field = &config.split.field;
        let split = match config.split.by {
            SplitBy::Source | SplitBy::File => split.map(str::to_owned),
            SplitBy::Ratio => Some(if is_test(&sequences[0], &config.split) { TEST } else { TRAIN }.to_owned()),
            SplitBy::Field => Some(scalar(field, required(&row, field)?)?),
        };
        let label = match (self.reading.part, config.label_key.as_str(), config.margin_key.as_str()) {
            (Part::Pair, _, "") | (Part::Prompt | Part::Demonstration | Part::Text, "", _) => String::new(),
            (Part::Pair, _, key) => margin_text(key, required(&row, key)?)?,
            (Part::Labelled | Part::Steps, "", _) => {
                return Err(Error::usage("data.label_key must name the field of the labels")
                    .hint("set data.label_key (or pass --label-key)"));
            }
            (Part::Labelled, key, _) => truth(key, required(&row, key)?)?.to_string(),
            (Part::Steps, key, _) => step_labels(key, required(&row, key)?)?,
            (_, key, _) => label_text(required(&row, key)?),
        };
        let fields = if self.kept == [ALL_FIELDS] {
            row
        } else {
            let kept = self.kept.iter().map(|field| Ok((field.clone(), required(&row, field)?.clone())));
            kept.collect::<Result<_>>()?
        };
        Ok(Encoded { sequences, meta: Meta { label, source, fields }, split })
    }

    fn sequences(&self, row: &Map<String, Value>) -> Result<Vec<Vec<u32>>> {
        let Reading { config: format, part, .. } = self.reading;
        match part {
            Part::Pair => return self.pair(row),
            Part::Labelled => return self.labelled(row),
            Part::Text => {
                return Ok(vec![self.tokens(&format.prompt_key, required(row, &format.prompt_key)?, part)?]);
            }
            Part::Prompt | Part::Demonstration | Part::Steps => {}
        }
        let (key, prompt) = match row.get(&format.messages_key) {
            Some(messages) if format.chat_template => (&format.messages_key, messages),
            _ => (&format.prompt_key, required(row, &format.prompt_key)?),
        };
        let prompt_tokens = match prompt {
            Value::Array(items) if is_messages(items) => {
                if !format.chat_template {
                    return Err(Error::data(format!("field {key:?} holds messages, which need a chat template"))
                        .hint("set chat_template = true (or pass --chat-template)"));
                }
                return self.turns(row, items);
            }
            Value::String(text) if format.chat_template && !text.is_empty() => {
                return self.turns(row, &[json!({"role": "user", "content": text})]);
            }
            _ => self.tokens(key, prompt, Part::Prompt)?,
        };
        if part != Part::Demonstration {
            return Ok(vec![prompt_tokens]);
        }
        let key = &format.response_key;
        Ok(vec![prompt_tokens, self.tokens(key, required(row, key)?, Part::Demonstration)?])
    }

    /// Prompt, chosen and rejected. If a row has no prompt, both sides contain it: the prompt is their common
    /// beginning, which is the messages before the last answer, or tokens.
    fn pair(&self, row: &Map<String, Value>) -> Result<Vec<Vec<u32>>> {
        let config = self.reading.config;
        let prompt = self.prompt(row);
        let sides = [&config.chosen_key, &config.rejected_key];
        let [chosen, rejected] = [required(row, sides[0])?, required(row, sides[1])?];
        let is_whole = prompt.is_none() && !(is_conversation(chosen) && is_conversation(rejected));
        let [(one, chosen), (other, rejected)] =
            [self.side(row, prompt, sides[0], chosen)?, self.side(row, prompt, sides[1], rejected)?];
        let parts = if is_whole {
            let known = if row[sides[0]].is_string() { self.reading.tokenizer.encode("", true)?.len() } else { 0 };
            let alike = chosen.iter().zip(&rejected).take_while(|(a, b)| a == b).count();
            let prompt = alike.min(chosen.len() - 1).min(rejected.len() - 1);
            // Tokens that begin every text do not make a prompt.
            if prompt <= known && chosen != rejected {
                return Err(Error::data(format!(
                    "fields {:?} and {:?} have no common beginning that could be the prompt",
                    sides[0], sides[1]
                ))
                .hint(format!("put the prompt into its own field {:?} (data.prompt_key)", config.prompt_key)));
            }
            [&chosen[..prompt], &chosen[prompt..], &rejected[prompt..]].map(<[u32]>::to_vec)
        } else if one == other {
            [one, chosen, rejected]
        } else {
            return Err(Error::data(format!("fields {:?} and {:?} answer different prompts", sides[0], sides[1]))
                .hint("give both sides in the same form; conversations may differ only in the last answer"));
        };
        if parts[1] == parts[2] {
            return Err(Error::data(format!(
                "fields {:?} and {:?} must differ (got equal responses)",
                sides[0], sides[1]
            )));
        }
        Ok(parts.to_vec())
    }

    /// Prompt and response. If a row has no response, its messages end with it.
    fn labelled(&self, row: &Map<String, Value>) -> Result<Vec<Vec<u32>>> {
        let (config, prompt) = (self.reading.config, self.prompt(row));
        let (before, response) = match (row.get(&config.response_key), prompt) {
            (None, Some((key, whole))) if is_conversation(whole) => self.side(row, None, key, whole)?,
            (None, _) => return Err(no_field(row, &config.response_key)),
            (Some(response), _) => self.side(row, prompt, &config.response_key, response)?,
        };
        if before.is_empty() { Err(no_field(row, &config.prompt_key)) } else { Ok(vec![before, response]) }
    }

    /// The prompt of a row and its field, if there is one.
    fn prompt<'a>(&'a self, row: &'a Map<String, Value>) -> Option<(&'a String, &'a Value)> {
        let config = self.reading.config;
        let messages = row.get(&config.messages_key).filter(|_| config.chat_template);
        let messages = messages.map(|messages| (&config.messages_key, messages));
        messages.or_else(|| row.get(&config.prompt_key).map(|prompt| (&config.prompt_key, prompt)))
    }

    /// The tokens before the last answer of one side of a pair, if known, and the tokens after them.
    fn side(
        &self,
        row: &Map<String, Value>,
        prompt: Option<(&String, &Value)>,
        key: &str,
        side: &Value,
    ) -> Result<(Vec<u32>, Vec<u32>)> {
        let is_chat = self.reading.config.chat_template;
        let messages = |value: &Value, role: &str| match value {
            Value::Array(items) if is_messages(items) => Some(items.clone()),
            Value::String(text) if is_chat && !text.is_empty() => Some(vec![json!({"role": role, "content": text})]),
            _ => None,
        };
        let before = prompt.map_or(Some(Vec::new()), |(_, prompt)| messages(prompt, "user"));
        match (before, messages(side, "assistant")) {
            (Some(before), Some(answer)) if prompt.is_some() || side.is_array() => {
                if !is_chat {
                    return Err(Error::data(format!("field {key:?} holds messages, which need a chat template"))
                        .hint("set chat_template = true (or pass --chat-template)"));
                }
                // A conversation may begin with the prompt.
                let all = if answer.starts_with(&before) {
                    answer
                } else if answer.iter().all(is_assistant) {
                    [before, answer].concat()
                } else {
                    return Err(Error::data(format!("field {key:?} must begin with the prompt's messages")));
                };
                if !all.last().is_some_and(is_assistant) {
                    return Err(Error::data(format!("field {key:?} must end with an assistant message")));
                }
                let mut sequences = self.turns(row, &all)?;
                let answer = sequences.pop().unwrap_or_default();
                Ok((sequences.concat(), answer))
            }
            _ => match prompt {
                Some((name, prompt)) => {
                    Ok((self.tokens(name, prompt, Part::Prompt)?, self.tokens(key, side, Part::Demonstration)?))
                }
                None => Ok((Vec::new(), self.tokens(key, side, Part::Pair)?)),
            },
        }
    }

    /// The tokens of a field, which holds token ids or text. All texts except prompts get an end token.
    fn tokens(&self, key: &str, value: &Value, part: Part) -> Result<Vec<u32>> {
        let tokens = match value {
            Value::Array(items) => token_ids(key, items)?,
            Value::String(text) if text.is_empty() => return Err(empty(key)),
            Value::String(text) if part == Part::Prompt => self.reading.tokenizer.encode(text, true)?,
            Value::String(text) => {
                let eos = self.reading.tokenizer.eos_ids().first().ok_or_else(|| {
                    Error::data("the tokenizer has no end token, so demonstrations could not end")
                        .hint("set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json")
                })?;
                let mut tokens = self.reading.tokenizer.encode(text, part != Part::Demonstration)?;
                // The model learns to stop where the demonstration does.
                tokens.push(*eos);
                tokens
            }
            other => return Err(Error::data(format!("field {key:?} must be a string (got {})", kind_of(other)))),
        };
        if tokens.is_empty() { Err(empty(key)) } else { Ok(tokens) }
    }

    /// Messages through the chat template. An assistant's turn is a response, and everything before it is its prompt.
    fn turns(&self, row: &Map<String, Value>, messages: &[Value]) -> Result<Vec<Vec<u32>>> {
        let Reading { config, part, tokenizer, .. } = self.reading;
        let (mut messages, more) = (messages.to_vec(), template_variables(row, &config.chat_template_args)?);
        if part == Part::Steps {
            return Ok(vec![tokenizer.encode_chat(&Value::Array(messages), &more, false)?]);
        }
        if part == Part::Prompt {
            while messages.last().is_some_and(is_assistant) {
                messages.pop();
            }
            if messages.is_empty() {
                return Err(Error::data("the messages must have one before the assistant's answer"));
            }
            return Ok(vec![tokenizer.encode_chat(&Value::Array(messages), &more, true)?]);
        }
        let is_learned = |message: &Value| is_assistant(message) && (part == Part::Pair || !is_left_out(message));
        if !messages.iter().any(is_assistant) {
            let response = required(row, &config.response_key)?;
            let Some(text) = response.as_str().filter(|text| !text.is_empty()) else {
                return Err(Error::data(format!(
                    "field {:?} must be a non-empty string (got {})",
                    config.response_key,
                    kind_of(response)
                )));
            };
            messages.push(json!({"role": "assistant", "content": text}));
        }
        let mut sequences: Vec<Vec<u32>> = Vec::new();
        let (mut done, mut tail) = (String::new(), Vec::new());
        for end in (0..messages.len()).filter(|i| is_learned(&messages[*i])) {
            let render =
                |n: usize, open: bool| tokenizer.chat()?.apply(&Value::Array(messages[..n].to_vec()), &more, open);
            let (before, with) = (render(end, true)?, render(end + 1, false)?);
            let (Some(prompt), Some(response)) = (before.strip_prefix(done.as_str()), with.strip_prefix(&before))
            else {
                return Err(Error::data("the chat template rewrites earlier turns, so the turns cannot be separated")
                    .hint("use rows with one turn each, or with prompt and response fields"));
            };
            let mut prompt_tokens = std::mem::take(&mut tail);
            prompt_tokens.extend(tokenizer.encode(prompt, false)?);
            let mut response_tokens = tokenizer.encode(response, false)?;
            // Text that a template prints after the end token (a line break) is never sampled: it opens the next
            // prompt.
            let stop = response_tokens.iter().rposition(|t| tokenizer.eos_ids().contains(t));
            if let Some(stop) = stop {
                tail = response_tokens.split_off(stop + 1);
            }
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
        Ok(sequences)
    }
}

/// The variables that a row and the job pass to the chat template in addition to the messages.
pub fn template_variables(row: &Map<String, Value>, args: &Map<String, Value>) -> Result<Map<String, Value>> {
    let mut variables = args.clone();
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
    let mut prompt = messages.or_else(|| fields.remove(&config.prompt_key)).unwrap_or_default();
    if let Value::Array(items) = &mut prompt {
        while items.last().is_some_and(is_assistant) {
            items.pop();
        }
    }
    RowFields { prompt, columns: fields }
}

fn is_messages(items: &[Value]) -> bool {
    !items.is_empty() && items.iter().all(Value::is_object)
}

fn is_conversation(value: &Value) -> bool {
    value.as_array().is_some_and(|items| is_messages(items))
}

fn is_assistant(message: &Value) -> bool {
    message.get("role").and_then(Value::as_str) == Some("assistant")
}

/// Whether a message is marked as not learned.
fn is_left_out(message: &Value) -> bool {
    message.get("train") == Some(&Value::Bool(false)) || message.get("weight").and_then(Value::as_f64) == Some(0.0)
}

pub fn required<'a>(row: &'a Map<String, Value>, key: &str) -> Result<&'a Value> {
    row.get(key).ok_or_else(|| no_field(row, key))
}

fn no_field(row: &Map<String, Value>, key: &str) -> Error {
    let there: Vec<&str> = row.keys().map(String::as_str).collect();
    Error::data(format!("the row has no field {key:?}; it has: {}", there.join(", ")))
}

pub fn token_ids(key: &str, items: &[Value]) -> Result<Vec<u32>> {
    let id = |item: &Value| {
        let id = item.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| Error::data(format!("field {key:?} must be a list of token ids or messages (got {item})")))
    };
    items.iter().map(id).collect()
}

fn empty(key: &str) -> Error {
    Error::data(format!("field {key:?} is empty"))
}

fn scalar(key: &str, value: &Value) -> Result<String> {
    match value {
        Value::String(text) if !text.is_empty() => Ok(text.clone()),
        Value::Number(number) => Ok(number.to_string()),
        Value::Bool(flag) => Ok(flag.to_string()),
        other => Err(Error::data(format!("field {key:?} must be the name of a split (got {other})"))),
    }
}

fn margin_text(key: &str, value: &Value) -> Result<String> {
    let margin = value.as_f64().filter(|margin| margin.is_finite());
    margin
        .map(|margin| margin.to_string())
        .ok_or_else(|| Error::data(format!("field {key:?} must be a number (got {value})")))
}

fn truth(key: &str, value: &Value) -> Result<bool> {
    match value {
        Value::Bool(label) => Ok(*label),
        Value::Number(label) if label.as_f64() == Some(1.0) => Ok(true),
        Value::Number(label) if label.as_f64() == Some(0.0) => Ok(false),
        Value::String(label) if label == "true" => Ok(true),
        Value::String(label) if label == "false" => Ok(false),
        other => Err(Error::data(format!("field {key:?} must be true or false (got {other})"))),
    }
}

/// Checks labels of steps: strings of tokens, or numbers.
fn step_labels(key: &str, value: &Value) -> Result<String> {
    let Value::Array(labels) = value else {
        return Err(Error::data(format!("field {key:?} must be a list of labels (got {})", kind_of(value))));
    };
    let is_soft = |label: &Value| label.as_f64().is_some_and(|p| (0.0..=1.0).contains(&p));
    match labels.iter().find(|label| !label.is_string() && !is_soft(label)) {
        _ if labels.is_empty() => Err(empty(key)),
        Some(label) => {
            Err(Error::data(format!("field {key:?} must hold strings, or numbers from 0 to 1 (got {label})")))
        }
        None => Ok(value.to_string()),
    }
}

fn label_text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}
