//! The data that the stages of a step exchange.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// One row of the prompt data, ready for rollout.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Prompt {
    /// Identity of the row over the whole run: its index in the source, stable over epochs and rank counts.
    pub id: u64,
    pub tokens: Vec<u32>,
    /// The prompt as text, as reward functions see it.
    pub text: String,
    /// The label that the answer is compared with; empty if the data has none.
    pub label: String,
    /// The shard prefix or file that the row came from.
    pub source: String,
    /// The images among its tokens, in order.
    pub images: Vec<Image>,
}

/// A row of the prompt data as it is in its file, for reward functions.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RowFields {
    /// A text, or the messages before the assistant's answer; null if the shard keeps no fields.
    pub prompt: Value,
    /// All other fields.
    pub columns: Map<String, Value>,
}

/// An image as a vision tower reads it: squares of p x p pixels of `frames` frames. A still image fills all frames.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Patches {
    /// The number of patches in time, height and width.
    pub grid: [usize; 3],
    /// Normalized pixels (t h w, 3 frames p p), each patch as (channel, frame, y, x). Patches are ordered by blocks of
    /// merge x merge patches: block row, block column, row in the block, column in the block.
    pub values: Vec<f32>,
    /// A hash of the resized pixels and the processor's settings.
    pub hash: u64,
}

/// The JPEG or PNG file of an image. Copies share the bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageFile(Arc<[u8]>);

impl ImageFile {
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The file as a data URL.
    pub fn data_url(&self) -> String {
        let kind = if self.0.starts_with(b"\x89PNG") { "png" } else { "jpeg" };
        format!("data:image/{kind};base64,{}", STANDARD.encode(&self.0))
    }
}

impl From<Vec<u8>> for ImageFile {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes.into())
    }
}

impl Serialize for ImageFile {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for ImageFile {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self(<&[u8]>::deserialize(deserializer)?.into()))
    }
}

/// An image among tokens, each of which is the model's image token.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// The index of its first token.
    pub at: usize,
    /// The number of its tokens.
    pub tokens: usize,
    /// The grid and the hash of its patches.
    pub grid: [usize; 3],
    pub hash: u64,
    pub file: ImageFile,
}

impl Image {
    /// The tokens of the image.
    pub fn range(&self) -> Range<usize> {
        self.at..self.at + self.tokens
    }
}

/// The reason why a response ended.
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
    /// The reason with this code, the number that records hold.
    pub fn from_code(code: u8) -> Option<Self> {
        [Self::Stop, Self::Length, Self::StopString].into_iter().find(|known| *known as u8 == code)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::StopString => "stop_string",
        }
    }
}

/// The tokens that filters and bans left for sampling ("Keep Sampling Mask", DeepSeek-V3.2, arXiv:2512.02556, section
/// 3.1), in the smaller of two forms. One form has ascending ids, each as the distance to the previous one, in LEB128
/// (7 bits per byte, lowest first). The other has one bit per token after `BITS`. Empty: the whole vocabulary. Copies
/// share the bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SamplingMask(Arc<[u8]>);

/// The start of a set with one bit per token. No list of distances starts like this: in LEB128 it is a 0 of two bytes.
const BITS: [u8; 2] = [0x80, 0];

impl SamplingMask {
    /// Encodes ascending ids.
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
        let size = BITS.len() + last as usize / 8 + 1;
        let found = Self(bytes.into());
        if size >= found.bytes() {
            return found;
        }
        let mut bytes = vec![0; size];
        bytes[..BITS.len()].copy_from_slice(&BITS);
        for id in found.ids() {
            bytes[BITS.len() + id as usize / 8] |= 1 << (id % 8);
        }
        Self(bytes.into())
    }

    /// The largest mask of a vocabulary of which at most `kept` tokens are left. Plans use it for unknown masks.
    pub fn largest(vocabulary: usize, kept: usize) -> Self {
        // Distances of two and three bytes are at least this far apart.
        let distances = kept + kept.min(vocabulary >> 7) + kept.min(vocabulary >> 14);
        Self(vec![1; distances.min(BITS.len() + vocabulary.div_ceil(8))].into())
    }

    pub fn is_whole(&self) -> bool {
        self.0.is_empty()
    }

    /// The encoded set.
    pub fn encoded(&self) -> &[u8] {
        &self.0
    }

    /// The set that `encoded` returned.
    pub fn from_encoded(bytes: &[u8]) -> Self {
        Self(bytes.into())
    }

    /// The bytes of the set.
    pub fn bytes(&self) -> usize {
        self.0.len()
    }

    pub fn ids(&self) -> impl Iterator<Item = u32> {
        let bits = self.0.strip_prefix(&BITS);
        let of_byte = |(byte, first): (u8, u32)| (0..8).filter(move |i| byte >> i & 1 == 1).map(move |i| first + i);
        let of_bits = bits.unwrap_or_default().iter().copied().zip((0..).step_by(8)).flat_map(of_byte);
        let distances = if bits.is_some() { &[] } else { &self.0[..] };
        let (mut id, mut shift) = (0, 0);
        let of_distances = distances.iter().filter_map(move |byte| {
            id += u32::from(byte & 0x7F) << shift;
            shift = if byte & 0x80 == 0 { 0 } else { shift + 7 };
            (shift == 0).then_some(id)
        });
        of_bits.chain(of_distances)
    }

    /// Adds minus infinity to the logits of all other tokens; `logits` starts at token `first`. NaN stays NaN, so that
    /// it shows.
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

impl Serialize for SamplingMask {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for SamplingMask {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self(<&[u8]>::deserialize(deserializer)?.into()))
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
    /// Log-probability of each token under the filtered distribution that it was sampled from. In a beam search, its
    /// contribution to the sum.
    pub sample_logprobs: Vec<f32>,
    /// The tokens that each token was sampled from, if `rollout.keep_sampling_mask` is set; else empty.
    pub sampling_masks: Vec<SamplingMask>,
    pub finish: Finish,
    /// The steps whose updates made the sampling weights, each with its number of tokens, in order, if the rollout runs
    /// ahead. Empty: the previous step.
    pub weights: Vec<(u64, usize)>,
    /// For each new token that was fed, a hash of the experts that it chose in all layers, or 0 if it is not known. Empty
    /// without experts.
    pub experts: Vec<u32>,
    /// The new tokens decoded, special tokens skipped.
    pub text: String,
    /// The additions of an environment, if the job has one.
    #[serde(default)]
    pub episode: Option<Episode>,
    /// The score of a beam search: the sum of the log-probabilities, divided by the length to the power of the length
    /// penalty.
    #[serde(skip)]
    pub score: Option<f32>,
    /// The most likely tokens at each position, if requested, with log-probabilities under the distribution of
    /// `logprobs`.
    #[serde(skip)]
    pub top_logprobs: Vec<Vec<(u32, f32)>>,
}

impl Response {
    /// The step whose update made the weights that sampled each token; `before` if it is not recorded.
    pub fn weights_steps(&self, before: u64) -> impl Iterator<Item = u64> {
        let alone = self.weights.is_empty().then_some((before, self.tokens.len()));
        self.weights.iter().copied().chain(alone).flat_map(|(step, tokens)| std::iter::repeat_n(step, tokens))
    }

    /// The number of tokens after the ones that `weights` covers.
    pub fn tokens_without_weights(&self) -> usize {
        self.tokens.len() - self.weights.iter().map(|(_, tokens)| tokens).sum::<usize>()
    }

    /// The images that an environment gave. Their places count from the prompt's first token.
    pub fn images(&self) -> &[Image] {
        self.episode.as_ref().map_or(&[], |episode| &episode.images)
    }

    /// The parts of the text that an environment wrote.
    pub fn written(&self) -> &[(usize, usize)] {
        self.episode.as_ref().map_or(&[], |episode| &episode.written)
    }

    /// 1 for each sampled token, 0 for each token that an environment wrote.
    pub fn mask(&self) -> Vec<u8> {
        let mut mask = vec![1; self.tokens.len()];
        self.episode.iter().flat_map(|episode| &episode.given).for_each(|given| mask[given.clone()].fill(0));
        mask
    }
}

/// The result of an environment for a response of one or several turns.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Episode {
    pub turns: u32,
    /// Ranges of the response's tokens that the environment wrote. Their log-probabilities at sampling are 0.
    pub given: Vec<Range<usize>>,
    /// The sum of the rewards over turns.
    pub reward: f64,
    /// Named numbers for the logs; with several turns, the last ones.
    pub extra: BTreeMap<String, f32>,
    /// The error if the environment failed and the episode ended early.
    pub failed: Option<String>,
    /// The parts of the response's text that the environment wrote.
    pub written: Spans,
    /// The images of the environment, after those of the prompt: `Image::at` counts from the prompt's first token.
    #[serde(default)]
    pub images: Vec<Image>,
}

/// Parts of a text: the first character, and the one after the last.
pub type Spans = Vec<(usize, usize)>;

/// The parts of `text` in order, and whether each is one of `spans`.
pub fn parts(text: &str, spans: &[(usize, usize)]) -> Vec<(String, bool)> {
    let inside = |i: usize| spans.iter().any(|(from, to)| (*from..*to).contains(&i));
    let mut parts: Vec<(String, bool)> = Vec::new();
    for (i, c) in text.chars().enumerate() {
        match parts.last_mut().filter(|(_, is_span)| *is_span == inside(i)) {
            Some((part, _)) => part.push(c),
            None => parts.push((c.into(), inside(i))),
        }
    }
    parts
}

/// `text` with the `spans` that an environment wrote in brackets.
pub fn marked<'a>(text: &'a str, spans: &[(usize, usize)]) -> Cow<'a, str> {
    if spans.is_empty() {
        return Cow::Borrowed(text);
    }
    let part = |(part, is_span)| if is_span { format!("[environment: {part}]") } else { part };
    Cow::Owned(parts(text, spans).into_iter().map(part).collect())
}

/// The greedy response to a prompt, the baseline of its samples (ReMax, arXiv:2310.10505).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Greedy {
    /// The score that the reward function returned.
    pub score: f32,
    pub tokens: usize,
    pub finish: Finish,
}

/// All training data of a step for one sample. Per-token arrays have the response's length.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Experience {
    pub prompt: Prompt,
    pub response: Response,
    /// The score that the reward function returned.
    pub score: f32,
    /// The score of each reward by its name, before they are added up; rewards that abstained are left out.
    pub scores: BTreeMap<String, f32>,
    /// The greedy response, if the estimator needs it.
    pub greedy: Option<Greedy>,
    pub ref_logprobs: Vec<f32>,
    /// Value of the state before each response token; empty if the estimator has no critic.
    pub values: Vec<f32>,
    /// Value of the state after the last response token, from which a truncated response is bootstrapped.
    pub last_value: f32,
    /// Per-token KL estimate against the reference.
    pub kl: Vec<f32>,
    /// Per-token reward: -beta * KL if configured, plus the shaped score at the last token.
    pub rewards: Vec<f32>,
    pub advantages: Vec<f32>,
    pub returns: Vec<f32>,
    /// 1 for each token that is trained on.
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

    /// The images among these tokens, in order.
    pub fn images(&self) -> Cow<'_, [Image]> {
        match self.response.images() {
            [] => Cow::Borrowed(&self.prompt.images),
            given => Cow::Owned([&self.prompt.images, given].concat()),
        }
    }

    /// The bytes of the complete sample outside of tensors. Each response token has its id, two log-probabilities at
    /// sampling, the reference's, and a value, KL, reward, advantage, return and mask, and with experts their hash. The
    /// files of images are included.
    pub fn bytes(&self) -> usize {
        let Response { tokens, experts, .. } = &self.response;
        let images: usize = self.images().iter().map(|image| image.file.bytes().len()).sum();
        self.prompt.tokens.len() * 4 + tokens.len() * (9 * 4 + 1) + size_of_val(&experts[..]) + images
    }

    /// The bytes of the sampling masks, with their counters of copies.
    pub fn mask_bytes(&self) -> usize {
        let masks = self.response.sampling_masks.iter().filter(|mask| !mask.is_whole());
        masks.map(|mask| mask.bytes() + 4 * size_of::<usize>()).sum()
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
    fn a_sampling_mask_stores_its_ids_in_few_bytes_and_masks_each_vocabulary_shard() {
        let sets = [vec![0], vec![5, 6, 7, 132, 261], vec![127, 128, 16_511, 3_000_000, u32::MAX], (0..300).collect()];
        for (ids, bytes) in sets.into_iter().zip([1, 6, 13, 40]) {
            let mask = SamplingMask::new(ids.iter().copied());
            assert_eq!((mask.ids().collect::<Vec<_>>(), mask.bytes()), (ids.clone(), bytes));
            let last = ids[ids.len() - 1] as usize;
            assert!(bytes <= SamplingMask::largest(last + 1, ids.len()).bytes(), "{ids:?}");
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
