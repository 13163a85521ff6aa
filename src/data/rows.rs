//! Encoding of one row into one document of tokens.

use serde_json::{Map, Value};

pub use super::fields::{field, required, token_ids};
use super::shape::{self, Content, Field, Parts, Turns, is_assistant};
use super::shard::Meta;
use super::split::{TEST, TRAIN, is_test};
use crate::config::data::{DataConfig, SplitBy};
use crate::config::method::RowKind;
use crate::error::{Error, Result};
use crate::experience::RowFields;
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

/// Used instead of field names for a shard that keeps all fields.
pub const ALL_FIELDS: &str = "all";

/// The tokens of a row, as a job reads it that trains on rows of the kind `reading.kind`: a prompt, or a prompt and its
/// response, alternating for several turns.
///
/// # Errors
/// `Data` if the row lacks a field, or has one that cannot be read.
pub fn sequences(row: &Map<String, Value>, reading: Reading) -> Result<Vec<Vec<u32>>> {
    Encoder { reading, kept: &[] }.sequences(row)
}

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
        let label = match (self.reading.kind, config.label_key.as_str(), config.margin_key.as_str()) {
            (RowKind::Pair, _, "") | (RowKind::Prompt | RowKind::Demonstration | RowKind::Text, "", _) => String::new(),
            (RowKind::Pair, _, key) => margin_text(key, named(&row, key, "margin")?)?,
            (RowKind::Labelled | RowKind::Steps, "", _) => {
                return Err(Error::usage("data.label_key must name the field of the labels")
                    .hint("set data.label_key (or pass --label-key)"));
            }
            (RowKind::Labelled, key, _) => truth(key, named(&row, key, "label")?)?.to_string(),
            (RowKind::Steps, key, _) => step_labels(key, named(&row, key, "label")?)?,
            (_, key, _) => label_text(named(&row, key, "label")?),
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
        let Reading { config, kind, .. } = self.reading;
        if kind == RowKind::Text {
            let text = required(row, &config.prompt_key).map_err(|_| self.missing(row, &config.prompt_key))?;
            return Ok(vec![self.text(&config.prompt_key, text)?]);
        }
        shape::warn_of_unread(row, config, kind);
        let parts = Parts::from_row(row, config, kind)?;
        match kind {
            RowKind::Pair => self.pair(row, &parts),
            RowKind::Labelled => self.labelled(row, &parts),
            RowKind::Demonstration => self.demonstration(row, &parts),
            RowKind::Prompt | RowKind::Steps | RowKind::Text => self.prompt(row, &parts),
        }
    }

    fn missing(&self, row: &Map<String, Value>, key: &str) -> Error {
        shape::missing(row, self.reading.config, self.reading.kind, key)
    }

    /// The prompt alone. Answers at the end of its messages are left out, because the model writes the answer itself.
    fn prompt(&self, row: &Map<String, Value>, parts: &Parts<'_>) -> Result<Vec<Vec<u32>>> {
        let Reading { config, kind, tokenizer, .. } = self.reading;
        let Some(prompt) = &parts.prompt else { return Err(self.missing(row, &config.prompt_key)) };
        let Some(mut messages) = prompt.content.messages("user", config.chat_template) else {
            return Ok(vec![self.tokens(prompt, RowKind::Prompt)?]);
        };
        let is_open = kind == RowKind::Prompt;
        while is_open && messages.last().is_some_and(is_assistant) {
            messages.pop();
        }
        if messages.is_empty() {
            return Err(Error::data("the messages must have one before the assistant's answer"));
        }
        let more = template_variables(row, &config.chat_template_args)?;
        Ok(vec![tokenizer.encode_chat(&Value::Array(messages), &more, is_open)?])
    }

    /// Prompt and response, alternating for several turns. If a row has a response of its own, only that is learned.
    fn demonstration(&self, row: &Map<String, Value>, parts: &Parts<'_>) -> Result<Vec<Vec<u32>>> {
        let config = self.reading.config;
        let Some(prompt) = &parts.prompt else { return Err(self.missing(row, &config.prompt_key)) };
        let turns = match &parts.response {
            Some(response) => Turns::join(Some(prompt), response, config.chat_template)?,
            None => match prompt.content.messages("user", config.chat_template) {
                Some(messages) if messages.iter().any(is_assistant) => Turns::Chat(messages, 0),
                messages => {
                    if messages.is_none() {
                        self.tokens(prompt, RowKind::Prompt)?;
                    }
                    return Err(self.missing(row, &config.response_key));
                }
            },
        };
        match turns {
            Turns::Chat(messages, first) => {
                if first > 0 && messages[first - 1..].iter().take(2).filter(|m| is_assistant(m)).count() == 2 {
                    return Err(Error::data(format!(
                        "fields {:?} and {:?} end with different answers",
                        prompt.key, config.response_key
                    ))
                    .hint("remove one of them, or set data.response_key to a field that the rows do not have"));
                }
                let learned = |i: usize| i >= first && is_assistant(&messages[i]) && !is_left_out(&messages[i]);
                self.turns(row, &messages, learned)?.ok_or_else(rewrites)
            }
            Turns::Plain(_, response) => {
                Ok(vec![self.tokens(prompt, RowKind::Prompt)?, self.tokens(response, RowKind::Demonstration)?])
            }
        }
    }

    /// Prompt, chosen and rejected. If a row has no prompt, both sides contain it: the prompt is their common
    /// beginning, which is the messages before the last answer, or tokens.
    fn pair(&self, row: &Map<String, Value>, parts: &Parts<'_>) -> Result<Vec<Vec<u32>>> {
        let config = self.reading.config;
        let Some(sides) = &parts.sides else {
            let key = if field(row, &config.chosen_key).is_none() { &config.chosen_key } else { &config.rejected_key };
            return Err(self.missing(row, key));
        };
        let [key, other_key] = [sides[0].key, sides[1].key];
        let are_chats = sides.iter().all(|side| matches!(side.content, Content::Messages(_)));
        let is_whole = parts.prompt.is_none() && !are_chats;
        let [one, other] = [self.side(row, parts, &sides[0])?, self.side(row, parts, &sides[1])?];
        let (chosen, rejected) = (&one.answer, &other.answer);
        let alike = |a: &[u32], b: &[u32]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
        let parts = if is_whole {
            let is_text = matches!(sides[0].content, Content::Text(_));
            let known = if is_text { self.reading.tokenizer.encode("", true)?.len() } else { 0 };
            let prompt = alike(chosen, rejected).min(chosen.len() - 1).min(rejected.len() - 1);
            // Tokens that begin every text do not make a prompt.
            if prompt <= known && chosen != rejected {
                return Err(Error::data(format!(
                    "fields {key:?} and {other_key:?} have no common beginning that could be the prompt"
                ))
                .hint(format!("put the prompt into its own field {:?} (data.prompt_key)", config.prompt_key)));
            }
            [&chosen[..prompt], &chosen[prompt..], &rejected[prompt..]].map(<[u32]>::to_vec)
        } else if one.prompt == other.prompt {
            [one.prompt, one.answer, other.answer]
        } else if one.before.is_some() && one.before == other.before {
            // The template begins the two answers differently: all that is alike is prompt.
            let [one, other] = [one, other].map(|side| [side.prompt, side.answer].concat());
            let prompt = alike(&one, &other).min(one.len() - 1).min(other.len() - 1);
            [&one[..prompt], &one[prompt..], &other[prompt..]].map(<[u32]>::to_vec)
        } else {
            return Err(Error::data(format!("fields {key:?} and {other_key:?} answer different prompts"))
                .hint("give both sides in the same form; conversations may differ only in the last answer"));
        };
        if parts[1] == parts[2] {
            return Err(Error::data(format!("fields {key:?} and {other_key:?} must differ (got equal responses)")));
        }
        Ok(parts.to_vec())
    }

    /// Prompt and response. If a row has no response, its messages end with it.
    fn labelled(&self, row: &Map<String, Value>, parts: &Parts<'_>) -> Result<Vec<Vec<u32>>> {
        let config = self.reading.config;
        let is_whole =
            |prompt: &&Field| matches!(&prompt.content, Content::Messages(all) if all.last().is_some_and(is_assistant));
        let whole = parts.prompt.as_ref().filter(is_whole);
        let side = match (&parts.response, whole) {
            (Some(response), _) => self.side(row, parts, response)?,
            (None, Some(whole)) => self.side(row, &Parts::default(), whole)?,
            (None, None) => return Err(self.missing(row, &config.response_key)),
        };
        if side.prompt.is_empty() {
            return Err(self.missing(row, &config.prompt_key));
        }
        Ok(vec![side.prompt, side.answer])
    }

    /// A prompt, if there is one, and an answer to it. Without a prompt, a text or a list of token ids is all answer.
    fn side(&self, row: &Map<String, Value>, parts: &Parts<'_>, answer: &Field<'_>) -> Result<Side> {
        match Turns::join(parts.prompt.as_ref(), answer, self.reading.config.chat_template)? {
            Turns::Chat(mut all, _) => {
                let last = all.len() - 1;
                // A template that rewrites earlier turns still prints a whole conversation.
                let mut sequences = match self.turns(row, &all, |i| is_assistant(&all[i]))? {
                    Some(sequences) => sequences,
                    None => self.turns(row, &all, |i| i == last)?.ok_or_else(rewrites)?,
                };
                all.pop();
                let answer = sequences.pop().unwrap_or_default();
                Ok(Side { before: Some(all), prompt: sequences.concat(), answer })
            }
            Turns::Plain(Some(prompt), answer) => {
                let (prompt, answer) =
                    (self.tokens(prompt, RowKind::Prompt)?, self.tokens(answer, RowKind::Demonstration)?);
                Ok(Side { before: None, prompt, answer })
            }
            Turns::Plain(None, answer) => {
                Ok(Side { before: None, prompt: Vec::new(), answer: self.tokens(answer, RowKind::Pair)? })
            }
        }
    }

    /// The tokens of a field, which holds token ids or text. All texts except prompts get an end token.
    fn tokens(&self, field: &Field<'_>, kind: RowKind) -> Result<Vec<u32>> {
        let tokens = match &field.content {
            Content::Ids(ids) => ids.clone(),
            Content::Text(text) if text.is_empty() => return Err(empty(field.key)),
            Content::Text(text) if kind == RowKind::Prompt => self.reading.tokenizer.encode(text, true)?,
            Content::Text(text) => {
                let eos = self.reading.tokenizer.eos_ids().first().ok_or_else(|| {
                    Error::data("the tokenizer has no end token, so demonstrations could not end")
                        .hint("set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json")
                })?;
                let mut tokens = self.reading.tokenizer.encode(text, kind != RowKind::Demonstration)?;
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

    /// The tokens of a text for `data.pretrain`, or token ids.
    fn text(&self, key: &str, value: &Value) -> Result<Vec<u32>> {
        let content = match value {
            Value::Array(items) => Content::Ids(token_ids(key, items)?),
            Value::String(text) => Content::Text(text.clone()),
            other => return Err(Error::data(format!("field {key:?} must be a string (got {})", kind_of(other)))),
        };
        self.tokens(&Field { key, content }, RowKind::Text)
    }

    /// Messages through the chat template. A learned turn is a response, and everything before it is its prompt. `None`
    /// if the template rewrites earlier turns, so that several turns cannot be separated.
    fn turns(
        &self,
        row: &Map<String, Value>,
        messages: &[Value],
        is_learned: impl Fn(usize) -> bool,
    ) -> Result<Option<Vec<Vec<u32>>>> {
        let Reading { config, tokenizer, .. } = self.reading;
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
                // The generation prompt opens a thought that a finished answer does not have. All that is alike is
                // prompt.
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
struct Side {
    /// The messages before the answer, in a chat.
    before: Option<Vec<Value>>,
    prompt: Vec<u32>,
    answer: Vec<u32>,
}

fn rewrites() -> Error {
    Error::data("the chat template rewrites earlier turns, so the turns cannot be separated").hint(
        "write one turn per row, put the last answer into data.response_key, or use a training template: a \
         chat_template.jinja that prints each turn the same, whatever follows",
    )
}

/// The variables that a row and the job pass to the chat template in addition to the messages. The row's own are those of
/// `chat_template_kwargs`, as in TRL, and `tools`.
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

/// Whether a message is marked as not learned.
fn is_left_out(message: &Value) -> bool {
    message.get("train") == Some(&Value::Bool(false)) || message.get("weight").and_then(Value::as_f64) == Some(0.0)
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

/// The field that holds the `what` of a row. If it is missing, the error names the key that names the field.
fn named<'a>(row: &'a Map<String, Value>, key: &str, what: &str) -> Result<&'a Value> {
    let option = format!("data.{what}_key (or pass --{what}-key)");
    required(row, key).map_err(|e| e.hint(format!("set {option} to the one of its fields that holds the {what}")))
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

/// Checks labels of steps: strings of tokens, or numbers. TRL has true for 1 and false for 0.
fn step_labels(key: &str, value: &Value) -> Result<String> {
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

fn label_text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}
