//! dW += dy^T x on the tiles of `microkernel`: rows are columns of x, lanes are columns of dy, the chain is over m.
//!
//! Each thread owns a rectangle of dW. Per block of m it interleaves its columns of x (which then stay in its
//! second-level cache), and passes panel after panel of dy over them.

use super::matmul::{SERIAL_BELOW, words_of};
use super::microkernel::{Arithmetic, LANES, Prefetch, ROWS, Tile, run};
use super::panel;
use super::pool::{Shares, pool, share};
use crate::device::null;
use crate::device::simd::{Level, level};
use std::ops::Range;

/// Steps of a block of m: a tile of x takes 4 KiB of the first-level cache, a panel of dy 16 KiB.
const STEPS: usize = 128;
/// Tiles of x that are interleaved at a time (256 KiB).
const TILES: usize = panel::COLUMNS_MAX / ROWS;
/// Words between tiles of x, so that they do not fall on one another in the caches.
const GAP: usize = 16;
/// The approximate cost of preparing one value, in multiply-adds.
const PREPARE: usize = 12;

/// A thread's scratch: words of a tile of x, of all tiles, and of a panel of dy.
#[derive(Clone, Copy)]
pub(super) struct Room {
    tile: usize,
    tiles: usize,
    panel: usize,
}

impl Room {
    pub(super) fn new(steps: usize, k: usize) -> Self {
        let steps = steps.min(STEPS);
        let tile = steps * ROWS + GAP;
        Self { tile, tiles: tile * k.div_ceil(ROWS).min(TILES), panel: steps * LANES }
    }

    pub(super) fn count_words(self) -> usize {
        self.tiles + self.panel
    }
}

/// f32 of scratch that `backward_weight` needs.
pub fn backward_weight_scratch(m: usize, k: usize, bf16: bool) -> usize {
    let arithmetic = if bf16 { Arithmetic::Bf16 } else { Arithmetic::F32 };
    pool().threads() * Room::new(words_of(arithmetic, m), k).count_words()
}

pub(super) struct WeightProduct<'a> {
    pub level: Level,
    pub arithmetic: Arithmetic,
    pub dy: &'a [f32],
    pub x: &'a [f32],
    pub n: usize,
    pub k: usize,
    pub steps: usize,
    pub room: Room,
    pub dw: Shares<f32>,
}

/// dW[n][k] += sum_m dy[m][n] x[m][k] in f32 panels, m ascending from the values of dW. Missing rows and columns are
/// not touched. bf16: both factors are rounded; pairs of m, odd first.
pub fn backward_weight(
    dy: &[f32],
    x: &[f32],
    m: usize,
    n: usize,
    k: usize,
    dw: &mut [f32],
    bf16: bool,
    scratch: &mut [f32],
) {
    assert!(dy.len() == m * n && x.len() == m * k);
    assert!(dw.len() == n.next_multiple_of(LANES) * k.next_multiple_of(2));
    if m == 0 || null::is_active() {
        return;
    }
    let (level, pool) = (level(), pool());
    let arithmetic = if bf16 { Arithmetic::Bf16 } else { Arithmetic::F32 };
    let steps = words_of(arithmetic, m);
    let room = Room::new(steps, k);
    // The pool may have changed since the scratch was allocated, so the scratch limits the number of shares.
    let serial = m * n * k < SERIAL_BELOW;
    let shares = if serial { 1 } else { (scratch.len() / room.count_words()).min(pool.threads()) };
    let (panels, tiles) = (n.div_ceil(LANES), k.div_ceil(ROWS));
    let (down, across) = grid(panels, tiles, shares);
    let product = WeightProduct { level, arithmetic, dy, x, n, k, steps, room, dw: Shares::new(dw) };
    let rooms = Shares::new(bytemuck::cast_slice_mut::<f32, u32>(scratch));
    let work = |id: usize| {
        for slot in (id..down * across).step_by(pool.threads()) {
            // SAFETY: each slot is used by one share.
            let room = unsafe { rooms.slice(slot * room.count_words()..(slot + 1) * room.count_words()) };
            product.rectangle(share(panels, 1, slot / across, down), share(tiles, 1, slot % across, across), room);
        }
    };
    if serial { work(0) } else { pool.run(&work) }
}

/// The rectangles of dW, one per share: (cuts of the panels, cuts of the tiles). Minimizes the work of the largest,
/// including the preparation of its operands.
fn grid(panels: usize, tiles: usize, shares: usize) -> (usize, usize) {
    let cost = |&(down, across): &(usize, usize)| {
        let (n, k) = (panels.div_ceil(down) * LANES, tiles.div_ceil(across) * ROWS);
        n * k + PREPARE * LANES * (n.div_ceil(LANES) + k.div_ceil(LANES))
    };
    (1..=shares).map(|down| (down, shares / down)).min_by_key(cost).unwrap_or((1, 1))
}

/// The tiles of x that are interleaved at a time, over a block of the chain.
#[derive(Clone)]
struct Block {
    steps: Range<usize>,
    tiles: Range<usize>,
}

impl WeightProduct<'_> {
    /// The tiles `tiles` of the panels `panels` of dW.
    pub(super) fn rectangle(&self, panels: Range<usize>, tiles: Range<usize>, room: &mut [u32]) {
        if tiles.is_empty() {
            return;
        }
        let (level, arithmetic) = (self.level, self.arithmetic);
        let (x_room, dy_room) = room.split_at_mut(self.room.tiles);
        let panel = dy_room.as_chunks_mut().0;
        let groups = tiles.len().div_ceil(TILES);
        let block = |i: usize| {
            let (start, first) = (i / groups * STEPS, tiles.start + i % groups * TILES);
            let steps = start..self.steps.min(start + STEPS);
            (!steps.is_empty()).then(|| Block { steps, tiles: first..tiles.end.min(first + TILES) })
        };
        for (i, Block { steps, tiles }) in (0..).map_while(block).enumerate() {
            let columns = self.columns(&tiles);
            panel::interleave(level, arithmetic, self.x, self.k, steps.clone(), &columns, x_room, self.room.tile);
            let (next, all) = (block(i + 1), panels.len() * tiles.len());
            for p in panels.clone() {
                let lanes = p * LANES..self.n.min((p + 1) * LANES);
                let width = lanes.len();
                panel::panel(level, arithmetic, self.dy, self.n, steps.clone(), &lanes, panel);
                for tile in tiles.clone() {
                    let at = tile - tiles.start;
                    // The next values are in columns of wide matrices, which no hardware prefetches.
                    if p + 1 < panels.end {
                        self.fetch(self.dy, self.n, (p + 1) * LANES..(p + 2) * LANES, part(&steps, at, tiles.len()));
                    }
                    if let Some(next) = &next {
                        let at = (p - panels.start) * tiles.len() + at;
                        self.fetch(self.x, self.k, self.columns(&next.tiles), part(&next.steps, at, all));
                    }
                    let a = &x_room[at * self.room.tile..][..self.room.tile];
                    self.tile(tile, p, width, a, &panel[..steps.len()]);
                }
            }
        }
    }

    /// Columns of x in `tiles`.
    fn columns(&self, tiles: &Range<usize>) -> Range<usize> {
        tiles.start * ROWS..self.k.min(tiles.end * ROWS)
    }

    /// Starts fetching `columns` of the rows (of words) `steps` of a matrix of `width` columns.
    fn fetch(&self, matrix: &[f32], width: usize, columns: Range<usize>, steps: Range<usize>) {
        let rows = match self.arithmetic {
            Arithmetic::F32 => steps,
            Arithmetic::Bf16 => 2 * steps.start..2 * steps.end,
        };
        for i in rows {
            panel::prefetch(matrix.as_ptr().wrapping_add(i * width + columns.start), columns.len());
        }
    }

    fn tile(&self, tile: usize, p: usize, columns: usize, a: &[u32], panel: &[[u32; LANES]]) {
        let at = (p * self.k.next_multiple_of(2) + tile * ROWS) * LANES;
        let tile = Tile {
            rows: (self.k - tile * ROWS).min(ROWS),
            pair: false,
            steps: panel.len(),
            a: a.as_ptr(),
            a_row: 1,
            packed: true,
            b: panel.as_ptr().cast(),
            b_panel: 0,
            c: self.dw.ptr().wrapping_add(at),
            c_row: LANES,
            columns,
            fresh: false,
            prefetch: Prefetch::Next { from: a.as_ptr().wrapping_add(a.len()), step: ROWS },
        };
        // SAFETY: a and the panel hold the tile's steps, its rows and columns lie within dW and belong to this share.
        unsafe { run(self.level, self.arithmetic, &tile) };
    }
}

/// Part `at` of `parts` of a range.
fn part(range: &Range<usize>, at: usize, parts: usize) -> Range<usize> {
    let part = share(range.len(), 1, at, parts);
    range.start + part.start..range.start + part.end
}

/// db[n] += sum_m dy[m][n], rows in order
pub fn backward_bias(dy: &[f32], m: usize, db: &mut [f32]) {
    let n = db.len();
    pool().parts(db, 16, m * n < SERIAL_BELOW, &|columns, db| {
        for i in 0..m {
            for (db, dy) in db.iter_mut().zip(&dy[i * n + columns.start..i * n + columns.end]) {
                *db += dy;
            }
        }
    });
}
