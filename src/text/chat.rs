//! Chat templates: the Jinja text that a model directory carries, rendered as `transformers` renders it.
//!
//! A template comes from outside, so it is compiled and rendered in a sandbox: no files, no imports, a limited number
//! of instructions, a limited output, and a thread with limited memory, stack and time.

use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value as Jinja, ValueKind};
use minijinja::{Environment, ErrorKind, Output, State};
use regex::Regex;
use serde_json::{Map, Value};

use super::json::tojson;
use crate::comm::abort;
use crate::error::{Error, Kind, Result};
use crate::sys::host::strftime;
use crate::sys::{files, sandbox};

/// Instructions that one rendering may execute.
const FUEL: u64 = 20_000_000;
/// Bytes that one rendering may produce.
const OUTPUT_BYTES_MAX: usize = 16 << 20;

/// A compiled chat template with the special tokens it prints.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    bos_token: Option<String>,
    eos_token: Option<String>,
    clock: Arc<OnceLock<i64>>,
}

impl ChatTemplate {
    /// Compiles `template`, which has the variables `bos_token` and `eos_token`.
    pub fn new(template: &str, bos_token: Option<String>, eos_token: Option<String>) -> Result<Self> {
        let clock = Arc::default();
        let (template, of_template) = (template.to_owned(), Arc::clone(&clock));
        let environment = bounded(move || {
            let mut environment = environment(&of_template)?;
            environment.add_template_owned("chat", without_generation_marks(&template)).map_err(|e| refused(&e))?;
            Ok(environment)
        })?;
        Ok(Self { environment: Arc::new(environment), bos_token, eos_token, clock })
    }

    /// Finds the template of a model directory: `chat_template.jinja`, otherwise `chat_template` of
    /// `tokenizer_config.json`, which is a text, or a list of named texts of which `default` counts.
    pub(super) fn find(
        dir: &Path,
        tokenizer_config: Option<&Map<String, Value>>,
        bos_token: Option<String>,
        eos_token: Option<String>,
    ) -> Result<Option<Self>> {
        let text = files::if_any(&dir.join("chat_template.jinja"), files::read_to_string)?;
        let text = match (text, tokenizer_config.and_then(|v| v.get("chat_template"))) {
            (Some(text), _) => text,
            (None, Some(Value::String(text))) => text.clone(),
            (None, Some(Value::Array(named))) => default_of(named, dir)?,
            (None, _) => return Ok(None),
        };
        Self::new(&text, bos_token, eos_token).map(Some).map_err(|e| e.within(dir.display()))
    }

    /// Fixes the time of `strftime_now`, in seconds since 1970, so that a test gets the same text every day.
    #[must_use]
    pub fn at(self, seconds: i64) -> Self {
        self.clock.get_or_init(|| seconds);
        self
    }

    /// The text of `messages`. With `add_generation_prompt`, it ends where the assistant's answer begins. `more` are
    /// further variables of the template, such as `tools` and `enable_thinking`.
    pub fn apply(&self, messages: &Value, more: &Map<String, Value>, add_generation_prompt: bool) -> Result<String> {
        let mut messages = messages.clone();
        // As in `transformers`, null values in a message are removed.
        for message in messages.as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut) {
            message.retain(|_, value| !value.is_null());
        }
        let variables = serde_json::json!({
            "messages": messages,
            "tools": null,
            "documents": null,
            "add_generation_prompt": add_generation_prompt,
        });
        let mut context = variables.as_object().cloned().unwrap_or_default();
        // A token that the tokenizer does not have is undefined in the template, as in `transformers`.
        for (name, token) in [("bos_token", &self.bos_token), ("eos_token", &self.eos_token)] {
            if let Some(token) = token {
                context.insert(name.to_owned(), Value::String(token.clone()));
            }
        }
        context.extend(more.clone());
        let environment = Arc::clone(&self.environment);
        bounded(move || {
            let template = environment.get_template("chat").map_err(|e| refused(&e))?;
            let mut out = Capped { bytes: Vec::new() };
            template.render_captured_to(Serde(&context), &mut out).map_err(|e| refused(&e))?;
            String::from_utf8(out.bytes).map_err(|_| Error::fault("the output of a chat template must be UTF-8"))
        })
    }
}

/// Runs `body` within the template's limits. Everything it allocates is freed when this returns.
fn bounded<T: Send + 'static>(body: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let panicked =
        |e: Error| if e.kind == Kind::Fault { Error::data(format!("chat template: {}", e.message)) } else { e };
    let outcome = sandbox::run(move || abort::caught(body).map_err(panicked));
    outcome.unwrap_or_else(|limit| Err(Error::data(format!("chat template: it {limit}"))))
}

fn default_of(named: &[Value], dir: &Path) -> Result<String> {
    let text = |entry: &Value| entry.get("template").and_then(Value::as_str).map(str::to_owned);
    named.iter().find(|entry| entry.get("name").and_then(Value::as_str) == Some("default")).and_then(text).ok_or_else(
        || {
            let names: Vec<&str> = named.iter().filter_map(|e| e.get("name").and_then(Value::as_str)).collect();
            Error::data(format!("{} has no chat template named default (it has {})", dir.display(), names.join(", ")))
        },
    )
}

fn environment(clock: &Arc<OnceLock<i64>>) -> Result<Environment<'static>> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .map_err(|e| Error::fault(format!("template syntax: {e}")))?;
    environment.set_syntax(syntax);
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(100);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(python_method);
    environment.set_formatter(print_as_python);
    environment.add_filter("tojson", tojson);
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

/// Methods of Python's types. `title` is Python's own: a capital after anything that is not a letter.
fn python_method(
    state: &mut State,
    value: &Jinja,
    method: &str,
    arguments: &[Jinja],
) -> std::result::Result<Jinja, minijinja::Error> {
    if let ("title", Some(text), true) = (method, value.as_str(), arguments.is_empty()) {
        let mut inside = false;
        let mut titled = String::with_capacity(text.len());
        for c in text.chars() {
            if inside {
                titled.extend(c.to_lowercase());
            } else {
                titled.extend(c.to_uppercase());
            }
            inside = c.is_alphabetic();
        }
        return Ok(Jinja::from(titled));
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments)
}

/// `{{ true }}` prints `True` in Python, `{{ none }}` prints `None`.
fn print_as_python(out: &mut Output, state: &mut State, value: &Jinja) -> std::result::Result<(), minijinja::Error> {
    match value.kind() {
        ValueKind::Bool => Ok(out.write_str(if value.is_true() { "True" } else { "False" })?),
        ValueKind::None => Ok(out.write_str("None")?),
        _ => minijinja::escape_formatter(out, state, value),
    }
}

/// `{% generation %}` marks the assistant's tokens for `transformers` and prints nothing. It is replaced by an `if`,
/// which keeps its whitespace rules.
fn without_generation_marks(template: &str) -> String {
    let open = Regex::new(r"\{%([-+]?)\s*generation\s*([-+]?)%\}");
    let close = Regex::new(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}");
    let (Ok(open), Ok(close)) = (open, close) else { return template.to_owned() };
    let opened = open.replace_all(template, "{%$1 if true $2%}");
    close.replace_all(&opened, "{%$1 endif $2%}").into_owned()
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
