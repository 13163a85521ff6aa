//! `rlhf-hpc --help` and `rlhf-hpc help [TOPIC]`: the verbs in groups, and the pages of the manual.

use crate::config;
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
            ("init", "make a model with random weights from a config.json"),
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
            ("info", "the build, MPI, GPUs, and the threads of each rank"),
            ("bench", "speed of this machine beside its peaks"),
            ("help", "the manual: `rlhf-hpc help` lists its pages"),
        ],
    ),
];

const EXAMPLES: &str = "\
Examples:
  mpirun -n 16 rlhf-hpc ppo.toml                      run a job on 16 ranks; the same line resumes it
  rlhf-hpc run ppo.toml --dry-run job.steps=10        check a job with one key changed, and stop
  rlhf-hpc generate --model runs/a/export --input questions.jsonl --temperature 0

A job is a TOML file: `rlhf-hpc help first-job` starts there. `rlhf-hpc VERB --help` explains the options of a verb.";

macro_rules! pages {
    ($($topic:literal)*) => { &[$(($topic, include_str!(concat!("help/", $topic, ".md")))),*] };
}

/// The manual in the order of reading: topics, and texts whose first line is `# TITLE`.
const PAGES: &[(&str, &str)] = pages! {
    "first-job" "data" "rewards" "services" "tools" "sft" "preferences" "distillation" "models" "evaluation" "metrics" "trouble" "layouts" "gpus" "slurm" "from-openrlhf" "from-trl" "formats"
    "reproducibility"
};

/// What `rlhf-hpc --help` prints.
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

/// What `rlhf-hpc help` prints.
pub(super) fn topics() -> String {
    let mut text =
        String::from("The manual. `rlhf-hpc help TOPIC` prints a page, `rlhf-hpc --help` lists the verbs.\n\n");
    list(&mut text, PAGES.iter().map(|(topic, page)| (*topic, title(page))));
    text + "\njobs/reference.toml explains every key of a job."
}

/// The page of `topic`; none where it is a verb, which has a help of its own.
///
/// # Errors
/// `Usage`, with the nearest topic or verb.
pub(super) fn page(topic: &str, verbs: &[&str]) -> Result<Option<&'static str>> {
    if let Some((_, page)) = PAGES.iter().find(|(name, _)| *name == topic) {
        return Ok(Some(page));
    }
    if verbs.contains(&topic) {
        return Ok(None);
    }
    let known: Vec<&str> = PAGES.iter().map(|(name, _)| *name).chain(verbs.iter().copied()).collect();
    let hint = match config::nearest(topic, &known) {
        Some(near) => format!("did you mean `{near}`? `rlhf-hpc help` lists the pages"),
        None => "`rlhf-hpc help` lists the pages".to_owned(),
    };
    Err(Error::usage(format!("the manual has no page `{topic}`")).hint(hint))
}

fn title(page: &str) -> &str {
    page.lines().next().unwrap_or_default().trim_start_matches("# ")
}

fn list<'a>(text: &mut String, rows: impl Iterator<Item = (&'a str, &'a str)>) {
    for (name, words) in rows {
        let _ = writeln!(text, "  {name:<17}{words}");
    }
}
