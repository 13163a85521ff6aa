//! A small job that is killed while it runs, and resumed: its weights must be those of the job that was not killed.

use super::page::Check;
use crate::error::{Error, Kind, Result};
use crate::sys::environment;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const STEPS: usize = 12;
/// The checkpoint after which the job is killed.
const KILLED_AFTER: usize = 3;
/// The time that a job of a second may take.
const LIMIT: Duration = Duration::from_secs(60);
const NAME: &str = "resume";

/// The job, in a directory with the model and the rows.
fn job() -> String {
    format!(
        r#"[job]
kind = "sft"
steps = {STEPS}
threads = 1
device = "cpu"
[model]
actor = "model"
[data]
prompts = ["rows.jsonl"]
prompt_split = ""
eval_split = ""
[sft]
minibatch_samples = 4
[optim.actor]
lr = 1e-3
[eval]
every_steps = 0
[checkpoint]
every_steps = 1
[metrics]
report = false
"#
    )
}

/// Rows of text, which also train the tokenizer.
pub fn rows() -> Vec<[String; 2]> {
    (0..64).map(|i| [format!("{i} + {} = ", i * 7 % 50), format!("{}", i + i * 7 % 50)]).collect()
}

/// Writes the rows as JSON lines.
///
/// # Errors
/// `Io`.
pub fn write_rows(dir: &Path) -> Result<()> {
    let line =
        |[prompt, response]: &[String; 2]| serde_json::json!({"prompt": prompt, "response": response}).to_string();
    let text = rows().iter().map(line).collect::<Vec<_>>().join("\n") + "\n";
    let path = dir.join("rows.jsonl");
    std::fs::write(&path, text).map_err(|e| Error::io("write", &path, &e))
}

/// Runs the job in `dir` twice, once with a kill after a checkpoint. The job has one rank on the CPU.
pub fn check(dir: &Path) -> Check {
    match run(dir) {
        Ok(text) => Check::ok(NAME, text),
        Err(error) => Check::of(NAME, Err(error)),
    }
}

fn run(dir: &Path) -> Result<String> {
    let path = dir.join("job.toml");
    std::fs::write(&path, job()).map_err(|e| Error::io("write", &path, &e))?;
    wait(start(dir, "whole")?, dir, "whole")?;
    let start_of_killed = Instant::now();
    let mut killed = start(dir, "killed")?;
    let checkpoint = dir.join(format!("killed/checkpoints/step-{KILLED_AFTER}"));
    while !checkpoint.exists() && running(&mut killed)? && start_of_killed.elapsed() < LIMIT {
        std::thread::sleep(Duration::from_millis(1));
    }
    let _ = killed.kill();
    let status = killed.wait().map_err(|e| Error::io("wait for", "a job", &e))?;
    if status.signal() != Some(libc::SIGKILL) {
        return ended(dir, "killed", status.code());
    }
    let left = newest(&dir.join("killed/checkpoints"));
    wait(start(dir, "killed")?, dir, "killed")?;
    let read = |run: &str| {
        let path = dir.join(run).join("export/model.safetensors");
        std::fs::read(&path).map_err(|e| Error::io("read", &path, &e))
    };
    if read("whole")? != read("killed")? {
        return Err(Error::fault(format!(
            "a job killed after step {left} and resumed ends with other weights than the same job without a kill"
        )));
    }
    Ok(format!("a job of {STEPS} steps, killed after step {left} and resumed, ends with the same weights to the bit"))
}

/// The error of a job that ended by itself.
fn ended(dir: &Path, run: &str, code: Option<i32>) -> Result<String> {
    let log = std::fs::read_to_string(log(dir, run)).unwrap_or_default();
    let error = log.lines().find(|line| line.starts_with("error: ")).unwrap_or("it ended before it could be killed");
    let full = ["No space left", "File too large"].iter().any(|text| error.contains(text));
    let named = if full { "full disk: " } else { "" };
    let code = code.map_or("a signal".into(), |code| format!("code {code}"));
    Err(Error::new(
        Kind::Fault,
        format!("{named}a small job ended with {code}: {}", error.trim_start_matches("error: ")),
    ))
}

fn wait(mut child: Child, dir: &Path, run: &str) -> Result<()> {
    let start = Instant::now();
    while running(&mut child)? {
        if start.elapsed() > LIMIT {
            let _ = child.kill();
            let _ = child.wait();
            return Err(Error::fault(format!("a job of a second did not end within {} s", LIMIT.as_secs())));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let status = child.wait().map_err(|e| Error::io("wait for", "a job", &e))?;
    if status.success() { Ok(()) } else { ended(dir, run, status.code()).map(drop) }
}

fn running(child: &mut Child) -> Result<bool> {
    child.try_wait().map(|status| status.is_none()).map_err(|e| Error::io("wait for", "a job", &e))
}

fn log(dir: &Path, run: &str) -> PathBuf {
    dir.join(format!("{run}.log"))
}

/// Starts the job as a single rank.
fn start(dir: &Path, run: &str) -> Result<Child> {
    let path = log(dir, run);
    let stderr = std::fs::File::create(&path).map_err(|e| Error::io("write", &path, &e))?;
    // This link leads to the running program.
    let mut command = Command::new("/proc/self/exe");
    command.args(["run", "job.toml", &format!("job.dir={run}")]).current_dir(dir);
    for name in environment::of_launcher() {
        command.env_remove(name);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
    command.spawn().map_err(|e| Error::io("start", "/proc/self/exe", &e))
}

/// The newest step of a directory of checkpoints.
fn newest(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let steps = entries.filter_map(|entry| entry.file_name().to_str()?.strip_prefix("step-")?.parse().ok());
    steps.max().unwrap_or(0)
}
