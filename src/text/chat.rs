//! Chat templates: the Jinja text that a model directory carries, rendered as `transformers` renders it.
//!
//! Templates are foreign code, so they are compiled and rendered in a sandbox without files and imports. The number of
//! instructions and the output are limited, and so are memory, stack and time of the thread.

use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::{Serde, Value as Jinja};
use minijinja::{Environment, ErrorKind};
use serde_json::{Map, Value};

use super::jinja;
use crate::comm::abort;
use crate::error::{Error, Kind, Result};
use crate::sys::host::strftime;
use crate::sys::{files, sandbox, stderr};

/// Instructions that one rendering may execute.
const FUEL: u64 = 20_000_000;
/// Bytes that one rendering may produce.
const OUTPUT_BYTES_MAX: usize = 16 << 20;
/// The template of chats without tools, and of all chats if there is no other.
const DEFAULT: &str = "default";
/// The template of chats with tools.
const TOOL_USE: &str = "tool_use";
/// The folder of the templates that are not the default: a file `NAME.jinja` for each.
const TEMPLATES_DIR: &str = "additional_chat_templates";
/// Names of a message's reasoning, the usual one first.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// The compiled chat templates of a model with the special tokens they print.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    special_tokens: Map<String, Value>,
    clock: Arc<OnceLock<i64>>,
}

impl ChatTemplate {
    /// Compiles `template`. The special tokens are variables of it by their names, such as `bos_token`.
    pub fn new(template: &str, special_tokens: Map<String, Value>) -> Result<Self> {
        Self::named(vec![(DEFAULT.to_owned(), template.to_owned())], special_tokens)
    }

    /// Compiles templates by their names.
    fn named(templates: Vec<(String, String)>, special_tokens: Map<String, Value>) -> Result<Self> {
        let clock = Arc::default();
        let of_template = Arc::clone(&clock);
        let environment = bounded(move || {
            let mut environment = environment(&of_template)?;
            for (name, template) in templates {
                environment.add_template_owned(name, jinja::translate(&template)).map_err(|e| refused(&e))?;
            }
            Ok(environment)
        })?;
        Ok(Self { environment: Arc::new(environment), special_tokens, clock })
    }

    /// Finds the templates of a model directory: `chat_template.jinja` and the files of `additional_chat_templates`,
    /// otherwise `chat_template` of `tokenizer_config.json`, which is a text, or a list of named texts.
    pub(super) fn find(
        dir: &Path,
        tokenizer_config: Option<&Map<String, Value>>,
        special_tokens: Map<String, Value>,
    ) -> Result<Option<Self>> {
        let mut templates = template_files(dir)?;
        match tokenizer_config.and_then(|config| config.get("chat_template")) {
            _ if !templates.is_empty() => {}
            Some(Value::String(text)) => templates.push((DEFAULT.to_owned(), text.clone())),
            Some(Value::Array(named)) => {
                let text = |entry: &Value, key: &str| entry.get(key).and_then(Value::as_str).map(str::to_owned);
                templates.extend(named.iter().filter_map(|entry| text(entry, "name").zip(text(entry, "template"))));
            }
            _ => {}
        }
        if templates.is_empty() {
            return Ok(None);
        }
        Self::named(templates, special_tokens).map(Some).map_err(|e| e.within(dir.display()))
    }

    /// Fixes the time of `strftime_now`, in seconds since 1970, so that a test gets the same text every day.
    #[must_use]
    pub fn at(self, seconds: i64) -> Self {
        self.clock.get_or_init(|| seconds);
        self
    }

    /// The text of `messages`. With `add_generation_prompt`, it ends where the assistant's answer begins. `more` are
    /// further variables of the template, such as `tools` and `enable_thinking`. Chats with tools use the template
    /// `tool_use`, if there is one.
    pub fn apply(&self, messages: &Value, more: &Map<String, Value>, add_generation_prompt: bool) -> Result<String> {
        let mut messages = messages.clone();
        for message in messages.as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut) {
            normalize(message);
        }
        let variables = serde_json::json!({
            "messages": messages,
            "tools": null,
            "documents": null,
            "add_generation_prompt": add_generation_prompt,
        });
        let mut context = variables.as_object().cloned().unwrap_or_default();
        // A token that the tokenizer does not have is undefined in the template, as in `transformers`.
        context.extend(self.special_tokens.clone());
        context.extend(more.clone());
        let has_tools = context.get("tools").is_some_and(|tools| !tools.is_null());
        let name = if has_tools && self.environment.get_template(TOOL_USE).is_ok() { TOOL_USE } else { DEFAULT };
        let found = self.environment.get_template(name);
        let is_told_of_any = context["tools"].as_array().is_some_and(|tools| !tools.is_empty());
        if is_told_of_any && found.as_ref().is_ok_and(|template| !template.source().contains("tools")) {
            stderr::warn_once("the chat template does not print tools, so they do not become a part of prompts");
        }
        if found.is_err() {
            let names: Vec<&str> = self.environment.templates().map(|(name, _)| name).collect();
            return Err(Error::data(format!("no chat template is named default (there is {})", names.join(", ")))
                .hint("save the template as chat_template.jinja in the model directory"));
        }
        let environment = Arc::clone(&self.environment);
        bounded(move || {
            let template = environment.get_template(name).map_err(|e| refused(&e))?;
            let mut out = Capped { bytes: Vec::new() };
            template.render_captured_to(Serde(&context), &mut out).map_err(|e| refused(&e))?;
            String::from_utf8(out.bytes).map_err(|_| Error::fault("the output of a chat template must be UTF-8"))
        })
    }
}

/// Changes a message as `transformers` does: null values are removed, and reasoning is found by each of its names that
/// templates read.
fn normalize(message: &mut Map<String, Value>) {
    message.retain(|_, value| !value.is_null());
    if let Some(reasoning) = REASONING.iter().find_map(|name| message.get(*name)).cloned() {
        message.entry("thinking").or_insert_with(|| reasoning.clone());
        message.insert(REASONING[0].to_owned(), reasoning);
    }
}

/// The special tokens of a tokenizer by their names (`pad_token`, and model-specific ones). A later file counts more.
pub(super) fn special_tokens<'a>(files: impl IntoIterator<Item = &'a Map<String, Value>>) -> Map<String, Value> {
    let mut tokens = Map::new();
    for file in files {
        let own = file.iter().filter(|(name, _)| name.ends_with("_token"));
        let tables = ["extra_special_tokens", "model_specific_special_tokens"].map(|key| file.get(key));
        let named = tables.into_iter().flatten().filter_map(Value::as_object).flatten();
        for (name, token) in own.chain(named) {
            match token_text(token) {
                Some(text) => tokens.insert(name.clone(), Value::String(text)),
                None => tokens.shift_remove(name),
            };
        }
    }
    tokens
}

/// The templates that are files of a model directory.
pub(super) fn template_files(dir: &Path) -> Result<Vec<(String, String)>> {
    let default = files::if_any(&dir.join("chat_template.jinja"), files::read_to_string)?;
    let mut templates: Vec<(String, String)> = default.map(|text| (DEFAULT.to_owned(), text)).into_iter().collect();
    let folder = dir.join(TEMPLATES_DIR);
    for entry in files::if_any(&folder, Path::read_dir)?.into_iter().flatten() {
        let path = entry.map_err(|e| Error::io("read", &folder, &e))?.path();
        if let (Some("jinja"), Some(name)) = (path.extension().and_then(|e| e.to_str()), path.file_stem()) {
            let text = files::read_to_string(&path).map_err(|e| Error::io("read", &path, &e))?;
            templates.push((name.to_string_lossy().into_owned(), text));
        }
    }
    Ok(templates)
}

/// Runs `body` within the template's limits. Everything it allocates is freed when this returns.
fn bounded<T: Send + 'static>(body: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let panicked =
        |e: Error| if e.kind == Kind::Fault { Error::data(format!("chat template: {}", e.message)) } else { e };
    let outcome = sandbox::run(move || abort::caught(body).map_err(panicked));
    outcome.unwrap_or_else(|limit| Err(Error::data(format!("chat template: it {limit}"))))
}

fn environment(clock: &Arc<OnceLock<i64>>) -> Result<Environment<'static>> {
    let mut environment = jinja::environment().map_err(|e| Error::fault(format!("the template engine: {e}")))?;
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(100);
    environment.add_function("raise_exception", |message: String| -> std::result::Result<Jinja, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, format!("the template says: {message}")))
    });
    let clock = Arc::clone(clock);
    environment.add_function("strftime_now", move |format: String| {
        let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs() as i64);
        strftime(&format, clock.get().copied().unwrap_or_else(now))
    });
    Ok(environment)
}

fn refused(error: &minijinja::Error) -> Error {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        text = format!("{text}: {inner}");
        source = inner.source();
    }
    Error::data(format!("chat template: {text}"))
}

/// A writer with a size limit.
struct Capped {
    bytes: Vec<u8>,
}

impl io::Write for Capped {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + buffer.len() > OUTPUT_BYTES_MAX {
            return Err(io::Error::other(format!("more than {OUTPUT_BYTES_MAX} bytes of output")));
        }
        self.bytes.extend_from_slice(buffer);
        Ok(buffer.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The text of a special token: a string, or an object with `content`. Null means that there is none.
pub(super) fn token_text(token: &Value) -> Option<String> {
    token.as_str().or_else(|| token.get("content")?.as_str()).map(str::to_owned)
}
