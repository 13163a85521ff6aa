//! A file `rollouts/step-N.h5`, read by HDF5 in this process.
//!
//! HDF5 trusts its input: a flipped bit can crash it, and zeros can make it loop. So only `step_query::serve` reads
//! such files, in a child process of [`super::recorded`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use hdf5::types::VarLenUnicode;
use hdf5::{File, Group, H5Type};

use super::rollouts::{ENVIRONMENT, ENVIRONMENT_IMAGES, IMAGES, group_name};
use crate::error::{Error, Result};
use crate::experience::{Finish, Spans};
use crate::sys::hdf5_image;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// One sample without its per-token arrays.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RecordedSample {
    pub step: u64,
    /// Its index in the step's arrays.
    #[serde(skip)]
    pub index: usize,
    pub prompt_id: i64,
    /// Number among the samples of its prompt.
    pub sample: i32,
    pub source: String,
    pub label: String,
    pub prompt: String,
    pub response: String,
    /// The parts of the response that an environment wrote.
    pub environment: Spans,
    pub score: f32,
    /// The score of each reward by its name; NaN if it abstained.
    pub scores: BTreeMap<String, f32>,
    pub finish: String,
    pub prompt_tokens: usize,
    pub response_tokens: usize,
    /// The images of the prompt, small, as data URLs.
    pub images: Vec<String>,
    /// The images that the environment gave.
    pub environment_images: Vec<String>,
}

/// The per-token arrays of a sample's response.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecordedTokens {
    pub tokens: Vec<u32>,
    pub logprobs: Vec<f32>,
    pub kl: Vec<f32>,
    pub advantages: Vec<f32>,
    /// 0 for tokens that are not learned from, such as those of an environment.
    pub mask: Vec<u8>,
}

/// A recorded step, open for reading.
#[derive(Debug)]
pub struct StepFile {
    step: u64,
    path: PathBuf,
    group: Group,
}

impl StepFile {
    /// Opens the file if its contents match its checksum. An older file has none.
    pub fn open(path: &Path, step: u64) -> Result<Self> {
        hdf5_image::verify(path)?;
        let group =
            File::open(path).and_then(|file| file.group(&group_name(step))).map_err(|e| unreadable(path, &e))?;
        Ok(Self { step, path: path.to_owned(), group })
    }

    /// The scores of all samples, in their order.
    pub fn scores(&self) -> Result<Vec<f32>> {
        self.array("score")
    }

    /// All samples, in their order.
    pub fn samples(&self) -> Result<Vec<RecordedSample>> {
        let (scores, finish) = (self.scores()?, self.array::<u8>("finish")?);
        let (prompt_ids, samples) = (self.array::<i64>("prompt_id")?, self.array::<i32>("sample")?);
        let prompt_tokens = self.array::<i32>("prompt_tokens")?;
        let offsets = self.array::<i64>("response_offsets")?;
        let (prompts, responses) = (self.texts("prompt")?, self.texts("response")?);
        let (labels, sources) = (self.texts("label")?, self.texts("source")?);
        let (parts, environment) = (self.parts()?, self.environment()?);
        let [images, given_images] = [IMAGES, ENVIRONMENT_IMAGES].map(|(name, ..)| self.json::<Vec<String>>(name));
        let (images, given_images) = (images?, given_images?);
        let n = scores.len();
        let lengths = [finish.len(), prompt_ids.len(), samples.len(), prompt_tokens.len(), offsets.len().max(1) - 1];
        let of_texts = [&prompts, &responses, &labels, &sources].map(Vec::len);
        let of_parts = parts.values().map(Vec::len);
        if lengths.into_iter().chain(of_texts).chain(of_parts).any(|length| length != n) {
            return Err(Error::data(format!(
                "the arrays of {} must have the length of its samples ({n})",
                self.path.display()
            )));
        }
        let sample = |i: usize| RecordedSample {
            step: self.step,
            index: i,
            prompt_id: prompt_ids[i],
            sample: samples[i],
            source: sources[i].clone(),
            label: labels[i].clone(),
            prompt: prompts[i].clone(),
            response: responses[i].clone(),
            environment: environment.get(i).cloned().unwrap_or_default(),
            score: scores[i],
            scores: parts.iter().map(|(name, values)| (name.clone(), values[i])).collect(),
            finish: Finish::from_code(finish[i]).map_or("unknown", Finish::name).to_string(),
            prompt_tokens: prompt_tokens[i].max(0) as usize,
            response_tokens: offsets[i + 1].saturating_sub(offsets[i]).max(0) as usize,
            images: images.get(i).cloned().unwrap_or_default(),
            environment_images: given_images.get(i).cloned().unwrap_or_default(),
        };
        Ok((0..n).map(sample).collect())
    }

    /// The per-token arrays of sample `index`.
    pub fn tokens(&self, index: usize) -> Result<RecordedTokens> {
        let (token_offsets, offsets) = (self.array::<i64>("token_offsets")?, self.array::<i64>("response_offsets")?);
        let ends = |offsets: &[i64]| Some((*offsets.get(index)? as usize, *offsets.get(index + 1)? as usize));
        let (Some((from, to)), Some((_, end))) = (ends(&offsets), ends(&token_offsets)) else {
            return Err(Error::data(format!("{} has no sample {index}", self.path.display())));
        };
        let length = to.saturating_sub(from);
        let tokens: Vec<i32> = self.part("tokens", end.saturating_sub(length), end)?;
        Ok(RecordedTokens {
            tokens: tokens.into_iter().map(|token| token as u32).collect(),
            logprobs: self.part("logprobs", from, to)?,
            kl: self.part("kl", from, to)?,
            advantages: self.part("advantages", from, to)?,
            mask: self.part("mask", from, to)?,
        })
    }

    /// The hash of the configuration of the job that recorded the step.
    pub fn config_hash(&self) -> Result<String> {
        let read = || self.group.attr("config_hash")?.read_scalar::<VarLenUnicode>();
        let text = read().map_err(|e| unreadable(&self.path, &e))?;
        self.text(&text, "config_hash")
    }

    /// Whether the step has an array. Some are only in some jobs, or in files of newer releases.
    pub fn has(&self, name: &str) -> bool {
        self.group.link_exists(name)
    }

    /// An error about the contents of the file.
    pub(super) fn wrong(&self, what: &str) -> Error {
        Error::data(format!("cannot read {}: {what}", self.path.display()))
    }

    /// The scores of each reward.
    pub(super) fn parts(&self) -> Result<BTreeMap<String, Vec<f32>>> {
        let names = self.group.group("scores").and_then(|group| group.member_names());
        let names = names.map_err(|e| unreadable(&self.path, &e))?;
        names.into_iter().map(|name| Ok((name.clone(), self.array(&format!("scores/{name}"))?))).collect()
    }

    /// The parts of each response that an environment wrote; nothing if the job had none.
    pub(super) fn environment(&self) -> Result<Vec<Spans>> {
        self.json(ENVIRONMENT.0)
    }

    /// The values of an array of JSON; nothing if the file does not have it.
    fn json<T: DeserializeOwned>(&self, name: &str) -> Result<Vec<T>> {
        if !self.group.link_exists(name) {
            return Ok(Vec::new());
        }
        let value = |text: String| {
            serde_json::from_str(&text).map_err(|e| Error::data(format!("{}: {name}: {e}", self.path.display())))
        };
        self.texts(name)?.into_iter().map(value).collect()
    }

    pub(super) fn array<T: H5Type>(&self, name: &str) -> Result<Vec<T>> {
        let read = self.group.dataset(name).and_then(|set| set.read_raw());
        read.map_err(|e| unreadable(&self.path, &e))
    }

    fn part<T: H5Type>(&self, name: &str, from: usize, to: usize) -> Result<Vec<T>> {
        if from >= to {
            return Ok(Vec::new());
        }
        let read = self.group.dataset(name).and_then(|set| set.read_slice_1d(from..to));
        read.map(|values| values.into_raw_vec_and_offset().0).map_err(|e| unreadable(&self.path, &e))
    }

    pub(super) fn texts(&self, name: &str) -> Result<Vec<String>> {
        self.array::<VarLenUnicode>(name)?.iter().map(|text| self.text(text, name)).collect()
    }

    /// HDF5 does not check that its strings are UTF-8.
    fn text(&self, text: &VarLenUnicode, name: &str) -> Result<String> {
        String::from_utf8(text.as_bytes().to_vec()).map_err(|_| self.wrong(&format!("a {name} is not UTF-8")))
    }
}

fn unreadable(path: &Path, source: &hdf5::Error) -> Error {
    Error::data(format!("cannot read {}: {source}", path.display()))
}
