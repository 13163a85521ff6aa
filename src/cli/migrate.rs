//! `migrate`: a launch of OpenRLHF, TRL or verl as a job. Scripts are read, never run.

mod convert;
mod draft;
mod expand;
mod given;
mod launch;
mod layout;
mod openrlhf;
pub mod pages;
mod paths;
mod shared;
mod shell;
mod table;
mod trl;
mod variables;
mod verl;
mod words;
mod write;
mod yaml;

use super::out::{self, note};
use crate::error::{Error, Result};
use crate::sys::files;
use argh::{ArgsInfo, FromArgs};
use given::{Given, Processes};
use launch::Launch;
use shell::Command;
use std::path::{Path, PathBuf};
use table::{Dialect, Kind, System};
use words::Word;

/// Convert a launch of OpenRLHF, TRL or verl to a job file, with a table of all options.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "migrate")]
#[argh(
    note = "The input is a shell script, a YAML file of TRL or verl, or a command line after --. The script is read and not run. \
            The exit code is 1 if an option that changes what is learned has no counterpart, unless --accept is given."
)]
pub struct Args {
    /// a script (.sh), a file of options (.yaml), or after -- the words of a launch
    #[argh(positional)]
    pub input: Vec<String>,

    /// the job file to write (default: standard output)
    #[argh(option, short = 'o')]
    pub out: Option<PathBuf>,

    /// replace an output that exists
    #[argh(switch)]
    pub force: bool,

    /// exit with 0 although options that change what is learned have no counterpart
    #[argh(switch)]
    pub accept: bool,

    /// number of rows to train on, if the data is not here: epochs become steps
    #[argh(option)]
    pub rows: Option<usize>,

    /// line of the launch, if the script has several
    #[argh(option)]
    pub line: Option<usize>,

    /// the command of the options: SYSTEM/COMMAND or SYSTEM/COMMAND@VERSION, such as trl/sft or openrlhf/train_sft@0.5.8
    #[argh(option, long = "as")]
    pub dialect: Option<String>,

    /// only list all known options of a system (openrlhf, trl, verl), with our keys
    #[argh(option)]
    pub options: Option<String>,
}

pub fn run(args: &Args) -> Result<()> {
    if let Some(system) = &args.options {
        return out::write(pages::all(system_of(system)?).as_bytes());
    }
    if let Some(path) = &args.out {
        out::check_new([path.as_path()], args.force)?;
    }
    let (launch, source) = read(args)?;
    let mut draft = convert::convert(&launch, args.rows)?;
    let parent = args.out.as_deref().and_then(Path::parent).filter(|parent| !parent.as_os_str().is_empty());
    if parent.is_some() {
        let here = std::env::current_dir().map_err(|e| Error::io("find", ".", &e))?;
        write::move_paths(&mut draft, &here);
    }
    let name = args.out.as_deref().and_then(Path::file_name).map_or("job.toml".into(), |name| name.to_string_lossy());
    let text = write::job(&draft, &source, &name);
    match &args.out {
        Some(path) => files::write_atomic(path, text.as_bytes())?,
        None => out::write(text.as_bytes())?,
    }
    note!("{}", write::report(&draft).trim_end());
    let missing = draft.outcomes().iter().filter(|one| one.kind == Kind::Missing).count();
    if missing > 0 && !args.accept {
        let what = match missing {
            1 => "1 option changes what is learned and has".to_owned(),
            n => format!("{n} options change what is learned and have"),
        };
        return Err(Error::fault(format!("{what} no counterpart here (missing, above)"))
            .hint("change the job by hand if you need them; --accept exits with 0"));
    }
    Ok(())
}

fn system_of(word: &str) -> Result<System> {
    let known = System::ALL.into_iter().find(|system| system.word() == word.to_lowercase());
    known.ok_or_else(|| Error::usage(format!("there is no system {word:?}")).hint("use openrlhf, trl or verl"))
}

/// The launch to convert, and the name of its source.
fn read(args: &Args) -> Result<(Launch, String)> {
    let named = args.dialect.as_deref().map(named).transpose()?;
    let input = args.input.first().ok_or_else(|| {
        Error::usage("migrate needs a script, a YAML file, or a launch after --")
            .hint("for example `rlhf-hpc migrate train.sh -o job.toml`")
    })?;
    let path = Path::new(input);
    let is_file = args.input.len() == 1 && (path.is_file() || path.extension().is_some());
    if !is_file {
        let words = args.input.iter().map(Word::of).collect();
        let command = Command { words, line: 1 };
        let found = launch::launch(&command, Path::new("."))?;
        let launch = match (found, named) {
            (Some(launch), named) => with(launch, named)?,
            (None, Some(named)) => of_words(&args.input, named)?,
            (None, None) => return Err(no_launch("the command line")),
        };
        return Ok((launch, "a command line".to_owned()));
    }
    if path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml") {
        return Ok((of_yaml(path, named)?, input.clone()));
    }
    let text = files::read_to_string(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Error::usage(format!("{input} does not exist")),
        std::io::ErrorKind::InvalidData => Error::data(format!("{input} is not UTF-8")),
        _ => Error::io("read", path, &e),
    })?;
    let dir = path.parent().unwrap_or(Path::new("."));
    let found = shell::commands(&text).and_then(|commands| {
        let of_line = |command: &&Command| args.line.is_none_or(|line| command.line == line);
        launch::launches(&commands.iter().filter(of_line).cloned().collect::<Vec<_>>(), dir)
    });
    let mut launches = found.map_err(|e| e.within(input))?;
    if launches.len() > 1 {
        let lines: Vec<String> = launches.iter().map(|one| format!("{} ({})", one.line, one.dialect)).collect();
        return Err(Error::usage(format!("{input} has {} launches, in lines {}", launches.len(), lines.join(", ")))
            .hint("choose one with --line N"));
    }
    let mut launch = launches.pop().ok_or_else(|| no_launch(input))?;
    launch.processes = launch.processes.or(launch::requested(&text));
    Ok((with(launch, named)?, input.clone()))
}

fn no_launch(source: &str) -> Error {
    Error::usage(format!("{source} has no launch of OpenRLHF, TRL or verl")).hint(
        "a launch runs openrlhf.cli.train_*, `trl METHOD`, a script such as grpo.py, or verl.trainer.main_ppo; \
         options alone need --as SYSTEM/COMMAND",
    )
}

/// The system, the command and the version that `--as` names.
fn named(text: &str) -> Result<(System, String, Option<String>)> {
    let (name, version) = text.split_once('@').map_or((text, None), |(name, version)| (name, Some(version.to_owned())));
    let (system, command) = name.split_once('/').unwrap_or((name, "ppo"));
    let system = system_of(system)?;
    Ok((system, command.trim_start_matches("train_").trim_end_matches("_trainer").to_owned(), version))
}

fn dialect((system, command, version): (System, String, Option<String>), given: &[Given]) -> Result<Dialect> {
    let all = table::dialects(system, Some(&command));
    let shown = |all: &[Dialect]| {
        all.iter().map(|one| format!("{}@{}", one.command, one.version)).collect::<Vec<_>>().join(", ")
    };
    if all.is_empty() {
        return Err(Error::usage(format!("{system} has no command {command:?}"))
            .hint(format!("known: {}", shown(&table::dialects(system, None)))));
    }
    match version {
        None => launch::dialect_of(system, Some(&command), given),
        Some(version) => all.iter().find(|one| one.version == version).cloned().ok_or_else(|| {
            Error::usage(format!("no options of {system} {version} are known")).hint(format!("known: {}", shown(&all)))
        }),
    }
}

/// The launch, read as the named dialect.
fn with(launch: Launch, named: Option<(System, String, Option<String>)>) -> Result<Launch> {
    let Some(named) = named else { return Ok(launch) };
    Ok(Launch { dialect: dialect(named, &launch.given)?, ..launch })
}

/// The launch of options alone.
fn of_words(words: &[String], named: (System, String, Option<String>)) -> Result<Launch> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let given = if named.0 == System::Verl { yaml::overrides(&words)? } else { launch::options(&words, &[])? };
    of_options(given, named)
}

fn of_options(given: Vec<Given>, named: (System, String, Option<String>)) -> Result<Launch> {
    let dialect = dialect(named, &given)?;
    Ok(Launch { dialect, given, processes: Processes::default(), launcher: Vec::new(), line: 1 })
}

/// The launch that a YAML file describes. Nested tables are those of verl, and flat options those of TRL.
fn of_yaml(path: &Path, named: Option<(System, String, Option<String>)>) -> Result<Launch> {
    if let Some(named) = named {
        return of_options(yaml::read(path, named.0)?, named);
    }
    let of_verl = yaml::read(path, System::Verl)?;
    let tables = ["actor_rollout_ref.", "algorithm.", "trainer.", "critic."];
    if of_verl.iter().any(|one| tables.iter().any(|table| one.name.starts_with(table))) {
        return of_options(of_verl, (System::Verl, "ppo".to_owned(), None));
    }
    let given = yaml::read(path, System::Trl)?;
    let dialect = launch::dialect_of(System::Trl, None, &given).map_err(|e| e.within(path.display()))?;
    Ok(Launch { dialect, given, processes: Processes::default(), launcher: Vec::new(), line: 1 })
}
