//! A heap that only counts: a GPU's memory with names instead of bytes. It is handed out in pages of 512 bytes, and what is
//! given back is free for anything.

use crate::config::mesh::RoleName;
use std::collections::BTreeMap;

/// Parts of a run. Memory is counted in each; a step has all but the first and the last.
#[derive(Clone, Default, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    #[default]
    Load,
    Rollout,
    Score,
    Train,
    Checkpoint,
}

impl Phase {
    pub const ALL: [Self; 5] = [Self::Load, Self::Rollout, Self::Score, Self::Train, Self::Checkpoint];

    pub fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Rollout => "rollout",
            Self::Score => "score",
            Self::Train => "train",
            Self::Checkpoint => "checkpoint",
        }
    }
}

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
    Gradients,
    Moments,
    Master,
    Gathered,
    RolloutWeights,
    KvCache,
    /// All that forwards and backwards take on CPUs.
    Activations,
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
            Self::Gradients => "gradients",
            Self::Moments => "adamw moments",
            Self::Master => "master weights",
            Self::Gathered => "gathered units",
            Self::RolloutWeights => "rollout weights",
            Self::KvCache => "kv cache",
            Self::Activations => "activations",
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

/// A buffer that is in use.
#[derive(Debug)]
#[must_use = "a buffer that is not given back stays for ever"]
pub struct Held {
    what: What,
    bytes: usize,
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
#[derive(Debug, Default)]
pub struct Heap {
    live: Bytes,
    in_use: usize,
    phase: Phase,
    peaks: BTreeMap<Phase, Peak>,
    /// The phase is at its fullest so far, and its parts are not written down yet.
    rising: bool,
    /// Sizes of buffers that were given back while a graph is captured, which holds them.
    captured: Option<Vec<usize>>,
}

/// What a graph, or several, hold.
const GRAPHS: What = What { kind: Kind::Graphs, role: None };

impl Heap {
    /// What is given back from now on a graph holds, for whatever else it takes: as `device::cuda::pool` does.
    pub fn begin_capture(&mut self) {
        self.captured = Some(Vec::new());
    }

    /// What the graph holds.
    pub fn end_capture(&mut self) -> Held {
        let bytes = self.captured.take().into_iter().flatten().sum();
        Held { what: GRAPHS, bytes }
    }

    /// The smallest buffer of the graph that is large enough.
    fn pop_captured(&mut self, what: What, bytes: usize) -> Option<Held> {
        let captured = self.captured.as_mut()?;
        let fits = captured.iter().enumerate().filter(|(_, size)| **size >= bytes);
        let at = fits.min_by_key(|(_, size)| **size)?.0;
        let bytes = captured.swap_remove(at);
        self.rename(GRAPHS, what, bytes);
        Some(Held { what, bytes })
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
        let (what, bytes) = (What { kind, role }, bytes.next_multiple_of(512));
        self.pop_captured(what, bytes).unwrap_or_else(|| self.add(what, bytes))
    }

    /// Memory outside of tensors.
    pub fn take_plain(&mut self, kind: Kind, role: Option<RoleName>, bytes: usize) -> Held {
        self.add(What { kind, role }, bytes)
    }

    fn add(&mut self, what: What, bytes: usize) -> Held {
        if bytes > 0 {
            *self.live.entry(what).or_default() += bytes;
        }
        self.in_use += bytes;
        self.note();
        Held { what, bytes }
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
        let Held { what, bytes } = held;
        if let Some(captured) = &mut self.captured {
            captured.push(bytes);
            return self.rename(what, GRAPHS, bytes);
        }
        self.shrink_live(what, bytes);
        self.in_use -= bytes;
    }

    pub fn give_all(&mut self, all: impl IntoIterator<Item = Held>) {
        all.into_iter().for_each(|held| self.give(held));
    }

    pub fn in_use(&self) -> usize {
        self.in_use
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

    #[test]
    fn a_phase_remembers_its_fullest_moment_by_kind() {
        let mut heap = Heap::default();
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
