//! The gated delta rule, token by token. Equations as in `ops/delta.rs`.
//!
//! A state on the GPU is [value head][column][key dim].

use super::column_sums;
use super::gpu::{Arg, gpu};
use super::memory::{Memory, View, ViewMut};
use super::shape::{THREADS, block, check_aligned, check_width, count, dim, grid_of};
use super::states::{StatePages, StateTable};
use crate::device::cpu::delta::DeltaShape;
use crate::dtype::DType::{Bf16, F32};

/// Key dims with kernels, and the most columns of a value head.
pub const KEY_DIMS: [usize; 3] = [32, 64, 128];
pub const VALUE_DIM_MAX: usize = 128;
/// The most value heads of a rank.
pub const HEADS_MAX: usize = 1024;

/// Columns of a block of the forward, of four threads each.
const COLUMNS: usize = 32;
const LANES: usize = 4;
/// Tokens whose inputs a block has at a time.
const CHUNK: usize = 16;
const WARPS_MAX: usize = VALUE_DIM_MAX * LANES / 32;
/// Tokens of a block that adds the slopes of gates.
const GATED: usize = 32;

/// The inputs of the rule: q, k, v bf16, decay and rate f32.
pub type Inputs<'a> = [View<'a>; 5];

fn kernel(forward: bool, key_dim: usize) -> &'static str {
    match (forward, key_dim) {
        (true, 32) => "delta_forward_32",
        (true, 64) => "delta_forward_64",
        (true, 128) => "delta_forward_128",
        (false, 32) => "delta_backward_32",
        (false, 64) => "delta_backward_64",
        (false, 128) => "delta_backward_128",
        _ => panic!("the delta rule: the key dim {key_dim} is not one of {KEY_DIMS:?}"),
    }
}

fn inputs(op: &str, [q, k, v, decay, rate]: Inputs, shape: &DeltaShape) -> Vec<Arg> {
    check_width(op, shape.value_dim);
    assert!(shape.value_dim <= VALUE_DIM_MAX, "{op}: a value head has at most {VALUE_DIM_MAX} columns");
    let [q, k, v] = [q, k, v].map(|x| x.arg(Bf16));
    check_aligned(op, &[q, k, v]);
    let sizes = [shape.key_heads, shape.value_heads, shape.value_dim].map(|n| dim(op, n));
    [&[q, k, v, decay.arg(F32), rate.arg(F32)][..], &sizes].concat()
}

/// o (t, value heads * value dim) bf16. With `pages`, states are read and kept there.
pub fn forward(x: Inputs, shape: &DeltaShape, table: &StateTable, pages: Option<StatePages>, mut o: ViewMut) {
    const OP: &str = "delta::forward";
    let of = inputs(OP, x, shape);
    let tables = [&[table.sequences.arg(), table.slots()][..], &StatePages::args(pages)].concat();
    let args = [&of[..], &tables, &[o.arg(Bf16)]].concat();
    let grid = [table.count, shape.value_heads, shape.value_dim.div_ceil(COLUMNS)];
    gpu().launch(kernel(true, shape.key_dim), grid, COLUMNS * LANES, 0, &args);
}

/// Tokens between two kept states of the backward, so that both kinds of states take about the same memory.
fn every(longest: usize) -> usize {
    longest.isqrt().next_power_of_two().max(CHUNK)
}

/// The shared memory that `Room` in `cuda/delta.cu` takes.
fn shared_bytes(key_dim: usize) -> usize {
    let (work, sums, inputs) = (4, 2 * WARPS_MAX * (2 * key_dim + 2), 2 * CHUNK * (key_dim + 1));
    (work + sums + inputs) * size_of::<f32>()
}

/// The gradients of whole sequences: of q, k and v bf16, of decay and rate f32.
pub fn backward(x: Inputs, shape: &DeltaShape, table: &StateTable, d_o: View, slopes: [ViewMut; 5]) {
    const OP: &str = "delta::backward";
    let DeltaShape { key_heads, value_heads, key_dim, value_dim } = *shape;
    let [mut dq, mut dk, mut dv, mut d_decay, mut d_rate] = slopes;
    let of = inputs(OP, x, shape);
    let every = every(table.longest);
    let marks = table.longest.div_ceil(every);
    let tasks = table.count * value_heads;
    // A multiprocessor has the registers of one block.
    let blocks = tasks.min(gpu().properties().multiprocessors);
    let mut scratch = Memory::scratch(blocks * (marks + every) * value_dim * key_dim * size_of::<f32>());
    let mut parts = [(); 2].map(|()| Memory::scratch(table.rows * value_heads * key_dim * size_of::<f32>()));
    let [of_q, of_k] = parts.each_mut().map(Memory::arg_mut);
    let sizes = [tasks, every, marks].map(|n| dim(OP, n));
    let slopes = [of_q, of_k, dv.arg(Bf16), d_decay.arg(F32), d_rate.arg(F32)];
    let args = [&of[..], &[table.sequences.arg()], &sizes, &[scratch.arg_mut(), d_o.arg(Bf16)], &slopes].concat();
    gpu().launch(kernel(false, key_dim), [blocks, 1, 1], LANES * value_dim, shared_bytes(key_dim), &args);
    let eights = key_heads * key_dim / 8;
    for (part, to) in [of_q, of_k].into_iter().zip([&mut dq, &mut dk]) {
        let sizes = [table.rows, eights, value_heads / key_heads, key_dim].map(|n| count(OP, n));
        let args = [&[part, to.arg(Bf16)][..], &sizes].concat();
        gpu().launch("delta_sum_heads", grid_of(OP, table.rows * eights), THREADS, 0, &args);
    }
}

/// decay and rate (t, heads) f32 from x and y (t, heads), A and d (heads), bf16.
pub fn gates(x: [View; 2], parameters: [View; 2], [mut decay, mut rate]: [ViewMut; 2]) {
    const OP: &str = "delta::gates";
    let (all, heads) = (decay.len(), parameters[0].len());
    let of = [x[0], x[1], parameters[0], parameters[1]].map(|x| x.arg(Bf16));
    let args = [&of[..], &[decay.arg(F32), rate.arg(F32), count(OP, all), count(OP, heads)]].concat();
    gpu().launch("delta_gates", grid_of(OP, all), THREADS, 0, &args);
}

/// dx and dy bf16 from the gradients of decay and rate f32. Those of A and d, f32, are added to, in an order that depends
/// on the number of tokens alone.
pub fn gates_backward(
    x: [View; 2],
    parameters: [View; 2],
    slopes: [View; 2],
    [mut dx, mut dy]: [ViewMut; 2],
    [d_log_a, d_bias]: [ViewMut; 2],
) {
    const OP: &str = "delta::gates_backward";
    let heads = parameters[0].len();
    assert!(heads <= HEADS_MAX, "{OP}: at most {HEADS_MAX} heads (got {heads})");
    let t = x[0].len() / heads;
    let blocks = t.div_ceil(GATED);
    let mut parts = [(); 2].map(|()| Memory::scratch(blocks * heads * size_of::<f32>()));
    let [of_a, of_bias] = parts.each_mut().map(Memory::arg_mut);
    let of = [x[0], x[1], parameters[0], parameters[1]].map(|x| x.arg(Bf16));
    let slopes = slopes.map(|slope| slope.arg(F32));
    let sizes = [t, heads, GATED].map(|n| count(OP, n));
    let args = [&of[..], &slopes, &[dx.arg(Bf16), dy.arg(Bf16), of_a, of_bias], &sizes].concat();
    gpu().launch("delta_gates_backward", [blocks, 1, 1], block(heads, HEADS_MAX), 0, &args);
    column_sums::add(OP, &parts[0], blocks, d_log_a);
    column_sums::add(OP, &parts[1], blocks, d_bias);
}
