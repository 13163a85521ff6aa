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

/// The tokens that filters and bans left for a draw ("Keep Sampling Mask", DeepSeek-V3.2, arXiv:2512.02556, section 3.1): ascending ids,
/// each as its distance from the one before, in LEB128 (7 bits a byte, the lowest first). Empty: the whole vocabulary.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplingMask(Vec<u8>);

impl SamplingMask {
    /// Of ascending ids.
    pub fn new(ids: impl IntoIterator<Item = u32>) -> Self {
        let (mut bytes, mut last) = (Vec::new(), 0);
        for id in ids {
            let mut distance = id - last;
            while distance >= 0x80 {
                bytes.push(distance as u8 | 0x80);
                distance >>= 7;
            }
            bytes.push(distance as u8);
            last = id;
        }
        Self(bytes)
    }

    pub fn is_whole(&self) -> bool {
        self.0.is_empty()
    }

    pub fn ids(&self) -> impl Iterator<Item = u32> {
        let (mut id, mut shift) = (0, 0);
        self.0.iter().filter_map(move |byte| {
            id += u32::from(byte & 0x7F) << shift;
            shift = if byte & 0x80 == 0 { 0 } else { shift + 7 };
            (shift == 0).then_some(id)
        })
    }

    /// Minus infinity to the logits of all other tokens, of those from `first` on. What is not a number stays so, and shows.
    pub fn apply(&self, first: usize, logits: &mut [f32]) {
        if self.is_whole() {
            return;
        }
        let (mut next, end) = (0, logits.len());
        let kept = self.ids().filter_map(|id| (id as usize).checked_sub(first)).take_while(|&at| at < end);
        for at in kept.chain([end]) {
            logits[next..at].iter_mut().for_each(|x| *x += f32::NEG_INFINITY);
            next = at + 1;
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
    /// Log-probability of each token under the plain temperature softmax, over the tokens of its sampling mask (l_old).
    pub logprobs: Vec<f32>,
    /// Log-probability of each token under the filtered distribution that it was drawn from; of a beam search, what it added to the sum.
    pub sample_logprobs: Vec<f32>,
    /// What each token was drawn among, where `rollout.keep_sampling_mask` asks for it; else empty.
    pub sampling_masks: Vec<SamplingMask>,
    pub finish: Finish,
    /// Where the rollout runs ahead: the steps whose updates made the weights that drew the tokens, with how many each drew, in order.
    /// Empty: the step before.
    pub weights: Vec<(u64, usize)>,
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
    /// Of each token the step whose update made the weights that drew it: `before`, where nothing else is known.
    pub fn weights_steps(&self, before: u64) -> impl Iterator<Item = u64> {
        let alone = self.weights.is_empty().then_some((before, self.tokens.len()));
        self.weights.iter().copied().chain(alone).flat_map(|(step, tokens)| std::iter::repeat_n(step, tokens))
    }

    /// Tokens behind those that `weights` are of.
    pub fn tokens_without_weights(&self) -> usize {
        self.tokens.len() - self.weights.iter().map(|(_, tokens)| tokens).sum::<usize>()
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sampling_mask_holds_its_ids_in_few_bytes_and_masks_each_part_of_the_vocabulary() {
        let sets = [vec![0], vec![5, 6, 7, 132, 261], vec![127, 128, 16_511, 3_000_000, u32::MAX], (0..300).collect()];
        for (ids, bytes) in sets.into_iter().zip([1, 6, 13, 300]) {
            let mask = SamplingMask::new(ids.iter().copied());
            assert_eq!((mask.ids().collect::<Vec<_>>(), mask.0.len()), (ids.clone(), bytes));
            for part in [0..300, 0..6, 6..128, 290..300] {
                let mut logits = vec![1.0; part.len()];
                mask.apply(part.start as usize, &mut logits);
                let kept = part.clone().zip(&logits).filter(|(_, x)| **x == 1.0).map(|(id, _)| id);
                assert!(kept.eq(ids.iter().copied().filter(|id| part.contains(id))), "{ids:?} in {part:?}");
            }
        }
        let mut logits = [f32::NAN, 1.0];
        SamplingMask::default().apply(0, &mut logits);
        assert_eq!(logits[1], 1.0, "all are kept");
        SamplingMask::new([1]).apply(0, &mut logits);
        assert!(logits[0].is_nan(), "what is not finite shows");
    }
}
