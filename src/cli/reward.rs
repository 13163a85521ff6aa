//! `rlhf-hpc reward`: scores by a reward model.

use super::device::Options;
use super::hub;
use super::model_dirs::ModelDirs;
use super::out::note;
use super::ranks::Ranks;
use super::rows::{self, Row};
use super::scores::{ScoredRow, Scoring};
use super::texts::{Template, Texts};
use crate::config::job::DeviceName;
use crate::config::model::DTypeName;
use crate::error::{Error, Result};
use crate::experience::Image;
use crate::launch::inference::InferenceModel;
use crate::learn::packed::PackedRow;
use crate::metrics::one_line;
use crate::model::Head;
use argh::{ArgsInfo, FromArgs};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Once;

/// Score rows with a reward model: one JSON line in, one JSON line out, in the same order.
// Each flag is an option of its own.
#[expect(clippy::struct_excessive_bools)]
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "reward")]
#[argh(
    note = "A row has tokens (after prompt_tokens, if it has them), or prompt and response. A result is the row with reward, \
            the head's output at the last token. prompt and response are joined and encoded with the tokenizer's own special tokens. \
            With --chat-template, they are a user's message and its answer instead. Nothing else is added. If the model was trained with an end token, write that token into the response."
)]
pub struct Args {
    /// the Hugging Face directory of a reward model
    #[argh(option, from_str_fn(hub::model))]
    pub model: PathBuf,

    /// a directory with a LoRA adapter (PEFT) for --model; given as --model, it is used with its own base model
    #[argh(option, from_str_fn(hub::model))]
    pub adapter: Option<PathBuf>,

    /// rows as JSON lines; - is standard input
    #[argh(option, from_str_fn(hub::rows))]
    pub input: PathBuf,

    /// subtract the mean and divide by the standard deviation in config.json
    #[argh(switch)]
    pub normalize: bool,

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

/// The note about texts without an end token.
static NO_END: Once = Once::new();

#[derive(Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    row: &'a Row,
    reward: f32,
}

pub fn run(args: &Args) -> Result<()> {
    let scoring = Scoring {
        verb: "reward",
        model: &args.model,
        adapter: args.adapter.as_deref(),
        head: Head::Value,
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
            let last: Vec<u32> = row.cu_seqlens[1..].iter().map(|&end| end as u32 - 1).collect();
            let PackedRow { pictures, tokens, positions, .. } = row;
            let hidden = transformer.forward_seeing(weights, pictures, tokens, positions, row.keys(), None);
            transformer.values_on_device(weights, &hidden, &last)
        },
    };
    let ranks = Ranks::start(&args.input)?;
    let (mean, std) = ranks.agree(mean_std(args))?;
    scoring.run(ranks, |ranks, row, reward| ranks.write(&Line { row: &row.fields, reward: (reward[0] - mean) / std }))
}

/// The mean and the standard deviation for normalizing rewards.
fn mean_std(args: &Args) -> Result<(f32, f32)> {
    let dirs = ModelDirs::find(&args.model, args.adapter.as_deref(), Some(Head::Value))?;
    let (arch, dir) = (dirs.arch()?, dirs.model.display());
    if dirs.head(&arch) != Head::Value {
        return Err(Error::data(format!("{dir} must hold a reward model (got a language model)"))
            .hint("pass a model with a class such as LlamaForSequenceClassification in config.json, and a tensor score.weight"));
    }
    if !args.normalize {
        return Ok((0.0, 1.0));
    }
    let positive = arch.reward_mean_std.filter(|(_, std)| *std > 0.0);
    let none = || Error::usage(format!("--normalize needs a mean and a positive std in {dir}/config.json"));
    positive.ok_or_else(|| none().hint("leave out --normalize for raw rewards"))
}

fn scored(row: &Row, texts: &Texts) -> Result<ScoredRow> {
    let (tokens, images) = row_tokens(row, texts)?;
    let mut fields = row.clone();
    fields.remove("reward");
    Ok(ScoredRow { tokens, response: None, images, fields })
}

fn row_tokens(row: &Row, texts: &Texts) -> Result<(Vec<u32>, Vec<Image>)> {
    if row.contains_key("tokens") {
        let prompt = if row.contains_key("prompt_tokens") { rows::tokens(row, "prompt_tokens")? } else { Vec::new() };
        let tokens = [prompt, rows::tokens(row, "tokens")?].concat();
        let images = texts.images(row, &tokens)?;
        return Ok((tokens, images));
    }
    if let Some((both, images)) = texts.answered(row)? {
        return Ok((both.concat(), images));
    }
    let (prompt, response) = (rows::text(row, "prompt")?, rows::text(row, "response")?);
    let tokenizer = rows::needed(texts.tokenizer.as_ref(), "texts")?;
    if prompt.is_empty() && response.is_empty() {
        return Err(Error::data("prompt and response are both empty"));
    }
    let tokens = tokenizer.encode(&format!("{prompt}{response}"), true)?;
    let ends = tokenizer.eos_ids();
    if !ends.is_empty() && !tokens.last().is_some_and(|last| ends.contains(last)) {
        NO_END.call_once(|| {
            let name = tokenizer.decode(&ends[..1], false).unwrap_or_default();
            note!("note: texts without an end token are scored as they are; if training added one, write {} at the end of each response", one_line(&name));
        });
    }
    Ok((tokens, Vec::new()))
}
