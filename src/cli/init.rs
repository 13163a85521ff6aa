//! `init`: a model directory with random weights, to train from scratch.

use super::out::{self, note};
use super::tokenizer;
use crate::error::{Error, Result};
use crate::model::export::Export;
use crate::model::{Arch, ParamTable, init};
use crate::sys::files;
use crate::tensor::DType;
use argh::FromArgs;
use serde_json::{Map, Value};
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

    /// replace an output that exists
    #[argh(switch)]
    force: bool,
    /// seed of the weights (default: 42)
    #[argh(option, default = "42")]
    seed: u64,
}

pub fn run(args: &Args) -> Result<()> {
    out::check_new([&*args.out], args.force)?;
    let text = files::read_to_string(&args.config).map_err(|e| Error::io("read", &args.config, &e))?;
    let config = serde_json::from_str(&text)
        .map_err(|e| Error::data(format!("{} must be a JSON object: {e}", args.config.display())))?;
    let mut arch = Arch::from_config(&config).map_err(|e| e.within(args.config.display()))?;
    if let Some(dir) = &args.tokenizer {
        let tokenizer = tokenizer::load(dir)?;
        let vocabulary = tokenizer.vocabulary();
        arch = arch.ending_with(tokenizer.eos_ids());
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
    let dtype = dtype(&config, args)?;
    let mut export = Export::begin(&args.out, &arch, &table, dtype, args.tokenizer.as_deref())?;
    (0..table.units().len()).try_for_each(|u| export.unit(&init::unit(&table, u, dtype, args.seed)))?;
    export.commit()?;
    note!("{}: {} parameters in {}", args.out.display(), table.parameters(), dtype.name());
    Ok(())
}

/// The type of the weights that config.json names; f32 if it names none.
fn dtype(config: &Map<String, Value>, args: &Args) -> Result<DType> {
    match ["dtype", "torch_dtype"].into_iter().find_map(|key| config.get(key)?.as_str().map(|name| (key, name))) {
        None | Some((_, "float32")) => Ok(DType::F32),
        Some((_, "bfloat16")) => Ok(DType::Bf16),
        Some((key, other)) => {
            let config = args.config.display();
            Err(Error::usage(format!("{config}: {key} must be float32 or bfloat16 for new weights (got {other})"))
                .hint(format!("change {key} in {config}")))
        }
    }
}
