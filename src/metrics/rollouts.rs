//! `rollouts.h5` and `rollouts/step-N.h5`: the generated samples and the training data, enough to recompute every
//! advantage and loss elsewhere.
//!
//! A recorded step is one file, written under another name and renamed, with one group `step_00000N`. `rollouts.h5`
//! holds only an external link per step. It is rebuilt from the existing files and replaced in the same way. So a kill
//! damages none of them.
//!
//! The tables of arrays below list the contents of each dataset of N samples. Per-token arrays hold the values of the
//! samples one after another. Sample i has the values from `offsets[i]` to `offsets[i + 1]`. An array that the job does
//! not have is NaN.
//!
//! Attributes of the group: `step` (u64), `seed` (u64), `config_hash` (string). Each dataset has the strings `unit` and
//! `meaning`. HDF5's strings end at a NUL, so a NUL is written as `␀`. `/` separates groups in HDF5, so in a reward's
//! name it is written as `_`.
//!
//! HDF5 creates each file in memory and writes none. After a failed write of its own, HDF5 keeps the data it could not
//! write, and flushing or closing the file then ends the process with a signal. So its bytes are written here like
//! those of any other file. A recorded step uses up to twice the size of its file in addition to the batch: in HDF5's
//! memory, and as the bytes to write.
//!
//! The HDF5 library is not thread-safe by itself; the binding holds one lock around every call.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::iter::repeat_n;
use std::path::{Path, PathBuf};

use hdf5::types::VarLenUnicode;
use hdf5::{Group, H5Type, Location};

use crate::error::{Error, Result};
use crate::experience::{Experience, Greedy, Image, ImageFile};
use crate::images::thumbnail;
use crate::sys::{files, hdf5_image};

/// The maximum size of the file of a step of `samples` samples with prompts and responses of these lengths. Their texts
/// have at most [`TOKEN_TEXT_BYTES`] per token, and their labels and sources are short.
pub fn step_bytes_max(samples: usize, prompt_tokens: usize, response_tokens: usize) -> u64 {
    let tokens = (size_of::<i32>() + TOKEN_TEXT_BYTES) * (prompt_tokens + response_tokens);
    let per_response = ((PER_TOKEN.len() + 1) * size_of::<f32>() + size_of::<u8>()) * response_tokens;
    (FILE_BYTES + samples * (tokens + per_response + SAMPLE_BYTES)) as u64
}

/// The maximum bytes of text per token, on average over a step: about twice what languages need.
pub const TOKEN_TEXT_BYTES: usize = 8;
/// Bytes per sample: two offsets, prompt_tokens, score, prompt_id, sample, finish; four strings with HDF5's overhead
/// for each, label and source of up to 128 bytes together; the scores of up to four rewards; score, tokens and finish
/// of a greedy response; and an offset of sampling masks.
const SAMPLE_BYTES: usize = 8 + 8 + 4 + 4 + 8 + 4 + 1 + 4 * 48 + 128 + 4 * 4 + 4 + 4 + 1 + 8;
/// Bytes per file, independent of its contents: HDF5's own tables of groups, datasets and attributes.
const FILE_BYTES: usize = 48 << 10;

pub fn group_name(step: u64) -> String {
    format!("step_{step:06}")
}

/// Removes partial files of killed writers, and updates `rollouts.h5` with the recorded steps of `run_dir`.
pub fn recover(run_dir: &Path) -> Result<()> {
    let folder = run_dir.join("rollouts");
    if folder.is_dir() {
        files::remove_partial(&folder)?;
    }
    let steps = steps_in(&folder, ENDING)?;
    if steps.is_empty() { Ok(()) } else { link(run_dir, &steps, &[]) }
}

/// Records the experience of `step`, of all ranks, in the given order. The last `keep_last` steps are kept (0: all).
pub fn write(
    run_dir: &Path,
    step: u64,
    batch: &[Experience],
    (seed, config_hash): (u64, &str),
    keep_last: usize,
) -> Result<()> {
    check(batch)?;
    let path = step_path(run_dir, step);
    files::create_dir_all(files::parent(&path))?;
    write_file(&path, |file| {
        let group = file.create_group(&group_name(step))?;
        attribute(&group, "step", &step)?;
        attribute(&group, "seed", &seed)?;
        attribute(&group, "config_hash", &string(config_hash)?)?;
        write_batch(&group, step, batch)
    })?;
    let steps = steps_in(files::parent(&path), ENDING)?;
    let (old, last) = steps.split_at(excess(steps.len(), keep_last));
    link(run_dir, last, old)
}

/// Removes the records of every step after `step`, and of all but the last `keep_last` others (0: none).
pub fn cut_back(run_dir: &Path, step: u64, keep_last: usize) -> Result<()> {
    let steps = steps_in(&run_dir.join("rollouts"), ENDING)?;
    let end = steps.partition_point(|at| *at <= step);
    let kept = &steps[excess(end, keep_last)..end];
    let others: Vec<u64> = steps.iter().filter(|step| !kept.contains(step)).copied().collect();
    if others.is_empty() { Ok(()) } else { link(run_dir, kept, &others) }
}

/// Writes `rollouts.h5`, with a link `step_00000N` for each of `steps` to the group of that name in
/// `rollouts/step-N.h5`. Then removes the files of `others`, so no link ever points to a missing file.
fn link(run_dir: &Path, steps: &[u64], others: &[u64]) -> Result<()> {
    write_file(&run_dir.join("rollouts.h5"), |file| {
        for step in steps {
            let group = group_name(*step);
            file.link_external(&format!("rollouts/step-{step}.h5"), &format!("/{group}"), &group)?;
        }
        Ok(())
    })?;
    remove(others.iter().map(|step| step_path(run_dir, *step)))
}

/// The file of a recorded step.
pub fn step_path(run_dir: &Path, step: u64) -> PathBuf {
    run_dir.join("rollouts").join(format!("step-{step}.h5"))
}

/// The suffix of the files of recorded steps.
pub(super) const ENDING: &str = ".h5";

/// The steps N of the files `step-N` with this suffix in a folder, ascending. Empty if there is no such folder.
pub(super) fn steps_in(folder: &Path, ending: &str) -> Result<Vec<u64>> {
    let paths = if folder.is_dir() { files::entries(folder)? } else { Vec::new() };
    let step = |path: PathBuf| path.file_name()?.to_str()?.strip_prefix("step-")?.strip_suffix(ending)?.parse().ok();
    let mut steps: Vec<u64> = paths.into_iter().filter_map(step).collect();
    steps.sort_unstable();
    Ok(steps)
}

/// The number of `count` steps to remove if the last `keep_last` are kept (0: all).
pub(super) fn excess(count: usize, keep_last: usize) -> usize {
    if keep_last == 0 { 0 } else { count.saturating_sub(keep_last) }
}

pub(super) fn remove(mut paths: impl Iterator<Item = PathBuf>) -> Result<()> {
    paths.try_for_each(|path| fs::remove_file(&path).map_err(|e| Error::io("remove", &path, &e)))
}

/// Writes the HDF5 file that `fill` creates to `path`.
fn write_file(path: &Path, fill: impl FnOnce(&hdf5::File) -> hdf5::Result<()>) -> Result<()> {
    // No disk is involved, so this fails only if memory runs out, or for a value that HDF5 cannot hold.
    let image = hdf5_image::build_image(path, fill)
        .map_err(|e| Error::fault(format!("cannot create {}: {e}", path.display())))?;
    files::write_atomic(path, &image).map_err(|e| {
        e.hint(
            "free disk space, lower metrics.rollouts_keep_last to keep fewer rollouts, or set \
             metrics.rollouts_every_steps = 0 to keep none",
        )
    })
}

fn attribute<T: H5Type>(of: &Location, name: &str, value: &T) -> hdf5::Result<()> {
    of.new_attr::<T>().create(name)?.write_scalar(value)
}

/// A string of HDF5, which ends at a NUL.
fn string(text: &str) -> hdf5::Result<VarLenUnicode> {
    text.replace('\0', "␀").parse().map_err(|e| hdf5::Error::from(format!("{e}")))
}

/// Name, unit and meaning of an array.
type Array = (&'static str, &'static str, &'static str);

fn dataset<T: H5Type>(
    group: &Group,
    (name, unit, meaning): (&str, &str, &str),
    values: impl Iterator<Item = T>,
) -> hdf5::Result<()> {
    let made = group.new_dataset_builder().with_data(&values.collect::<Vec<T>>()).create(name)?;
    attribute(&made, "unit", &string(unit)?)?;
    attribute(&made, "meaning", &string(meaning)?)
}

const TOKENS: Array = ("tokens", "token id", "prompt and response of each sample, one after another");
const TOKEN_OFFSETS: Array = ("token_offsets", "index", "sample i has tokens[token_offsets[i]:token_offsets[i + 1]]");
const PROMPT_TOKENS: Array = ("prompt_tokens", "tokens", "number of prompt tokens of a sample");
const RESPONSE_OFFSETS: Array = (
    "response_offsets",
    "index",
    "sample i has [response_offsets[i]:response_offsets[i + 1]] of the arrays per response token",
);
const MASK: Array = ("mask", "1", "1 if a response token is learned from, else 0");
const SCORE: Array = ("score", "1", "score returned by the reward function, or the weighted sum of several");
const PROMPT_ID: Array = ("prompt_id", "index", "id of the prompt's row in the data");
const SAMPLE: Array = ("sample", "index", "number among the samples of its prompt");
const FINISH: Array = ("finish", "code", "reason why a response ended: 0 end token, 1 length, 2 stop string");

const WEIGHTS_STEP: Array =
    ("weights_step", "index", "step whose update made the weights that sampled a response token; 0: none");

/// Only in jobs with an environment.
pub(super) const ENVIRONMENT: Array = (
    "environment",
    "JSON",
    "parts of the response's text that the environment wrote, as [[first, end], ...] in characters",
);

/// Only in steps whose prompts have images.
pub(super) const IMAGES: Array = ("images", "JSON", "the images of the prompt, small, as a list of data URLs");

/// Only in steps whose environment gave images.
pub(super) const ENVIRONMENT_IMAGES: Array =
    ("environment_images", "JSON", "the images that the environment gave, small, as a list of data URLs");

/// Only in jobs whose estimator compares with the greedy response to each prompt.
pub(super) const GREEDY: [Array; 3] = [
    ("greedy_score", "1", "score of the greedy response to the sample's prompt"),
    ("greedy_tokens", "tokens", "number of tokens of that response"),
    ("greedy_finish", "code", "reason why that response ended, as in finish"),
];

/// Only in jobs that keep sampling masks.
pub(super) const MASKS: [Array; 2] = [
    ("sampling_masks", "bytes", "the tokens that a response token was sampled from, compressed; none: all"),
    (
        "sampling_mask_offsets",
        "index",
        "response token j has sampling_masks[sampling_mask_offsets[j]:sampling_mask_offsets[j + 1]]",
    ),
];

type Text = (Array, fn(&Experience) -> &str);

const TEXTS: [Text; 4] = [
    (("prompt", "text", "the prompt as reward functions see it"), |e| &e.prompt.text),
    (("response", "text", "the response without special tokens"), |e| &e.response.text),
    (("label", "text", "label that the answer is compared with; empty if the data has none"), |e| &e.prompt.label),
    (("source", "path", "shard or file of the prompt's row"), |e| &e.prompt.source),
];

type PerToken = (Array, fn(&Experience) -> &[f32]);

/// The per-token arrays. The first two always exist; the others may be absent from a job, for all its samples.
const PER_TOKEN: [PerToken; 8] = [
    (("logprobs", "nats", "log-probability of a response token before the update"), |e| &e.response.logprobs),
    (
        ("sample_logprobs", "nats", "log-probability of a response token under the distribution it was sampled from"),
        |e| &e.response.sample_logprobs,
    ),
    (("ref_logprobs", "nats", "log-probability of a response token by the reference model"), |e| &e.ref_logprobs),
    (("values", "reward", "value before a response token, by the critic"), |e| &e.values),
    (("kl", "nats", "estimate of the KL divergence from the reference at a response token"), |e| &e.kl),
    (("rewards", "reward", "reward of a response token, with the KL penalty if it is in the reward"), |e| &e.rewards),
    (("advantages", "1", "advantage of a response token, as the loss uses it"), |e| &e.advantages),
    (("returns", "reward", "return of a response token, the target of the critic"), |e| &e.returns),
];
const ALWAYS: usize = 2;

/// Rejects samples whose arrays do not have the length of their response.
fn check(batch: &[Experience]) -> Result<()> {
    for (i, sample) in batch.iter().enumerate() {
        let len = sample.response.tokens.len();
        let arrays = PER_TOKEN.iter().enumerate().map(|(j, ((name, ..), of))| (*name, of(sample).len(), j < ALWAYS));
        for (name, got, is_needed) in arrays.chain([("mask", sample.mask.len(), true)]) {
            if got != len && (is_needed || got > 0) {
                let what = format!("sample {i} has {len} response tokens, but {got} entries in `{name}`");
                return Err(Error::fault(what));
            }
        }
    }
    Ok(())
}

fn write_batch(group: &Group, step: u64, batch: &[Experience]) -> hdf5::Result<()> {
    let tokens = batch.iter().flat_map(|e| e.prompt.tokens.iter().chain(&e.response.tokens).map(|&token| token as i32));
    dataset(group, TOKENS, tokens)?;
    dataset(group, TOKEN_OFFSETS, offsets(batch, Experience::length))?;
    dataset(group, PROMPT_TOKENS, batch.iter().map(|e| e.prompt.tokens.len() as i32))?;
    dataset(group, RESPONSE_OFFSETS, offsets(batch, |e| e.response.tokens.len()))?;
    for (array, of) in PER_TOKEN {
        let missing = |e: &Experience| if of(e).is_empty() { e.response.tokens.len() } else { 0 };
        let values = batch.iter().flat_map(|e| of(e).iter().copied().chain(repeat_n(f32::NAN, missing(e))));
        dataset(group, array, values)?;
    }
    dataset(group, MASK, batch.iter().flat_map(|e| e.mask.iter().copied()))?;
    dataset(group, SCORE, batch.iter().map(|e| e.score))?;
    dataset(group, PROMPT_ID, batch.iter().map(|e| e.prompt.id as i64))?;
    dataset(group, SAMPLE, batch.iter().map(|e| e.response.sample as i32))?;
    dataset(group, FINISH, batch.iter().map(|e| e.response.finish as u8))?;
    let weights = batch.iter().flat_map(|e| e.response.weights_steps(step.saturating_sub(1)));
    dataset(group, WEIGHTS_STEP, weights.map(|step| step as i32))?;
    for (array, of) in TEXTS {
        let texts: Vec<VarLenUnicode> = batch.iter().map(|e| string(of(e))).collect::<hdf5::Result<_>>()?;
        dataset(group, array, texts.into_iter())?;
    }
    if batch.iter().any(|e| !e.response.written().is_empty()) {
        let spans = |e: &Experience| string(&serde_json::to_string(e.response.written()).expect("numbers"));
        dataset(group, ENVIRONMENT, batch.iter().map(spans).collect::<hdf5::Result<Vec<_>>>()?.into_iter())?;
    }
    write_images(group, IMAGES, batch, |e| &e.prompt.images)?;
    write_images(group, ENVIRONMENT_IMAGES, batch, |e| e.response.images())?;
    write_greedy(group, batch)?;
    write_masks(group, batch)?;
    write_scores(&group.create_group("scores")?, batch)
}

/// Writes `images` of each sample, if there are any. One that can no longer be decoded is left out.
fn write_images(
    group: &Group,
    array: Array,
    batch: &[Experience],
    images: impl Fn(&Experience) -> &[Image],
) -> hdf5::Result<()> {
    if batch.iter().all(|e| images(e).is_empty()) {
        return Ok(());
    }
    let mut known: BTreeMap<u64, Option<String>> = BTreeMap::new();
    let mut url = |image: &Image| {
        let small = || Some(ImageFile::from(thumbnail(image.file.bytes()).ok()?).data_url());
        known.entry(image.hash).or_insert_with(small).clone()
    };
    let mut of_sample = |e: &Experience| {
        let urls: Vec<String> = images(e).iter().filter_map(&mut url).collect();
        string(&serde_json::to_string(&urls).expect("texts"))
    };
    dataset(group, array, batch.iter().map(&mut of_sample).collect::<hdf5::Result<Vec<_>>>()?.into_iter())
}

fn write_greedy(group: &Group, batch: &[Experience]) -> hdf5::Result<()> {
    let greedy: Option<Vec<Greedy>> = batch.iter().map(|e| e.greedy).collect();
    let Some(greedy) = greedy.filter(|all| !all.is_empty()) else { return Ok(()) };
    let [score, tokens, finish] = GREEDY;
    dataset(group, score, greedy.iter().map(|greedy| greedy.score))?;
    dataset(group, tokens, greedy.iter().map(|greedy| greedy.tokens as i32))?;
    dataset(group, finish, greedy.iter().map(|greedy| greedy.finish as u8))
}

fn write_masks(group: &Group, batch: &[Experience]) -> hdf5::Result<()> {
    if batch.iter().all(|e| e.response.sampling_masks.is_empty()) {
        return Ok(());
    }
    let masks = || batch.iter().flat_map(|e| &e.response.sampling_masks);
    let mut end = 0;
    let ends = masks().map(|mask| {
        end += mask.bytes() as i64;
        end
    });
    let offsets: Vec<i64> = std::iter::once(0).chain(ends).collect();
    let [bytes, of_tokens] = MASKS;
    dataset(group, bytes, masks().flat_map(|mask| mask.encoded().iter().copied()))?;
    dataset(group, of_tokens, offsets.into_iter())
}

/// An array for each reward that scored any of the samples.
fn write_scores(group: &Group, batch: &[Experience]) -> hdf5::Result<()> {
    let names: BTreeSet<&str> = batch.iter().flat_map(|e| e.scores.keys()).map(String::as_str).collect();
    let mut written: BTreeMap<String, usize> = BTreeMap::new();
    for name in names {
        let mut array = if name == "." { "_".to_string() } else { name.replace(['/', '\0'], "_") };
        let same = written.entry(array.clone()).or_default();
        *same += 1;
        if *same > 1 {
            array = format!("{array}_{same}");
        }
        let meaning = format!("score of the reward {name} before rewards are added; NaN if it abstained");
        let values = batch.iter().map(|e| e.scores.get(name).copied().unwrap_or(f32::NAN));
        dataset(group, (&array, "1", &meaning), values)?;
    }
    Ok(())
}

/// The start of each sample in a flat array that has `len` values of it, and the end of the last one.
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
