//! `rlhf-hpc samples`: prints the samples of a recorded step, or the held-out rows of an evaluation.

use super::out;
use super::rows;
use crate::error::{Error, Result};
use crate::experience::marked;
use crate::images::plural;
use crate::metrics::eval_rows::{self, EvalResponses, EvalRow};
use crate::metrics::recorded::{self, RecordedSample, RecordedStep};
use crate::metrics::{grouped, number, one_line};
use argh::{ArgsInfo, FromArgs};
use serde::Serialize;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Show the prompts, responses and scores of a recorded step, grouped by prompt. For evaluations, show the held-out
/// rows with their rewards: both responses of a pair, the responses to a prompt, or the steps of a text.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "samples")]
pub struct Args {
    /// a run directory
    #[argh(positional)]
    pub run: PathBuf,

    /// a recorded step (default: the last)
    #[argh(option)]
    pub step: Option<u64>,

    /// show only the N samples with the lowest scores (held-out rows: lowest margins or mean scores)
    #[argh(option)]
    pub worst: Option<usize>,

    /// show only the N samples with the highest scores (held-out rows: highest margins or mean scores)
    #[argh(option)]
    pub best: Option<usize>,

    /// show only the samples of the prompt with this id
    #[argh(option)]
    pub prompt: Option<i64>,

    /// show the held-out rows of an evaluation, even if there are recorded steps
    #[argh(switch)]
    pub eval: bool,

    /// print one JSON line per sample or held-out row, with the exact texts
    #[argh(switch)]
    pub json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let asked = [args.worst.is_some(), args.best.is_some(), args.prompt.is_some()];
    if asked.into_iter().filter(|asked| *asked).count() > 1 {
        return Err(Error::usage("--worst, --best and --prompt exclude each other").hint("pass only one of them"));
    }
    let run = &args.run;
    if !run.is_dir() {
        return Err(Error::usage(format!("{} is not a directory", run.display())).hint("pass the job.dir of a run"));
    }
    let (steps, evaluated) = (recorded::steps(run)?, eval_rows::steps(run)?);
    let (text, lines) = if args.eval || steps.is_empty() && !evaluated.is_empty() {
        let step = step_of(run, args.step, &evaluated)?;
        let all = eval_rows::read(run, step)?;
        let shown = chosen(args, step, all.clone(), |row| row.row as i64, |row| row.margin)?;
        let text = shown.iter().fold(format!("{}\n", summary_of_rows(step, &all)), |text, row| text + &shown_row(row));
        (text, shown.iter().map(as_json).collect())
    } else {
        let step = RecordedStep::for_step(run, step_of(run, args.step, &steps)?);
        let all = step.samples()?;
        let shown = chosen(args, step.step, all.clone(), |sample| sample.prompt_id, |sample| sample.score.into())?;
        let groups = groups(shown);
        let mut text = format!("{}\n", summary(step.step, &all));
        for group in &groups {
            show(&mut text, group);
        }
        (text, groups.iter().flatten().map(as_json).collect())
    };
    out::write(if args.json { lines } else { text }.as_bytes())
}

/// The selected recorded step, or the last one.
fn step_of(run: &Path, step: Option<u64>, steps: &[u64]) -> Result<u64> {
    let Some(last) = steps.last() else {
        return Err(Error::data(format!("{} has no recorded samples", run.display()))
            .hint("set metrics.rollouts_every_steps above 0 in a ppo job, or metrics.eval_rows_max for evaluations"));
    };
    let step = step.unwrap_or(*last);
    if !steps.contains(&step) {
        let (run, named) = (run.display(), named(steps));
        return Err(Error::usage(format!("step {step} is not recorded in {run}")).hint(format!(
            "choose one of {named} (set by metrics.rollouts_every_steps or eval.every_steps, and metrics.rollouts_keep_last)"
        )));
    }
    Ok(step)
}

/// The maximum number of ranges of steps that an error names.
const NAMED_MAX: usize = 20;

/// `1 to 40, 50, 60`: ascending steps, with consecutive ones as a range.
fn named(steps: &[u64]) -> String {
    let neighbours = steps.chunk_by(|a, b| a + 1 == *b);
    let mut runs: Vec<String> = neighbours
        .map(|run| match run {
            [first, .., last] => format!("{first} to {last}"),
            one => one[0].to_string(),
        })
        .collect();
    if runs.len() > NAMED_MAX {
        let last = runs.pop().expect("there are many");
        runs.truncate(NAMED_MAX - 1);
        runs.extend(["...".to_string(), last]);
    }
    runs.join(", ")
}

fn chosen<T>(
    args: &Args,
    step: u64,
    mut samples: Vec<T>,
    id: impl Fn(&T) -> i64,
    score: impl Fn(&T) -> f64,
) -> Result<Vec<T>> {
    if let Some(prompt) = args.prompt {
        samples.retain(|sample| id(sample) == prompt);
        if samples.is_empty() {
            return Err(Error::usage(format!("step {step} has no sample of prompt {prompt}"))
                .hint("leave out --prompt to see all samples with their prompt ids"));
        }
    }
    if let Some(most) = args.worst.or(args.best) {
        samples.sort_by(|a, b| score(a).total_cmp(&score(b)));
        if args.best.is_some() {
            samples.reverse();
        }
        samples.truncate(most);
    }
    Ok(samples)
}

/// Groups samples by prompt, in the order in which the prompts first occur.
pub(super) fn groups(samples: Vec<RecordedSample>) -> Vec<Vec<RecordedSample>> {
    let mut groups = rows::groups(samples, |sample| sample.prompt_id);
    for group in &mut groups {
        group.sort_by_key(|sample| sample.sample);
    }
    groups
}

/// A number without trailing zeros: `1`, `0.25`, `-3.1e-5`.
pub(super) fn short_number(x: impl Into<f64>) -> String {
    let text = number(x.into());
    if text.contains('.') && !text.contains('e') {
        text.trim_end_matches('0').trim_end_matches('.').to_string()
    } else {
        text
    }
}

fn summary(step: u64, all: &[RecordedSample]) -> String {
    let prompts = grouped(groups(all.to_vec()).len() as u64);
    let (samples, scores) = (grouped(all.len() as u64), distribution(all.iter().map(|sample| sample.score.into())));
    format!("step {step}: {samples} samples of {prompts} prompts, score {scores}")
}

fn summary_of_rows(step: u64, all: &[EvalRow]) -> String {
    let correct = grouped(all.iter().filter(|row| row.correct).count() as u64);
    let rows = grouped(all.len() as u64);
    let (name, values) = (all.first().map_or("margin", |row| measure(row).0), all.iter().map(|row| measure(row).1));
    format!("step {step}: {rows} held-out rows, {correct} correct, {name} {}", distribution(values))
}

/// The number that ranks a held-out row, with its name: the mean score of answers, else the margin.
fn measure(row: &EvalRow) -> (&'static str, f64) {
    let rewards = row.responses.list();
    match &row.responses {
        EvalResponses::Answers { .. } if !rewards.is_empty() => {
            ("score", rewards.iter().map(|(_, _, reward)| reward).sum::<f64>() / rewards.len() as f64)
        }
        _ => ("margin", row.margin),
    }
}

/// Describes a distribution: `0.5 on average, from -1 to 2`.
fn distribution(all: impl Iterator<Item = f64> + Clone) -> String {
    let mean = all.clone().sum::<f64>() / all.clone().count().max(1) as f64;
    let (least, most) = (all.clone().fold(f64::INFINITY, f64::min), all.fold(f64::NEG_INFINITY, f64::max));
    let [mean, least, most] = [mean, least, most].map(short_number);
    format!("{mean} on average, from {least} to {most}")
}

fn show(text: &mut String, group: &[RecordedSample]) {
    let first = &group[0];
    let _ = write!(text, "\nprompt {}", first.prompt_id);
    for (name, value) in [("label", &first.label), ("from", &first.source)] {
        if !value.is_empty() {
            let _ = write!(text, "  {name} {}", one_line(value));
        }
    }
    text.push('\n');
    put(text, &first.prompt);
    count(text, &first.images);
    for sample in group {
        let score = short_number(sample.score);
        let _ = write!(text, "  - score {score}");
        if sample.scores.len() > 1 {
            let of = |(name, score): (&String, &f32)| format!("{} {}", one_line(name), short_number(*score));
            let _ = write!(text, " ({})", sample.scores.iter().map(of).collect::<Vec<_>>().join(", "));
        }
        let _ = writeln!(text, ", {} tokens, {}", sample.response_tokens, sample.finish);
        put(text, &marked(&sample.response, &sample.environment));
        count(text, &sample.environment_images);
    }
}

/// The number of images, if there are any.
fn count(text: &mut String, images: &[String]) {
    if !images.is_empty() {
        let _ = writeln!(text, "      ({}: see the report, or --json)", plural(images.len(), "image"));
    }
}

fn shown_row(row: &EvalRow) -> String {
    let verdict = if row.correct { "correct" } else { "wrong" };
    let (name, value) = measure(row);
    let mut text = format!("\nprompt {}  {verdict}, {name} {}", row.row, short_number(value));
    if let EvalResponses::Answers { set, label, .. } = &row.responses {
        for (name, value) in [("label", label), ("set", set)].into_iter().filter(|(_, value)| !value.is_empty()) {
            let _ = write!(text, "  {name} {}", one_line(value));
        }
    }
    text.push('\n');
    if let Some(question) = row.question() {
        put(&mut text, question);
    }
    for (name, response, reward) in row.responses.list() {
        let _ = writeln!(text, "  - {}, reward {}", one_line(&name), short_number(reward));
        put(&mut text, &response);
    }
    text
}

/// Writes a text with its line breaks, indented and safe on a terminal.
fn put(text: &mut String, of: &str) {
    for line in of.replace("\r\n", "\n").split('\n') {
        let line = format!("      {}", one_line(line));
        let _ = writeln!(text, "{}", line.trim_end());
    }
}

/// A line of JSON in which control characters and invisible marks are escaped.
fn as_json(row: &impl Serialize) -> String {
    // A reward that abstained is NaN, which is null in JSON.
    let json = serde_json::to_string(row).expect("texts and numbers");
    // Samples without images have no such field.
    let json = json.strip_suffix(",\"images\":[]}").map_or(json.clone(), |rest| format!("{rest}}}"));
    let mut text = String::with_capacity(json.len() + 1);
    for c in json.chars() {
        if one_line(&c.to_string()).starts_with(c) {
            text.push(c);
            continue;
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            let _ = write!(text, "\\u{unit:04x}");
        }
    }
    text + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_steps_are_listed_as_ranges_and_long_lists_are_shortened() {
        assert_eq!(named(&[1, 2, 3, 5, 10, 11]), "1 to 3, 5, 10 to 11");
        let tens: Vec<u64> = (1..100).map(|i| 10 * i).collect();
        assert!(named(&tens).starts_with("10, 20, ") && named(&tens).ends_with("190, ..., 990"));
    }
}
