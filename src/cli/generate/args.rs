//! The options of `generate`.

use crate::cli::hub;
use crate::cli::rows::{self, Row};
use crate::cli::texts::Template;
use crate::config::job::DeviceName;
use crate::config::limits;
use crate::config::model::DTypeName;
use crate::config::rollout::RolloutConfig;
use crate::error::{Error, Result};
use crate::rollout::{Beams, EarlyStopping};
use argh::{ArgsInfo, FromArgs};
use std::path::PathBuf;

/// Generate responses: one JSON line per prompt in, one JSON line per response out, in the same order.
// Each flag is an option of its own.
#[expect(clippy::struct_excessive_bools)]
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "generate")]
#[argh(
    note = "A row has one of: prompt (a string, encoded with the tokenizer's own special tokens), messages (a list, encoded \
            with the chat template, which also gets the row's tools), or tokens.\n\
            A result is the row with prompt_tokens, the new tokens, their text, their log-probabilities, and finish: stop, length or \
            stop_string. A beam search adds its score. The verbs logprobs and reward accept these lines as input.\n\
            A row may set options of its own in an object sampling: temperature, top_k, top_p, min_p, repetition_penalty, \
            max_new_tokens, samples, seed, stop, ignore_eos, logit_bias, bad_words. With a seed of its own, a row's result does not \
            depend on its position.\n\
            Results are written in the order of the rows, as soon as possible. All rows of a file are checked first. Rows of standard \
            input are processed as they arrive."
)]
pub struct Args {
    /// a Hugging Face model directory
    #[argh(option, from_str_fn(hub::model))]
    pub model: PathBuf,

    /// a directory with a LoRA adapter (PEFT) for --model; given as --model, it is used with its own base model
    #[argh(option, from_str_fn(hub::model))]
    pub adapter: Option<PathBuf>,

    /// rows as JSON lines; - is standard input
    #[argh(option, from_str_fn(hub::rows))]
    pub input: Option<PathBuf>,

    /// one prompt instead of rows; its response is streamed as plain text
    #[argh(option)]
    pub prompt: Option<String>,

    /// a JPEG or PNG file that --prompt is about; may be repeated
    #[argh(option)]
    pub image: Vec<String>,

    /// text prompts are a user's message in the chat template (default: as in the job that exported the model)
    #[argh(switch)]
    pub chat_template: bool,

    /// use text prompts as they are
    #[argh(switch)]
    pub no_chat_template: bool,

    /// extra variables for the chat template, e.g. '{"enable_thinking": false}'
    #[argh(option, default = "Row::new()", from_str_fn(rows::object))]
    pub chat_template_args: Row,

    /// the maximum number of new tokens per response (default: 128)
    #[argh(option, default = "128")]
    pub max_new_tokens: usize,

    /// sampling temperature; 0 is greedy (default: 1)
    #[argh(option, default = "1.0")]
    pub temperature: f32,

    /// sample from the k most likely tokens (default: 0, off)
    #[argh(option, default = "0")]
    pub top_k: usize,

    /// sample from the most likely tokens whose total probability reaches p (default: 1, off)
    #[argh(option, default = "1.0")]
    pub top_p: f32,

    /// sample from tokens with at least this share of the largest probability (default: 0, off)
    #[argh(option, default = "0.0")]
    pub min_p: f32,

    /// penalty that lowers the logits of tokens that already occurred (default: 1, off)
    #[argh(option, default = "1.0")]
    pub repetition_penalty: f32,

    /// values added to logits before anything else, by token id or one-token text, e.g. '{"42": -5, "yes": 1.5}'
    #[argh(option, default = "Row::new()", from_str_fn(rows::object))]
    pub logit_bias: Row,

    /// text whose tokens must not occur in sequence; with and without a leading space are two texts; may be repeated
    #[argh(option)]
    pub bad_word: Vec<String>,

    /// number of responses per row (default: 1)
    #[argh(option, default = "1")]
    pub samples: usize,

    /// beam search with this many beams, no sampling; --samples K returns the best K with scores (default: 1, off)
    #[argh(option, default = "1")]
    pub beams: usize,

    /// when a beam search with as many responses as beams ends: at once (true), when a better one is unlikely (false),
    /// or when none is possible (never) (default: false)
    #[argh(option)]
    pub early_stopping: Option<EarlyStopping>,

    /// exponent p of a beam search's score: sum of log-probabilities / tokens^p (default: 1)
    #[argh(option)]
    pub length_penalty: Option<f64>,

    /// sampling seed (default: 0)
    #[argh(option, default = "0")]
    pub seed: u64,

    /// text that ends a response and is removed from it; may be repeated
    #[argh(option)]
    pub stop: Vec<String>,

    /// add top_logprobs: at each new token the N most likely tokens as [id, log-probability] (default: 0, off)
    #[argh(option, default = "0")]
    pub top_logprobs: usize,

    /// do not stop at end tokens
    #[argh(switch)]
    pub ignore_eos: bool,

    /// cpu, gpu or auto: a GPU if there is one; it must support the model and pass the self-test (default: auto)
    #[argh(option, default = "DeviceName::Auto")]
    pub device: DeviceName,

    /// dtype of the weights: f32, bf16 or auto; auto is bf16 on a GPU and f32 on a CPU (default: auto)
    #[argh(option, default = "DTypeName::Auto")]
    pub dtype: DTypeName,

    /// skip the self-test of a GPU against the CPU, which takes about a second
    #[argh(switch)]
    pub no_check: bool,
}

/// The batch size, for sampling and for beam search.
const BEAMS_MAX: usize = 256;

impl Args {
    /// The options that concern the chat template.
    pub fn template(&self) -> Template<'_> {
        Template { is_wanted: self.chat_template, is_unwanted: self.no_chat_template, args: &self.chat_template_args }
    }

    /// The sampling configuration that the options set.
    pub fn config(&self) -> Result<RolloutConfig> {
        let config = RolloutConfig {
            samples_per_prompt: self.samples,
            response_tokens_max: self.max_new_tokens,
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            stop: self.stop.clone(),
            ignore_eos: self.ignore_eos,
            ..RolloutConfig::default()
        };
        checked(config)
    }

    pub fn input_name(&self) -> String {
        self.input.as_ref().map_or(String::new(), |input| input.display().to_string())
    }

    /// Rejects options that have no meaning in a beam search, or without one.
    pub fn check(&self, config: &RolloutConfig) -> Result<()> {
        let RolloutConfig { samples_per_prompt: samples, temperature, top_k, top_p, min_p, .. } = *config;
        let (count, searches) = (self.beams, self.beams > 1);
        let given = [
            ("--temperature", searches && ![0.0, 1.0].contains(&temperature)),
            ("--top-k", searches && top_k != 0),
            ("--top-p", searches && top_p != 1.0),
            ("--min-p", searches && min_p != 0.0),
            ("--top-logprobs", searches && self.top_logprobs != 0),
            ("--early-stopping", !searches && self.early_stopping.is_some()),
            ("--length-penalty", !searches && self.length_penalty.is_some()),
        ];
        if let Some((option, _)) = given.iter().find(|(_, given)| *given) {
            let why =
                if searches { "does not apply to a beam search" } else { "needs a beam search (--beams 2 or more)" };
            return Err(Error::usage(format!("{option} {why}")).hint(format!("leave out {option}, or change --beams")));
        }
        let fits = !searches || samples <= count;
        Error::need(fits, format!("--samples must be at most --beams = {count} (got {samples})"))
    }

    /// The beam search that the options set.
    pub fn search(&self) -> Result<Option<Beams>> {
        let Self { beams: count, early_stopping, length_penalty, .. } = *self;
        limits::check_option("--beams", count, 1, BEAMS_MAX)?;
        let length_penalty = length_penalty.unwrap_or(1.0);
        Error::need(
            length_penalty.is_finite(),
            format!("--length-penalty must be a finite number (got {length_penalty})"),
        )?;
        let search = Beams { count, early_stopping: early_stopping.unwrap_or_default(), length_penalty };
        Ok((count > 1).then_some(search))
    }
}

/// Rejects invalid sampling configurations; errors name options instead of a job's keys.
pub fn checked(config: RolloutConfig) -> Result<RolloutConfig> {
    config.check().map_err(|mut error| {
        for (key, option) in [("samples_per_prompt", "samples"), ("response_tokens_max", "max-new-tokens")] {
            error.message = error.message.replace(&format!("rollout.{key}"), &format!("--{option}"));
        }
        error.message = error.message.replace("rollout.", "--").replace('_', "-");
        error
    })?;
    Ok(config)
}
