//! The text of a job, with a comment for each key, and the table of options.

use super::draft::{Draft, Item, Outcome, plain};
use super::table::Kind;
use crate::config::reference;
use std::fmt::Write as _;
use std::path::Path;
use toml::Value;

/// The tables of a job in the order of reading. Others follow in alphabetical order.
const ORDER: [&str; 14] = [
    "job",
    "model",
    "lora",
    "mesh",
    "data",
    "rollout",
    "reward",
    "ppo",
    "sft",
    "reward_model",
    "dpo",
    "kto",
    "step_reward",
    "distill",
];

const LINE_MAX: usize = 110;

/// The keys by their tables.
fn by_table<'a>(draft: &'a Draft) -> Vec<(String, Vec<(&'a str, &'a Item)>)> {
    let mut all: Vec<(String, Vec<(&str, &Item)>)> = Vec::new();
    for (path, item) in &draft.items {
        let (table, key) = path.rsplit_once('.').unwrap_or(("", path));
        match all.iter_mut().find(|(known, _)| known == table) {
            Some((_, keys)) => keys.push((key, item)),
            None => all.push((table.to_owned(), vec![(key, item)])),
        }
    }
    let order: Vec<String> = reference::all().iter().map(reference::Entry::path).collect();
    for (table, keys) in &mut all {
        let place = |key: &str| order.iter().position(|known| *known == format!("{table}.{key}")).unwrap_or(usize::MAX);
        keys.sort_by_key(|(key, _)| place(key));
    }
    let place = |table: &str| {
        let first = table.split('.').next().unwrap_or_default();
        (ORDER.iter().position(|known| *known == first).unwrap_or(ORDER.len()), table.to_owned())
    };
    all.sort_by_key(|(table, _)| place(table));
    all
}

/// A value as a job file has it. Small numbers have an exponent.
pub fn written(value: &Value) -> String {
    match value {
        Value::Float(number) => format!("{number:?}"),
        Value::Array(all) => format!("[{}]", all.iter().map(written).collect::<Vec<_>>().join(", ")),
        Value::Table(table) if !table.is_empty() => {
            let pairs: Vec<String> = table.iter().map(|(key, value)| format!("{key} = {}", written(value))).collect();
            format!("{{ {} }}", pairs.join(", "))
        }
        other => other.to_string(),
    }
}

/// The job without comments.
pub fn tables(draft: &Draft) -> String {
    let mut text = String::new();
    for (table, keys) in by_table(draft) {
        let _ = writeln!(text, "[{table}]");
        for (key, Item { value, .. }) in keys {
            let _ = writeln!(text, "{key} = {}", written(value));
        }
    }
    text
}

/// The job file. `source` is the name of the script, `file` that of the job.
pub fn job(draft: &Draft, source: &str, file: &str) -> String {
    let source = plain(source);
    let mut text = format!("# Converted from {source}, a launch of {}, by `rlhf-hpc migrate`.\n", draft.launch.dialect);
    text.push_str("# Other keys have the defaults of jobs/reference.toml.\n#\n");
    for line in &draft.head {
        let _ = writeln!(text, "#   {}", plain(&line.replace("JOB.toml", file)));
    }
    let lost: Vec<Outcome> = draft.outcomes().into_iter().filter(|one| one.kind == Kind::Missing).collect();
    if !lost.is_empty() {
        text.push_str("#\n# Without a counterpart, though it changes what is learned:\n");
        for Outcome { option, note, .. } in lost {
            let _ = writeln!(text, "#   {option}: {note}");
        }
    }
    for (table, keys) in by_table(draft) {
        let _ = writeln!(text, "\n[{table}]");
        for (key, Item { value, why, .. }) in keys {
            let (line, why) = (format!("{key} = {}", written(value)), plain(why));
            if why.is_empty() {
                let _ = writeln!(text, "{line}");
            } else if line.chars().count() + why.chars().count() + 4 <= LINE_MAX {
                let _ = writeln!(text, "{line}  # {why}");
            } else {
                let _ = writeln!(text, "# {why}\n{line}");
            }
        }
    }
    text
}

/// The table of all given options, and a line for each default of theirs that the job sets.
pub fn report(draft: &Draft) -> String {
    let outcomes = draft.outcomes();
    let width = outcomes.iter().map(|one| one.option.chars().count()).max().unwrap_or(0).min(60);
    let mut text = format!("{}: {} options\n", draft.launch.dialect, outcomes.len());
    for Outcome { option, key, kind, note } in &outcomes {
        let key = if key.is_empty() { "-" } else { key };
        let note = if note.is_empty() { String::new() } else { format!("  {}", note.replace('`', "")) };
        let _ = writeln!(text, "  {option:<width$}  {:<12}  {key}{note}", kind.word());
    }
    for given in draft.launch.launcher.iter().filter(|given| !given.values.is_empty()) {
        let option = plain(&format!("{} {}", given.name, given.text()));
        let _ = writeln!(text, "  {option:<width$}  {:<12}  -  of the launcher: mpirun starts the ranks", "not needed");
    }
    let implied: Vec<(&String, &Item)> =
        draft.items.iter().filter(|(key, item)| !item.is_given && *key != "job.kind").collect();
    if !implied.is_empty() {
        let _ = writeln!(text, "Not given, but different here:");
    }
    for (key, Item { value, why, .. }) in implied {
        let _ = writeln!(text, "  {key} = {}  {why}", written(value));
    }
    text
}

/// Puts relative paths of the job under `dir`.
pub fn move_paths(draft: &mut Draft, dir: &Path) {
    const PATHS: [&str; 16] = [
        "job.dir",
        "model.actor",
        "model.reference",
        "model.critic",
        "model.teachers",
        "model.adapter",
        "data.prompts",
        "data.pretrain",
        "data.split.eval_files",
        "file",
        "dir",
        "python",
        "reward.python",
        "reward.models",
        "reward.environment",
        "reward.judge",
    ];
    fn moved(value: &Value, key: &str, dir: &Path) -> Value {
        match value {
            Value::String(path) if PATHS.contains(&key) && !path.contains("://") => {
                dir.join(path).display().to_string().into()
            }
            Value::Array(all) => Value::Array(all.iter().map(|one| moved(one, key, dir)).collect()),
            Value::Table(table) => {
                Value::Table(table.iter().map(|(inner, value)| (inner.clone(), moved(value, inner, dir))).collect())
            }
            other => other.clone(),
        }
    }
    for (key, item) in &mut draft.items {
        item.value = moved(&item.value, key, dir);
    }
}
