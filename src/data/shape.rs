//! The shape of a row: its prompt and its answers in one form, for all names and forms that data sets use.

use serde_json::{Map, Value, json};

use super::fields::{self, field, token_ids};
use crate::config::data::DataConfig;
use crate::error::{Error, Result};
use crate::sys::stderr;
use crate::text::{images, kind_of};

/// The content of a field.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Content {
    Text(String),
    Ids(Vec<u32>),
    /// Messages with `role` and `content`, which may have other names in the row.
    Messages(Vec<Value>),
}

/// A field of a row, with its name for errors.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Field<'a> {
    pub key: &'a str,
    pub content: Content,
}

/// The fields of a row that hold its texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fields {
    /// The prompt, or messages.
    Prompt,
    /// The prompt and the response, or messages.
    Response,
    /// The prompt, the chosen and the rejected response.
    Sides,
    /// One text without a prompt.
    Text,
}

/// A prompt and an answer to it.
pub(super) enum Turns<'a> {
    /// A conversation that ends with the answer. The messages before `first` are the prompt.
    Chat { messages: Vec<Value>, first: usize },
    /// Texts or token ids.
    Plain { prompt: Option<&'a Field<'a>>, answer: &'a Field<'a> },
}

/// Other names of roles, in ShareGPT and in data made with it.
const ROLES: [(&str, &str); 9] = [
    ("human", "user"),
    ("gpt", "assistant"),
    ("chatgpt", "assistant"),
    ("bing", "assistant"),
    ("bard", "assistant"),
    ("bot", "assistant"),
    ("observation", "tool"),
    ("function_response", "tool"),
    ("function_call", ""),
];

/// Usual names of fields, by the key of the configuration that names them.
const NAMES: [(&str, &[&str]); 4] = [
    ("prompt_key", &["prompt", "question", "instruction", "query", "problem", "input"]),
    ("response_key", &["response", "completion", "output", "answer", "solution"]),
    ("chosen_key", &["chosen", "preferred", "chosen_response"]),
    ("rejected_key", &["rejected", "dispreferred", "rejected_response"]),
];

/// Names of fields that often belong to a prompt although no key names them, and what makes them a part of it.
pub type Unread = (&'static [&'static str], &'static str);

/// Fields that no kind of rows reads.
const UNREAD: [Unread; 5] = [
    (&["system", "system_prompt"], "write it as a message of the role system"),
    (&["history"], "write its turns as messages"),
    (&["context", "documents"], "write it into the prompt"),
    (&["tools", "chat_template_kwargs"], "set data.chat_template = true (or pass --chat-template)"),
    (&["video", "videos", "audio", "audios"], "models read text and images only"),
];

/// Warns once of each field, including `more`, that often belongs to a prompt but does not become a part of it.
pub(super) fn warn_of_unread(row: &Map<String, Value>, config: &DataConfig, more: &[Unread]) {
    let DataConfig { prompt_key, response_key, chosen_key, rejected_key, messages_key, label_key, .. } = config;
    let read = [prompt_key, response_key, chosen_key, rejected_key, messages_key, label_key];
    let is_empty = |value: &Value| value.is_null() || [json!(""), json!([]), json!({})].contains(value);
    let has_system =
        || [messages_key, prompt_key].iter().any(|key| row.get(*key).is_some_and(|all| all[0]["role"] == "system"));
    for (names, remedy) in UNREAD.iter().chain(more) {
        for name in *names {
            let concerns = match *name {
                "system" | "system_prompt" => !has_system(),
                "tools" | "chat_template_kwargs" => !config.chat_template,
                _ => true,
            };
            let is_given = row.get(*name).is_some_and(|value| !is_empty(value));
            if is_given && concerns && read.iter().all(|key| key != name) {
                stderr::warn_once(&format!(
                    "the rows have a field {name:?}, which does not become a part of their prompts: {remedy}"
                ));
            }
        }
    }
}

/// Reads the field `key`. A missing field is `None`.
///
/// # Errors
/// `Data`, if it cannot be read, or if it holds messages, which need a chat template.
fn read<'a>(row: &Map<String, Value>, key: &'a str, config: &DataConfig) -> Result<Option<Field<'a>>> {
    let content = field(row, key).map(|value| Content::from_value(key, value, config.chat_template)).transpose()?;
    Ok(content.map(|content| Field { key, content }))
}

/// Reads the prompt: a text, or messages, which may contain answers. Messages that repeat the conversation `chosen` are
/// not its prompt. Errors are those of `read`.
pub(super) fn prompt<'a>(
    row: &Map<String, Value>,
    config: &'a DataConfig,
    chosen: Option<&Field>,
) -> Result<Option<Field<'a>>> {
    let messages = if config.chat_template { read(row, &config.messages_key, config)? } else { None };
    if let Some(messages) = messages.and_then(|messages| messages.without_answer(chosen)) {
        return Ok(Some(messages));
    }
    let prompt = read(row, &config.prompt_key, config)?.map(|prompt| prompt.with_input(row));
    let prompt = prompt.map(|prompt| prompt.in_template(&config.template)).transpose()?;
    let unused = || field(row, &config.messages_key).is_some_and(is_conversation);
    if prompt.is_none() && !config.chat_template && unused() {
        return Err(needs_template(&config.messages_key));
    }
    Ok(prompt)
}

/// Reads the prompt and the response. Errors are those of `read`.
pub(super) fn prompt_and_response<'a>(
    row: &Map<String, Value>,
    config: &'a DataConfig,
) -> Result<[Option<Field<'a>>; 2]> {
    Ok([prompt(row, config, None)?, read(row, &config.response_key, config)?])
}

/// The chosen and the rejected response.
pub(super) type Sides<'a> = [Field<'a>; 2];

/// Reads the prompt and both sides, if there are both. Errors are those of `read`.
pub(super) fn prompt_and_sides<'a>(
    row: &Map<String, Value>,
    config: &'a DataConfig,
) -> Result<(Option<Field<'a>>, Option<Sides<'a>>)> {
    let [chosen, rejected] = [&config.chosen_key, &config.rejected_key].map(|key| read(row, key, config));
    let sides = chosen?.zip(rejected?).map(|(chosen, rejected)| human_assistant([chosen, rejected], config));
    Ok((prompt(row, config, sides.as_ref().map(|[chosen, _]| chosen))?, sides))
}

impl Content {
    fn from_value(key: &str, value: &Value, is_chat: bool) -> Result<Self> {
        let messages = match value {
            Value::Array(items) if items.is_empty() || !items.iter().all(Value::is_object) => {
                return token_ids(key, items).map(Self::Ids);
            }
            Value::Array(items) => items.clone(),
            // A single message.
            Value::Object(message) if message.contains_key("role") || message.contains_key("from") => {
                vec![value.clone()]
            }
            Value::String(text) => match messages_in(text).filter(|_| is_chat) {
                Some(messages) => messages,
                None => return Ok(Self::Text(text.clone())),
            },
            other => return Err(Error::data(format!("field {key:?} must be a string (got {})", kind_of(other)))),
        };
        if !is_chat {
            return Err(needs_template(key));
        }
        let messages = messages.into_iter().map(|message| named_as_usual(message, key));
        messages.collect::<Result<_>>().map(Self::Messages)
    }

    /// The messages of a prompt (`role` user) or an answer (assistant) in a chat.
    pub fn messages(&self, role: &str, is_chat: bool) -> Option<Vec<Value>> {
        match self {
            Self::Messages(messages) => Some(messages.clone()),
            Self::Text(text) if is_chat && !text.is_empty() => Some(vec![json!({"role": role, "content": text})]),
            _ => None,
        }
    }
}

impl Field<'_> {
    /// These messages without an answer that `chosen` repeats, or `None` if `chosen` repeats all of them.
    fn without_answer(mut self, chosen: Option<&Field>) -> Option<Self> {
        let (Content::Messages(messages), Some(chosen)) = (&mut self.content, chosen) else { return Some(self) };
        if matches!(&chosen.content, Content::Messages(all) if all.len() > 1 && all == messages) {
            return None;
        }
        let answer = chosen.content.messages("assistant", true).unwrap_or_default();
        if messages.len() > 1 && answer.len() == 1 && is_answer(messages.last(), &answer[0]) {
            messages.pop();
        }
        Some(self)
    }

    /// The text in `data.template`, if there is one. An empty text stays empty.
    ///
    /// # Errors
    /// `Data`, if the field holds token ids.
    fn in_template(mut self, template: &str) -> Result<Self> {
        match &mut self.content {
            Content::Text(text) if !template.is_empty() && !text.is_empty() => *text = template.replacen("{}", text, 1),
            Content::Ids(_) if !template.is_empty() => {
                return Err(Error::data(format!(
                    "field {:?} holds token ids, but data.template needs a text",
                    self.key
                )));
            }
            _ => {}
        }
        Ok(self)
    }

    /// An instruction followed by its input, if the row has the fields of Alpaca.
    fn with_input(mut self, row: &Map<String, Value>) -> Self {
        if let (Content::Text(text), "instruction") = (&mut self.content, self.key)
            && let Some(Value::String(input)) = row.get("input")
            && !input.is_empty()
        {
            *text = format!("{text}\n{input}");
        }
        self
    }
}

impl<'a> Turns<'a> {
    /// A prompt, if the row has one, with an answer to it or a conversation that begins with it.
    pub fn join(prompt: Option<&'a Field<'a>>, answer: &'a Field<'a>, is_chat: bool) -> Result<Self> {
        let before = prompt.map_or(Some(Vec::new()), |prompt| prompt.content.messages("user", is_chat));
        let is_whole = matches!(answer.content, Content::Messages(_));
        let (Some(mut all), Some(turns)) = (before, answer.content.messages("assistant", is_chat)) else {
            return Ok(Self::Plain { prompt, answer });
        };
        if prompt.is_none() && !is_whole {
            return Ok(Self::Plain { prompt, answer });
        }
        let key = answer.key;
        let mut first = all.len();
        if turns.starts_with(&all) {
            all = turns;
        } else if prompt.is_some_and(|prompt| prompt.is_in(&turns)) {
            first = turns.len() - 1;
            all = turns;
        } else if turns.first().is_some_and(is_assistant) {
            if turns.len() == 1 && is_answer(all.last(), &turns[0]) {
                all.pop();
                first -= 1;
            }
            all.extend(turns);
        } else {
            return Err(Error::data(format!("field {key:?} must begin with the prompt's messages")));
        }
        if !all.last().is_some_and(is_assistant) {
            return Err(Error::data(format!("field {key:?} must end with an assistant message")));
        }
        first = first.min(all.len() - 1);
        Ok(Self::Chat { messages: all, first })
    }
}

impl Field<'_> {
    /// Whether this text is a user's message of a conversation, which also has other messages, such as a system's.
    fn is_in(&self, turns: &[Value]) -> bool {
        let Content::Text(text) = &self.content else { return false };
        turns.iter().any(|turn| turn["role"] == "user" && turn["content"].as_str() == Some(text))
    }
}

/// Whether `last` is an assistant's message with the content of `answer`.
fn is_answer(last: Option<&Value>, answer: &Value) -> bool {
    last.is_some_and(|last| is_assistant(last) && is_assistant(answer) && last["content"] == answer["content"])
}

fn needs_template(key: &str) -> Error {
    Error::data(format!("field {key:?} holds messages, which need a chat template"))
        .hint("set data.chat_template = true (or pass --chat-template)")
}

/// A message with the names `role` and `content`, and with usual roles. A null is a missing key.
fn named_as_usual(message: Value, key: &str) -> Result<Value> {
    let Value::Object(mut message) = message else { return Ok(message) };
    message.retain(|_, value| !value.is_null());
    let is_foreign = !message.contains_key("role");
    if is_foreign {
        for (other, usual) in [("from", "role"), ("value", "content")] {
            if let Some(value) = message.remove(other) {
                message.insert(usual.to_owned(), value);
            }
        }
    }
    let Some(role) = message.get("role").and_then(Value::as_str) else {
        let there: Vec<&str> = message.keys().map(String::as_str).collect();
        return Err(Error::data(format!(
            "a message in field {key:?} must have role and content, or from and value (it has: {})",
            there.join(", ")
        )));
    };
    images::check_parts(&message, format_args!("a message in field {key:?}"))?;
    if let Some((_, usual)) = ROLES.iter().find(|(other, _)| *other == role) {
        if usual.is_empty() && is_foreign {
            return Err(Error::data(format!(
                "a message in field {key:?} must be from human, gpt, system or observation (got {role:?})"
            ))
            .hint("write calls of functions as an assistant's message with tool_calls"));
        }
        if !usual.is_empty() {
            message.insert("role".to_owned(), (*usual).into());
        }
    }
    Ok(Value::Object(message))
}

/// The messages in a text that is a JSON list of messages.
fn messages_in(text: &str) -> Option<Vec<Value>> {
    let text = text.trim();
    let messages: Vec<Value> = text.starts_with('[').then(|| serde_json::from_str(text).ok())??;
    let is_message = |item: &Value| item["role"].is_string() || item["from"].is_string();
    (!messages.is_empty() && messages.iter().all(is_message)).then_some(messages)
}

/// Whether a field holds messages, as a list or as the JSON text of one.
pub(super) fn is_conversation(value: &Value) -> bool {
    let is_message = |item: &Value| item["role"].is_string() || item["from"].is_string();
    match value {
        Value::Array(items) => !items.is_empty() && items.iter().all(is_message),
        Value::String(text) => messages_in(text).is_some(),
        _ => false,
    }
}

pub(super) fn is_assistant(message: &Value) -> bool {
    message.get("role").and_then(Value::as_str) == Some("assistant")
}

/// Parses texts in Anthropic's form (`\n\nHuman: ...\n\nAssistant: ...`) as conversations, in a chat.
fn human_assistant<'a>(sides: [Field<'a>; 2], config: &DataConfig) -> [Field<'a>; 2] {
    let turns = |side: &Field| match &side.content {
        Content::Text(text) if config.chat_template => turns_in(text),
        _ => None,
    };
    let [Some(chosen), Some(rejected)] = [turns(&sides[0]), turns(&sides[1])] else { return sides };
    let [one, other] = sides.map(|side| side.key);
    [(one, chosen), (other, rejected)].map(|(key, turns)| Field { key, content: Content::Messages(turns) })
}

fn turns_in(text: &str) -> Option<Vec<Value>> {
    let mut rest = text.trim_start().strip_prefix("Human:")?;
    let (mut role, mut turns) = ("user", Vec::new());
    let marks = [("\n\nHuman:", "user"), ("\n\nAssistant:", "assistant")];
    loop {
        let next = marks.iter().filter_map(|(mark, role)| Some((rest.find(mark)?, mark.len(), *role))).min();
        let end = next.map_or(rest.len(), |(at, ..)| at);
        turns.push(json!({"role": role, "content": rest[..end].trim()}));
        let Some((at, length, next)) = next else { break };
        (rest, role) = (&rest[at + length..], next);
    }
    (turns.len() > 1 && role == "assistant").then_some(turns)
}

/// The error for a missing field, with the keys to set if other fields have usual names.
pub(super) fn missing(row: &Map<String, Value>, config: &DataConfig, fields: Fields, key: &str) -> Error {
    let error = fields::missing(row, key);
    let DataConfig { prompt_key, response_key, chosen_key, rejected_key, messages_key, .. } = config;
    let keys = [prompt_key, response_key, chosen_key, rejected_key];
    let used = match fields {
        Fields::Prompt | Fields::Text => 0..1,
        Fields::Response => 0..2,
        Fields::Sides => 2..4,
    };
    let chat = row.iter().find(|(name, value)| *name != messages_key && is_conversation(value));
    let chat = chat.filter(|_| key == prompt_key && fields != Fields::Text);
    let chat = chat.map(|(name, _)| ("messages_key", name.as_str()));
    let is_free = |name: &&&str| row.contains_key(**name) && keys.iter().all(|key| key.as_str() != **name);
    let named = |i: usize| Some((NAMES[i].0, *NAMES[i].1.iter().find(is_free)?));
    let found: Vec<(&str, &str)> = match chat {
        Some(chat) => vec![chat],
        None => used.filter(|i| field(row, keys[*i]).is_none()).filter_map(named).collect(),
    };
    if !found.is_empty() {
        let set: Vec<String> = found.iter().map(|(key, name)| format!("data.{key} = {name:?}")).collect();
        let options: Vec<String> = found.iter().map(|(key, _)| format!("--{}", key.replace('_', "-"))).collect();
        let chat =
            if found[0].0 == "messages_key" && !config.chat_template { " and data.chat_template = true" } else { "" };
        return error.hint(format!("set {}{chat} (options: {})", set.join(" and "), options.join(", ")));
    }
    match () {
        () if fields != Fields::Sides && row.contains_key("chosen") && row.contains_key("rejected") => {
            error.hint("pairs are for jobs such as dpo and reward_model, and for shard --pairs")
        }
        () if fields != Fields::Text && row.keys().eq(["text"]) => {
            error.hint("texts without a prompt are for data.pretrain, and for shard --text")
        }
        () => error,
    }
}
