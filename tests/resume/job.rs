//! A job file, its runs, and what they leave.

use crate::cli::{command, corpus};
use crate::process::{Ended, LIMIT, Running};
use crate::resume::arrays::{self, Arrays, assert_same};
use rlhf_hpc::metrics::eval_rows::{self, EvalRow};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

/// The directory with `model`, shards of `questions`, `demonstrations`, `pairs`, `labelled` responses and `steps`, and
/// `texts.jsonl`, made once.
pub fn place() -> &'static Path {
    static PLACE: OnceLock<PathBuf> = OnceLock::new();
    PLACE.get_or_init(make_place)
}

fn make_place() -> PathBuf {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("whole-runs");
    let _ = std::fs::remove_dir_all(&place);
    std::fs::create_dir_all(&place).expect("the target directory can be written");
    let config = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 272,
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "initializer_range": 0.2, "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": 0}"#;
    std::fs::write(place.join("config.json"), config).expect("writes");
    let made = corpus::make(&place, "--out rows.jsonl --rows 120 --eval-rows 8 --digits 1");
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    write_preferences(&place);
    let texts: Vec<String> =
        (0..20).map(|i| json!({"text": "a text of words ".repeat(1 + i % 4)}).to_string()).collect();
    std::fs::write(place.join("texts.jsonl"), texts.join("\n")).expect("writes");
    for verb in [
        "tokenizer rows.jsonl --vocabulary 264 --out tokenizer",
        "init --config config.json --tokenizer tokenizer --out model",
        "shard rows.jsonl --tokenizer tokenizer --out questions --label-key answer --split-field split",
        "shard rows.jsonl --tokenizer tokenizer --out demonstrations --response-key demonstration --split-field split",
        "shard rows.jsonl --tokenizer tokenizer --out texts --text --prompt-key demonstration",
        "shard pairs.jsonl --tokenizer tokenizer --out pairs --pairs --split-field split",
        "shard labelled.jsonl --tokenizer tokenizer --out labelled --labelled --label-key good --split-field split",
        "shard steps.jsonl --tokenizer tokenizer --out steps --steps --label-key good --split-field split",
    ] {
        command::run(&place, &verb.split(' ').collect::<Vec<_>>()).well();
    }
    std::fs::write(place.join("job.toml"), JOB).expect("writes");
    place
}

/// Writes for each row the right response and the next row's response as the rejected one, or one digit too many if the
/// two are equal, both with their labels. Also writes the right response in steps, of which every other one ends with a
/// letter and is wrong.
fn write_preferences(place: &Path) {
    let rows = command::rows(&std::fs::read_to_string(place.join("rows.jsonl")).expect("it was made"));
    let pair = |(row, other): (&Value, &Value)| {
        let response = |row: &Value| row["response"].as_str().expect("a text").to_owned();
        let (chosen, mut rejected) = (response(row), response(other));
        if chosen == rejected {
            rejected.push('0');
        }
        json!({"prompt": row["prompt"], "chosen": chosen, "rejected": rejected, "split": row["split"]})
    };
    let pairs: Vec<Value> = rows.iter().zip(rows.iter().cycle().skip(1)).map(pair).collect();
    let labelled = |pair: &Value| {
        let of = |key: &str, good: bool| json!({"prompt": pair["prompt"], "response": pair[key], "good": good, "split": pair["split"]});
        [of("chosen", true), of("rejected", false)]
    };
    let steps = |(i, pair): (usize, &Value)| {
        let steps = pair["chosen"].as_str().expect("a text").split(' ').enumerate();
        let (mut text, mut good) = (pair["prompt"].as_str().expect("a text").to_owned(), Vec::new());
        for (j, step) in steps {
            let is_right = (i + j) % 2 == 0;
            text.extend([step, if is_right { ";" } else { "x;" }]);
            // A probability, too, is a label.
            good.push(if is_right { json!("+") } else { json!(0.125) });
        }
        json!({"prompt": text, "good": good, "split": pair["split"]})
    };
    for (file, rows) in [
        ("pairs.jsonl", pairs.clone()),
        ("labelled.jsonl", pairs.iter().flat_map(labelled).collect()),
        ("steps.jsonl", pairs.iter().enumerate().map(steps).collect()),
    ] {
        let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
        std::fs::write(place.join(file), lines.join("\n")).expect("writes");
    }
}

/// Another verb in the place.
pub fn verb(line: &str) {
    command::run(place(), &line.split(' ').collect::<Vec<_>>()).well();
}

/// A model of another context there.
pub fn with_context(name: &str, context: usize) {
    let config = std::fs::read_to_string(place().join("config.json")).expect("it was made");
    let file = format!("{name}.json");
    std::fs::write(place().join(&file), config.replace(": 256", &format!(": {context}"))).expect("writes");
    verb(&format!("init --config {file} --tokenizer tokenizer --out {name}"));
}

/// Some token ids stop a response, so that lengths differ although the weights are random.
const JOB: &str = r#"
[job]
kind = "ppo"
steps = 4
threads = 1
[model]
actor = "model"
[data]
prompts = ["questions"]
prompt_split = "train"
eval_split = "eval"
[rollout]
prompts_per_step = 8
samples_per_prompt = 2
response_tokens_max = 12
stop_token_ids = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59]
[reward]
rule = { kind = "regex", pattern = "[0-9a-f]" }
[ppo]
epochs = 2
minibatch_samples = 8
microbatch_tokens_max = 64
[sft]
minibatch_samples = 16
microbatch_tokens_max = 64
[reward_model]
minibatch_samples = 8
microbatch_tokens_max = 64
[dpo]
minibatch_samples = 8
microbatch_tokens_max = 64
[kto]
minibatch_samples = 8
microbatch_tokens_max = 64
[step_reward]
placeholder = ";"
minibatch_samples = 8
microbatch_tokens_max = 64
[distill]
minibatch_samples = 8
microbatch_tokens_max = 64
[optim.actor]
lr = 1e-3
[optim.critic]
lr = 2e-3
[checkpoint]
every_steps = 1
[metrics]
samples_every_steps = 0
"#;

/// A job with a run directory of its own.
#[derive(Clone)]
pub struct Job {
    pub dir: PathBuf,
    ranks: usize,
    sets: Vec<String>,
    dry: bool,
}

impl Job {
    pub fn ppo(name: &str) -> Self {
        Self { dir: place().join("runs").join(name), ranks: 0, sets: Vec::new(), dry: false }
    }

    pub fn sft(name: &str) -> Self {
        Self::ppo(name).with("job.kind=sft job.steps=8 data.prompts=[\"demonstrations\"] checkpoint.every_steps=2")
    }

    /// A job that learns from pairs; `sets` name its kind.
    pub fn pairs(name: &str, sets: &str) -> Self {
        Self::ppo(name).with("data.prompts=[\"pairs\"] eval.every_steps=2").with(sets)
    }

    /// The same job in another run directory.
    pub fn named(&self, name: &str) -> Self {
        Self { dir: place().join("runs").join(name), ..self.clone() }
    }

    /// Under mpirun with `ranks` ranks; without this, alone.
    pub fn on(mut self, ranks: usize) -> Self {
        self.ranks = ranks;
        self
    }

    /// `key.path=value`, separated by white space.
    pub fn with(mut self, sets: &str) -> Self {
        self.sets.extend(sets.split_whitespace().map(str::to_string));
        self
    }

    /// Places roles, separated by white space, on the next ranks, with a number of ranks each.
    pub fn placed(self, places: &[(&str, usize)]) -> Self {
        let mut end = 0;
        let entries = places.iter().map(|(roles, ranks)| {
            let (start, roles) = (end, roles.split(' ').collect::<Vec<_>>());
            end += ranks;
            format!("{{ roles = {roles:?}, ranks = \"{start}..{end}\" }}")
        });
        let set = format!("mesh.placement=[{}]", entries.collect::<Vec<_>>().join(", "));
        self.on(end).set(set)
    }

    /// A dry run of it.
    pub fn dry(mut self) -> Self {
        self.dry = true;
        self
    }

    /// One override, whose value may have white space.
    pub fn set(mut self, one: String) -> Self {
        self.sets.push(one);
        self
    }

    /// The command to execute.
    pub fn command(&self) -> Command {
        let mut command = command::program(place(), self.ranks);
        command.arg("run");
        if self.dry {
            command.arg("--dry-run");
        }
        command.arg(place().join("job.toml")).arg(format!("job.dir={}", self.dir.display())).args(&self.sets);
        command
    }

    pub fn start(&self) -> Running {
        Running::new(self.command())
    }

    pub fn run(&self) -> Ended {
        self.start().end()
    }

    /// Runs to the end, which must be a good one.
    pub fn done(self) -> Self {
        let ended = self.run();
        assert_eq!(ended.code, Some(0), "{}: {}", self.dir.display(), ended.stderr);
        self
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        let path = self.dir.join(name);
        std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    }

    /// The complete lines of `metrics.jsonl`, also while a resumed run truncates the file and appends to it.
    pub fn metrics(&self) -> Vec<Map<String, Value>> {
        let read = || std::fs::read_to_string(self.dir.join("metrics.jsonl")).unwrap_or_default();
        let (mut text, mut again) = (read(), read());
        while text != again {
            (text, again) = (again, read());
        }
        text.split_inclusive('\n')
            .filter(|line| line.ends_with('\n'))
            .map(|line| serde_json::from_str(line).expect("a line is a JSON object"))
            .collect()
    }

    /// A number of each step's line.
    pub fn numbers(&self, key: &str) -> Vec<f64> {
        self.metrics().iter().filter_map(|line| line.get(key)?.as_f64()).collect()
    }

    /// The lines without what no two runs share: times, shares of them, memory, what a rollout took, what was moved for
    /// it, and how often they were resumed.
    pub fn timeless_metrics(&self) -> Vec<Map<String, Value>> {
        let mut lines = self.metrics();
        for line in &mut lines {
            let of_rollout = |key: &str| key.starts_with("idle_") || key.starts_with("rollout_");
            let of_times = |key: &str| key.contains("time_") || key.ends_with("per_s") || of_rollout(key);
            let is_of_a_start =
                |key: &str| ["mfu", "restarts", "reshard_bytes"].contains(&key) || key.starts_with("memory_");
            line.retain(|key, _| !of_times(key) && !is_of_a_start(key) && key != "bubble_ratio");
        }
        lines
    }

    pub fn checkpoints(&self) -> PathBuf {
        self.dir.join("checkpoints")
    }

    /// The committed steps, ascending.
    pub fn committed(&self) -> Vec<u64> {
        let Ok(entries) = std::fs::read_dir(self.checkpoints()) else { return Vec::new() };
        let names = entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned());
        let mut steps: Vec<u64> = names.filter_map(|name| name.strip_prefix("step-")?.parse().ok()).collect();
        steps.sort_unstable();
        steps
    }

    /// A copy of this run under another name, in its state after a step: without its export and later commits.
    pub fn rewound(&self, name: &str, step: u64) -> Self {
        let copy = self.named(name);
        command::copy(&self.dir, ".", &copy.dir);
        std::fs::remove_dir_all(copy.dir.join("export")).expect("it was written");
        for later in copy.committed().into_iter().filter(|later| *later > step) {
            std::fs::remove_dir_all(copy.checkpoints().join(format!("step-{later}"))).expect("it was committed");
        }
        assert_eq!(copy.committed().last(), Some(&step), "it was kept");
        copy
    }

    /// Everything that must be equal to the bit in two runs of one job.
    pub fn assert_same(&self, other: &Self) {
        let who = format!("{} and {}", self.dir.display(), other.dir.display());
        assert_eq!(self.timeless_metrics(), other.timeless_metrics(), "{who}: metrics.jsonl");
        let is_adapter = self.dir.join("export/adapter_config.json").exists();
        let weights = if is_adapter { "export/adapter_model.safetensors" } else { "export/model.safetensors" };
        for file in [weights, "ledger.json"] {
            assert!(self.read(file) == other.read(file), "{who}: {file} differs");
        }
        assert_eq!(self.eval_rows(), other.eval_rows(), "{who}: eval/");
        let (mine, theirs) = (self.rollouts(), other.rollouts());
        assert_eq!(mine.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>(), "{who}: recorded steps");
        for (step, arrays) in mine {
            assert_same(&arrays, &theirs[&step], &format!("{who}, {step}"));
        }
    }

    /// The rows that evaluations judged, by step.
    pub fn eval_rows(&self) -> BTreeMap<u64, Vec<EvalRow>> {
        let steps = eval_rows::steps(&self.dir).expect("a folder").into_iter();
        steps.map(|step| (step, eval_rows::read(&self.dir, step).expect("rows"))).collect()
    }

    /// The groups of `rollouts.h5` by name.
    pub fn rollouts(&self) -> BTreeMap<String, Arrays> {
        arrays::read(&self.dir.join("rollouts.h5"))
    }
}

impl Running {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn is_over(&mut self) -> bool {
        self.child.try_wait().expect("our own child").is_some()
    }

    /// Waits until `seen`, or the end of the run.
    pub fn wait_until(&mut self, mut seen: impl FnMut() -> bool) {
        while !seen() && !self.is_over() {
            assert!(self.since.elapsed() < LIMIT, "waited too long");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The processes that mpirun started (or this one, without mpirun).
    pub fn ranks(&self) -> Vec<u32> {
        let path = format!("/proc/{0}/task/{0}/children", self.pid());
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let children: Vec<u32> = text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect();
        if children.is_empty() { vec![self.pid()] } else { children }
    }
}

/// Sends a signal; false where the process is gone.
pub fn signal(name: &str, pid: u32) -> bool {
    let sent = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).stderr(Stdio::null()).status();
    sent.is_ok_and(|status| status.success())
}

/// Whether a process is ours and has a handler for SIGUSR1: before it becomes ours, a child of mpirun has mpirun's.
pub fn listens(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    if !status.starts_with("Name:\trlhf-hpc\n") {
        return false;
    }
    let caught = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigCgt:")?.trim(), 16).ok());
    caught.is_some_and(|signals| signals >> (10 - 1) & 1 == 1)
}
