//! `rlhf-hpc logprobs`: log-probabilities of rows of tokens.

use super::device::Options;
use super::ranks::Ranks;
use super::rows::{self, Row};
use super::scores::{ScoredRow, Scoring};
use crate::config::job::DeviceName;
use crate::config::model::DTypeName;
use crate::error::{Error, Result};
use crate::launch::inference::InferenceModel;
use crate::model::Head;
use crate::ops::linear_logprob::Extra;
use crate::text::Tokenizer;
use argh::FromArgs;
use serde::Serialize;
use std::path::PathBuf;

/// Log-probability of every token given those before it, a JSON line in and a JSON line out, in the same order.
#[derive(FromArgs, Debug)]
#[argh(subcommand, name = "logprobs")]
#[argh(
    note = "A row has tokens, a list of n ids: then logprobs is a list of n - 1 numbers, as the first token has none. Or it has
prompt and response (texts, the prompt encoded with the tokenizer's own special tokens), or is a line of
generate, with prompt_tokens and tokens: then logprobs is a list of the response's, and tokens says which."
)]
pub struct Args {
    /// a Hugging Face model directory
    #[argh(option)]
    pub model: PathBuf,

    /// rows as JSON lines; - is standard input
    #[argh(option)]
    pub input: PathBuf,

    /// cpu, gpu or auto: a GPU where there is one that suits the model and computes what the CPU does (default: auto)
    #[argh(option, default = "DeviceName::Auto")]
    pub device: DeviceName,

    /// f32, bf16 or auto: what the weights are held in; auto is bf16 on a GPU and f32 on a CPU (default: auto)
    #[argh(option, default = "DTypeName::Auto")]
    pub dtype: DTypeName,

    /// tokens of one forward; a longer row stands alone (default: 4096)
    #[argh(option, default = "4096")]
    pub batch_tokens: usize,

    /// do not compare a GPU with the CPU before, which takes about a second
    #[argh(switch)]
    pub no_check: bool,
}

#[derive(Serialize)]
struct Line<'a> {
    /// Of a response, whose logprobs these are.
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens: Option<&'a [u32]>,
    logprobs: &'a [f32],
}

pub fn run(args: &Args) -> Result<()> {
    let scoring = Scoring {
        verb: "logprobs",
        model: &args.model,
        head: Head::LanguageModel,
        input: &args.input,
        options: Options { device: args.device, dtype: args.dtype, check: !args.no_check },
        tokens_max: args.batch_tokens,
        row: scored,
        forward: |InferenceModel { transformer, weights, .. }, row| {
            let hidden = transformer.forward(weights, &row.tokens, &row.positions, row.keys(), None);
            transformer.logprobs_on_device(weights, &hidden, &row.rows, &row.targets, 1.0, Extra::Nothing)
        },
    };
    scoring.run(Ranks::start(&args.input)?, |ranks, row, logprobs| {
        let tokens = row.response.map(|first| &row.tokens[first..]);
        ranks.write(&Line { tokens, logprobs })
    })
}

fn scored(row: &Row, tokenizer: Option<&Tokenizer>) -> Result<ScoredRow> {
    let [prompt, response] = if row.contains_key("prompt_tokens") {
        [rows::tokens(row, "prompt_tokens")?, rows::tokens(row, "tokens")?]
    } else if row.contains_key("prompt") && !row.contains_key("tokens") {
        let tokenizer = rows::needed(tokenizer, "prompt")?;
        let [prompt, response] = [rows::text(row, "prompt")?, rows::text(row, "response")?];
        [tokenizer.encode(prompt, true)?, tokenizer.encode(response, false)?]
    } else {
        return Ok(ScoredRow { tokens: rows::tokens(row, "tokens")?, response: None, fields: Row::new() });
    };
    if prompt.is_empty() || response.is_empty() {
        return Err(Error::data("prompt or response is empty, at least a token of each is needed"));
    }
    Ok(ScoredRow { response: Some(prompt.len()), tokens: [prompt, response].concat(), fields: Row::new() })
}
