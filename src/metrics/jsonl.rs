//! `metrics.jsonl`: one JSON object a line, a line per step and one per evaluation. It is the truth that every other
//! record of the numbers derives from.
//!
//! `step` and `time_unix_s` come first, then the keys in the order of [`keys::TABLE`], then others by name. JSON has no
//! NaN and no infinities: such a value is written as `null`, and the line ends with `"nonfinite": {key: "NaN" | "inf" |
//! "-inf"}`, so that a reader who expects numbers meets a gap, not a wrong number, and nothing is lost.
//!
//! A line is appended in one write, so a kill leaves at most a torn last line, which the next open removes.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::{aside, keys};
use crate::error::{Error, Result};

const NONFINITE: &str = "nonfinite";

/// One line: the numbers of a step, or of an evaluation after it.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    pub step: u64,
    /// Seconds since 1970 (UTC).
    pub time_unix_s: f64,
    /// The other keys, in the order in which they are written.
    pub values: Vec<(String, f64)>,
}

impl Line {
    /// A line with `values` put in order. Of a key given twice the last value stays.
    pub fn new(step: u64, time_unix_s: f64, values: &[(&str, f64)]) -> Self {
        let mut ordered: Vec<(String, f64)> = Vec::with_capacity(values.len());
        for &(key, value) in values {
            match ordered.iter_mut().find(|(known, _)| known == key) {
                Some(slot) => slot.1 = value,
                None => ordered.push((key.to_owned(), value)),
            }
        }
        ordered.sort_by(|(a, _), (b, _)| keys::rank(a).cmp(&keys::rank(b)).then_with(|| a.cmp(b)));
        Self { step, time_unix_s, values: ordered }
    }

    pub fn get(&self, key: &str) -> Option<f64> {
        self.values.iter().find(|(known, _)| known == key).map(|&(_, value)| value)
    }

    /// Whether this is the line of an evaluation.
    pub fn is_eval(&self) -> bool {
        self.values.iter().any(|(key, _)| keys::is_eval(key))
    }

    /// The line as JSON, without the line break.
    pub fn to_json(&self) -> String {
        let mut object = Map::new();
        object.insert(keys::STEP.into(), self.step.into());
        object.insert(keys::TIME_UNIX_S.into(), self.time_unix_s.into());
        let mut nonfinite = Map::new();
        for (key, value) in &self.values {
            if !value.is_finite() {
                nonfinite.insert(key.clone(), value.to_string().into());
            }
            object.insert(key.clone(), number(key, *value));
        }
        if !nonfinite.is_empty() {
            object.insert(NONFINITE.into(), nonfinite.into());
        }
        Value::Object(object).to_string()
    }

    /// Reads a line back; numbers within one unit in the last place.
    ///
    /// # Errors
    /// `Data`, saying what is wrong with it.
    pub fn parse(text: &str) -> Result<Self> {
        let object: Map<String, Value> = serde_json::from_str(text).map_err(|e| Error::data(e.to_string()))?;
        let step = object.get(keys::STEP).and_then(Value::as_u64).ok_or_else(|| Error::data("`step` is missing"))?;
        let time_unix_s = object.get(keys::TIME_UNIX_S).and_then(Value::as_f64).unwrap_or(0.0);
        let nonfinite = object.get(NONFINITE).and_then(Value::as_object);
        let mut values = Vec::with_capacity(object.len());
        for (key, value) in &object {
            if key == keys::STEP || key == keys::TIME_UNIX_S || key == NONFINITE {
                continue;
            }
            let written = || nonfinite?.get(key)?.as_str()?.parse::<f64>().ok();
            let value = value.as_f64().or_else(written).ok_or_else(|| Error::data(format!("`{key}` is no number")))?;
            values.push((key.clone(), value));
        }
        Ok(Self { step, time_unix_s, values })
    }
}

/// Whole counts without a decimal point, other numbers in the shortest form that identifies them.
fn number(key: &str, value: f64) -> Value {
    let whole = keys::find(key).is_some_and(|key| key.unit.is_whole());
    if whole && value.fract() == 0.0 && (0.0..9.0e15).contains(&value) { (value as u64).into() } else { value.into() }
}

/// The open file, and all its lines in memory.
#[derive(Debug)]
pub struct MetricsFile {
    path: PathBuf,
    file: File,
    lines: Vec<Line>,
    /// The lines as they stand in the file: rewriting must not change a bit of a number.
    texts: Vec<String>,
}

impl MetricsFile {
    /// Opens or creates `path`, removing a last line that a kill tore.
    ///
    /// # Errors
    /// `Io` where it cannot be read or written; `Data`, naming the line, where a complete line is damaged.
    pub fn open(path: &Path) -> Result<Self> {
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(e) => return Err(Error::io("read", path, &e)),
        };
        let whole = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
        let (lines, texts) = parse_lines(path, &bytes[..whole])?;
        if whole < bytes.len() {
            aside::replace(path, &bytes[..whole])?;
        }
        Ok(Self { path: path.to_owned(), file: append_to(path)?, lines, texts })
    }

    /// All lines, oldest first.
    pub fn lines(&self) -> &[Line] {
        &self.lines
    }

    /// Appends the line of a step.
    ///
    /// # Errors
    /// `Fault` if the step is not later than all recorded ones; `Io` if the line cannot be written.
    pub fn append(&mut self, line: Line) -> Result<()> {
        let last = self.lines.iter().rev().find(|l| !l.is_eval()).map_or(0, |l| l.step);
        if line.step <= last {
            let message = format!("step {} recorded after step {last} in {}", line.step, self.path.display());
            return Err(Error::fault(message).hint("cut the records back to the checkpoint's step before going on"));
        }
        self.write(line)
    }

    /// Appends the line of an evaluation. Where `step` already has one (a resume may repeat it), it is replaced.
    ///
    /// # Errors
    /// `Io` if the line cannot be written.
    pub fn append_eval(&mut self, line: Line) -> Result<()> {
        match self.lines.iter().position(|l| l.step == line.step && l.is_eval()) {
            Some(at) => {
                self.texts[at] = line.to_json();
                self.lines[at] = line;
                self.rewrite()
            }
            None => self.write(line),
        }
    }

    fn write(&mut self, line: Line) -> Result<()> {
        let mut text = line.to_json();
        text.push('\n');
        self.file.write_all(text.as_bytes()).map_err(|e| Error::io("write", &self.path, &e))?;
        text.pop();
        self.lines.push(line);
        self.texts.push(text);
        Ok(())
    }

    /// Drops every line after `step`, atomically: what a resume from the checkpoint of `step` will write again.
    ///
    /// # Errors
    /// `Io`; the file is then unchanged.
    pub fn cut_back(&mut self, step: u64) -> Result<()> {
        if self.lines.iter().all(|line| line.step <= step) {
            return Ok(());
        }
        let mut kept = self.lines.iter().map(|line| line.step <= step);
        self.texts.retain(|_| kept.next().unwrap_or(false));
        self.lines.retain(|line| line.step <= step);
        self.rewrite()
    }

    fn rewrite(&mut self) -> Result<()> {
        let mut text = String::new();
        for line in &self.texts {
            text.push_str(line);
            text.push('\n');
        }
        aside::replace(&self.path, text.as_bytes())?;
        self.file = append_to(&self.path)?;
        Ok(())
    }

    /// Waits until the lines are on the disk: before a checkpoint claims them.
    ///
    /// # Errors
    /// `Io`, naming the path.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|e| Error::io("write", &self.path, &e))
    }
}

fn append_to(path: &Path) -> Result<File> {
    OpenOptions::new().append(true).create(true).open(path).map_err(|e| Error::io("write", path, &e))
}

fn parse_lines(path: &Path, bytes: &[u8]) -> Result<(Vec<Line>, Vec<String>)> {
    let mut lines = Vec::new();
    let mut texts = Vec::new();
    for (i, line) in bytes.split_inclusive(|&b| b == b'\n').enumerate() {
        let text = std::str::from_utf8(line.trim_ascii_end()).map_err(|e| Error::data(e.to_string()));
        let parsed = text.and_then(|text| Ok((Line::parse(text)?, text.to_owned())));
        let (line, text) = parsed.map_err(|e| {
            e.within(format!("{}, line {}", path.display(), i + 1))
                .hint("remove or repair that line; the checkpoints do not depend on it")
        })?;
        lines.push(line);
        texts.push(text);
    }
    Ok((lines, texts))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn a_full_disk_is_an_io_error_that_names_the_file() {
        let file = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let path = PathBuf::from("run/metrics.jsonl");
        let mut metrics = MetricsFile { path, file, lines: Vec::new(), texts: Vec::new() };
        let error = metrics.append(Line::new(1, 0.0, &[("loss", 1.0)])).unwrap_err();
        assert_eq!(error.kind, Kind::Io);
        assert!(error.message.contains("run/metrics.jsonl") && error.message.contains("No space left"), "{error}");
        assert!(metrics.lines().is_empty());
    }
}
