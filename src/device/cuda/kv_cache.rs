//! The KV cache of one layer, and the location of a paged batch's tokens in it.

use super::gpu::{Arg, gpu};
use super::key_segments::{self, RUN, Run};
use super::memory::{Memory, View, ViewMut};
use super::rope;
use super::shape::{THREADS, check_aligned, count, grid_of, kernel_of, to_i32};
use crate::device::cpu::attention::{AttentionShape, PAGE, PagedSequence};
use crate::dtype::{DType, KvDtype};
use bytemuck::Pod;
use std::cmp::Reverse;
use std::sync::{Arc, Mutex};

/// Values of one block: 256 threads, eight each.
const BLOCK_VALUES: usize = 2048;
/// Blocks of threads per multiprocessor that together read the cache fast enough, and the number of keys below which a
/// second kernel is not worth its launch.
const WHOLE_MIN: f64 = 1.2;
const SPLIT_KEYS_MIN: usize = 1024;
/// The operation that error messages about table entries name.
const TABLE: &str = "kv_cache";
/// Rows of a decoding tile in the kernels.
const DECODE_ROWS: usize = 16;

const _: () = assert!(PAGE == 32, "cuda/paged.cuh has pages of 32 tokens");

/// Keys and values of one layer in bf16: pages of `PAGE` tokens, [g][PAGE][e]. In 8 bits, `PAGE` powers follow each head,
/// as on a CPU (`device::cpu::kv_codes`).
#[derive(Debug)]
pub struct KvPages {
    pub(super) keys: Memory,
    pub(super) values: Memory,
    pub(super) pages: usize,
    pub(super) kv: KvDtype,
}

/// Rows of a sequence under one key/value head, computed together.
#[derive(Debug)]
struct Tile {
    keys: usize,
    rows: usize,
    /// Sequence and first row.
    words: [i32; 2],
}

/// The tiles of a launch: (sequence, first row) each.
#[derive(Clone, Debug)]
pub(super) struct Tiles {
    pub memory: Arc<Memory>,
    pub count: usize,
}

/// A part of a table of 32-bit numbers: from `start` on.
#[derive(Clone, Debug)]
pub(super) struct Words {
    pub memory: Arc<Memory>,
    pub start: usize,
}

impl Words {
    pub fn new<T: Pod>(values: &[T]) -> Self {
        Self { memory: Arc::new(Memory::from_values(values)), start: 0 }
    }

    pub fn arg(&self) -> Arg {
        let all = self.memory.view(DType::F32);
        all.part(self.start..all.len()).arg(DType::F32)
    }
}

/// The sequences of a forward, on the GPU; all its layers share one.
#[derive(Debug)]
pub struct SequenceTable {
    /// Past, tokens, first row, start in `blocks`.
    pub(super) sequences: Arc<Memory>,
    pub(super) blocks: Words,
    /// Page * PAGE + position in the page for each row; negative for a row that is not kept.
    pub(super) slots: Words,
    /// Sequences whose rows fit one tile of the decoding kernel.
    pub(super) decode: Tiles,
    pub(super) prefill: Tiles,
    /// The launches for `prefill`.
    pub(super) runs: Vec<Run>,
    /// The memory for scores between two kernels, if decoding is split.
    pub(super) split: Option<Split>,
    pub(super) rows: usize,
    pub(super) shape: AttentionShape,
}

impl KvPages {
    /// A cache of zeros.
    pub fn new(pages: usize, shape: &AttentionShape) -> Self {
        assert!(
            shape.head_dim.is_multiple_of(8),
            "kv_cache: the head dim must be a multiple of 8 (got {})",
            shape.head_dim
        );
        let bytes = pages * PAGE * shape.cached_bytes(DType::Bf16.bytes()) / 2;
        let (keys, values) = (Memory::zeros(bytes), Memory::zeros(bytes));
        Self { keys, values, pages, kv: shape.kv }
    }

    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Bytes of keys and values.
    pub fn bytes(&self) -> usize {
        self.keys.bytes() + self.values.bytes()
    }

    /// The length of a page of keys, or of values, in units of two bytes.
    pub fn page_len(&self) -> usize {
        self.keys.bytes() / self.pages.max(1) / DType::Bf16.bytes()
    }

    /// Pages of keys, one after the other; codes in pairs.
    pub fn keys(&self) -> View<'_> {
        self.keys.view(DType::Bf16)
    }

    pub fn values(&self) -> View<'_> {
        self.values.view(DType::Bf16)
    }
}

impl Tile {
    /// The sort order: the longest first, so that none begins when the others end.
    fn order(&self) -> (Reverse<usize>, [i32; 2]) {
        (Reverse(self.keys), self.words)
    }

    /// The first key that a row of the tile sees, and one past the last.
    fn sight(&self, group: usize, shape: &AttentionShape) -> (usize, usize) {
        let last = (self.words[1] as usize + self.rows - 1) / group;
        let first = self.keys - (last - self.words[1] as usize / group);
        (shape.window.map_or(0, |window| first.saturating_sub(window)), self.keys)
    }
}

impl Tiles {
    fn new(mut tiles: Vec<Tile>) -> Self {
        tiles.sort_by_key(Tile::order);
        let words: Vec<i32> = tiles.iter().flat_map(|tile| tile.words).collect();
        Self { memory: Arc::new(Memory::from_values(&words)), count: tiles.len() }
    }
}

/// Rows of a prefill tile in the kernels.
pub(super) fn prefill_rows(shape: &AttentionShape) -> usize {
    group_max(shape.head_dim)
}

/// The maximum number of query heads per key head: a tile holds the heads of a token.
pub fn group_max(head_dim: usize) -> usize {
    if head_dim <= 128 { 128 } else { 64 }
}

/// Whether to split decoding rows over more blocks of threads: rows are few and contexts long. Without the split, each
/// row and key/value head is one block. The bits are the same.
pub fn is_split_best(rows: usize, kv_heads: usize, longest: usize, multiprocessors: usize) -> bool {
    ((rows * kv_heads) as f64) < WHOLE_MIN * multiprocessors as f64 && longest >= SPLIT_KEYS_MIN
}

/// Whether a tile of the decoding kernel holds one token's rows.
pub(super) fn is_decoding(shape: &AttentionShape) -> bool {
    group_of(shape) <= DECODE_ROWS
}

/// Query heads of a key head.
pub(super) fn group_of(shape: &AttentionShape) -> usize {
    shape.heads / shape.kv_heads
}

impl SequenceTable {
    /// Creates the table. Rows of the batch are those of the sequences, one after the other.
    pub fn new(sequences: &[PagedSequence], shape: &AttentionShape) -> Self {
        let decoding = |s: &&PagedSequence| s.tokens > 0 && s.tokens * group_of(shape) <= DECODE_ROWS;
        let (rows, longest) = (sequences.iter().filter(decoding).count(), sequences.iter().filter(decoding));
        let longest = longest.map(|s| s.past + s.tokens).max().unwrap_or(0);
        let multiprocessors = gpu().properties().multiprocessors;
        Self::with(sequences, shape, is_split_best(rows, shape.kv_heads, longest, multiprocessors))
    }

    /// Same as `new`, with an explicit choice that is otherwise made by size. The few rows of a decoding sequence are
    /// computed by one kernel, with a block of threads for each sequence and key/value head. With `split`, two kernels
    /// compute scores cut by keys, then results cut by columns. That suits few sequences with long contexts. Results
    /// have the same bits either way.
    pub fn with(sequences: &[PagedSequence], shape: &AttentionShape, split: bool) -> Self {
        let group = group_of(shape);
        let (mut entries, mut blocks, mut slots) = (Vec::new(), Vec::new(), Vec::new());
        let (mut decode, mut prefill) = (Vec::new(), Vec::new());
        for (i, sequence) in sequences.iter().enumerate() {
            let PagedSequence { past, tokens, .. } = *sequence;
            let needed = (past + tokens).div_ceil(PAGE);
            entries.extend([past, tokens, slots.len(), blocks.len()].map(|n| to_i32(TABLE, n)));
            blocks.extend_from_slice(&sequence.blocks[..needed]);
            let slot = |at: usize| to_i32(TABLE, sequence.blocks[at / PAGE] as usize * PAGE + at % PAGE);
            slots.extend((past..past + tokens).map(slot));
            let rows = tokens * group;
            let (tiles, step) =
                if rows <= DECODE_ROWS { (&mut decode, DECODE_ROWS) } else { (&mut prefill, prefill_rows(shape)) };
            let tile = |start: usize| Tile {
                keys: past + ((start + step).min(rows) - 1) / group + 1,
                rows: rows.min(start + step) - start,
                words: [i, start].map(|n| to_i32(TABLE, n)),
            };
            tiles.extend((0..rows).step_by(step).map(tile));
        }
        let split = (split && !decode.is_empty()).then(|| {
            let longest = decode.iter().map(|tile| tile.keys).max().unwrap_or(0);
            let rows = decode.iter().map(|tile| tile.rows).max().unwrap_or(0);
            Split::new(decode.len(), rows, longest, shape)
        });
        prefill.sort_by_key(Tile::order);
        let sights: Vec<(usize, usize)> = prefill.iter().map(|tile| tile.sight(group, shape)).collect();
        Self {
            rows: slots.len(),
            sequences: Arc::new(Memory::from_values(&entries)),
            blocks: Words::new(&blocks),
            slots: Words::new(&slots),
            decode: Tiles::new(decode),
            prefill: Tiles::new(prefill),
            runs: key_segments::launches(&sights),
            split,
            shape: *shape,
        }
    }
}

/// Rotates q (t, h*e) in place like `rope::forward`, and stores the rows of k (t, g*e), rotated too, and of v (t, g*e)
/// after the cached tokens of their sequences (rows in sequence order). `positions` holds at least t u32, all below the
/// end of `angles`.
pub fn kv_append(
    cache: &mut KvPages,
    mut q: ViewMut,
    [k, v]: [View; 2],
    (positions, angles): (&Memory, &rope::Table),
    table: &SequenceTable,
) {
    const OP: &str = "kv_append";
    let AttentionShape { heads, kv_heads, head_dim: e, .. } = table.shape;
    let rows = table.rows;
    assert!(cache.kv == KvDtype::Model, "{OP}: the cache is in 8 bits");
    if rows == 0 {
        return;
    }
    let values = [q.arg(DType::Bf16), k.arg(DType::Bf16), v.arg(DType::Bf16)];
    check_aligned(OP, &values);
    let [cos, sin, factors] = angles.args();
    let tables = [table.slots.arg(), positions.arg(), cos, sin, factors];
    let sizes = [rows, heads, kv_heads, e / 2].map(|n| count(OP, n));
    let args = [&values[..], &[cache.keys.arg_mut(), cache.values.arg_mut()], &tables, &sizes].concat();
    let threads = rows * (heads + 2 * kv_heads).div_ceil(rope::HEADS) * (e / 16);
    gpu().launch(OP, grid_of(OP, threads), THREADS, 0, &args);
}

/// Threads of a head whose values are rounded, eight each: a power of two, so that a head is in one warp.
fn head_threads(op: &str, head_dim: usize) -> usize {
    assert!(
        head_dim.is_multiple_of(8) && (8..=256).contains(&head_dim),
        "{op}: the head dim must be a multiple of 8 up to 256 (got {head_dim})"
    );
    (head_dim / 8).next_power_of_two()
}

/// Stores the rows of k and v (t, g*e) in 8 bits after the cached tokens of their sequences. k has been rotated.
pub fn append_codes(cache: &mut KvPages, [k, v]: [View; 2], table: &SequenceTable) {
    const OP: &str = "kv_append_codes";
    let AttentionShape { kv_heads, head_dim: e, .. } = table.shape;
    let (rows, wide) = (table.rows, head_threads(OP, e));
    assert!(cache.kv == KvDtype::Fp8, "{OP}: the cache is in bf16");
    if rows == 0 {
        return;
    }
    let values = [k.arg(DType::Bf16), v.arg(DType::Bf16)];
    check_aligned(OP, &values);
    let to = [cache.keys.arg_mut(), cache.values.arg_mut(), table.slots.arg()];
    let args = [&values[..], &to, &[rows, kv_heads, e, wide].map(|n| count(OP, n))].concat();
    gpu().launch(OP, grid_of(OP, 2 * rows * kv_heads * wide), THREADS, 0, &args);
}

/// x = the nearest values in 8 bits, for heads of `head_dim` values. `append_codes` stores the same.
pub fn round(mut x: ViewMut, head_dim: usize) {
    const OP: &str = "kv_round";
    let (heads, wide) = (x.len() / head_dim, head_threads(OP, head_dim));
    if heads == 0 {
        return;
    }
    let values = x.arg(DType::Bf16);
    check_aligned(OP, &[values]);
    let [heads_arg, e, lanes] = [heads, head_dim, wide].map(|n| count(OP, n));
    gpu().launch(OP, grid_of(OP, heads * wide), THREADS, 0, &[values, heads_arg, e, lanes]);
}

/// Copies page `from` to page `to`: a shared prefix whose last page will be written by several sequences.
pub fn copy_page(cache: &mut KvPages, from: u32, to: u32) {
    let pages = cache.pages;
    let there = (from as usize) < pages && (to as usize) < pages && from != to;
    assert!(there, "kv_copy_pages: cannot copy page {from} to page {to} in a cache of {pages} pages");
    let (pair, len) = (Memory::from_values(&[from, to]), cache.page_len());
    let args = [cache.keys.arg_mut(), cache.values.arg_mut(), pair.arg(), len.into()];
    gpu().launch("kv_copy_pages", [1, len.div_ceil(BLOCK_VALUES), 1], 256, 0, &args);
}

/// Blocks of keys per stage, if decoding is split.
pub(super) const SPLIT_BLOCKS: usize = 4;

/// The kernels of a head dim and a dtype of keys and values.
pub(super) struct Kernels {
    pub decode: &'static str,
    pub prefill: &'static str,
    pub scores: &'static str,
    pub values: &'static str,
    /// Keys of a block of the softmax.
    pub keys: usize,
    /// Blocks of keys of a decoding stage.
    pub blocks: usize,
    /// Columns of the result per block of threads, if decoding is split.
    pub columns: usize,
}

pub(super) fn kernels(shape: &AttentionShape) -> Kernels {
    let head_dim = shape.head_dim;
    let [decode, prefill, scores, values] = match shape.kv {
        KvDtype::Model => [
            kernel_of!("paged_decode_", head_dim),
            kernel_of!("paged_prefill_", head_dim),
            kernel_of!("paged_scores_", head_dim),
            kernel_of!("paged_values_", head_dim),
        ],
        KvDtype::Fp8 => [
            kernel_of!("paged_decode_codes_", head_dim),
            kernel_of!("paged_prefill_codes_", head_dim),
            kernel_of!("paged_scores_codes_", head_dim),
            kernel_of!("paged_values_codes_", head_dim),
        ],
    };
    Kernels {
        decode,
        prefill,
        scores,
        values,
        keys: if head_dim <= 128 { 64 } else { 32 },
        blocks: if head_dim > 64 && head_dim <= 128 { 1 } else { 2 },
        columns: if head_dim == 80 { 16 } else { 32 },
    }
}

/// Scores of decoding tiles, between the kernel that makes them and the one that reads them.
#[derive(Debug)]
pub(super) struct Split {
    /// One launch at a time writes and reads them: scores, maxima, and results of runs.
    pub between: Mutex<[Memory; 3]>,
    pub rows: usize,
    /// Keys of a row, whole stages.
    pub stride: usize,
    pub stages: usize,
    /// The maximum number of runs per tile.
    pub runs: usize,
}

impl Split {
    /// Memory for tiles of up to `rows` rows and up to `longest` keys.
    pub fn new(tiles: usize, rows: usize, longest: usize, shape: &AttentionShape) -> Self {
        let stage = kernels(shape).keys * SPLIT_BLOCKS;
        // Keys before the window are left out, up to the start of a stage; the rows of a tile are up to 16 tokens.
        let seen = shape.window.map_or(longest, |window| longest.min(window.saturating_add(2 * stage)));
        let runs = longest.div_ceil(RUN).min(seen.div_ceil(RUN) + 1);
        let stages = seen.div_ceil(stage);
        let stride = stages * stage;
        let maxima = stride / (stage / SPLIT_BLOCKS) * 16;
        let tiles = tiles * shape.kv_heads;
        let floats = |each: usize| Memory::scratch(tiles * each * size_of::<f32>());
        let parts = if runs > 1 { key_segments::bytes(tiles * runs * rows, shape.head_dim) } else { 0 };
        let between = Mutex::new([floats(rows * stride), floats(maxima), Memory::scratch(parts)]);
        Self { between, rows, stride, stages, runs }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoding_is_split_while_its_blocks_leave_multiprocessors_idle() {
        // A100 and H200: one and a fifth of 108 and of 132.
        for (multiprocessors, most) in [(108, 129), (132, 158)] {
            assert!(
                is_split_best(most, 1, 1024, multiprocessors) && !is_split_best(most + 1, 1, 8192, multiprocessors)
            );
            assert!(is_split_best(most / 8, 8, 4096, multiprocessors) && !is_split_best(1, 8, 1023, multiprocessors));
        }
    }
}
