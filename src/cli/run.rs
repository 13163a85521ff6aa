//! `run`: the job of a TOML file, alone or under mpirun.

use super::out::note;
use super::report;
use crate::comm::{self, World, abort};
use crate::config::job::DeviceName;
use crate::config::{self, Config};
use crate::device::cpu::pool;
use crate::error::Result;
use crate::launch::run::{Lacks, Run};
use crate::launch::{gpu, run_lock, snapshots};
use crate::metrics::Terminal;
use crate::{plan, train};
use argh::{ArgsInfo, FromArgs};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// run the job of a TOML file; run the same command again to resume
#[derive(ArgsInfo, FromArgs)]
#[argh(subcommand, name = "run")]
pub struct Args {
    /// the job file
    #[argh(positional)]
    job: PathBuf,
    /// changes to the job: key.path=value ...
    #[argh(positional)]
    overrides: Vec<String>,
    /// check paths, shapes, vocabulary, memory and disk, then stop
    #[argh(switch)]
    dry_run: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let world = World::start()?;
    let group = world.group();
    let loaded = config::load(&args.job, &args.overrides).and_then(|config| config.check().map(|()| config));
    let outcome = group.agree(loaded).and_then(|mut config| {
        snapshots::compare(&world, &config.snapshots())?;
        if world.rank == 0 {
            config.notes.iter().for_each(|text| note!("note: {text}"));
        }
        train::saved::locate(&mut config, &group);
        start(config, world, args.dry_run)
    });
    match outcome {
        Ok(()) => {
            comm::shutdown();
            Ok(())
        }
        // Ends all ranks, and reports the error once.
        Err(error) => abort::fail(&error),
    }
}

fn start(config: Config, world: World, dry_run: bool) -> Result<()> {
    let dir = run_lock::working_dir(&config.job.dir, dry_run);
    let is_first = world.rank == 0;
    // Before anything else is written there; held until the process ends.
    let lock = if is_first { run_lock::lock(&dir, dry_run) } else { Ok(None) };
    std::mem::forget(world.group().agree(lock)?);
    let wants_report = config.metrics.report && is_first && !dry_run;
    let checked = world.group().agree(if is_first { train::check_export(&config) } else { Ok(()) });
    let done = checked.and_then(|()| job(config, world, &dir, dry_run));
    if dry_run && is_first {
        let _ = std::fs::remove_dir_all(&dir);
    }
    if wants_report && done.is_ok() {
        write_report(&dir);
    }
    done
}

/// Writes the page of a finished run. A failure is only a warning.
fn write_report(dir: &Path) {
    let out = report::beside(dir);
    match abort::caught(|| report::write(&[dir.to_path_buf()], &out)) {
        Ok(written) => {
            report::warn(&written.lacks);
            note!("  {:<REPORT_COLUMNS$} {}", "report", out.display());
        }
        Err(error) => note!(
            "warning: the report was not written: {}; run `rlhf-hpc report {}` to try again",
            error.message,
            dir.display()
        ),
    }
}

/// The width of the labels in the summary above it.
const REPORT_COLUMNS: usize = 12;

fn job(config: Config, world: World, dir: &Path, dry_run: bool) -> Result<()> {
    if world.rank == 0 {
        // Before anything that takes a while.
        Terminal::stderr().title(&format!("{}  {}", config.method().title(), config.job.name));
    }
    let logs = (!dry_run).then(|| dir.join("logs"));
    open(config, world, logs.as_deref(), dry_run).and_then(train::run)
}

/// Opens devices, layout and records of a job. A rank that fails writes to `logs`. All ranks call this.
pub(super) fn open(mut config: Config, world: World, logs: Option<&Path>, dry_run: bool) -> Result<Run> {
    let limit = config.collective_timeout_s();
    let limit = (limit > 0.0).then(|| Duration::from_secs_f64(limit));
    abort::install(&world, logs, limit);
    let warning = set_threads(&config, &world);
    let mut lacks = Lacks::default();
    if dry_run {
        let roles = train::roles(&config);
        lacks.ranks = plan::do_without_ranks(&mut config, &roles, &world)?;
        lacks.gpu = gpu::do_without(&mut config, &world)?;
    }
    let is_asked = config.job.device != DeviceName::Auto;
    let opened = gpu::open(&mut config, &world, &train::archs);
    // Wrong settings are reported before missing devices that the job asks for.
    let opened = if is_asked { opened } else { Ok(opened?) };
    let gpu = opened.as_ref().ok().and_then(|opened| opened.gpu.as_ref());
    let mut layouts = plan::layouts(&config, &train::roles(&config), &world, gpu)?;
    layouts.1.is_tight &= lacks == Lacks::default();
    if let Some(tokens) = layouts.1.microbatch_tokens {
        config.set_microbatches(tokens);
    }
    let shape = train::shape(&config);
    let mut run = Run::open(config, &shape, opened, layouts, world, dry_run)?;
    run.lacks = lacks;
    for warning in warning.into_iter().chain(run.config.unused()) {
        run.recorder.warn(&warning);
    }
    Ok(run)
}

/// Sets the threads from the configuration, or from the affinity mask. Returns a warning if the mask is too narrow.
pub(super) fn set_threads(config: &Config, world: &World) -> Option<String> {
    let plan = world.threads();
    let threads = if config.job.threads > 0 { config.job.threads } else { plan.threads };
    pool::set_threads(threads);
    if config.job.threads > 0 { None } else { plan.warning }
}
