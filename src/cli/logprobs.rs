//! `rlhf-hpc logprobs`: log-probabilities of rows of tokens.

use super::device::Options;
use super::hub;
use super::ranks::Ranks;
use super::rows::{self, Row};
use super::scores::{ScoredRow, Scoring};
use super::texts::{Template, Texts};
use crate::config::job::DeviceName;
use crate::config::model::DTypeName;
use crate::data::images::has_images;
use crate::error::{Error, Result};
use crate::launch::inference::InferenceModel;
use crate::learn::packed::PackedRow;
use crate::model::Head;
use crate::ops::linear_logprob::Extra;
use argh::{ArgsInfo, FromArgs};
use serde::Serialize;
use std::path::PathBuf;

/// Compute the log-probability of every token: one JSON line in, one JSON line out, in the same order.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "logprobs")]
#[argh(note = "A row has one of:
- tokens, a list of n ids: logprobs is a list of n - 1 numbers, as the first token has none;
- prompt and response, strings (the prompt is encoded with the tokenizer's own special tokens);
- messages with images, and response;
- prompt_tokens and tokens, as generate writes them, with the images of the prompt.
With a response, logprobs has one number for each of its tokens, and tokens lists them.")]
pub struct Args {
    /// a Hugging Face model directory
    #[argh(option, from_str_fn(hub::model))]
    pub model: PathBuf,

    /// a directory with a LoRA adapter (PEFT) for --model; given as --model, it is used with its own base model
    #[argh(option, from_str_fn(hub::model))]
    pub adapter: Option<PathBuf>,

    /// rows as JSON lines; - is standard input
    #[argh(option, from_str_fn(hub::rows))]
    pub input: PathBuf,

    /// text prompts are a user's message in the chat template (default: as in the job that exported the model)
    #[argh(switch)]
    pub chat_template: bool,

    /// use text prompts as they are
    #[argh(switch)]
    pub no_chat_template: bool,

    /// extra variables for the chat template, e.g. '{"enable_thinking": false}'
    #[argh(option, default = "Row::new()", from_str_fn(rows::object))]
    pub chat_template_args: Row,

    /// cpu, gpu or auto: a GPU if there is one; it must support the model and pass the self-test (default: auto)
    #[argh(option, default = "DeviceName::Auto")]
    pub device: DeviceName,

    /// dtype of the weights: f32, bf16 or auto; auto is bf16 on a GPU and f32 on a CPU (default: auto)
    #[argh(option, default = "DTypeName::Auto")]
    pub dtype: DTypeName,

    /// tokens per forward; a longer row gets a forward of its own (default: 4096)
    #[argh(option, default = "4096")]
    pub batch_tokens: usize,

    /// skip the self-test of a GPU against the CPU, which takes about a second
    #[argh(switch)]
    pub no_check: bool,
}

#[derive(Serialize)]
struct Line<'a> {
    /// The tokens of the response that the logprobs belong to.
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens: Option<&'a [u32]>,
    logprobs: &'a [f32],
}

pub fn run(args: &Args) -> Result<()> {
    let scoring = Scoring {
        verb: "logprobs",
        model: &args.model,
        adapter: args.adapter.as_deref(),
        head: Head::LanguageModel,
        input: &args.input,
        options: Options { device: args.device, dtype: args.dtype, check: !args.no_check },
        tokens_max: args.batch_tokens,
        template: Template {
            is_wanted: args.chat_template,
            is_unwanted: args.no_chat_template,
            args: &args.chat_template_args,
        },
        row: scored,
        forward: |InferenceModel { transformer, weights, .. }, row| {
            let PackedRow { pictures, tokens, positions, .. } = row;
            let hidden = transformer.forward_seeing(weights, pictures, tokens, positions, row.keys(), None);
            transformer.logprobs_on_device(weights, &hidden, &row.rows, &row.targets, 1.0, Extra::Nothing)
        },
    };
    scoring.run(Ranks::start(&args.input)?, |ranks, row, logprobs| {
        let tokens = row.response.map(|first| &row.tokens[first..]);
        ranks.write(&Line { tokens, logprobs })
    })
}

fn scored(row: &Row, texts: &Texts) -> Result<ScoredRow> {
    let ([prompt, response], images) = if row.contains_key("prompt_tokens") {
        let both = [rows::tokens(row, "prompt_tokens")?, rows::tokens(row, "tokens")?];
        let images = texts.images(row, &both.concat())?;
        (both, images)
    } else if !row.contains_key("tokens") && (row.contains_key("prompt") || has_images(row)) {
        if let Some(both) = texts.answered(row)? {
            both
        } else {
            let tokenizer = rows::needed(texts.tokenizer.as_ref(), "prompt")?;
            let [prompt, response] = [rows::text(row, "prompt")?, rows::text(row, "response")?];
            ([tokenizer.encode(prompt, true)?, tokenizer.encode(response, false)?], Vec::new())
        }
    } else {
        let tokens = rows::tokens(row, "tokens")?;
        let images = texts.images(row, &tokens)?;
        return Ok(ScoredRow { tokens, response: None, images, fields: Row::new() });
    };
    if prompt.is_empty() || response.is_empty() {
        return Err(Error::data("prompt and response must each have at least 1 token (got an empty one)"));
    }
    Ok(ScoredRow { response: Some(prompt.len()), tokens: [prompt, response].concat(), images, fields: Row::new() })
}
