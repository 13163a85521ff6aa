//! Gradients of causal grouped-query attention over the spans of a table. Equations as in `ops/attention.rs`.
//!
//! A block of the kernel has some keys of a span and loops over all rows that attend to them. Blocks add their
//! contributions to dq in turn, in the order of keys, in f32. So the sum of a row has one order, in any order of the
//! blocks.

use super::attention::{SpanTable, cap, form};
use super::gpu::{Arg, gpu};
use super::key_tiles::{EIGHT, ROWS, keys};
use super::memory::{Memory, View, ViewMut};
use super::shape::{dim, kernel_of};
use crate::device::cpu::attention::AttentionShape;
use crate::dtype::DType;

/// Threads of a block, eight warps.
const BLOCK: usize = 256;

/// The shared memory that `backward` in `cuda/attention_backward.cuh` lays out.
fn shared_bytes(head_dim: usize) -> usize {
    let (keys, slots) = (keys(head_dim), if head_dim <= 128 { 2 } else { 1 });
    // A row in shared memory is 8 values longer than the head.
    let rows = (2 * keys + 2 * slots * ROWS) * (head_dim + 8) * 2;
    let (factors, statistics, work) = (keys * (ROWS + ROWS / 2) * 2, 4 * ROWS * 4, 64);
    rows + factors + statistics + work
}

/// delta (t, h) f32 = the sum of d_o o over each head; o (t, h*e) bf16 or f32, d_o (t, h*e) bf16.
pub fn delta(o: View, d_o: View, shape: &AttentionShape, mut delta: ViewMut) {
    const OP: &str = "attention delta";
    /// Threads of a block, and of a row and head.
    const THREADS: [usize; 2] = [128, 16];
    let kernel = match o.dtype() {
        DType::Bf16 => "attention_delta",
        DType::F32 => "attention_delta_f32",
    };
    let args =
        [o.arg(o.dtype()), d_o.arg(DType::Bf16), delta.arg(DType::F32), dim(OP, shape.head_dim), delta.len().into()];
    let [block, each] = THREADS;
    gpu().launch(kernel, [delta.len().div_ceil(block / each), 1, 1], block, 0, &args);
}

/// Gradients of the rows and keys of the table's spans; others are unchanged. lse and delta (t, h) are f32 over all
/// keys. dq (t, h*e), dk and dv (t', g*e), bf16 or f32. If `add` is set for q, or for k and v, their gradients are f32
/// and are added to. Keys that no row sees get 0.
///
/// # Panics
/// If results in bf16 are to be added to.
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
    let (window, scale) = (table.window(), Arg::F32(shape.scale));
    let inputs = [q, k, v, d_o, lse, delta, tiles, counters, sums, heads, group, window, scale, cap(shape)];
    let args = [inputs.as_slice(), &[dq, forms[0], dk, dv, forms[1]]].concat();
    let blocks = of.count * shape.kv_heads;
    gpu().launch(
        kernel_of!("attention_backward_", shape.head_dim),
        [blocks, 1, 1],
        BLOCK,
        shared_bytes(shape.head_dim),
        &args,
    );
}
