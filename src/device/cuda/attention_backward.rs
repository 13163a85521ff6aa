//! Gradients of causal grouped-query attention over the spans of a table. Equations as in `ops/attention.rs`.
//!
//! A block of the kernel has some keys of a span and walks all rows that see them. What its keys contribute to dq it adds in
//! its turn, by the order of keys, in f32: so the sum of a row has one order, whatever order blocks run in.

use super::attention::{SpanTable, TABLE, check_len, form};
use super::gpu::gpu;
use super::memory::{Memory, View, ViewMut};
use super::shape::{dim, to_i32};
use crate::device::cpu::attention::{AttentionShape, Span};
use crate::dtype::DType;

/// Threads of a block, eight warps.
const BLOCK: usize = 256;
/// Rows of a step, which share a counter for each head.
const ROWS: usize = 64;
/// Rows that lie together where parts of dq are summed.
const EIGHT: usize = 8;

/// The keys of a table's spans, cut into tiles; and counters, one for all blocks and one for each `ROWS` of rows and head.
/// Each backward leaves the counters as it found them: 0.
#[derive(Debug)]
pub struct KeyTiles {
    tiles: Memory,
    counters: Memory,
    count: usize,
    /// Rows of the spans that are cut, by eights.
    eights: usize,
}

impl KeyTiles {
    pub(super) fn new(spans: &[Span], shape: &AttentionShape) -> Self {
        let step = keys(shape.head_dim);
        let mut sorted: Vec<&Span> = spans.iter().collect();
        // Heaviest first, so that the GPU ends evenly; tiles of a span side by side, as they share rows in the cache, and
        // ascending, as a tile waits for those before it alone.
        sorted.sort_by_key(|span| std::cmp::Reverse(span.tokens * span.keys));
        let (mut blocks, mut eights) = (0, 0);
        let mut words = Vec::new();
        for span in sorted {
            for at in (0..span.keys).step_by(step) {
                let past = i32::try_from(span.past as i64 - at as i64).expect("positions are counted in 32 bits");
                let [row, tokens, key_row] = [span.row, span.tokens, span.key_row + at].map(|n| to_i32(TABLE, n));
                words.extend([row, tokens, past, key_row]);
                words.extend([span.keys - at, at, blocks, eights].map(|n| to_i32(TABLE, n)));
            }
            // A tile that is alone waits for none, and has the whole sum.
            if span.keys > step {
                blocks += span.tokens.div_ceil(ROWS);
                eights += span.tokens.div_ceil(EIGHT);
            }
        }
        let count = words.len() / 8;
        let counters = Memory::zeros((1 + blocks * shape.heads) * 4);
        Self { tiles: Memory::of(&words), counters, count, eights }
    }
}

/// Keys of a tile.
fn keys(head_dim: usize) -> usize {
    if head_dim <= 128 { 128 } else { 64 }
}

fn kernel(head_dim: usize) -> &'static str {
    match head_dim {
        32 => "attention_backward_32",
        64 => "attention_backward_64",
        80 => "attention_backward_80",
        96 => "attention_backward_96",
        128 => "attention_backward_128",
        256 => "attention_backward_256",
        _ => panic!("attention backward: head dim {head_dim} has no kernel"),
    }
}

/// As `backward` in `cuda/attention_backward.cuh` lays it out.
fn shared_bytes(head_dim: usize) -> usize {
    let (keys, slots) = (keys(head_dim), if head_dim <= 128 { 2 } else { 1 });
    // A row in shared memory is 8 values longer than the head.
    let rows = (2 * keys + 2 * slots * ROWS) * (head_dim + 8) * 2;
    let (factors, statistics, work) = (keys * (ROWS + ROWS / 2) * 2, 4 * ROWS * 4, 64);
    rows + factors + statistics + work
}

/// delta (t, h) f32 = the sum of d_o o over each head; o (t, h*e) bf16 or f32, d_o (t, h*e) bf16.
///
/// # Panics
/// If the shapes do not fit together.
pub fn delta(o: View, d_o: View, shape: &AttentionShape, mut delta: ViewMut) {
    const OP: &str = "attention delta";
    /// Threads of a block, and of a row and head.
    const THREADS: [usize; 2] = [128, 16];
    check_len(OP, "o", o.len(), d_o.len());
    check_len(OP, "delta", delta.len() * shape.head_dim, d_o.len());
    kernel(shape.head_dim);
    let kernel = match o.dtype() {
        DType::Bf16 => "attention_delta",
        DType::F32 => "attention_delta_f32",
    };
    let args =
        [o.arg(o.dtype()), d_o.arg(DType::Bf16), delta.arg(DType::F32), dim(OP, shape.head_dim), delta.len().into()];
    let [block, each] = THREADS;
    gpu().launch(kernel, [delta.len().div_ceil(block / each), 1, 1], block, 0, &args);
}

/// Gradients of the rows and keys of the table's spans; others stay as they are. `slopes`: lse, delta (t, h) f32 over all
/// keys, and d_o. dq (t, h*e), dk and dv (t', g*e), bf16 or f32. Those of q or of k and v for which `add` says so are f32,
/// and what they hold is added to. Keys that no row sees get 0.
///
/// # Panics
/// If the shapes do not fit together.
pub fn backward(
    [q, k, v]: [View; 3],
    [lse, delta, d_o]: [View; 3],
    table: &SpanTable,
    add: [bool; 2],
    mut dq: ViewMut,
    [mut dk, mut dv]: [ViewMut; 2],
) {
    const OP: &str = "attention backward";
    let shape = &table.shape;
    let rows = table.check(OP, [q, k, v]);
    for (name, len, needed) in [
        ("d_o", d_o.len(), q.len()),
        ("lse", lse.len(), rows),
        ("delta", delta.len(), rows),
        ("dq", dq.len(), q.len()),
        ("dk", dk.len(), k.len()),
        ("dv", dv.len(), k.len()),
    ] {
        check_len(OP, name, len, needed);
    }
    let of = table.key_tiles();
    let forms = [form(OP, dq.dtype(), add[0]), form(OP, dk.dtype(), add[1])];
    let bytes = of.eights * EIGHT * shape.heads * shape.head_dim * 4;
    let mut sums = if bytes > 0 { Memory::scratch(bytes) } else { Memory::none() };
    let [q, k, v, d_o] = [q, k, v, d_o].map(|view| view.arg(DType::Bf16));
    let [lse, delta] = [lse, delta].map(|view| view.arg(DType::F32));
    let [heads, group] = [shape.heads, shape.heads / shape.kv_heads].map(|n| dim(OP, n));
    let (of_q, of_k) = (dq.dtype(), dk.dtype());
    let [tiles, counters, sums] = [of.tiles.arg(), of.counters.arg(), sums.arg_mut()];
    let [dq, dk, dv] = [dq.arg(of_q), dk.arg(of_k), dv.arg(of_k)];
    let inputs = [q, k, v, d_o, lse, delta, tiles, counters, sums, heads, group, table.window(), shape.scale.into()];
    let args = [inputs.as_slice(), &[dq, forms[0], dk, dv, forms[1]]].concat();
    let blocks = of.count * shape.kv_heads;
    gpu().launch(kernel(shape.head_dim), [blocks, 1, 1], BLOCK, shared_bytes(shape.head_dim), &args);
}
