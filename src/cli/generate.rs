//! `rlhf-hpc generate`: responses of a model to rows of prompts.

use super::device::{self, Options, device, dtype_name};
use super::out::{note, progress};
use super::ranks::Ranks;
use super::rows::{self, Row};
use super::talk::Talk;
use crate::config::job::DeviceName;
use crate::config::model::DTypeName;
use crate::config::rollout::RolloutConfig;
use crate::data::rows::template_variables;
use crate::error::{Error, Result};
use crate::experience::{Prompt, Response};
use crate::launch::inference::InferenceModel;
use crate::model::{Arch, Head};
use crate::rng::{Purpose, Rng};
use crate::rollout::{self, Beams, EarlyStopping, Engine, Hooks, Model, Request, Stop};
use crate::text::Tokenizer;
use argh::FromArgs;
use serde::Serialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Generate responses: a JSON line per prompt in, a JSON line per response out, in the same order.
#[derive(FromArgs, Debug)]
#[argh(subcommand, name = "generate")]
#[argh(
    note = "A row has prompt (text, encoded with the tokenizer's own special tokens), messages (a list, through the chat
template, to which the row's tools go too) or tokens. A result is the row with prompt_tokens, the new tokens, their text, their
log-probabilities, and finish: stop, length or stop_string; of a beam search its score, too. logprobs and reward take such lines
as they are."
)]
pub struct Args {
    /// a Hugging Face model directory
    #[argh(option)]
    pub model: PathBuf,

    /// rows as JSON lines; - is standard input
    #[argh(option)]
    pub input: Option<PathBuf>,

    /// instead of rows: one prompt, whose response is written as text while it is drawn
    #[argh(option)]
    pub prompt: Option<String>,

    /// what the chat template is told beside messages, e.g. '{"enable_thinking": false}'
    #[argh(option, default = "Row::new()", from_str_fn(rows::object))]
    pub chat_template_args: Row,

    /// most new tokens of a response (default: 128)
    #[argh(option, default = "128")]
    pub max_new_tokens: usize,

    /// divides the logits; 0 is greedy (default: 1)
    #[argh(option, default = "1.0")]
    pub temperature: f32,

    /// draw among the k most likely tokens (default: 0, off)
    #[argh(option, default = "0")]
    pub top_k: usize,

    /// draw among the most likely tokens whose mass reaches p (default: 1, off)
    #[argh(option, default = "1.0")]
    pub top_p: f32,

    /// draw among tokens of at least this share of the largest probability (default: 0, off)
    #[argh(option, default = "0.0")]
    pub min_p: f32,

    /// lower the logits of tokens that occurred (default: 1, off)
    #[argh(option, default = "1.0")]
    pub repetition_penalty: f32,

    /// responses per row (default: 1)
    #[argh(option, default = "1")]
    pub samples: usize,

    /// search with this many beams instead of drawing: --samples K are the best K, each with its score (default: 1, off)
    #[argh(option, default = "1")]
    pub beams: usize,

    /// when a search ends that has as many responses as beams: at once (true), when going on does not seem worth it (false), or when
    /// no better one is possible (never) (default: false)
    #[argh(option, from_str_fn(early_stopping))]
    pub early_stopping: Option<EarlyStopping>,

    /// a search's score is the sum of log-probabilities over the number of tokens to the power of this (default: 1)
    #[argh(option)]
    pub length_penalty: Option<f64>,

    /// seed of the draws (default: 0)
    #[argh(option, default = "0")]
    pub seed: u64,

    /// text that ends a response and is cut from its text, may be repeated
    #[argh(option)]
    pub stop: Vec<String>,

    /// go on after end tokens
    #[argh(switch)]
    pub ignore_eos: bool,

    /// cpu, gpu or auto: a GPU where there is one that suits the model and computes what the CPU does (default: auto)
    #[argh(option, default = "DeviceName::Auto", from_str_fn(device))]
    pub device: DeviceName,

    /// f32, bf16 or auto: what the weights are held in; auto is bf16 on a GPU and f32 on a CPU (default: auto)
    #[argh(option, default = "DTypeName::Auto", from_str_fn(dtype_name))]
    pub dtype: DTypeName,

    /// do not compare a GPU with the CPU before, which takes about a second
    #[argh(switch)]
    pub no_check: bool,
}

/// Fields of a result, which replace those of the row that have their names; the last one is of a beam search.
const FIELDS: [&str; 6] = ["prompt_tokens", "tokens", "text", "logprobs", "finish", "score"];

#[derive(Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    row: &'a Row,
    prompt_tokens: &'a [u32],
    tokens: &'a [u32],
    /// Null where the directory has no tokenizer.
    text: Option<&'a str>,
    logprobs: &'a [f32],
    finish: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    score: Option<f32>,
}

/// `true`, `false` or `never`.
fn early_stopping(text: &str) -> std::result::Result<EarlyStopping, String> {
    match text {
        "true" => Ok(EarlyStopping::True),
        "false" => Ok(EarlyStopping::False),
        "never" => Ok(EarlyStopping::Never),
        _ => Err(format!("{text} is no early stopping, true, false and never are")),
    }
}

/// The beam search that the options ask for.
fn beams(args: &Args) -> Result<Option<Beams>> {
    let Args { beams: count, early_stopping, length_penalty, samples, temperature, top_k, top_p, min_p, .. } = *args;
    let drawing = [
        ("--temperature", ![0.0, 1.0].contains(&temperature)),
        ("--top-k", top_k != 0),
        ("--top-p", top_p != 1.0),
        ("--min-p", min_p != 0.0),
    ];
    let of_searches = [("--early-stopping", early_stopping.is_some()), ("--length-penalty", length_penalty.is_some())];
    let searches = count > 1;
    for (option, _) in if searches { &drawing[..] } else { &of_searches[..] }.iter().filter(|(_, given)| *given) {
        let why =
            if searches { "draws tokens, --beams searches" } else { "is of a beam search, with --beams of 2 or more" };
        return Err(Error::usage(format!("{option} {why}")).hint(format!("leave out {option} or --beams")));
    }
    Error::need(count > 0, "--beams is 0, needed 1 (no beam search) or more")?;
    Error::need(
        !searches || samples <= count,
        format!("--samples {samples} of --beams {count}: needed at most as many"),
    )?;
    let length_penalty = length_penalty.unwrap_or(1.0);
    Error::need(length_penalty.is_finite(), format!("--length-penalty is {length_penalty}, needed a finite number"))?;
    Ok(searches.then_some(Beams { count, early_stopping: early_stopping.unwrap_or_default(), length_penalty }))
}

pub fn run(args: &Args) -> Result<()> {
    let beams = beams(args)?;
    let config = config(args)?;
    let options = Options { device: args.device, dtype: args.dtype, check: !args.no_check };
    let input = match (&args.input, &args.prompt) {
        (Some(input), None) => input,
        (None, Some(prompt)) if beams.is_none() => return show(args, config, options, prompt),
        (None, Some(_)) => {
            return Err(Error::usage("--prompt writes text while it is drawn, --beams has none before its end")
                .hint("give the prompt as a row of --input"));
        }
        _ => return Err(Error::usage("generate needs one of the options --input and --prompt")),
    };
    let ranks = Ranks::start(input)?;
    let (tokenizer, asked) = ranks.agree(read(args, input, &config, &ranks))?;
    let head = Head::LanguageModel;
    let inference = device::open("generate", &args.model, options, head, (config.clone(), args.seed), &ranks)?;
    answer(args, (&config, beams), (&inference, tokenizer.as_ref()), &asked, ranks)
}

/// Writes the responses to one prompt as they are drawn.
fn show(args: &Args, config: RolloutConfig, options: Options, prompt: &str) -> Result<()> {
    let config = RolloutConfig { samples_per_prompt: 1, ..config };
    let mut talk = Talk::open("generate", &args.model, options, config, args.seed)?;
    let tokens = talk.tokenizer.encode(prompt, true)?;
    for _ in 0..args.samples {
        talk.answer(tokens.clone())?;
    }
    talk.finish()
}

/// The rows of this rank, and what is asked of the model for each: `--samples` requests a row.
struct Asked {
    rows: Vec<Row>,
    requests: Vec<Request>,
}

/// The tokenizer of the model, if it has one, and what this rank answers.
fn read(args: &Args, input: &Path, config: &RolloutConfig, ranks: &Ranks) -> Result<(Option<Tokenizer>, Asked)> {
    let arch = Arch::load(&args.model)?;
    let tokenizer = Tokenizer::find(&args.model)?;
    let prompts = prompts(input, &arch, tokenizer.as_ref(), args)?;
    let (mut all, prompts): (Vec<Row>, Vec<Prompt>) = prompts.into_iter().unzip();
    let stop = Arc::new(Stop::new(config, &arch.eos_tokens));
    let rows = args.samples.max(args.beams);
    let weights: Vec<usize> = prompts.iter().map(|p| p.tokens.len() + rows * args.max_new_tokens).collect();
    let own = ranks.share(&weights);
    let requests = rollout::requests(&prompts[own.clone()], config, &stop, arch.context)?;
    Ok((tokenizer, Asked { rows: all.drain(own).collect(), requests }))
}

/// Answers the requests of this rank, and writes all responses in the order of the rows.
fn answer(
    args: &Args,
    (config, beams): (&RolloutConfig, Option<Beams>),
    (inference, tokenizer): (&InferenceModel, Option<&Tokenizer>),
    Asked { rows, requests }: &Asked,
    mut ranks: Ranks,
) -> Result<()> {
    let start = Instant::now();
    let model = Model { transformer: &inference.transformer, weights: &inference.weights, tokenizer };
    let mut engine = Engine::new(config, 0);
    engine.allow(inference.cache_bytes(config, requests.len() * args.beams));
    let mut waiting: Vec<Option<Response>> = requests.iter().map(|_| None).collect();
    let (mut next, mut new_tokens) = (0, 0);
    let mut finished = |i: usize, response: &Response| -> Result<()> {
        new_tokens += response.tokens.len();
        waiting[i] = Some(response.clone());
        while let Some(response) = waiting.get_mut(next).and_then(Option::take) {
            ranks.write(&Line {
                row: &rows[requests[next].prompt],
                prompt_tokens: &requests[next].tokens,
                tokens: &response.tokens,
                text: tokenizer.is_some().then_some(&response.text),
                logprobs: &response.logprobs,
                finish: response.finish.name(),
                score: response.score,
            })?;
            next += 1;
        }
        Ok(())
    };
    let bar = progress("generate", requests.len());
    let mut hooks = Hooks {
        stop: &|| false,
        progress: &mut |now| bar.set_position(now.finished as u64),
        drawn: &mut |_, _| {},
        finished: &mut finished,
    };
    let rng = Rng::new(args.seed, Purpose::Sample);
    let done = match beams {
        Some(beams) => engine.beam_search(model, beams, requests, &mut hooks),
        None => engine.generate(model, rng, 0, requests, &mut hooks),
    };
    let done = done.map_err(device::with_option_names);
    drop(bar);
    ranks.agree(done)?;
    if let Some(why) = engine.refused() {
        note!("generate: decoding kernel by kernel, because {why}");
    }
    let [responses, tokens] = ranks.sums([next as f64, new_tokens as f64]);
    let (seconds, memory) = (start.elapsed().as_secs_f64(), inference.describe_memory());
    let rate = tokens / seconds.max(1e-9);
    ranks.say(&format!(
        "generate: {responses} responses, {tokens} new tokens in {seconds:.2} s ({rate:.0} tokens/s){memory}"
    ));
    ranks.finish()
}

fn config(args: &Args) -> Result<RolloutConfig> {
    let config = RolloutConfig {
        samples_per_prompt: args.samples,
        response_tokens_max: args.max_new_tokens,
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        repetition_penalty: args.repetition_penalty,
        stop: args.stop.clone(),
        ignore_eos: args.ignore_eos,
        ..RolloutConfig::default()
    };
    checked(config)
}

/// Refuses sampling that has no meaning; errors name options instead of a job's keys.
pub(super) fn checked(config: RolloutConfig) -> Result<RolloutConfig> {
    config.check().map_err(|mut error| {
        for (key, option) in [("samples_per_prompt", "samples"), ("response_tokens_max", "max-new-tokens")] {
            error.message = error.message.replace(&format!("rollout.{key}"), &format!("--{option}"));
        }
        error.message = error.message.replace("rollout.", "--").replace('_', "-");
        error
    })?;
    Ok(config)
}

/// The rows, without what a result replaces, and their prompts; ids, which key the random numbers, are line numbers from 0.
fn prompts(input: &Path, arch: &Arch, tokenizer: Option<&Tokenizer>, args: &Args) -> Result<Vec<(Row, Prompt)>> {
    let mut id = 0;
    let fields = if args.beams > 1 { &FIELDS } else { &FIELDS[..5] };
    rows::read(input, |row| {
        let tokens = prompt_tokens(row, tokenizer, &args.chat_template_args)?;
        rows::check(&tokens, arch)?;
        if tokens.len() == arch.context {
            return Err(Error::data(format!("the prompt fills the model's context of {} tokens", arch.context))
                .hint("shorten it: at least one new token needs room"));
        }
        id += 1;
        let kept = row.iter().filter(|(key, _)| !fields.contains(&key.as_str()));
        let row = kept.map(|(key, value)| (key.clone(), value.clone())).collect();
        Ok((row, Prompt { id: id - 1, tokens, source: input.display().to_string(), ..Prompt::default() }))
    })
}

fn prompt_tokens(row: &Row, tokenizer: Option<&Tokenizer>, args: &Row) -> Result<Vec<u32>> {
    let given: Vec<&str> = ["prompt", "messages", "tokens"].into_iter().filter(|key| row.contains_key(*key)).collect();
    let &[key] = &given[..] else {
        let what = if given.is_empty() { "none of prompt, messages, tokens".into() } else { given.join(" and ") };
        return Err(Error::data(format!("the row has {what}, needed is one of prompt, messages, tokens")));
    };
    if key == "tokens" {
        return rows::tokens(row, key);
    }
    let tokenizer = rows::needed(tokenizer, key)?;
    if key == "prompt" {
        let text = rows::text(row, key)?;
        return if text.is_empty() { Err(Error::data("the prompt is empty")) } else { tokenizer.encode(text, true) };
    }
    match &row[key] {
        Value::Array(messages) if messages.is_empty() => Err(Error::data("messages are empty")),
        Value::Array(_) => tokenizer.encode_chat(&row[key], &template_variables(row, args)?, true),
        _ => Err(Error::data("messages is no list of messages")),
    }
}
