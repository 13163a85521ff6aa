//! `init`: a model directory with random weights, to train from scratch.

use super::out::note;
use crate::error::{Error, Result};
use crate::model::export::Export;
use crate::model::{Arch, ParamTable, init};
use crate::sys::files;
use crate::tensor::DType;
use argh::FromArgs;
use std::path::PathBuf;
use std::sync::Arc;

/// make a Hugging Face model directory with random weights from a config.json
#[derive(FromArgs)]
#[argh(subcommand, name = "init")]
pub struct Args {
    /// a Hugging Face config.json (llama, mistral, qwen2 or qwen3)
    #[argh(option)]
    config: PathBuf,
    /// directory whose tokenizer files are copied; its vocabulary must fit the config's vocab_size
    #[argh(option)]
    tokenizer: Option<PathBuf>,
    /// directory to write
    #[argh(option)]
    out: PathBuf,
    /// seed of the weights (default: 42)
    #[argh(option, default = "42")]
    seed: u64,
}

pub fn run(args: &Args) -> Result<()> {
    let text = files::read_to_string(&args.config).map_err(|e| Error::io("read", &args.config, &e))?;
    let config = serde_json::from_str(&text)
        .map_err(|e| Error::data(format!("{} must be a JSON object: {e}", args.config.display())))?;
    let arch = Arch::from_config(&config).map_err(|e| e.within(args.config.display()))?;
    if let Some(dir) = &args.tokenizer {
        let vocabulary = crate::text::Tokenizer::load(dir)?.vocabulary();
        if vocabulary > arch.vocabulary {
            return Err(Error::usage(format!(
                "the tokenizer {} has {vocabulary} tokens, but {} has vocab_size {}",
                dir.display(),
                args.config.display(),
                arch.vocabulary
            ))
            .hint("raise vocab_size in the config, or train a smaller tokenizer"));
        }
    }
    let table = Arc::new(ParamTable::new(&arch, arch.head));
    let mut export = Export::begin(&args.out, &arch, &table, DType::F32, args.tokenizer.as_deref())?;
    (0..table.units().len()).try_for_each(|u| export.unit(&init::unit(&table, u, DType::F32, args.seed)))?;
    export.commit()?;
    note!("{}: {} parameters", args.out.display(), table.parameters());
    Ok(())
}
