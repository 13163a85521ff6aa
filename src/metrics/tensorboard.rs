//! `events.out.tfevents.*`: the data that TensorBoard shows, derived from the lines of `metrics.jsonl`.
//!
//! A key is the scalar `section/key`, so that TensorBoard groups by section. Samples are texts. Each start writes its
//! own file. If there are files of earlier starts, it begins with the step from which TensorBoard drops their values,
//! like `purge_step` of PyTorch's `SummaryWriter`. If there are none, it begins with all lines so far.
//!
//! A file is TFRecords of `Event` protobufs. A record is `u64 length | u32 masked crc32c(length) | data | u32 masked
//! crc32c(data)`, little-endian, with `masked(c) = rotate_right(c, 15) + 0xa282ead8` (TensorFlow,
//! `lib/io/record_writer`). Only the message fields of scalars and texts are written: `Event { wall_time = 1, step = 2,
//! file_version = 3, summary = 5, session_log = 7 }`, `Summary.Value { tag = 1, simple_value = 2, tensor = 8, metadata
//! = 9 }`.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::jsonl::Line;
use super::{display, keys};
use crate::config;
use crate::error::{Error, Result};
use crate::sys::{files, host};
use toml::Value;

const PREFIX: &str = "events.out.tfevents.";

/// The section of keys that are not in the table.
const OTHER_SECTION: &str = "extra";

/// The tag of a key: `reward/mean` for `reward_mean`, `time/step_s` for `time_step_s`. Keys with their own section
/// (`reward/style`) stay.
pub fn tag(key: &str) -> String {
    if key.contains('/') {
        return key.to_owned();
    }
    let section = keys::find(key).map_or(OTHER_SECTION, |key| key.section);
    let name = key.strip_prefix(section).and_then(|rest| rest.strip_prefix('_')).unwrap_or(key);
    format!("{section}/{name}")
}

pub struct EventsFile {
    path: PathBuf,
    file: File,
}

impl EventsFile {
    /// Begins a new events file in `directory`. `lines` are the lines of `metrics.jsonl`. Values up to `step_last`
    /// stay, from earlier files and from `lines`. `job` is the TOML of the job, which is shown as text and as
    /// hyperparameters.
    pub fn create(directory: &Path, job: &str, lines: &[Line], step_last: u64, now_unix_s: f64) -> Result<Self> {
        let old = files_in(directory)?;
        let path = directory.join(file_name(now_unix_s, &old));
        let mut content = [version(now_unix_s), session_start(now_unix_s, step_last.saturating_add(1))].concat();
        content.extend(hparams(now_unix_s, job));
        content.extend(text(now_unix_s, 0, "job/config", &indented(job)));
        if old.is_empty() {
            lines.iter().filter(|line| line.step <= step_last).for_each(|line| content.extend(scalars(line)));
        }
        files::write_atomic(&path, &content)?;
        let file = OpenOptions::new().append(true).open(&path).map_err(|e| Error::io("write", &path, &e))?;
        Ok(Self { path, file })
    }

    pub fn append(&mut self, line: &Line) -> Result<()> {
        self.write(&scalars(line))
    }

    pub fn append_text(&mut self, wall_time: f64, step: u64, tag: &str, markdown: &str) -> Result<()> {
        self.write(&text(wall_time, step, tag, markdown))
    }

    fn write(&mut self, content: &[u8]) -> Result<()> {
        self.file.write_all(content).map_err(|e| Error::io("write", &self.path, &e))
    }
}

/// TensorBoard reads the files of a directory in the order of their names, so a new one must sort after the old ones.
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
    let mut files = files::entries(directory)?;
    files.retain(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX)));
    files.sort();
    Ok(files)
}

fn scalars(line: &Line) -> Vec<u8> {
    line.values.iter().flat_map(|(key, value)| scalar(line.time_unix_s, line.step, &tag(key), *value as f32)).collect()
}

/// The first record of a file. Times are seconds since 1970.
pub fn version(wall_time: f64) -> Vec<u8> {
    record(&event(wall_time, 0).bytes(3, b"brain.Event:2"))
}

/// A record that makes TensorBoard drop everything it has read from `step` on.
pub fn session_start(wall_time: f64, step: u64) -> Vec<u8> {
    const START: u64 = 1;
    // The field is signed.
    record(&event(wall_time, step.min(i64::MAX as u64)).bytes(7, &Message::default().varint(1, START).0))
}

pub fn scalar(wall_time: f64, step: u64, tag: &str, value: f32) -> Vec<u8> {
    summary(wall_time, step, &Message::default().bytes(1, tag.as_bytes()).f32(2, value))
}

/// Markdown for the text page: `Value { tag, tensor { dtype: string, shape: [1], string_val }, metadata { plugin_data {
/// plugin_name: "text" } } }`.
pub fn text(wall_time: f64, step: u64, tag: &str, markdown: &str) -> Vec<u8> {
    const DT_STRING: u64 = 7;
    let shape = Message::default().bytes(2, &Message::default().varint(1, 1).0);
    let tensor = Message::default().varint(1, DT_STRING).bytes(2, &shape.0).bytes(8, markdown.as_bytes());
    let metadata = Message::default().bytes(1, &Message::default().bytes(1, b"text").0);
    summary(wall_time, step, &Message::default().bytes(1, tag.as_bytes()).bytes(8, &tensor.0).bytes(9, &metadata.0))
}

/// The keys of a job as hyperparameters for TensorBoard's page of that name: `Value { tag, metadata { plugin_data {
/// plugin_name: "hparams", content: HParamsPluginData { session_start_info = 3 { map hparams = 1, start_time_secs = 5 }
/// } } } }`, each with a `google.protobuf.Value { number_value = 2, string_value = 3, bool_value = 4 }`
/// (tensorboard/plugins/hparams/plugin_data.proto).
pub fn hparams(wall_time: f64, job: &str) -> Vec<u8> {
    let mut info = Message::default();
    for (key, value) in config::flat(&job.parse().unwrap_or_default()) {
        let value = match value {
            Value::Boolean(x) => Message::default().varint(4, u64::from(x)),
            Value::Integer(x) => Message::default().f64(2, x as f64),
            Value::Float(x) => Message::default().f64(2, x),
            Value::String(x) => Message::default().bytes(3, x.as_bytes()),
            other => Message::default().bytes(3, other.to_string().as_bytes()),
        };
        info = info.bytes(1, &Message::default().bytes(1, key.as_bytes()).bytes(2, &value.0).0);
    }
    let info = info.f64(5, wall_time);
    let data = Message::default().varint(1, 0).bytes(3, &info.0);
    let plugin = Message::default().bytes(1, b"hparams").bytes(2, &data.0);
    let metadata = Message::default().bytes(1, &plugin.0);
    summary(wall_time, 0, &Message::default().bytes(1, b"_hparams_/session_start_info").bytes(9, &metadata.0))
}

/// The indented text without control characters, so that Markdown shows it unchanged.
pub(super) fn indented(text: &str) -> String {
    let lines: Vec<String> = text.lines().map(|line| format!("    {}", display::one_line(line))).collect();
    lines.join("\n")
}

fn summary(wall_time: f64, step: u64, value: &Message) -> Vec<u8> {
    record(&event(wall_time, step).bytes(5, &Message::default().bytes(1, &value.0).0))
}

fn event(wall_time: f64, step: u64) -> Message {
    let message = Message::default().key(1, 1).raw(&wall_time.to_le_bytes());
    if step > 0 { message.varint(2, step) } else { message }
}

fn record(message: &Message) -> Vec<u8> {
    let masked_crc = |bytes: &[u8]| crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes();
    let length = (message.0.len() as u64).to_le_bytes();
    [&length[..], &masked_crc(&length), &message.0, &masked_crc(&message.0)].concat()
}

/// A protobuf message, field by field.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    fn number(mut self, mut value: u64) -> Self {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
        self
    }

    fn key(self, field: u64, wire_type: u64) -> Self {
        self.number(field << 3 | wire_type)
    }

    fn varint(self, field: u64, value: u64) -> Self {
        self.key(field, 0).number(value)
    }

    fn bytes(self, field: u64, value: &[u8]) -> Self {
        self.key(field, 2).number(value.len() as u64).raw(value)
    }

    fn f64(self, field: u64, value: f64) -> Self {
        self.key(field, 1).raw(&value.to_le_bytes())
    }

    fn f32(self, field: u64, value: f32) -> Self {
        self.key(field, 5).raw(&value.to_le_bytes())
    }
}
