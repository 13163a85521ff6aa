//! A user's Python function as a reward, in a child process that may die, hang or talk nonsense.
//!
//! The child (`driver.py`) is asked one JSON line per batch and answers with one. Whatever goes wrong, the child and
//! all its descendants are killed and a fresh one is asked again, `reward.retries` times; then the run ends with an
//! error that says what happened.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::config::reward::{OnFailure, PythonConfig, RewardConfig, SEARCH_TIMEOUTS};
use crate::error::{Error, Result};
use crate::experience::{Prompt, Response, RowFields};
use crate::reward::context::{Lookup, RewardContext};
use crate::reward::mixture::RewardOutput;
use crate::sys::process::{Broken, LineChild};

const DRIVER: &str = include_str!("driver.py");
/// What the child inherits: enough to find Python, its packages and caches, and nothing of MPI, Slurm or anyone's keys.
const ENVIRONMENT: [&str; 16] = [
    "PATH",
    "HOME",
    "USER",
    "TMPDIR",
    "TZ",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PYENV_ROOT",
    "PYENV_VERSION",
    "XDG_CACHE_HOME",
    "HF_HOME",
];
/// An answer may be this long, and this much longer per response.
const REPLY_BYTES_MAX: usize = 1 << 20;
const REPLY_BYTES_MAX_EACH: usize = 1 << 14;
const STDERR_LINES_SHOWN: usize = 12;

/// A Python file's reward function and the child that runs it.
pub struct PythonReward {
    file: PathBuf,
    interpreter: PathBuf,
    /// What the driver is told, in JSON.
    settings: String,
    pass_env: Vec<String>,
    start_timeout: Duration,
    timeout: Duration,
    retries: u32,
    on_failure: OnFailure,
    function: String,
    child: Option<LineChild>,
    requests: u64,
    rows: Option<Lookup>,
    log: Option<PathBuf>,
}

/// The first line of a child.
#[derive(Deserialize)]
struct Hello {
    function: Option<String>,
    error: Option<String>,
}

#[derive(Deserialize)]
struct Reply {
    id: u64,
    error: Option<String>,
    #[serde(default)]
    rewards: Vec<Option<f64>>,
    #[serde(default)]
    extra: BTreeMap<String, Vec<Option<f64>>>,
}

impl fmt::Debug for PythonReward {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("PythonReward").field("file", &self.file).finish_non_exhaustive()
    }
}

impl PythonReward {
    /// Starts a child, again where it fails, and learns which function it will call.
    pub fn new(config: &RewardConfig, python: &PythonConfig, base_dir: &Path, context: &RewardContext) -> Result<Self> {
        let mut reward = Self::described(config, python, base_dir, context)?;
        reward.retried(Self::start).map_err(|(message, times)| {
            let hint = if message.contains("ModuleNotFoundError") {
                "the interpreter lacks it: reward.python = { file = \"reward.py\", interpreter = \"venv/bin/python\" }"
            } else {
                "a file needs reward_func(queries, prompts, labels) or f(prompts, completions, **columns)"
            };
            Error::usage(format!("reward.python {}: {message}", reward.file.display()))
                .hint(hint)
                .also(&format!("see reward.start_timeout_s and reward.retries: it was started in {times}"))
        })?;
        Ok(reward)
    }

    pub fn function(&self) -> &str {
        &self.function
    }

    /// Asks the function for all responses at once; where that fails and `on_failure` is drop, for ever smaller parts of them,
    /// and marks those that fail alone.
    ///
    /// # Errors
    /// `Service`, once the retries are used up, with what happened and the last lines of the child.
    pub fn score(&mut self, prompts: &[&Prompt], responses: &[&Response]) -> Result<Vec<RewardOutput>> {
        let (message, times) = match self.retried(|own| own.ask(prompts, responses)) {
            Ok(outputs) => return Ok(outputs),
            Err(failed) => failed,
        };
        if self.on_failure == OnFailure::Drop {
            let until = Instant::now() + self.timeout * SEARCH_TIMEOUTS + self.start_timeout;
            return Ok(self.halves(prompts, responses, &message, until));
        }
        let file = self.file.display();
        Err(Error::service(format!("reward {} of {file} failed in {times}: {message}", self.function))
            .hint("reward.timeout_s and reward.retries say how long and how often it is tried"))
    }

    /// What the function says of responses on which it failed together (`why`), asked for each half of them, and so on down to
    /// single ones, until `until`.
    fn halves(&mut self, prompts: &[&Prompt], responses: &[&Response], why: &str, until: Instant) -> Vec<RewardOutput> {
        let failed = |n: usize| vec![RewardOutput { failed: Some(why.to_string()), ..RewardOutput::default() }; n];
        if responses.len() == 1 {
            return failed(1);
        }
        let middle = responses.len() / 2;
        let mut half = |own: Range<usize>| {
            let (prompts, responses) = (&prompts[own.clone()], &responses[own]);
            if Instant::now() > until {
                return failed(responses.len());
            }
            self.ask(prompts, responses).unwrap_or_else(|why| self.halves(prompts, responses, &why, until))
        };
        [half(0..middle), half(middle..responses.len())].concat()
    }

    /// What the first attempt that succeeds gives, each failed one followed by a fresh child; else why the last one failed, and how
    /// many there were.
    fn retried<T>(
        &mut self,
        attempt: impl Fn(&mut Self) -> std::result::Result<T, String>,
    ) -> std::result::Result<T, (String, String)> {
        let mut attempts = 1;
        loop {
            let message = match attempt(self) {
                Ok(found) => return Ok(found),
                Err(message) => message,
            };
            self.child = None;
            if attempts > self.retries {
                let plural = if attempts == 1 { "" } else { "s" };
                return Err((message, format!("{attempts} attempt{plural}")));
            }
            // A shared resource (a file system, a service) may need a moment.
            std::thread::sleep(Duration::from_millis(100) * attempts);
            attempts += 1;
        }
    }

    fn start(&mut self) -> std::result::Result<(), String> {
        let mut child = self.spawn()?;
        let deadline = Instant::now() + self.start_timeout;
        let line = match child.exchange(&[], deadline, REPLY_BYTES_MAX) {
            Ok(line) => line,
            Err(broken) => return Err(describe(&mut child, &broken, "loading", self.start_timeout)),
        };
        let hello: Hello = parse(&line).map_err(|message| with_stderr(&mut child, message))?;
        if let Some(error) = hello.error {
            return Err(printable(&error));
        }
        let Some(function) = hello.function else { return Err(with_stderr(&mut child, "it named no function".into())) };
        self.function = function;
        self.child = Some(child);
        Ok(())
    }

    /// One attempt; the message says what failed.
    fn ask(&mut self, prompts: &[&Prompt], responses: &[&Response]) -> std::result::Result<Vec<RewardOutput>, String> {
        if self.child.is_none() {
            self.start()?;
        }
        let row = |prompt: &&Prompt| self.rows.as_ref().map_or(Ok(RowFields::default()), |rows| rows(prompt.id));
        let rows: Result<Vec<RowFields>> = prompts.iter().map(row).collect();
        let rows = rows.map_err(|error| error.to_string())?;
        let Some(child) = self.child.as_mut() else { return Err("no child process".into()) };
        self.requests += 1;
        let request = request_line(self.requests, prompts, responses, &rows);
        let deadline = Instant::now() + self.timeout;
        let bytes_max = REPLY_BYTES_MAX + REPLY_BYTES_MAX_EACH * responses.len();
        let line = match child.exchange(&request, deadline, bytes_max) {
            Ok(line) => line,
            Err(broken) => {
                let message = describe(child, &broken, "scoring", self.timeout);
                self.child = None;
                return Err(message);
            }
        };
        let outputs = parse(&line).and_then(|reply| outputs(reply, self.requests, responses.len()));
        outputs.map_err(|message| with_stderr(child, message))
    }

    /// Without a child.
    fn described(
        config: &RewardConfig,
        python: &PythonConfig,
        base_dir: &Path,
        context: &RewardContext,
    ) -> Result<Self> {
        if python.file.is_empty() {
            return Err(Error::usage("reward.python names no file").hint("set reward.python = \"reward.py\""));
        }
        let path = base_dir.join(&python.file);
        let file = path.canonicalize().map_err(|e| {
            Error::usage(format!("reward.python: cannot find {}: {e}", path.display()))
                .hint("the path is relative to the job file")
        })?;
        if !file.is_file() {
            return Err(Error::usage(format!("reward.python: {} is no file", file.display())));
        }
        // A bare name is looked up in PATH; a path is relative to the job file, like all paths.
        let interpreter = if python.interpreter.contains('/') {
            let path = base_dir.join(&python.interpreter);
            std::path::absolute(&path).map_err(|e| Error::io("resolve", &path, &e))?
        } else {
            PathBuf::from(&python.interpreter)
        };
        let Some(file_name) = file.to_str() else {
            return Err(Error::usage(format!("reward.python: {} is not UTF-8", file.display())));
        };
        let settings = json!({
            "file": file_name,
            "function": python.function,
            "label_argument": python.label_argument,
            "columns": context.columns,
            "memory_bytes": (python.memory_max_gib * 1_073_741_824.0) as u64,
        });
        Ok(Self {
            interpreter,
            settings: settings.to_string(),
            pass_env: python.pass_env.clone(),
            file,
            start_timeout: Duration::from_secs_f64(config.start_timeout_s),
            timeout: Duration::from_secs_f64(config.timeout_s),
            retries: config.retries,
            on_failure: config.on_failure,
            function: String::new(),
            child: None,
            requests: 0,
            rows: context.rows.clone(),
            log: context.log.clone(),
        })
    }

    fn spawn(&self) -> std::result::Result<LineChild, String> {
        let mut command = Command::new(&self.interpreter);
        command.args(["-X", "utf8", "-c", DRIVER, &self.settings]).env_clear();
        for name in ENVIRONMENT.iter().copied().chain(self.pass_env.iter().map(String::as_str)) {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        if let Some(dir) = self.file.parent() {
            command.current_dir(dir);
        }
        LineChild::spawn(&mut command, self.log.as_deref())
            .map_err(|e| format!("cannot start {}: {e}", self.interpreter.display()))
    }
}

fn request_line(id: u64, prompts: &[&Prompt], responses: &[&Response], rows: &[RowFields]) -> Vec<u8> {
    let mut request = Map::new();
    request.insert("id".into(), id.into());
    request.insert("rows".into(), json!(rows));
    let mut column = |key: &str, values: Vec<Value>| request.insert(key.into(), values.into());
    column("prompts", prompts.iter().map(|p| p.text.as_str().into()).collect());
    column("labels", prompts.iter().map(|p| p.label.as_str().into()).collect());
    column("sources", prompts.iter().map(|p| p.source.as_str().into()).collect());
    column("prompt_ids", prompts.iter().map(|p| p.id.into()).collect());
    column("prompt_tokens", prompts.iter().map(|p| p.tokens.clone().into()).collect());
    column("responses", responses.iter().map(|r| r.text.as_str().into()).collect());
    column("tokens", responses.iter().map(|r| r.tokens.clone().into()).collect());
    column("finish", responses.iter().map(|r| r.finish.name().into()).collect());
    let mut line = Value::from(request).to_string().into_bytes();
    line.push(b'\n');
    line
}

/// Text of others for a terminal: without control characters but line ends and tabs.
fn printable(text: &str) -> String {
    text.trim_end().chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect()
}

fn parse<T: serde::de::DeserializeOwned>(line: &[u8]) -> std::result::Result<T, String> {
    serde_json::from_slice(line).map_err(|e| {
        let shown: String = printable(&String::from_utf8_lossy(line)).chars().take(120).collect();
        format!("it answered something else than agreed ({e}): {shown}")
    })
}

/// Checks a whole reply before any number of it is used.
fn outputs(reply: Reply, id: u64, count: usize) -> std::result::Result<Vec<RewardOutput>, String> {
    if let Some(error) = reply.error {
        return Err(printable(&error));
    }
    if reply.id != id {
        return Err(format!("it answered request {}, asked was {id}", reply.id));
    }
    let lengths = std::iter::once(reply.rewards.len()).chain(reply.extra.values().map(Vec::len));
    if let Some(wrong) = lengths.into_iter().find(|&len| len != count) {
        return Err(format!("it answered {wrong} numbers for {count} responses"));
    }
    let mut outputs = vec![RewardOutput::default(); count];
    for (i, (reward, output)) in reply.rewards.into_iter().zip(&mut outputs).enumerate() {
        let Some(reward) = reward else { continue };
        let score = reward as f32;
        if !score.is_finite() {
            return Err(format!("reward {i} is {reward:e}, beyond the range of f32"));
        }
        output.score = Some(score);
    }
    for (name, values) in reply.extra {
        for (value, output) in values.into_iter().zip(&mut outputs) {
            let value = value.map(|x| x as f32).filter(|x| x.is_finite());
            output.extra.extend(value.map(|x| (name.clone(), x)));
        }
    }
    Ok(outputs)
}

fn describe(child: &mut LineChild, broken: &Broken, doing: &str, timeout: Duration) -> String {
    let message = match broken {
        Broken::Ended(Some(status)) => format!("its process ended while {doing} ({status})"),
        Broken::Ended(None) => format!("it closed its output while {doing}"),
        Broken::Deadline => format!("no answer within {} s while {doing}", timeout.as_secs_f64()),
        Broken::TooLong => format!("it wrote more than an answer can be while {doing}"),
        Broken::Io(e) => format!("its pipes failed while {doing}: {e}"),
    };
    with_stderr(child, message)
}

fn with_stderr(child: &mut LineChild, message: String) -> String {
    let lines = child.stderr_lines(STDERR_LINES_SHOWN);
    if lines.is_empty() { message } else { format!("{message}\nits last words were:\n  {}", lines.join("\n  ")) }
}
