//! `rlhf-hpc export`: a Hugging Face directory from a checkpoint of a run.

use super::out::{self, note};
use crate::checkpoint::{Checkpoint, ModelVectors, newest};
use crate::comm::Group;
use crate::config;
use crate::error::{Error, Result};
use crate::model::export::Export;
use crate::model::{Arch, Head, ParamTable, UnitValues};
use crate::tensor::DType;
use crate::text::Tokenizer;
use crate::train::{self, supervised};
use argh::FromArgs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Write a Hugging Face model directory from a checkpoint of a run. One process is enough, however many ranks saved it.
#[derive(FromArgs, Debug)]
#[argh(subcommand, name = "export")]
pub struct Args {
    /// a checkpoint (runs/a/checkpoints/step-50), or a run directory for its newest complete checkpoint
    #[argh(positional)]
    pub checkpoint: PathBuf,

    /// output directory
    #[argh(option)]
    pub out: PathBuf,

    /// replace an output that exists
    #[argh(switch)]
    pub force: bool,

    /// the model to export: actor or critic (default: actor)
    #[argh(option, default = "String::from(\"actor\")")]
    pub role: String,

    /// export the moving average of the weights (optim.actor.ema_beta) instead of the weights
    #[argh(switch)]
    pub ema: bool,

    /// dtype of the tensors: f32 or bf16 (default: f32)
    #[argh(option, default = "DType::F32")]
    pub dtype: DType,
}

pub fn run(args: &Args) -> Result<()> {
    out::check_new([&*args.out], args.force)?;
    let checkpoint = find(&args.checkpoint)?;
    checkpoint.verify(&Group::one())?;
    let (arch, head) = learned(&checkpoint, &args.role)?;
    let table = Arc::new(ParamTable::new(&arch, head));
    let vectors = ModelVectors::open(&checkpoint, &args.role, &arch, &table)?;
    let what = if args.ema { "ema" } else { "weights" };
    if args.ema && !vectors.has(what) {
        return Err(Error::data(format!("{} has no average of the {}", checkpoint.dir.display(), args.role))
            .hint("leave out --ema; a run keeps averages only if optim.actor.ema_beta is above 0"));
    }
    let mut export = Export::begin(&args.out, &arch, &table, args.dtype, Some(&checkpoint.dir))?;
    for (u, unit) in table.units().iter().enumerate() {
        let mut values = UnitValues::scratch(&table, u, DType::F32);
        vectors.read(what, unit.clone(), values.slice_mut().f32())?;
        if !values.slice().f32().iter().all(|x| x.is_finite()) {
            let dir = checkpoint.dir.display();
            return Err(Error::data(format!("{dir}: the weights of the {} are not finite", args.role))
                .hint("export an earlier checkpoint: the training diverged before this step"));
        }
        export.unit(&values)?;
    }
    export.commit()?;
    let (step, n, out) = (checkpoint.manifest.step, table.parameters(), args.out.display());
    let of = if args.ema { "average of the " } else { "" };
    note!("export: {of}{} of step {step}, {n} parameters, in {out}", args.role);
    Ok(())
}

/// A model that the checkpoint's job trains, in the form in which the job itself exports it.
fn learned(checkpoint: &Checkpoint, role: &str) -> Result<(Arch, Head)> {
    let state = &checkpoint.manifest.state;
    let config = config::parse(state["config"].as_str().unwrap_or_default(), &[])
        .map_err(|e| e.within(checkpoint.dir.display()))?;
    let all: Vec<_> = train::models(&config).into_iter().filter(|model| model.optim.is_some()).collect();
    let Some(model) = all.iter().find(|model| model.role.name() == role) else {
        let names: Vec<&str> = all.iter().map(|model| model.role.name()).collect();
        return Err(Error::usage(format!("--role must be {} (got {role})", names.join(" or "))));
    };
    let tokenizer = Tokenizer::find(&checkpoint.dir)?;
    let ends = tokenizer.as_ref().map_or(&[][..], Tokenizer::eos_ids);
    let mut arch = Arch::load(&checkpoint.dir)?.ending_with(ends).asked_with(config.data.template_args());
    if all[0].head == Head::Value {
        arch.reward_mean_std = supervised::mean_std(&state["run"]["method"])?;
    }
    Ok((arch, model.head))
}

/// The checkpoint at the path, or the newest complete one if the path is a run directory or its `checkpoints`.
fn find(path: &Path) -> Result<Checkpoint> {
    if path.join("manifest.json").exists() {
        return Checkpoint::open(path);
    }
    for root in [path.to_path_buf(), path.join("checkpoints")] {
        if let Some(checkpoint) = newest(&root)? {
            for skipped in &checkpoint.skipped {
                note!("export: skipped {skipped}");
            }
            return Ok(checkpoint);
        }
    }
    Err(Error::data(format!("{} has no checkpoint", path.display()))
        .hint("pass a checkpoint directory with a manifest.json, or a run directory"))
}
