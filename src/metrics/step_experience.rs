//! The samples of a recorded step as the experience that was written: the counterpart of `rollouts::write`.
//!
//! Files of older releases have no greedy responses and no sampling masks. A field that the file does not hold has its
//! default value.

use std::ops::Range;

use super::rollouts::{ENVIRONMENT_IMAGES, GREEDY, MASKS};
use super::step_file::StepFile;
use crate::error::{Error, Result};
use crate::experience::{Episode, Experience, Finish, Greedy, Prompt, Response, SamplingMask, Spans};

/// The ranges between the offsets `name` into an array of `length`.
fn ranges(file: &StepFile, name: &str, length: usize) -> Result<Vec<Range<usize>>> {
    let offsets: Vec<i64> = file.array(name)?;
    let is_whole = offsets.first() == Some(&0) && offsets.last() == Some(&(length as i64));
    if !is_whole || offsets.windows(2).any(|ends| ends[0] > ends[1]) {
        return Err(file.wrong(&format!("{name} must ascend from 0 to {length}")));
    }
    Ok(offsets.windows(2).map(|ends| ends[0] as usize..ends[1] as usize).collect())
}

/// An array with a value for each of `n` samples or tokens.
fn each<T: hdf5::H5Type>(file: &StepFile, name: &str, n: usize) -> Result<Vec<T>> {
    let values: Vec<T> = file.array(name)?;
    if values.len() == n { Ok(values) } else { Err(of_length(file, name, n, values.len())) }
}

fn of_length(file: &StepFile, name: &str, n: usize, got: usize) -> Error {
    file.wrong(&format!("{name} must have {n} entries (got {got})"))
}

/// The arrays per response token that a job may not have.
struct Columns([Vec<f32>; 8]);

impl Columns {
    const NAMES: [&str; 8] =
        ["logprobs", "sample_logprobs", "ref_logprobs", "values", "kl", "rewards", "advantages", "returns"];

    /// Arrays of `tokens` numbers. One that is NaN everywhere is empty.
    fn read(file: &StepFile, tokens: usize) -> Result<Self> {
        let column = |name| {
            let values: Vec<f32> = each(file, name, tokens)?;
            Ok(if values.iter().all(|x| x.is_nan()) { Vec::new() } else { values })
        };
        Ok(Self(all(Self::NAMES.map(column))?))
    }

    /// The numbers of the tokens `at`.
    fn part(&self, at: &Range<usize>) -> [Vec<f32>; 8] {
        self.0.each_ref().map(|all| if all.is_empty() { Vec::new() } else { all[at.clone()].to_vec() })
    }
}

/// The prompts of all samples.
fn prompts(file: &StepFile, n: usize) -> Result<Vec<Prompt>> {
    let ids: Vec<i64> = each(file, "prompt_id", n)?;
    let texts = |name| {
        let texts = file.texts(name)?;
        if texts.len() == n { Ok(texts) } else { Err(of_length(file, name, n, texts.len())) }
    };
    let texts = texts("prompt")?.into_iter().zip(texts("label")?).zip(texts("source")?);
    let prompt = |(id, ((text, label), source))| Prompt { id: id as u64, text, label, source, ..Prompt::default() };
    Ok(ids.into_iter().zip(texts).map(prompt).collect())
}

impl StepFile {
    /// All samples with all that the file holds of them. `Response::prompt` counts the groups of samples of one prompt.
    /// Prompts have no images: the data has these.
    ///
    /// # Errors
    /// `Data` if it cannot be read, or if an environment gave images, of which it only holds small ones.
    pub fn experience(&self) -> Result<Vec<Experience>> {
        if self.has(ENVIRONMENT_IMAGES.0) {
            return Err(self.wrong("the environment gave images, of which a record has only small ones"));
        }
        read(self)
    }
}

fn read(file: &StepFile) -> Result<Vec<Experience>> {
    let score: Vec<f32> = file.array("score")?;
    let n = score.len();
    let tokens: Vec<i32> = file.array("tokens")?;
    let (rows, prompt_tokens) = (ranges(file, "token_offsets", tokens.len())?, each::<i32>(file, "prompt_tokens", n)?);
    let mask: Vec<u8> = file.array("mask")?;
    let responses = ranges(file, "response_offsets", mask.len())?;
    let texts = file.texts("response")?;
    for (name, got) in [("token_offsets", rows.len()), ("response_offsets", responses.len()), ("response", texts.len())]
    {
        if got != n {
            return Err(of_length(file, name, n, got));
        }
    }
    let (columns, prompts) = (Columns::read(file, mask.len())?, prompts(file, n)?);
    let (weights, numbers): (Vec<i32>, Vec<i32>) = (each(file, "weights_step", mask.len())?, each(file, "sample", n)?);
    let (finish, parts): (Vec<u8>, _) = (each(file, "finish", n)?, file.parts()?);
    let (environment, greedy, masks) = (file.environment()?, greedy(file, n)?, masks(file, mask.len())?);
    let (mut samples, mut group): (Vec<Experience>, usize) = (Vec::with_capacity(n), 0);
    for (i, (prompt, text)) in prompts.into_iter().zip(texts).enumerate() {
        let (row, at) = (&tokens[rows[i].clone()], responses[i].clone());
        let [of_prompt, of_response] = match row.split_at_checked(prompt_tokens[i].max(0) as usize) {
            Some((prompt, response)) if response.len() == at.len() => [prompt, response],
            _ => {
                return Err(file.wrong(&format!("sample {i} has {} tokens and {} of a response", row.len(), at.len())));
            }
        }
        .map(|tokens| tokens.iter().map(|&token| token as u32).collect::<Vec<u32>>());
        let number = numbers[i].max(0) as u32;
        let continues = |last: &Experience| last.prompt.id == prompt.id && last.response.sample < number;
        group += usize::from(!samples.last().is_none_or(continues));
        let [logprobs, sample_logprobs, ref_logprobs, values, kl, rewards, advantages, returns] = columns.part(&at);
        let scores = parts.iter().filter_map(|(name, all)| Some((name.clone(), *all.get(i)?)));
        let response = Response {
            prompt: group,
            sample: number,
            tokens: of_response,
            logprobs,
            sample_logprobs,
            sampling_masks: masks.get(at.clone()).map(<[SamplingMask]>::to_vec).unwrap_or_default(),
            finish: finish_of(file, finish[i])?,
            weights: runs(&weights[at.clone()]),
            text,
            episode: episode(&mask[at.clone()], environment.get(i)),
            ..Response::default()
        };
        let (prompt, scores) =
            (Prompt { tokens: of_prompt, ..prompt }, scores.filter(|(_, score)| !score.is_nan()).collect());
        let (score, mask, greedy) = (score[i], mask[at].to_vec(), greedy.get(i).copied());
        let rest = Experience { ref_logprobs, values, kl, rewards, advantages, returns, ..Experience::default() };
        samples.push(Experience { prompt, response, score, scores, greedy, mask, ..rest });
    }
    Ok(samples)
}

/// The additions of an environment: the tokens that are not learned from, and the parts of the text.
fn episode(mask: &[u8], written: Option<&Spans>) -> Option<Episode> {
    let (given, written) = (given(mask), written.cloned().unwrap_or_default());
    let is_there = !given.is_empty() || !written.is_empty();
    is_there.then(|| Episode { given, written, ..Episode::default() })
}

fn all<T, const N: usize>(found: [Result<T>; N]) -> Result<[T; N]> {
    let found: Vec<T> = found.into_iter().collect::<Result<_>>()?;
    Ok(found.try_into().unwrap_or_else(|_| unreachable!("as many as there were")))
}

fn finish_of(file: &StepFile, code: u8) -> Result<Finish> {
    Finish::from_code(code).ok_or_else(|| file.wrong(&format!("{code} is no reason why a response ended")))
}

fn greedy(file: &StepFile, n: usize) -> Result<Vec<Greedy>> {
    let [score, tokens, finish] = GREEDY.map(|(name, ..)| name);
    if !file.has(score) {
        return Ok(Vec::new());
    }
    let tokens: Vec<i32> = each(file, tokens, n)?;
    let all = each::<f32>(file, score, n)?.into_iter().zip(tokens).zip(each::<u8>(file, finish, n)?);
    all.map(|((score, tokens), code)| {
        Ok(Greedy { score, tokens: tokens.max(0) as usize, finish: finish_of(file, code)? })
    })
    .collect()
}

fn masks(file: &StepFile, tokens: usize) -> Result<Vec<SamplingMask>> {
    let [name, offsets] = MASKS.map(|(name, ..)| name);
    if !file.has(name) {
        return Ok(Vec::new());
    }
    let bytes: Vec<u8> = file.array(name)?;
    let all = ranges(file, offsets, bytes.len())?;
    if all.len() != tokens {
        return Err(of_length(file, offsets, tokens + 1, all.len() + 1));
    }
    Ok(all.into_iter().map(|range| SamplingMask::from_encoded(&bytes[range])).collect())
}

/// The ranges of tokens that are not learned from.
fn given(mask: &[u8]) -> Vec<Range<usize>> {
    let mut end = 0;
    let ranges = mask.chunk_by(PartialEq::eq).filter_map(|run| {
        let start = end;
        end += run.len();
        (run[0] == 0).then_some(start..end)
    });
    ranges.collect()
}

/// The steps whose updates made the weights, each with its number of tokens.
fn runs(steps: &[i32]) -> Vec<(u64, usize)> {
    steps.chunk_by(PartialEq::eq).map(|run| (run[0].max(0) as u64, run.len())).collect()
}
