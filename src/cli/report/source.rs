//! The contents of a run directory, read for a page. Missing or damaged parts are left out, and the page names them.

use super::waits::StepWaits;
use crate::config;
use crate::data::Ledger;
use crate::error::{Error, Result};
use crate::metrics::adapter_ratios::AdapterRatios;
use crate::metrics::keys::{self, Unit};
use crate::metrics::traced::TracedStep;
use crate::metrics::{Line, jsonl, recorded, trace};
use crate::sys::files;
use crate::text::Tokenizer;
use crate::url::redacted;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use toml::Value;

/// The traces of a run on a page.
const TRACES_MAX: usize = 3;

pub struct Source {
    /// The job's name, or the directory's.
    pub name: String,
    pub dir: PathBuf,
    /// The values of `config.resolved.toml`, by paths such as `job.kind`.
    pub config: BTreeMap<String, String>,
    pub lines: Vec<Line>,
    /// The steps and values of each key.
    points: BTreeMap<String, Vec<(f64, f64)>>,
    pub ledger: Option<Ledger>,
    pub adapters: Option<AdapterRatios>,
    /// The waits of traced steps, ascending.
    pub traced: Vec<StepWaits>,
    /// The recorded steps, ascending.
    pub recorded: Vec<u64>,
    pub tokenizer: Option<Tokenizer>,
    /// The missing parts of the page, and why they are missing.
    pub lacks: Vec<Error>,
}

impl Source {
    pub fn read(dir: &Path) -> Result<Self> {
        if !dir.is_dir() {
            return Err(Error::usage(format!("{} is not a directory", dir.display())).hint("pass the job.dir of a run"));
        }
        let metrics = dir.join("metrics.jsonl");
        if !metrics.exists() {
            return Err(Error::data(format!("{} has no metrics.jsonl", dir.display())).hint("pass a run directory"));
        }
        let lines = jsonl::lines(&metrics)?;
        if lines.is_empty() {
            return Err(Error::data(format!("{} is still empty", metrics.display()))
                .hint("wait for the first step to end: each step adds a line"));
        }
        let (dir, lacks) = (dir.to_owned(), Vec::new());
        let mut source = Self {
            name: String::new(),
            config: BTreeMap::new(),
            points: points_of(&lines),
            lines,
            ledger: None,
            adapters: None,
            traced: Vec::new(),
            recorded: Vec::new(),
            tokenizer: None,
            lacks,
            dir,
        };
        source.config = source.try_read(settings(&source.dir)).unwrap_or_default();
        let named = source.config.get("job.name").filter(|name| !name.is_empty()).cloned();
        source.name = named.unwrap_or_else(|| name_of(&source.dir));
        source.ledger = source.try_read(ledger(&source.dir)).flatten();
        source.adapters = source.try_read(AdapterRatios::read(&source.dir)).flatten();
        source.traced = source.read_traces();
        source.recorded = source.try_read(recorded::steps(&source.dir)).unwrap_or_default();
        if !source.recorded.is_empty() {
            source.tokenizer = source.try_read(source.find_tokenizer()).flatten();
        }
        Ok(source)
    }

    /// The value, or none and a note on the page.
    pub fn try_read<T>(&mut self, read: Result<T>) -> Option<T> {
        let lacks = &mut self.lacks;
        read.map_err(|e| {
            if !lacks.contains(&e) {
                lacks.push(e);
            }
        })
        .ok()
    }

    /// The last traced steps.
    fn read_traces(&mut self) -> Vec<StepWaits> {
        let all = self.try_read(trace::steps(&self.dir)).unwrap_or_default();
        let last = &all[all.len().saturating_sub(TRACES_MAX)..];
        last.iter()
            .filter_map(|(_, path)| self.try_read(TracedStep::read(path).map(|step| StepWaits::of(&step))))
            .collect()
    }

    /// The tokenizer of the export, or of the model that the run started from.
    fn find_tokenizer(&self) -> Result<Option<Tokenizer>> {
        let began = self.config.get("model.actor").map(PathBuf::from);
        let mut found = [Some(self.dir.join("export")), began].into_iter().flatten().map(|dir| Tokenizer::find(&dir));
        found.find_map(Result::transpose).transpose()
    }

    /// The steps and values of a key, in lines of steps and of evaluations; NaN for a non-finite value.
    pub fn points(&self, key: &str) -> Vec<(f64, f64)> {
        self.points.get(key).cloned().unwrap_or_default()
    }

    pub fn has(&self, key: &str) -> bool {
        self.points.contains_key(key)
    }

    /// The finite values of a key.
    pub fn values(&self, key: &str) -> Vec<f64> {
        self.points(key).into_iter().map(|(_, value)| value).filter(|value| value.is_finite()).collect()
    }

    /// The first step after each restart.
    pub fn restarts(&self) -> Vec<u64> {
        let mut before = 0.0;
        let mut is_new = |line: &&Line| {
            let now = line.get(keys::RESTARTS).unwrap_or(0.0);
            std::mem::replace(&mut before, now) != now
        };
        self.lines.iter().filter(|line| is_new(line)).map(|line| line.step).collect()
    }

    /// The last step.
    pub fn step(&self) -> u64 {
        self.lines.iter().map(|line| line.step).max().unwrap_or(0)
    }
}

fn points_of(lines: &[Line]) -> BTreeMap<String, Vec<(f64, f64)>> {
    let mut all: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for line in lines {
        for (key, value) in &line.values {
            let value = if value.is_finite() { *value } else { f64::NAN };
            all.entry(key.clone()).or_default().push((line.step as f64, value));
        }
    }
    all
}

/// The name of a directory, also of `.`.
fn name_of(dir: &Path) -> String {
    let whole = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    whole.file_name().map_or_else(|| dir.display().to_string(), |name| name.to_string_lossy().into_owned())
}

/// Every path of `config.resolved.toml` with its value.
fn settings(dir: &Path) -> Result<BTreeMap<String, String>> {
    let path = dir.join("config.resolved.toml");
    let text = files::read_to_string(&path).map_err(|e| Error::io("read", &path, &e))?;
    settings_of(&text).map_err(|e| Error::data(e.message()).within(path.display()))
}

pub fn settings_of(text: &str) -> std::result::Result<BTreeMap<String, String>, toml::de::Error> {
    // Runs of earlier versions recorded whole URLs.
    let words = |value: Value| redacted(&value.as_str().map_or_else(|| value.to_string(), str::to_string)).into_owned();
    Ok(config::flat(&text.parse()?).into_iter().map(|(key, value)| (key, words(value))).collect())
}

/// `ledger.json`, which a run writes with its checkpoints.
fn ledger(dir: &Path) -> Result<Option<Ledger>> {
    let path = dir.join("ledger.json");
    if !path.exists() {
        return Ok(None);
    }
    let bytes = files::read(&path).map_err(|e| Error::io("read", &path, &e))?;
    serde_json::from_slice(&bytes).map(Some).map_err(|e| Error::data(format!("{}: {e}", path.display())))
}

/// Names runs that share a name by their directories.
pub fn name_apart(sources: &mut [Source]) {
    let names: Vec<String> = sources.iter().map(|source| source.name.clone()).collect();
    for source in sources.iter_mut().filter(|source| names.iter().filter(|name| **name == source.name).count() > 1) {
        source.name = source.dir.display().to_string();
    }
}

/// Every key in the lines of any run: keys of the metrics table in its order, then others by name.
pub fn keys_of(sources: &[Source]) -> Vec<String> {
    let found: BTreeSet<&str> = sources.iter().flat_map(|source| source.points.keys()).map(String::as_str).collect();
    let mut all: Vec<String> = found.into_iter().map(str::to_owned).collect();
    all.sort_by_key(|key| keys::rank(key));
    all
}

/// Whether a key is a result of an evaluation, not its number of rows or its duration.
pub fn is_result(key: &str) -> bool {
    let unit = super::numbers::unit_of(key);
    keys::is_eval(key) && !matches!(unit, Unit::Count | Unit::Seconds)
}

/// The title of a key such as `eval_accuracy_greedy`, after the name of its set if it has one.
pub fn title_of(key: &str) -> String {
    if let Some((set, number)) = keys::of_set(key) {
        return format!("{set}: {}", title_of(number).to_lowercase());
    }
    let words = key.trim_start_matches("eval_").replace('_', " ").replace("kl ", "KL ");
    let mut chars = words.chars();
    chars.next().map_or(words.clone(), |first| first.to_uppercase().chain(chars).collect())
}
