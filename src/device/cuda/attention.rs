//! Causal grouped-query attention over packed rows, and over blocks of keys that travel around a ring.
//!
//! Packed: one span a sequence (`SpanTable::packed`). Ring: a table for each wave of spans. Equations as in
//! `ops/attention.rs`.

use super::gpu::{Arg, gpu};
use super::memory::{Memory, View, ViewMut};
use crate::config::model::DType;
use crate::device::cpu::attention::{AttentionShape, Span};
use std::ops::Range;

/// Threads of every block, four warps.
const BLOCK: usize = 128;
/// Rows and keys of the tiles of backward.
const SIDE: usize = 64;
/// Keys of a span, rows and positions stay below, so that sums of them fit in an i32.
const LENGTH_MAX: usize = 1 << 28;
/// The window that stands for none.
const NO_WINDOW: usize = 1 << 29;

/// Spans that share no row of q and no key, cut into tiles, on the GPU. Made once, for all layers of a shape.
#[derive(Debug)]
pub struct SpanTable {
    tiles: Memory,
    /// Where in `tiles` lie those of forward, of dq, and of dk and dv.
    forward: Range<usize>,
    queries: Range<usize>,
    keys: Range<usize>,
    shape: AttentionShape,
    /// One past the last row of q, and of k.
    rows: usize,
    key_rows: usize,
}

/// Rows of q and keys that they may see: as `Tile` in `cuda/attention.cuh`.
#[derive(Clone, Copy, Debug)]
struct Tile {
    row: usize,
    rows: usize,
    /// Position of the first row, counted from the first key: below 0 where keys begin behind it.
    past: i64,
    key_row: usize,
    keys: usize,
}

impl SpanTable {
    /// # Panics
    /// If the shape is none that the kernels know, or a span has no rows, no keys, or rows that see none of them.
    pub fn new(spans: &[Span], shape: &AttentionShape) -> Self {
        Self::of_block(spans, shape, 0)
    }

    /// The same, of a block of `keys` keys: those that are in no span get gradients, too, which are 0.
    ///
    /// # Panics
    /// As `new`.
    pub fn of_block(spans: &[Span], shape: &AttentionShape, keys: usize) -> Self {
        check_shape(shape);
        for span in spans {
            check_span(span, shape);
        }
        let all = [spans, &unseen(spans, keys)].concat();
        let groups = [
            sorted(cut_rows(spans, forward_rows(shape)), &|tile| seen_keys(tile, shape)),
            sorted(cut_rows(spans, SIDE), &|tile| seen_keys(tile, shape)),
            sorted(cut_keys(&all), &|tile| seeing_rows(tile, shape)),
        ];
        let [forward, queries, keys] = groups.each_ref().map(Vec::len);
        let words: Vec<i32> = groups.iter().flatten().flat_map(Tile::words).collect();
        Self {
            tiles: Memory::of(&words),
            forward: 0..forward,
            queries: forward..forward + queries,
            keys: forward + queries..forward + queries + keys,
            shape: *shape,
            rows: spans.iter().map(|span| span.row + span.tokens).max().unwrap_or(0),
            key_rows: all.iter().map(|span| span.key_row + span.keys).max().unwrap_or(0),
        }
    }

    /// One span a sequence; `cu_seqlens` = [0, end of sequence 0, ...].
    ///
    /// # Panics
    /// As `new`.
    pub fn packed(cu_seqlens: &[usize], shape: &AttentionShape) -> Self {
        let whole = |ends: &[usize]| {
            let (row, tokens) = (ends[0], ends[1] - ends[0]);
            Span { row, tokens, past: 0, key_row: row, keys: tokens }
        };
        let spans: Vec<Span> = cu_seqlens.windows(2).map(whole).filter(|span| span.tokens > 0).collect();
        Self::new(&spans, shape)
    }

    /// Panics where q, k, v are not of this table. The rows of q, times heads.
    fn check(&self, op: &str, [q, k, v]: [View; 3]) -> usize {
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        let [of_q, of_k] = [heads * head_dim, kv_heads * head_dim];
        for (name, view, width, rows) in
            [("q", q, of_q, self.rows), ("k", k, of_k, self.key_rows), ("v", v, of_k, self.key_rows)]
        {
            let fits = view.len().is_multiple_of(width) && view.len() >= rows * width;
            assert!(fits, "{op}: {name} of {} values, needs at least {rows} rows of {width}", view.len());
        }
        assert_eq!(k.len(), v.len(), "{op}: k and v of different lengths");
        q.len() / head_dim
    }

    /// What both kernels of backward read.
    fn inputs(&self, op: &str, [q, k, v]: [View; 3], [lse, delta, d_o]: [View; 3]) -> [Arg; 6] {
        let heads = self.check(op, [q, k, v]);
        for (name, len, needed) in
            [("d_o", d_o.len(), q.len()), ("lse", lse.len(), heads), ("delta", delta.len(), heads)]
        {
            check_len(op, name, len, needed);
        }
        let [q, k, v, d_o] = [q, k, v, d_o].map(|view| view.arg(DType::Bf16));
        [q, k, v, d_o, lse.arg(DType::F32), delta.arg(DType::F32)]
    }

    /// Starts `kernel` for each of `tiles` and each of `heads`.
    fn launch(
        &self,
        kernel: &'static str,
        tiles: &Range<usize>,
        heads: usize,
        rows: usize,
        inputs: &[Arg],
        outputs: &[Arg],
    ) {
        let shape = &self.shape;
        let window = shape.window.map_or(NO_WINDOW, |window| window.min(NO_WINDOW));
        let of_tiles = [tiles.start, shape.heads, shape.heads / shape.kv_heads, window].map(|x| Arg::I32(to_i32(x)));
        let args = [inputs, &[self.tiles.arg()], &of_tiles, &[shape.scale.into()], outputs].concat();
        // A row in shared memory is 8 values longer than the head; behind the rows lie lse and delta of 64 more.
        let shared = rows * (shape.head_dim + 8) * 2 + 2 * SIDE * 4;
        gpu().launch(kernel, [tiles.len() * heads, 1, 1], BLOCK, shared, &args);
    }
}

impl Tile {
    fn words(&self) -> [i32; 5] {
        let past = i32::try_from(self.past).expect("positions are counted in 32 bits");
        [to_i32(self.row), to_i32(self.rows), past, to_i32(self.key_row), to_i32(self.keys)]
    }
}

/// Rows of q that a block of forward works on.
fn forward_rows(shape: &AttentionShape) -> usize {
    if shape.head_dim <= 128 { 128 } else { 64 }
}

/// Keys of a block that forward walks in.
fn forward_keys(shape: &AttentionShape) -> usize {
    if shape.head_dim <= 128 { 64 } else { 32 }
}

fn cut_rows(spans: &[Span], rows: usize) -> Vec<Tile> {
    let cut = |span: &Span| {
        let Span { row, tokens, past, key_row, keys } = *span;
        (0..tokens).step_by(rows).map(move |at| Tile {
            row: row + at,
            rows: rows.min(tokens - at),
            past: (past + at) as i64,
            key_row,
            keys,
        })
    };
    spans.iter().flat_map(cut).collect()
}

/// What the spans leave of the keys 0..`keys`, as spans without rows.
fn unseen(spans: &[Span], keys: usize) -> Vec<Span> {
    let mut seen: Vec<(usize, usize)> = spans.iter().map(|span| (span.key_row, span.key_row + span.keys)).collect();
    seen.sort_unstable();
    seen.push((keys, keys));
    let mut from = 0;
    let mut left = Vec::new();
    for (start, end) in seen {
        if start > from {
            left.push(Span { row: 0, tokens: 0, past: 0, key_row: from, keys: start - from });
        }
        from = from.max(end);
    }
    left
}

/// All rows of a span with each of its blocks of keys, positions counted from the block's first key.
fn cut_keys(spans: &[Span]) -> Vec<Tile> {
    let cut = |span: &Span| {
        let Span { row, tokens, past, key_row, keys } = *span;
        (0..keys).step_by(SIDE).map(move |at| Tile {
            row,
            rows: tokens,
            past: past as i64 - at as i64,
            key_row: key_row + at,
            keys: SIDE.min(keys - at),
        })
    };
    spans.iter().flat_map(cut).collect()
}

/// Heaviest first, so that the GPU ends evenly; equal ones as they came.
fn sorted(mut tiles: Vec<Tile>, cost: &dyn Fn(&Tile) -> i64) -> Vec<Tile> {
    tiles.sort_by_key(|tile| -cost(tile));
    tiles
}

/// Keys between the first and the last that a row of the tile sees.
fn seen_keys(tile: &Tile, shape: &AttentionShape) -> i64 {
    let end = (tile.past + tile.rows as i64).min(tile.keys as i64);
    let first = shape.window.map_or(0, |window| (tile.past + 1 - window as i64).max(0));
    end - first
}

/// Rows between the first and the last that see a key of the tile.
fn seeing_rows(tile: &Tile, shape: &AttentionShape) -> i64 {
    let first = (-tile.past).max(0);
    let last = |window: usize| tile.keys as i64 - 1 + window as i64 - tile.past;
    shape.window.map_or(tile.rows as i64, |window| last(window).min(tile.rows as i64)) - first
}

fn to_i32(x: usize) -> i32 {
    i32::try_from(x).expect("rows and heads are counted in 32 bits")
}

fn check_shape(shape: &AttentionShape) {
    let AttentionShape { heads, kv_heads, head_dim, window, scale } = *shape;
    assert!(
        kv_heads > 0 && heads.is_multiple_of(kv_heads),
        "attention: {heads} heads do not divide over {kv_heads} key/value heads"
    );
    forward_kernel(head_dim);
    assert!(window != Some(0), "attention: a window of 0 keys sees nothing");
    assert!(scale > 0.0, "attention: a scale of {scale}, needs one above 0");
}

fn check_span(span: &Span, shape: &AttentionShape) {
    let small = [span.tokens, span.past, span.keys].iter().all(|&x| x < LENGTH_MAX);
    let last = (span.past + span.tokens).saturating_sub(1);
    let sees = span.tokens > 0 && span.keys > 0 && shape.visible(last).start < span.keys;
    assert!(small && sees, "attention: {span:?} has rows that see no key, or is too long");
}

/// Head dims with kernels for forward, backward and paged keys.
pub const HEAD_DIMS: [usize; 4] = [64, 80, 96, 128];

fn forward_kernel(head_dim: usize) -> &'static str {
    match head_dim {
        64 => "attention_forward_64",
        80 => "attention_forward_80",
        96 => "attention_forward_96",
        128 => "attention_forward_128",
        256 => "attention_forward_256",
        _ => panic!("attention: head dim {head_dim}, needs 64, 80, 96, 128 or 256"),
    }
}

/// Those of dq, and of dk and dv.
fn backward_kernels(head_dim: usize) -> [&'static str; 2] {
    match head_dim {
        64 => ["attention_backward_queries_64", "attention_backward_keys_64"],
        80 => ["attention_backward_queries_80", "attention_backward_keys_80"],
        96 => ["attention_backward_queries_96", "attention_backward_keys_96"],
        128 => ["attention_backward_queries_128", "attention_backward_keys_128"],
        _ => panic!("attention backward: head dim {head_dim}, needs 64, 80, 96 or 128"),
    }
}

fn check_len(op: &str, name: &str, len: usize, needed: usize) {
    assert_eq!(len, needed, "{op}: {name} has another number of values than needed");
}

/// How a kernel leaves its result: over what stood there, or joined with it.
fn form(op: &str, dtype: DType, joined: bool) -> Arg {
    Arg::I32(match (dtype, joined) {
        (DType::Bf16, false) => 0,
        (DType::F32, false) => 1,
        (DType::F32, true) => 2,
        (DType::Bf16, true) => panic!("{op}: results are joined in f32, not in bf16"),
    })
}

/// o = softmax(scale q k^T) v and lse, its natural log-sum-exp, of the rows of the table's spans; other rows stay as
/// they are. q (t, h*e), k and v (t', g*e) bf16; lse (t, h) f32; o (t, h*e) bf16 or f32. With `merge`, o is f32, and
/// (o, lse) are merged with the result over other keys that they hold (lse = -inf: over none).
///
/// # Panics
/// If the shapes do not fit together.
pub fn forward(q: View, k: View, v: View, table: &SpanTable, merge: bool, mut o: ViewMut, mut lse: ViewMut) {
    const OP: &str = "attention forward";
    let heads = table.check(OP, [q, k, v]);
    check_len(OP, "o", o.len(), q.len());
    check_len(OP, "lse", lse.len(), heads);
    let form = form(OP, o.dtype(), merge);
    let shape = &table.shape;
    let dtype = o.dtype();
    let inputs = [q, k, v].map(|view| view.arg(DType::Bf16));
    let outputs = [o.arg(dtype), lse.arg(DType::F32), form];
    let rows = forward_rows(shape) + 2 * forward_keys(shape);
    table.launch(forward_kernel(shape.head_dim), &table.forward, shape.heads, rows, &inputs, &outputs);
}

/// delta (t, h) f32 = the sum of d_o o over each head; o (t, h*e) bf16 or f32, d_o (t, h*e) bf16.
///
/// # Panics
/// If the shapes do not fit together.
pub fn delta(o: View, d_o: View, shape: &AttentionShape, mut delta: ViewMut) {
    const OP: &str = "attention delta";
    check_len(OP, "o", o.len(), d_o.len());
    check_len(OP, "delta", delta.len() * shape.head_dim, d_o.len());
    backward_kernels(shape.head_dim);
    let kernel = match o.dtype() {
        DType::Bf16 => "attention_delta",
        DType::F32 => "attention_delta_f32",
    };
    let args = [
        o.arg(o.dtype()),
        d_o.arg(DType::Bf16),
        delta.arg(DType::F32),
        Arg::I32(to_i32(shape.head_dim)),
        delta.len().into(),
    ];
    gpu().launch(kernel, [delta.len().div_ceil(BLOCK / 16), 1, 1], BLOCK, 0, &args);
}

/// Gradients of the rows and keys of the table's spans; others stay as they are. lse, delta (t, h) f32 are those over
/// all keys. dq (t, h*e), dk and dv (t', g*e), bf16 or f32.
///
/// # Panics
/// If the shapes do not fit together.
pub fn backward(qkv: [View; 3], slopes: [View; 3], table: &SpanTable, dq: ViewMut, dkv: [ViewMut; 2]) {
    backward_keys(qkv, slopes, table, false, dkv);
    backward_queries(qkv, slopes, table, false, dq);
}

/// dk and dv of `backward`. With `add` they are f32, and what they hold is added to.
///
/// # Panics
/// If the shapes do not fit together.
pub fn backward_keys(
    [q, k, v]: [View; 3],
    slopes: [View; 3],
    table: &SpanTable,
    add: bool,
    [mut dk, mut dv]: [ViewMut; 2],
) {
    const OP: &str = "attention backward of keys";
    let inputs = table.inputs(OP, [q, k, v], slopes);
    check_len(OP, "dk", dk.len(), k.len());
    check_len(OP, "dv", dv.len(), k.len());
    let (dtype, shape) = (dk.dtype(), &table.shape);
    let outputs = [dk.arg(dtype), dv.arg(dtype), form(OP, dtype, add)];
    let [_, kernel] = backward_kernels(shape.head_dim);
    table.launch(kernel, &table.keys, shape.kv_heads, 4 * SIDE, &inputs, &outputs);
}

/// dq of `backward`. With `add` it is f32, and what it holds is added to.
///
/// # Panics
/// If the shapes do not fit together.
pub fn backward_queries([q, k, v]: [View; 3], slopes: [View; 3], table: &SpanTable, add: bool, mut dq: ViewMut) {
    const OP: &str = "attention backward of queries";
    let inputs = table.inputs(OP, [q, k, v], slopes);
    check_len(OP, "dq", dq.len(), q.len());
    let (dtype, shape) = (dq.dtype(), &table.shape);
    let outputs = [dq.arg(dtype), form(OP, dtype, add)];
    let [kernel, _] = backward_kernels(shape.head_dim);
    table.launch(kernel, &table.queries, shape.heads, 4 * SIDE, &inputs, &outputs);
}
