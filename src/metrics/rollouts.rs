//! `rollouts.h5` and `rollouts/step-N.h5`: what was generated and learned from, enough to recompute every advantage
//! and loss outside.
//!
//! A recorded step is one file, written under another name and renamed, with one group `step_00000N`; `rollouts.h5` holds nothing but
//! an external link a step, is rebuilt from the files that exist, and is replaced the same way. So a kill ruins none.
//!
//! | dataset | type, length | content |
//! |---|---|---|
//! | `tokens` | i32, `token_offsets[N]` | prompt and response of each sample, one after another |
//! | `token_offsets` | i64, N + 1 | sample i has `tokens[token_offsets[i]..token_offsets[i + 1]]` |
//! | `prompt_tokens` | i32, N | how many of them are the prompt's |
//! | `response_offsets` | i64, N + 1 | where sample i stands in the arrays of a value per response token |
//! | `logprobs` `sample_logprobs` `ref_logprobs` `values` `kl` `rewards` `advantages` `returns` | f32 | per response token; NaN where the job has none (`values` without a critic) |
//! | `mask` | u8 | per response token: 1 where it is learned from |
//! | `score` | f32, N | what the reward function returned |
//! | `prompt_id` | i64, N | identity of the prompt's row |
//! | `sample` | i32, N | number among the samples of its prompt |
//! | `finish` | u8, N | 0 stop, 1 length, 2 stop string |
//!
//! Attributes of the group: `step` (u64), `seed` (u64), `config_hash` (string).
//!
//! HDF5 makes each file in memory and writes none: after a failed write of its own it keeps what it could not write, and
//! flushing or closing the file then ends the process by a signal. Its bytes are written here like those of any other file. A
//! recorded step takes up to twice the bytes of its file in addition to the batch: in HDF5's memory, and as the bytes to write.
//!
//! The HDF5 library is not thread-safe by itself; the binding holds one lock around every call.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::iter::repeat_n;
use std::path::{Path, PathBuf};

use hdf5::types::VarLenUnicode;
use hdf5::{Group, H5Type};

use crate::error::{Error, Result};
use crate::experience::Experience;
use crate::sys::{files, hdf5_image};

#[derive(Debug)]
pub struct RolloutFiles {
    run_dir: PathBuf,
    steps: BTreeSet<u64>,
    /// 0: all.
    keep_last: usize,
}

/// Most bytes of the file of a step of `samples` samples with prompts and responses of these lengths.
pub fn step_bytes_max(samples: usize, prompt_tokens: usize, response_tokens: usize) -> u64 {
    let tokens = size_of::<i32>() * (prompt_tokens + response_tokens);
    let per_response = (PER_TOKEN.len() * size_of::<f32>() + size_of::<u8>()) * response_tokens;
    (FILE_BYTES + samples * (tokens + per_response + SAMPLE_BYTES)) as u64
}

/// Of each sample: two offsets, prompt_tokens, score, prompt_id, sample, finish.
const SAMPLE_BYTES: usize = 8 + 8 + 4 + 4 + 8 + 4 + 1;
/// Of each file, whatever it holds: HDF5's own tables of groups and datasets.
const FILE_BYTES: usize = 32 << 10;

pub fn group_name(step: u64) -> String {
    format!("step_{step:06}")
}

impl RolloutFiles {
    /// Finds the recorded steps of `run_dir`, of which the last `keep_last` are to be kept (0: all), removes what killed writers
    /// left, and brings `rollouts.h5` up to date.
    pub fn open(run_dir: &Path, keep_last: usize) -> Result<Self> {
        let mut found = Self { run_dir: run_dir.to_owned(), steps: BTreeSet::new(), keep_last };
        let folder = found.folder();
        if folder.is_dir() {
            files::remove_partial(&folder)?;
            let paths = files::entries(&folder)?;
            found.steps.extend(paths.iter().filter_map(|path| step_of(path.file_name()?.to_str()?)));
        }
        if !found.steps.is_empty() {
            found.link()?;
        }
        Ok(found)
    }

    fn folder(&self) -> PathBuf {
        self.run_dir.join("rollouts")
    }

    pub fn step_path(&self, step: u64) -> PathBuf {
        self.folder().join(format!("step-{step}.h5"))
    }

    pub fn steps(&self) -> impl Iterator<Item = u64> + '_ {
        self.steps.iter().copied()
    }

    /// Records the experience of `step`, of all ranks, in the order given. The oldest records go where that makes too many.
    pub fn write(&mut self, step: u64, batch: &[Experience], seed: u64, config_hash: &str) -> Result<()> {
        check(batch)?;
        let folder = self.folder();
        fs::create_dir_all(&folder).map_err(|e| Error::io("create", &folder, &e))?;
        write_file(&self.step_path(step), |file| {
            let group = file.create_group(&group_name(step))?;
            attribute(&group, "step", &step)?;
            attribute(&group, "seed", &seed)?;
            let config_hash: VarLenUnicode = config_hash.parse().map_err(|e| hdf5::Error::from(format!("{e}")))?;
            attribute(&group, "config_hash", &config_hash)?;
            write_batch(&group, batch)
        })?;
        let is_new = self.steps.insert(step);
        let excess = if self.keep_last == 0 { 0 } else { self.steps.len().saturating_sub(self.keep_last) };
        let old: Vec<u64> = (0..excess).filter_map(|_| self.steps.pop_first()).collect();
        if is_new || !old.is_empty() { self.link_without(old) } else { Ok(()) }
    }

    /// Removes the records of every step after `step`.
    pub fn cut_back(&mut self, step: u64) -> Result<()> {
        let late = self.steps.split_off(&(step + 1));
        if late.is_empty() { Ok(()) } else { self.link_without(late) }
    }

    /// Links the recorded steps, then removes the files of others: no link ever points to nothing.
    fn link_without(&self, others: impl IntoIterator<Item = u64>) -> Result<()> {
        self.link()?;
        for step in others {
            let path = self.step_path(step);
            fs::remove_file(&path).map_err(|e| Error::io("remove", &path, &e))?;
        }
        Ok(())
    }

    /// Writes `rollouts.h5`: a link `step_00000N` to the group of that name in `rollouts/step-N.h5`.
    fn link(&self) -> Result<()> {
        write_file(&self.run_dir.join("rollouts.h5"), |file| {
            for step in self.steps() {
                let group = group_name(step);
                file.link_external(&format!("rollouts/step-{step}.h5"), &format!("/{group}"), &group)?;
            }
            Ok(())
        })
    }
}

fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-")?.strip_suffix(".h5")?.parse().ok()
}

/// Puts the HDF5 file that `fill` makes at `path`.
fn write_file(path: &Path, fill: impl FnOnce(&hdf5::File) -> hdf5::Result<()>) -> Result<()> {
    // No disk is involved: this fails for lack of memory, or for a value that HDF5 cannot hold.
    let image = hdf5_image::of(path, fill).map_err(|e| Error::fault(format!("cannot make {}: {e}", path.display())))?;
    files::replace_with(path, |out| out.write_all(&image).map_err(|e| Error::io("write", path, &e))).map_err(|e| {
        e.hint(
            "is the disk full? metrics.rollouts_keep_last keeps fewer rollouts, 0 in metrics.rollouts_every_steps none",
        )
    })
}

fn attribute<T: H5Type>(group: &Group, name: &str, value: &T) -> hdf5::Result<()> {
    group.new_attr::<T>().create(name)?.write_scalar(value)
}

fn dataset<T: H5Type>(group: &Group, name: &str, values: impl Iterator<Item = T>) -> hdf5::Result<()> {
    group.new_dataset_builder().with_data(&values.collect::<Vec<T>>()).create(name).map(|_| ())
}

type PerToken = (&'static str, fn(&Experience) -> &[f32]);

/// The per-token arrays. The first two always exist; the others may be absent from a job, for all its samples.
const PER_TOKEN: [PerToken; 8] = [
    ("logprobs", |e| &e.response.logprobs),
    ("sample_logprobs", |e| &e.response.sample_logprobs),
    ("ref_logprobs", |e| &e.ref_logprobs),
    ("values", |e| &e.values),
    ("kl", |e| &e.kl),
    ("rewards", |e| &e.rewards),
    ("advantages", |e| &e.advantages),
    ("returns", |e| &e.returns),
];
const ALWAYS: usize = 2;

/// Refuses samples whose arrays do not have the length of their response.
fn check(batch: &[Experience]) -> Result<()> {
    for (i, sample) in batch.iter().enumerate() {
        let len = sample.response.tokens.len();
        let arrays = PER_TOKEN.iter().enumerate().map(|(j, (name, of))| (*name, of(sample).len(), j < ALWAYS));
        for (name, got, is_needed) in arrays.chain([("mask", sample.mask.len(), true)]) {
            if got != len && (is_needed || got > 0) {
                let what = format!("sample {i} has {len} response tokens, but {got} entries in `{name}`");
                return Err(Error::fault(what));
            }
        }
    }
    Ok(())
}

fn write_batch(group: &Group, batch: &[Experience]) -> hdf5::Result<()> {
    let tokens = batch.iter().flat_map(|e| e.prompt.tokens.iter().chain(&e.response.tokens).map(|&token| token as i32));
    dataset(group, "tokens", tokens)?;
    dataset(group, "token_offsets", offsets(batch, Experience::length))?;
    dataset(group, "prompt_tokens", batch.iter().map(|e| e.prompt.tokens.len() as i32))?;
    dataset(group, "response_offsets", offsets(batch, |e| e.response.tokens.len()))?;
    for (name, of) in PER_TOKEN {
        let missing = |e: &Experience| if of(e).is_empty() { e.response.tokens.len() } else { 0 };
        let values = batch.iter().flat_map(|e| of(e).iter().copied().chain(repeat_n(f32::NAN, missing(e))));
        dataset(group, name, values)?;
    }
    dataset(group, "mask", batch.iter().flat_map(|e| e.mask.iter().copied()))?;
    dataset(group, "score", batch.iter().map(|e| e.score))?;
    dataset(group, "prompt_id", batch.iter().map(|e| e.prompt.id as i64))?;
    dataset(group, "sample", batch.iter().map(|e| e.response.sample as i32))?;
    dataset(group, "finish", batch.iter().map(|e| e.response.finish as u8))
}

/// Where each sample begins in a flat array that has `len` values of it, and where the last one ends.
fn offsets(batch: &[Experience], len: impl Fn(&Experience) -> usize) -> impl Iterator<Item = i64> {
    let mut end = 0;
    let ends: Vec<i64> = batch
        .iter()
        .map(|sample| {
            end += len(sample) as i64;
            end
        })
        .collect();
    std::iter::once(0).chain(ends)
}
