//! Whole jobs for tests: a tiny model, its data, and the binary on one rank or several.

use crate::{emulation, on_a_real_gpu, skip_on_a_real_gpu};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use tempfile::TempDir;

pub const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1,
 "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
 "vocab_size": 264, "max_position_embeddings": 128, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
 "bos_token_id": 0, "eos_token_id": 1}"#;

/// A config.json with other values.
pub fn with(config: &str, others: &Value) -> String {
    let mut config: Value = serde_json::from_str(config).expect("JSON");
    config.as_object_mut().expect("an object").extend(others.as_object().expect("an object").clone());
    config.to_string()
}

/// A job file: the common keys, and `more`, which begins within the table [data].
fn job(kind: &str, steps: usize, more: &str) -> String {
    format!(
        r#"
[job]
kind = "{kind}"
dir = "{kind}"
steps = {steps}
device = "gpu"
gemm = "exact"
check = false
[model]
actor = "model"
dtype = "bf16"
[data]
prompts = ["rows.jsonl"]
prompt_key = "prompt"
{more}
microbatch_tokens_max = 128
"#
    )
}

const SFT: &str = r#"response_key = "response"
[sft]
minibatch_samples = 4"#;

const PPO: &str = r#"[rollout]
prompts_per_step = 2
samples_per_prompt = 2
response_tokens_max = 8
[[reward.rule]]
kind = "length"
[ppo]
minibatch_samples = 2"#;

/// The binary next to this target if both were copied to another machine, otherwise the built one.
pub fn binary() -> PathBuf {
    let beside = std::env::current_exe().expect("the path of this target").with_file_name("rlhf-hpc");
    if beside.exists() { beside } else { PathBuf::from(env!("CARGO_BIN_EXE_rlhf-hpc")) }
}

/// The binary in `dir` on `ranks` ranks, with arguments that spaces part and an emulated GPU each where there is no
/// real one; under the launcher where they are several.
pub fn command(ranks: usize, dir: &Path, line: &str) -> Command {
    if ranks == 1 {
        return command_on(true, dir, line);
    }
    let mut command = launched(ranks);
    command.arg(binary()).current_dir(dir).args(line.split_whitespace());
    if !on_a_real_gpu() {
        command.envs(emulation::environment_of_jobs());
    }
    command
}

/// The binary in `dir` with or without an emulated GPU.
pub fn command_on(has_gpu: bool, dir: &Path, line: &str) -> Command {
    let mut command = Command::new(binary());
    command.current_dir(dir).args(line.split_whitespace());
    match has_gpu {
        _ if on_a_real_gpu() => &mut command,
        true => command.envs(emulation::environment_of_jobs()),
        false => command.env_remove("RLHF_CUDA_LIB"),
    };
    command
}

/// The launcher of `ranks` ranks. Each yields to the others while it waits.
pub fn launched(ranks: usize) -> Command {
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", &ranks.to_string()]);
    command.env("OMPI_MCA_mpi_yield_when_idle", "1");
    command
}

/// The messages of a command on standard error.
pub fn output_text(done: &Output) -> String {
    String::from_utf8_lossy(&done.stderr).into_owned()
}

/// The same in one line, as lines may be wrapped.
pub fn flat(done: &Output) -> String {
    output_text(done).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Runs a command that must succeed. Returns its messages.
pub fn well(command: &mut Command) -> String {
    let done = command.output().expect("it starts");
    assert!(done.status.success(), "{command:?}: {}\n{}", done.status, output_text(&done));
    output_text(&done)
}

pub fn rlhf_hpc(dir: &Path, line: &str) {
    well(&mut command(1, dir, line));
}

/// A directory with what `prepare` writes.
pub fn prepared(config: &str) -> TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    prepare(dir.path(), config);
    dir
}

/// The same, for a test that needs the emulation. `None` on a real GPU.
pub fn emulated(config: &str) -> Option<TempDir> {
    (!skip_on_a_real_gpu()).then(|| prepared(config))
}

/// Copies a run's directory.
pub fn copied(from: &Path, to: &Path) {
    let done = Command::new("cp").arg("-r").args([from, to]).status().expect("cp starts");
    assert!(done.success(), "{} to {}", from.display(), to.display());
}

/// The metrics of each step of a job, except for times, memory, restarts, rollout costs and the transport of weights.
pub fn computed(dir: &Path, job: &str) -> Vec<Value> {
    let aside = |key: &str| {
        ["time_", "memory_", "gpu_", "idle_", "rollout_"].iter().any(|of| key.starts_with(of))
            || key.contains("per_s")
            || ["mfu", "reshard_bytes", "restarts"].contains(&key)
    };
    let mut steps = metrics(dir, job);
    for step in &mut steps {
        step.as_object_mut().expect("an object a line").retain(|key, _| !aside(key));
    }
    steps
}

/// The exported weights.
pub fn export(dir: &Path, job: &str) -> Vec<u8> {
    std::fs::read(dir.join(job).join("export/model.safetensors")).expect("an export")
}

/// Asserts that two jobs are bit-identical in their metrics and their exported model.
pub fn assert_same(dir: &Path, one: &str, other: &str) {
    assert_eq!(computed(dir, one), computed(dir, other), "{one} and {other}");
    assert!(export(dir, one) == export(dir, other), "{one} and {other}: exported weights");
}

pub fn number(step: &Value, key: &str) -> f64 {
    step[key].as_f64().unwrap_or_else(|| panic!("no {key} in {step}"))
}

/// Asserts that metrics of each step are equal within `share` of their size, which counts as `least` at least.
pub fn assert_near(what: &str, got: &[Value], want: &[Value], keys: &[&str], (share, least): (f64, f64)) {
    assert_eq!(got.len(), want.len(), "{what}");
    for key in keys {
        let lines: Vec<_> = got.iter().zip(want).filter(|(_, want)| want.get(key).is_some()).collect();
        assert!(!lines.is_empty(), "{what}: no {key}");
        for (a, b) in lines {
            let (a, b) = (number(a, key), number(b, key));
            assert!((a - b).abs() <= share * b.abs().max(least), "{what}: {key} {a} against {b}");
        }
    }
}

/// Rows and a tokenizer: name and contents of each file, made once.
fn made() -> &'static [(PathBuf, Vec<u8>)] {
    static MADE: OnceLock<Vec<(PathBuf, Vec<u8>)>> = OnceLock::new();
    MADE.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a directory");
        let at = dir.path();
        let mut corpus = Command::new("python3");
        corpus.args(["-c", include_str!("../../jobs/quickstart/corpus.py"), "--rows", "200", "--seed", "1"]);
        well(corpus.current_dir(at).args(["--out", "rows.jsonl"]));
        rlhf_hpc(at, "tokenizer rows.jsonl --vocabulary 264 --out tokenizer");
        let tokenizer = std::fs::read_dir(at.join("tokenizer")).expect("a tokenizer");
        let files = tokenizer.map(|file| Path::new("tokenizer").join(file.expect("a file").file_name()));
        let read = |name: PathBuf| (name.clone(), std::fs::read(at.join(name)).expect("a file"));
        files.chain(["rows.jsonl".into()]).map(read).collect()
    })
}

/// Writes rows, a tokenizer, a model of `config` as "model", and the jobs sft.toml and ppo.toml.
pub fn prepare(dir: &Path, config: &str) {
    std::fs::create_dir(dir.join("tokenizer")).expect("a directory");
    let (sft, ppo) = (job("sft", 3, SFT), job("ppo", 2, PPO));
    let texts = [("model.json", config), ("sft.toml", &sft), ("ppo.toml", &ppo)];
    let texts = texts.map(|(name, text)| (Path::new(name), text.as_bytes()));
    for (name, bytes) in made().iter().map(|(name, bytes)| (name.as_path(), &bytes[..])).chain(texts) {
        std::fs::write(dir.join(name), bytes).expect("a file");
    }
    rlhf_hpc(dir, "init --config model.json --tokenizer tokenizer --out model");
}

/// How often rank `rank` called each function of the emulated libraries and ran each kernel, from the file `EMULATED_CALLS`.
pub fn calls(file: &Path, rank: &str) -> BTreeMap<String, u64> {
    let text = std::fs::read_to_string(file).expect("calls");
    let mut calls = BTreeMap::new();
    for words in text.lines().map(|line| line.split(' ').collect::<Vec<_>>()).filter(|words| words[0] == rank) {
        *calls.entry(words[1].to_owned()).or_default() += words[2].parse::<u64>().expect("a number");
    }
    calls
}

pub fn metrics(dir: &Path, job: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(dir.join(job).join("metrics.jsonl")).expect("metrics");
    text.lines().map(|line| serde_json::from_str(line).expect("an object a line")).collect()
}
