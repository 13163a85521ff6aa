//! What a person sees: a banner, a line a step, sparklines, samples, and on a terminal a bar per phase.

use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::display::{bytes, count, duration, grouped, limit, limit_to_end, number, one_line, pad, pad_left, percent};
use super::display::{sparkline, width};
use super::jsonl::Line;
use super::keys::{self, Unit};
use super::screen::{Screen, colour_allowed};
use super::throughput::Phase;
use crate::experience::Experience;
use crate::mesh::Mesh;

/// Columns of a line where there is no terminal to fit.
const PLAIN_COLUMNS: usize = 170;
const SPARK_COLUMNS: usize = 40;
const DRAWS_PER_SECOND: u8 = 8;

/// One role's model, for the banner.
#[derive(Clone, Debug, Default)]
pub struct BannerModel {
    /// actor, critic, reference or reward.
    pub role: String,
    pub parameters: u64,
    /// f32 or bf16.
    pub dtype: String,
    /// Where the weights come from.
    pub path: String,
}

/// What is said before the first step.
#[derive(Clone, Debug)]
pub struct Banner {
    pub job_kind: String,
    pub job_name: String,
    pub run_dir: String,
    pub seed: u64,
    /// Steps of the whole job.
    pub steps: u64,
    /// The step of the checkpoint that the run goes on from.
    pub resumed_from: Option<u64>,
    /// Each host and its ranks.
    pub hosts: Vec<(String, usize)>,
    pub threads_per_rank: usize,
    /// What the ranks compute on, e.g. `cpu (avx512, bf16)`; equal ones once.
    pub devices: Vec<String>,
    pub mesh: Mesh,
    pub models: Vec<BannerModel>,
    /// Planned bytes on the fullest rank, by purpose.
    pub memory: Vec<(String, u64)>,
    /// Other rows, e.g. `("data", "3,600 train and 400 eval prompts")`.
    pub notes: Vec<(String, String)>,
}

/// How a run ended.
#[derive(Clone, Debug, Default)]
pub struct Finish {
    /// Steps done in all, those before a resume included.
    pub steps: u64,
    /// Wall-clock seconds of this process.
    pub seconds: f64,
    /// What became of the input rows, in the order shown, e.g. `("trained", 3900)`. Empty: not shown.
    pub ledger: Vec<(String, u64)>,
    /// Other rows, e.g. `("export", "runs/x/export")`.
    pub notes: Vec<(String, String)>,
}

/// The course of a key over the run.
struct Trend {
    key: &'static str,
    label: &'static str,
}

const TRENDS: [Trend; 8] = [
    Trend { key: keys::REWARD_MEAN, label: "reward" },
    Trend { key: keys::KL_MEAN, label: "kl" },
    Trend { key: keys::ENTROPY, label: "entropy" },
    Trend { key: keys::LOSS, label: "loss" },
    Trend { key: keys::EVAL_LOSS, label: "held-out loss" },
    Trend { key: keys::EVAL_ACCURACY, label: "held-out accuracy" },
    Trend { key: keys::EVAL_ACCURACY_GREEDY, label: "held-out greedy" },
    Trend { key: keys::EVAL_ACCURACY_SAMPLED, label: "held-out sampled" },
];

/// The columns of a step's line behind time and speed: key, label. The least important stand last: what does not fit
/// is left out.
const COLUMNS: [(&str, &str); 7] = [
    (keys::REWARD_MEAN, "reward"),
    (keys::LOSS, "loss"),
    (keys::ACCURACY, "accuracy"),
    (keys::KL_MEAN, "kl"),
    (keys::ENTROPY, "entropy"),
    (keys::RESPONSE_TOKENS_MEAN, "length"),
    (keys::CLIP_RATIO, "clip"),
];
const COLUMNS_BEHIND_SHARES: [(&str, &str); 3] =
    [(keys::LOGPROB_GAP_MAX, "gap"), (keys::GRAD_NORM, "grad norm"), (keys::VALUE_LOSS, "value loss")];

/// Restrained colour: nothing where it is not allowed.
#[derive(Clone, Copy, Debug)]
struct Ink {
    colour: bool,
}

impl Ink {
    fn wrap(self, code: &str, text: &str) -> String {
        if self.colour && !text.is_empty() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    fn dim(self, text: &str) -> String {
        self.wrap("2", text)
    }

    fn bold(self, text: &str) -> String {
        self.wrap("1", text)
    }

    fn spark(self, text: &str) -> String {
        self.wrap("36", text)
    }

    fn alarm(self, text: &str) -> String {
        self.wrap("33", text)
    }
}

/// Draws to a screen; on a terminal with rows that live at the bottom.
#[derive(Debug)]
pub struct Terminal {
    screen: Screen,
    ink: Ink,
    rows: Option<Rows>,
    columns: usize,
    steps: u64,
}

/// The live rows: trends, the job's bar, then a bar per running phase.
#[derive(Debug)]
struct Rows {
    all: MultiProgress,
    trends: Vec<ProgressBar>,
    job: ProgressBar,
}

/// The bar of a phase; it disappears when dropped. Silent ranks and plain output have one that shows nothing.
#[derive(Debug, Default)]
pub struct Bar(Option<ProgressBar>);

impl Bar {
    /// `n` more are done.
    pub fn inc(&self, n: u64) {
        if let Some(bar) = &self.0 {
            bar.inc(n);
        }
    }

    /// `n` are done in all.
    pub fn set(&self, n: u64) {
        if let Some(bar) = &self.0 {
            bar.set_position(n);
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

impl Terminal {
    /// Standard error.
    pub fn stderr(is_terminal: bool) -> Self {
        Self::new(Screen::stderr(is_terminal), is_terminal, colour_allowed(is_terminal))
    }

    /// Any screen.
    pub fn new(screen: Screen, is_terminal: bool, colour: bool) -> Self {
        let columns = if is_terminal { screen.columns } else { PLAIN_COLUMNS };
        let rows = is_terminal.then(|| Rows::new(&screen, Ink { colour }));
        Self { screen, ink: Ink { colour }, rows, columns, steps: 0 }
    }

    /// Lines that stay, above the live rows.
    fn print(&self, text: &str) {
        match &self.rows {
            Some(rows) => rows.all.suspend(|| self.screen.write(text)),
            None => self.screen.write(text),
        }
    }

    /// A line of words about the work.
    pub fn say(&self, text: &str) {
        self.print(&format!("{text}\n"));
    }

    /// A line that asks for attention.
    pub fn warn(&self, text: &str) {
        self.print(&format!("{} {text}\n", self.ink.alarm("warning:")));
    }

    /// `label` and its value, as rows of banner and summary.
    fn row(&self, out: &mut String, label: &str, value: &str) {
        out.push_str(&format!("  {} {}\n", self.ink.dim(&pad(label, 10)), limit(value, self.columns.max(40) - 14)));
    }

    /// The start banner; it also tells the length of the job for the step lines.
    pub fn banner(&mut self, banner: &Banner) {
        self.steps = banner.steps;
        let mut out = String::new();
        let title = format!("rlhf-hpc {}", env!("CARGO_PKG_VERSION"));
        out.push_str(&format!("{}  {} {}\n", self.ink.bold(&title), banner.job_kind, one_line(&banner.job_name)));
        let ranks: usize = banner.hosts.iter().map(|(_, ranks)| ranks).sum();
        let hosts: Vec<String> = banner.hosts.iter().map(|(host, ranks)| format!("{host} x {ranks}")).collect();
        let noun = |n: usize, noun: &str| if n == 1 { format!("1 {noun}") } else { format!("{n} {noun}s") };
        let on = format!("{ranks} on {}: {}", noun(hosts.len(), "host"), hosts.join(", "));
        self.row(&mut out, "ranks", &on);
        let threads = banner.threads_per_rank;
        self.row(&mut out, "threads", &format!("{threads} per rank, {} in all", threads * ranks));
        self.row(&mut out, "devices", &banner.devices.join(", "));
        self.row(&mut out, "mesh", &banner.mesh.to_string());
        for model in &banner.models {
            let size = pad_left(&count(model.parameters as f64), 5);
            let path = one_line(&model.path);
            self.row(&mut out, &model.role, &format!("{size} parameters, {}  {path}", model.dtype));
        }
        if !banner.memory.is_empty() {
            let total: u64 = banner.memory.iter().map(|(_, n)| n).sum();
            let parts: Vec<String> = banner.memory.iter().map(|(what, n)| format!("{what} {}", bytes(*n))).collect();
            self.row(&mut out, "memory", &format!("{} planned per rank: {}", bytes(total), parts.join(", ")));
        }
        for (label, value) in &banner.notes {
            self.row(&mut out, label, &one_line(value));
        }
        let from = banner.resumed_from.map_or(String::new(), |step| format!(", resumed from step {step}"));
        let run = format!("{}, {} steps, seed {}{from}", one_line(&banner.run_dir), banner.steps, banner.seed);
        self.row(&mut out, "run", &run);
        out.push('\n');
        self.print(&out);
        if let Some(rows) = &self.rows {
            rows.job.set_length(banner.steps);
        }
    }

    /// A bar for a phase of `total` units; 0 where the number is not known.
    pub fn phase(&self, name: &str, total: u64) -> Bar {
        Bar(self.rows.as_ref().map(|rows| rows.phase(name, total, self.ink)))
    }

    /// The line of a step; `lines` is the history, this step included.
    pub fn step(&self, line: &Line, lines: &[Line]) {
        let place = self.place(line.step);
        let mut shown = format!("{} {}", self.ink.dim("step"), self.ink.bold(&place));
        let mut used = 5 + place.len();
        for (plain, inked) in self.fields(line) {
            if used + 2 + width(&plain) > self.columns {
                break;
            }
            used += 2 + width(&plain);
            shown.push_str("  ");
            shown.push_str(&inked);
        }
        shown.push('\n');
        self.print(&shown);
        if let Some(rows) = &self.rows {
            rows.job.set_position(line.step);
        }
        self.show_trends(lines);
    }

    /// `7/60`, as wide as the last step's.
    fn place(&self, step: u64) -> String {
        match self.steps {
            0 => pad_left(&step.to_string(), 5),
            steps => pad_left(&format!("{step}/{steps}"), 2 * steps.to_string().len() + 1),
        }
    }

    /// The fields of a step's line, without and with colour, the most important first.
    fn fields(&self, line: &Line) -> Vec<(String, String)> {
        let mut fields = Vec::new();
        if let Some(seconds) = line.get(keys::TIME_STEP_S) {
            let shown = pad_left(&duration(seconds), 6);
            fields.push((shown.clone(), shown));
        }
        if let Some(rate) = line.get(keys::TOKENS_PER_S) {
            let shown = pad_left(&count(rate), 5);
            fields.push((format!("{shown} tok/s"), format!("{shown} {}", self.ink.dim("tok/s"))));
        }
        let field = |&(key, label): &(&str, &str)| {
            let value = line.get(key)?;
            let shown = pad_left(&value_of(key, value), 7);
            let inked = match key {
                _ if !value.is_finite() => self.ink.alarm(&shown),
                keys::REWARD_MEAN | keys::LOSS => self.ink.bold(&shown),
                _ => shown.clone(),
            };
            Some((format!("{label} {shown}"), format!("{} {inked}", self.ink.dim(label))))
        };
        fields.extend(COLUMNS.iter().filter_map(field));
        fields.extend(phase_shares(line).map(|shares| (shares.clone(), self.ink.dim(&shares))));
        fields.extend(COLUMNS_BEHIND_SHARES.iter().filter_map(field));
        fields
    }

    /// The line of an evaluation.
    pub fn eval(&self, line: &Line, lines: &[Line]) {
        let mut shown = format!("{} {}", self.ink.dim("eval"), self.place(line.step));
        for trend in TRENDS.iter().filter(|trend| keys::is_eval(trend.key)) {
            let Some(value) = line.get(trend.key) else { continue };
            let spark = sparkline(&course(lines, trend.key), SPARK_COLUMNS / 2);
            let value = self.ink.bold(&pad_left(&value_of(trend.key, value), 6));
            shown.push_str(&format!("  {} {value} {}", self.ink.dim(trend.label), self.ink.spark(&spark)));
        }
        shown.push('\n');
        self.print(&shown);
        self.show_trends(lines);
    }

    fn show_trends(&self, lines: &[Line]) {
        let Some(rows) = &self.rows else { return };
        let mut shown = self.trends(lines).into_iter();
        for row in &rows.trends {
            row.set_message(shown.next().unwrap_or_default());
        }
    }

    /// A row per key that the run has: label, first -> last, and the course.
    fn trends(&self, lines: &[Line]) -> Vec<String> {
        let mut rows = Vec::new();
        for trend in &TRENDS {
            let course = course(lines, trend.key);
            let (Some(&first), Some(&last)) = (course.first(), course.last()) else { continue };
            let is_share = keys::find(trend.key).is_some_and(|key| key.unit == Unit::Ratio);
            let gain = if is_share { format!("  {:+.1} points", (last - first) * 100.0) } else { String::new() };
            let room = self.columns.saturating_sub(44 + gain.len()).clamp(8, SPARK_COLUMNS);
            let spark = sparkline(&course, room);
            rows.push(format!(
                "  {} {} {} {}  {}{gain}",
                self.ink.dim(&pad(trend.label, 17)),
                pad_left(&value_of(trend.key, first), 8),
                self.ink.dim("->"),
                self.ink.bold(&pad_left(&value_of(trend.key, last), 8)),
                self.ink.spark(&spark),
            ));
        }
        rows
    }

    /// Samples of a step: the end of the prompt and the beginning of the response, on one line each.
    pub fn samples(&self, step: u64, samples: &[Experience]) {
        let mut out = format!("{}\n", self.ink.dim(&format!("samples of step {step}")));
        let room = self.columns.saturating_sub(17).max(20);
        for (i, sample) in samples.iter().enumerate() {
            let response = &sample.response;
            let tokens = response.tokens.len();
            let score = number(f64::from(sample.score));
            let mut title = format!("score {score}, {tokens} tokens, {}", response.finish.name());
            if !sample.prompt.label.is_empty() {
                title.push_str(&format!(", label {}", one_line(&sample.prompt.label)));
            }
            let title = limit(&title, self.columns.saturating_sub(8).max(20));
            let prompt = text_or_tokens(&sample.prompt.text, &sample.prompt.tokens);
            let answer = text_or_tokens(&response.text, &response.tokens);
            out.push_str(&format!("  {:>3}  {title}\n", i + 1));
            for (label, text) in [("prompt", limit_to_end(&prompt, room)), ("response", limit(&answer, room))] {
                out.push_str(&format!("       {} {text}\n", self.ink.dim(&pad(label, 8))));
            }
        }
        self.print(&out);
    }

    /// The end of a run: how each trend went, the ledger, and where things are.
    pub fn final_summary(&self, finish: &Finish, lines: &[Line]) {
        if let Some(rows) = &self.rows {
            rows.clear();
        }
        let mut out = String::from("\n");
        let steps = if finish.steps == 1 { "step" } else { "steps" };
        let title = format!("{} {steps} in {}", grouped(finish.steps), duration(finish.seconds));
        out.push_str(&format!("{}\n", self.ink.bold(&title)));
        for row in self.trends(lines) {
            out.push_str(&row);
            out.push('\n');
        }
        if !finish.ledger.is_empty() {
            self.row(&mut out, "ledger", &ledger_line(&finish.ledger));
        }
        for (label, value) in &finish.notes {
            self.row(&mut out, label, &one_line(value));
        }
        self.print(&out);
    }
}

/// `3,900 trained, 80 filtered: too_long, 20 deferred`.
pub fn ledger_line(counts: &[(String, u64)]) -> String {
    let parts: Vec<String> = counts.iter().map(|(what, n)| format!("{} {}", grouped(*n), one_line(what))).collect();
    parts.join(", ")
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

fn course(lines: &[Line], key: &str) -> Vec<f64> {
    lines.iter().filter_map(|line| line.get(key)).collect()
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

impl Rows {
    fn new(screen: &Screen, ink: Ink) -> Self {
        let target = ProgressDrawTarget::term_like_with_hz(Box::new(screen.clone()), DRAWS_PER_SECOND);
        let all = MultiProgress::with_draw_target(target);
        let message = style("{msg}");
        let row = |_| all.add(ProgressBar::no_length().with_style(message.clone()));
        let trends = (0..TRENDS.len()).map(row).collect();
        let job = format!("  {} {{bar:28}} {{pos}}/{{len}}  {}", ink.dim(&pad("steps", 9)), ink.dim("{eta} left"));
        let job = all.add(ProgressBar::new(0).with_style(style(&job)));
        Self { all, trends, job }
    }

    fn phase(&self, name: &str, total: u64, ink: Ink) -> ProgressBar {
        let label = ink.dim(&pad(name, 9));
        let template = match total {
            0 => format!("  {label} {{spinner}} {}", ink.dim("{elapsed}")),
            _ => format!("  {label} {{bar:28}} {{pos}}/{{len}}  {}", ink.dim("{elapsed}")),
        };
        let bar = self.all.add(ProgressBar::new(total).with_style(style(&template)));
        bar.enable_steady_tick(Duration::from_millis(250));
        bar
    }

    fn clear(&self) {
        for row in &self.trends {
            row.finish_and_clear();
        }
        self.job.finish_and_clear();
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the templates of this file parse").progress_chars("━╸─")
}
