//! The plain nouns that the stations exchange.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::ops::Range;

/// One row of the prompt data, ready for rollout.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Prompt {
    /// Identity of the row over the whole run: its index in the source, stable over epochs and rank counts.
    pub id: u64,
    pub tokens: Vec<u32>,
    /// The prompt as text, as reward functions see it.
    pub text: String,
    /// What the answer is compared with; empty where the data has none.
    pub label: String,
    /// The shard prefix or file that the row came from.
    pub source: String,
}

/// A row of the prompt data as its file has it, for reward functions.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RowFields {
    /// A text, or the messages before the assistant's answer; null where the shard keeps no fields.
    pub prompt: Value,
    /// All other fields.
    pub columns: Map<String, Value>,
}

/// Why a response ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[repr(u8)]
pub enum Finish {
    /// An end-of-sequence or stop token was sampled (it is the response's last token).
    #[default]
    Stop = 0,
    /// `response_tokens_max` or the model's context was reached.
    Length = 1,
    /// A stop string appeared in the text.
    StopString = 2,
}

impl Finish {
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::StopString => "stop_string",
        }
    }
}

/// One sampled continuation of a prompt.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Response {
    /// Index of the prompt in the batch that was rolled out.
    pub prompt: usize,
    /// Number of this sample among the samples of its prompt, from 0.
    pub sample: u32,
    /// The new tokens only, including the end token if one was sampled.
    pub tokens: Vec<u32>,
    /// Log-probability of each token under the plain temperature softmax (l_old).
    pub logprobs: Vec<f32>,
    /// Log-probability of each token under the filtered distribution that it was drawn from; of a beam search, what it added to the sum.
    pub sample_logprobs: Vec<f32>,
    pub finish: Finish,
    /// The new tokens decoded, special tokens skipped.
    pub text: String,
    /// What an environment has added, where the job has one.
    #[serde(default)]
    pub episode: Option<Episode>,
    /// Of a beam search: the sum of the log-probabilities over the length to the power of the length penalty.
    #[serde(skip)]
    pub score: Option<f32>,
    /// Where asked for, the likeliest tokens in the place of each, with the log-probabilities that `logprobs` are of.
    #[serde(skip)]
    pub top_logprobs: Vec<Vec<(u32, f32)>>,
}

impl Response {
    /// 1 for each token that was drawn, 0 for those that an environment wrote.
    pub fn mask(&self) -> Vec<u8> {
        let mut mask = vec![1; self.tokens.len()];
        self.episode.iter().flat_map(|episode| &episode.given).for_each(|given| mask[given.clone()].fill(0));
        mask
    }
}

/// What an environment has made of a response of one or several turns.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Episode {
    pub turns: u32,
    /// Ranges of the response's tokens that the environment wrote. Their log-probabilities at sampling are 0.
    pub given: Vec<Range<usize>>,
    /// Sum over turns.
    pub reward: f64,
    /// Named numbers for the logs; of several turns the last ones.
    pub extra: BTreeMap<String, f32>,
    /// Why it ended early: the environment failed.
    pub failed: Option<String>,
}

/// What is known of the greedy response to a prompt, the baseline of its samples (ReMax, arXiv:2310.10505).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Greedy {
    /// What the reward function returned.
    pub score: f32,
    pub tokens: usize,
    pub finish: Finish,
}

/// Everything that one step learns from, for one sample. Per-token arrays have the response's length.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Experience {
    pub prompt: Prompt,
    pub response: Response,
    /// What the reward function returned.
    pub score: f32,
    /// The score of each reward by its name, before they are added up; without those that abstained.
    pub scores: BTreeMap<String, f32>,
    /// Where the estimator needs it.
    pub greedy: Option<Greedy>,
    pub ref_logprobs: Vec<f32>,
    /// Value of the state before each response token; empty where the estimator has no critic.
    pub values: Vec<f32>,
    /// Value of the state after the last response token: what a cut response is bootstrapped from.
    pub last_value: f32,
    /// Per-token KL estimate against the reference.
    pub kl: Vec<f32>,
    /// Per-token reward: -beta * KL where configured, plus the shaped score at the last token.
    pub rewards: Vec<f32>,
    pub advantages: Vec<f32>,
    pub returns: Vec<f32>,
    /// 1 where the token is learned from.
    pub mask: Vec<u8>,
}

impl Experience {
    /// The index of the prompt in the batch that was rolled out, and the number of the response among its samples.
    pub fn key(&self) -> (usize, u32) {
        (self.response.prompt, self.response.sample)
    }

    /// Prompt and response in one row, as the training forward sees it.
    pub fn tokens(&self) -> Vec<u32> {
        [&self.prompt.tokens[..], &self.response.tokens].concat()
    }

    /// Bytes of it outside of tensors, once all is filled in: of each response token its id, two log-probabilities at sampling,
    /// that of the reference, value, KL, reward, advantage, return and mask.
    pub fn bytes(&self) -> usize {
        self.prompt.tokens.len() * 4 + self.response.tokens.len() * (9 * 4 + 1)
    }

    /// Tokens of prompt and response.
    pub fn length(&self) -> usize {
        self.prompt.tokens.len() + self.response.tokens.len()
    }
}
