//! State of graph decoding on the GPU: tables at fixed addresses. Each step leaves them as the next one needs them.
//!
//! A step is `begin`, the model's forward over `tokens`, `positions` and `sequences`, `draw`, `end`. Nothing in it
//! depends on the host, so a graph of a step may run any number of times. If ranks share the vocabulary, each samples
//! for a share of the rows. All have the same tables: between `draw` and `end` they gather the sampled tokens
//! (`sampled`). Each step copies 16 bytes per row to the host (`fetch`). It copies 4 bytes per row and cache group from
//! the host if a row reaches a new page or the host ends it (`change`), otherwise none.

use super::gpu::gpu;
use super::key_segments;
use super::kv_cache::{SequenceTable, Split, Tiles, Words, group_of, is_decoding, prefill_rows};
use super::memory::{Memory, View, ViewMut};
use super::readback::Late;
use super::sample::{self, Params, Rows, SAMPLED};
use super::shape::{dim, to_i32};
use super::states::StateTable;
use crate::device::cpu::attention::AttentionShape;
use crate::device::cpu::sample::SampleParams;
use crate::device::null;
use crate::dtype::DType;
use bytemuck::{Pod, Zeroable};
use std::ops::Range;
use std::sync::Arc;

const OP: &str = "decode";
const THREADS: usize = 128;

/// A row between two steps, the same as in `cuda/decode.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct DecodeSlot {
    /// The key of its next sample: `Rng::sample_counter` and `Rng::key`.
    pub counter: [u32; 4],
    pub key: [u32; 2],
    /// The token that is fed next, after `past` cached tokens.
    pub token: u32,
    pub past: u32,
    /// The number of tokens that may still be sampled, and the number for which its stop tokens are still banned.
    pub left: u32,
    pub banned: u32,
    /// The range of its stop tokens in the list of all rows (start, end).
    pub stops: [u32; 2],
    /// The start of its pages in the list of all rows.
    pub pages: u32,
    /// 1 if the row has ended, so nothing is done for it.
    pub ended: u32,
    /// The range of its seen tokens, each once, in the list of all rows, if they are penalized. After them is room for
    /// all tokens that it may sample.
    pub seen: [u32; 2],
}

impl DecodeSlot {
    /// A row that pads a batch.
    pub fn idle() -> Self {
        Self { ended: 1, ..Self::default() }
    }
}

/// The result of a row in a step.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Draw {
    pub token: u32,
    pub logprob: f32,
    pub sample_logprob: f32,
    pub state: u32,
}

impl Draw {
    /// A value of `state`: the row continues.
    pub const GOES_ON: u32 = 0;
    /// A value of `state`: the row has sampled a stop token or its last token.
    pub const ENDS: u32 = 1;
    /// A value of `state`: the row had ended before and sampled nothing.
    pub const IDLE: u32 = 2;
}

/// The value for a row that the host does not change before a step. Otherwise the value is the number of a new page.
pub const UNCHANGED: u32 = u32::MAX;
/// The value for a row that the host ends.
pub const ENDED: u32 = u32::MAX - 1;

/// Sizes of the tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    pub rows: usize,
    /// Pages of all rows, in each cache group.
    pub pages: usize,
    /// Stop tokens of all rows.
    pub stops: usize,
    /// Tokens that all rows may have seen, if they are penalized.
    pub seen: usize,
}

impl Capacity {
    pub fn holds(&self, other: &Self) -> bool {
        self.rows >= other.rows && self.pages >= other.pages && self.stops >= other.stops && self.seen >= other.seen
    }
}

/// The rows of a decoding batch.
#[derive(Debug)]
pub struct DecodeState {
    room: Capacity,
    decode_slots: Memory,
    /// (rows, groups)
    changes: Memory,
    /// (groups, pages)
    pages: Arc<Memory>,
    tokens: Memory,
    positions: Memory,
    sequences: Arc<Memory>,
    /// (groups, rows)
    slots: Arc<Memory>,
    /// (row, 0) of each.
    tiles: Arc<Memory>,
    rows: Rows,
    /// The samples of all ranks for their shares of the rows.
    sampled: Memory,
    draws: Memory,
    /// Pages of the cache, for each cache group.
    cache_pages: Vec<usize>,
    /// Tokens of the longest sequence.
    longest: usize,
    /// Cached tokens of each row, for a plan.
    cached: Vec<usize>,
}

impl DecodeState {
    /// State for rows of up to `longest` tokens, whose pages in each cache group are among the first `cache_pages`.
    pub fn new(room: Capacity, cache_pages: Vec<usize>, longest: usize) -> Self {
        let groups = cache_pages.len();
        let words = |each: usize| Memory::zeros(4 * each * room.rows);
        let tiles: Vec<[i32; 2]> = (0..room.rows).map(|row| [to_i32(OP, row), 0]).collect();
        Self {
            room,
            decode_slots: Memory::from_values(&vec![DecodeSlot::idle(); room.rows]),
            changes: Memory::from_values(&vec![UNCHANGED; room.rows * groups]),
            pages: Arc::new(Memory::zeros(4 * room.pages * groups)),
            tokens: words(1),
            positions: words(1),
            sequences: Arc::new(words(4)),
            slots: Arc::new(words(groups)),
            tiles: Arc::new(Memory::from_values(&tiles)),
            rows: Rows::room(room.rows, room.stops, room.seen),
            sampled: words(SAMPLED),
            draws: words(4),
            cache_pages,
            longest,
            cached: Vec::new(),
        }
    }

    pub fn room(&self) -> Capacity {
        self.room
    }

    /// Replaces the rows: their slots and parameters, and the lists of stop tokens (unique within a row), seen tokens
    /// and, for each cache group, pages.
    pub fn fill(
        &mut self,
        decode_slots: &[DecodeSlot],
        params: &[SampleParams],
        stops: &[u32],
        seen: &[u32],
        pages: &[Vec<u32>],
    ) {
        let most = pages.iter().map(Vec::len).max().unwrap_or(0);
        let needed = Capacity { rows: decode_slots.len(), pages: most, stops: stops.len(), seen: seen.len() };
        assert!(self.room.holds(&needed), "decode: capacity {:?} is less than {needed:?}", self.room);
        assert_eq!(decode_slots.len(), params.len(), "decode: each row needs parameters");
        let mut all = Vec::new();
        for (group, (pages, cached)) in pages.iter().zip(&self.cache_pages).enumerate() {
            let page_max = pages.iter().max().expect("decode: at least one page");
            assert!((*page_max as usize) < *cached, "decode: page {page_max} exceeds {cached}");
            all.resize(group * self.room.pages, 0);
            all.extend_from_slice(pages);
        }
        let params: Vec<Params> = params.iter().map(Params::from).collect();
        if null::is_active() {
            self.cached = decode_slots.iter().map(|slot| slot.past as usize + 1).collect();
        }
        self.decode_slots.write(decode_slots);
        self.rows.params.write(&params);
        self.rows.banned.write(stops);
        self.rows.seen.write(seen);
        self.rows.of_seen.write(&decode_slots.iter().map(|slot| slot.seen).collect::<Vec<_>>());
        Arc::get_mut(&mut self.pages).expect("decode: no forward is being captured").write(&all);
    }

    /// Sets for each row and cache group the page of its next token or `UNCHANGED`, for the next step only. `ENDED` in
    /// the first group ends a row.
    pub fn change(&mut self, changes: &[u32]) {
        let exists = |(change, pages): (&u32, &usize)| *change >= ENDED || (*change as usize) < *pages;
        let all = changes.iter().zip(self.cache_pages.iter().cycle()).all(exists);
        assert!(all, "decode: a page is outside the cache of {:?}", self.cache_pages);
        self.changes.write(changes);
    }

    /// The keys that each row sees, for a plan.
    pub fn cached(&self) -> &[usize] {
        &self.cached
    }

    /// The tokens that rows are fed, u32 each.
    pub fn tokens(&self) -> &Memory {
        &self.tokens
    }

    /// The positions of those tokens, u32 each.
    pub fn positions(&self) -> &Memory {
        &self.positions
    }

    /// The first `rows` rows, in the form in which attention reads them in a cache group. With `longest`, decoding is
    /// split for contexts of up to that many tokens.
    pub fn sequences(
        &self,
        cache_group: usize,
        rows: usize,
        longest: Option<usize>,
        shape: &AttentionShape,
    ) -> SequenceTable {
        let part = |memory: &Arc<Memory>, each| Words { memory: memory.clone(), start: cache_group * each };
        let tiles = |count| Tiles { memory: self.tiles.clone(), count };
        let (decode, prefill) = if is_decoding(shape) { (rows, 0) } else { (0, rows) };
        let group = group_of(shape);
        assert!(group <= prefill_rows(shape), "decode: too many heads ({group}) share a key/value head");
        SequenceTable {
            sequences: self.sequences.clone(),
            blocks: part(&self.pages, self.room.pages),
            slots: part(&self.slots, self.room.rows),
            decode: tiles(decode),
            prefill: tiles(prefill),
            // A graph must support all lengths.
            runs: key_segments::launches(&vec![(0, self.longest); prefill]),
            split: longest.filter(|_| decode > 0).map(|longest| Split::new(decode, group, longest, shape)),
            rows,
            shape: *shape,
        }
    }

    /// The first `rows` rows, in the form in which layers with states read them in a cache group.
    pub fn states(&self, cache_group: usize, rows: usize) -> StateTable {
        let slots = Words { memory: self.slots.clone(), start: cache_group * self.room.rows };
        StateTable::on_gpu(self.sequences.clone(), slots, rows)
    }

    /// Runs `step` with only idle rows, without a lasting effect on the state.
    pub fn rehearse(&mut self, step: impl FnOnce(&mut Self)) {
        let decode_slots = self.decode_slots.clone();
        self.decode_slots.write(&vec![DecodeSlot::idle(); self.room.rows]);
        step(self);
        self.decode_slots.view_mut(DType::F32).copy_from(decode_slots.view(DType::F32));
    }

    /// Prepares the inputs of a step for the first `rows` rows.
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
            dim(OP, self.cache_pages.len()),
            dim(OP, self.room.pages),
            dim(OP, self.room.rows),
        ];
        gpu().launch("decode_begin", [rows.div_ceil(THREADS), 1, 1], THREADS, 0, &args);
    }

    /// Samples a token for each row of `share` from its row of `logits` (share, v), whose vocabulary has parts that end
    /// at `ends` (i32). `edits`: a row may have stop tokens that are still banned, or penalized tokens.
    pub fn draw(&mut self, logits: View, share: Range<usize>, v: usize, ends: &Memory, edits: bool) {
        self.rows.edits = edits;
        null::note(null::SAMPLING, 0.0, (8 * share.len() * v) as f64);
        sample::share(logits, [v, v], ends, &self.rows, share, &mut self.sampled);
    }

    /// The sampled values, share after share: tokens, log-probabilities, and log-probabilities in the filtered
    /// distribution. Each row has `SAMPLED` words.
    pub fn sampled(&mut self, rows: usize) -> ViewMut<'_> {
        self.sampled.view_mut(DType::F32).part(0..SAMPLED * rows)
    }

    /// Advances each row to its next token, if `ranks` sampled for even shares of the rows.
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

    /// Adds the sampled tokens to the seen ones, after `end`, if a row's tokens are penalized.
    pub fn see(&mut self, rows: usize) {
        let args = [self.decode_slots.arg_mut(), self.rows.seen.arg_mut(), self.rows.of_seen.arg_mut()];
        gpu().launch("decode_seen", [rows, 1, 1], THREADS, 0, &args);
    }

    /// Begins to copy the `Draw`s of the first `rows` rows to the host.
    pub fn fetch(&self, rows: usize) -> Late {
        Late::start(self.draws.view(DType::F32).part(0..4 * rows))
    }
}
