//! A user's Python function as a reward, in a child process that may die, hang or send invalid output.
//!
//! The child (`driver.py`) reads one JSON line per request and answers with one line. After any failure the child and
//! all its descendants are killed, and the next attempt starts a new child.

use super::pool::{Answer, Asked, Failure, Lookup, Notes, RewardContext, Worker, reply_bytes_max, retried, rows_of};
use super::reply::{self, parse, printable};
use crate::config::reward::{PythonConfig, RewardConfig};
use crate::error::{Error, Result};
use crate::experience::RowFields;
use crate::reward::mixture::RewardOutput;
use crate::sys::bounded_log::BoundedLog;
use crate::sys::process::{Broken, LineChild};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::io::ErrorKind;
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
/// The most calls of an asynchronous function that are awaited together.
const TOGETHER_MAX: usize = 256;
/// The time that a child has to report calls that took too long.
const REPORT: Duration = Duration::from_secs(2);

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
    log: Option<BoundedLog>,
    notes: Notes,
}

/// A worker, whose child is started when it is needed.
pub struct PythonWorker {
    function: Arc<Function>,
    child: Option<LineChild>,
    /// The most requests that its function awaits together.
    together: usize,
    /// Whether its function takes log-probabilities.
    logprobs: bool,
    requests: u64,
}

/// The first output line of a child.
#[derive(Deserialize)]
struct Hello {
    #[serde(default)]
    function: String,
    /// Whether the function is asynchronous.
    #[serde(default)]
    together: bool,
    /// Whether the function has an argument for log-probabilities.
    #[serde(default)]
    logprobs: bool,
    error: Option<String>,
    /// Whether the error would occur again.
    #[serde(default)]
    lasts: bool,
}

#[derive(Deserialize)]
struct Reply {
    id: u64,
    error: Option<String>,
    #[serde(default)]
    lasts: bool,
    #[serde(default)]
    late: bool,
    #[serde(default)]
    notes: Vec<String>,
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
    let (hello, child) = started.map_err(|(Failure { why, again, .. }, times)| {
        let hint = if why.contains("ModuleNotFoundError") {
            "install the module, or use an interpreter that has it: reward.python = { file = \"reward.py\", \
             interpreter = \"venv/bin/python\" }"
        } else if environment {
            "define a class with step(self, text), or a function step(observation, action, label, **kwargs)"
        } else {
            "define reward_func(queries, prompts, labels), f(prompts, completions, **columns) or \
             compute_score(data_source, solution_str, ground_truth, extra_info)"
        };
        let error = Error::usage(format!("{} {}: {why}", function.key, file.display())).hint(hint);
        if !again {
            return error;
        }
        error.also(&format!("raise reward.start_timeout_s or reward.retries (it failed after {times})"))
    })?;
    let (mut child, together) = (Some(child), if hello.together { TOGETHER_MAX } else { 1 });
    let worker = |_| PythonWorker {
        function: Arc::clone(&function),
        child: child.take(),
        together,
        logprobs: hello.logprobs,
        requests: 0,
    };
    Ok((hello.function, file, (0..config.workers).map(worker).collect()))
}

/// Parses the answer line of the request with this index.
type Read<'a, T> = &'a dyn Fn(usize, &[u8]) -> std::result::Result<T, Failure>;

impl PythonWorker {
    /// Sends `requests` to the child together, and returns the results of `read` on the index and the answer of each.
    /// If one of them ends or blocks the child, the unanswered ones are sent again, one at a time. After any failure
    /// the child is replaced. `bytes_max`: the maximum bytes of an answer.
    pub(super) fn exchange<T: Clone>(
        &mut self,
        requests: Vec<Map<String, Value>>,
        bytes_max: usize,
        doing: &str,
        given_up: &AtomicBool,
        read: Read<'_, T>,
    ) -> Vec<std::result::Result<T, Failure>> {
        let mut found = vec![None; requests.len()];
        let Err(failure) = self.attempt(requests.clone(), bytes_max, doing, given_up, read, &mut found) else {
            return found.into_iter().flatten().collect();
        };
        let is_alone = found.len() == 1;
        let settled = |((i, found), request): ((usize, Option<_>), Map<String, Value>)| match found {
            Some(found) => found,
            None if is_alone => Err(failure.clone()),
            None => self.exchange(vec![request], bytes_max, doing, given_up, &|_, line| read(i, line)).remove(0),
        };
        found.into_iter().enumerate().zip(requests).map(settled).collect()
    }

    /// Fills `found` with the results of `requests`. Returns the failure of the child, if it did not answer all.
    fn attempt<T>(
        &mut self,
        mut requests: Vec<Map<String, Value>>,
        bytes_max: usize,
        doing: &str,
        given_up: &AtomicBool,
        read: Read<'_, T>,
        found: &mut [Option<std::result::Result<T, Failure>>],
    ) -> std::result::Result<(), Failure> {
        let mut child = match self.child.take() {
            Some(child) => child,
            None => self.function.start(given_up)?.1,
        };
        let first = self.requests + 1;
        for request in &mut requests {
            self.requests += 1;
            request.insert("id".into(), self.requests.into());
        }
        let mut line = Value::from(requests.into_iter().map(Value::from).collect::<Vec<_>>()).to_string().into_bytes();
        line.push(b'\n');
        let timeout = self.function.timeout;
        let until = Instant::now() + if self.together > 1 { timeout + REPORT } else { timeout };
        for _ in 0..found.len() {
            let answer = child
                .exchange(&line, until, bytes_max, given_up)
                .map_err(|broken| describe(&mut child, &broken, doing, timeout))?;
            line.clear();
            let reply: Reply = parse(&answer)?;
            let Some((i, to)) = (reply.id.checked_sub(first)).and_then(|i| {
                let to = found.get_mut(i as usize).filter(|to| to.is_none())?;
                Some((i as usize, to))
            }) else {
                return Err(format!("it answered request {} instead of {}", reply.id, self.requests).into());
            };
            for note in &reply.notes {
                let (key, name) = (self.function.key, self.function.file.file_name().unwrap_or_default());
                self.function.notes.add(format!("{key} {}: {}", name.display(), printable(note)));
            }
            *to = Some(match reply.error {
                Some(error) if reply.late => Err(Failure {
                    why: with_stderr(&mut child, format!("{error} while {doing}")),
                    again: true,
                    late: true,
                }),
                Some(error) => Err(Failure { why: printable(&error), again: !reply.lasts, late: false }),
                None => read(i, &answer),
            });
        }
        if found.iter().flatten().all(std::result::Result::is_ok) {
            self.child = Some(child);
        }
        Ok(())
    }

    pub(super) fn rows(&self) -> Option<&Lookup> {
        self.function.rows.as_ref()
    }
}

impl Worker for PythonWorker {
    type Asked = Asked;
    type Output = RewardOutput;

    fn ask(&mut self, asked: &[Arc<Asked>], given_up: &AtomicBool) -> Answer<RewardOutput> {
        self.ask_all(&[asked], given_up).remove(0)
    }

    fn together(&self) -> usize {
        self.together
    }

    fn ask_all(&mut self, requests: &[&[Arc<Asked>]], given_up: &AtomicBool) -> Vec<Answer<RewardOutput>> {
        let body = |asked: &&[Arc<Asked>]| {
            let rows = rows_of(self.rows(), asked.iter().map(|one| &one.prompt))?;
            Ok(request(asked, &rows, self.logprobs))
        };
        let bodies = match requests.iter().map(body).collect::<std::result::Result<Vec<_>, String>>() {
            Ok(bodies) => bodies,
            Err(why) => return vec![Err(why.into()); requests.len()],
        };
        let most = requests.iter().map(|asked| asked.len()).max().unwrap_or(0);
        self.exchange(bodies, reply_bytes_max(most), "scoring", given_up, &|i, line| {
            let Rewards { rewards, extra } = parse(line)?;
            reply::outputs(rewards, extra, requests[i].len()).map_err(Failure::lasting)
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
            "timeout_s": config.timeout_s,
            "steps": context.steps,
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
            notes: context.notes.clone(),
        })
    }

    /// Starts a child, and returns its first line.
    fn start(&self, given_up: &AtomicBool) -> std::result::Result<(Hello, LineChild), Failure> {
        let (mut child, wait) = (self.spawn()?, self.start_timeout);
        let line = child
            .exchange(&[], Instant::now() + wait, reply_bytes_max(0), given_up)
            .map_err(|broken| describe(&mut child, &broken, "loading", wait))?;
        let hello: Hello = parse(&line).map_err(|message| with_stderr(&mut child, message))?;
        match &hello.error {
            Some(error) => Err(Failure { why: printable(error), again: !hello.lasts, late: false }),
            None if hello.function.is_empty() => {
                Err(with_stderr(&mut child, "it did not name a function".into()).into())
            }
            None => Ok((hello, child)),
        }
    }

    fn spawn(&self) -> std::result::Result<LineChild, Failure> {
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
        LineChild::spawn(&mut command, self.log.clone()).map_err(|e| {
            let lasts = matches!(e.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied);
            Failure { why: format!("cannot start {}: {e}", self.interpreter.display()), again: !lasts, late: false }
        })
    }
}

fn request(asked: &[Arc<Asked>], rows: &[RowFields], logprobs: bool) -> Map<String, Value> {
    let mut request = Map::new();
    request.insert("rows".into(), json!(rows));
    request.insert("step".into(), asked.first().map_or(0, |one| one.steps_done).into());
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
    if logprobs {
        column("logprobs", &|one| one.response.logprobs.clone().into());
    }
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
