//! `metrics.jsonl`: one JSON object a line, a line a step, in which the numbers of an evaluation after it stand too; one before
//! the first step has line 0. It is the truth that every other record of the numbers derives from.
//!
//! A line is appended in one write, and written over in one where its evaluation comes: a kill leaves at most a torn last line.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
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
    /// Bytes of the file.
    end: u64,
}

/// What is known of the lines of a file.
#[derive(Debug, Default)]
struct Seen {
    curves: Curves,
    /// Recorded steps as runs without a gap, first and last, in the order of the file.
    runs: Vec<(u64, u64)>,
    /// The last line, and where it begins.
    last: Option<(u64, Line)>,
    /// The first damaged lines, described, and how many there are.
    damaged: Vec<String>,
    damaged_count: usize,
    /// Whether the last line has no line break.
    is_open: bool,
}

/// Damaged lines, and runs of missing steps, that a warning names.
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
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(path);
        let file = file.map_err(|e| Error::io("write", path, &e))?;
        let bytes = read(path)?;
        let mut metrics = Self { path: path.to_owned(), file, seen: Seen::default(), end: bytes.len() as u64 };
        for entry in entries(&bytes) {
            match entry.line {
                Ok(line) => metrics.seen.add(line, entry.at),
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
        lines(&self.path)
    }

    pub fn append(&mut self, line: &Line) -> Result<()> {
        let last = self.seen.step_last();
        if line.step <= last {
            let message = format!("step {} recorded after step {last} in {}", line.step, self.path.display());
            return Err(Error::fault(message).hint("cut the records back to the checkpoint's step before going on"));
        }
        self.write(line)
    }

    /// Puts the numbers of an evaluation into the line of its step; where there is none they have a line of their own. Those of an
    /// earlier evaluation of the step (a resume may repeat it) are replaced.
    pub fn append_eval(&mut self, eval: &Line) -> Result<()> {
        let Some((at, last)) = self.seen.last.clone().filter(|(_, last)| last.step >= eval.step) else {
            return self.write(eval);
        };
        if last.step == eval.step && !last.is_evaluated() && !self.is_damaged() {
            let merged = last.with(eval);
            self.put(&merged, at)?;
            self.seen.curves.add(eval);
            self.seen.last = Some((at, merged));
            return Ok(());
        }
        if self.rewrite(u64::MAX, Some(eval))? { Ok(()) } else { self.write(eval) }
    }

    fn write(&mut self, line: &Line) -> Result<()> {
        if self.is_damaged() {
            self.rewrite(u64::MAX, None)?;
        }
        let at = self.end;
        self.put(line, at)?;
        self.seen.add(line.clone(), at);
        Ok(())
    }

    /// Writes the last line, which begins at byte `at` and is no shorter than what is there.
    fn put(&mut self, line: &Line, at: u64) -> Result<()> {
        let text = line.to_json() + "\n";
        self.file.write_all_at(text.as_bytes(), at).map_err(|e| Error::io("write", &self.path, &e))?;
        self.end = at + text.len() as u64;
        Ok(())
    }

    fn is_damaged(&self) -> bool {
        self.seen.damaged_count > 0 || self.seen.is_open
    }

    /// Drops every line after `step`, atomically: what a resume from the checkpoint of `step` will write again. Returns the
    /// warning of steps up to there that have no line, if any.
    pub fn cut_back(&mut self, step: u64) -> Result<Option<String>> {
        if self.is_damaged()
            || self.seen.last.as_ref().is_some_and(|(_, last)| last.step > step)
            || self.seen.step_last() > step
        {
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

    /// Writes the file anew, line by line: of those up to `step_last`, with the evaluation `eval` in the line of its step. Whether
    /// there is one. Lines that are damaged go to a file of their own.
    fn rewrite(&mut self, step_last: u64, eval: Option<&Line>) -> Result<bool> {
        let whole = read(&self.path)?;
        let (mut seen, mut is_replaced, mut end) = (Seen::default(), false, 0);
        let damaged_path = damaged_path(&self.path);
        let mut damaged = None;
        files::replace_with(&self.path, |out| {
            for entry in entries(&whole) {
                let Ok(line) = entry.line else {
                    keep(&damaged_path, &mut damaged, entry.text)?;
                    continue;
                };
                if line.step > step_last {
                    continue;
                }
                let merged = eval.filter(|eval| eval.step == line.step).map(|eval| line.with(eval));
                is_replaced |= merged.is_some();
                let text = merged.as_ref().map_or_else(|| entry.text.to_vec(), |merged| merged.to_json().into_bytes());
                let text = [text, vec![b'\n']].concat();
                out.write_all(&text).map_err(|e| Error::io("write", &self.path, &e))?;
                seen.add(merged.unwrap_or(line), end);
                end += text.len() as u64;
            }
            damaged.map_or(Ok(()), |file| file.sync_all().map_err(|e| Error::io("write", &damaged_path, &e)))
        })?;
        self.file = OpenOptions::new().write(true).open(&self.path).map_err(|e| Error::io("write", &self.path, &e))?;
        (self.seen, self.end) = (seen, end);
        Ok(is_replaced)
    }

    /// Waits until the lines are on the disk: before a checkpoint claims them.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|e| Error::io("write", &self.path, &e))
    }
}

/// All lines of the file at `path` that are whole, oldest first.
pub fn lines(path: &Path) -> Result<Vec<Line>> {
    Ok(entries(&read(path)?).filter_map(|entry| entry.line.ok()).collect())
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
    /// Its first byte.
    at: u64,
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
