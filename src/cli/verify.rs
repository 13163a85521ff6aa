//! `verify`: whether two computations of a model agree, and whether this machine and its ranks compute what they should.

pub mod compare;
pub mod computation;
mod configs;
mod dump;
mod files;
mod job;
mod layout;
pub mod machine;
mod measure;
mod model;
mod operations;
pub mod page;
pub mod replicas;
mod resume;
mod saved;
pub mod step;
mod tensors;
mod trials;

use super::hub;
use super::ranks::Ranks;
use crate::comm::{self, World};
use crate::config::job::DeviceName;
use crate::config::limits::{self, TOKENS_MAX};
use crate::config::model::DTypeName;
use crate::error::{Error, Result};
use argh::{ArgsInfo, FromArgs};
use model::Request;
use std::path::{Path, PathBuf};

/// Compare two computations of a model: hidden states of each layer, logits, sampled tokens. Or check a machine with a job.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "verify")]
#[argh(
    note = "With a model directory: its files, tokenizer and sampler; with --against, --layout or --device gpu also where the \
            results of both sides differ, whether rounding explains it, and the cause by name. With a job file: this machine \
            and these ranks, in two minutes. The exit code is 1 if a check fails. `rlhf-hpc help verification` has examples."
)]
pub struct Args {
    /// a Hugging Face model directory, or a job file (.toml)
    #[argh(positional, from_str_fn(hub::model))]
    what: PathBuf,

    /// changes to a job: key.path=value ...
    #[argh(positional)]
    overrides: Vec<String>,

    /// another model directory, or a dump (.safetensors) by jobs/tools/dump_model.py
    #[argh(option, from_str_fn(hub::model))]
    against: Option<PathBuf>,

    /// a layout of the started ranks, such as tensor=2 or data=2,sequence=2,zero=3, to compare with one rank
    #[argh(option)]
    layout: Option<String>,

    /// gpu: compare a GPU with the CPU (default: cpu)
    #[argh(option, default = "DeviceName::Cpu")]
    device: DeviceName,

    /// dtype of this model on the CPU: f32 or bf16 (default: f32)
    #[argh(option, default = "DTypeName::F32")]
    dtype: DTypeName,

    /// tokens to sample greedily (default: 16)
    #[argh(option, default = "16")]
    max_new_tokens: usize,

    /// print one JSON object instead of the page
    #[argh(switch)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    limits::check_option("--max-new-tokens", args.max_new_tokens, 0, TOKENS_MAX)?;
    let is_job = args.what.extension().is_some_and(|end| end == "toml");
    if is_job {
        let world = World::start()?;
        let of_model = args.against.is_some() || args.layout.is_some() || args.device != DeviceName::Cpu;
        let options = Error::need(!of_model, "--against, --layout and --device belong to a model directory");
        world.group().agree(options)?;
        world.group().agree(job::verify(&args.what, &args.overrides, args.json, &world))?;
        comm::shutdown();
        return Ok(());
    }
    let ranks = Ranks::start(Path::new(""))?;
    ranks.agree(Error::need(args.overrides.is_empty(), "changes of keys belong to a job file (.toml)"))?;
    let request = Request {
        model: &args.what,
        against: args.against.as_deref(),
        layout: args.layout.as_deref(),
        device: args.device,
        dtype: args.dtype,
        new_tokens: args.max_new_tokens,
        json: args.json,
    };
    ranks.agree(model::run(&request, &ranks))?;
    comm::shutdown();
    Ok(())
}
