//! Waits of a traced step: who waits for whom, and the critical path.
//!
//! A rank in a collective waits until the last rank that it needs has entered it. The rest of the call is the transfer.
//! The critical path is found backward, from the rank that ends last: before a wait, the path is on the rank that
//! entered last. So each moment of the step is on the path of one rank, and the step becomes shorter only if the path
//! does.

use crate::metrics::traced::{TracedRank, TracedSpan, TracedStep};
use crate::sys::trace::Category;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// The row of the thread that computes.
const COMPUTE: u32 = 0;
/// The longest time between the end of a shared queue and the barrier after it, in ns.
const AFTER_QUEUE: u64 = 1_000_000;
/// The shortest wait for which the path changes ranks: this many ns, and this share of the step.
const TURN_NS: u64 = 20_000;
const TURN_SHARE: u64 = 2_000;

/// A time in which the computing thread of a rank does not compute.
#[derive(Clone, Debug, PartialEq)]
pub struct Pause {
    pub name: String,
    pub start: u64,
    /// The end of the wait. The rest is a transfer.
    pub ready: u64,
    pub end: u64,
    /// The rank that it waits for; none for rewards and other processes.
    pub on: Option<usize>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankWaits {
    pub name: String,
    /// The phases, in order and without overlap.
    pub phases: Vec<(String, Range<u64>)>,
    /// In order and without overlap.
    pub pauses: Vec<Pause>,
    /// Ns of waits by rank waited for.
    pub on: BTreeMap<usize, u64>,
    /// Ns of waits for rewards, environments and other processes.
    pub elsewhere: u64,
    pub transfers: u64,
}

/// A part of the critical path: `rank` from `time.start` to `time.end`, after which others waited for it in `until`.
#[derive(Clone, Debug, PartialEq)]
pub struct Stretch {
    pub rank: usize,
    pub time: Range<u64>,
    pub until: Option<String>,
}

#[derive(Debug)]
pub struct StepWaits {
    pub step: u64,
    /// The length of the step in ns.
    pub length: u64,
    pub ranks: Vec<RankWaits>,
    /// The critical path, in order.
    pub path: Vec<Stretch>,
}

impl RankWaits {
    /// Ns of waits for other ranks.
    pub fn waits(&self) -> u64 {
        self.on.values().sum()
    }
}

/// The times at which ranks entered and left a collective.
type Calls<'a> = HashMap<(&'a str, u64), Vec<(usize, Range<u64>)>>;

impl StepWaits {
    pub fn of(step: &TracedStep) -> Self {
        let mut calls: Calls = HashMap::new();
        for (rank, traced) in step.ranks.iter().enumerate() {
            for span in &traced.spans {
                if let Some((group, number)) = &span.call {
                    calls.entry((group, *number)).or_default().push((rank, span.start..span.end));
                }
            }
        }
        let ranks: Vec<RankWaits> =
            step.ranks.iter().enumerate().map(|(rank, traced)| of_rank(rank, traced, &calls)).collect();
        let end = |rank: &TracedRank| computing(rank).map(|span| span.end).max().unwrap_or(0);
        let length = step.ranks.iter().map(end).max().unwrap_or(0);
        let last = step.ranks.iter().position(|rank| end(rank) == length).unwrap_or(0);
        let path = path(&ranks, last, length);
        Self { step: step.step, length, ranks, path }
    }

    /// Ns of the path by phase, with those of transfers and waits in it, by the phases of the ranks on it. `other` is the
    /// time outside of phases.
    pub fn path_phases(&self) -> Vec<(String, u64, u64)> {
        let mut all: Vec<(String, u64, u64)> = Vec::new();
        let mut add = |name: &str, ns: u64, paused: u64| match all.iter_mut().find(|(known, ..)| known == name) {
            Some((_, sum, sum_paused)) => (*sum, *sum_paused) = (*sum + ns, *sum_paused + paused),
            None => all.push((name.to_string(), ns, paused)),
        };
        for Stretch { rank, time, .. } in &self.path {
            let RankWaits { phases, pauses, .. } = &self.ranks[*rank];
            let paused = |time: &Range<u64>| pauses.iter().map(|pause| overlap(time, &(pause.start..pause.end))).sum();
            let (mut inside, mut inside_paused) = (0, 0);
            for (name, phase) in phases {
                let common = phase.start.max(time.start)..phase.end.min(time.end);
                if common.start < common.end {
                    let (ns, waits) = (common.end - common.start, paused(&common));
                    (inside, inside_paused) = (inside + ns, inside_paused + waits);
                    add(name, ns, waits);
                }
            }
            let rest = time.end - time.start - inside;
            if rest > 0 {
                add("other", rest, paused(time) - inside_paused);
            }
        }
        all
    }

    /// Ns of the path on `rank`.
    pub fn path_of(&self, rank: usize) -> u64 {
        self.path.iter().filter(|part| part.rank == rank).map(|part| part.time.end - part.time.start).sum()
    }
}

pub fn overlap(a: &Range<u64>, b: &Range<u64>) -> u64 {
    a.end.min(b.end).saturating_sub(a.start.max(b.start))
}

fn computing(rank: &TracedRank) -> impl Iterator<Item = &TracedSpan> {
    rank.spans.iter().filter(|span| span.lane == COMPUTE)
}

fn of_rank(rank: usize, traced: &TracedRank, calls: &Calls) -> RankWaits {
    let mut waits = RankWaits { name: traced.name.clone(), ..RankWaits::default() };
    let all: Vec<&TracedSpan> = computing(traced).collect();
    let mut phases_end = 0;
    for (i, span) in all.iter().enumerate() {
        match span.category {
            // A phase within another one belongs to that.
            Category::Phase if span.start >= phases_end => {
                phases_end = span.end;
                waits.phases.push((span.name.clone(), span.start..span.end));
            }
            Category::Collective | Category::Wait => {
                let is_inside = waits.pauses.last().is_some_and(|last| span.start < last.end);
                if !is_inside {
                    waits.add(pause(rank, traced, span, all.get(i + 1).copied(), calls));
                }
            }
            _ => {}
        }
    }
    waits
}

impl RankWaits {
    fn add(&mut self, pause: Pause) {
        let wait = pause.ready - pause.start;
        match pause.on {
            Some(on) if wait > 0 => *self.on.entry(on).or_default() += wait,
            Some(_) => {}
            None => self.elsewhere += wait,
        }
        self.transfers += pause.end - pause.ready;
        self.pauses.push(pause);
    }
}

/// The wait in `span` of the computing thread; `next` is the span after it.
fn pause(rank: usize, traced: &TracedRank, span: &TracedSpan, next: Option<&TracedSpan>, calls: &Calls) -> Pause {
    let TracedSpan { name, start, end, call, .. } = span;
    let (start, end) = (*start, *end);
    let until =
        |name: &str, ready: u64, on| Pause { name: name.to_string(), start, ready: ready.clamp(start, end), end, on };
    if call.is_some() {
        let (on, ready) = last_entry(rank, span, calls);
        let name = call.as_ref().map_or(name.clone(), |(group, _)| format!("{name} over {group}"));
        return until(&name, ready, Some(on));
    }
    let lanes = traced.lanes.iter().filter(|(_, lane)| *lane == name).map(|(lane, _)| *lane).collect::<Vec<_>>();
    if !lanes.is_empty() {
        // The collective of the stream that ended the wait.
        let on_stream = |other: &&TracedSpan| {
            other.call.is_some() && lanes.contains(&other.lane) && other.start < end && other.end > start
        };
        let found = traced.spans.iter().filter(on_stream).max_by_key(|other| other.start);
        return found.map_or_else(
            || until(name, start, None),
            |found| {
                let (on, ready) = last_entry(rank, found, calls);
                until(&format!("{} on {name}", found.name), if on == rank { start } else { ready }, Some(on))
            },
        );
    }
    if let Some(on) = span.on {
        return until(name, end, Some(on));
    }
    // The first rank waits until the others have ended their work from a shared queue, and then enters a barrier.
    let barrier = next.filter(|next| next.call.is_some() && next.start <= end + AFTER_QUEUE && name == "queue");
    let entries = barrier.and_then(|next| entries_of(next, calls)).into_iter().flatten();
    let last = entries.filter(|(other, _)| *other != rank).max_by_key(|(_, time)| time.start);
    until(name, end, last.map(|(other, _)| *other))
}

fn entries_of<'a>(span: &'a TracedSpan, calls: &'a Calls) -> Option<&'a Vec<(usize, Range<u64>)>> {
    let (group, number) = span.call.as_ref()?;
    calls.get(&(group.as_str(), *number))
}

/// The rank that entered the collective of `span` last, and when. Ranks that entered after its end were not needed, as
/// in a broadcast.
fn last_entry(rank: usize, span: &TracedSpan, calls: &Calls) -> (usize, u64) {
    let needed = entries_of(span, calls).into_iter().flatten().filter(|(_, time)| time.start <= span.end);
    let last = needed.max_by_key(|(_, time)| time.start).map(|(other, time)| (*other, time.start));
    last.unwrap_or((rank, span.start))
}

/// The critical path until `end` on rank `last`.
fn path(ranks: &[RankWaits], last: usize, end: u64) -> Vec<Stretch> {
    let shortest = TURN_NS.max(end / TURN_SHARE);
    let (mut rank, mut time, mut until, mut path) = (last, end, None, Vec::new());
    loop {
        let turns = |pause: &&Pause| {
            pause.end <= time && pause.on.is_some_and(|on| on != rank) && pause.ready - pause.start >= shortest
        };
        let Some(turn) = ranks[rank].pauses.iter().rev().find(turns) else {
            path.push(Stretch { rank, time: 0..time, until });
            path.reverse();
            return path;
        };
        path.push(Stretch { rank, time: turn.ready..time, until });
        until = Some(turn.name.clone());
        (rank, time) = (turn.on.expect("it waits for a rank"), turn.ready);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(
        name: &str,
        category: Category,
        lane: u32,
        [start, end]: [u64; 2],
        call: Option<(&str, u64)>,
    ) -> TracedSpan {
        let call = call.map(|(group, number)| (group.to_string(), number));
        TracedSpan {
            name: name.to_string(),
            category,
            lane,
            start: start * 1_000_000,
            end: end * 1_000_000,
            call,
            on: None,
        }
    }

    fn rank(spans: Vec<TracedSpan>) -> TracedRank {
        let lanes = [(0, "compute".to_string()), (1, "stream zero".to_string())].into();
        TracedRank { name: String::new(), lanes, spans }
    }

    /// Rank 1 is slow in the rollout, and rank 0 in training, where it also waits for its stream.
    fn step() -> TracedStep {
        let sum = |name, times, number| span(name, Category::Collective, 0, times, Some(("all", number)));
        let zero = |times| span("gather", Category::Collective, 1, times, Some(("zero", 1)));
        let phases = |first: u64, last: u64| {
            [
                span("rollout", Category::Phase, 0, [0, first], None),
                span("train", Category::Phase, 0, [first, last], None),
            ]
        };
        let one = phases(60, 200).into_iter().chain([
            sum("sum", [20, 60], 1),
            span("stream zero", Category::Wait, 0, [100, 120], None),
            sum("sum", [200, 201], 2),
            zero([90, 119]),
        ]);
        let two =
            phases(61, 110).into_iter().chain([sum("sum", [58, 61], 1), sum("sum", [110, 201], 2), zero([115, 119])]);
        TracedStep { step: 3, ranks: vec![rank(one.collect()), rank(two.collect())] }
    }

    #[test]
    fn the_path_is_on_the_rank_for_which_the_others_wait() {
        let found = StepWaits::of(&step());
        let ms = |ns: u64| ns / 1_000_000;
        assert_eq!((found.step, ms(found.length)), (3, 201));
        let [one, two] = &found.ranks[..] else { panic!("two ranks") };
        // 38 ms in the first sum, and 15 ms for the gather of the stream.
        assert_eq!((ms(one.on[&1]), ms(two.on[&0]), one.elsewhere), (38 + 15, 90, 0));
        assert_eq!((ms(one.transfers), ms(two.transfers)), (2 + 5 + 1, 3 + 1));
        let path: Vec<_> = found.path.iter().map(|part| (part.rank, ms(part.time.start), ms(part.time.end))).collect();
        assert_eq!(path, [(1, 0, 115), (0, 115, 201)]);
        assert_eq!(found.path[0].until.as_deref(), Some("gather on stream zero"));
        assert_eq!((ms(found.path_of(0)), ms(found.path_of(1))), (86, 115));
        let phases: Vec<_> =
            found.path_phases().into_iter().map(|(name, ns, paused)| (name, ms(ns), ms(paused))).collect();
        let phase = |name: &str, ns, paused| (name.to_string(), ns, paused);
        assert_eq!(phases, [phase("rollout", 61, 3), phase("train", 49 + 85, 5), phase("other", 6, 6)]);
    }

    #[test]
    fn a_broadcast_waits_only_for_ranks_that_entered_before_it_ended() {
        let call = |times| span("broadcast", Category::Collective, 0, times, Some(("all", 1)));
        let ranks = vec![rank(vec![call([30, 31])]), rank(vec![call([5, 32])]), rank(vec![call([90, 91])])];
        let found = StepWaits::of(&TracedStep { step: 1, ranks });
        assert_eq!(found.ranks[1].on, BTreeMap::from([(0, 25_000_000)]));
    }
}
