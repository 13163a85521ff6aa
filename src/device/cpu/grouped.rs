//! Products of groups of rows, each with a matrix of its own: the experts of a mixture. The rows of group e are
//! `ends[e]..ends[e + 1]`. All groups are computed in one call of the threads, which divide tasks, not groups.
//!
//! The bits of a group are those of `matmul` and `matmul_weight` on its rows: the tiles and the order of chains are the
//! same.

use super::matmul::{
    Addend, Cut, Panels, Product, READ_ROWS, SERIAL_BELOW, row_words, row_words_scratch, run_all, words_of,
};
use super::matmul_weight::{Room, WeightProduct};
use super::microkernel::{Arithmetic, LANES, ROWS};
use super::pool::{Shares, deal, pool, share};
use super::scratch::{self, with_scratch};
use crate::device::null;
use crate::device::simd::{Level, level};
use std::ops::Range;

/// The groups that have rows, with their rows.
fn occupied(ends: &[usize]) -> impl Iterator<Item = (usize, Range<usize>)> {
    ends.windows(2).map(|ends| ends[0]..ends[1]).enumerate().filter(|(_, rows)| !rows.is_empty())
}

/// The dims of the matrices of all groups.
fn dims(w: &[Panels], ends: &[usize]) -> (usize, usize, Arithmetic) {
    let first = w.first().expect("a group has a matrix");
    let (n, k, arithmetic) = (first.n, first.k, first.arithmetic());
    assert!(w.iter().all(|w| (w.n, w.k, w.arithmetic()) == (n, k, arithmetic)), "groups need matrices of one shape");
    assert!(ends.len() == w.len() + 1, "{} groups need as many matrices, got {}", ends.len() - 1, w.len());
    w.iter().for_each(Panels::check);
    (n, k, arithmetic)
}

/// f32 of scratch that `forward` needs for `m` rows of `k` values, and `backward_input` for rows of `n` values.
pub fn row_scratch(m: usize, width: usize, bf16: bool) -> usize {
    row_words_scratch(if bf16 { Arithmetic::Bf16 } else { Arithmetic::F32 }, m, width)
}

/// y[i] = x[i] W_e^T, or y[i] += with `add`, for each of several lists of matrices of one width, which see the same x.
pub fn forward<const N: usize>(
    x: &[f32],
    ends: &[usize],
    w: [&[Panels]; N],
    y: [&mut [f32]; N],
    add: bool,
    scratch: &mut [f32],
) {
    let level = level();
    let (_, k, arithmetic) = dims(w[0], ends);
    let (m, steps) = (ends[ends.len() - 1], words_of(arithmetic, k));
    assert!(x.len() == m * k);
    let a = row_words(level, arithmetic, x, k, scratch);
    let mut products = Vec::new();
    for (w, y) in w.into_iter().zip(y) {
        let (n, of_k, of) = dims(w, ends);
        assert!((of_k, of, y.len()) == (k, arithmetic, m * n), "y must be ({m}, {n})");
        let mut rest = y;
        for (e, rows) in occupied(ends) {
            let (c, after) = rest.split_at_mut(rows.len() * n);
            rest = after;
            products.push(Product {
                arithmetic,
                m: rows.len(),
                n,
                steps,
                a: a.wrapping_add(rows.start * steps),
                a_row: steps,
                b: w[e].first_word(),
                b_panel: w[e].panel_words(),
                c: Shares::new(c),
                continued: false,
                bias: None,
                addend: if add { Addend::Result } else { Addend::Nothing },
            });
        }
    }
    run_all(&products, None, level);
}

/// dx[i] = dy[i] W_e, or dx[i] += with `add`.
pub fn backward_input(dy: &[f32], ends: &[usize], w: &[Panels], dx: &mut [f32], add: bool, scratch: &mut [f32]) {
    let level = level();
    let (n, k, arithmetic) = dims(w, ends);
    let (m, steps) = (ends[ends.len() - 1], words_of(arithmetic, n));
    assert!(dy.len() == m * n && dx.len() == m * k);
    null::work_in(scratch::bytes(steps * LANES));
    if null::is_active() {
        return;
    }
    let a = row_words(level, arithmetic, dy, n, scratch);
    let mut rest = dx;
    let products = occupied(ends).map(|(e, rows)| {
        let (c, after) = std::mem::take(&mut rest).split_at_mut(rows.len() * k);
        rest = after;
        let product = Product {
            arithmetic,
            m: rows.len(),
            n: k,
            steps,
            a: a.wrapping_add(rows.start * steps),
            a_row: steps,
            b: std::ptr::null(),
            b_panel: 0,
            c: Shares::new(c),
            continued: add,
            bias: None,
            addend: Addend::Nothing,
        };
        (&w[e], product)
    });
    let products: Vec<(&Panels, Product)> = products.collect();
    let runs: Vec<(usize, usize)> =
        products.iter().map(|(_, product)| (k.div_ceil(LANES), product.m + READ_ROWS)).collect();
    in_shares(&runs, m * n * k, steps * LANES, &|run, panels, strip| {
        let (w, product) = &products[run];
        panels.for_each(|panel| over_strip(level, w, product, panel, strip));
    });
}

/// The columns of dx in one panel of lanes k. The part of W that they need is transposed into `strip`, where it stays
/// in a cache until all rows have passed.
fn over_strip(level: Level, w: &Panels, product: &Product, panel: usize, strip: &mut [f32]) {
    let strip: &mut [u32] = bytemuck::cast_slice_mut(strip);
    let block = words_of(product.arithmetic, LANES) * LANES;
    for (from, lines) in strip.chunks_mut(block).enumerate() {
        w.transpose_block(level, from, panel, lines);
    }
    let cut = Cut { pair: false, ..Cut::new(product, 1) };
    let product = Product { b: strip.as_ptr(), ..*product };
    (0..cut.blocks).for_each(|block| product.task(level, cut, product.a, block, panel));
}

/// The work of a thread on some tasks of a run, with scratch.
type OnTasks<'a> = dyn Fn(usize, Range<usize>, &mut [f32]) + Sync + 'a;

/// Calls `f` with each run of tasks and its own part of the tasks, on the threads, with `len` values of scratch. `work`
/// is the number of multiply-adds.
fn in_shares(runs: &[(usize, usize)], work: usize, len: usize, f: &OnTasks) {
    let pool = pool();
    let serial = work < SERIAL_BELOW;
    let threads = if serial { 1 } else { pool.threads() };
    let share = |id: usize| {
        with_scratch(len, |scratch| deal(runs, id, threads).for_each(|(run, tasks)| f(run, tasks, scratch)));
    };
    if serial { share(0) } else { pool.run(&share) }
}

/// dW_e[n][k] += sum_i dy[i][n] x[i][k] in f32 panels, i ascending from the values of dW_e. The other contract is that
/// of `matmul_weight::backward_weight`.
pub fn backward_weight(dy: &[f32], x: &[f32], ends: &[usize], [n, k]: [usize; 2], dw: &mut [&mut [f32]], bf16: bool) {
    let m = ends[ends.len() - 1];
    assert!(dy.len() == m * n && x.len() == m * k && dw.len() + 1 == ends.len());
    assert!(dw.iter().all(|dw| dw.len() == n.next_multiple_of(LANES) * k.next_multiple_of(2)));
    let arithmetic = if bf16 { Arithmetic::Bf16 } else { Arithmetic::F32 };
    let room = Room::new(words_of(arithmetic, m), k);
    null::work_in(scratch::bytes(room.count_words()));
    if m == 0 || null::is_active() {
        return;
    }
    let (level, threads) = (level(), pool().threads());
    let (panels, tiles) = (n.div_ceil(LANES), k.div_ceil(ROWS));
    let products: Vec<WeightProduct> = occupied(ends)
        .map(|(e, rows)| {
            let (steps, dw) = (words_of(arithmetic, rows.len()), Shares::new(dw[e]));
            let (dy, x) = (&dy[rows.start * n..rows.end * n], &x[rows.start * k..rows.end * k]);
            WeightProduct { level, arithmetic, dy, x, n, k, steps, room, dw }
        })
        .collect();
    // Few large groups are cut, so that the threads have equal shares.
    let cuts: Vec<usize> =
        occupied(ends).map(|(_, rows)| (4 * threads * rows.len()).div_ceil(m).clamp(1, panels)).collect();
    let runs: Vec<(usize, usize)> =
        products.iter().zip(&cuts).map(|(product, cut)| (*cut, product.steps * panels.div_ceil(*cut))).collect();
    in_shares(&runs, m * n * k, room.count_words(), &|run, tasks, scratch| {
        let own = share(panels, 1, tasks.start, cuts[run]).start..share(panels, 1, tasks.end - 1, cuts[run]).end;
        products[run].rectangle(own, 0..tiles, bytemuck::cast_slice_mut(scratch));
    });
}
