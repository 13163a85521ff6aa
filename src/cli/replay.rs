//! `replay`: a recorded step of a run, computed again from its record and the checkpoint before it; or a batch of another
//! system.

mod batch;
mod compare;
mod prepare;
mod saved;
mod show;
mod table;

use super::run as job;
use super::{hub, out, rows};
use crate::comm::{self, World, abort, records};
use crate::error::{Error, Result};
use crate::launch::replay::{Replay, Update, rewound};
use crate::train;
use argh::{ArgsInfo, FromArgs};
use batch::Batch;
use compare::Found;
use prepare::{Asked, Prepared};
use saved::Saved;
use std::path::{Path, PathBuf};

/// Compute a recorded step of a run again, and compare it with the record: log-probabilities, values, rewards,
/// advantages, losses and gradient norms. With --batch, do the same for a batch of another system.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "replay")]
#[argh(
    note = "The run's directory is only read. On the layout of the run, the result is equal to the bit. Under mpirun with other ranks \
            or another mesh, differences are compared with rounding. The exit code is 1 if rounding does not explain them."
)]
pub struct Args {
    /// a run directory
    #[argh(positional)]
    pub run: Option<PathBuf>,

    /// the step to compute
    #[argh(option)]
    pub step: Option<u64>,

    /// end after this update of the step, and show it (default: all updates)
    #[argh(option)]
    pub update: Option<usize>,

    /// compute with another value of a key, as key.path=value; repeat it for several keys
    #[argh(option)]
    pub with: Vec<String>,

    /// write the measurements of each update to a JSON file, for --against
    #[argh(option)]
    pub save: Option<PathBuf>,

    /// compare each update with those of another replay of the step, from its JSON file: losses, norms of gradients by layer
    #[argh(option)]
    pub against: Option<PathBuf>,

    /// replace the file of --save if it exists
    #[argh(switch)]
    pub force: bool,

    /// instead of a run: a batch of OpenRLHF, TRL or verl, as jobs/tools/dump_batch_*.py write it (`help equality`)
    #[argh(option)]
    pub batch: Option<PathBuf>,

    /// with --batch: the directory of the policy (default: as the file names it)
    #[argh(option, from_str_fn(hub::model))]
    pub model: Option<PathBuf>,

    /// with --batch: the directory of the reference model
    #[argh(option, from_str_fn(hub::model))]
    pub reference: Option<PathBuf>,

    /// with --batch: the directory of the critic
    #[argh(option, from_str_fn(hub::model))]
    pub critic: Option<PathBuf>,

    /// with --batch: the largest difference that counts as equal, as a part of the larger number or of 1 (default: 1e-6)
    #[argh(option)]
    pub tolerance: Option<f64>,
}

/// The hint of errors about models and data that are not those of the run.
const OF_INPUTS: &str = "a replay needs the models, the data and the tokenizer that the run had; \
                         --with checkpoint.changed_inputs=accept takes others";

pub fn run(args: &Args) -> Result<()> {
    if let Some(file) = &args.batch {
        // It is the work of one process.
        return if rows::is_worker() { of_batch(args, file) } else { Ok(()) };
    }
    let of_batch = [
        ("--model", args.model.is_some()),
        ("--reference", args.reference.is_some()),
        ("--critic", args.critic.is_some()),
        ("--tolerance", args.tolerance.is_some()),
    ];
    if let Some((option, _)) = of_batch.iter().find(|(_, is_given)| *is_given) {
        return Err(Error::usage(format!("{option} is an option of --batch")));
    }
    let world = World::start()?;
    match replay(args, &world) {
        Ok(()) => {
            comm::shutdown();
            Ok(())
        }
        // Ends all ranks, and reports the error once.
        Err(error) => abort::fail(&error),
    }
}

fn of_batch(args: &Args, file: &Path) -> Result<()> {
    let Args { model, reference, critic, .. } = args;
    let of_step = args.step.is_some() || args.update.is_some() || !args.with.is_empty();
    let of_files = args.save.is_some() || args.against.is_some();
    Error::need(
        args.run.is_none() && !of_step && !of_files,
        "--batch replaces the run, --step, --update, --with, --save and --against",
    )?;
    let [model, reference, critic] = [model, reference, critic].map(Option::as_deref);
    batch::run(&Batch { file, model, reference, critic, tolerance: args.tolerance.unwrap_or(1e-6) })
}

fn replay(args: &Args, world: &World) -> Result<()> {
    let group = world.group();
    let is_first = world.rank == 0;
    if let Some(path) = &args.save {
        group.agree(out::check_new([path.as_path()], args.force))?;
    }
    let against = group.agree(args.against.as_deref().map(Saved::read).transpose())?;
    let asked = Asked { run: args.run.as_deref(), step: args.step, update: args.update, with: &args.with };
    let prepared = group.agree(prepare::read(&asked, world.size))?;
    let fits = against.as_ref().map_or(Ok(()), |other| other.check(prepared.step));
    group.agree(fits)?;
    let is_local = world.hosts.iter().all(|host| *host == world.hosts[0]);
    let made = if is_first { rewound(&prepared.dir, prepared.checkpoint(), is_local) } else { Ok(PathBuf::new()) };
    let made = group.agree(made)?;
    let scratch: PathBuf = records::of_first(&group, || made);
    let found = compute(&prepared, world, &scratch).map_err(|error| explained(&error, &prepared, &scratch));
    // Every rank has left the directory.
    let found = group.agree(found);
    let compared = found.and_then(|updates| {
        let read = if is_first { Found::read(&prepared, &scratch, updates).map(Some) } else { Ok(None) };
        group.agree(read)
    });
    if is_first {
        let _ = std::fs::remove_dir_all(&scratch);
    }
    let Some(found) = compared? else { return Ok(()) };
    let saved = Saved::new(prepared.step, &found.updates);
    let mut text = show::text(&prepared, &found);
    if let Some(other) = &against {
        text.push_str(&saved.compared(other));
    }
    out::write(text.as_bytes())?;
    args.save.as_ref().map_or(Ok(()), |path| saved.write(path))?;
    match found.unexplained(&prepared) {
        Some(what) => {
            Err(Error::fault(format!("step {} differs from its record by more than rounding: {what}", prepared.step)))
        }
        None => Ok(()),
    }
}

/// An error of the job in `scratch` as one of the recorded run.
fn explained(error: &Error, prepared: &Prepared, scratch: &Path) -> Error {
    let [here, run] = [scratch, &prepared.dir].map(|dir| dir.display().to_string());
    let text = |text: &str| text.replace(&here, &run);
    let of_another_run = error.hint.as_ref().is_some_and(|hint| hint.contains("job.dir"));
    let hint = if of_another_run { Some(OF_INPUTS.to_owned()) } else { error.hint.as_deref().map(text) };
    Error { kind: error.kind, message: text(&error.message).replace("the run in job.dir", &run), hint }
}

/// Computes the step in `scratch`. Returns the measurements of each update. All ranks call this.
fn compute(prepared: &Prepared, world: &World, scratch: &Path) -> Result<Vec<Update>> {
    let mut config = prepared.config.clone();
    config.job.dir = scratch.to_path_buf();
    let mut run = job::open(config, world.clone(), None, false)?;
    run.recorder.be_quiet();
    run.replay = Some(Replay::new(&prepared.dir, prepared.step, prepared.update, prepared.keeps_scores));
    train::replay(run)
}
