//! Names of models and rows: local paths and names of the Hub stay. The Hugging Face cache must have the latter.

use super::draft::Draft;
use super::table::Kind;
use crate::error::{Error, Result};
use crate::hub;
use crate::sys::files;
use std::path::Path;
use toml::Value;

/// Whether a name is that of a repository of the Hub: `org/name`, and no local path.
fn is_of_hub(name: &str) -> bool {
    let is_likely = |(org, repository): (&str, &str)| hub::is_likely(org, repository);
    name.split_once('/').is_some_and(is_likely) && !Path::new(name).exists()
}

/// A local path, with the home directory instead of `~`.
pub fn local(name: &str) -> String {
    match (name.strip_prefix("~/"), std::env::var("HOME")) {
        (Some(rest), Ok(home)) => format!("{home}/{rest}"),
        _ => name.to_owned(),
    }
}

/// A model of the Hub, or the directory of a local one.
pub fn model(draft: &mut Draft, name: &str) -> String {
    if !is_of_hub(name) {
        return local(name);
    }
    download(draft, format!("rlhf-hpc download {name}"));
    name.to_owned()
}

/// The name of a model of the Hub with its revision; `None` for a directory.
pub fn at_revision(name: &str, revision: &str) -> Option<String> {
    is_of_hub(name).then(|| if revision == "main" { name.to_owned() } else { format!("{name}@{revision}") })
}

fn download(draft: &mut Draft, line: String) {
    if !draft.head.contains(&line) {
        draft.head.push(line);
    }
}

/// A source of rows.
fn source(draft: &mut Draft, name: &str) -> String {
    // OpenRLHF appends the format of the rows.
    let name = name.split_once('@').map_or(name, |(name, _)| name).trim();
    if !is_of_hub(name) {
        return local(name);
    }
    download(draft, format!("rlhf-hpc download --data {name}"));
    format!("{}{name}", hub::SCHEME)
}

/// The sources of rows in values, which commas separate, and whether all of them are data sets of the Hub.
pub fn sources(draft: &mut Draft, values: &[String]) -> (Vec<Value>, bool) {
    let names: Vec<&str> = values.iter().flat_map(|value| value.split(',')).filter(|name| !name.is_empty()).collect();
    let of_hub = names.iter().all(|name| is_of_hub(name.split('@').next().unwrap_or(name)));
    (names.into_iter().map(|name| source(draft, name).into()).collect(), of_hub)
}

/// Sets `data.prompts` from the option `name`, and the split that trains from `split` if the sources are folders.
///
/// # Errors
/// `Usage`, if the option is not given and has no default.
pub fn set_rows(draft: &mut Draft, name: &'static str, split: Option<&'static str>) -> Result<bool> {
    let values = draft.list(&[name]);
    if values.is_empty() {
        let option = draft.system().written(name);
        return Err(Error::usage(format!("the launch has no {option}, so it names no rows")));
    }
    let (sources, of_hub) = sources(draft, &values);
    let used = draft.value("data.rows_max").and_then(Value::as_integer).filter(|most| *most > 0);
    draft.rows = draft.rows.or_else(|| lines(&sources)).map(|rows| used.map_or(rows, |most| rows.min(most as usize)));
    draft.set("data.prompts", sources, &[name]);
    let Some(split) = split else { return Ok(of_hub) };
    if of_hub && let Some(value) = draft.text(&[split]) {
        draft.set("data.prompt_split", value, &[split]);
    } else if draft.given(split).is_some() {
        draft.note(split, Kind::Approximate, "files have no splits: name the files that train");
    }
    Ok(of_hub)
}

/// The number of rows in files of JSON lines, if all of them exist.
fn lines(sources: &[Value]) -> Option<usize> {
    let of = |source: &Value| {
        let path = Path::new(source.as_str()?);
        let is_jsonl = path.extension().is_some_and(|extension| extension == "jsonl");
        let text = is_jsonl.then(|| files::read_to_string(path).ok())??;
        Some(text.lines().filter(|line| !line.trim().is_empty()).count())
    };
    sources.iter().map(of).sum()
}

/// Sets `job.steps` to `passes` over the prompts, and names what is missing if their number is unknown.
pub fn set_steps(draft: &mut Draft, passes: f64, names: &[&str]) {
    let prompts = draft.value("rollout.prompts_per_step").and_then(Value::as_integer);
    let prompts = prompts.or_else(|| draft.ours("rollout.prompts_per_step")?.as_integer()).unwrap_or(1).max(1);
    let name = names.iter().find(|name| draft.given(name).is_some()).unwrap_or(&names[0]).to_string();
    if let Some(rows) = draft.rows {
        let steps = (passes * (rows as i64 / prompts).max(1) as f64).ceil().max(1.0);
        let note = format!("{passes} passes over {rows} rows / {prompts} prompts of a step");
        if draft.given(&name).is_some() {
            draft.set("job.steps", steps as i64, names);
            draft.note(&name, Kind::Computed, note);
        } else {
            draft.imply("job.steps", steps as i64, &note);
        }
        return;
    }
    draft.imply("job.steps", 1, &format!("FILL IN: {passes} passes x rows / {prompts}"));
    let note = format!("the number of rows is unknown: pass --rows N, for {passes} passes x N / {prompts} steps");
    draft.note(&name, Kind::Missing, note);
}
