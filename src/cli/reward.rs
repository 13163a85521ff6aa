//! `rlhf-hpc reward`: scores of a reward model directory.

use super::generate::dtype;
use super::rows::{self, Row};
use crate::error::{Error, Result};
use crate::model::{Arch, Head, Keys, Transformer, load, packed_positions};
use crate::tensor::DType;
use crate::text::Tokenizer;
use argh::FromArgs;
use serde::Serialize;
use std::path::PathBuf;

/// Tokens of one forward.
const BATCH_TOKENS: usize = 4096;

/// Score rows with a reward model, a JSON line in and a JSON line out, in the same order.
#[derive(FromArgs, Debug)]
#[argh(subcommand, name = "reward")]
#[argh(
    note = "A row has tokens, or prompt and response. A result has reward: the head's output at the last token. prompt and
response are joined and encoded with the tokenizer's own special tokens; nothing else is added, so write the
end token into the response where the model was trained with one."
)]
pub struct Args {
    /// a Hugging Face directory of a reward model
    #[argh(option)]
    pub model: PathBuf,

    /// rows as JSON lines; - is standard input
    #[argh(option)]
    pub input: PathBuf,

    /// subtract the mean and divide by the std that config.json names
    #[argh(switch)]
    pub normalize: bool,

    /// f32 or bf16: what the weights are held in (default: f32)
    #[argh(option, default = "DType::F32", from_str_fn(dtype))]
    pub dtype: DType,
}

#[derive(Serialize)]
struct Line {
    reward: f32,
}

/// # Errors
/// `Data` for a bad row, or a directory that holds no reward model; `Usage` for `--normalize` without mean and std.
pub fn run(args: &Args) -> Result<()> {
    if !rows::is_worker() {
        return Ok(());
    }
    let arch = Arch::load(&args.model)?;
    let dir = args.model.display();
    if arch.head != Head::Value {
        return Err(Error::data(format!("{dir} holds a language model, needed is a reward model"))
            .hint("its config.json names a class like LlamaForSequenceClassification, and its tensors score.weight"));
    }
    let (mean, std) = match (args.normalize, arch.reward_mean_std) {
        (false, _) => (0.0, 1.0),
        (true, Some((mean, std))) if std > 0.0 => (mean, std),
        (true, _) => {
            return Err(Error::usage(format!("--normalize: {dir}/config.json has no mean and positive std"))
                .hint("leave it out for raw rewards"));
        }
    };
    let tokenizer = if args.model.join("tokenizer.json").exists() { Some(Tokenizer::load(&args.model)?) } else { None };
    let all = rows::read(&args.input, |row| {
        let tokens = row_tokens(row, tokenizer.as_ref())?;
        rows::check(&tokens, &arch)?;
        Ok(tokens)
    })?;
    let (arch, weights) = load::load(&args.model, Head::Value, args.dtype, 0)?;
    let transformer = Transformer::new(&arch, &weights.table);
    for batch in rows::batches(all.iter().map(Vec::len), BATCH_TOKENS) {
        let batch = &all[batch];
        let mut cu_seqlens = vec![0];
        for row in batch {
            cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + row.len());
        }
        let last: Vec<u32> = cu_seqlens[1..].iter().map(|&end| end as u32 - 1).collect();
        let keys = Keys::Packed { cu_seqlens: &cu_seqlens };
        let hidden = transformer.forward(&weights, &batch.concat(), &packed_positions(&cu_seqlens), keys, None);
        for reward in transformer.values(&weights, &hidden, &last) {
            rows::write(&Line { reward: (reward - mean) / std })?;
        }
    }
    Ok(())
}

fn row_tokens(row: &Row, tokenizer: Option<&Tokenizer>) -> Result<Vec<u32>> {
    if row.contains_key("tokens") {
        return rows::tokens(row, "tokens");
    }
    let (prompt, response) = (rows::text(row, "prompt")?, rows::text(row, "response")?);
    let tokenizer = tokenizer.ok_or_else(|| {
        Error::data("the row has texts, and the model directory no tokenizer.json").hint("give tokens")
    })?;
    if prompt.is_empty() && response.is_empty() {
        return Err(Error::data("prompt and response are empty"));
    }
    tokenizer.encode(&format!("{prompt}{response}"), true)
}
