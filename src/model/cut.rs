//! Between the flat values of a whole parameter and those of the ranks that share it.
//!
//! Both lie in the layout of their spec, so what is copied are runs that are neighbours on either side: whole panels
//! where a cut falls between panels, lanes of a panel elsewhere.

use super::params::ParamSpec;
use crate::tensor::{Layout, PANEL};
use std::ops::Range;

/// An element of a flat buffer: f32, or a bf16 in its u16.
pub trait Flat: Copy + Default {
    /// Neighbouring columns that interleave in a panel.
    const INTERLEAVED: usize;
}

impl Flat for f32 {
    const INTERLEAVED: usize = 1;
}

impl Flat for u16 {
    const INTERLEAVED: usize = 2;
}

/// `out`, the values of `part`, taken from the whole parameter's `from`; padding is zero.
///
/// # Panics
/// If the specs are of different parameters, or a buffer is not as long as its spec says.
pub fn cut<T: Flat>(whole: &ParamSpec, from: &[T], part: &ParamSpec, out: &mut [T]) {
    check(whole, from.len(), part, out.len());
    clear_padding(part, out);
    runs::<T>(whole, part, |at, held, len| out[held..held + len].copy_from_slice(&from[at..at + len]));
}

/// `out`, the whole parameter, put together from the values of its parts; padding is zero. Of elements that several
/// parts hold the last part's is taken.
///
/// # Panics
/// As `cut`, or if these are not all parts.
pub fn join<T: Flat>(parts: &[(&ParamSpec, &[T])], whole: &ParamSpec, out: &mut [T]) {
    let (held, copies): (usize, usize) =
        (parts.iter().map(|(p, _)| p.elements()).sum(), parts.first().map_or(1, |p| p.0.copies));
    assert_eq!(held, copies * whole.elements(), "{}: elements of all parts, {copies} copies of each", whole.name);
    clear_padding(whole, out);
    for (part, from) in parts {
        check(whole, out.len(), part, from.len());
        runs::<T>(whole, part, |at, held, len| out[at..at + len].copy_from_slice(&from[held..held + len]));
    }
}

/// The runs of rows that a part holds, with the index of the first among its rows.
pub(super) fn held_rows(spec: &ParamSpec) -> impl Iterator<Item = (usize, &Range<usize>)> {
    spec.rows.iter().scan(0, |end, rows| {
        let start = *end;
        *end += rows.len();
        Some((start, rows))
    })
}

fn check(whole: &ParamSpec, whole_len: usize, part: &ParamSpec, part_len: usize) {
    assert!(
        whole.is_whole() && whole.name == part.name && whole.full == part.full && whole.layout == part.layout,
        "{} {:?} is no part of {} {:?}",
        part.name,
        part.full,
        whole.name,
        whole.shape
    );
    assert!(whole_len == whole.len && part_len == part.len, "{}: {whole_len} and {part_len} values", whole.name);
}

fn clear_padding<T: Flat>(spec: &ParamSpec, out: &mut [T]) {
    if spec.len > spec.elements() {
        out.fill(T::default());
    }
}

/// Calls `copy(index in the whole, index in the part, length)` for the runs that both hold in the same order.
fn runs<T: Flat>(whole: &ParamSpec, part: &ParamSpec, mut copy: impl FnMut(usize, usize, usize)) {
    let (_, width) = whole.full_dims();
    let columns = part.columns.clone();
    let mut held = 0;
    for rows in &part.rows {
        match part.layout {
            Layout::Row if columns == (0..width) => {
                copy(rows.start * width, held * width, rows.len() * width);
                held += rows.len();
            }
            Layout::Row => {
                for row in rows.clone() {
                    copy(row * width + columns.start, held * columns.len(), columns.len());
                    held += 1;
                }
            }
            Layout::Panel => {
                let mut row = rows.start;
                while row < rows.end {
                    // As many rows as stay within one panel on both sides.
                    let lanes = (rows.end - row).min(PANEL - row % PANEL).min(PANEL - held % PANEL);
                    let at = |row: usize, width: usize| Lanes {
                        panel: Layout::Panel.index(width, row / PANEL * PANEL, 0),
                        lane: row % PANEL,
                    };
                    panel_runs::<T>(at(row, width), at(held, columns.len()), lanes, &columns, &mut copy);
                    row += lanes;
                    held += lanes;
                }
            }
        }
    }
}

/// Some lanes of a panel.
#[derive(Clone, Copy)]
struct Lanes {
    /// Index of the panel's first element.
    panel: usize,
    lane: usize,
}

impl Lanes {
    /// Index of the first lane's element in a column.
    fn at<T: Flat>(self, column: usize) -> usize {
        let i = T::INTERLEAVED;
        self.panel + column / i * i * PANEL + self.lane * i + column % i
    }
}

/// The runs of `lanes` lanes over `columns` of the whole, which are columns 0.. of the part.
fn panel_runs<T: Flat>(
    whole: Lanes,
    part: Lanes,
    lanes: usize,
    columns: &Range<usize>,
    copy: &mut impl FnMut(usize, usize, usize),
) {
    let (i, k) = (T::INTERLEAVED, columns.len());
    // Columns that interleave on both sides alike.
    let together = if columns.start.is_multiple_of(i) { k / i * i } else { 0 };
    if lanes == PANEL {
        if together > 0 {
            copy(whole.at::<T>(columns.start), part.at::<T>(0), together * PANEL);
        }
    } else {
        for c in (0..together).step_by(i) {
            copy(whole.at::<T>(columns.start + c), part.at::<T>(c), lanes * i);
        }
    }
    for c in together..k {
        for lane in 0..lanes {
            copy(whole.at::<T>(columns.start + c) + lane * i, part.at::<T>(c) + lane * i, 1);
        }
    }
}
