//! What decoding by graphs keeps on the GPU: tables at addresses that stay, which each step leaves as the next one needs them.
//!
//! A step is `begin`, the model's forward over `tokens`, `positions` and `sequences`, `draw`, `end`. Nothing of it depends on
//! the host: a graph of a step may run as often as one likes. Ranks that share the vocabulary draw for a share of the rows each,
//! and have the same tables: between `draw` and `end` they gather what was sampled (`sampled`). Over the bus go, a step, 16 bytes a row to the host (`fetch`),
//! and 4 bytes a row from it where a row comes to a new page or is ended by the host (`change`); 0 otherwise.

use super::gpu::gpu;
use super::key_segments;
use super::kv_cache::{SequenceTable, Split, Tiles, group_of, is_decoding, prefill_rows};
use super::memory::{Memory, View, ViewMut};
use super::readback::Late;
use super::sample::{self, Params, Rows, SAMPLED};
use super::shape::{dim, to_i32};
use crate::device::cpu::attention::{AttentionShape, PAGE};
use crate::device::cpu::sample::SampleParams;
use crate::device::null;
use crate::dtype::DType;
use bytemuck::{Pod, Zeroable};
use std::ops::Range;
use std::sync::Arc;

const OP: &str = "decode";
const THREADS: usize = 128;

/// A row between two steps, as in `cuda/decode.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct DecodeSlot {
    /// What its next draw is keyed by: `Rng::sample_counter` and `Rng::key`.
    pub counter: [u32; 4],
    pub key: [u32; 2],
    /// The token that is fed next, behind `past` cached ones.
    pub token: u32,
    pub past: u32,
    /// Tokens that may be drawn yet, and draws before which none of its stop tokens is drawn.
    pub left: u32,
    pub banned: u32,
    /// Its stop tokens among those of all rows: from, to behind the last.
    pub stops: [u32; 2],
    /// Where its pages begin among those of all rows.
    pub pages: u32,
    /// 1: nothing is done for it.
    pub ended: u32,
    /// The tokens that it has seen, each once, among those of all rows, where they are penalised; there is room behind them
    /// for all that it may draw.
    pub seen: [u32; 2],
}

impl DecodeSlot {
    /// A row that fills up a batch.
    pub fn idle() -> Self {
        Self { ended: 1, ..Self::default() }
    }
}

/// What a row drew in a step.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Draw {
    pub token: u32,
    pub logprob: f32,
    pub sample_logprob: f32,
    pub state: u32,
}

impl Draw {
    /// A value of `state`: the row goes on.
    pub const GOES_ON: u32 = 0;
    /// It has drawn a stop token, or its last.
    pub const ENDS: u32 = 1;
    /// It had ended before, and drew nothing.
    pub const IDLE: u32 = 2;
}

/// What the host changes of a row before a step, beside a new page's number: nothing.
pub const UNCHANGED: u32 = u32::MAX;
/// The row has ended, as only the host could see.
pub const ENDED: u32 = u32::MAX - 1;

/// Sizes of the tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    pub rows: usize,
    /// Pages of all rows.
    pub pages: usize,
    /// Stop tokens of all rows.
    pub stops: usize,
    /// Tokens that all rows may have seen, where they are penalised.
    pub seen: usize,
}

impl Capacity {
    pub fn holds(&self, other: &Self) -> bool {
        self.rows >= other.rows && self.pages >= other.pages && self.stops >= other.stops && self.seen >= other.seen
    }
}

/// The rows of a batch that decodes.
#[derive(Debug)]
pub struct DecodeState {
    room: Capacity,
    decode_slots: Memory,
    changes: Memory,
    pages: Arc<Memory>,
    tokens: Memory,
    positions: Memory,
    sequences: Arc<Memory>,
    slots: Arc<Memory>,
    /// (row, 0) of each.
    tiles: Arc<Memory>,
    rows: Rows,
    /// What ranks drew for their shares of the rows.
    sampled: Memory,
    draws: Memory,
    /// Pages of the cache.
    cache_pages: usize,
    /// For a plan.
    cached: Vec<usize>,
}

impl DecodeState {
    /// Of rows whose pages are among the first `cache_pages`.
    pub fn new(room: Capacity, cache_pages: usize) -> Self {
        let words = |each: usize| Memory::zeros(4 * each * room.rows);
        let tiles: Vec<[i32; 2]> = (0..room.rows).map(|row| [to_i32(OP, row), 0]).collect();
        Self {
            room,
            decode_slots: Memory::of(&vec![DecodeSlot::idle(); room.rows]),
            changes: Memory::of(&vec![UNCHANGED; room.rows]),
            pages: Arc::new(Memory::zeros(4 * room.pages)),
            tokens: words(1),
            positions: words(1),
            sequences: Arc::new(words(4)),
            slots: Arc::new(words(1)),
            tiles: Arc::new(Memory::of(&tiles)),
            rows: Rows::room(room.rows, room.stops, room.seen),
            sampled: words(SAMPLED),
            draws: words(4),
            cache_pages,
            cached: Vec::new(),
        }
    }

    pub fn room(&self) -> Capacity {
        self.room
    }

    /// Other rows: each with its parameters, their stop tokens (of one row each once), seen tokens and pages.
    pub fn fill(
        &mut self,
        decode_slots: &[DecodeSlot],
        params: &[SampleParams],
        stops: &[u32],
        seen: &[u32],
        pages: &[u32],
    ) {
        let needed = Capacity { rows: decode_slots.len(), pages: pages.len(), stops: stops.len(), seen: seen.len() };
        assert!(self.room.holds(&needed), "decode: room for {:?}, needs {needed:?}", self.room);
        assert_eq!(decode_slots.len(), params.len(), "decode: parameters for each row");
        let page_max = pages.iter().max().expect("decode: rows without a page");
        assert!((*page_max as usize) < self.cache_pages, "decode: page {page_max} of {}", self.cache_pages);
        let params: Vec<Params> = params.iter().map(Params::from).collect();
        if null::is_active() {
            self.cached = decode_slots.iter().map(|slot| slot.past as usize + 1).collect();
        }
        self.decode_slots.write(decode_slots);
        self.rows.params.write(&params);
        self.rows.banned.write(stops);
        self.rows.seen.write(seen);
        self.rows.of_seen.write(&decode_slots.iter().map(|slot| slot.seen).collect::<Vec<_>>());
        Arc::get_mut(&mut self.pages).expect("decode: no forward is being captured").write(pages);
    }

    /// For each row the page of the token that it is fed next, `UNCHANGED` or `ENDED`, for the next step only.
    pub fn change(&mut self, changes: &[u32]) {
        let page = |change: &u32| *change >= ENDED || (*change as usize) < self.cache_pages;
        assert!(changes.iter().all(page), "decode: a page outside the cache of {}", self.cache_pages);
        self.changes.write(changes);
    }

    /// For a plan: keys that each row sees.
    pub fn cached(&self) -> &[usize] {
        &self.cached
    }

    /// What rows are fed, u32 each.
    pub fn tokens(&self) -> &Memory {
        &self.tokens
    }

    /// Where they stand, u32 each.
    pub fn positions(&self) -> &Memory {
        &self.positions
    }

    /// The first `rows` rows as attention looks them up. With `longest` decoding is split, for contexts of up to as many
    /// tokens.
    pub fn sequences(&self, rows: usize, longest: Option<usize>, shape: &AttentionShape) -> SequenceTable {
        let tiles = |count| Tiles { memory: self.tiles.clone(), count };
        let (decode, prefill) = if is_decoding(shape) { (rows, 0) } else { (0, rows) };
        let group = group_of(shape);
        assert!(group <= prefill_rows(shape), "decode: {group} heads share a key/value head");
        // A graph is for all lengths.
        let longest_of_all = self.room.pages.min(self.cache_pages) * PAGE;
        SequenceTable {
            sequences: self.sequences.clone(),
            blocks: self.pages.clone(),
            slots: self.slots.clone(),
            decode: tiles(decode),
            prefill: tiles(prefill),
            runs: key_segments::launches(&vec![(0, longest_of_all); prefill]),
            split: longest.filter(|_| decode > 0).map(|longest| Split::new(decode, group, longest, shape)),
            rows,
            shape: *shape,
        }
    }

    /// Runs `step` with rows that are all idle, of which nothing stays.
    pub fn rehearse(&mut self, step: impl FnOnce(&mut Self)) {
        let decode_slots = self.decode_slots.clone();
        self.decode_slots.write(&vec![DecodeSlot::idle(); self.room.rows]);
        step(self);
        self.decode_slots.view_mut(DType::F32).copy_from(decode_slots.view(DType::F32));
    }

    /// Makes what a step reads of the first `rows` rows.
    pub fn begin(&mut self, rows: usize) {
        let args = [
            self.decode_slots.arg_mut(),
            self.changes.arg_mut(),
            self.pages.arg(),
            dim(OP, rows),
            self.tokens.arg_mut(),
            self.positions.arg_mut(),
            self.sequences.arg(),
            self.slots.arg(),
            self.rows.uniforms.arg_mut(),
            self.rows.of_banned.arg_mut(),
            self.rows.params.arg_mut(),
        ];
        gpu().launch("decode_begin", [rows.div_ceil(THREADS), 1, 1], THREADS, 0, &args);
    }

    /// Draws a token for each row of `share` from its row of `logits` (share, v), whose vocabulary has parts that end at `ends`
    /// (i32). `edits`: a row may have stop tokens that are banned yet, or penalised tokens.
    pub fn draw(&mut self, logits: View, share: Range<usize>, v: usize, ends: &Memory, edits: bool) {
        self.rows.edits = edits;
        null::note(null::SAMPLING, 0.0, (8 * share.len() * v) as f64);
        sample::share(logits, [v, v], ends, &self.rows, share, &mut self.sampled);
    }

    /// What was drawn: of each share, one behind the other, its tokens, log-probabilities and those of what was drawn from. As
    /// many words a row as `SAMPLED`.
    pub fn sampled(&mut self, rows: usize) -> ViewMut<'_> {
        self.sampled.view_mut(DType::F32).part(0..SAMPLED * rows)
    }

    /// Goes on to the next token of each row, where `ranks` drew for even shares of them.
    pub fn end(&mut self, rows: usize, ranks: usize) {
        let args = [
            self.decode_slots.arg_mut(),
            self.sampled.arg(),
            self.rows.banned.arg(),
            dim(OP, rows),
            dim(OP, ranks),
            self.draws.arg_mut(),
        ];
        gpu().launch("decode_end", [rows.div_ceil(THREADS), 1, 1], THREADS, 0, &args);
    }

    /// Behind `end`, where a row's tokens are penalised: it has seen what it drew.
    pub fn see(&mut self, rows: usize) {
        let args = [self.decode_slots.arg_mut(), self.rows.seen.arg_mut(), self.rows.of_seen.arg_mut()];
        gpu().launch("decode_seen", [rows, 1, 1], THREADS, 0, &args);
    }

    /// Begins to copy the `Draw`s of the first `rows` rows to the host.
    pub fn fetch(&self, rows: usize) -> Late {
        Late::of(self.draws.view(DType::F32).part(0..4 * rows))
    }
}
