//! `eval/step-N.jsonl`: the held-out rows of the evaluation after step N, one line each. A line of preferences or steps
//! has the fields of the data, so it can also be used as a training row. A line of prompts has the answers to one
//! prompt.

use super::rollouts::{excess, remove, steps_in};
use crate::error::{Error, Result};
use crate::experience::{Spans, marked};
use crate::sys::files;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::borrow::Cow;
use std::path::{Path, PathBuf};

/// A held-out row, and the model's result for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalRow {
    /// The step after which it was evaluated.
    pub step: u64,
    /// Identity of the row over the whole run.
    pub row: u64,
    /// The prompt. For labeled steps the whole text.
    pub prompt: String,
    #[serde(flatten)]
    pub responses: EvalResponses,
    /// Chosen minus rejected reward. For a labeled response: the distance of its reward from beta times the KL,
    /// positive on the side of its label. For steps: the smallest lead of the target token's probability over all
    /// others. For answers: their mean score minus `eval.correct_at`.
    pub margin: f64,
    /// Whether the margin is above 0. For steps, whether all are right. For answers, whether the greedy one is.
    pub correct: bool,
}

/// An answer to a prompt, and its scores.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalAnswer {
    pub response: String,
    pub score: f32,
    pub tokens: usize,
    /// The sampling temperature; 0 for the greedy answer.
    pub temperature: f32,
    /// The parts of the response that an environment wrote.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub environment: Spans,
}

/// Responses with their rewards. For a reward model these are scores. For a policy: beta times the log-ratio to its
/// reference, or the reward that its loss defines. For a step: the probability of the first reward token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum EvalResponses {
    Pair {
        chosen: String,
        rejected: String,
        chosen_reward: f64,
        rejected_reward: f64,
    },
    Labelled {
        response: String,
        label: bool,
        reward: f64,
    },
    Steps {
        steps: Vec<String>,
        labels: Vec<Value>,
        rewards: Vec<f64>,
    },
    /// Answers to a prompt of a set of `data.eval_sets`, or of the eval split ("").
    Answers {
        set: String,
        label: String,
        answers: Vec<EvalAnswer>,
    },
}

impl EvalResponses {
    /// The name, text and reward of each response. The text of an environment is marked.
    pub fn list(&self) -> Vec<(Cow<'static, str>, Cow<'_, str>, f64)> {
        match self {
            Self::Pair { chosen, rejected, chosen_reward, rejected_reward } => {
                vec![
                    ("chosen".into(), chosen.into(), *chosen_reward),
                    ("rejected".into(), rejected.into(), *rejected_reward),
                ]
            }
            Self::Labelled { response, label, reward } => {
                vec![(if *label { "desirable" } else { "undesirable" }.into(), response.into(), *reward)]
            }
            Self::Steps { steps, labels, rewards } => {
                let name = |label: &Value| match label {
                    Value::String(text) => Cow::from(format!("label {text}")),
                    p => Cow::from(format!("label {p}")),
                };
                let named = labels.iter().map(name).zip(steps).zip(rewards);
                named.map(|((name, step), reward)| (name, step.into(), *reward)).collect()
            }
            Self::Answers { answers, .. } => {
                let name = |answer: &EvalAnswer| if answer.temperature == 0.0 { "greedy" } else { "sampled" }.into();
                let list = answers.iter().map(|answer| {
                    let text = marked(&answer.response, &answer.environment);
                    (name(answer), text, answer.score.into())
                });
                list.collect()
            }
        }
    }
}

impl EvalRow {
    /// The prompt, if the responses do not contain it.
    pub fn question(&self) -> Option<&str> {
        (!matches!(self.responses, EvalResponses::Steps { .. })).then_some(&self.prompt)
    }
}

fn path_of(run_dir: &Path, step: u64) -> PathBuf {
    run_dir.join("eval").join(format!("step-{step}.jsonl"))
}

/// The steps whose evaluations are recorded, ascending.
pub fn steps(run_dir: &Path) -> Result<Vec<u64>> {
    steps_in(&run_dir.join("eval"), ".jsonl")
}

/// The rows of the evaluation after `step`, in the order of the data.
pub fn read(run_dir: &Path, step: u64) -> Result<Vec<EvalRow>> {
    let path = path_of(run_dir, step);
    let text = files::read_to_string(&path).map_err(|e| Error::io("read", &path, &e))?;
    let row = |line: &str| serde_json::from_str(line).map_err(|e| Error::data(format!("{}: {e}", path.display())));
    text.lines().map(row).collect()
}

/// Records the rows of an evaluation, and keeps the last `keep_last` of them (0: all).
pub(super) fn write(run_dir: &Path, step: u64, rows: &[EvalRow], keep_last: usize) -> Result<()> {
    let path = path_of(run_dir, step);
    files::create_dir_all(files::parent(&path))?;
    let lines: String = rows.iter().map(|row| serde_json::to_string(row).expect("texts and numbers") + "\n").collect();
    files::write_atomic(&path, lines.as_bytes())?;
    let steps = steps(run_dir)?;
    remove(steps[..excess(steps.len(), keep_last)].iter().map(|step| path_of(run_dir, *step)))
}

/// Removes the records after `step` and all but the last `keep_last` others (0: none), and partial files of a killed
/// writer.
pub(super) fn cut_back(run_dir: &Path, step: u64, keep_last: usize) -> Result<()> {
    let folder = run_dir.join("eval");
    if folder.is_dir() {
        files::remove_partial(&folder)?;
    }
    let steps = steps(run_dir)?;
    let (kept, late) = steps.split_at(steps.partition_point(|at| *at <= step));
    let old = &kept[..excess(kept.len(), keep_last)];
    remove(old.iter().chain(late).map(|step| path_of(run_dir, *step)))
}
