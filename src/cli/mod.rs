//! Argument parsing and dispatch: a file per verb.

pub mod corpus;
pub mod export;
pub mod generate;
pub mod info;
pub mod init;
pub mod logprobs;
pub mod reward;
mod rows;
pub mod run;
pub mod shard;
pub mod tokenizer;

use crate::error::{Error, Result};
use argh::FromArgs;

/// RLHF post-training of language models: `rlhf-hpc JOB.toml` runs a job, alone or under mpirun.
#[derive(FromArgs)]
struct Arguments {
    #[argh(subcommand)]
    verb: Verb,
}

#[derive(FromArgs)]
#[argh(subcommand)]
enum Verb {
    Run(run::Args),
    Init(init::Args),
    Shard(shard::Args),
    Corpus(corpus::Args),
    Tokenizer(tokenizer::Args),
    Generate(generate::Args),
    Logprobs(logprobs::Args),
    Reward(reward::Args),
    Export(export::Args),
    Info(info::Args),
}

const VERBS: [&str; 10] =
    ["run", "init", "shard", "corpus", "tokenizer", "generate", "logprobs", "reward", "export", "info"];

/// Verbs of the interface that a later release brings: refused by name.
const VERBS_TO_COME: [&str; 5] = ["plan", "report", "bench", "verify", "migrate"];

/// Runs one command line (without the program's name) and returns the exit code.
pub fn main(arguments: Vec<String>) -> i32 {
    match parse(arguments) {
        Ok(Parsed::Text(text)) => {
            println!("{}", text.trim_end());
            0
        }
        Ok(Parsed::Verb(verb)) => report(dispatch(verb)),
        Err(error) => report(Err(error)),
    }
}

fn report(result: Result<()>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(error) => {
            // A broken pipe on standard error leaves nobody to tell.
            let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("{error}\n"));
            error.exit_code()
        }
    }
}

enum Parsed {
    Verb(Verb),
    Text(String),
}

fn parse(arguments: Vec<String>) -> Result<Parsed> {
    let arguments = normalise(arguments);
    if arguments.first().is_some_and(|a| a == "--version" || a == "-V") {
        return Ok(Parsed::Text(format!("rlhf-hpc {}", env!("CARGO_PKG_VERSION"))));
    }
    if let Some(verb) = arguments.first().filter(|a| VERBS_TO_COME.contains(&a.as_str())) {
        return Err(Error::usage(format!("the verb `{verb}` is not in this release"))
            .hint(format!("verbs of this release: {}", VERBS.join(", "))));
    }
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match Arguments::from_args(&["rlhf-hpc"], &words) {
        Ok(arguments) => Ok(Parsed::Verb(arguments.verb)),
        Err(exit) if exit.status.is_ok() => Ok(Parsed::Text(exit.output)),
        Err(exit) => {
            let text = exit.output.trim().replace("\n\n", "\n");
            Err(Error::usage(text).hint("`rlhf-hpc --help` lists the verbs, `rlhf-hpc VERB --help` their options"))
        }
    }
}

/// `job.toml ...` means `run job.toml ...`; `--option=value` is split, which argh does not do.
fn normalise(arguments: Vec<String>) -> Vec<String> {
    let mut out = Vec::with_capacity(arguments.len() + 1);
    match arguments.first() {
        None => out.push("--help".to_string()),
        Some(first) if first.starts_with('-') && (first == "--version" || first == "-V" || first == "--help") => {}
        Some(first)
            if VERBS.contains(&first.as_str()) || VERBS_TO_COME.contains(&first.as_str()) || first == "help" => {}
        Some(_) => out.push("run".to_string()),
    }
    for argument in arguments {
        match argument.split_once('=') {
            Some((option, value)) if option.starts_with("--") => {
                out.push(option.to_string());
                out.push(value.to_string());
            }
            _ => out.push(argument),
        }
    }
    out
}

fn dispatch(verb: Verb) -> Result<()> {
    match verb {
        Verb::Run(args) => run::run(&args),
        Verb::Init(args) => init::run(&args),
        Verb::Shard(args) => shard::run(&args),
        Verb::Corpus(args) => corpus::run(&args),
        Verb::Tokenizer(args) => tokenizer::run(&args),
        Verb::Generate(args) => generate::run(&args),
        Verb::Logprobs(args) => logprobs::run(&args),
        Verb::Reward(args) => reward::run(&args),
        Verb::Export(args) => export::run(&args),
        Verb::Info(args) => info::run(&args),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(String::from).collect()
    }

    #[test]
    fn a_first_argument_that_is_no_verb_means_run_and_options_with_equal_signs_are_split() {
        assert_eq!(normalise(words("ppo.toml job.steps=3")), words("run ppo.toml job.steps=3"));
        assert_eq!(normalise(words("generate --model=m --input f")), words("generate --model m --input f"));
    }

    #[test]
    fn verbs_to_come_and_unknown_options_are_refused() {
        assert!(matches!(parse(words("verify")), Err(e) if e.message == "the verb `verify` is not in this release"));
        assert!(matches!(parse(words("shard --nonsense")), Err(e) if e.exit_code() == 2));
        assert!(matches!(parse(words("--version")), Ok(Parsed::Text(t)) if t.starts_with("rlhf-hpc ")));
    }
}
