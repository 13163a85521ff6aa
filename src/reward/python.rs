//! A user's Python function as a reward, in a child process that may die, hang or send invalid output.
//!
//! The child (`driver.py`) reads one JSON line per request and answers with one line. After any failure the child and
//! all its descendants are killed, and the next attempt starts a new child.

use super::pool::{Asked, Failure, Lookup, RewardContext, Worker, reply_bytes_max, retried, rows_of};
use super::reply::{self, parse, printable};
use crate::config::reward::{PythonConfig, RewardConfig};
use crate::error::{Error, Result};
use crate::experience::RowFields;
use crate::reward::mixture::RewardOutput;
use crate::sys::process::{Broken, LineChild};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

const DRIVER: &str = concat!(include_str!("driver.py"), include_str!("environment.py"), "\nmain()\n");
/// The environment variables that the child inherits: enough to find Python, its packages and caches, but no variables
/// of MPI or Slurm, and no credentials.
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
/// The variables that hide the GPUs of each vendor from a child, or show it the GPUs of this rank.
const NO_GPU: [(&str, &str); 4] = [
    ("CUDA_VISIBLE_DEVICES", ""),
    ("HIP_VISIBLE_DEVICES", "-1"),
    ("ROCR_VISIBLE_DEVICES", ""),
    ("ONEAPI_DEVICE_SELECTOR", "opencl:cpu"),
];
const STDERR_LINES_SHOWN: usize = 12;

/// A Python file's reward function, or environment.
struct Function {
    /// Its configuration key.
    key: &'static str,
    file: PathBuf,
    interpreter: PathBuf,
    /// The settings of the driver, in JSON.
    settings: String,
    pass_env: Vec<String>,
    gpu: bool,
    start_timeout: Duration,
    timeout: Duration,
    rows: Option<Lookup>,
    log: Option<PathBuf>,
}

/// A worker, whose child is started when it is needed.
pub struct PythonWorker {
    function: Arc<Function>,
    child: Option<LineChild>,
    requests: u64,
}

/// The first output line of a child.
#[derive(Deserialize)]
struct Hello {
    function: Option<String>,
    error: Option<String>,
}

#[derive(Deserialize)]
struct Reply {
    id: u64,
    error: Option<String>,
}

#[derive(Deserialize)]
struct Rewards {
    rewards: Vec<Option<f64>>,
    #[serde(default)]
    extra: BTreeMap<String, Vec<Option<f64>>>,
}

/// Creates `reward.workers` workers. Returns also the name of the function (or class, for an `environment`) and its
/// file. Starts the first child, with retries, to find the function.
pub fn workers(
    config: &RewardConfig,
    python: &PythonConfig,
    environment: bool,
    base_dir: &Path,
    context: &RewardContext,
) -> Result<(String, PathBuf, Vec<PythonWorker>)> {
    let function = Arc::new(Function::described(config, python, environment, base_dir, context)?);
    let file = function.file.clone();
    let started = retried(config.retries, || function.start(&AtomicBool::new(false)));
    let (name, child) = started.map_err(|(Failure { why, .. }, times)| {
        let hint = if why.contains("ModuleNotFoundError") {
            "install the module, or use an interpreter that has it: reward.python = { file = \"reward.py\", \
             interpreter = \"venv/bin/python\" }"
        } else if environment {
            "define a class with step(self, text), or a function step(observation, action, label, **kwargs)"
        } else {
            "define reward_func(queries, prompts, labels) or f(prompts, completions, **columns)"
        };
        Error::usage(format!("{} {}: {why}", function.key, file.display()))
            .hint(hint)
            .also(&format!("raise reward.start_timeout_s or reward.retries (it failed after {times})"))
    })?;
    let mut child = Some(child);
    let worker = |_| PythonWorker { function: Arc::clone(&function), child: child.take(), requests: 0 };
    Ok((name, file, (0..config.workers).map(worker).collect()))
}

impl PythonWorker {
    /// Sends `request` to the child and returns the result of `read` on its answer. After a failure the child is
    /// replaced.
    pub(super) fn exchange<T>(
        &mut self,
        mut request: Map<String, Value>,
        count: usize,
        doing: &str,
        given_up: &AtomicBool,
        read: impl FnOnce(&[u8]) -> std::result::Result<T, String>,
    ) -> std::result::Result<T, Failure> {
        let mut child = match self.child.take() {
            Some(child) => child,
            None => self.function.start(given_up)?.1,
        };
        self.requests += 1;
        request.insert("id".into(), self.requests.into());
        let mut line = Value::from(request).to_string().into_bytes();
        line.push(b'\n');
        let timeout = self.function.timeout;
        let answer = child
            .exchange(&line, Instant::now() + timeout, reply_bytes_max(count), given_up)
            .map_err(|broken| describe(&mut child, &broken, doing, timeout))?;
        let reply: Reply = parse(&answer)?;
        if let Some(error) = reply.error {
            return Err(printable(&error).into());
        }
        if reply.id != self.requests {
            return Err(format!("it answered request {} instead of {}", reply.id, self.requests).into());
        }
        let found = read(&answer)?;
        self.child = Some(child);
        Ok(found)
    }

    pub(super) fn rows(&self) -> Option<&Lookup> {
        self.function.rows.as_ref()
    }
}

impl Worker for PythonWorker {
    type Asked = Asked;
    type Output = RewardOutput;

    fn ask(&mut self, asked: &[Arc<Asked>], given_up: &AtomicBool) -> std::result::Result<Vec<RewardOutput>, Failure> {
        let rows = rows_of(self.rows(), asked.iter().map(|one| &one.prompt))?;
        let (request, count) = (request(asked, &rows), asked.len());
        self.exchange(request, count, "scoring", given_up, |line| {
            let Rewards { rewards, extra } = parse(line)?;
            reply::outputs(rewards, extra, count)
        })
    }
}

impl Function {
    fn described(
        config: &RewardConfig,
        python: &PythonConfig,
        environment: bool,
        base_dir: &Path,
        context: &RewardContext,
    ) -> Result<Self> {
        let key = if environment { "reward.environment" } else { "reward.python" };
        if python.file.is_empty() {
            return Err(Error::usage(format!("{key} must name a file")).hint(format!("set {key} = \"file.py\"")));
        }
        let path = base_dir.join(&python.file);
        let file = path.canonicalize().map_err(|e| {
            Error::usage(format!("{key}: cannot find {}: {e}", path.display()))
                .hint("check the path, which is relative to the job file")
        })?;
        if !file.is_file() {
            return Err(Error::usage(format!("{key}: {} is not a file", file.display())));
        }
        // A bare name is looked up in PATH; a path is relative to the job file, like all paths.
        let interpreter = if python.interpreter.contains('/') {
            let path = base_dir.join(&python.interpreter);
            std::path::absolute(&path).map_err(|e| Error::io("resolve", &path, &e))?
        } else {
            PathBuf::from(&python.interpreter)
        };
        let Some(file_name) = file.to_str() else {
            return Err(Error::usage(format!("{key}: the path {} must be UTF-8", file.display())));
        };
        let settings = json!({
            "file": file_name,
            "function": python.function,
            "environment": environment,
            "label_argument": python.label_argument,
            "columns": context.columns,
            "memory_bytes": (python.memory_max_gib * 1_073_741_824.0) as u64,
        });
        Ok(Self {
            key,
            interpreter,
            settings: settings.to_string(),
            pass_env: python.pass_env.clone(),
            gpu: python.gpu,
            file,
            start_timeout: Duration::from_secs_f64(config.start_timeout_s),
            timeout: Duration::from_secs_f64(config.timeout_s),
            rows: context.rows.clone(),
            log: context.log.clone(),
        })
    }

    /// Starts a child. Returns the name of its function, and the child.
    fn start(&self, given_up: &AtomicBool) -> std::result::Result<(String, LineChild), Failure> {
        let (mut child, wait) = (self.spawn()?, self.start_timeout);
        let line = child
            .exchange(&[], Instant::now() + wait, reply_bytes_max(0), given_up)
            .map_err(|broken| describe(&mut child, &broken, "loading", wait))?;
        let hello: Hello = parse(&line).map_err(|message| with_stderr(&mut child, message))?;
        match (hello.error, hello.function) {
            (Some(error), _) => Err(printable(&error).into()),
            (None, Some(function)) => Ok((function, child)),
            (None, None) => Err(with_stderr(&mut child, "it did not name a function".into()).into()),
        }
    }

    fn spawn(&self) -> std::result::Result<LineChild, String> {
        let mut command = Command::new(&self.interpreter);
        command.args(["-X", "utf8", "-c", DRIVER, &self.settings]).env_clear();
        if !self.gpu {
            command.envs(NO_GPU);
        }
        let shown = NO_GPU.iter().map(|(name, _)| *name).filter(|_| self.gpu);
        let passed = self.pass_env.iter().map(String::as_str);
        for name in ENVIRONMENT.iter().copied().chain(shown).chain(passed) {
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

fn request(asked: &[Arc<Asked>], rows: &[RowFields]) -> Map<String, Value> {
    let mut request = Map::new();
    request.insert("rows".into(), json!(rows));
    let mut column = |key: &str, of: &dyn Fn(&Asked) -> Value| {
        request.insert(key.into(), asked.iter().map(|one| of(one)).collect());
    };
    column("prompts", &|one| one.prompt.text.as_str().into());
    column("labels", &|one| one.prompt.label.as_str().into());
    column("sources", &|one| one.prompt.source.as_str().into());
    column("prompt_ids", &|one| one.prompt.id.into());
    column("prompt_tokens", &|one| one.prompt.tokens.clone().into());
    column("responses", &|one| one.response.text.as_str().into());
    column("tokens", &|one| one.response.tokens.clone().into());
    column("finish", &|one| one.response.finish.name().into());
    request
}

fn describe(child: &mut LineChild, broken: &Broken, doing: &str, timeout: Duration) -> Failure {
    let message = match broken {
        Broken::Ended(Some(status)) => format!("its process ended while {doing} ({status})"),
        Broken::Ended(None) => format!("it closed its output while {doing}"),
        Broken::Deadline => format!("no answer within {} s while {doing}", timeout.as_secs_f64()),
        Broken::TooLong => format!("its answer exceeds the maximum size while {doing}"),
        Broken::Io(e) => format!("its pipes failed while {doing}: {e}"),
    };
    let late = matches!(broken, Broken::Deadline);
    Failure { why: with_stderr(child, message), again: true, late }
}

fn with_stderr(child: &mut LineChild, message: String) -> String {
    let lines = child.stderr_lines(STDERR_LINES_SHOWN);
    if lines.is_empty() { message } else { format!("{message}\nits last output was:\n  {}", lines.join("\n  ")) }
}
