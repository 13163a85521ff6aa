//! A heap that only counts: the arena of `tensor::arena` replayed with names instead of memory.

use super::memory::Phase;
use crate::config::mesh::RoleName;
use std::collections::{BTreeMap, HashMap};

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
    /// Operands of products, rearranged.
    Scratch,
    Collectives,
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
            Self::Experience => "experience",
            Self::Files => "mapped files",
            Self::Program => "program",
        }
    }
}

pub fn role_name(role: RoleName) -> &'static str {
    match role {
        RoleName::Actor => "actor",
        RoleName::Critic => "critic",
        RoleName::Reference => "reference",
        RoleName::Reward => "reward",
    }
}

impl std::fmt::Display for What {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.role {
            Some(role) => f.pad(&format!("{} {}", role_name(role), self.kind.name())),
            None => f.pad(self.kind.name()),
        }
    }
}

/// How requests are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// Eighths to sixteenths of a power of two, as the arena does.
    Classes,
    /// Whole pages of 512 bytes.
    Pages,
}

impl Rounding {
    /// Bytes that a request takes.
    pub fn of(self, bytes: usize) -> usize {
        match self {
            Self::Classes => {
                let step = (bytes.max(512).next_power_of_two() / 16).max(64);
                bytes.max(64).next_multiple_of(step)
            }
            Self::Pages => bytes.next_multiple_of(512),
        }
    }
}

/// A buffer that is in use.
#[derive(Debug)]
#[must_use = "a buffer that is not given back stays for ever"]
pub struct Held {
    what: What,
    bytes: usize,
    recycled: bool,
}

/// Bytes by what they are for.
pub type Bytes = BTreeMap<What, usize>;

/// The buffers of one rank.
#[derive(Debug)]
pub struct Heap {
    rounding: Rounding,
    live: Bytes,
    in_use: usize,
    /// Bytes taken from the system: those in use, and those that wait for a request of their size.
    held: usize,
    held_peak: usize,
    free: HashMap<usize, usize>,
    phase: Phase,
    peaks: BTreeMap<Phase, Peak>,
    /// The phase is at its fullest so far, and its parts are not written down yet.
    rising: bool,
}

/// The fullest moment of a phase.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Peak {
    pub bytes: usize,
    pub parts: Bytes,
}

impl Heap {
    pub fn new(rounding: Rounding) -> Self {
        Self {
            rounding,
            live: Bytes::new(),
            in_use: 0,
            held: 0,
            held_peak: 0,
            free: HashMap::new(),
            phase: Phase::Load,
            peaks: BTreeMap::new(),
            rising: false,
        }
    }

    /// What follows belongs to `phase`.
    pub fn enter(&mut self, phase: Phase) {
        self.write_down();
        self.phase = phase;
        self.note();
    }

    /// A buffer of the arena: given back it waits for the next request of its size.
    pub fn take(&mut self, kind: Kind, role: Option<RoleName>, bytes: usize) -> Held {
        self.add(What { kind, role }, self.rounding.of(bytes), true)
    }

    /// Memory that goes back to the system.
    pub fn take_plain(&mut self, kind: Kind, role: Option<RoleName>, bytes: usize) -> Held {
        self.add(What { kind, role }, bytes, false)
    }

    fn add(&mut self, what: What, bytes: usize, recycled: bool) -> Held {
        *self.live.entry(what).or_default() += bytes;
        self.in_use += bytes;
        let waiting = self.free.entry(bytes).or_default();
        if recycled && *waiting > 0 {
            *waiting -= 1;
        } else {
            self.held += bytes;
            self.held_peak = self.held_peak.max(self.held);
        }
        self.note();
        Held { what, bytes, recycled }
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

    pub fn give(&mut self, held: Held) {
        self.write_down();
        let Held { what, bytes, recycled } = held;
        let live = self.live.get_mut(&what).expect("what was taken is live");
        *live -= bytes;
        if *live == 0 {
            self.live.remove(&what);
        }
        self.in_use -= bytes;
        // A device's heap joins neighbours; the arena keeps sizes apart.
        if recycled && self.rounding == Rounding::Classes {
            *self.free.entry(bytes).or_default() += 1;
        } else {
            self.held -= bytes;
        }
    }

    pub fn give_all(&mut self, all: impl IntoIterator<Item = Held>) {
        all.into_iter().for_each(|held| self.give(held));
    }

    pub fn phase(&self) -> Phase {
        self.phase
    }

    pub fn in_use(&self) -> usize {
        self.in_use
    }

    /// The most bytes that were ever taken from the system at once.
    pub fn held_peak(&self) -> usize {
        self.held_peak
    }

    /// The fullest moment of each phase.
    pub fn into_peaks(mut self) -> BTreeMap<Phase, Peak> {
        self.write_down();
        self.peaks
    }
}
