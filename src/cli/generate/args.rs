//! The options of `generate`.

use crate::cli::rows::{self, Row};
use crate::config::job::DeviceName;
use crate::config::limits;
use crate::config::model::DTypeName;
use crate::config::rollout::RolloutConfig;
use crate::error::{Error, Result};
use crate::rollout::{Beams, EarlyStopping};
use argh::FromArgs;
use std::path::PathBuf;

/// Generate responses: a JSON line per prompt in, a JSON line per response out, in the same order.
#[derive(FromArgs, Debug)]
#[argh(subcommand, name = "generate")]
#[argh(
    note = "A row has prompt (text, encoded with the tokenizer's own special tokens), messages (a list, through the chat
template, to which the row's tools go too) or tokens. A result is the row with prompt_tokens, the new tokens, their text, their
log-probabilities, and finish: stop, length or stop_string; of a beam search its score, too. logprobs and reward take such lines
as they are. A row may have options of its own, in an object sampling: temperature, top_k, top_p, min_p, repetition_penalty,
max_new_tokens, samples, seed, stop, ignore_eos, logit_bias, bad_words. With a seed of its own it does not matter where it stands.
Results are written as soon as those before are. All rows of a file are checked first, those of standard input are answered as
they come."
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

    /// add to the logits of tokens, by id or by a text of one token, before anything else, e.g. '{"42": -5, "yes": 1.5}'
    #[argh(option, default = "Row::new()", from_str_fn(rows::object))]
    pub logit_bias: Row,

    /// text whose tokens must not occur one behind the other, may be repeated; with and without a space before it are two texts
    #[argh(option)]
    pub bad_word: Vec<String>,

    /// responses per row (default: 1)
    #[argh(option, default = "1")]
    pub samples: usize,

    /// search with this many beams instead of drawing: --samples K are the best K, each with its score (default: 1, off)
    #[argh(option, default = "1")]
    pub beams: usize,

    /// when a search ends that has as many responses as beams: at once (true), when going on does not seem worth it (false), or when
    /// no better one is possible (never) (default: false)
    #[argh(option)]
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

    /// add top_logprobs, for each new token a list of the so many likeliest ones in its place, [id, log-probability] (default: 0, off)
    #[argh(option, default = "0")]
    pub top_logprobs: usize,

    /// go on after end tokens
    #[argh(switch)]
    pub ignore_eos: bool,

    /// cpu, gpu or auto: a GPU where there is one that suits the model and computes what the CPU does (default: auto)
    #[argh(option, default = "DeviceName::Auto")]
    pub device: DeviceName,

    /// f32, bf16 or auto: what the weights are held in; auto is bf16 on a GPU and f32 on a CPU (default: auto)
    #[argh(option, default = "DTypeName::Auto")]
    pub dtype: DTypeName,

    /// do not compare a GPU with the CPU before, which takes about a second
    #[argh(switch)]
    pub no_check: bool,
}

/// What a batch holds, whatever is searched.
const BEAMS_MAX: usize = 256;

impl Args {
    /// The sampling that the options ask for.
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

    /// Refuses what has no meaning in a beam search, where there is one, or without.
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
            let why = if searches { "is of draws, --beams searches" } else { "is of a search by --beams of 2 or more" };
            return Err(Error::usage(format!("{option} {why}")).hint(format!("leave out {option}, or change --beams")));
        }
        let fits = !searches || samples <= count;
        Error::need(fits, format!("--samples is {samples}, of --beams {count} there are at most as many"))
    }

    /// The beam search that is asked for.
    pub fn search(&self) -> Result<Option<Beams>> {
        let Self { beams: count, early_stopping, length_penalty, .. } = *self;
        limits::check_option("--beams", count, 1, BEAMS_MAX)?;
        let length_penalty = length_penalty.unwrap_or(1.0);
        Error::need(
            length_penalty.is_finite(),
            format!("--length-penalty is {length_penalty}, needed a finite number"),
        )?;
        let search = Beams { count, early_stopping: early_stopping.unwrap_or_default(), length_penalty };
        Ok((count > 1).then_some(search))
    }
}

/// Refuses sampling that has no meaning; errors name options instead of a job's keys.
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
