//! `[reward]`: the sources of scores.
//!
//! Each source can be a short name, a table, or a list of either. Sources are combined by weight:
//!
//! ```toml
//! [reward]
//! rule = "number"
//! python = { file = "style.py", weight = 0.5 }
//! ```

use std::path::{Path, PathBuf};

use serde::de::{DeserializeOwned, Deserializer, Error as _, IntoDeserializer, Unexpected};
use serde::{Deserialize, Serialize};
use toml::Value;

use super::forms::word_or_table;
use super::limits::{self, ABOVE_0, YEAR_S};
use crate::error::Error;
use crate::url::Url;

table! {
    /// `[reward]`. At least one source is needed by jobs that roll out.
    pub struct RewardConfig {
        #[serde(deserialize_with = "one_or_many")]
        pub rule: Vec<RuleConfig> = Vec::new(),
        #[serde(deserialize_with = "one_or_many")]
        pub python: Vec<PythonConfig> = Vec::new(),
        #[serde(deserialize_with = "one_or_many")]
        pub http: Vec<HttpConfig> = Vec::new(),
        #[serde(deserialize_with = "one_or_many")]
        pub models: Vec<ModelRewardConfig> = Vec::new(),
        #[serde(deserialize_with = "one_or_many")]
        pub judge: Vec<JudgeConfig> = Vec::new(),
        #[serde(deserialize_with = "one_or_many")]
        pub environment: Vec<EnvironmentConfig> = Vec::new(),
        pub workers: usize = 1 => 1.0..=limits::THREADS_MAX as f64,
        pub timeout_s: f64 = 60.0 => ABOVE_0..=YEAR_S,
        pub start_timeout_s: f64 = 300.0 => ABOVE_0..=YEAR_S,
        pub retries: u32 = 2 => 0.0..=1000.0,
        pub on_failure: OnFailure = OnFailure::Stop,
    }
}

impl RewardConfig {
    /// The number of rewards that are added up.
    pub fn sources(&self) -> usize {
        let others = self.models.len() + self.judge.len() + self.environment.len();
        self.rule.len() + self.python.len() + self.http.len() + others
    }

    /// Whether the job names any reward.
    pub fn is_set(&self) -> bool {
        self.sources() > 0
    }

    /// Whether models of the job score.
    pub fn has_models(&self) -> bool {
        !self.models.is_empty() || !self.judge.is_empty()
    }

    /// Whether Python files score or answer turns.
    pub fn has_python(&self) -> bool {
        !self.python.is_empty() || self.environment.iter().any(|environment| !environment.python.is_empty())
    }

    /// Whether a reward gets all responses of a rank in one call, so that its scores may depend on which ones these
    /// are.
    pub fn compares_all(&self) -> bool {
        self.python.iter().map(|python| python.batch).chain(self.http.iter().map(|http| http.batch)).any(|n| n == 0)
    }

    /// Rejects a job without a reward, and numbers out of range.
    pub fn check(&self) -> crate::error::Result<()> {
        if self.sources() == 0 {
            return Err(Error::usage("no reward is set").hint(
                "set reward.rule = \"exact\" (or number, regex, format, length), reward.python = \"reward.py\", \
                 reward.http = \"http://HOST:PORT/PATH\", reward.models = \"DIR\", reward.judge = \"DIR\" or \
                 reward.environment = \"environment.py\"",
            ));
        }
        for model in &self.models {
            Error::need(
                !model.dir.as_os_str().is_empty(),
                "reward.models: dir must be a directory (got an empty string)",
            )?;
        }
        limits::check("reward", self)?;
        self.python.iter().try_for_each(|python| limits::check("reward.python", python))?;
        self.http.iter().try_for_each(|http| check_urls("reward.http", &http.url))?;
        self.http.iter().try_for_each(|http| limits::check("reward.http", http))?;
        self.judge.iter().try_for_each(JudgeConfig::check)?;
        Error::need(self.environment.len() <= 1, "a job can have at most 1 reward.environment")?;
        self.environment.iter().try_for_each(EnvironmentConfig::check)?;
        let weights = self.rule.iter().map(|r| r.weight).chain(self.python.iter().map(|p| p.weight));
        let weights = weights.chain(self.http.iter().map(|h| h.weight)).chain(self.models.iter().map(|m| m.weight));
        let weights = weights.chain(self.judge.iter().map(|j| j.weight));
        let weights = weights.chain(self.environment.iter().map(|e| e.weight));
        Error::need(weights.clone().all(f32::is_finite), "the weight of a reward must be a finite number")?;
        Error::need(weights.clone().any(|w| w != 0.0), "at least one reward must have a weight other than 0")
    }
}

/// The treatment of a response for which a function or service fails, after all retries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnFailure {
    /// The run ends; the same command resumes it.
    #[default]
    Stop,
    /// The response is not trained on.
    Drop,
}

/// The criterion of a rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RuleKind {
    /// The answer equals the label.
    #[default]
    Exact,
    /// The last number of the answer equals the last number of the label.
    Number,
    /// `pattern` is found in the answer.
    Regex,
    /// `pattern` matches the whole answer.
    Format,
    /// The response has `tokens_min` to `tokens_max` tokens.
    Length,
}

table! {
    /// One rule.
    #[schemars(transform = word_or_table("kind", &[]))]
    pub struct RuleConfig {
        pub kind: RuleKind = RuleKind::Exact,
        pub name: String = String::new(),
        pub weight: f32 = 1.0,
        pub right: f32 = 1.0,
        pub wrong: f32 = 0.0,
        pub extract: String = String::new(),
        pub pattern: String = String::new(),
        pub strip: bool = true,
        pub ignore_case: bool = false,
        pub tolerance: f64 = 1e-6,
        pub tokens_min: usize = 0,
        pub tokens_max: usize = 1_000_000_000,
        pub tokens_slack: usize = 0,
    }
}

table! {
    /// One Python file.
    #[schemars(transform = word_or_table("file", &["file"]))]
    pub struct PythonConfig {
        pub file: String = String::new(),
        pub function: String = String::new(),
        pub name: String = String::new(),
        pub weight: f32 = 1.0,
        pub interpreter: String = "python3".to_string(),
        pub label_argument: String = String::new(),
        pub batch: usize = 1 => 0.0..=limits::SAMPLES,
        pub pass_env: Vec<String> = Vec::new(),
        pub gpu: bool = false,
        pub memory_max_gib: f64 = 64.0 => 0.0..=1e6,
    }
}

table! {
    /// One reward service, on one or several servers.
    #[schemars(transform = word_or_table("url", &["url"]))]
    pub struct HttpConfig {
        #[serde(deserialize_with = "one_or_many")]
        pub url: Vec<Url> = Vec::new(),
        #[serde(deserialize_with = "one_or_many")]
        pub header_env: Vec<String> = Vec::new(),
        pub name: String = String::new(),
        pub weight: f32 = 1.0,
        pub batch: usize = 1 => 0.0..=limits::SAMPLES,
        pub logprobs: bool = false,
    }
}

table! {
    /// An environment, in a Python file or on servers, which replies to the turns of a response and rewards them.
    #[schemars(transform = word_or_table("python", &[]))]
    pub struct EnvironmentConfig {
        #[serde(deserialize_with = "one_or_many")]
        pub python: Vec<PythonConfig> = Vec::new(),
        #[serde(deserialize_with = "one_or_many")]
        pub http: Vec<Url> = Vec::new(),
        #[serde(deserialize_with = "one_or_many")]
        pub header_env: Vec<String> = Vec::new(),
        pub turns_max: u32 = 8 => 1.0..=1e6,
        pub name: String = String::new(),
        pub weight: f32 = 1.0,
    }
}

impl EnvironmentConfig {
    fn check(&self) -> crate::error::Result<()> {
        limits::check("reward.environment", self)?;
        self.python.iter().try_for_each(|python| limits::check("reward.environment.python", python))?;
        let is_one = self.python.len() == 1 && self.http.is_empty() || self.python.is_empty() && !self.http.is_empty();
        Error::need(is_one, "reward.environment needs either one Python file (python) or servers (http)")?;
        let needs_server = self.header_env.is_empty() || !self.http.is_empty();
        Error::need(needs_server, "reward.environment.header_env is only for servers (http)")?;
        if self.http.is_empty() { Ok(()) } else { check_urls("reward.environment.http", &self.http) }
    }
}

impl FromWord for EnvironmentConfig {
    const EXPECTED: &'static str = "the path of a Python file, or a URL";
    fn from_word(word: &str) -> Option<Self> {
        if word.starts_with("http://") || word.starts_with("https://") {
            return Some(Self { http: vec![Url::new(word)], ..Self::default() });
        }
        Some(Self { python: vec![PythonConfig::from_word(word)?], ..Self::default() })
    }
}

/// The meaning of a short name instead of a table.
pub(super) trait FromWord: Sized {
    const EXPECTED: &'static str;
    fn from_word(word: &str) -> Option<Self>;
}

impl FromWord for RuleConfig {
    const EXPECTED: &'static str = "exact | number | regex | format | length";
    fn from_word(word: &str) -> Option<Self> {
        let kind: Result<_, serde::de::value::Error> = RuleKind::deserialize(word.into_deserializer());
        Some(Self { kind: kind.ok()?, ..Self::default() })
    }
}

table! {
    /// One reward model.
    #[schemars(transform = word_or_table("dir", &[]))]
    pub struct ModelRewardConfig {
        pub dir: PathBuf = PathBuf::new(),
        pub name: String = String::new(),
        pub weight: f32 = 1.0,
        pub normalize: bool = false,
    }
}

impl ModelRewardConfig {
    /// The given name, or else the name of the directory or of the run that exported it; `i` is the index.
    pub fn name(&self, i: usize) -> String {
        named(&self.name, &self.dir, i)
    }
}

fn named(name: &str, dir: &Path, i: usize) -> String {
    let mut names = dir.iter().rev().map(|name| name.to_string_lossy().into_owned());
    let of_dir = names.find(|name| name != "export").unwrap_or_else(|| "model".to_string());
    match (name, i) {
        ("", 0) => of_dir,
        ("", i) => format!("{of_dir}_{}", i + 1),
        (given, _) => given.to_string(),
    }
}

const JUDGE_PROMPT: &str = "Question:\n{prompt}\n\nAnswer:\n{response}\n\n\
     How good is the answer, from 0 to 10? End with \"Score: \" and the number.\n";

table! {
    /// One judge: a generative model that answers `prompt`; `pattern` finds its score in the answer.
    #[schemars(transform = word_or_table("dir", &[]))]
    pub struct JudgeConfig {
        pub dir: PathBuf = PathBuf::new(),
        pub prompt: String = JUDGE_PROMPT.to_string(),
        pub chat_template: bool = false,
        pub pattern: String = r"(?i)score:\s*(-?[0-9]+(?:\.[0-9]+)?)".to_string(),
        pub tokens_max: usize = 256 => 1.0..=limits::TOKENS,
        pub name: String = String::new(),
        pub weight: f32 = 1.0,
    }
}

impl JudgeConfig {
    /// The name, by the rule for reward models.
    pub fn name(&self, i: usize) -> String {
        named(&self.name, &self.dir, i)
    }

    fn check(&self) -> crate::error::Result<()> {
        limits::check("reward.judge", self)?;
        Error::need(!self.dir.as_os_str().is_empty(), "reward.judge: dir must be a directory (got an empty string)")?;
        let has_response = self.prompt.contains("{response}");
        Error::need(has_response, "reward.judge: prompt must contain {response}, the text to judge")?;
        regex::Regex::new(&self.pattern)
            .map(|_| ())
            .map_err(|e| Error::usage(format!("reward.judge: pattern must be a regular expression: {e}")))
    }
}

impl FromWord for JudgeConfig {
    const EXPECTED: &'static str = "the directory of a language model";
    fn from_word(word: &str) -> Option<Self> {
        Some(Self { dir: word.into(), ..Self::default() })
    }
}

impl FromWord for ModelRewardConfig {
    const EXPECTED: &'static str = "the directory of a reward model";
    fn from_word(word: &str) -> Option<Self> {
        Some(Self { dir: word.into(), ..Self::default() })
    }
}

impl FromWord for PythonConfig {
    const EXPECTED: &'static str = "the path of a Python file";
    fn from_word(word: &str) -> Option<Self> {
        Some(Self { file: word.to_string(), ..Self::default() })
    }
}

fn check_urls(key: &str, urls: &[Url]) -> crate::error::Result<()> {
    Error::need(!urls.is_empty(), format!("{key} must have a url, http://HOST:PORT/PATH"))?;
    for url in urls {
        if url.is_redacted() {
            let message = format!("{key} = \"{url}\" has *** in place of a secret");
            let hint = "write the URL with its secret, or let header_env name an environment variable with a header";
            return Err(Error::usage(message).hint(hint));
        }
        let parsed = url.with_secrets().parse::<ureq::http::Uri>();
        let why = match &parsed {
            Err(e) => format!(" ({e})"),
            Ok(uri) => match (uri.scheme_str(), uri.host()) {
                (Some("http" | "https"), Some(host)) if !host.is_empty() => continue,
                _ => String::new(),
            },
        };
        let message = format!("{key} = \"{url}\" is not a URL{why}");
        return Err(Error::usage(message).hint("write it as http://HOST:PORT/PATH"));
    }
    Ok(())
}

impl FromWord for HttpConfig {
    const EXPECTED: &'static str = "a URL";
    fn from_word(word: &str) -> Option<Self> {
        Some(Self { url: vec![Url::new(word)], ..Self::default() })
    }
}

impl FromWord for Url {
    const EXPECTED: &'static str = "a URL";
    fn from_word(word: &str) -> Option<Self> {
        Some(Self::new(word))
    }
}

impl FromWord for String {
    const EXPECTED: &'static str = "a string";
    fn from_word(word: &str) -> Option<Self> {
        Some(word.to_string())
    }
}

/// Deserializes a name, a table, or a list of either.
pub(super) fn one_or_many<'de, T: FromWord + DeserializeOwned, D: Deserializer<'de>>(
    from: D,
) -> Result<Vec<T>, D::Error> {
    let one = |value: Value| {
        let found = match &value {
            Value::String(word) => {
                let unknown = || D::Error::custom(format!("unknown value \"{word}\", expected {}", T::EXPECTED));
                return T::from_word(word).ok_or_else(unknown);
            }
            Value::Integer(n) => Unexpected::Signed(*n),
            Value::Float(x) => Unexpected::Float(*x),
            Value::Boolean(is) => Unexpected::Bool(*is),
            Value::Array(_) => Unexpected::Seq,
            _ => return T::deserialize(value).map_err(|e| D::Error::custom(e.message())),
        };
        Err(D::Error::invalid_type(found, &&*format!("{}, a table, or a list of them", T::EXPECTED)))
    };
    let all = match Value::deserialize(from)? {
        Value::Array(all) => all,
        alone => vec![alone],
    };
    all.into_iter().map(one).collect()
}
