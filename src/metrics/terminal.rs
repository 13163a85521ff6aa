//! The terminal: a banner, a line per step, sparklines, samples, and a bar per phase.

use std::fmt::Write;
use std::time::Instant;

use console::{measure_text_width, truncate_str};
use indicatif::ProgressBar;

use super::curves::{CURVES, Curves};
use super::display::{count, duration, grouped, limit_to_end, number, one_line, percent, sparkline, wrapped};
use super::jsonl::Line;
use super::keys::{self, Unit};
use super::rows::{Ink, Rows};
use super::screen::{Screen, colour_allowed};
use super::throughput::Phase;
use crate::config::metrics::MetricsConfig;
use crate::experience::{Experience, marked};
use crate::sys::host;
use crate::sys::terminal::{shows_stderr, visible};

/// Columns of a line without a terminal.
const PLAIN_COLUMNS: usize = 190;
/// Columns of a row's label, and the minimum number of columns that a whole row is laid out for.
const LABEL_COLUMNS: usize = 12;
const ROW_COLUMNS_MIN: usize = 40;
const SPARK_COLUMNS: usize = 40;
const EVAL_SPARK_COLUMNS: usize = 16;

/// The columns of a step's line after time and speed, and those after the shares of the phases: key, label, need.
const COLUMNS: [(&str, &str, Need); 7] = [
    (keys::REWARD_MEAN, "reward", Need::High),
    (keys::LOSS, "loss", Need::High),
    (keys::ACCURACY, "accuracy", Need::High),
    (keys::KL_MEAN, "kl", Need::High),
    (keys::ENTROPY, "entropy", Need::High),
    (keys::RESPONSE_TOKENS_MEAN, "length", Need::High),
    (keys::CLIP_RATIO, "clip", Need::Low),
];
const COLUMNS_LAST: [(&str, &str, Need); 3] = [
    (keys::GRAD_NORM, "grad norm", Need::Low),
    (keys::VALUE_LOSS, "value loss", Need::Low),
    (keys::ADAPTER_NORM_RATIO_MEAN, "adapter ratio", Need::Low),
];

/// The need for a field of a line. A narrow terminal leaves out fields of the lowest need first, from the last one on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Need {
    Always,
    High,
    Medium,
    Low,
}

type Field = (String, Need);

/// Columns of a field, with the separator before it.
fn columns_of(field: &str) -> usize {
    2 + measure_text_width(field)
}

/// The output on a screen. On a terminal it has live rows at the bottom.
pub struct Terminal {
    screen: Screen,
    ink: Ink,
    rows: Option<Rows>,
    /// The settings that select the steps with a line.
    pub printed: MetricsConfig,
    /// Steps of the whole job; 0 before the banner.
    steps: u64,
    /// The start time of this process, and the step before it.
    start: (Instant, u64),
}

impl Terminal {
    pub fn stderr() -> Self {
        let is_terminal = shows_stderr();
        Self::new(Screen::stderr(), is_terminal, colour_allowed(is_terminal))
    }

    pub fn new(screen: Screen, is_terminal: bool, colour: bool) -> Self {
        let rows = is_terminal.then(|| Rows::new(&screen, CURVES.len(), Ink { colour }));
        Self {
            screen,
            ink: Ink { colour },
            rows,
            printed: MetricsConfig::default(),
            steps: 0,
            start: (Instant::now(), 0),
        }
    }

    /// Columns of a line: the terminal's, or plenty.
    fn columns(&self) -> usize {
        if self.rows.is_some() { self.screen.columns() } else { PLAIN_COLUMNS }
    }

    /// Prints permanent lines above the live rows.
    fn print(&self, text: &str) {
        match &self.rows {
            Some(rows) => rows.all.suspend(|| self.screen.write(text)),
            None => self.screen.write(text),
        }
    }

    pub fn say(&self, text: &str) {
        self.print(&format!("{}\n", visible(text)));
    }

    /// Prints a warning. On a terminal its lines are wrapped.
    pub fn warn(&self, text: &str) {
        let text = format!("{} {}", self.ink.alarm("warning:"), visible(text));
        let lines: Vec<String> = match &self.rows {
            Some(_) => text.lines().flat_map(|line| wrapped(line, self.columns() - 2)).collect(),
            None => vec![text],
        };
        self.print(&format!("{}\n", lines.join("\n  ")));
    }

    /// Adds labels and values of banner and summary, uncut. On a terminal a row is wrapped into indented lines.
    /// Elsewhere it is one line, for searching.
    fn put_rows(&self, out: &mut String, rows: &[(String, String)]) {
        let room = self.rows.as_ref().map(|_| self.screen.columns().max(ROW_COLUMNS_MIN) - LABEL_COLUMNS - 3);
        for (label, value) in rows {
            let value = one_line(value);
            let lines = room.map_or_else(|| vec![value.clone()], |room| wrapped(&value, room));
            for (i, line) in lines.iter().enumerate() {
                let label = if i == 0 { label } else { "" };
                let _ = writeln!(out, "  {} {}", self.ink.dim(&format!("{label:<LABEL_COLUMNS$}")), line.trim_end());
            }
        }
    }

    /// The first line of a run: its method and its name.
    pub fn title(&self, job: &str) {
        let title = format!("rlhf-hpc {}", env!("CARGO_PKG_VERSION"));
        self.print(&format!("{}  {}\n", self.ink.bold(&title), one_line(job)));
    }

    /// The banner of a job of `steps` steps: rows of labels and values.
    pub fn banner(&mut self, steps: u64, resumed_from: Option<u64>, rows: &[(String, String)]) {
        let first = resumed_from.unwrap_or(0);
        (self.steps, self.start) = (steps, (Instant::now(), first));
        let mut out = String::new();
        self.put_rows(&mut out, rows);
        out.push('\n');
        self.print(&out);
        if let Some(rows) = &self.rows {
            rows.job.set_length(steps);
            rows.job.set_position(first);
        }
    }

    /// A bar for a phase of `total` units; 0 if the number is not known.
    pub fn phase(&self, name: &str, total: u64) -> ProgressBar {
        self.rows.as_ref().map_or_else(ProgressBar::hidden, |rows| rows.phase(name, total, self.ink))
    }

    /// Prints the line of a step. `curves` include it. A batch log, which has no bar of the job, also gets the time of
    /// day and the time left.
    pub fn step(&self, line: &Line, curves: &Curves) {
        let left = format!("{} left", duration(self.seconds_left(line.step)));
        if self.printed.print_due(line.step, self.steps) {
            let mut fields = self.fields(line);
            if self.rows.is_none() && self.steps > 0 {
                fields.insert(fields.len().min(2), (self.ink.dim(&format!("{left:>12}")), Need::High));
            }
            self.print_line("step", line.step, &fields);
        }
        if let Some(rows) = &self.rows {
            rows.job.set_message(left);
            rows.job.set_position(line.step);
        }
        self.show_curves(curves);
    }

    /// Seconds to the last step, if each takes as long as the steps of this process so far.
    fn seconds_left(&self, step: u64) -> f64 {
        let (begin, first) = self.start;
        let done = step.saturating_sub(first).max(1) as f64;
        begin.elapsed().as_secs_f64() / done * self.steps.saturating_sub(step) as f64
    }

    /// Prints a line that begins with a step, and has as many of the fields as fit.
    fn print_line(&self, what: &str, step: u64, fields: &[Field]) {
        let place = self.place(step);
        let clock = if self.rows.is_none() { format!("{} ", host::time_of_day()) } else { String::new() };
        let mut shown = format!("{}{} {}", self.ink.dim(&clock), self.ink.dim(what), self.ink.bold(&place));
        let columns = self.columns();
        let mut used = clock.len() + what.len() + 1 + place.len();
        let mut order: Vec<usize> = (0..fields.len()).collect();
        order.sort_by_key(|&i| fields[i].1);
        let (mut fits, mut is_full) = (vec![false; fields.len()], false);
        for i in order {
            let wanted = columns_of(&fields[i].0);
            is_full |= used + wanted > columns;
            fits[i] = !is_full || fields[i].1 == Need::Always;
            used += if fits[i] { wanted } else { 0 };
        }
        for ((field, _), _) in fields.iter().zip(fits).filter(|(_, fits)| *fits) {
            shown.push_str("  ");
            shown.push_str(field);
        }
        shown.push('\n');
        self.print(&shown);
    }

    /// `7/60`, as wide as the last step's.
    fn place(&self, step: u64) -> String {
        match self.steps {
            0 => format!("{step:>5}"),
            steps => format!("{:>1$}", format!("{step}/{steps}"), 2 * steps.to_string().len() + 1),
        }
    }

    /// The fields of a step's line.
    fn fields(&self, line: &Line) -> Vec<Field> {
        let mut fields = Vec::new();
        if let Some(seconds) = line.get(keys::TIME_STEP_S) {
            fields.push((format!("{:>6}", duration(seconds)), Need::High));
        }
        if let Some(rate) = line.get(keys::TOKENS_PER_S) {
            fields.push((format!("{:>5} {}", count(rate), self.ink.dim("tok/s")), Need::Medium));
        }
        let named = |key: &str, label: &str, value: f64| {
            let shown = format!("{:>7}", value_of(key, value));
            let inked = match key {
                _ if !value.is_finite() => self.ink.alarm(&shown),
                keys::REWARD_MEAN | keys::LOSS => self.ink.bold(&shown),
                _ => shown,
            };
            format!("{} {inked}", self.ink.dim(label))
        };
        let has_reward = line.get(keys::REWARD_MEAN).is_some();
        // With a reward, the loss and the gradient norm are not informative.
        let is_shown = |key: &str| !has_reward || ![keys::LOSS, keys::GRAD_NORM].contains(&key);
        let field = |&(key, label, need): &(&str, &str, Need)| {
            Some((named(key, label, line.get(key).filter(|_| is_shown(key))?), need))
        };
        fields.extend(COLUMNS.iter().filter_map(field));
        fields.extend(phase_shares(line).map(|shares| (self.ink.dim(&shares), Need::Low)));
        // The other values mean nothing unless sampling and training agree, so a gap that is not 0 always stays.
        let need = |gap| if gap == 0.0 { Need::Low } else { Need::Always };
        fields.extend(gap(line).map(|gap| (named(keys::LOGPROB_GAP_MAX, "gap", gap), need(gap))));
        fields.extend(COLUMNS_LAST.iter().filter_map(field));
        fields
    }

    /// Prints the line of an evaluation. Without live rows below, it also shows the curves so far.
    pub fn eval(&self, line: &Line, curves: &Curves) {
        let mut fields = Vec::new();
        let of = |eval: bool| curves.all().filter(move |(key, ..)| keys::is_eval(key) == eval);
        for (key, label, values) in of(true).chain(of(false)) {
            let spark = self.ink.spark(&sparkline(values, EVAL_SPARK_COLUMNS));
            if let Some(value) = line.get(key) {
                let value = self.ink.bold(&format!("{:>6}", value_of(key, value)));
                fields.push((format!("{} {value} {spark}", self.ink.dim(label)), Need::High));
            } else if self.rows.is_none() && !spark.is_empty() && !keys::is_eval(key) {
                fields.push((format!("{} {spark}", self.ink.dim(label)), Need::High));
            }
        }
        // Before the first update, all margins may be 0.
        if line.get(keys::EVAL_MARGIN_MEAN).is_some() && line.get(keys::EVAL_ACCURACY).is_none() {
            fields.push((format!("{} {:>6}", self.ink.dim("held-out accuracy"), "-"), Need::High));
        }
        self.print_line("eval", line.step, &fields);
        self.show_curves(curves);
    }

    fn show_curves(&self, curves: &Curves) {
        let Some(rows) = &self.rows else { return };
        let mut shown = self.curves(curves).into_iter();
        for row in &rows.curves {
            row.set_message(shown.next().unwrap_or_default());
        }
    }

    /// A row for each curve that has values: label, first -> last, sparkline.
    fn curves(&self, curves: &Curves) -> Vec<String> {
        let mut rows = Vec::new();
        for (key, label, values) in curves.all() {
            let (Some(&first), Some(&last)) = (values.first(), values.last()) else { continue };
            let is_share = keys::find(key).is_some_and(|key| key.unit == Unit::Ratio);
            let gain = if is_share && values.len() > 1 {
                format!("  {:+.1} points", (last - first) * 100.0)
            } else {
                String::new()
            };
            let room = self.columns().saturating_sub(44 + gain.len()).clamp(8, SPARK_COLUMNS);
            if values.len() == 1 {
                rows.push(format!(
                    "  {} {}",
                    self.ink.dim(&format!("{label:<17}")),
                    self.ink.bold(&format!("{:>8}", value_of(key, last)))
                ));
                continue;
            }
            let spark = sparkline(values, room);
            rows.push(format!(
                "  {} {:>8} {} {}  {}{gain}",
                self.ink.dim(&format!("{label:<17}")),
                value_of(key, first),
                self.ink.dim("->"),
                self.ink.bold(&format!("{:>8}", value_of(key, last))),
                self.ink.spark(&spark),
            ));
        }
        rows
    }

    /// Samples of a step: the end of the prompt and the beginning of the response, on one line each.
    pub fn samples(&self, step: u64, samples: &[Experience]) {
        let mut out = format!("{}\n", self.ink.dim(&format!("samples of step {step}")));
        let room = self.columns().saturating_sub(17).max(20);
        for (i, sample) in samples.iter().enumerate() {
            let response = &sample.response;
            let tokens = response.tokens.len();
            let score = number(f64::from(sample.score));
            let mut title = format!("score {score}, {tokens} tokens, {}", response.finish.name());
            if !sample.prompt.label.is_empty() {
                let _ = write!(title, ", label {}", one_line(&sample.prompt.label));
            }
            let title = truncate_str(&title, self.columns().saturating_sub(8).max(20), "…");
            let prompt = text_or_tokens(&sample.prompt.text, &sample.prompt.tokens);
            let answer = text_or_tokens(&marked(&response.text, response.written()), &response.tokens);
            let _ = writeln!(out, "  {:>3}  {title}", i + 1);
            let answer = truncate_str(&answer, room, "…");
            for (label, text) in [("prompt", &*limit_to_end(&prompt, room)), ("response", &*answer)] {
                let _ = writeln!(out, "       {} {text}", self.ink.dim(&format!("{label:<8}")));
            }
        }
        self.print(&out);
    }

    /// Prints the end of a run: the curves, and rows of labels and values.
    pub fn final_summary(&self, steps: u64, seconds: f64, curves: &Curves, rows: &[(String, String)]) {
        if let Some(rows) = &self.rows {
            rows.clear();
        }
        let before = self.start.1.min(steps);
        let time = duration(seconds);
        let title = match (steps, steps - before) {
            (0, _) => format!("evaluated in {time}"),
            (all, _) if before == 0 => format!("{} in {time}", of_steps(all)),
            (all, 0) => format!("no new steps; {} in total", of_steps(all)),
            (all, new) => format!("{} in {time}, {} in total", of_steps(new), grouped(all)),
        };
        let mut out = format!("\n{}\n", self.ink.bold(&title));
        for row in self.curves(curves) {
            out.push_str(&row);
            out.push('\n');
        }
        self.put_rows(&mut out, rows);
        self.print(&out);
    }
}

fn text_or_tokens(text: &str, tokens: &[u32]) -> String {
    if text.is_empty() && !tokens.is_empty() { format!("tokens {tokens:?}") } else { one_line(text) }
}

fn value_of(key: &str, value: f64) -> String {
    match keys::find(key).map(|key| key.unit) {
        Some(Unit::Ratio) => percent(value),
        Some(Unit::Tokens) => format!("{value:.1}"),
        _ => number(value),
    }
}

/// The difference between log-probabilities of the same token in this step: the larger of the gap before the update and
/// the gap after sampling. NaN counts as larger, so that it is seen.
fn gap(line: &Line) -> Option<f64> {
    let gaps = [keys::LOGPROB_GAP_MAX, keys::SAMPLER_GAP_MAX].into_iter().filter_map(|key| line.get(key));
    gaps.reduce(|a, b| if a.is_nan() || a > b { a } else { b })
}

/// `rollout 48% reward 1% score 12% train 38%` of the step's time.
fn phase_shares(line: &Line) -> Option<String> {
    let step = line.get(keys::TIME_STEP_S).filter(|&step| step > 0.0)?;
    let shares = Phase::ALL.into_iter().filter_map(|phase| {
        let share = line.get(phase.key())? / step * 100.0;
        Some(format!("{} {share:.0}%", phase.name()))
    });
    let shares: Vec<String> = shares.collect();
    (shares.len() > 1).then(|| shares.join(" "))
}

fn of_steps(steps: u64) -> String {
    if steps == 1 { "1 step".to_string() } else { format!("{} steps", grouped(steps)) }
}
