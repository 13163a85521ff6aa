//! A folder with a corpus, its tokenizer, a model and shards, for one test to change.

use super::command;
use crate::process::Ended;
use crate::resume::job::place;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Two steps of PPO that end within a second.
const JOB: &str = r#"
[job]
kind = "ppo"
dir = "run"
seed = 5
steps = 2
threads = 1
[model]
actor = "model"
[data]
prompts = ["questions"]
prompt_split = "train"
eval_split = "eval"
label_key = "answer"
prompt_tokens_max = 32
[rollout]
prompts_per_step = 4
response_tokens_max = 4
[reward]
rule = "exact"
[ppo]
minibatch_samples = 4
[eval]
every_steps = 2
samples_max = 4
[checkpoint]
every_steps = 1
"#;

pub struct Fixture {
    dir: TempDir,
}

impl Fixture {
    pub fn new() -> Self {
        let fixture = Self { dir: tempfile::tempdir().expect("a folder for the test") };
        let made = "model tokenizer config.json rows.jsonl questions.* demonstrations.*";
        command::copy(place(), made, fixture.root());
        fixture.write("job.toml", JOB);
        fixture
    }

    pub fn root(&self) -> &Path {
        self.dir.path()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("it lies in the fixture")).expect("a folder");
        fs::write(path, bytes).expect("a file");
    }

    /// Copies the files of a folder into another one, whose other files stay.
    pub fn copy(&self, from: &str, to: &str) {
        command::copy(self.root(), &format!("{from}/."), &self.path(to));
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    pub fn text(&self, name: &str) -> String {
        String::from_utf8(self.read(name)).expect("text")
    }

    /// Changes a JSON file.
    pub fn edit(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let mut value = serde_json::from_slice(&self.read(name)).expect("JSON");
        change(&mut value);
        self.write(name, value.to_string());
    }

    /// Every file below a folder of the fixture, with its contents.
    pub fn files(&self, name: &str) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut files = Vec::new();
        collect(self.root(), &self.path(name), &mut files);
        files.into_iter().collect()
    }

    /// The program in this folder.
    pub fn run(&self, arguments: &[&str]) -> Ended {
        command::run(self.root(), arguments)
    }

    /// The fixture's job with overrides.
    pub fn job(&self, overrides: &[&str]) -> Ended {
        self.run(&[&["run", "job.toml"], overrides].concat())
    }

    /// The fixture's job with overrides, refused before any step: nothing was recorded or saved.
    #[track_caller]
    pub fn refuses(&self, code: i32, overrides: &[&str], words: &[&str]) -> Ended {
        let ended = self.job(overrides).refused(code, words);
        self.untouched();
        ended
    }

    /// No step was recorded and no checkpoint saved.
    #[track_caller]
    pub fn untouched(&self) {
        assert!(!self.path("run/checkpoints/step-1").exists(), "a checkpoint was saved");
        assert!(
            !self.path("run/metrics.jsonl").exists() || self.text("run/metrics.jsonl").is_empty(),
            "a step was run"
        );
    }

    /// `rows` as a JSONL file.
    pub fn jsonl(&self, name: &str, rows: &[Value]) {
        self.write(name, rows.iter().map(Value::to_string).collect::<Vec<_>>().join("\n") + "\n");
    }
}

fn collect(root: &Path, dir: &Path, files: &mut Vec<(PathBuf, Vec<u8>)>) {
    for entry in fs::read_dir(dir).expect("a folder").flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(root, &path, files);
        } else {
            let name = path.strip_prefix(root).expect("it lies below").to_path_buf();
            files.push((name, fs::read(&path).expect("a file")));
        }
    }
}
