//! Argument parsing and dispatch: a file per verb.

pub mod bench;
pub mod chat;
pub mod completion;
mod device;
pub mod download;
pub mod export;
pub mod generate;
mod help;
mod hub;
pub mod info;
pub mod init;
pub mod jobs;
pub mod logprobs;
pub mod migrate;
mod model_dirs;
mod out;
pub mod plan;
mod ranks;
pub mod replay;
pub mod report;
pub mod reward;
pub mod rows;
pub mod run;
pub mod samples;
pub mod schema;
mod scores;
pub mod select;
pub mod shard;
mod talk;
mod texts;
pub mod tokenizer;
pub mod verify;

use crate::comm::abort;
use crate::config;
use crate::error::{Error, Result};
use crate::metrics::step_query;
use crate::sys::signals;
use argh::{ArgsInfo, FromArgs, SubCommands};
use std::ffi::OsString;

/// RLHF post-training of language models: `rlhf-hpc JOB.toml` runs a job, alone or under mpirun.
#[derive(ArgsInfo, FromArgs)]
struct Arguments {
    #[argh(subcommand)]
    verb: Verb,
}

#[derive(ArgsInfo, FromArgs)]
#[argh(subcommand)]
enum Verb {
    Run(run::Args),
    Plan(plan::Args),
    Init(init::Args),
    Shard(shard::Args),
    Tokenizer(tokenizer::Args),
    Generate(generate::Args),
    Chat(chat::Args),
    Logprobs(logprobs::Args),
    Reward(reward::Args),
    Select(select::Args),
    Export(export::Args),
    Download(download::Args),
    Migrate(migrate::Args),
    Replay(replay::Args),
    Report(report::Args),
    Samples(samples::Args),
    Jobs(jobs::Args),
    Schema(schema::Args),
    Completion(completion::Args),
    Info(info::Args),
    Bench(bench::Args),
    Verify(verify::Args),
}

/// Names of all verbs.
pub fn verbs() -> Vec<&'static str> {
    Verb::COMMANDS.iter().map(|verb| verb.name).collect()
}

/// Runs one command line (without the program's name) and returns the exit code.
pub fn main(arguments: Vec<impl Into<OsString>>) -> i32 {
    let arguments = texts(arguments.into_iter().map(Into::into).collect());
    if let Ok([verb, rest @ ..]) = arguments.as_deref()
        && verb == step_query::VERB
    {
        signals::release();
        step_query::serve(rest);
        return 0;
    }
    let parsed = arguments.and_then(parse);
    if !matches!(&parsed, Ok(Parsed::Verb(verb)) if matches!(**verb, Verb::Run(_))) {
        signals::release();
    }
    match parsed {
        // Under a launcher the other ranks have nothing to print.
        Ok(Parsed::Text(_) | Parsed::Page(_)) if !rows::is_worker() => 0,
        Ok(Parsed::Text(text)) => {
            out::say_line(help::show::plain(text.trim_end()).as_str());
            0
        }
        Ok(Parsed::Page(page)) => help::show::page(&page).map_or_else(|error| abort::fail(&error), |()| 0),
        // Reports the error once, not once per rank, and ends all ranks.
        Ok(Parsed::Verb(verb)) => dispatch(*verb).map_or_else(|error| abort::fail(&error), |()| 0),
        Err(error) => abort::fail(&error),
    }
}

fn texts(arguments: Vec<OsString>) -> Result<Vec<String>> {
    let text = |argument: OsString| {
        let refused = |a: OsString| Error::usage(format!("the argument {:?} is not UTF-8", a.to_string_lossy()));
        argument.into_string().map_err(|a| refused(a).hint("rename the file, or pass a link to it"))
    };
    arguments.into_iter().map(text).collect()
}

enum Parsed {
    Verb(Box<Verb>),
    Text(String),
    /// Markdown.
    Page(String),
}

fn parse(arguments: Vec<String>) -> Result<Parsed> {
    let arguments = normalise(arguments);
    if arguments.first().is_some_and(|a| a == "--version" || a == "-V") {
        return Ok(Parsed::Text(format!("rlhf-hpc {}", env!("CARGO_PKG_VERSION"))));
    }
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["--help"] => return Ok(Parsed::Text(help::overview())),
        ["help"] => return Ok(Parsed::Text(help::topics())),
        ["help", topic, ..] => {
            return match help::page(topic, &verbs())? {
                Some(page) => Ok(Parsed::Page(page)),
                None => parse(vec![topic.to_owned(), "--help".to_owned()]),
            };
        }
        _ => {}
    }
    if let ["run", first, ..] = words[..]
        && let Some(verb) = meant(first)
    {
        return Err(no_verb(first).hint(format!("did you mean `{verb}`?")));
    }
    if let ["run", word, job, ..] = words[..]
        && is_word(word)
        && std::path::Path::new(job).extension().is_some_and(|extension| extension == "toml")
    {
        return Err(
            no_verb(word).hint(format!("write `rlhf-hpc run {job}`: the method is the key job.kind of the job"))
        );
    }
    match Arguments::from_args(&["rlhf-hpc"], &words) {
        Ok(arguments) => Ok(Parsed::Verb(Box::new(arguments.verb))),
        Err(exit) if exit.status.is_ok() => Ok(Parsed::Text(exit.output)),
        Err(exit) => {
            // As other messages: one line, in lower case.
            let text = exit.output.split_whitespace().collect::<Vec<_>>().join(" ");
            let lower = text[..1].to_lowercase() + &text[1..];
            let listed = "run `rlhf-hpc --help` for the verbs, `rlhf-hpc VERB --help` for their options";
            Err(Error::usage(lower).hint(option_meant(&words, &text).unwrap_or_else(|| listed.to_owned())))
        }
    }
}

fn no_verb(word: &str) -> Error {
    Error::usage(format!("`{word}` is neither a verb nor an existing job file"))
}

/// The verb that a misspelled word probably means; none if a file has that name.
fn meant(word: &str) -> Option<&'static str> {
    if is_word(word) { config::nearest(word, &verbs()) } else { None }
}

/// Whether an argument can be a verb, and is not an existing file.
fn is_word(word: &str) -> bool {
    let is_name = |c: char| c.is_ascii_lowercase() || "_+-".contains(c);
    !word.starts_with('-') && word.chars().all(is_name) && !std::path::Path::new(word).exists()
}

/// The option or override that is meant by an argument that the parser does not know, according to its `message`.
fn option_meant(words: &[&str], message: &str) -> Option<String> {
    let wrong = message.strip_prefix("Unrecognized argument: ")?.split_whitespace().next()?;
    let at = words.iter().position(|word| *word == wrong)?;
    let dashed = wrong.replace('_', "-");
    let others: Vec<&str> = words.iter().map(|word| if *word == wrong { &*dashed } else { word }).collect();
    let is_option = |exit: argh::EarlyExit| !exit.output.contains(&format!("Unrecognized argument: {dashed}"));
    if dashed != wrong && Arguments::from_args(&["rlhf-hpc"], &others).map_or_else(is_option, |_| true) {
        return Some(format!("write {dashed}"));
    }
    let takes_keys = matches!(words.first(), Some(&"run" | &"plan"));
    let value = words.get(at + 1).filter(|next| !next.starts_with("--")).copied();
    config::override_for(wrong, value).filter(|_| takes_keys)
}

/// `job.toml ...` means `run job.toml ...`; `--option=value` is split, which argh does not do.
fn normalise(arguments: Vec<String>) -> Vec<String> {
    let mut out = Vec::with_capacity(arguments.len() + 1);
    match arguments.first() {
        None => out.push("--help".to_string()),
        Some(first) if ["--version", "-V", "--help", "-h", "help"].contains(&first.as_str()) => {}
        Some(first) if verbs().contains(&first.as_str()) => {}
        Some(_) => out.push("run".to_string()),
    }
    // Words after -- are those of another program.
    let mut is_foreign = false;
    for argument in arguments {
        is_foreign |= argument == "--";
        match argument.split_once('=') {
            _ if is_foreign => out.push(argument),
            Some((option, value)) if option.starts_with("--") => {
                out.push(option.to_string());
                out.push(value.to_string());
            }
            _ if argument == "-h" => out.push("--help".to_string()),
            _ => out.push(argument),
        }
    }
    out
}

fn dispatch(verb: Verb) -> Result<()> {
    match verb {
        Verb::Run(args) => run::run(&args),
        Verb::Plan(args) => plan::run(&args),
        Verb::Info(args) => info::run(&args),
        Verb::Bench(args) if args.suite == bench::COLLECTIVES => bench::run(&args),
        // Verbs that run a model share the rows among the ranks.
        Verb::Generate(args) => generate::run(&args),
        Verb::Chat(args) => chat::run(&args),
        Verb::Logprobs(args) => logprobs::run(&args),
        Verb::Reward(args) => reward::run(&args),
        Verb::Verify(args) => verify::run(&args),
        Verb::Replay(args) => replay::run(&args),
        // Other offline verbs are the work of one process: under a launcher the other ranks have nothing to do.
        _ if !rows::is_worker() => Ok(()),
        Verb::Init(args) => init::run(&args),
        Verb::Shard(args) => shard::run(&args),
        Verb::Tokenizer(args) => tokenizer::run(&args),
        Verb::Select(args) => select::run(&args),
        Verb::Export(args) => export::run(&args),
        Verb::Download(args) => download::run(&args),
        Verb::Migrate(args) => migrate::run(&args),
        Verb::Report(args) => report::run(&args),
        Verb::Samples(args) => samples::run(&args),
        Verb::Jobs(args) => jobs::run(&args),
        Verb::Schema(args) => schema::run(&args),
        Verb::Completion(args) => completion::run(&args, &Arguments::get_args_info()),
        Verb::Bench(args) => bench::run(&args),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split_line(line: &str) -> Vec<String> {
        line.split_whitespace().map(String::from).collect()
    }

    #[test]
    fn the_help_lists_every_verb_once() {
        let mut listed: Vec<&str> =
            help::GROUPS.iter().flat_map(|(_, verbs)| verbs.iter().map(|(verb, _)| *verb)).collect();
        let mut known = [verbs(), vec!["help"]].concat();
        listed.sort_unstable();
        known.sort_unstable();
        assert_eq!(listed, known);
    }

    #[test]
    fn a_first_argument_that_is_not_a_verb_means_run_and_options_with_equal_signs_are_split() {
        assert_eq!(normalise(split_line("ppo.toml job.steps=3")), split_line("run ppo.toml job.steps=3"));
        assert_eq!(normalise(split_line("generate --model=m --input f")), split_line("generate --model m --input f"));
    }
}
