//! A tokenizer and rows to shard, in a temporary directory.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use rlhf_hpc::comm::Group;
use rlhf_hpc::config::data::DataConfig;
use rlhf_hpc::data::{Hashes, Prepared, PromptSource, Reading, Row, RowKind, RowSource, SftSource, prepare};
use rlhf_hpc::error::Result;
use rlhf_hpc::text::{Tokenizer, train_bpe};
use serde_json::{Value, json};

pub struct Fixture {
    pub dir: tempfile::TempDir,
    pub tokenizer: Arc<Tokenizer>,
}

impl Fixture {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let texts: Vec<String> = (0..200).map(|i| format!("what is the sum of {i} and {}, please?", i * 7)).collect();
        train_bpe(&texts, 300, &dir.path().join("tokenizer"), &[]).unwrap();
        let tokenizer = Arc::new(Tokenizer::load(&dir.path().join("tokenizer")).unwrap());
        Self { dir, tokenizer }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn vocabulary(&self) -> usize {
        self.tokenizer.vocabulary()
    }

    /// Writes `rows` as JSONL and returns the path as a configuration names it.
    pub fn jsonl(&self, name: &str, rows: &[Value]) -> String {
        let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
        self.text(name, &(lines.join("\n") + "\n"))
    }

    pub fn text(&self, name: &str, text: &str) -> String {
        let path = self.path(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    pub fn cache(&self) -> PathBuf {
        self.path("cache")
    }

    pub fn prepared(&self, config: &DataConfig, kind: RowKind) -> Result<Prepared> {
        let reading = Reading { config, kind, tokenizer: &self.tokenizer, vocabulary: self.vocabulary() };
        prepare(reading, &self.cache(), &mut Hashes::default(), &Group::one())
    }

    pub fn prompts(&self, config: &DataConfig, seed: u64) -> Result<PromptSource> {
        self.rows(config, seed)
    }

    pub fn sft(&self, config: &DataConfig, seed: u64) -> Result<SftSource> {
        self.rows(config, seed)
    }

    pub fn rows<T: Row>(&self, config: &DataConfig, seed: u64) -> Result<RowSource<T>> {
        let prepared = self.prepared(config, T::KIND)?;
        RowSource::open(config, &self.tokenizer, self.vocabulary(), &prepared, seed)
    }
}

/// Questions of different lengths with labels and demonstrations.
pub fn questions(n: usize) -> Vec<Value> {
    (0..n)
        .map(|i| {
            json!({
                "prompt": format!("{}what is {i} plus {i}?", "please ".repeat(i % 4)),
                "response": format!("it is {}", 2 * i),
                "answer": 2 * i,
                "split": if i % 5 == 0 { "eval" } else { "train" },
                "hardness": (i * 37) % 101,
            })
        })
        .collect()
}

pub fn config(path: &str) -> DataConfig {
    DataConfig { prompts: vec![path.to_owned()], label_key: "answer".to_owned(), ..DataConfig::default() }
}
