//! `rlhf-hpc shard`: converts files of rows to a memory-mapped token shard, or verifies shards with their hashes.

use super::hub;
use super::out::{self, note};
use std::path::PathBuf;
use std::time::Instant;

use argh::{ArgsInfo, FromArgs};

use super::out::say;
use super::rows::{Row, object};
use super::tokenizer;
use crate::config::data::{DataConfig, SplitBy, SplitConfig};
use crate::config::limits::{self, VOCABULARY_MAX};
use crate::data::shard::{Shard, file_of};
use crate::data::{Reading, RowKind, TEST, TRAIN, shard_rows};
use crate::error::{Error, Result};
use crate::metrics::one_line;
use crate::text::Tokenizer;

/// Convert rows of JSONL, Parquet or Arrow to a memory-mapped token shard (Megatron .bin and .idx with a sidecar).
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "shard")]
#[allow(clippy::struct_excessive_bools)]
pub struct Args {
    /// JSONL or Parquet files, or folders of save_to_disk; with --verify: prefixes of shards
    #[argh(positional, from_str_fn(hub::rows))]
    pub input: Vec<PathBuf>,

    /// directory with tokenizer.json
    #[argh(option, from_str_fn(hub::model))]
    pub tokenizer: Option<PathBuf>,

    /// output prefix: writes PREFIX.bin, PREFIX.idx, PREFIX.json, PREFIX.meta.*
    #[argh(option)]
    pub out: Option<PathBuf>,

    /// replace an output that exists
    #[argh(switch)]
    pub force: bool,

    /// only read every byte of the shards and compare it with the hashes in PREFIX.json
    #[argh(switch)]
    pub verify: bool,

    /// field with the prompt (default: prompt; with --text: text)
    #[argh(option)]
    pub prompt_key: Option<String>,

    /// field with the demonstration; without it, documents are prompts only
    #[argh(option)]
    pub response_key: Option<String>,

    /// field with the label that rewards compare with
    #[argh(option)]
    pub label_key: Option<String>,

    /// with --chat-template: field with a list of messages (default: messages)
    #[argh(option, default = "String::from(\"messages\")")]
    pub messages_key: String,

    /// text that each prompt is written into, in place of {}
    #[argh(option, default = "String::new()")]
    pub template: String,

    /// encode rows with the tokenizer's chat template
    #[argh(switch)]
    pub chat_template: bool,

    /// with --chat-template: extra variables for the template, e.g. '{"enable_thinking": false}'
    #[argh(option, default = "Row::new()", from_str_fn(object))]
    pub chat_template_args: Row,

    /// rows are plain text for data.pretrain; all tokens are trained on
    #[argh(switch)]
    pub text: bool,

    /// with --chat-template: use the assistant's turns in messages as demonstrations
    #[argh(switch)]
    pub demonstrations: bool,

    /// rows are preferences: prompt, chosen, rejected
    #[argh(switch)]
    pub pairs: bool,

    /// rows have a prompt, a response and a label, true or false (kto)
    #[argh(switch)]
    pub labelled: bool,

    /// rows have a text with a placeholder after each step, and a list of the steps' labels (step_reward)
    #[argh(switch)]
    pub steps: bool,

    /// field with the preferred response (default: chosen)
    #[argh(option, default = "String::from(\"chosen\")")]
    pub chosen_key: String,

    /// field with the other response (default: rejected)
    #[argh(option, default = "String::from(\"rejected\")")]
    pub rejected_key: String,

    /// field with a number, the margin by which the preferred response is better
    #[argh(option, default = "String::new()")]
    pub margin_key: String,

    /// field to keep for rewards and curricula (all: every field); may be repeated
    #[argh(option)]
    pub keep_field: Vec<String>,

    /// field with the name of the row's split
    #[argh(option)]
    pub split_field: Option<String>,

    /// share of the rows in split test, chosen by a hash of the prompt
    #[argh(option)]
    pub split_ratio: Option<f64>,

    /// file whose rows are in split test (all others are in train); may be repeated
    #[argh(option)]
    pub split_test: Vec<PathBuf>,

    /// print this many rows as the model sees them; trained tokens are in ⟦⟧
    #[argh(option, default = "0")]
    pub show: usize,

    /// seed of --split-ratio (default: 0)
    #[argh(option, default = "0")]
    pub seed: u64,

    /// vocabulary size of the model, if it differs from the tokenizer's
    #[argh(option)]
    pub vocabulary: Option<usize>,
}

pub fn run(args: &Args) -> Result<()> {
    if args.verify {
        return verify(args);
    }
    let (Some(tokenizer), Some(out)) = (&args.tokenizer, &args.out) else {
        return Err(Error::usage("shard needs --tokenizer and --out")
            .hint("pass both, or --verify to compare existing shards with their hashes"));
    };
    if args.input.is_empty() {
        return Err(Error::usage("shard needs at least one input file"));
    }
    out::check_new([".bin", ".idx"].map(|suffix| file_of(out, suffix)).iter().map(AsRef::as_ref), args.force)?;
    let is_told = args.chat_template || args.chat_template_args.is_empty();
    Error::need(is_told, "--chat-template-args needs --chat-template")?;
    let default = DataConfig::default();
    let prompt_key = if args.text { default.pretrain_key } else { default.prompt_key };
    let config = DataConfig {
        prompt_key: args.prompt_key.clone().unwrap_or(prompt_key),
        response_key: args.response_key.clone().unwrap_or_else(|| "response".to_owned()),
        chosen_key: args.chosen_key.clone(),
        rejected_key: args.rejected_key.clone(),
        margin_key: args.margin_key.clone(),
        label_key: args.label_key.clone().unwrap_or_default(),
        messages_key: args.messages_key.clone(),
        template: args.template.clone(),
        chat_template: args.chat_template,
        chat_template_args: args.chat_template_args.clone(),
        split: split(args)?,
        ..DataConfig::default()
    };
    config.check_template().map_err(|e| e.within("--template"))?;
    let tokenizer = &tokenizer::load(tokenizer)?;
    if args.chat_template {
        tokenizer.warn_of_turn_end(&args.chat_template_args);
    }
    let kind = match args.response_key.is_some() || args.demonstrations {
        _ if args.pairs => RowKind::Pair,
        _ if args.labelled => RowKind::Labelled,
        _ if args.steps => RowKind::Steps,
        _ if args.text => RowKind::Text,
        true => RowKind::Demonstration,
        false => RowKind::Prompt,
    };
    let by_file = config.split.by == SplitBy::File;
    let train = args.input.iter().map(|path| (&**path, by_file.then_some(TRAIN)));
    let inputs: Vec<_> = train.chain(args.split_test.iter().map(|path| (&**path, Some(TEST)))).collect();
    let vocabulary = args.vocabulary.unwrap_or_else(|| tokenizer.vocabulary());
    limits::check_option("--vocabulary", vocabulary, 1, VOCABULARY_MAX)?;
    let start = Instant::now();
    let reading = Reading { config: &config, kind, tokenizer, vocabulary };
    let sidecar = shard_rows(reading, &inputs, &args.keep_field, out)?;
    let seconds = start.elapsed().as_secs_f64();
    note!(
        "shard: {} documents, {} tokens in {seconds:.1} s ({:.2} million tokens/s), in {}",
        sidecar.documents,
        sidecar.tokens,
        sidecar.tokens as f64 / seconds / 1e6,
        out.display()
    );
    for split in &sidecar.splits {
        note!("shard: split {:?} has {} documents", split.name, split.documents);
    }
    show(args.show, &Shard::open(out, vocabulary)?, tokenizer)
}

/// The first `most` rows.
fn show(most: usize, shard: &Shard, tokenizer: &Tokenizer) -> Result<()> {
    for i in 0..most.min(shard.documents()) {
        let (document, meta) = (shard.document(i)?, shard.meta(i)?);
        // Prompts and responses alternate.
        let parts = document.iter().enumerate().map(|(i, tokens)| (&tokens[..], i % 2 == 1));
        let label = if meta.label.is_empty() { String::new() } else { format!(", label {}", one_line(&meta.label)) };
        let tokens: usize = document.iter().map(Vec::len).sum();
        say!("{}: {tokens} tokens{label}\n  {}", meta.source, one_line(&tokenizer.marked(parts)?));
    }
    Ok(())
}

fn verify(args: &Args) -> Result<()> {
    if args.input.is_empty() || args.out.is_some() {
        return Err(Error::usage("shard --verify needs prefixes of shards, and does not accept --out"));
    }
    for prefix in &args.input {
        let known = Shard::has_sidecar(prefix);
        let shard = Shard::open(prefix, args.vocabulary.unwrap_or(usize::MAX))?;
        shard.verify()?;
        let (documents, tokens) = (shard.documents(), shard.tokens());
        let how = if known { "all hashes match" } else { "no sidecar, all tokens were read" };
        say!("{}: {documents} documents, {tokens} tokens: {how}", shard.prefix().display());
    }
    Ok(())
}

fn split(args: &Args) -> Result<SplitConfig> {
    let none = SplitConfig { seed: args.seed, ..SplitConfig::default() };
    match (&args.split_field, args.split_ratio, args.split_test.is_empty()) {
        (None, None, true) => Ok(none),
        (Some(field), None, true) => Ok(SplitConfig { by: SplitBy::Field, field: field.clone(), ..none }),
        (None, None, false) => Ok(SplitConfig { by: SplitBy::File, ..none }),
        (None, Some(eval_ratio), true) if eval_ratio > 0.0 && eval_ratio < 1.0 => {
            Ok(SplitConfig { by: SplitBy::Ratio, eval_ratio, ..none })
        }
        (None, Some(eval_ratio), true) => {
            Err(Error::usage(format!("--split-ratio must be between 0 and 1, both excluded (got {eval_ratio})")))
        }
        _ => Err(Error::usage("--split-field, --split-ratio and --split-test exclude each other")
            .hint("pass only one of them")),
    }
}
