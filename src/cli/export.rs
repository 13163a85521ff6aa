//! `rlhf-hpc export`: a Hugging Face directory, or an adapter, from a checkpoint of a run; and a model with its adapter
//! merged.

use super::hub;
use super::model_dirs::ModelDirs;
use super::out::{self, note};
use crate::checkpoint::{Checkpoint, ModelVectors, newest};
use crate::comm::Group;
use crate::config::Config;
use crate::config::model::Quantize;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::model::export::Export;
use crate::model::load::{self, ModelFiles};
use crate::model::merge::merge;
use crate::model::{Arch, Head, ParamTable, TensorPart, UnitValues};
use crate::tensor::{DType, FLAT_ALIGN};
use crate::text::Tokenizer;
use crate::train::models::JobModel;
use crate::train::{self, saved, state, supervised};
use argh::{ArgsInfo, FromArgs};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Write a Hugging Face model directory from a checkpoint of a run, or from a model and its adapter. One process is
/// enough, however many ranks saved the checkpoint.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "export")]
#[argh(
    note = "A checkpoint of a job with adapters (LoRA) is exported as an adapter directory of PEFT, with --merged as a whole model. \
            With --adapter, SOURCE is a model directory, and the adapter is merged into it: W + s B A in f32, rounded once to --dtype."
)]
pub struct Args {
    /// a checkpoint (runs/a/checkpoints/step-50), a run directory for its newest complete checkpoint, or with --adapter
    /// a model directory
    #[argh(positional, from_str_fn(hub::model))]
    pub source: PathBuf,

    /// output directory
    #[argh(option)]
    pub out: PathBuf,

    /// replace an output that exists
    #[argh(switch)]
    pub force: bool,

    /// a directory with a LoRA adapter (PEFT), which is merged into the model
    #[argh(option, from_str_fn(hub::model))]
    pub adapter: Option<PathBuf>,

    /// merge the adapters of a checkpoint into their base model
    #[argh(switch)]
    pub merged: bool,

    /// the model to export: actor or critic (default: actor)
    #[argh(option)]
    pub role: Option<String>,

    /// export the moving average of the weights (optim.actor.ema_beta) instead of the weights
    #[argh(switch)]
    pub ema: bool,

    /// dtype of the tensors: f32 or bf16 (default: f32)
    #[argh(option, default = "DType::F32")]
    pub dtype: DType,
}

pub fn run(args: &Args) -> Result<()> {
    match &args.adapter {
        Some(adapter) => merge_adapter(args, adapter),
        None => export_checkpoint(args),
    }
}

/// Merges an adapter into its base model.
fn merge_adapter(args: &Args, adapter: &Path) -> Result<()> {
    let of_checkpoints = [("--role", args.role.is_some()), ("--ema", args.ema), ("--merged", args.merged)];
    if let Some((option, _)) = of_checkpoints.iter().find(|(_, given)| *given) {
        return Err(Error::usage(format!("{option} does not apply to a model directory and its --adapter"))
            .hint(format!("leave out {option}, or name a checkpoint without --adapter")));
    }
    let dirs = ModelDirs::find(&args.source, Some(adapter), None)?;
    check_out(args, [&*dirs.model, adapter])?;
    let (dir, head) = (&*dirs.model, dirs.head(&dirs.arch()?));
    let arch = load::adapted(dir, Some(adapter), head)?;
    let files = ModelFiles { dir, adapter: Some(adapter), arch: &arch, head };
    let (whole, source) = (Arc::new(files.whole()), files.source()?);
    let mut export = Export::begin(&args.out, &arch, &whole, args.dtype, Some(&dirs.tokenizer))?;
    let tuning = arch.tuning.as_deref().expect("it has an adapter");
    let read = |name: &str, start: usize, out: &mut [f32]| source.read(name, start, out);
    merge(&whole, tuning, read, |parameter, rows| export.rows(parameter, rows))?;
    export.commit()?;
    let (n, out, adapter) = (whole.parameters(), args.out.display(), adapter.display());
    note!("export: {} with {adapter} merged, {n} parameters, in {out}", dir.display());
    Ok(())
}

/// Rejects an output that exists, or that is one of the directories which are read.
fn check_out<'a>(args: &Args, read: impl IntoIterator<Item = &'a Path>) -> Result<()> {
    let same = |dir: &&Path| dir.canonicalize().is_ok_and(|dir| args.out.canonicalize().is_ok_and(|out| out == dir));
    match read.into_iter().find(same) {
        Some(_) => {
            Err(Error::usage(format!("--out must not be a directory that is read (got {})", args.out.display()))
                .hint("name a new directory"))
        }
        None => out::check_new([&*args.out], args.force),
    }
}

/// The values of a trained model in a checkpoint.
struct Values<'a> {
    checkpoint: &'a Checkpoint,
    role: &'a str,
    /// `weights`, or `ema` for their average.
    what: &'static str,
}

impl Values<'_> {
    fn open<'a>(&'a self, arch: &Arch, table: &'a ParamTable) -> Result<ModelVectors<'a>> {
        let (dir, role) = (self.checkpoint.dir.display(), self.role);
        let vectors = ModelVectors::open(self.checkpoint, role, arch, table)?;
        if self.what == "ema" && !vectors.has(self.what) {
            return Err(Error::data(format!("{dir} has no average of the {role}"))
                .hint("leave out --ema; a run keeps averages only if optim.actor.ema_beta is above 0"));
        }
        Ok(vectors)
    }

    fn finite(&self, values: &[f32]) -> Result<()> {
        if values.iter().all(|x| x.is_finite()) {
            return Ok(());
        }
        let dir = self.checkpoint.dir.display();
        Err(Error::data(format!("{dir}: the weights of the {} are not finite", self.role))
            .hint("export an earlier checkpoint: the training diverged before this step"))
    }
}

fn export_checkpoint(args: &Args) -> Result<()> {
    let role = args.role.as_deref().unwrap_or("actor");
    out::check_new([&*args.out], args.force)?;
    let checkpoint = find(&args.source)?;
    checkpoint.verify(&Group::one())?;
    let (config, model) = trained(&checkpoint, role)?;
    let (arch, head) = (described(&checkpoint, &config, &model)?, model.spec.head);
    let values = Values { checkpoint: &checkpoint, role, what: if args.ema { "ema" } else { "weights" } };
    let adapters = arch.tuning.as_deref().filter(|tuning| !tuning.adapters.is_empty());
    if args.merged && adapters.is_none() {
        return Err(Error::usage(format!("--merged needs a checkpoint with adapters of the {role}"))
            .hint("leave out --merged: the export is the whole model"));
    }
    let from = if args.ema { "average of the " } else { "" };
    let is_nf4 = config.model.quantize == Quantize::Nf4;
    let table = Arc::new(ParamTable::new(&arch, head));
    let (n, what) = if let Some(tuning) = adapters.filter(|_| !args.merged) {
        let settings = train::adapter_config(&config, &model.spec)?;
        let params = model.whole().shapes();
        let begin = || {
            let is_wrapped = arch.wrapper.is_some();
            Export::begin_adapter(&args.out, &settings, tuning, &params, &table, args.dtype, is_wrapped)
        };
        (write_units(&values, &arch, &table, begin)?, "adapter of the ")
    } else if arch.tuning.is_some() {
        (merge_trained(args, &values, &model, &arch, is_nf4)?, if args.merged { "merged " } else { "" })
    } else {
        let begin = || Export::begin(&args.out, &arch, &table, args.dtype, Some(&checkpoint.dir));
        (write_units(&values, &arch, &table, begin)?, "")
    };
    let (step, out) = (checkpoint.manifest.step, args.out.display());
    note!("export: {what}{from}{role} of step {step}, {n} parameters, in {out}");
    Ok(())
}

/// Writes all that a job trains. Returns the number of parameters.
fn write_units(
    values: &Values,
    arch: &Arch,
    table: &Arc<ParamTable>,
    begin: impl FnOnce() -> Result<Export>,
) -> Result<usize> {
    let vectors = values.open(arch, table)?;
    let mut export = begin()?;
    for (u, unit) in table.units().iter().enumerate() {
        let mut read = UnitValues::scratch(table, u, DType::F32);
        vectors.read(values.what, unit.clone(), read.slice_mut().f32())?;
        values.finite(read.slice().f32())?;
        export.unit(&read)?;
    }
    export.commit()?;
    Ok(table.parameters())
}

/// Writes the whole model of which a job trains a part, with adapters merged into the frozen base: if `is_nf4`, into its
/// dequantized matrices. Returns the number of parameters.
fn merge_trained(args: &Args, values: &Values, model: &JobModel, arch: &Arch, is_nf4: bool) -> Result<usize> {
    let (checkpoint, spec) = (values.checkpoint, &model.spec);
    check_out(args, [&*spec.dir, &*spec.adapter])?;
    let (dir, base) = (checkpoint.dir.display(), spec.dir.display());
    if !train::check_base(checkpoint, model)? {
        note!("export: cannot check that {base} is the base model of {dir}, which has no hashes of its files");
    }
    let base_arch = Arch::load(&spec.dir).map_err(|e| e.within(format!("the base model of {dir}")))?;
    let files = ModelFiles { dir: &spec.dir, adapter: None, arch: &base_arch, head: spec.head };
    let (whole, source) = (Arc::new(files.whole()), files.source()?);
    // In the layout of GPUs a matrix is row-major, as in files.
    let own = ParamTable::on(Device::Cuda, arch, spec.head, TensorPart::whole());
    let vectors = values.open(arch, &own)?;
    // The matrix that was quantized last, as the job did.
    let mut quantized = (String::new(), None);
    let read = |name: &str, start: usize, out: &mut [f32]| {
        let Some(id) = own.find(name) else {
            if is_nf4 && quantized.0 != name {
                quantized = (name.to_owned(), source.nf4(name)?);
            }
            return match quantized.1.as_ref().filter(|_| is_nf4) {
                Some(nf4) => {
                    nf4.read(start, out);
                    Ok(())
                }
                None => source.read(name, start, out),
            };
        };
        let start = own.spec(id).offset + start;
        let first = start / FLAT_ALIGN * FLAT_ALIGN;
        let mut room = vec![0.0; (start + out.len()).next_multiple_of(FLAT_ALIGN) - first];
        vectors.read(values.what, first..first + room.len(), &mut room)?;
        out.copy_from_slice(&room[start - first..][..out.len()]);
        values.finite(out)
    };
    let mut export = Export::begin(&args.out, arch, &whole, args.dtype, Some(&checkpoint.dir))?;
    let tuning = arch.tuning.as_deref().expect("a part of it trained");
    merge(&whole, tuning, read, |parameter, rows| export.rows(parameter, rows))?;
    export.commit()?;
    Ok(whole.parameters())
}

/// A model that the checkpoint's job trained, and the configuration of the job.
fn trained(checkpoint: &Checkpoint, role: &str) -> Result<(Config, JobModel)> {
    let config = saved::config_of(checkpoint)?;
    let mut all = train::models(&config);
    all.retain(|model| model.optim.is_some());
    let names: Vec<&str> = all.iter().map(|model| model.role.name()).collect();
    let at = names.iter().position(|name| *name == role);
    let at = at.ok_or_else(|| Error::usage(format!("--role must be {} (got {role})", names.join(" or "))))?;
    let model = JobModel::of_checkpoint(all.swap_remove(at), &config, checkpoint)?;
    Ok((config, model))
}

/// The architecture in the form in which the job itself exports it.
fn described(checkpoint: &Checkpoint, config: &Config, model: &JobModel) -> Result<Arch> {
    let tokenizer = Tokenizer::find(&checkpoint.dir)?;
    let ends = tokenizer.as_ref().map_or(&[][..], Tokenizer::eos_ids);
    let mut arch = model.arch.clone().ending_with(ends).asked_with(config.data.template_args());
    if train::models(config).first().is_some_and(|first| first.head == Head::Value) {
        arch.reward_mean_std = supervised::mean_std(&checkpoint.manifest.state["run"]["method"])?;
    }
    if checkpoint.manifest.state[state::IMAGES] == true {
        arch.use_tower();
    }
    Ok(arch)
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
    let hint = "pass a checkpoint directory with a manifest.json, or a run directory; to merge an adapter, pass its base \
                model with --adapter";
    Err(Error::data(format!("{} has no checkpoint", path.display())).hint(hint))
}
