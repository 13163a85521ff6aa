//! `rlhf-hpc logprobs`: log-probabilities of rows of tokens.

use super::generate::dtype;
use super::rows;
use crate::error::Result;
use crate::model::{Arch, Head, Keys, Transformer, Weights, load, packed_positions};
use crate::tensor::DType;
use argh::FromArgs;
use serde::Serialize;
use std::path::PathBuf;

/// Tokens of one forward.
const BATCH_TOKENS: usize = 4096;

/// Log-probability of every token given those before it, a JSON line in and a JSON line out, in the same order.
#[derive(FromArgs, Debug)]
#[argh(subcommand, name = "logprobs")]
#[argh(
    note = "A row has tokens, a list of n ids. A result has logprobs, a list of n - 1 numbers: the first token has none."
)]
pub struct Args {
    /// a Hugging Face model directory
    #[argh(option)]
    pub model: PathBuf,

    /// rows as JSON lines; - is standard input
    #[argh(option)]
    pub input: PathBuf,

    /// f32 or bf16: what the weights are held in (default: f32)
    #[argh(option, default = "DType::F32", from_str_fn(dtype))]
    pub dtype: DType,
}

#[derive(Serialize)]
struct Line<'a> {
    logprobs: &'a [f32],
}

/// # Errors
/// `Data` for a bad row or model directory; `Io`.
pub fn run(args: &Args) -> Result<()> {
    if !rows::is_worker() {
        return Ok(());
    }
    let arch = Arch::load(&args.model)?;
    let all = rows::read(&args.input, |row| {
        let tokens = rows::tokens(row, "tokens")?;
        rows::check(&tokens, &arch)?;
        Ok(tokens)
    })?;
    let (arch, weights) = load::load(&args.model, Head::LanguageModel, args.dtype, 0)?;
    let transformer = Transformer::new(&arch, &weights.table);
    for batch in rows::batches(all.iter().map(Vec::len), BATCH_TOKENS) {
        let scored = score(&transformer, &weights, &all[batch.clone()]);
        let mut left = &scored[..];
        for row in &all[batch] {
            let (logprobs, rest) = left.split_at(row.len() - 1);
            left = rest;
            rows::write(&Line { logprobs })?;
        }
    }
    Ok(())
}

/// Log-probabilities of all tokens but the first of each row, one row behind the other.
fn score(transformer: &Transformer, weights: &Weights, batch: &[Vec<u32>]) -> Vec<f32> {
    let mut cu_seqlens = vec![0];
    let (mut places, mut targets) = (Vec::new(), Vec::new());
    for row in batch {
        let start = cu_seqlens[cu_seqlens.len() - 1];
        places.extend((0..row.len() - 1).map(|i| (start + i) as u32));
        targets.extend_from_slice(&row[1..]);
        cu_seqlens.push(start + row.len());
    }
    let keys = Keys::Packed { cu_seqlens: &cu_seqlens };
    let hidden = transformer.forward(weights, &batch.concat(), &packed_positions(&cu_seqlens), keys, None);
    transformer.logprobs(weights, &hidden, &places, &targets, 1.0, false).0
}
