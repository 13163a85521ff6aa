//! Traces of steps: `traces/step-N.json` in the run directory, or `step-N.json.gz` if it is large. The format is the
//! Trace Event Format, which <https://ui.perfetto.dev> and `chrome://tracing` open: a process is a rank, a row is one of
//! its threads, and a span is a complete event.

use super::rollouts::{remove, steps_in};
use crate::comm::{Clock, group_id};
use crate::error::{Error, Result};
use crate::sys::files;
use crate::sys::trace::{Category, NUMBERS, Recorded, Span};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::HashMap;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The spans of a step of one rank, as ranks send them to the first rank. Times are those of the first rank's clock, in
/// ns since the begin of the step.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct RankTrace {
    host: String,
    lanes: Vec<String>,
    /// Names, labels and groups of the spans.
    texts: Vec<String>,
    /// By row and time, a span before those within it.
    spans: Vec<Record>,
    left_out: u64,
    /// The most by which the times may be wrong, in ns.
    doubt: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    name: u32,
    category: u8,
    lane: u32,
    start: u64,
    length: u64,
    labels: u32,
    numbers: [u64; NUMBERS],
    group: Option<u32>,
}

/// The texts of a rank, each once.
#[derive(Default)]
struct Texts {
    ids: HashMap<String, u32>,
    all: Vec<String>,
}

impl Texts {
    fn id(&mut self, text: &str) -> u32 {
        if let Some(id) = self.ids.get(text) {
            return *id;
        }
        let id = self.all.len() as u32;
        self.ids.insert(text.to_string(), id);
        self.all.push(text.to_string());
        id
    }
}

impl RankTrace {
    /// The spans that this rank has recorded. `clock` turns its times into those of the first rank, for which the step
    /// began at `begun`.
    pub fn new(host: &str, recorded: Recorded, clock: &Clock, begun: u64) -> Self {
        let Recorded { mut spans, lanes, left_out } = recorded;
        spans.sort_by_key(|span| (span.lane, span.start, Reverse(span.end)));
        let (groups, mut texts) = (group_id::names(), Texts::default());
        let at = |time: u64| clock.of_first_rank(time).saturating_sub(begun);
        let record = |Span { name, category, lane, start, end, labels, numbers, group }: Span| {
            let (start, end) = (at(start), at(end));
            Record {
                name: texts.id(&name),
                category: category as u8,
                lane,
                start,
                length: end - start,
                labels: texts.id(labels),
                numbers,
                group: group.map(|group| texts.id(&groups[group as usize])),
            }
        };
        let spans = spans.into_iter().map(record).collect();
        Self { host: host.to_string(), lanes, texts: texts.all, spans, left_out, doubt: clock.doubt() }
    }

    /// The number of its spans.
    pub fn len(&self) -> usize {
        self.spans.len()
    }

    pub fn left_out(&self) -> u64 {
        self.left_out
    }
}

/// The number of spans of a step from which its file is compressed: about 10 MB.
const PLAIN_MAX: usize = 60_000;

/// The rows of a rank.
const LANES: usize = 4096;

/// The numbers of a rank's process and of its row. Perfetto takes process 0 and thread 0 for an idle processor, and needs
/// different threads in different processes.
fn pid_tid(rank: usize, lane: usize) -> (usize, usize) {
    (rank + 1, rank * LANES + lane.min(LANES - 1) + 1)
}

/// The rank and the row of these numbers.
pub(super) fn rank_lane(pid: usize, tid: usize) -> Option<(usize, u32)> {
    let lane = tid.checked_sub(1)? % LANES;
    Some((pid.checked_sub(1)?, lane as u32))
}

/// A file under construction, in memory.
pub struct TraceFile {
    run_dir: PathBuf,
    step: u64,
    path: PathBuf,
    out: Out,
    has_events: bool,
}

enum Out {
    Plain(Vec<u8>),
    Gzip(Box<GzEncoder<Vec<u8>>>),
}

impl Out {
    fn write(&mut self, text: &str) {
        let written = match self {
            Self::Plain(out) => out.write_all(text.as_bytes()),
            Self::Gzip(out) => out.write_all(text.as_bytes()),
        };
        written.expect("memory is written");
    }
}

/// The directory of the traces of a run.
pub fn dir(run_dir: &Path) -> PathBuf {
    run_dir.join("traces")
}

impl TraceFile {
    /// Begins the trace of `step` of the job `name`, with `spans` spans of all ranks.
    pub fn begin(run_dir: &Path, step: u64, name: &str, spans: usize) -> Self {
        let is_plain = spans <= PLAIN_MAX;
        let path = dir(run_dir).join(format!("step-{step}{}", ENDINGS[usize::from(!is_plain)]));
        let out = if is_plain {
            Out::Plain(Vec::new())
        } else {
            Out::Gzip(Box::new(GzEncoder::new(Vec::new(), Compression::fast())))
        };
        let mut file = Self { run_dir: run_dir.to_owned(), step, path, out, has_events: false };
        let (version, name) = (env!("CARGO_PKG_VERSION"), json(name));
        file.out.write(&format!(
            "{{\"displayTimeUnit\":\"ms\",\"otherData\":{{\"program\":\"rlhf-hpc {version}\",\"job\":{name},\"step\":{step}}},\
             \n\"traceEvents\":["
        ));
        file
    }

    /// Adds the spans of `rank`.
    pub fn add(&mut self, rank: usize, trace: &RankTrace) {
        let RankTrace { host, lanes, texts, spans, doubt, .. } = trace;
        let about = match doubt {
            0 => format!("rank {rank} ({host})"),
            ns => format!("rank {rank} ({host}, times to {} us)", ns.div_ceil(1000)),
        };
        self.about(rank, 0, "process_name", &json(&about), "name");
        self.about(rank, 0, "process_sort_index", &rank.to_string(), "sort_index");
        for (lane, name) in lanes.iter().enumerate() {
            self.about(rank, lane, "thread_name", &json(name), "name");
            self.about(rank, lane, "thread_sort_index", &lane.to_string(), "sort_index");
        }
        let quoted: Vec<String> = texts.iter().map(|text| json(text)).collect();
        for span in spans {
            let (name, category) = (&quoted[span.name as usize], Category::ALL[span.category as usize].name());
            let (pid, tid) = pid_tid(rank, span.lane as usize);
            let (start, length) = (microseconds(span.start), microseconds(span.length));
            let labels = texts[span.labels as usize].split_whitespace();
            let numbers = labels.zip(span.numbers).map(|(label, number)| format!("\"{label}\":{number}"));
            let group = span.group.map(|group| format!("\"group\":{}", quoted[group as usize]));
            let args = numbers.chain(group).collect::<Vec<_>>().join(",");
            let args = if args.is_empty() { args } else { format!(",\"args\":{{{args}}}") };
            self.event(&format!(
                "{{\"ph\":\"X\",\"name\":{name},\"cat\":\"{category}\",\"pid\":{pid},\"tid\":{tid},\"ts\":{start},\"dur\":{length}{args}}}"
            ));
        }
    }

    fn about(&mut self, rank: usize, lane: usize, what: &str, value: &str, key: &str) {
        let (pid, tid) = pid_tid(rank, lane);
        self.event(&format!(
            "{{\"ph\":\"M\",\"name\":\"{what}\",\"pid\":{pid},\"tid\":{tid},\"args\":{{\"{key}\":{value}}}}}"
        ));
    }

    fn event(&mut self, event: &str) {
        let between = if std::mem::replace(&mut self.has_events, true) { ",\n" } else { "\n" };
        self.out.write(between);
        self.out.write(event);
    }

    /// Writes the file, and removes an older one of the step. Returns its path.
    pub fn finish(mut self) -> Result<PathBuf> {
        self.out.write("\n]}\n");
        let bytes = match self.out {
            Out::Plain(bytes) => bytes,
            Out::Gzip(out) => out.finish().map_err(|e| Error::io("compress", &self.path, &e))?,
        };
        files::create_dir_all(files::parent(&self.path))?;
        files::remove_partial(files::parent(&self.path))?;
        files::write_atomic(&self.path, &bytes)?;
        let of_step = steps(&self.run_dir)?.into_iter().filter(|(step, path)| *step == self.step && *path != self.path);
        remove(of_step.map(|(_, path)| path))?;
        Ok(self.path)
    }
}

fn json(text: &str) -> String {
    serde_json::to_string(text).expect("a text is JSON")
}

/// Nanoseconds as a decimal number of microseconds.
fn microseconds(ns: u64) -> String {
    format!("{}.{:03}", ns / 1000, ns % 1000)
}

/// The endings of plain and of compressed files.
const ENDINGS: [&str; 2] = [".json", ".json.gz"];

/// The traced steps of a run with their files, ascending.
pub fn steps(run_dir: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let dir = dir(run_dir);
    let mut found = Vec::new();
    for ending in ENDINGS {
        found.extend(steps_in(&dir, ending)?.into_iter().map(|step| (step, dir.join(format!("step-{step}{ending}")))));
    }
    found.sort();
    Ok(found)
}

/// Removes the traces of the steps after `step`, which a resumed run repeats.
pub fn cut_back(run_dir: &Path, step: u64) -> Result<()> {
    remove(steps(run_dir)?.into_iter().filter(|(traced, _)| *traced > step).map(|(_, path)| path))
}
