//! Rows of activations and of embeddings: norms, rotations, rows that are fetched and summed.

use super::{Rows, Wide, bits, get, has_room, holds, holds_of, met, put};
use crate::{bf16, device, numbers};
use rlhf_hpc::device::cuda::rope::{self, Table};
use rlhf_hpc::device::cuda::{Arg, Memory, ScatterLists, copy, embedding, gpu, rmsnorm, value_head};
use rlhf_hpc::dtype::DType::{self, Bf16, F32};

/// The width of a model of 70 billion parameters, and rows of it beyond all bounds.
const WIDTH: usize = 8192;
const ROWS: usize = (1 << 32) / WIDTH + 5;
/// A head, of 2^32 values and some more.
const HEAD: usize = 128;
const HEADS: usize = (1 << 32) / HEAD + 37;

fn small(seed: u32, len: usize) -> Memory {
    Memory::of(&bf16(&numbers(seed, len)))
}

#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn far_groups_are_normed() {
    // (values of a group, groups, groups of a block)
    for (n, groups, each) in [(WIDTH, ROWS, 1), (HEAD, HEADS, 16)] {
        let tensors: [Wide; 3] = [(Bf16, n), (Bf16, n), (F32, 1)];
        holds("rmsnorm", &tensors, groups, each, |x, _| {
            let [x, y, rstd] = x else { unreachable!("three tensors") };
            let w = small(9, n);
            rmsnorm::forward(x.view(Bf16), w.view(Bf16), 1e-6, y.view_mut(Bf16), rstd.view_mut(F32));
        });
    }
}

/// As many heads of 256 values as have 2^32 threads.
#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn groups_are_normed_beyond_as_many_threads_as_32_bits_count() {
    const N: usize = 256;
    let tensors: [Wide; 3] = [(Bf16, N), (Bf16, N), (F32, 1)];
    let groups = (1 << 27) + 8;
    holds("rmsnorm of many heads", &tensors, groups, 8, |x, _| {
        let [x, y, rstd] = x else { unreachable!("three tensors") };
        let w = small(9, N);
        rmsnorm::forward(x.view(Bf16), w.view(Bf16), 1e-6, y.view_mut(Bf16), rstd.view_mut(F32));
    });
}

/// Few groups a block, as no op cuts so many: else a block would walk thousands.
#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn far_groups_are_walked_back() {
    for (kernel, n, groups, each) in [
        ("rmsnorm_backward_2", WIDTH, ROWS, 8),
        ("rmsnorm_backward_4", 2 * WIDTH, ROWS / 2 + 3, 8),
        ("rmsnorm_backward_narrow", HEAD, HEADS, 64),
    ] {
        let tensors: [Wide; 4] = [(Bf16, n), (F32, 1), (Bf16, n), (Bf16, n)];
        holds(kernel, &tensors, groups, each, |x, groups| {
            let [x, rstd, dy, dx] = x else { unreachable!("four tensors") };
            let (w, blocks) = (small(9, n), groups.len.div_ceil(each));
            let mut parts = Memory::scratch(4 * blocks * n);
            let (threads, shift) = if n == HEAD { (256, Some(Arg::U32(4))) } else { (512, None) };
            let mut args = vec![x.arg(), w.arg(), rstd.arg(), dy.arg(), dx.arg_mut(), parts.arg_mut()];
            args.extend([Arg::I32(n as i32), Arg::F32(1.0 / n as f32)]);
            args.extend(shift);
            args.extend([groups.len, each].map(|n| Arg::U32(n as u32)));
            gpu().launch(kernel, [blocks, 1, 1], threads, 0, &args);
        });
    }
}

/// A block has two rows of 64 heads.
#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn far_heads_are_turned() {
    let tensors: [Wide; 2] = [(Bf16, 60 * HEAD), (Bf16, 4 * HEAD)];
    let angles = numbers(5, 1000 * HEAD / 2);
    holds("rope", &tensors, (1 << 32) / (60 * HEAD) + 7, 2, |x, rows| {
        let [q, k] = x else { unreachable!("two tensors") };
        let positions: Vec<u32> = rows.numbers().map(|row| (row * 7 % 1000) as u32).collect();
        let (table, positions) = (Table::new(HEAD, &angles, &angles), Memory::of(&positions));
        rope::forward(q.view_mut(Bf16), Some(k.view_mut(Bf16)), rows.len, &positions, &table);
    });
}

#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn far_values_are_predicted_and_walked_back() {
    const EACH: usize = 16;
    let tensors: [Wide; 2] = [(Bf16, WIDTH), (F32, 1)];
    holds("value head", &tensors, ROWS, 8, |x, _| {
        let [h, values] = x else { unreachable!("two tensors") };
        value_head::forward(h.view(Bf16), small(9, WIDTH).view(Bf16), values.view_mut(F32));
    });
    let tensors: [Wide; 3] = [(Bf16, WIDTH), (F32, 1), (Bf16, WIDTH)];
    let blocks = |group: usize| (0..4).map(|y| y * ROWS.div_ceil(EACH) + group).collect::<Vec<_>>();
    holds_of("value head backward", &tensors, ROWS, EACH, blocks, |x, rows| {
        let [h, dvalues, dh] = x else { unreachable!("three tensors") };
        let (w, blocks) = (small(9, WIDTH), rows.len.div_ceil(EACH));
        let mut parts = Memory::scratch(4 * blocks * WIDTH);
        let mut args = vec![h.arg(), w.arg(), dvalues.arg(), dh.arg_mut(), parts.arg_mut()];
        args.extend([rows.len, WIDTH, EACH].map(|n| Arg::U32(n as u32)));
        gpu().launch("value_head_backward", [blocks, 4, 1], 256, 0, &args);
    });
}

/// Rows that meet bounds, and their places in a small tensor of them alone.
fn rows_met() -> (Vec<u32>, Vec<u32>) {
    let rows = met(ROWS, 1, WIDTH);
    (rows.iter().map(|row| *row as u32).collect(), (0..rows.len() as u32).collect())
}

/// Gives rows of `far` values; a small tensor of them alone.
fn put_rows(far: &mut Memory, dtype: DType, rows: &[u32]) -> Memory {
    let values = bits(dtype, &numbers(3, rows.len() * WIDTH));
    for (row, values) in rows.iter().zip(values.chunks_exact(WIDTH * dtype.bytes())) {
        put(far, dtype, *row as usize * WIDTH, values);
    }
    Memory::of(&values)
}

#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn far_rows_are_fetched() {
    let (_gpu, _one) = device();
    if !has_room(2 * ROWS * WIDTH) {
        return;
    }
    let (far_rows, near_rows) = rows_met();
    let mut far = Memory::scratch(2 * ROWS * WIDTH);
    let near = put_rows(&mut far, Bf16, &far_rows);
    let fetched = |x: &Memory, rows: &[u32], first: usize| {
        let mut y = Memory::scratch(2 * rows.len() * WIDTH);
        copy::gather(x.view(Bf16), WIDTH, &Memory::of(rows), y.view_mut(Bf16));
        let mut tokens = Memory::scratch(2 * rows.len() * WIDTH);
        let named: Vec<u32> = rows.iter().map(|row| row + first as u32).collect();
        embedding::forward(&Memory::of(&named), first, x.view(Bf16), WIDTH, tokens.view_mut(Bf16));
        [y, tokens].map(|y| y.read::<u16>(rows.len() * WIDTH))
    };
    assert_eq!(fetched(&far, &far_rows, 700), fetched(&near, &near_rows, 700));
}

/// Four blocks have a row.
#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn rows_are_fetched_to_far_places() {
    let tensors: [Wide; 1] = [(Bf16, WIDTH)];
    let blocks = |row: usize| (4 * row..4 * row + 4).collect::<Vec<_>>();
    let small = || small(4, 100 * WIDTH);
    let of_rows = |rows: Rows| Memory::of(&rows.numbers().map(|row| (row * 31 % 100) as u32).collect::<Vec<_>>());
    holds_of("gather", &tensors, ROWS, 1, blocks, |y, rows| {
        copy::gather(small().view(Bf16), WIDTH, &of_rows(rows), y[0].view_mut(Bf16));
    });
    holds_of("embedding", &tensors, ROWS, 1, blocks, |y, rows| {
        embedding::forward(&of_rows(rows), 0, small().view(Bf16), WIDTH, y[0].view_mut(Bf16));
    });
}

/// Several rows go to one, and rows that nobody looks at to a token of another part.
#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn far_rows_are_summed_into_far_rows() {
    let (_gpu, _one) = device();
    if !has_room((2 + 4 + 2) * ROWS * WIDTH) {
        return;
    }
    let (far_rows, near_rows) = rows_met();
    let near_keys: Vec<u32> = near_rows.iter().map(|i| (i + 1) % near_rows.len() as u32 / 2 * 2).collect();
    let far_keys: Vec<u32> = near_keys.iter().map(|i| far_rows[*i as usize]).collect();
    let mut keys = vec![u32::MAX; ROWS];
    far_rows.iter().zip(&far_keys).for_each(|(row, key)| keys[*row as usize] = *key);
    let (mut dy, mut dw, mut x) =
        (Memory::scratch(2 * ROWS * WIDTH), Memory::scratch(4 * ROWS * WIDTH), Memory::scratch(2 * ROWS * WIDTH));
    let near_dy = put_rows(&mut dy, Bf16, &far_rows);
    let (mut near_dw, mut near_x) = (put_rows(&mut dw, F32, &far_rows), put_rows(&mut x, Bf16, &far_rows));
    let lists = ScatterLists::of(&near_keys);
    embedding::backward(&ScatterLists::of(&keys), 0, dy.view(Bf16), WIDTH, dw.view_mut(F32));
    embedding::backward(&lists, 0, near_dy.view(Bf16), WIDTH, near_dw.view_mut(F32));
    copy::scatter(near_dy.view(Bf16), WIDTH, &ScatterLists::of(&far_keys), x.view_mut(Bf16));
    copy::scatter(near_dy.view(Bf16), WIDTH, &lists, near_x.view_mut(Bf16));
    for (i, row) in far_rows.iter().enumerate() {
        let (far, near) = (*row as usize * WIDTH, i * WIDTH);
        assert_eq!(get(dw.view(F32), far, WIDTH), get(near_dw.view(F32), near, WIDTH), "gradient of row {row}");
        assert_eq!(get(x.view(Bf16), far, WIDTH), get(near_x.view(Bf16), near, WIDTH), "row {row}");
    }
}

/// Columns of rows that lie far apart, as a tensor rank has them of a matrix.
#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn far_columns_are_copied() {
    for (each, width) in [(8, 2048), (1, 256)] {
        let tensors: [Wide; 2] = [(Bf16, WIDTH), (F32, WIDTH)];
        let per_row = width / each / 256;
        let blocks = |row: usize| (row * per_row..(row + 1) * per_row).collect::<Vec<_>>();
        holds_of("columns", &tensors, ROWS, 1, blocks, |x, rows| {
            let (from, to) = x.split_at_mut(1);
            let skip = if each == 8 { 16 } else { 17 };
            let len = rows.len * WIDTH;
            copy::columns(
                from[0].view(Bf16).part(skip..len),
                WIDTH,
                to[0].view_mut(F32).part(skip..len),
                WIDTH,
                rows.len,
                width,
            );
        });
    }
}
