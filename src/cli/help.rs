//! `rlhf-hpc --help` and `rlhf-hpc help [TOPIC]`: the verbs in groups, the pages of the manual, and the keys of a job.

pub mod show;

use crate::config;
use crate::config::reference::{self, Entry};
use crate::error::{Error, Result};
use std::fmt::Write as _;

/// The verbs as `--help` lists them.
pub(super) const GROUPS: &[(&str, &[(&str, &str)])] = &[
    (
        "Run",
        &[
            ("run", "run a job, or resume it (--dry-run: only check it)"),
            ("plan", "memory and seconds of a job before it runs; needs no GPU and no weights"),
            ("jobs", "list recipes of jobs, or copy one to edit"),
            ("schema", "JSON schema of a job, for editors"),
            ("migrate", "a job from a launch script of OpenRLHF, TRL or verl"),
        ],
    ),
    (
        "Data",
        &[
            ("shard", "turn rows of text into a token shard, or verify shards"),
            ("tokenizer", "train a byte-level BPE tokenizer"),
        ],
    ),
    (
        "Models",
        &[
            ("download", "a model or data set of the Hugging Face Hub, into the local cache"),
            ("init", "make a model with random weights from a config.json, or like another one"),
            ("generate", "responses of a model to rows of prompts, or to one prompt"),
            ("chat", "talk to a model through its chat template"),
            ("logprobs", "log-probabilities of given tokens or responses"),
            ("reward", "scores of responses by a reward model"),
            ("select", "the best of scored responses, or pairs of them, to train on"),
            ("export", "Hugging Face directory from a checkpoint"),
        ],
    ),
    (
        "Inspect",
        &[
            ("report", "an HTML page of runs: curves, phases, memory, samples to read"),
            ("samples", "prompts, responses and scores of a recorded step"),
            ("replay", "compute a recorded step again: equal to the bit, or where it differs"),
            ("info", "facts about a model; or the build, MPI, GPUs, and the threads of each rank"),
            ("verify", "check a new machine with a job, or compare two computations of a model"),
            ("bench", "speed of this machine compared with its peaks"),
            ("completion", "completion of verbs, options and keys for bash, zsh or fish"),
            ("help", "the manual: `help` lists its pages, `help KEY` explains a key of a job"),
        ],
    ),
];

const EXAMPLES: &str = "\
Examples:
  mpirun -n 16 rlhf-hpc ppo.toml            run or resume a job on 16 ranks
  rlhf-hpc ppo.toml --dry-run job.steps=10  check a job with one key changed
  rlhf-hpc chat --model runs/a/export       talk to the result

A job is a TOML file: `rlhf-hpc help first-job` starts there. `rlhf-hpc VERB --help` explains the options of a verb.";

macro_rules! pages {
    ($($topic:literal)*) => { &[$(($topic, include_str!(concat!("help/", $topic, ".md")))),*] };
}

/// The manual in the order of reading: topics, and texts whose first line is `# TITLE`.
const PAGES: &[(&str, &str)] = pages! {
    "first-job" "data" "images" "rewards" "services" "tools" "sft" "preferences" "distillation" "adapters" "models" "hub" "families" "evaluation" "metrics" "results" "traces" "verification" "trouble" "layouts" "gpus" "slurm" "from-openrlhf" "from-trl" "from-verl" "equality" "formats"
    "reproducibility" "replays"
};

/// The text of `rlhf-hpc --help`.
pub(super) fn overview() -> String {
    let mut text = String::from(
        "RLHF post-training of language models: `rlhf-hpc JOB.toml [key.path=value ...]` runs a job, alone or under mpirun.\n\n\
         Usage: rlhf-hpc VERB [OPTIONS]\n\n",
    );
    for (group, verbs) in GROUPS {
        let _ = writeln!(text, "{group}:");
        list(&mut text, verbs.iter().copied());
        text.push('\n');
    }
    text + EXAMPLES
}

/// The pages of the manual, with their titles.
pub(super) fn titles() -> impl Iterator<Item = (&'static str, &'static str)> {
    PAGES.iter().map(|(topic, page)| (*topic, title(page)))
}

/// The text of `rlhf-hpc help`.
pub(super) fn topics() -> String {
    let mut text =
        String::from("The manual. `rlhf-hpc help TOPIC` prints a page. `rlhf-hpc --help` lists the verbs.\n\n");
    list(&mut text, titles());
    text + "\n`rlhf-hpc help KEY` explains a key of a job, such as `kl_coef`. jobs/reference.toml has all of them."
}

/// The page of `topic`, or the reference of a key or table of that name; none for a verb, which has a help of its own.
///
/// # Errors
/// `Usage`, with the nearest topic, verb or key.
pub(super) fn page(topic: &str, verbs: &[&str]) -> Result<Option<String>> {
    if let Some((_, page)) = PAGES.iter().find(|(name, _)| *name == topic) {
        return Ok(Some((*page).to_owned()));
    }
    if verbs.contains(&topic) {
        return Ok(None);
    }
    let entries = reference::find(topic);
    if !entries.is_empty() {
        return Ok(Some(entries.iter().map(described).collect::<Vec<_>>().join("\n")));
    }
    let all = reference::all();
    let keys = all.iter().map(|entry| entry.key.as_str());
    let known: Vec<&str> = PAGES.iter().map(|(name, _)| *name).chain(verbs.iter().copied()).chain(keys).collect();
    let listed = "`rlhf-hpc help` lists the pages, jobs/reference.toml the keys";
    let hint = match config::nearest(topic, &known) {
        Some(near) => format!("did you mean `{near}`? {listed}"),
        None => listed.to_owned(),
    };
    Err(Error::usage(format!("there is no page, verb or key `{topic}`")).hint(hint))
}

/// The reference of a key: its default and its comment; for a table, its keys, too.
fn described(entry: &Entry) -> String {
    let path = entry.path();
    let mut text = match entry.value.as_str() {
        "" => format!("# [{path}]\n"),
        value => format!("# {path}\n\nDefault: `{value}`\n"),
    };
    let (mut about, mut is_list) = (Vec::new(), false);
    for line in &entry.about {
        let item = line.strip_prefix("  ").filter(|rest| !rest.starts_with(' '));
        if is_list && !line.starts_with("  ") {
            about.push(String::new());
        }
        is_list = line.starts_with("  ");
        about.push(item.map_or_else(|| line.clone(), |item| format!("- {item}")));
    }
    let _ = write!(text, "\n{}\n", about.join("\n"));
    let within = reference::all().into_iter().filter(|inner| inner.table == path && !inner.key.is_empty());
    let rows: Vec<String> = within.map(|inner| format!("- `{}` = `{}`", inner.key, inner.value)).collect();
    if !rows.is_empty() {
        let _ = write!(text, "\nIts keys and their defaults:\n\n{}\n", rows.join("\n"));
        let _ = write!(text, "\n`rlhf-hpc help {path}.KEY` explains a key.\n");
    }
    text
}

fn title(page: &'static str) -> &'static str {
    page.lines().next().unwrap_or_default().trim_start_matches("# ")
}

fn list<'a>(text: &mut String, rows: impl Iterator<Item = (&'a str, &'a str)>) {
    for (name, words) in rows {
        let _ = writeln!(text, "  {name:<17}{words}");
    }
}
