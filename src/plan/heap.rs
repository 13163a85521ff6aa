//! A heap that only counts: the arena of `tensor::arena` replayed with names instead of memory.

use super::memory::Phase;
use crate::config::mesh::RoleName;
use crate::tensor::arena;
use std::collections::{BTreeMap, VecDeque};

/// What a buffer is for: a kind of tensor, and the role that it belongs to where it belongs to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct What {
    pub kind: Kind,
    pub role: Option<RoleName>,
}

/// Kinds of tensors, in the order in which tables show them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Weights,
    /// Rows of bf16 models that lie in f32 once more (embedding, norms).
    WeightRows,
    Gradients,
    Moments,
    Master,
    Gathered,
    RolloutWeights,
    KvCache,
    /// The stream between blocks: inputs of blocks and of their halves.
    Residual,
    /// Outputs of norms, and 1 / rms.
    Norms,
    /// q, k, v, o and their gradients.
    Attention,
    /// Blocks of keys and values that travel the ring, and what is merged.
    Ring,
    /// gate, up, act and their gradients.
    Mlp,
    /// Gathered rows of the last hidden state, and their gradient.
    Hidden,
    Logits,
    /// Operands of products, rearranged, and sums between two kernels.
    Scratch,
    /// What collectives between GPUs receive before it is added.
    Collectives,
    /// What decoding by graphs keeps: tables, and memory that graphs write at each replay.
    Graphs,
    /// What the library of fast products works in.
    Workspace,
    Experience,
    Files,
    /// Tables, thread stacks and what the device's libraries keep.
    Program,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::WeightRows => "weights, f32 rows",
            Self::Gradients => "gradients",
            Self::Moments => "adamw moments",
            Self::Master => "master weights",
            Self::Gathered => "gathered units",
            Self::RolloutWeights => "rollout weights",
            Self::KvCache => "kv cache",
            Self::Residual => "residual stream",
            Self::Norms => "norms",
            Self::Attention => "attention",
            Self::Ring => "ring",
            Self::Mlp => "mlp",
            Self::Hidden => "head rows",
            Self::Logits => "logits",
            Self::Scratch => "scratch",
            Self::Collectives => "collectives",
            Self::Graphs => "decode graphs",
            Self::Workspace => "product workspace",
            Self::Experience => "experience",
            Self::Files => "mapped files",
            Self::Program => "program",
        }
    }
}

impl std::fmt::Display for What {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.role {
            Some(role) => f.pad(&format!("{} {}", role.name(), self.kind.name())),
            None => f.pad(self.kind.name()),
        }
    }
}

/// Whose rule a heap follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// That of `tensor::arena`: classes of sizes, kept when given back and used again, with a bound on what is kept. The
    /// limit is the arena's.
    Arena { limit: usize },
    /// A device's: pages of 512 bytes, and what is given back is free for anything.
    Device,
}

/// A buffer that is in use.
#[derive(Debug)]
#[must_use = "a buffer that is not given back stays for ever"]
pub struct Held {
    what: What,
    /// Bytes that count as in use.
    bytes: usize,
    /// The run of memory that it lies in, where it comes from the arena.
    run: Option<Run>,
    /// A mapped file's, which the arena counts while it is in memory.
    is_mapped: bool,
}

/// Memory that the system gave: its size, and how much of it was ever written.
#[derive(Clone, Copy, Debug)]
struct Run {
    bytes: usize,
    touched: usize,
}

/// Bytes by what they are for.
pub type Bytes = BTreeMap<What, usize>;

/// The fullest moment of a phase.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Peak {
    pub bytes: usize,
    pub parts: Bytes,
}

/// The buffers of one rank.
#[derive(Debug)]
pub struct Heap {
    rule: Rule,
    live: Bytes,
    in_use: usize,
    /// What of it the arena counts, and its peak.
    arena: usize,
    arena_peak: usize,
    /// Bytes of runs: those in use, and those that are kept.
    held: usize,
    /// Bytes that the system backs, and the most there ever were.
    resident: usize,
    resident_peak: usize,
    /// By size, the longest unused first.
    kept: BTreeMap<usize, VecDeque<(u64, Run)>>,
    time: u64,
    phase: Phase,
    peaks: BTreeMap<Phase, Peak>,
    /// The phase is at its fullest so far, and its parts are not written down yet.
    rising: bool,
    /// Sizes of buffers that were given back while a graph is captured, which holds them.
    captured: Option<Vec<usize>>,
}

/// What a graph, or several, hold.
const GRAPHS: What = What { kind: Kind::Graphs, role: None };

const PAGE: usize = 4096;

impl Heap {
    pub fn new(rule: Rule) -> Self {
        Self {
            rule,
            live: Bytes::new(),
            in_use: 0,
            arena: 0,
            arena_peak: 0,
            held: 0,
            resident: 0,
            resident_peak: 0,
            kept: BTreeMap::new(),
            time: 0,
            phase: Phase::Load,
            peaks: BTreeMap::new(),
            rising: false,
            captured: None,
        }
    }

    /// What is given back from now on a graph holds, for whatever else it takes: as `device::cuda::pool` does.
    pub fn begin_capture(&mut self) {
        self.captured = Some(Vec::new());
    }

    /// What the graph holds.
    pub fn end_capture(&mut self) -> Held {
        let bytes = self.captured.take().into_iter().flatten().sum();
        Held { what: GRAPHS, bytes, run: None, is_mapped: false }
    }

    /// The smallest buffer of the graph that is large enough.
    fn pop_captured(&mut self, what: What, bytes: usize) -> Option<Held> {
        let captured = self.captured.as_mut()?;
        let fits = captured.iter().enumerate().filter(|(_, size)| **size >= bytes);
        let at = fits.min_by_key(|(_, size)| **size)?.0;
        let bytes = captured.swap_remove(at);
        self.rename(GRAPHS, what, bytes);
        Some(Held { what, bytes, run: None, is_mapped: false })
    }

    /// Bytes that stay in use, for something else.
    fn rename(&mut self, from: What, to: What, bytes: usize) {
        self.write_down();
        self.shrink_live(from, bytes);
        if bytes > 0 {
            *self.live.entry(to).or_default() += bytes;
        }
    }

    fn shrink_live(&mut self, what: What, bytes: usize) {
        if let Some(live) = self.live.get_mut(&what) {
            *live -= bytes;
            if *live == 0 {
                self.live.remove(&what);
            }
        }
    }

    /// What follows belongs to `phase`.
    pub fn enter(&mut self, phase: Phase) {
        self.write_down();
        self.phase = phase;
        self.note();
    }

    /// A tensor.
    pub fn take(&mut self, kind: Kind, role: Option<RoleName>, bytes: usize) -> Held {
        self.take_written(kind, role, bytes, bytes)
    }

    /// A tensor of which the first `written` bytes are ever written.
    pub fn take_written(&mut self, kind: Kind, role: Option<RoleName>, bytes: usize, written: usize) -> Held {
        let what = What { kind, role };
        if self.rule == Rule::Device {
            let bytes = bytes.next_multiple_of(512);
            return self.pop_captured(what, bytes).unwrap_or_else(|| self.add(what, bytes, None));
        }
        let class = arena::size_class(bytes);
        self.arena += class;
        self.arena_peak = self.arena_peak.max(self.arena);
        let touched = written.next_multiple_of(PAGE).min(class);
        let most = self.most();
        let run = self.pop(class).or_else(|| if self.held + class > most { self.lend(class) } else { None });
        let run = run.unwrap_or_else(|| {
            self.shrink(most.saturating_sub(class));
            self.held += class;
            Run { bytes: class, touched: 0 }
        });
        self.resident += touched.saturating_sub(run.touched);
        let run = Run { touched: run.touched.max(touched), ..run };
        self.add(what, class, Some(run))
    }

    /// The most that the arena holds.
    fn most(&self) -> usize {
        match self.rule {
            Rule::Arena { limit } => arena::bound(self.arena_peak, limit),
            Rule::Device => usize::MAX,
        }
    }

    /// Memory outside of the arena, which goes back to the system.
    pub fn take_plain(&mut self, kind: Kind, role: Option<RoleName>, bytes: usize) -> Held {
        self.resident += bytes;
        self.add(What { kind, role }, bytes, None)
    }

    /// A buffer that waits in a mapped file (on a device: in host memory) until it is given back there.
    pub fn take_mapped(&mut self, kind: Kind, role: Option<RoleName>, bytes: usize) -> Held {
        if self.rule == Rule::Device {
            return self.take(kind, role, bytes);
        }
        self.arena += bytes;
        self.arena_peak = self.arena_peak.max(self.arena);
        self.shrink(self.most().saturating_sub(bytes));
        self.held += bytes;
        Held { is_mapped: true, ..self.take_plain(kind, role, bytes) }
    }

    fn add(&mut self, what: What, bytes: usize, run: Option<Run>) -> Held {
        if bytes > 0 {
            *self.live.entry(what).or_default() += bytes;
        }
        self.in_use += bytes;
        self.resident_peak = self.resident_peak.max(self.resident);
        self.note();
        Held { what, bytes, run, is_mapped: false }
    }

    /// A kept run of exactly `bytes`, the one used last.
    fn pop(&mut self, bytes: usize) -> Option<Run> {
        self.kept.get_mut(&bytes)?.pop_back().map(|(_, run)| run)
    }

    /// A kept run that is not much larger. (The arena cuts it in two and joins it again; here it stays one.)
    fn lend(&mut self, bytes: usize) -> Option<Run> {
        let larger = self.kept.range(bytes + 1..=bytes + bytes / 4).find(|(_, list)| !list.is_empty());
        let size = larger.map(|(size, _)| *size)?;
        self.pop(size)
    }

    /// Gives kept runs back, the longest unused first, until at most `most` bytes are held.
    fn shrink(&mut self, most: usize) {
        while self.held > most {
            let oldest = self.kept.iter().filter_map(|(size, list)| Some((list.front()?.0, *size))).min();
            let Some((_, size)) = oldest else { break };
            if let Some((_, run)) = self.kept.get_mut(&size).and_then(VecDeque::pop_front) {
                self.held -= run.bytes;
                self.resident -= run.touched;
            }
        }
    }

    fn note(&mut self) {
        let peak = self.peaks.entry(self.phase).or_default();
        if self.in_use > peak.bytes {
            peak.bytes = self.in_use;
            self.rising = true;
        }
    }

    /// Parts are copied where the level falls again, not at each step upwards.
    fn write_down(&mut self) {
        if std::mem::take(&mut self.rising) {
            self.peaks.entry(self.phase).or_default().parts = self.live.clone();
        }
    }

    #[expect(clippy::needless_pass_by_value, reason = "what was given back cannot be used")]
    pub fn give(&mut self, held: Held) {
        self.write_down();
        let Held { what, bytes, run, is_mapped } = held;
        if is_mapped {
            self.arena -= bytes;
            self.held -= bytes;
        }
        if let Some(captured) = &mut self.captured {
            captured.push(bytes);
            return self.rename(what, GRAPHS, bytes);
        }
        self.shrink_live(what, bytes);
        self.in_use -= bytes;
        match run {
            Some(run) => {
                self.arena -= bytes;
                self.time += 1;
                self.kept.entry(run.bytes).or_default().push_back((self.time, run));
            }
            None if self.rule != Rule::Device => self.resident -= bytes,
            None => {}
        }
    }

    pub fn give_all(&mut self, all: impl IntoIterator<Item = Held>) {
        all.into_iter().for_each(|held| self.give(held));
    }

    pub fn in_use(&self) -> usize {
        self.in_use
    }

    /// The most that the arena counted at once.
    pub fn arena_peak(&self) -> usize {
        self.arena_peak
    }

    /// The most bytes that the system backed at once: those in use and those kept, as far as they were written.
    pub fn resident_peak(&self) -> usize {
        self.resident_peak
    }

    /// The fullest moment of each phase.
    pub fn into_peaks(mut self) -> BTreeMap<Phase, Peak> {
        self.write_down();
        self.peaks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn take(heap: &mut Heap, mib: usize) -> Held {
        heap.take(Kind::Mlp, None, mib * MIB)
    }

    #[test]
    fn a_heap_that_counts_holds_what_the_arena_holds() {
        // Sizes that take turns: what is kept of one does not stay beside the others beyond the arena's bound.
        let mut heap = Heap::new(Rule::Arena { limit: usize::MAX });
        for i in 0..200 {
            let all = [32 + i % 7, 64 + i % 5, 16].map(|mib| take(&mut heap, mib));
            heap.give_all(all);
        }
        assert_eq!(heap.in_use(), 0);
        let bound = arena::bound(heap.arena_peak(), usize::MAX);
        assert!((heap.arena_peak()..=bound).contains(&heap.resident_peak()), "{heap:?}");
    }

    #[test]
    fn a_phase_remembers_its_fullest_moment_by_kind() {
        let mut heap = Heap::new(Rule::Device);
        let weights = heap.take(Kind::Weights, Some(RoleName::Actor), 100 * 512);
        heap.enter(Phase::Train);
        let first = heap.take(Kind::Mlp, None, 512);
        heap.give(first);
        let all = [heap.take(Kind::Logits, None, 1024), heap.take(Kind::Logits, None, 1)];
        heap.give_all(all);
        heap.give(weights);
        let peaks = heap.into_peaks();
        assert_eq!((peaks[&Phase::Load].bytes, peaks[&Phase::Train].bytes), (51200, 51200 + 1536));
        let parts = &peaks[&Phase::Train].parts;
        assert_eq!(parts.len(), 2);
        assert_eq!(parts[&What { kind: Kind::Logits, role: None }], 1536);
    }
}
