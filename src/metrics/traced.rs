//! Reads a trace: the spans of a step of all ranks, without single operations and layers.

use super::trace::rank_lane;
use crate::error::{Error, Result};
use crate::sys::files;
use crate::sys::trace::Category;
use flate2::read::GzDecoder;
use serde::Deserialize;
use serde::de::{Deserializer, SeqAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;
use std::io::{BufReader, Read};
use std::path::Path;

/// The most bytes of a trace without compression.
const BYTES_MAX: u64 = 4 << 30;

/// A traced step.
#[derive(Debug, Default)]
pub struct TracedStep {
    pub step: u64,
    /// By rank.
    pub ranks: Vec<TracedRank>,
}

#[derive(Debug, Default)]
pub struct TracedRank {
    /// Its number and its host.
    pub name: String,
    /// The names of its rows. The first one is the thread that computes.
    pub lanes: BTreeMap<u32, String>,
    /// In the order of the file: by row and begin.
    pub spans: Vec<TracedSpan>,
}

#[derive(Debug)]
pub struct TracedSpan {
    pub name: String,
    pub category: Category,
    pub lane: u32,
    /// In ns since the begin of the step.
    pub start: u64,
    pub end: u64,
    /// The group of a collective, and the number of its call.
    pub call: Option<(String, u64)>,
    /// The rank that a wait is for, if it is known.
    pub on: Option<usize>,
}

#[derive(Deserialize)]
struct File {
    #[serde(rename = "otherData")]
    about: About,
    #[serde(rename = "traceEvents")]
    ranks: Ranks,
}

#[derive(Deserialize)]
struct About {
    step: u64,
}

#[derive(Deserialize)]
struct Event {
    ph: String,
    name: String,
    #[serde(default)]
    cat: String,
    pid: usize,
    tid: usize,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: Args,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Args {
    name: String,
    group: Option<String>,
    call: u64,
    rank: Option<usize>,
}

/// The events of a file, sorted by rank while they are read.
struct Ranks(Vec<TracedRank>);

/// The most ranks of a trace.
const RANKS_MAX: usize = 1 << 16;

impl<'de> Deserialize<'de> for Ranks {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        struct Events;
        impl<'de> Visitor<'de> for Events {
            type Value = Ranks;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of events")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut events: A) -> std::result::Result<Ranks, A::Error> {
                let mut ranks: Vec<TracedRank> = Vec::new();
                while let Some(event) = events.next_element::<Event>()? {
                    let known = rank_lane(event.pid, event.tid).filter(|(rank, _)| *rank < RANKS_MAX);
                    let Some((rank, lane)) = known else {
                        return Err(serde::de::Error::custom(format!("pid {} is no rank", event.pid)));
                    };
                    if rank >= ranks.len() {
                        ranks.resize_with(rank + 1, TracedRank::default);
                    }
                    ranks[rank].add(lane, event);
                }
                Ok(Ranks(ranks))
            }
        }
        from.deserialize_seq(Events)
    }
}

impl TracedRank {
    fn add(&mut self, lane: u32, event: Event) {
        let Event { ph, name, cat, ts, dur, args, .. } = event;
        match (&*ph, &*name) {
            ("M", "process_name") => self.name = args.name,
            ("M", "thread_name") => drop(self.lanes.insert(lane, args.name)),
            ("X", _) => {
                let category = Category::ALL.into_iter().find(|category| category.name() == cat);
                let is_kept = |category: &Category| !matches!(category, Category::Operation | Category::Layer);
                let ns = |us: f64| (us * 1e3).round() as u64;
                self.spans.extend(category.filter(is_kept).map(|category| TracedSpan {
                    name,
                    category,
                    lane,
                    start: ns(ts),
                    end: ns(ts) + ns(dur),
                    call: args.group.map(|group| (group, args.call)),
                    on: args.rank,
                }));
            }
            _ => {}
        }
    }
}

impl TracedStep {
    /// # Errors
    /// `Io` if the file cannot be read, `Data` if it is no trace of this program.
    pub fn read(path: &Path) -> Result<Self> {
        let file = BufReader::new(files::open(path).map_err(|e| Error::io("read", path, &e))?);
        let is_packed = path.extension().is_some_and(|ending| ending == "gz");
        let text: Box<dyn Read> = if is_packed { Box::new(GzDecoder::new(file)) } else { Box::new(file) };
        let read: serde_json::Result<File> = serde_json::from_reader(BufReader::new(text.take(BYTES_MAX)));
        let malformed = |e| Error::data(format!("{} is no trace of a step: {e}", path.display()));
        let File { about, ranks } = read.map_err(malformed)?;
        Ok(Self { step: about.step, ranks: ranks.0 })
    }
}
