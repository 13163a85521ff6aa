//! An environment. It answers each turn of a response with text to append, or ends the response, and rewards it. It is
//! a user's Python file, or servers: POST `{"round", "episode", "prompt", "label", "source", "prompt_id", "sample",
//! "row", "turns", "turns_max"}`. The reply is `{"feedback", "reward", "done"}`, with optional `images` of the feedback and
//! `extra` for the logs.
//! `turns` holds all turns of the response so far, so an environment can replay them and needs no memory of earlier
//! ones.

pub use super::feedback::Feedback;
use super::http;
use super::pool::{self, Output, Pool, Worker, reply_bytes_max, rows_of};
use super::python::{self, PythonWorker};
use super::reply::{parse, printable};
use super::{RewardContext, RewardOutput, feedback::Appended, feedback::Texts};
use crate::config::reward::{EnvironmentConfig, RewardConfig};
use crate::error::Result;
use crate::experience::{Episode, Image, Prompt, RowFields};
use crate::images::FILE_BYTES_MAX;
use crate::sys::trace::Category;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// The turns of a response so far. The last one has no answer yet.
#[derive(Debug)]
pub struct Turns {
    /// Identifies a phase of a run. An episode keeps its number within a phase.
    pub round: u64,
    pub episode: usize,
    pub prompt: Prompt,
    pub sample: u32,
    pub turns: Vec<Turn>,
    pub turns_max: u32,
}

#[derive(Clone, Debug, Serialize)]
pub struct Turn {
    /// The text without special tokens.
    pub text: String,
    pub tokens: Vec<u32>,
    pub finish: &'static str,
    /// The text that was appended after it. `None` if it has no answer yet.
    pub feedback: Option<String>,
}

/// The answer of an environment to a turn.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Reply {
    #[serde(default, deserialize_with = "or_default")]
    pub feedback: Feedback,
    /// The images of its parts that have none of their own.
    #[serde(default, alias = "image", deserialize_with = "one_or_more")]
    images: Vec<Value>,
    #[serde(default)]
    pub reward: Option<f64>,
    #[serde(default, deserialize_with = "or_default")]
    pub done: bool,
    #[serde(default, deserialize_with = "or_default")]
    extra: BTreeMap<String, Option<f64>>,
    /// An error, which a server may send instead of everything else.
    error: Option<Value>,
    /// The tokens to append, unless the response ends with this turn, and the images among them.
    #[serde(skip)]
    pub tokens: Vec<u32>,
    #[serde(skip)]
    pub seen: Vec<Image>,
    /// The reason why there is no answer.
    #[serde(skip)]
    pub failed: Option<String>,
}

/// Deserializes null like an absent field.
fn or_default<'de, T: Default + Deserialize<'de>, D: Deserializer<'de>>(from: D) -> std::result::Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// Deserializes a list, or one value like a list of it.
fn one_or_more<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Vec<Value>, D::Error> {
    Ok(match Value::deserialize(from)? {
        Value::Null => Vec::new(),
        Value::Array(all) => all,
        one => vec![one],
    })
}

impl Reply {
    pub fn extra(&self) -> BTreeMap<String, f32> {
        let numbers = self.extra.iter().filter_map(|(name, x)| Some((name.clone(), (*x)? as f32)));
        numbers.filter(|(_, x)| x.is_finite()).collect()
    }
}

impl Output for Reply {
    const CATEGORY: Category = Category::Environment;

    fn failed(why: &str) -> Self {
        Self { failed: Some(why.to_string()), ..Self::default() }
    }
}

#[derive(Debug)]
pub struct Environment {
    pool: Pool<Turns, Reply>,
    asked: Vec<Option<Arc<Turns>>>,
    pub turns_max: u32,
}

impl Turns {
    /// Whether the response ends with `reply`.
    pub fn ends_with(&self, reply: &Reply) -> bool {
        reply.done || self.turns.len() >= self.turns_max as usize
    }
}

impl Environment {
    /// Starts the environment, to check that it can be used. Paths are relative to `base_dir`.
    pub fn new(
        reward: &RewardConfig,
        config: &EnvironmentConfig,
        base_dir: &Path,
        context: &RewardContext,
    ) -> Result<Self> {
        let pool = if let [python] = &config.python[..] {
            let (name, file, workers) = python::workers(reward, python, true, base_dir, context)?;
            let reader = Reader::new(context, file.parent().unwrap_or(base_dir));
            let workers = workers.into_iter().map(|worker| PythonEnvironment(worker, reader.clone())).collect();
            Pool::new(reward, format!("environment {name} of {}", file.display()), 1, workers)?
        } else {
            let (key, headers) = ("reward.environment", &config.header_env);
            let workers = http::workers(reward, key, &config.http, headers, context)?;
            let reader = Reader::new(context, base_dir);
            let workers = workers.into_iter().map(|worker| HttpEnvironment(worker, reader.clone())).collect();
            Pool::new(reward, "environment".to_string(), 1, workers)?
        };
        Ok(Self { pool, asked: Vec::new(), turns_max: config.turns_max })
    }

    /// Sends a turn without waiting, and returns its position.
    pub fn push(&mut self, turns: Turns) -> usize {
        let place = self.asked.len();
        self.asked.push(Some(Arc::new(turns)));
        self.pool.expect(place..place + 1);
        self.pool.push(place, &self.asked);
        self.asked[place] = None;
        place
    }

    /// Returns the answers since the last call, with their positions. Waits for the first one until `until`.
    ///
    /// # Errors
    /// `Service` if it failed after its retries and `reward.on_failure` is stop.
    pub fn arrived(&mut self, until: Instant) -> Result<Vec<(usize, Reply)>> {
        self.pool.arrived(until)
    }

    /// Drops all turns.
    pub fn cancel(&mut self) {
        self.asked.clear();
        self.pool.cancel();
    }
}

/// The score of a response, from the rewards of its environment.
pub fn output(episode: Option<&Episode>) -> RewardOutput {
    let Some(Episode { reward, turns, extra, failed, .. }) = episode else {
        return RewardOutput::failed("the environment did not answer the response");
    };
    let mut extra = extra.clone();
    extra.insert("turns".to_string(), *turns as f32);
    let score = failed.is_none().then_some(*reward as f32);
    RewardOutput { score, extra, failed: failed.clone() }
}

fn request(asked: &Turns, row: &RowFields) -> Map<String, Value> {
    let Turns { round, episode, prompt, sample, turns, turns_max } = asked;
    let request = json!({
        "round": round,
        "episode": episode,
        "prompt": prompt.text,
        "label": prompt.label,
        "source": prompt.source,
        "prompt_id": prompt.id,
        "sample": sample,
        "row": row,
        "turns": turns,
        "turns_max": turns_max,
    });
    request.as_object().cloned().unwrap_or_default()
}

/// Reads answers.
#[derive(Clone)]
struct Reader {
    texts: Option<Arc<Texts>>,
    /// The folder from which the paths of images start.
    folder: PathBuf,
}

impl Reader {
    fn new(context: &RewardContext, folder: &Path) -> Self {
        Self { texts: context.texts.clone(), folder: folder.to_owned() }
    }

    /// The maximum bytes of an answer, which may have an image in base64.
    fn bytes_max(&self) -> usize {
        let sees = self.texts.as_ref().is_some_and(|texts| texts.blind.is_none());
        reply_bytes_max(1) + if sees { FILE_BYTES_MAX / 3 * 4 } else { 0 }
    }

    /// Checks the whole answer before any of it is used, and tokenizes its feedback.
    fn reply(&self, bytes: &[u8], asked: &Turns) -> std::result::Result<Reply, String> {
        let mut reply: Reply = parse(bytes)?;
        if let Some(error) = &reply.error {
            return Err(printable(error.as_str().unwrap_or("an error")));
        }
        if let Some(reward) = reply.reward.filter(|reward| !(*reward as f32).is_finite()) {
            return Err(format!("the reward is out of the range of f32 ({reward:e})"));
        }
        if let (Some(texts), false) = (&self.texts, asked.ends_with(&reply)) {
            let last = asked.turns.last().map_or(&[][..], |turn| &turn.tokens);
            let Appended { tokens, images, text } = texts.append(&reply.feedback, &reply.images, last, &self.folder)?;
            (reply.tokens, reply.seen, reply.feedback) = (tokens, images, Feedback::Text(text));
        }
        Ok(reply)
    }
}

struct PythonEnvironment(PythonWorker, Reader);

impl Worker for PythonEnvironment {
    type Asked = Turns;
    type Output = Reply;

    fn ask(&mut self, asked: &[Arc<Turns>], given_up: &AtomicBool) -> pool::Answer<Reply> {
        self.ask_all(&[asked], given_up).remove(0)
    }

    fn together(&self) -> usize {
        self.0.together()
    }

    /// Each request has one turn.
    fn ask_all(&mut self, requests: &[&[Arc<Turns>]], given_up: &AtomicBool) -> Vec<pool::Answer<Reply>> {
        let asked: Vec<&Turns> = requests.iter().map(|asked| &*asked[0]).collect();
        let rows = match rows_of(self.0.rows(), asked.iter().map(|one| &one.prompt)) {
            Ok(rows) => rows,
            Err(why) => return vec![Err(why.into()); requests.len()],
        };
        let bodies = asked.iter().zip(&rows).map(|(one, row)| request(one, row)).collect();
        let read = |i: usize, line: &[u8]| Ok(vec![self.1.reply(line, asked[i])?]);
        self.0.exchange(bodies, self.1.bytes_max(), "answering a turn", given_up, &read)
    }
}

struct HttpEnvironment(http::HttpWorker, Reader);

impl Worker for HttpEnvironment {
    type Asked = Turns;
    type Output = Reply;

    fn ask(&mut self, asked: &[Arc<Turns>], _: &AtomicBool) -> pool::Answer<Reply> {
        let rows = rows_of(self.0.rows.as_ref(), asked.iter().map(|one| &one.prompt))?;
        let mut answer = |(one, row)| {
            let body = Value::from(request(one, row)).to_string().into_bytes();
            self.0.exchange(&body, self.1.bytes_max(), |bytes| self.1.reply(bytes, one))
        };
        asked.iter().map(|one| &**one).zip(&rows).map(&mut answer).collect()
    }
}
