//! The owner of all records. Rank 0 writes and shows. Other ranks have a silent recorder with the same methods.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use indicatif::ProgressBar;

use super::curves::Curves;
use super::eval_rows::{self, EvalRow};
use super::jsonl::{Line, MetricsFile};
use super::tensorboard::{EventsFile, indented};
use super::terminal::Terminal;
use super::{keys, rollouts};
use crate::config::metrics::MetricsConfig;
use crate::error::{Error, Result};
use crate::experience::{Experience, marked};
use crate::sys::files;
use crate::sys::trace::{self, Category};

/// Records and shows a run. Every rank has one and calls it in the same way.
pub struct Recorder {
    config: MetricsConfig,
    /// The TOML of the whole job, which TensorBoard shows.
    job: String,
    /// Whether nothing is shown except bars.
    is_quiet: bool,
    live: Option<Box<Live>>,
}

/// The state of rank 0.
struct Live {
    metrics: MetricsFile,
    /// `None` if events are off, and until the first record or cut: a dry run changes nothing.
    events: Option<EventsFile>,
    terminal: Terminal,
    run_dir: PathBuf,
    /// The number of resumes, this start included.
    restarts: u64,
}

impl Recorder {
    /// The recorder of all ranks except the first.
    pub fn silent(config: &MetricsConfig) -> Self {
        Self { config: config.clone(), job: String::new(), is_quiet: false, live: None }
    }

    /// Opens the records of `run_dir`, creating the directory if it is missing, and shows them on `terminal`.
    pub fn open(run_dir: &Path, config: &MetricsConfig, mut terminal: Terminal) -> Result<Self> {
        terminal.printed = config.clone();
        files::create_dir_all(run_dir)?;
        files::remove_partial(run_dir)?;
        let metrics = MetricsFile::open(&run_dir.join("metrics.jsonl"))?;
        rollouts::recover(run_dir)?;
        if let Some(damage) = metrics.damage() {
            terminal.warn(&damage);
        }
        let live = Live { metrics, events: None, terminal, run_dir: run_dir.to_owned(), restarts: 0 };
        Ok(Self { config: config.clone(), job: String::new(), is_quiet: false, live: Some(Box::new(live)) })
    }

    /// Shows the keys of a job together with its metrics.
    #[must_use]
    pub fn of_job(mut self, job: String) -> Self {
        self.job = job;
        self
    }

    /// From now on shows nothing except bars.
    pub fn be_quiet(&mut self) {
        self.is_quiet = true;
    }

    /// Removes every record after `step`, and recorded samples that the run no longer keeps. A run that resumes from
    /// the checkpoint of that step writes them again. A run that starts from the beginning calls it with 0. Warns
    /// about earlier steps that have no line in `metrics.jsonl`.
    pub fn cut_back(&mut self, step: u64) -> Result<()> {
        let Some(live) = &mut self.live else { return Ok(()) };
        if let Some(missing) = live.metrics.cut_back(step)? {
            live.terminal.warn(&missing);
        }
        let keep_last = self.config.rollouts_keep_last;
        rollouts::cut_back(&live.run_dir, step, keep_last)?;
        eval_rows::cut_back(&live.run_dir, step, keep_last)?;
        super::trace::cut_back(&live.run_dir, step)?;
        let before = live.metrics.lines()?.last().map(|line| line.get(keys::RESTARTS).unwrap_or(0.0) as u64);
        live.restarts = before.map_or(0, |before| before + 1);
        live.events = None;
        live.begin_events(&self.config, &self.job, step)
    }

    /// Shows the rows of the start: [`Terminal::banner`].
    pub fn banner(&mut self, steps: u64, resumed_from: Option<u64>, rows: &[(String, String)]) {
        if let Some(live) = self.live.as_mut().filter(|_| !self.is_quiet) {
            live.terminal.banner(steps, resumed_from, rows);
        }
    }

    /// A bar for a phase of `total` units (0: unknown), shown on a terminal until it is dropped.
    pub fn phase(&self, name: &str, total: u64) -> ProgressBar {
        self.live.as_ref().map_or_else(ProgressBar::hidden, |live| live.terminal.phase(name, total))
    }

    /// Records the metrics of a step, whose keys `metrics::keys` describes. Warns about values that are not finite.
    pub fn step(&mut self, step: u64, values: &[(impl AsRef<str>, f64)]) -> Result<()> {
        self.record(step, values, MetricsFile::append, Terminal::step)
    }

    /// Records an evaluation after `step` (0: before the first). Its keys begin with `eval_`. A repeated evaluation
    /// replaces the first.
    pub fn eval(&mut self, step: u64, values: &[(impl AsRef<str>, f64)]) -> Result<()> {
        if let Some((key, _)) = values.iter().find(|(key, _)| !keys::is_eval(key.as_ref())) {
            return Err(Error::fault(format!("keys of an evaluation must begin with eval_ (got `{}`)", key.as_ref())));
        }
        self.record(step, values, MetricsFile::append_eval, Terminal::eval)
    }

    fn record(
        &mut self,
        step: u64,
        values: &[(impl AsRef<str>, f64)],
        append: fn(&mut MetricsFile, &Line) -> Result<()>,
        show: fn(&Terminal, &Line, &Curves),
    ) -> Result<()> {
        let Some(live) = &mut self.live else { return Ok(()) };
        let _span = trace::span(Category::Io, "record metrics", "", || []);
        let mut values: Vec<(&str, f64)> = values.iter().map(|(key, value)| (key.as_ref(), *value)).collect();
        values.extend((live.restarts > 0).then_some((keys::RESTARTS, live.restarts as f64)));
        let line = Line::new(step, now_unix_s(), &values);
        live.warn_of_nonfinite(&line);
        live.begin_events(&self.config, &self.job, u64::MAX)?;
        append(&mut live.metrics, &line)?;
        if !self.is_quiet {
            show(&live.terminal, &line, live.metrics.curves());
        }
        live.events.as_mut().map_or(Ok(()), |events| events.append(&line))
    }

    /// Shows the first `samples_count` of `batch` if samples are due, on the terminal and in TensorBoard.
    pub fn samples(&mut self, step: u64, batch: &[Experience]) -> Result<()> {
        let Some(live) = &mut self.live else { return Ok(()) };
        if !self.config.samples_due(step) {
            return Ok(());
        }
        let shown = &batch[..batch.len().min(self.config.samples_count)];
        live.terminal.samples(step, shown);
        live.begin_events(&self.config, &self.job, u64::MAX)?;
        let Some(events) = &mut live.events else { return Ok(()) };
        (1..).zip(shown).try_for_each(|(i, sample)| {
            events.append_text(now_unix_s(), step, &format!("samples/{i}"), &markdown(sample))
        })
    }

    pub fn rollouts(&mut self, step: u64, batch: &[Experience], seed: u64, config_hash: &str) -> Result<()> {
        match &self.live {
            Some(live) if self.config.rollouts_due(step) => {
                let _span = trace::span(Category::Io, "record rollouts", "samples", || [batch.len()]);
                rollouts::write(&live.run_dir, step, batch, (seed, config_hash), self.config.rollouts_keep_last)
            }
            _ => Ok(()),
        }
    }

    /// Records the first rows of the evaluation after `step`. A repeated evaluation replaces them.
    pub fn eval_rows(&mut self, step: u64, rows: impl Iterator<Item = Result<EvalRow>>) -> Result<()> {
        let most = self.config.eval_rows_max;
        match &self.live {
            Some(live) if most > 0 => {
                let _span = trace::span(Category::Io, "record evaluation rows", "", || []);
                let rows = rows.take(most).collect::<Result<Vec<_>>>()?;
                eval_rows::write(&live.run_dir, step, &rows, self.config.rollouts_keep_last)
            }
            _ => Ok(()),
        }
    }

    pub fn say(&self, text: &str) {
        if let Some(live) = self.live.as_ref().filter(|_| !self.is_quiet) {
            live.terminal.say(text);
        }
    }

    pub fn warn(&self, text: &str) {
        if let Some(live) = self.live.as_ref().filter(|_| !self.is_quiet) {
            live.terminal.warn(text);
        }
    }

    /// Waits until `metrics.jsonl` is on the disk. Called before a checkpoint of that step is committed.
    pub fn sync(&self) -> Result<()> {
        self.live.as_ref().map_or(Ok(()), |live| live.metrics.sync())
    }

    /// Shows the final summary and waits until the records are on the disk.
    pub fn finish(&mut self, steps: u64, seconds: f64, rows: &[(String, String)]) -> Result<()> {
        let Some(live) = &mut self.live else { return Ok(()) };
        live.terminal.final_summary(steps, seconds, live.metrics.curves(), rows);
        live.metrics.sync()
    }
}

impl Live {
    /// Creates the events file of this start, if it is on and does not exist yet. Values shown up to `step_last` stay.
    fn begin_events(&mut self, config: &MetricsConfig, job: &str, step_last: u64) -> Result<()> {
        if config.tensorboard && self.events.is_none() {
            let lines = self.metrics.lines()?;
            self.events = Some(EventsFile::create(&self.run_dir, job, &lines, step_last, now_unix_s())?);
        }
        Ok(())
    }

    fn warn_of_nonfinite(&self, line: &Line) {
        for (key, value) in line.values.iter().filter(|(_, value)| !value.is_finite()) {
            self.terminal.warn(&format!("step {}: {key} is {value}; metrics.jsonl has null there", line.step));
        }
    }
}

/// A sample for TensorBoard.
fn markdown(Experience { prompt, response, score, .. }: &Experience) -> String {
    let [prompt, response] = [&prompt.text, &*marked(&response.text, response.written())].map(indented);
    format!("score {score}\n\nprompt\n\n{prompt}\n\nresponse\n\n{response}\n")
}

fn now_unix_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
