//! `rlhf-hpc completion`: scripts that complete command lines in shells. A script asks the program itself for the words
//! that may follow, so the words are always those of its options and keys.

use super::help;
use super::jobs;
use super::out::{self, say};
use crate::config::{self, reference};
use crate::error::{Error, Result};
use argh::{ArgsInfo, CommandInfoWithArgs, FlagInfoKind, FromArgs};
use serde_json::Value;

/// Print a script that completes verbs, options, keys of a job and their values in a shell.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "completion")]
#[argh(note = "bash: add `source <(rlhf-hpc completion bash)` to ~/.bashrc.\n\
            zsh: add `source <(rlhf-hpc completion zsh)` to ~/.zshrc, after compinit.\n\
            fish: run `rlhf-hpc completion fish > ~/.config/fish/completions/rlhf-hpc.fish`.\n\
            `rlhf-hpc completion words -- WORD ...` prints the completions of the last word, as the scripts do.")]
pub struct Args {
    /// bash, zsh or fish
    #[argh(positional)]
    pub shell: String,

    /// with `words`: the words of a command line without the program, up to the cursor
    #[argh(positional)]
    pub words: Vec<String>,
}

const SHELLS: [(&str, &str); 3] = [
    ("bash", include_str!("completion/rlhf-hpc.bash")),
    ("zsh", include_str!("completion/rlhf-hpc.zsh")),
    ("fish", include_str!("completion/rlhf-hpc.fish")),
];

/// A word, and what it means.
type Completion = (String, String);

pub fn run(args: &Args, program: &CommandInfoWithArgs) -> Result<()> {
    if args.shell == "words" {
        let words: Vec<&str> = args.words.iter().map(String::as_str).collect();
        let lines = completions(&words, program).into_iter().map(|(word, about)| format!("{word}\t{about}\n"));
        return out::write(lines.collect::<String>().as_bytes());
    }
    let Some((_, script)) = SHELLS.iter().find(|(shell, _)| *shell == args.shell) else {
        let known = SHELLS.map(|(shell, _)| shell).join(", ");
        return Err(Error::usage(format!("the shell must be one of {known} (got {})", args.shell)));
    };
    say!("{}", script.trim_end());
    Ok(())
}

/// The completions of the last word. None means any path: shells complete those themselves.
fn completions(words: &[&str], program: &CommandInfoWithArgs) -> Vec<Completion> {
    let (last, before) = words.split_last().unwrap_or((&"", &[]));
    let found = match before.split_first() {
        None if last.starts_with('-') => vec![word("--help", "the verbs"), word("--version", "the release")],
        None => verbs(program),
        Some((&"help", [])) => topics(program),
        Some((&"help", _)) => Vec::new(),
        Some((verb, rest)) => {
            let named = |name: &str| program.commands.iter().find(|one| one.name == name);
            // A job needs no word `run`.
            let found = named(verb).map(|one| (one, rest)).or_else(|| Some((named("run")?, before)));
            found.map_or_else(Vec::new, |(one, rest)| arguments(&one.command, rest, last))
        }
    };
    let mut found: Vec<Completion> = found.into_iter().filter(|(word, _)| word.starts_with(last)).collect();
    found.dedup_by(|one, other| one.0 == other.0);
    found
}

fn word(word: impl Into<String>, about: &str) -> Completion {
    let line = about.split_whitespace().collect::<Vec<_>>().join(" ");
    let first = line.split(". ").next().unwrap_or_default().trim_end_matches('.');
    (word.into(), first.to_owned())
}

fn verbs(program: &CommandInfoWithArgs) -> Vec<Completion> {
    let about = |name: &str| {
        let mut listed = help::GROUPS.iter().flat_map(|(_, verbs)| verbs.iter());
        listed.find(|(verb, _)| *verb == name).map_or("", |(_, about)| *about)
    };
    let names = program.commands.iter().map(|one| one.name).chain(["help"]);
    names.map(|name| word(name, about(name))).collect()
}

/// Pages of the manual, verbs, and keys.
fn topics(program: &CommandInfoWithArgs) -> Vec<Completion> {
    let pages = help::titles().map(|(topic, title)| word(topic, title));
    let keys = reference::all().into_iter().map(|entry| word(entry.path(), &entry.about.join(" ")));
    pages.chain(verbs(program)).chain(keys).collect()
}

/// What may follow the words `before` of a verb.
fn arguments(verb: &CommandInfoWithArgs, before: &[&str], last: &str) -> Vec<Completion> {
    let option = |word: &str| verb.flags.iter().find(|flag| flag.long == word);
    let takes_value = |word: &str| option(word).is_some_and(|flag| matches!(flag.kind, FlagInfoKind::Option { .. }));
    if before.last().is_some_and(|word| takes_value(word)) {
        return Vec::new();
    }
    if last.starts_with('-') {
        let shown = verb.flags.iter().filter(|flag| !flag.hidden);
        return shown.map(|flag| word(flag.long, flag.description)).collect();
    }
    if let Some(inner) = before.first().and_then(|name| verb.commands.iter().find(|one| one.name == *name)) {
        return arguments(&inner.command, &before[1..], last);
    }
    let is_value = |i: usize| i > 0 && takes_value(before[i - 1]);
    let given = (0..before.len()).filter(|i| !before[*i].starts_with('-') && !is_value(*i)).count();
    match verb.name {
        "run" | "plan" | "verify" if given > 0 => overrides(last),
        "copy" if given == 0 => jobs::names().map(|name| word(name, "a recipe")).collect(),
        _ if given == 0 && !verb.commands.is_empty() => {
            verb.commands.iter().map(|one| word(one.name, one.command.description)).collect()
        }
        "completion" if given == 0 => SHELLS.iter().map(|(shell, _)| word(*shell, "a shell")).collect(),
        _ => Vec::new(),
    }
}

/// The keys of a job that begin with `start`, up to the next dot: tables first, then the keys of a table, and after `=`
/// the values of a key.
fn overrides(start: &str) -> Vec<Completion> {
    if let Some((key, _)) = start.split_once('=') {
        return values(key).into_iter().map(|value| (format!("{key}={value}"), String::new())).collect();
    }
    let known = config::keys();
    let entries = reference::all();
    let about = |path: &str| {
        entries.iter().find(|entry| entry.path() == path).map(|entry| entry.about.join(" ")).unwrap_or_default()
    };
    let depth = start.rfind('.').map_or(0, |dot| dot + 1);
    let mut found: Vec<Completion> = Vec::new();
    for key in known.iter().filter(|key| key.starts_with(start)) {
        let (path, end) = match key[depth..].find('.') {
            Some(dot) => (&key[..depth + dot], "."),
            None => (key.as_str(), "="),
        };
        let completion = word(format!("{path}{end}"), &about(path));
        if !found.contains(&completion) {
            found.push(completion);
        }
    }
    found
}

/// The values of a key that is a choice.
fn values(key: &str) -> Vec<String> {
    let schema = config::schema();
    let of = key.split('.').fold(&schema, |schema, name| &schema["properties"][name]);
    let forms = std::iter::once(of).chain(of["anyOf"].as_array().into_iter().flatten());
    let each = forms.flat_map(|form| match (&form["enum"], form["type"].as_str()) {
        (Value::Array(all), _) => all.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        (_, Some("boolean")) => vec!["true".to_owned(), "false".to_owned()],
        _ => form["const"].as_str().map(str::to_owned).into_iter().collect::<Vec<_>>(),
    });
    each.collect()
}
