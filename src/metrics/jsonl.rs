//! `metrics.jsonl`: one JSON object a line, a line per step and one per evaluation. It is the truth that every other
//! record of the numbers derives from.
//!
//! A line is appended in one write, so a kill leaves at most a torn last line.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::curves::Curves;
pub use super::line::Line;
use crate::error::{Error, Result};
use crate::sys::files;

/// The open file. Of its lines no more stays in memory than the terminal shows and the next line needs.
///
/// Lines are a log: what is no line of metrics refuses nothing. Where the file has to be written anew, such text goes to
/// `metrics.jsonl.damaged`, byte for byte.
#[derive(Debug)]
pub struct MetricsFile {
    path: PathBuf,
    file: File,
    seen: Seen,
}

/// What is known of the lines of a file.
#[derive(Debug, Default)]
struct Seen {
    curves: Curves,
    /// Recorded steps as runs without a gap, first and last, in the order of the file.
    runs: Vec<(u64, u64)>,
    eval_last: Option<u64>,
    /// The first damaged lines, described, and how many there are.
    damaged: Vec<String>,
    damaged_count: usize,
    /// Whether the last line has no line break.
    is_open: bool,
}

/// Damaged lines, and runs of missing steps, that a warning names.
const NAMED_MAX: usize = 4;

impl Seen {
    fn add(&mut self, line: &Line) {
        self.curves.add(line);
        if line.is_eval() {
            self.eval_last = self.eval_last.max(Some(line.step));
            return;
        }
        match self.runs.last_mut() {
            Some((_, last)) if line.step.checked_sub(1) == Some(*last) => *last = line.step,
            _ => self.runs.push((line.step, line.step)),
        }
    }

    fn add_damaged(&mut self, number: usize, why: &str) {
        self.damaged_count += 1;
        if self.damaged.len() < NAMED_MAX {
            self.damaged.push(format!("line {number} ({why})"));
        }
    }

    fn step_last(&self) -> u64 {
        self.runs.iter().map(|(_, last)| *last).max().unwrap_or(0)
    }

    /// The steps from 1 to `step` that have no line, as runs.
    fn missing(&self, step: u64) -> Vec<(u64, u64)> {
        let (mut runs, mut missing, mut next) = (self.runs.clone(), Vec::new(), 1);
        runs.sort_unstable();
        for (first, last) in runs {
            if next <= step && first > next {
                missing.push((next, step.min(first - 1)));
            }
            next = next.max(last.saturating_add(1));
        }
        if next <= step {
            missing.push((next, step));
        }
        missing
    }
}

impl MetricsFile {
    /// Opens or creates `path`, and reads what it holds. Nothing in it changes before a line is written or cut.
    pub fn open(path: &Path) -> Result<Self> {
        let mut metrics = Self { path: path.to_owned(), file: append_to(path)?, seen: Seen::default() };
        for entry in entries(&read(path)?) {
            match entry.line {
                Ok(line) => metrics.seen.add(&line),
                Err(error) => metrics.seen.add_damaged(entry.number, &error.message),
            }
            metrics.seen.is_open = !entry.is_ended;
        }
        Ok(metrics)
    }

    /// The warning of lines that are damaged; none where all are whole.
    pub fn damage(&self) -> Option<String> {
        let Seen { damaged, damaged_count, .. } = &self.seen;
        let more = match damaged_count - damaged.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        (*damaged_count > 0).then(|| {
            let (path, named) = (self.path.display(), damaged.join(", "));
            format!(
                "{path} has damaged lines: {named}{more}; a run moves them to {}",
                damaged_path(&self.path).display()
            )
        })
    }

    pub fn curves(&self) -> &Curves {
        &self.seen.curves
    }

    /// All lines that are whole, oldest first, read from the file.
    pub fn lines(&self) -> Result<Vec<Line>> {
        Ok(entries(&read(&self.path)?).filter_map(|entry| entry.line.ok()).collect())
    }

    pub fn append(&mut self, line: &Line) -> Result<()> {
        let last = self.seen.step_last();
        if line.step <= last {
            let message = format!("step {} recorded after step {last} in {}", line.step, self.path.display());
            return Err(Error::fault(message).hint("cut the records back to the checkpoint's step before going on"));
        }
        self.write(line)
    }

    /// Appends the line of an evaluation. Where `step` already has one (a resume may repeat it), it is replaced.
    pub fn append_eval(&mut self, line: &Line) -> Result<()> {
        if self.seen.eval_last.is_some_and(|last| line.step <= last) && self.rewrite(u64::MAX, Some(line))? {
            return Ok(());
        }
        self.write(line)
    }

    fn write(&mut self, line: &Line) -> Result<()> {
        if self.is_damaged() {
            self.rewrite(u64::MAX, None)?;
        }
        let mut text = line.to_json();
        text.push('\n');
        self.file.write_all(text.as_bytes()).map_err(|e| Error::io("write", &self.path, &e))?;
        self.seen.add(line);
        Ok(())
    }

    fn is_damaged(&self) -> bool {
        self.seen.damaged_count > 0 || self.seen.is_open
    }

    /// Drops every line after `step`, atomically: what a resume from the checkpoint of `step` will write again. Returns the
    /// warning of steps up to there that have no line, if any.
    pub fn cut_back(&mut self, step: u64) -> Result<Option<String>> {
        if self.is_damaged() || self.seen.step_last().max(self.seen.eval_last.unwrap_or(0)) > step {
            self.rewrite(step, None)?;
        }
        let missing = self.seen.missing(step);
        let more = if missing.len() > NAMED_MAX { " and others" } else { "" };
        let named = missing.iter().take(NAMED_MAX);
        let named = named.map(|(a, b)| if a == b { a.to_string() } else { format!("{a} to {b}") });
        let named: Vec<String> = named.collect();
        let path = self.path.display();
        Ok((!named.is_empty()).then(|| {
            format!(
                "{path} has no line for step {}{more}: the run goes on behind step {step} without them",
                named.join(", ")
            )
        }))
    }

    /// Writes the file anew, line by line: of those up to `step_last`, with the evaluation `eval` in place of the one of its step.
    /// Whether there was one. Lines that are damaged go to a file of their own.
    fn rewrite(&mut self, step_last: u64, eval: Option<&Line>) -> Result<bool> {
        let whole = read(&self.path)?;
        let (mut seen, mut is_replaced) = (Seen::default(), false);
        let damaged_path = damaged_path(&self.path);
        let mut damaged = None;
        files::replace_with(&self.path, |out| {
            let mut put = |text: &[u8]| {
                let written = out.write_all(text).and_then(|()| out.write_all(b"\n"));
                written.map_err(|e| Error::io("write", &self.path, &e))
            };
            for entry in entries(&whole) {
                let Ok(line) = entry.line else {
                    keep(&damaged_path, &mut damaged, entry.text)?;
                    continue;
                };
                match eval {
                    Some(eval) if line.is_eval() && line.step == eval.step => {
                        is_replaced = true;
                        seen.add(eval);
                        put(eval.to_json().as_bytes())?;
                    }
                    _ if line.step <= step_last => {
                        seen.add(&line);
                        put(entry.text)?;
                    }
                    _ => {}
                }
            }
            damaged.map_or(Ok(()), |file| file.sync_all().map_err(|e| Error::io("write", &damaged_path, &e)))
        })?;
        self.file = append_to(&self.path)?;
        self.seen = seen;
        Ok(is_replaced)
    }

    /// Waits until the lines are on the disk: before a checkpoint claims them.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|e| Error::io("write", &self.path, &e))
    }
}

fn append_to(path: &Path) -> Result<File> {
    OpenOptions::new().append(true).create(true).open(path).map_err(|e| Error::io("write", path, &e))
}

fn damaged_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".damaged");
    name.into()
}

/// Appends a damaged line to the file at `path`, which is opened at the first.
fn keep(path: &Path, file: &mut Option<File>, text: &[u8]) -> Result<()> {
    let opened = file.take().map_or_else(|| append_to(path), Ok)?;
    let file = file.insert(opened);
    file.write_all(&[text, b"\n"].concat()).map_err(|e| Error::io("write", path, &e))
}

struct Entry<'a> {
    /// From 1.
    number: usize,
    text: &'a [u8],
    line: Result<Line>,
    /// Whether it has a line break.
    is_ended: bool,
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|e| Error::io("read", path, &e))
}

/// The lines of a file without the blank ones.
fn entries(bytes: &[u8]) -> impl Iterator<Item = Entry<'_>> {
    let lines = bytes.split_inclusive(|byte| *byte == b'\n').zip(1..);
    lines.filter(|(text, _)| !text.trim_ascii().is_empty()).map(|(text, number)| {
        let (text, is_ended) = text.strip_suffix(b"\n").map_or((text, false), |text| (text, true));
        let line = std::str::from_utf8(text).map_err(|e| Error::data(e.to_string())).and_then(Line::parse);
        Entry { number, text, line, is_ended }
    })
}
