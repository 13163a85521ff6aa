//! y = x W^T and its gradients on panels of 32 outputs: [n/32][k rounded up to even][32], bf16 with pairs of k
//! interleaved. One family of tiles (`microkernel`) computes all three products:
//!
//! | product | rows of a tile | lanes | chain over | prepared |
//! |---|---|---|---|---|
//! | y = x W^T | rows of x | n | k | nothing (bf16: x as pairs) |
//! | dx = dy W | rows of dy | k | n | W's panels transposed, a chunk of n at a time |
//! | dW += dy^T x | columns of x, interleaved | n | m | x interleaved and dy's panels, a block of m at a time |
//!
//! Every output is one ascending chain, so its bits depend neither on m, nor on its row's position, nor on blocking
//! and threads. Callers provide the scratch memory: `*_scratch` returns the number of f32 values.

/// Outputs of one panel.
pub use super::microkernel::LANES;
use super::microkernel::{Arithmetic, Prefetch, ROWS, ROWS_PAIR, Tile, finish_row, run};
use super::panel;
use super::pool::{Shares, deal, pool};
use super::scratch;
use crate::device::null;
use crate::device::simd::{Level, level};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr;

/// Steps of a block: 256 KiB of a panel, a quarter of a usual second-level cache.
const STEPS_BLOCK: usize = 2048;
/// Bytes of `a` that a block of rows keeps in the second-level cache while all panels pass.
const ROWS_BYTES: usize = 256 << 10;
/// Rows of a block whose chains are cut (so that a block of sums fits on the stack).
const ROWS_CUT: usize = 32;
/// The number of multiply-adds below which one thread does all the work: waking the others costs as much.
pub(super) const SERIAL_BELOW: usize = 64 << 10;
/// The number of values of x up to which each thread converts them to words for itself: 128 KiB.
const OWN_WORDS: usize = 32 << 10;
/// Words of W that are transposed at a time: they stay in the last-level cache.
const TRANSPOSED_WORDS: usize = 2 << 20;
/// The cost of reading a step of a panel, in rows.
pub(super) const READ_ROWS: usize = 16;
/// The values of a weight matrix in panels.
#[derive(Clone, Copy, Debug)]
pub enum PanelValues<'a> {
    F32(&'a [f32]),
    /// Two neighboring k interleaved: [n/32][k/2][32][2].
    Bf16(&'a [u16]),
}

/// A weight matrix W[n][k] in panels. The values fill n.next_multiple_of(32) * k.next_multiple_of(2).
#[derive(Clone, Copy, Debug)]
pub struct Panels<'a> {
    pub n: usize,
    pub k: usize,
    pub values: PanelValues<'a>,
}

impl Panels<'_> {
    pub fn is_bf16(&self) -> bool {
        matches!(self.values, PanelValues::Bf16(_))
    }

    pub(super) fn arithmetic(&self) -> Arithmetic {
        if self.is_bf16() { Arithmetic::Bf16 } else { Arithmetic::F32 }
    }

    pub(super) fn first_word(&self) -> *const u32 {
        match self.values {
            PanelValues::F32(v) => v.as_ptr().cast(),
            PanelValues::Bf16(v) => v.as_ptr().cast(),
        }
    }

    /// Words from one panel to the next.
    pub(super) fn panel_words(&self) -> usize {
        LANES * words_of(self.arithmetic(), self.k.next_multiple_of(2))
    }

    pub(super) fn check(&self) {
        let len = match self.values {
            PanelValues::F32(v) => v.len(),
            PanelValues::Bf16(v) => v.len(),
        };
        let needed = self.n.next_multiple_of(LANES) * self.k.next_multiple_of(2);
        assert!(len == needed, "panels of W[{}][{}] hold {len} values, needed {needed}", self.n, self.k);
    }
}

/// Words of `len` values along a chain.
pub(super) fn words_of(arithmetic: Arithmetic, len: usize) -> usize {
    match arithmetic {
        Arithmetic::F32 => len,
        Arithmetic::Bf16 => len.div_ceil(2),
    }
}

/// c (m, n) = a (m, steps) times panels [n/32][..][32].
#[derive(Clone, Copy)]
pub(super) struct Product<'a> {
    pub arithmetic: Arithmetic,
    pub m: usize,
    pub n: usize,
    pub steps: usize,
    pub a: *const u32,
    pub a_row: usize,
    pub b: *const u32,
    pub b_panel: usize,
    pub c: Shares<f32>,
    /// The chains continue from the values in c.
    pub continued: bool,
    pub bias: Option<&'a [f32]>,
    pub addend: Addend<'a>,
}

/// The addend of a finished value.
#[derive(Clone, Copy, Debug)]
pub enum Addend<'a> {
    Nothing,
    /// The contents of the result.
    Result,
    /// Values apart from the result, as many as it has.
    Values(&'a [f32]),
}

// SAFETY: a and b are only read; c is written through `Shares`, each element by one task.
unsafe impl Sync for Product<'_> {}

/// The tasks of a GEMM: blocks of rows (outer) times groups of one or two panels (inner).
#[derive(Clone, Copy)]
pub(super) struct Cut {
    pub pair: bool,
    pub groups: usize,
    pub blocks: usize,
    pub step_blocks: usize,
}

impl Cut {
    pub(super) fn new(p: &Product, threads: usize) -> Self {
        let pair = p.m <= ROWS_PAIR;
        let panels = p.n.div_ceil(LANES);
        let groups = if pair { panels.div_ceil(2) } else { panels };
        let step_blocks = p.steps.div_ceil(STEPS_BLOCK).max(1);
        let fit = (ROWS_BYTES / (4 * p.a_row.max(1)) / ROWS * ROWS).max(4 * ROWS);
        let fit = if step_blocks > 1 { fit.min(ROWS_CUT) } else { fit };
        let mut blocks = p.m.div_ceil(fit);
        // With few panels and many threads, rows are cut as well, if every thread still gets some tiles.
        let uneven = groups.next_multiple_of(threads) * 8 > groups * 9;
        if blocks > 1 || (uneven && p.m >= ROWS * threads) {
            blocks = blocks.next_multiple_of(threads);
        }
        Self { pair, groups, blocks, step_blocks }
    }
}

/// Computes all `products`, which do not depend on each other, in one call of the threads. With `own`, each thread
/// rounds these values of x itself and uses its words instead of `a`.
pub(super) fn run_all(products: &[Product], own: Option<&[f32]>, level: Level) {
    let pool = pool();
    let few = products.iter().map(|p| p.m * p.n * p.steps).sum::<usize>() < SERIAL_BELOW;
    let threads = if few { 1 } else { pool.threads() };
    // With many products there are enough tasks without cutting rows.
    let cut_for = (3 * threads).div_ceil(products.len().max(1)).min(threads);
    let cuts: Vec<Cut> = products.iter().map(|product| Cut::new(product, cut_for)).collect();
    let run = |(product, cut): (&Product, &Cut)| {
        (cut.groups * cut.blocks, product.steps * (product.m.div_ceil(cut.blocks.max(1)) + READ_ROWS))
    };
    let runs: Vec<(usize, usize)> = products.iter().zip(&cuts).map(run).collect();
    let tasks = |id: usize, own: Option<*const u32>| {
        for (i, tasks) in deal(&runs, id, threads) {
            let (product, cut) = (&products[i], cuts[i]);
            for task in tasks {
                product.task(level, cut, own.unwrap_or(product.a), task / cut.groups, task % cut.groups);
            }
        }
    };
    let work = |id: usize| match own {
        Some(x) => {
            let first = &products[0];
            scratch::with_scratch(first.m * first.steps, |words| {
                let words: &mut [u32] = bytemuck::cast_slice_mut(words);
                for (x, words) in x.chunks_exact(x.len() / first.m).zip(words.chunks_exact_mut(first.steps)) {
                    panel::to_words(level, x, words);
                }
                tasks(id, Some(words.as_ptr()));
            });
        }
        None => tasks(id, None),
    };
    if few && !null::is_active() {
        work(0);
    } else {
        pool.run(&work);
    }
}

impl Product<'_> {
    /// One block of rows of `a` over one panel (or two).
    pub(super) fn task(&self, level: Level, cut: Cut, a: *const u32, block: usize, group: usize) {
        let (start, end) = (block * self.m / cut.blocks, (block + 1) * self.m / cut.blocks);
        let panel = if cut.pair { 2 * group } else { group };
        let columns = (self.n - panel * LANES).min(if cut.pair { 2 * LANES } else { LANES });
        let pair = columns > LANES;
        let tiles = (end - start).div_ceil(if pair { ROWS_PAIR } else { ROWS });
        let width = if pair { 2 * LANES } else { LANES };
        let in_place = matches!(self.addend, Addend::Result);
        // If the result is added to y, the chains are kept here until they are done.
        let mut sums = MaybeUninit::<[f32; ROWS_CUT * LANES]>::uninit();
        for step_block in 0..cut.step_blocks {
            let s0 = step_block * self.steps / cut.step_blocks;
            let s1 = (step_block + 1) * self.steps / cut.step_blocks;
            let b = self.b.wrapping_add(panel * self.b_panel + s0 * LANES);
            for i in 0..tiles {
                let r0 = start + i * (end - start) / tiles;
                let r1 = start + (i + 1) * (end - start) / tiles;
                let y = self.c.ptr().wrapping_add(r0 * self.n + panel * LANES);
                let held = if cut.step_blocks > 1 { (r0 - start) * width } else { 0 };
                let (c, c_row) =
                    if in_place { (sums.as_mut_ptr().cast::<f32>().wrapping_add(held), width) } else { (y, self.n) };
                let tile = Tile {
                    rows: r1 - r0,
                    pair,
                    steps: s1 - s0,
                    a: a.wrapping_add(r0 * self.a_row + s0),
                    a_row: self.a_row,
                    packed: false,
                    b,
                    b_panel: self.b_panel,
                    c,
                    c_row,
                    columns,
                    fresh: s0 == 0 && !self.continued,
                    // Several tiles over one block of the panel share the fetching of the next block.
                    prefetch: if tiles == 1 {
                        Prefetch::Stream
                    } else {
                        let from = b.wrapping_add((s1 - s0) * LANES * (tiles + i) / tiles);
                        Prefetch::Next { from, step: LANES / tiles }
                    },
                };
                // SAFETY: rows, steps and columns lie within the operands (checked when the GEMM is created); these
                // rows and columns of c belong to this task.
                unsafe { run(level, self.arithmetic, &tile) };
                let is_bare = matches!(self.addend, Addend::Nothing) && self.bias.is_none();
                if step_block + 1 == cut.step_blocks && !is_bare {
                    self.finish(level, &tile, r0 * self.n + panel * LANES);
                }
            }
        }
    }

    /// Adds the bias to a finished tile, whose first value is y's value `at`, and the tile to the addend.
    fn finish(&self, level: Level, tile: &Tile, at: usize) {
        let column = at % self.n;
        let bias = self.bias.map(|b| &b[column..column + tile.columns]);
        for i in 0..tile.rows {
            let row = at + i * self.n..at + i * self.n + tile.columns;
            let mut chain = [0.0f32; 2 * LANES];
            let chain = &mut chain[..tile.columns];
            // SAFETY: the tile's rows of c and of y, which belong to this task; where they are the same memory, only
            // the copy in `chain` is read.
            let y = unsafe {
                chain.copy_from_slice(std::slice::from_raw_parts(tile.c.add(i * tile.c_row), tile.columns));
                self.c.slice(row.clone())
            };
            if let Addend::Values(c) = self.addend {
                y.copy_from_slice(&c[row]);
            }
            finish_row(level, chain, bias, y, !matches!(self.addend, Addend::Nothing));
        }
    }
}

/// f32 of scratch that `forward` needs.
pub fn forward_scratch(m: usize, w: &Panels) -> usize {
    let arithmetic = w.arithmetic();
    if has_own_words(arithmetic, m * w.k) { 0 } else { row_words_scratch(arithmetic, m, w.k) }
}

/// Whether each thread rounds `len` values of x itself. Words that another thread wrote are in that core's cache, and
/// the tiles' strided reads fetch them line by line; reading x in order is prefetched.
fn has_own_words(arithmetic: Arithmetic, len: usize) -> bool {
    arithmetic == Arithmetic::Bf16 && (1..=OWN_WORDS).contains(&len)
}

/// One of several GEMMs with the same x.
#[derive(Debug)]
pub struct Output<'a> {
    pub w: Panels<'a>,
    pub bias: Option<&'a [f32]>,
    pub y: &'a mut [f32],
}

/// y[m][n] = addend + (chain + bias[n]): chain = sum_k x[m][k] W[n][k], k ascending from 0. For several W of one width
/// and dtype the threads are called once.
pub fn forward<const N: usize>(x: &[f32], m: usize, outputs: [Output; N], addend: Addend, scratch: &mut [f32]) {
    let level = level();
    let (k, arithmetic) = (outputs[0].w.k, outputs[0].w.arithmetic());
    let steps = words_of(arithmetic, k);
    assert!(x.len() == m * k);
    let own = has_own_words(arithmetic, x.len());
    let a = if own { ptr::null() } else { row_words(level, arithmetic, x, k, scratch) };
    let products = outputs.map(|Output { w, bias, y }| {
        w.check();
        assert!((w.k, w.arithmetic()) == (k, arithmetic), "GEMMs of one x need W of the same width and dtype");
        assert!(y.len() == m * w.n && bias.is_none_or(|b| b.len() == w.n));
        assert!(!matches!(addend, Addend::Values(c) if c.len() != y.len()), "c and y must have the same length");
        Product {
            arithmetic,
            m,
            n: w.n,
            steps,
            a,
            a_row: steps,
            b: w.first_word(),
            b_panel: w.panel_words(),
            c: Shares::new(y),
            continued: false,
            bias,
            addend,
        }
    });
    if own {
        null::work_in(scratch::bytes(m * steps));
    }
    run_all(&products, own.then_some(x), level);
}

/// f32 of scratch that `row_words` needs.
pub(super) fn row_words_scratch(arithmetic: Arithmetic, m: usize, k: usize) -> usize {
    if arithmetic == Arithmetic::Bf16 { m * words_of(arithmetic, k) } else { 0 }
}

/// The words of x (.., k), row after row: its own, or bf16 pairs in the scratch.
pub(super) fn row_words(level: Level, arithmetic: Arithmetic, x: &[f32], k: usize, scratch: &mut [f32]) -> *const u32 {
    if arithmetic == Arithmetic::F32 {
        return x.as_ptr().cast();
    }
    let row = words_of(arithmetic, k);
    let words: &mut [u32] = bytemuck::cast_slice_mut(&mut scratch[..x.len() / k.max(1) * row]);
    pool().rows(words, row, x.len() < SERIAL_BELOW, &|i, words| {
        panel::to_words(level, &x[i * k..(i + 1) * k], words);
    });
    words.as_ptr()
}

/// Rows of W (along n) that are transposed at a time.
fn transposed_rows(w: &Panels) -> usize {
    let line = w.k.next_multiple_of(LANES);
    let rows = TRANSPOSED_WORDS / line / LANES * LANES;
    rows.max(LANES).min(w.n.next_multiple_of(LANES))
}

/// f32 of scratch that `backward_input` needs. `transposed`: it gets a W that was transposed before.
pub fn backward_input_scratch(m: usize, w: &Panels, transposed: bool) -> usize {
    let turned = if transposed { 0 } else { turned_words(w, transposed_rows(w)) };
    turned + row_words_scratch(w.arithmetic(), m, w.n)
}

/// Words that `rows` rows of W take once they are transposed.
fn turned_words(w: &Panels, rows: usize) -> usize {
    w.k.next_multiple_of(LANES) * words_of(w.arithmetic(), rows)
}

/// dx[m][k] = sum_n dy[m][n] W[n][k], n ascending from 0 (from dx with `add`). The bits do not depend on whether all
/// of W was `transposed` before.
pub fn backward_input(
    dy: &[f32],
    m: usize,
    w: &Panels,
    transposed: Option<&[f32]>,
    dx: &mut [f32],
    add: bool,
    scratch: &mut [f32],
) {
    w.check();
    assert!(dy.len() == m * w.n && dx.len() == m * w.k);
    assert!(transposed.is_none_or(|all| all.len() >= transposed_len(w)));
    let (level, arithmetic) = (level(), w.arithmetic());
    let rows = if transposed.is_some() { w.n.max(1) } else { transposed_rows(w) };
    let (turned, rest) = scratch.split_at_mut(if transposed.is_some() { 0 } else { turned_words(w, rows) });
    let a = row_words(level, arithmetic, dy, w.n, rest);
    let c = Shares::new(dx);
    for start in (0..w.n).step_by(rows) {
        let chunk = start..w.n.min(start + rows);
        let steps = words_of(arithmetic, chunk.len());
        let b = transposed.unwrap_or_else(|| {
            transpose_panels(level, w, chunk, bytemuck::cast_slice_mut(turned));
            turned
        });
        let product = Product {
            arithmetic,
            m,
            n: w.k,
            steps,
            a: a.wrapping_add(words_of(arithmetic, start)),
            a_row: words_of(arithmetic, w.n),
            b: b.as_ptr().cast(),
            b_panel: steps * LANES,
            c,
            continued: add || start > 0,
            bias: None,
            addend: Addend::Nothing,
        };
        run_all(&[product], None, level);
    }
}

/// f32 that `transpose` fills.
pub fn transposed_len(w: &Panels) -> usize {
    turned_words(w, w.n)
}

/// The whole of W as prepared for `backward_input`, for several GEMMs with one W.
pub fn transpose(w: &Panels, transposed: &mut [f32]) {
    w.check();
    transpose_panels(level(), w, 0..w.n, bytemuck::cast_slice_mut(&mut transposed[..transposed_len(w)]));
}

/// Panels of lanes k over the steps n of `chunk`: [k/32][steps][32].
fn transpose_panels(level: Level, w: &Panels, chunk: Range<usize>, turned: &mut [u32]) {
    let block_steps = words_of(w.arithmetic(), LANES);
    let steps = words_of(w.arithmetic(), chunk.len());
    let (across, down) = (w.k.div_ceil(LANES), chunk.len().div_ceil(LANES));
    let out = Shares::new(turned);
    pool().ranges(across * down, 1, false, &|blocks| {
        for block in blocks {
            let step = block % down * block_steps;
            let at = block / down * steps + step;
            let lines = (steps - step).min(block_steps);
            // SAFETY: blocks do not overlap.
            let to = unsafe { out.slice(at * LANES..(at + lines) * LANES) };
            w.transpose_block(level, chunk.start / LANES + block % down, block / down, to);
        }
    });
}

impl Panels<'_> {
    /// The steps of `panel` for the 32 lanes of `across`, one line of lanes for each step.
    pub(super) fn transpose_block(&self, level: Level, panel: usize, across: usize, lines: &mut [u32]) {
        let (even_k, k0) = (self.k.next_multiple_of(2), across * LANES);
        let from = (panel * even_k + k0) * LANES;
        let from = from..from + (even_k - k0).min(LANES) * LANES;
        let from: &[u32] = match self.values {
            PanelValues::F32(v) => bytemuck::cast_slice(&v[from]),
            PanelValues::Bf16(v) => bytemuck::cast_slice(&v[from]),
        };
        panel::transpose(level, self.arithmetic(), from.as_chunks().0, lines.as_chunks_mut().0);
    }
}
