//! `events.out.tfevents.*`: what TensorBoard shows, derived from the lines of `metrics.jsonl`.
//!
//! A key is the scalar `section/key`, so that TensorBoard groups by section; samples are texts. Each start writes one
//! new file with everything up to the step that it resumes from and removes the files of earlier starts.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::events::{self, Event, What};
use super::jsonl::Line;
use super::keys;
use crate::error::{Error, Result};
use crate::sys::{files, host};

const PREFIX: &str = "events.out.tfevents.";

/// The section of keys that are not in the table.
const OTHER_SECTION: &str = "extra";

pub fn tag(key: &str) -> String {
    format!("{}/{key}", keys::find(key).map_or(OTHER_SECTION, |key| key.section))
}

#[derive(Debug)]
pub struct EventsFile {
    path: PathBuf,
    file: File,
}

impl EventsFile {
    /// Writes a new events file into `directory`: the scalars of `lines`, and the texts of older files up to `step_last`.
    /// Then removes the older files.
    pub fn create(
        directory: &Path,
        lines: impl IntoIterator<Item = Result<Line>>,
        step_last: u64,
        now_unix_s: f64,
    ) -> Result<Self> {
        let old = files_in(directory)?;
        let mut texts = texts(&old, step_last)?.into_iter().peekable();
        let path = directory.join(file_name(now_unix_s, &old));
        let version = What::FileVersion("brain.Event:2".into());
        files::replace_with(&path, |out| {
            let mut content = Vec::new();
            Event { wall_time: now_unix_s, step: 0, what: version }.write(&mut content);
            Event { wall_time: now_unix_s, step: 0, what: What::SessionStart }.write(&mut content);
            for line in lines {
                let line = line?;
                if line.step > step_last {
                    continue;
                }
                while let Some(earlier) = texts.next_if(|text| text.step < line.step) {
                    earlier.write(&mut content);
                }
                encode(&line, &mut content);
                put(out, &path, &mut content)?;
            }
            for later in texts {
                later.write(&mut content);
            }
            put(out, &path, &mut content)
        })?;
        for path in old {
            fs::remove_file(&path).map_err(|e| Error::io("remove", &path, &e))?;
        }
        let file = OpenOptions::new().append(true).open(&path).map_err(|e| Error::io("write", &path, &e))?;
        Ok(Self { path, file })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn append(&mut self, line: &Line) -> Result<()> {
        let mut content = Vec::new();
        encode(line, &mut content);
        self.write(&content)
    }

    pub fn append_text(&mut self, wall_time: f64, step: u64, tag: &str, text: &str) -> Result<()> {
        let mut content = Vec::new();
        let what = What::Text { tag: tag.to_owned(), text: text.to_owned() };
        Event { wall_time, step, what }.write(&mut content);
        self.write(&content)
    }

    fn write(&mut self, content: &[u8]) -> Result<()> {
        self.file.write_all(content).map_err(|e| Error::io("write", &self.path, &e))
    }
}

fn put(out: &mut impl Write, path: &Path, content: &mut Vec<u8>) -> Result<()> {
    out.write_all(content).map_err(|e| Error::io("write", path, &e))?;
    content.clear();
    Ok(())
}

/// The texts of events files up to a step, in the order of the files.
fn texts(files: &[PathBuf], step_last: u64) -> Result<Vec<Event>> {
    let mut texts = Vec::new();
    for path in files {
        let bytes = fs::read(path).map_err(|e| Error::io("read", path, &e))?;
        let is_kept = |event: &Event| matches!(event.what, What::Text { .. }) && event.step <= step_last;
        texts.extend(events::read(&bytes).0.into_iter().filter(is_kept));
    }
    Ok(texts)
}

fn encode(line: &Line, out: &mut Vec<u8>) {
    for (key, value) in &line.values {
        Event::scalar(line.time_unix_s, line.step, tag(key), *value).write(out);
    }
}

/// TensorBoard reads the files of a directory in the order of their names, so a new one must sort behind the old.
fn file_name(now_unix_s: f64, old: &[PathBuf]) -> String {
    let host: String =
        host::name().chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect();
    let mut seconds = now_unix_s as u64;
    loop {
        let name = format!("{PREFIX}{seconds:010}.{host}.{}", std::process::id());
        if old.iter().all(|path| path.file_name().is_some_and(|old| old.to_string_lossy().as_ref() < name.as_str())) {
            return name;
        }
        seconds += 1;
    }
}

/// The events files in `directory`, in the order of their names.
pub fn files_in(directory: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(directory).map_err(|e| Error::io("read", directory, &e))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(|e| Error::io("read", directory, &e))?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX)) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}
