//! `init`: a model directory with random weights, to train from scratch.

use super::hub;
use super::out::{self, note};
use super::tokenizer;
use crate::error::{Error, Result};
use crate::model::export::Export;
use crate::model::families::Family;
use crate::model::{Arch, ParamTable, init, tiny};
use crate::sys::files;
use crate::tensor::DType;
use crate::text::Tokenizer;
use argh::{ArgsInfo, FromArgs};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// make a Hugging Face model directory with random weights, from a config.json or like another model
#[derive(ArgsInfo, FromArgs)]
#[argh(subcommand, name = "init")]
pub struct Args {
    /// a Hugging Face config.json
    #[argh(option)]
    config: Option<PathBuf>,
    /// a model directory whose shape the model gets; or, with --tiny, a family such as qwen3
    #[argh(option)]
    like: Option<String>,
    /// make the model of --like small: some 100,000 parameters
    #[argh(switch)]
    tiny: bool,
    /// directory whose tokenizer files are copied; a tiny model gets its vocabulary, and another one must have room for
    /// it
    #[argh(option, from_str_fn(hub::model))]
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
    let tokenizer = args.tokenizer.as_deref().map(tokenizer::load).transpose()?;
    let (config, from) = match (&args.config, &args.like) {
        (Some(_), None) if args.tiny => return Err(Error::usage("--tiny needs --like")),
        (Some(path), None) => (read(path)?, path.display().to_string()),
        (None, Some(like)) => (like_model(like, args.tiny, tokenizer.as_ref())?, like.clone()),
        _ => return Err(Error::usage("init needs either --config or --like")),
    };
    let mut arch = Arch::from_config(&config).map_err(|e| e.within(&from))?;
    if arch.wrapper.is_some() && (arch.family.is_inside() || arch.sight.is_some()) {
        arch = arch.with_tower().map_err(|e| e.within(&from))?;
    } else {
        // New weights are a language model's alone.
        arch.wrapper = None;
    }
    if let (Some(tokenizer), Some(dir)) = (&tokenizer, &args.tokenizer) {
        let vocabulary = tokenizer.vocabulary();
        arch = arch.ending_with(tokenizer.eos_ids());
        if vocabulary > arch.vocabulary {
            return Err(Error::usage(format!(
                "the tokenizer {} has {vocabulary} tokens, but {from} has vocab_size {}",
                dir.display(),
                arch.vocabulary
            ))
            .hint("raise vocab_size in the config, or train a smaller tokenizer"));
        }
    }
    let dtype = dtype(&arch.source, &from)?;
    let parameters = write(&arch, dtype, args.seed, args.tokenizer.as_deref(), &args.out)?;
    note!("{}: {parameters} parameters in {}", args.out.display(), dtype.name());
    Ok(())
}

/// Writes a model with random weights and the files of a tokenizer. Returns the number of its parameters.
///
/// # Errors
/// `Io`; the errors of `Export::begin`.
pub fn write(arch: &Arch, dtype: DType, seed: u64, tokenizer: Option<&Path>, out: &Path) -> Result<usize> {
    let table = Arc::new(ParamTable::new(arch, arch.head));
    let mut export = Export::begin(out, arch, &table, dtype, tokenizer)?;
    (0..table.units().len()).try_for_each(|u| export.unit(&init::unit(&table, u, dtype, seed)))?;
    export.commit()?;
    Ok(table.parameters())
}

fn read(path: &Path) -> Result<Map<String, Value>> {
    let text = files::read_to_string(path).map_err(|e| Error::io("read", path, &e))?;
    serde_json::from_str(&text).map_err(|e| Error::data(format!("{} must be a JSON object: {e}", path.display())))
}

/// The config.json of a model like another one. With `is_tiny`, the name of a family means the family.
fn like_model(like: &str, is_tiny: bool, tokenizer: Option<&Tokenizer>) -> Result<Map<String, Value>> {
    let (dir, vocabulary) = (hub::model_dir(like), tokenizer.map_or(tiny::VOCABULARY, Tokenizer::vocabulary));
    let is_dir = dir.exists() || like.contains('/');
    let mut config = match Family::named_or_inside(like) {
        // The name of a family is its language model alone, and that of a model around it has a tower.
        Ok(family) if is_tiny && like == family.name => tiny::of_family(family, vocabulary),
        Ok(family) if is_tiny => seeing(family, tiny::of_family(family, vocabulary), tokenizer)?,
        Ok(_) if !is_dir => {
            let what = format!("--like {like} needs --tiny, as a family has models of many sizes");
            return Err(Error::usage(what).hint("pass --tiny, or a model directory"));
        }
        Err(error) if !is_dir => return Err(error.within("--like")),
        _ => {
            let arch = Arch::load(&dir)?;
            match (is_tiny, &arch.wrapper) {
                (true, None) => tiny::scaled(&arch, vocabulary),
                (true, Some(_)) => seeing(arch.family, tiny::scaled(&arch, vocabulary), tokenizer)?,
                (false, Some(wrapper)) if arch.family.is_inside() || arch.sight.is_some() => {
                    wrapper.wrap(arch.source.clone())
                }
                (false, _) => arch.source,
            }
        }
    };
    if let Some(tokenizer) = tokenizer.filter(|_| is_tiny) {
        let ends = match tokenizer.eos_ids() {
            [] => Value::Null,
            [one] => json!(one),
            several => json!(several),
        };
        config.insert("bos_token_id".into(), json!(tokenizer.bos_id()));
        config.insert("eos_token_id".into(), ends);
    }
    Ok(config)
}

/// The config.json of a tiny model around that of its language model, if its tower is known. Without a tokenizer, the last
/// tokens are those of images. A family with language models of their own is one if the tokenizer has no such tokens.
fn seeing(family: &Family, text: Map<String, Value>, tokenizer: Option<&Tokenizer>) -> Result<Map<String, Value>> {
    let mut last = tiny::VOCABULARY as u32;
    let alone = text.clone();
    let seeing = tiny::seeing(family, text, |name| {
        let Some(tokenizer) = tokenizer else {
            last -= 1;
            return Ok(last);
        };
        let ids = tokenizer.encode(name, false)?;
        <[u32; 1]>::try_from(ids).map(|[id]| id).map_err(|_| {
            Error::usage(format!("a model that reads images needs a tokenizer with the token {name}"))
                .hint("use the tokenizer of such a model, or train one with this special token")
        })
    });
    match seeing {
        Err(why) if !family.is_inside() => {
            note!("the model is a {}, which reads text only: {}", family.name, why.message);
            Ok(alone)
        }
        seeing => seeing,
    }
}

/// The type of the weights that config.json names; f32 if it names none.
fn dtype(config: &Map<String, Value>, from: &str) -> Result<DType> {
    match ["dtype", "torch_dtype"].into_iter().find_map(|key| config.get(key)?.as_str().map(|name| (key, name))) {
        None | Some((_, "float32")) => Ok(DType::F32),
        Some((_, "bfloat16")) => Ok(DType::Bf16),
        Some((key, other)) => {
            Err(Error::usage(format!("{from}: {key} must be float32 or bfloat16 for new weights (got {other})"))
                .hint(format!("change {key} in {from}")))
        }
    }
}
