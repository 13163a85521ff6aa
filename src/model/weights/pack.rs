//! Conversions between row-major values, as on disk, and the layouts of the flat buffer, and between bf16 and f32.

use crate::dtype::round_bf16;
use crate::model::params::{ParamId, ParamSpec, ParamTable};
use crate::tensor::{Layout, PANEL, SliceMut};
use rayon::prelude::*;
use std::ops::Range;

/// The number of columns decoded at a time: a tile of panels fits the L1 cache.
const TILE: usize = 128;
/// The elements of a tile.
const PIECE: usize = TILE * PANEL;

/// Converts bf16 to f32 exactly. In panels, two neighboring k interleave.
pub(super) fn widen(layout: Layout, from: &[u16], to: &mut [f32]) {
    let exact = |x: u16| f32::from_bits(u32::from(x) << 16);
    match layout {
        Layout::Row => to.iter_mut().zip(from).for_each(|(t, &x)| *t = exact(x)),
        Layout::Panel => {
            for (to, from) in to.chunks_exact_mut(2 * PANEL).zip(from.chunks_exact(2 * PANEL)) {
                let (even, odd) = to.split_at_mut(PANEL);
                for ((e, o), pair) in even.iter_mut().zip(odd).zip(from.chunks_exact(2)) {
                    (*e, *o) = (exact(pair[0]), exact(pair[1]));
                }
            }
        }
    }
}

/// Rounds f32 to bf16, to nearest even. In panels, two neighboring k interleave.
pub(super) fn narrow(layout: Layout, from: &[f32], to: &mut [u16]) {
    match layout {
        Layout::Row => to.iter_mut().zip(from).for_each(|(t, &x)| *t = round_bf16(x)),
        Layout::Panel => {
            for (to, from) in to.chunks_exact_mut(2 * PANEL).zip(from.chunks_exact(2 * PANEL)) {
                let (even, odd) = from.split_at(PANEL);
                for (pair, (&e, &o)) in to.chunks_exact_mut(2).zip(even.iter().zip(odd)) {
                    (pair[0], pair[1]) = (round_bf16(e), round_bf16(o));
                }
            }
        }
    }
}

/// An element of the flat buffer: f32, or a bf16 in its u16.
trait Element: Copy + Send + Sync {
    /// Stores f32 values, which are in the f32 order of `layout`. In panels, their number is a multiple of 64.
    fn store(layout: Layout, from: &[f32], to: &mut [Self]);
}

impl Element for f32 {
    fn store(_: Layout, from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }
}

impl Element for u16 {
    fn store(layout: Layout, from: &[f32], to: &mut [Self]) {
        narrow(layout, from, to);
    }
}

/// The source of a whole parameter's values: fills the slice with its row-major elements from an index on.
pub type Source<'a> = dyn Fn(usize, &mut [f32]) + Sync + 'a;

/// Fills a flat range, padding included, with the values of `source`. The range is cut at multiples of `FLAT_ALIGN`.
/// Returns the first parameter with NaN or infinite values.
pub(in crate::model) fn fill<'a>(
    table: &ParamTable,
    range: &Range<usize>,
    to: SliceMut,
    source: impl Fn(&ParamSpec) -> Box<Source<'a>> + Sync,
) -> Option<ParamId> {
    match to {
        SliceMut::F32(to) => fill_with(table, range, to, source),
        SliceMut::Bf16(to) => fill_with(table, range, to, source),
        SliceMut::Cuda(_) => unreachable!("values are made on the host"),
    }
}

fn fill_with<'a, T: Element>(
    table: &ParamTable,
    range: &Range<usize>,
    to: &mut [T],
    source: impl Fn(&ParamSpec) -> Box<Source<'a>> + Sync,
) -> Option<ParamId> {
    assert_eq!(range.len(), to.len(), "room for {range:?}");
    let (mut rest, mut places) = (to, Vec::new());
    for (id, part) in table.parts(range) {
        let (place, after) = rest.split_at_mut(part.len());
        places.push((id, part, place));
        rest = after;
    }
    let filled = places.into_par_iter().filter_map(|(id, part, place)| {
        let spec = table.spec(id);
        let part = part.start - spec.offset..part.end - spec.offset;
        (!pack_part(spec, &*source(spec), part, place)).then_some(id)
    });
    filled.min()
}

/// Writes elements `part` of a parameter's place to `to`, padding included. `part` counts from the first element and is
/// cut at multiples of `FLAT_ALIGN`. Only the tiles of these elements are read from the source. Returns false if a
/// value is NaN or infinite.
fn pack_part<T: Element>(spec: &ParamSpec, source: &Source, part: Range<usize>, to: &mut [T]) -> bool {
    assert!(part.end <= spec.len && to.len() == part.len(), "room for {part:?} of {}", spec.name);
    // Pieces of row-major values, or what lies in one panel.
    let piece = match spec.layout {
        Layout::Row => PIECE,
        Layout::Panel => PANEL * spec.columns.len().next_multiple_of(2),
    };
    let (mut rest, mut at) = (to, part.start);
    let mut places = Vec::with_capacity(part.len() / piece + 2);
    while !rest.is_empty() {
        let (place, after) = rest.split_at_mut((piece - at % piece).min(rest.len()));
        places.push((at, place));
        at = part.end - after.len();
        rest = after;
    }
    let packed = places.into_par_iter().map(|(at, to)| match spec.layout {
        Layout::Row => pack_rows(spec, source, at, to),
        Layout::Panel => pack_panel(spec, source, at / piece, at % piece, to),
    });
    packed.reduce(|| true, |a, b| a && b)
}

/// The index in the whole parameter of held element `at`, counted row by row, and the number of held elements that are
/// contiguous from there.
fn run_of(spec: &ParamSpec, at: usize) -> (usize, usize) {
    let ((_, width), k) = (spec.full_dims(), spec.columns.len());
    let (mut row, column) = (at / k, at % k);
    for rows in &spec.rows {
        if row < rows.len() {
            let first = rows.start + row;
            // Whole rows lie end to end.
            let left = if k == width { (rows.end - first) * k - column } else { k - column };
            return (first * width + spec.columns.start + column, left);
        }
        row -= rows.len();
    }
    unreachable!("element {at} is held of {}", spec.name)
}

/// The elements of the whole parameter from the first to the last row that elements `part` of its place contain.
pub(in crate::model) fn whole_rows(spec: &ParamSpec, part: Range<usize>) -> Range<usize> {
    let ((_, width), k) = (spec.full_dims(), spec.columns.len());
    let held: usize = spec.rows.iter().map(Range::len).sum();
    let (first, end) = match spec.layout {
        Layout::Row => (part.start / k, part.end.div_ceil(k)),
        Layout::Panel => {
            let panel = PANEL * k.next_multiple_of(2);
            (part.start / panel * PANEL, part.end.div_ceil(panel) * PANEL)
        }
    };
    let end = end.min(held);
    if first >= end {
        return 0..0;
    }
    let whole = |row: usize| run_of(spec, row * k).0 / width;
    whole(first) * width..(whole(end - 1) + 1) * width
}

/// At most `PIECE` elements of a row layout, from `start` on.
fn pack_rows<T: Element>(spec: &ParamSpec, source: &Source, start: usize, to: &mut [T]) -> bool {
    let mut values = [0.0; PIECE];
    let values = &mut values[..to.len()];
    // Padding follows the held values.
    let held = spec.elements().saturating_sub(start).min(to.len());
    let mut filled = 0;
    while filled < held {
        let (from, left) = run_of(spec, start + filled);
        let run = left.min(held - filled);
        source(from, &mut values[filled..filled + run]);
        filled += run;
    }
    T::store(Layout::Row, values, to);
    values.iter().all(|x| x.is_finite())
}

/// Elements of one panel, from `start` on.
fn pack_panel<T: Element>(spec: &ParamSpec, source: &Source, panel: usize, start: usize, to: &mut [T]) -> bool {
    let ((_, width), k) = (spec.full_dims(), spec.columns.len());
    let rows: Vec<usize> = spec.rows.iter().cloned().flatten().skip(panel * PANEL).take(PANEL).collect();
    let mut tile = [0.0; PIECE];
    let mut run = [0.0; TILE];
    let mut finite = true;
    let mut done = 0;
    while done < to.len() {
        let (i, from) = ((start + done) / PIECE, (start + done) % PIECE);
        let end = (from + to.len() - done).min(PIECE);
        let columns = i * TILE..((i + 1) * TILE).min(k);
        // Lanes without a row, and the column that an odd k leaves over, are zero.
        tile.fill(0.0);
        for (lane, row) in rows.iter().enumerate() {
            let run = &mut run[..columns.len()];
            source(row * width + spec.columns.start + columns.start, run);
            finite &= run.iter().all(|x| x.is_finite());
            for (c, &x) in run.iter().enumerate() {
                tile[c * PANEL + lane] = x;
            }
        }
        T::store(Layout::Panel, &tile[from..end], &mut to[done..done + end - from]);
        done += end - from;
    }
    finite
}

/// Writes elements `part` of a parameter's place, counted from its first, in f32. Values may be infinite or NaN.
/// `source` fills a slice with the row-major elements of the whole parameter from an index on.
pub fn pack_f32(spec: &ParamSpec, source: &Source, part: Range<usize>, out: &mut [f32]) {
    pack_part(spec, source, part, out);
}

/// The position in the flat vector of a row-major element of the whole parameter, and the number of elements from it on
/// that `spec` holds in sequence, one column apart. `None` if another part holds the element.
pub fn held_at(spec: &ParamSpec, element: usize) -> Option<(usize, usize)> {
    let (_, width) = spec.full_dims();
    let (row, column) = (element / width, element % width);
    if !spec.columns.contains(&column) {
        return None;
    }
    let (first, rows) = spec.held_rows().find(|(_, rows)| rows.contains(&row))?;
    let (own, k) = (first + row - rows.start, spec.columns.len());
    let at = spec.layout.index(k, own, column - spec.columns.start);
    let in_row = spec.columns.end - column;
    // Whole rows lie end to end.
    let whole = spec.layout == Layout::Row && k == width;
    let more = if whole { (rows.end - row - 1) * k } else { 0 };
    Some((spec.offset + at, in_row + more))
}

/// The row-major values of this rank's part of a parameter, from its place in a flat f32 buffer.
pub fn unpack(spec: &ParamSpec, flat: &[f32]) -> Vec<f32> {
    let (n, k) = spec.dims();
    let mut out = vec![0.0; n * k];
    unpack_rows(spec, flat, &mut out);
    out
}

/// Unpacks whole rows from the f32 values of their stretch of the flat buffer. `out` has room for these rows. Only at
/// the end of a parameter may they be fewer than a panel's.
pub(in crate::model) fn unpack_rows(spec: &ParamSpec, flat: &[f32], out: &mut [f32]) {
    let (_, k) = spec.dims();
    match spec.layout {
        Layout::Row => out.copy_from_slice(&flat[..out.len()]),
        Layout::Panel => out.par_chunks_mut(k).enumerate().for_each(|(row, out)| {
            let panel = &flat[Layout::Panel.index(k, row, 0)..];
            out.iter_mut().zip(panel.iter().step_by(PANEL)).for_each(|(o, &x)| *o = x);
        }),
    }
}
