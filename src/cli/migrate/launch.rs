//! The launch of a trainer in a command line: the system, its command, its options, and the GPUs.

use super::given::{Given, Processes};
use super::shell::Command;
use super::table::{self, Dialect, System};
use super::words::Word;
use super::yaml;
use crate::error::{Error, Result};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A launch of a trainer.
#[derive(Clone, Debug)]
pub struct Launch {
    pub dialect: Dialect,
    pub given: Vec<Given>,
    pub processes: Processes,
    /// Options of the launcher, which mpirun replaces.
    pub launcher: Vec<Given>,
    pub line: usize,
}

/// Scripts and commands of TRL, by the method that they run.
const TRL_SCRIPTS: &[(&str, &str)] = &[
    ("sft", "sft sft_trainer"),
    ("dpo", "dpo dpo_trainer dpo_online"),
    ("kto", "kto"),
    ("reward", "reward reward_modeling reward_trainer"),
    ("grpo", "grpo grpo_trainer"),
    ("rloo", "rloo rloo_tldr"),
    ("ppo", "ppo ppo_tldr"),
    ("prm", "prm"),
    ("orpo", "orpo"),
    ("cpo", "cpo"),
    ("gkd", "gkd"),
    ("distillation", "distillation distill"),
];

/// Options of launchers that take no value.
const SWITCHES: &str = "multi_gpu no_python standalone master no_local_rank use_deepspeed use_fsdp tpu cpu quiet exclusive no-wait \
                        verbose overlap unbuffered enable_each_rank_log";

/// The launches among the commands of a script. `dir` is the folder of its files.
pub fn launches(commands: &[Command], dir: &Path) -> Result<Vec<Launch>> {
    commands.iter().filter_map(|command| launch(command, dir).transpose()).collect()
}

/// The launch that a command makes, if it makes one.
///
/// # Errors
/// `Usage`, if a word of the launch is unknown, or if the command is not one that is converted.
pub fn launch(command: &Command, dir: &Path) -> Result<Option<Launch>> {
    let words: Vec<&str> = command.words.iter().map(|word| word.text.as_str()).collect();
    let found = words.iter().enumerate().find_map(|(i, word)| Some((i, program(&words[..i], word)?)));
    let Some((at, (system, name))) = found else { return Ok(None) };
    if let Some(Word { unknown: Some(why), .. }) = command.words.iter().find(|word| word.unknown.is_some()) {
        return Err(Error::usage(format!("line {}: the launch contains {why}", command.line))
            .hint("write its value into the script, or pass the launch with all values after `rlhf-hpc migrate --`"));
    }
    check_command(system, &name, command.line)?;
    let rest = &words[at + 1..];
    let mut given = if system == System::Verl { yaml::overrides(rest)? } else { options(rest, &[])? };
    if system == System::Trl {
        for one in &mut given {
            one.name = one.name.replace('-', "_");
        }
        given = with_config(given, dir)?;
    }
    let launcher = options(&words[..at], &SWITCHES.split_whitespace().collect::<Vec<_>>())?;
    let dialect = dialect_of(system, Some(&name), &given)?;
    Ok(Some(Launch { dialect, processes: processes(&launcher, &given, dir), given, launcher, line: command.line }))
}

/// The system and its command that the program `word` runs, after the words `before`.
fn program(before: &[&str], word: &str) -> Option<(System, String)> {
    let last = word.rsplit(['/', '.']).find(|part| *part != "py").unwrap_or(word);
    if word.starts_with('-') || word.contains('=') {
        return None;
    }
    let of_openrlhf = word.contains("openrlhf.cli.") || word.contains("openrlhf/cli/") || is_python(word);
    if of_openrlhf {
        let others = ["batch_inference", "interactive_chat", "serve_rm", "lora_combiner"];
        if let Some(name) = last.strip_prefix("train_").or(others.into_iter().find(|other| *other == last)) {
            return Some((System::OpenRlhf, name.to_owned()));
        }
    }
    if word.starts_with("verl.trainer.") || word.contains("verl/trainer/") || last == "main_ppo" {
        return Some((System::Verl, if last == "main_ppo" { "ppo" } else { last }.to_owned()));
    }
    let method = |name: &str| {
        let name = name.trim_end_matches(".py");
        TRL_SCRIPTS.iter().find(|(_, names)| names.split(' ').any(|known| known == name)).map(|(method, _)| *method)
    };
    let is_trl = before.last().is_some_and(|before| *before == "trl" || before.ends_with("/trl"));
    let of_trl = if is_trl {
        method(word)
    } else if is_python(word) {
        method(word.rsplit('/').next().unwrap_or_default())
    } else {
        word.strip_prefix("trl.scripts.").and_then(method)
    };
    of_trl.map(|method| (System::Trl, method.to_owned()))
}

/// Whether a name is that of a Python file.
pub fn is_python(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "py")
}

fn check_command(system: System, name: &str, line: usize) -> Result<()> {
    let verb = match name {
        "batch_inference" => "generate",
        "interactive_chat" => "chat",
        "serve_rm" => "reward",
        "lora_combiner" => "export",
        _ => "",
    };
    if system == System::OpenRlhf && !verb.is_empty() {
        return Err(Error::usage(format!("line {line}: {name} of OpenRLHF is not a job"))
            .hint(format!("use `rlhf-hpc {verb}`; `rlhf-hpc migrate --options openrlhf` lists its options")));
    }
    if table::dialects(system, Some(name)).is_empty() {
        let known: Vec<String> = table::dialects(system, None).into_iter().map(|dialect| dialect.command).collect();
        return Err(Error::usage(format!("line {line}: {name} of {system} is not converted"))
            .hint(format!("known: {}", known.join(", "))));
    }
    Ok(())
}

/// Options with dashes, each with the values up to the next one.
pub fn options(words: &[&str], switches: &[&str]) -> Result<Vec<Given>> {
    let mut all: Vec<Given> = Vec::new();
    let mut is_open = false;
    for word in words {
        let is_number = word.chars().nth(1).is_some_and(|c| c.is_ascii_digit() || c == '.');
        let name = word.strip_prefix("--").or_else(|| word.strip_prefix('-').filter(|_| !is_number && word.len() > 1));
        match name {
            Some("") => is_open = false,
            Some(name) => {
                let (name, value) = name.split_once('=').map_or((name, None), |(name, value)| (name, Some(value)));
                is_open = value.is_none() && !switches.contains(&name);
                all.push(Given { name: name.to_owned(), values: value.map(str::to_owned).into_iter().collect() });
            }
            None => match all.last_mut().filter(|_| is_open) {
                Some(given) => given.values.push((*word).to_owned()),
                None if switches.is_empty() => {
                    return Err(Error::usage(format!("`{word}` is the value of no option"))
                        .hint("options begin with --; a text with spaces needs quotes"));
                }
                None => {}
            },
        }
    }
    Ok(all)
}

/// The options of TRL, and those of its file `--config`, which they replace.
fn with_config(given: Vec<Given>, dir: &Path) -> Result<Vec<Given>> {
    let Some(config) = given.iter().find(|one| one.name == "config") else { return Ok(given) };
    let path: PathBuf = dir.join(config.text());
    let mut all = yaml::read(&path, System::Trl)?;
    all.retain(|of_file| !given.iter().any(|one| one.name == of_file.name));
    all.extend(given.into_iter().filter(|one| one.name != "config"));
    Ok(all)
}

/// The dialect that knows most of the given options; of equal ones the newest. Without a command, two commands that know
/// equally many options are an error.
pub fn dialect_of(system: System, command: Option<&str>, given: &[Given]) -> Result<Dialect> {
    let known = |dialect: &Dialect| {
        let options = table::options(dialect);
        given.iter().filter(|one| options.contains_key(one.name.as_str())).count()
    };
    let all = table::dialects(system, command);
    let most = all.iter().map(known).max().unwrap_or(0);
    let mut best: Vec<&Dialect> = all.iter().filter(|dialect| known(dialect) == most).collect();
    if command.is_none() {
        // A command that adds options to those of another one is not meant without them.
        let names = |dialect: &Dialect| table::options(dialect).into_keys().collect::<BTreeSet<_>>();
        let sets: Vec<BTreeSet<&str>> = best.iter().map(|dialect| names(dialect)).collect();
        let adds = |set: &BTreeSet<&str>| sets.iter().any(|other| other != set && other.is_subset(set));
        let keeps: Vec<bool> = sets.iter().map(|set| !adds(set)).collect();
        best = best.into_iter().zip(keeps).filter(|(_, keeps)| *keeps).map(|(dialect, _)| dialect).collect();
    }
    let mut names: Vec<&str> = best.iter().map(|dialect| dialect.command.as_str()).collect();
    names.dedup();
    if names.len() > 1 {
        let shown: Vec<String> = names.iter().map(|name| format!("{}/{name}", system.word())).collect();
        return Err(Error::usage(format!("the options are those of several commands of {system}"))
            .hint(format!("name the command with --as: {}", shown.join(", "))));
    }
    Ok((*best.first().expect("a system has commands")).clone())
}

/// The processes that `#SBATCH` lines of a script request.
pub fn requested(script: &str) -> Processes {
    let lines = script.lines().filter_map(|line| line.strip_prefix("#SBATCH"));
    let words: Vec<&str> =
        lines.flat_map(|line| line.split('#').next().unwrap_or_default().split_whitespace()).collect();
    numbers(&options(&words, &["exclusive"]).unwrap_or_default())
}

/// The numbers of nodes and processes in the options of a launcher and in its configuration, or of `trl`.
fn processes(launcher: &[Given], given: &[Given], dir: &Path) -> Processes {
    let config = launcher.iter().find(|one| one.name == "config_file").map(|one| dir.join(one.text()));
    let of_file = config.filter(|path| path.is_file()).and_then(|path| yaml::read(&path, System::Trl).ok());
    let of_trl: Vec<Given> = given.iter().filter(|one| one.name.starts_with("num_")).cloned().collect();
    numbers(launcher).or(numbers(&of_file.unwrap_or_default())).or(numbers(&of_trl))
}

/// The numbers of nodes and processes in options of deepspeed, torchrun, accelerate, srun and sbatch.
fn numbers(launcher: &[Given]) -> Processes {
    let number = |names: &str| {
        let is_it = |one: &&Given| names.split(' ').any(|name| one.name.replace('-', "_") == name);
        launcher.iter().rev().find(is_it)?.values.first()?.parse().ok()
    };
    let include = launcher.iter().find(|one| one.name == "include").map(|one| {
        let text = one.text();
        let hosts: Vec<&str> = text.split('@').collect();
        (hosts.len(), hosts[0].split_once(':').map(|(_, gpus)| gpus.split(',').count()))
    });
    Processes {
        nodes: number("num_nodes nnodes num_machines nodes N").or(include.map(|(hosts, _)| hosts)),
        per_node: number("num_gpus nproc_per_node gpus_per_node ntasks_per_node nproc")
            .or(include.and_then(|(_, gpus)| gpus)),
        total: number("num_processes ntasks n np"),
    }
}
