//! `metrics.jsonl`: one JSON object per line, one line per step. The metrics of an evaluation after the step are in the
//! same line. An evaluation before the first step has line 0. All other records of the metrics derive from this file.
//!
//! A line is appended in one write, and rewritten in one write when its evaluation is done. So a kill leaves at most
//! one torn last line.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::curves::Curves;
pub use super::line::Line;
use crate::error::{Error, Result};
use crate::sys::files;

/// The open file. Only the lines that the terminal shows and the data for the next line are in memory.
///
/// Lines are a log, so text that is not a line of metrics causes no error. If the file has to be rewritten, such text
/// is moved to `metrics.jsonl.damaged`, byte for byte.
pub struct MetricsFile {
    path: PathBuf,
    file: File,
    seen: Seen,
    /// Bytes of the file.
    end: u64,
}

/// The known facts about the lines of a file.
#[derive(Default)]
struct Seen {
    curves: Curves,
    /// Recorded steps as runs without a gap, first and last, in the order of the file.
    runs: Vec<(u64, u64)>,
    /// The last line, and where it begins.
    last: Option<(u64, Line)>,
    /// The damaged lines, described.
    damaged: Vec<String>,
    /// Whether the last line has no line break.
    is_open: bool,
}

/// The maximum number of damaged lines, and of runs of missing steps, that a warning lists.
const NAMED_MAX: usize = 4;

impl Seen {
    /// Adds a line that begins at byte `at`.
    fn add(&mut self, line: Line, at: u64) {
        self.curves.add(&line);
        if line.is_of_step() {
            self.add_step(line.step);
        }
        self.last = Some((at, line));
    }

    fn add_step(&mut self, step: u64) {
        match self.runs.last_mut() {
            Some((_, last)) if step.checked_sub(1) == Some(*last) => *last = step,
            _ => self.runs.push((step, step)),
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
    /// Opens or creates `path`, and reads its lines. Nothing in it changes before a line is written or cut.
    pub fn open(path: &Path) -> Result<Self> {
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(path);
        let file = file.map_err(|e| Error::io("write", path, &e))?;
        let bytes = read(path)?;
        let mut metrics = Self { path: path.to_owned(), file, seen: Seen::default(), end: bytes.len() as u64 };
        for entry in entries(&bytes) {
            match entry.line {
                Ok(line) => metrics.seen.add(line, entry.at),
                Err(error) => metrics.seen.damaged.push(format!("line {} ({})", entry.number, error.message)),
            }
            metrics.seen.is_open = !entry.is_ended;
        }
        Ok(metrics)
    }

    /// The warning about damaged lines, if there are any.
    pub fn damage(&self) -> Option<String> {
        let damaged = &self.seen.damaged;
        let named = damaged[..damaged.len().min(NAMED_MAX)].join(", ");
        let more = match damaged.len().saturating_sub(NAMED_MAX) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let (path, to) = (self.path.display(), damaged_path(&self.path));
        let warning = || format!("{path} has damaged lines: {named}{more}; a run moves them to {}", to.display());
        (!damaged.is_empty()).then(warning)
    }

    pub fn curves(&self) -> &Curves {
        &self.seen.curves
    }

    /// All complete lines, oldest first, read from the file.
    pub fn lines(&self) -> Result<Vec<Line>> {
        lines(&self.path)
    }

    pub fn append(&mut self, line: &Line) -> Result<()> {
        let last = self.seen.step_last();
        if line.step <= last {
            let message = format!("step {} recorded after step {last} in {}", line.step, self.path.display());
            return Err(Error::fault(message).hint("cut the records back to the checkpoint's step before resuming"));
        }
        self.write(line)
    }

    /// Puts the metrics of an evaluation into the line of its step, which is the last one. Without such a line they get
    /// their own. Metrics of an earlier evaluation of the step (a resume may repeat it) are replaced.
    pub fn append_eval(&mut self, eval: &Line) -> Result<()> {
        self.mend(u64::MAX)?;
        let Some((at, last)) = self.seen.last.clone().filter(|(_, last)| last.step == eval.step) else {
            return self.write(eval);
        };
        let line = last.with(eval);
        self.put(&line, at)?;
        self.seen.curves.add(eval);
        self.seen.last = Some((at, line));
        Ok(())
    }

    fn write(&mut self, line: &Line) -> Result<()> {
        self.mend(u64::MAX)?;
        let at = self.end;
        self.put(line, at)?;
        self.seen.add(line.clone(), at);
        Ok(())
    }

    /// Writes the last line, which begins at byte `at`.
    fn put(&mut self, line: &Line, at: u64) -> Result<()> {
        let text = line.to_json() + "\n";
        let end = at + text.len() as u64;
        let written = self.file.write_all_at(text.as_bytes(), at).and_then(|()| self.file.set_len(end));
        written.map_err(|e| Error::io("write", &self.path, &e))?;
        self.end = end;
        Ok(())
    }

    /// Drops every line after `step`, atomically. A run resumed from the checkpoint of `step` writes them again.
    /// Returns a warning if earlier steps have no line.
    pub fn cut_back(&mut self, step: u64) -> Result<Option<String>> {
        self.mend(step)?;
        let missing = self.seen.missing(step);
        let more = if missing.len() > NAMED_MAX { " and others" } else { "" };
        let named = missing.iter().take(NAMED_MAX);
        let named = named.map(|(a, b)| if a == b { a.to_string() } else { format!("{a} to {b}") });
        let named: Vec<String> = named.collect();
        let plural = if matches!(missing[..], [(a, b)] if a == b) { "" } else { "s" };
        let path = self.path.display();
        Ok((!named.is_empty()).then(|| {
            format!(
                "{path} has no line for step{plural} {}{more}; the run continues after step {step} without them",
                named.join(", ")
            )
        }))
    }

    /// Rewrites the file if it has damaged lines, which are moved to another file, or lines after `step_last`.
    fn mend(&mut self, step_last: u64) -> Result<()> {
        let last = self.seen.last.as_ref().map_or(0, |(_, last)| last.step).max(self.seen.step_last());
        if self.seen.damaged.is_empty() && !self.seen.is_open && last <= step_last {
            return Ok(());
        }
        let whole = read(&self.path)?;
        let (mut seen, mut kept, mut damaged) = (Seen::default(), Vec::new(), Vec::new());
        for entry in entries(&whole) {
            match entry.line {
                Ok(line) if line.step <= step_last => {
                    seen.add(line, kept.len() as u64);
                    kept.extend([entry.text, b"\n"].concat());
                }
                Ok(_) => {}
                Err(_) => damaged.extend([entry.text, b"\n"].concat()),
            }
        }
        if !damaged.is_empty() {
            let path = damaged_path(&self.path);
            let opened = OpenOptions::new().append(true).create(true).open(&path);
            let written = opened.and_then(|mut file| file.write_all(&damaged).and_then(|()| file.sync_all()));
            written.map_err(|e| Error::io("write", &path, &e))?;
        }
        files::replace_with(&self.path, |out| out.write_all(&kept).map_err(|e| Error::io("write", &self.path, &e)))?;
        self.file = OpenOptions::new().write(true).open(&self.path).map_err(|e| Error::io("write", &self.path, &e))?;
        (self.seen, self.end) = (seen, kept.len() as u64);
        Ok(())
    }

    /// Waits until the lines are on the disk. Called before a checkpoint refers to them.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|e| Error::io("write", &self.path, &e))
    }
}

/// All complete lines of the file at `path`, oldest first.
pub fn lines(path: &Path) -> Result<Vec<Line>> {
    Ok(entries(&read(path)?).filter_map(|entry| entry.line.ok()).collect())
}

fn damaged_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".damaged");
    name.into()
}

struct Entry<'a> {
    /// The number of the line, from 1.
    number: usize,
    /// The offset of its first byte.
    at: u64,
    text: &'a [u8],
    line: Result<Line>,
    /// Whether it has a line break.
    is_ended: bool,
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|e| Error::io("read", path, &e))
}

/// The non-blank lines of a file.
fn entries(bytes: &[u8]) -> impl Iterator<Item = Entry<'_>> {
    let mut next = 0;
    let lines = bytes.split_inclusive(|byte| *byte == b'\n').zip(1..).map(move |(text, number)| {
        let at = next;
        next += text.len() as u64;
        (text, number, at)
    });
    lines.filter(|(text, ..)| !text.trim_ascii().is_empty()).map(|(text, number, at)| {
        let (text, is_ended) = text.strip_suffix(b"\n").map_or((text, false), |text| (text, true));
        let line = std::str::from_utf8(text).map_err(|e| Error::data(e.to_string())).and_then(Line::parse);
        Entry { number, at, text, line, is_ended }
    })
}
