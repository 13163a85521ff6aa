//! Plans the transfers that convert a unit to another layout. Every element that a part lacks is transferred once: from
//! the rank itself if it has it, else from the first rank that does. All ranks derive the same plan from the tables of
//! the parts.

use crate::model::params::{ParamSpec, ParamTable};
use crate::tensor::{DType, Layout, PANEL, Piece, Slice, SliceMut};
use std::ops::Range;
use std::sync::Arc;

/// Values that a part of the new layout takes from a part of the old one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Take {
    /// The rank of the tensor axis that has them. `None`: the new part itself, which holds them twice.
    pub source: Option<usize>,
    pub from: Piece,
    pub to: Piece,
}

/// The sections of a piece within a range of the part: a partial row, whole rows, a partial row.
fn clipped(piece: Piece, range: &Range<usize>) -> Vec<Piece> {
    let piece = piece.joined();
    let (start, end) = (range.start.max(piece.at), range.end);
    let first = (start - piece.at) / piece.stride;
    let last = end.saturating_sub(piece.at).div_ceil(piece.stride).min(piece.rows);
    let part_of = |row: usize| {
        let at = piece.at + row * piece.stride;
        let (from, to) = (at.max(start), (at + piece.width).min(end));
        Piece { at: from, stride: piece.stride, rows: 1, width: to.saturating_sub(from) }
    };
    let whole = |row: &usize| part_of(*row).width == piece.width;
    let mut found = Vec::new();
    let mut row = first;
    while row < last {
        let run = (row..last).take_while(whole).count();
        if run > 0 {
            found.push(Piece { at: piece.at + row * piece.stride, rows: run, ..piece });
        } else {
            found.extend(Some(part_of(row)).filter(|part| part.width > 0));
        }
        row += run.max(1);
    }
    found
}

/// The sections of `pieces` within `range`.
pub fn within(pieces: &[Piece], range: &Range<usize>) -> Vec<Piece> {
    pieces.iter().flat_map(|piece| clipped(*piece, range)).collect()
}

pub fn len(pieces: &[Piece]) -> usize {
    pieces.iter().map(Piece::len).sum()
}

/// Copies runs of values end to end.
pub fn pack(pieces: &[Piece], from: Slice, to: &mut SliceMut) {
    let mut end = 0;
    for piece in pieces {
        to.copy_from(from, piece, &Piece { at: end, stride: piece.width, ..*piece });
        end += piece.len();
    }
}

/// Copies values that lie end to end to their places.
pub fn unpack(pieces: &[Piece], from: Slice, to: &mut SliceMut) {
    let mut end = 0;
    for piece in pieces {
        to.copy_from(from, &Piece { at: end, stride: piece.width, ..*piece }, piece);
        end += piece.len();
    }
}

/// The transfers from the parts `from` of the tensor ranks to the part `to` of a unit. `own` is this rank's index in
/// `from`.
pub fn takes(from: &[Arc<ParamTable>], own: usize, to: &ParamTable, unit: usize, dtype: DType) -> Vec<Take> {
    let begins = to.units()[unit].clone();
    let mut found = Vec::new();
    for (i, spec) in to.specs().iter().enumerate().filter(|(_, spec)| begins.contains(&spec.offset)) {
        let sources = std::iter::once(own).chain((0..from.len()).filter(|source| *source != own));
        let sources = sources.map(|source| {
            let (table, spec) = (&from[source], &from[source].specs()[i]);
            (source, Held { spec, at: spec.offset - table.units()[unit].start, dtype })
        });
        of_spec(&sources.collect::<Vec<_>>(), Held { spec, at: spec.offset - begins.start, dtype }, &mut found);
    }
    found
}

fn of_spec(sources: &[(usize, Held)], new: Held, found: &mut Vec<Take>) {
    let to = new.spec;
    let mut there: Vec<(usize, Range<usize>)> = Vec::new();
    for (to_row, wanted) in to.held_rows() {
        let mut missing = vec![wanted.clone()];
        // Heads that this part holds twice come once. (In a panel the two lie within each other.)
        for (row, held) in there.iter().filter(|_| to.layout == Layout::Row) {
            missing = without(missing, held, |rows| {
                let [from, place] = [row + rows.start - held.start, to_row + rows.start - wanted.start];
                pair(new.corner(from, 0), new.corner(place, 0), [rows.len(), to.columns.len()], |from, to| {
                    found.push(Take { source: None, from, to });
                });
                true
            });
        }
        for (source, old) in sources {
            let spec = old.spec;
            let columns = spec.columns.start.max(to.columns.start)..spec.columns.end.min(to.columns.end);
            if columns.is_empty() {
                continue;
            }
            for (row, held) in spec.held_rows() {
                missing = without(missing, held, |rows| {
                    let from = old.corner(row + rows.start - held.start, columns.start - spec.columns.start);
                    let place = new.corner(to_row + rows.start - wanted.start, columns.start - to.columns.start);
                    pair(from, place, [rows.len(), columns.len()], |from, to| {
                        found.push(Take { source: Some(*source), from, to });
                    });
                    // Else others have the rest of the columns.
                    columns.len() == to.columns.len()
                });
            }
        }
        there.push((to_row, wanted.clone()));
    }
}

/// A parameter within a part of a unit.
#[derive(Clone, Copy)]
struct Held<'a> {
    spec: &'a ParamSpec,
    /// Its first element in the part.
    at: usize,
    dtype: DType,
}

/// An element of a held parameter, by its row and column within the part.
#[derive(Clone, Copy)]
struct Corner<'a> {
    held: Held<'a>,
    row: usize,
    column: usize,
}

impl<'a> Held<'a> {
    fn corner(self, row: usize, column: usize) -> Corner<'a> {
        Corner { held: self, row, column }
    }

    /// The number of neighboring columns that interleave in a panel.
    fn interleaved(self) -> usize {
        if self.dtype == DType::F32 { 1 } else { 2 }
    }
}

impl Corner<'_> {
    fn at(self) -> usize {
        let (k, Held { spec, at, .. }) = (self.held.spec.columns.len(), self.held);
        match spec.layout {
            Layout::Row => at + spec.layout.index(k, self.row, self.column),
            Layout::Panel => {
                let i = self.held.interleaved();
                let panel = spec.layout.index(k, self.row / PANEL * PANEL, 0);
                at + panel + self.column / i * i * PANEL + self.row % PANEL * i + self.column % i
            }
        }
    }
}

/// Calls `found` with pairs of equally shaped pieces, which cover the rows and columns from two corners on.
fn pair(from: Corner, to: Corner, [rows, columns]: [usize; 2], mut found: impl FnMut(Piece, Piece)) {
    if to.held.spec.layout == Layout::Row {
        let piece = |c: Corner| Piece { at: c.at(), stride: c.held.spec.columns.len(), rows, width: columns };
        return found(piece(from), piece(to));
    }
    let i = to.held.interleaved();
    // Columns that interleave on both sides alike.
    let is_aligned = from.column.is_multiple_of(i) && to.column.is_multiple_of(i);
    let together = if is_aligned { columns / i * i } else { 0 };
    let mut done = 0;
    while done < rows {
        let [from, to] = [from, to].map(|c| Corner { row: c.row + done, ..c });
        // As many rows as stay within one panel on both sides.
        let lanes = (rows - done).min(PANEL - from.row % PANEL).min(PANEL - to.row % PANEL);
        done += lanes;
        if together > 0 {
            let piece = |c: Corner| Piece { at: c.at(), stride: PANEL * i, rows: together / i, width: lanes * i };
            found(piece(from).joined(), piece(to).joined());
        }
        for column in together..columns {
            let piece = |c: Corner| Corner { column: c.column + column, ..c }.at();
            let [from, to] = [from, to].map(|c| Piece { at: piece(c), stride: i, rows: lanes, width: 1 });
            found(from, to);
        }
    }
}

/// Calls `found` with the rows of `missing` that are among `held`. Returns the rows that are still missing. `found`
/// returns whether all columns of its rows are found.
pub(super) fn without(
    missing: Vec<Range<usize>>,
    held: &Range<usize>,
    mut found: impl FnMut(&Range<usize>) -> bool,
) -> Vec<Range<usize>> {
    let mut left = Vec::with_capacity(missing.len());
    for gap in missing {
        let rows = gap.start.max(held.start)..gap.end.min(held.end);
        if rows.is_empty() || !found(&rows) {
            left.push(gap);
            continue;
        }
        left.extend([gap.start..rows.start, rows.end..gap.end].into_iter().filter(|rest| !rest.is_empty()));
    }
    left
}

/// The union of the pieces that several ranks need from a part: each value once. The pieces of a parameter are whole
/// rows, or columns of the same rows.
pub fn union(table: &ParamTable, unit: usize, mut pieces: Vec<Piece>) -> Vec<Piece> {
    pieces.sort_by_key(|piece| (piece.at, piece.len()));
    let begins = table.units()[unit].clone();
    let alike = |a: &Piece, b: &Piece| a.rows == b.rows && (a.rows == 1 || a.stride == b.stride);
    let mut all = Vec::new();
    for spec in table.specs().iter().filter(|spec| begins.contains(&spec.offset)) {
        let start = spec.offset - begins.start;
        let of_spec = pieces.iter().filter(|piece| (start..start + spec.len).contains(&piece.at));
        let mut last: Option<Piece> = None;
        for piece in of_spec.map(|piece| piece.joined()) {
            match &mut last {
                // Neighbours and what overlaps are one; rows of columns are those of the same rows.
                Some(last) if alike(last, &piece) && piece.at <= last.at + last.width => {
                    last.width = last.width.max(piece.at + piece.width - last.at);
                    last.stride = if last.rows == 1 { last.width } else { last.stride };
                }
                _ => all.extend(last.replace(piece)),
            }
        }
        all.extend(last);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The positions of pieces, in their order.
    fn positions(pieces: &[Piece]) -> Vec<usize> {
        let row =
            |piece: &Piece, row: usize| piece.at + row * piece.stride..piece.at + row * piece.stride + piece.width;
        pieces.iter().flat_map(|piece| (0..piece.rows).flat_map(|r| row(piece, r)).collect::<Vec<_>>()).collect()
    }

    #[test]
    fn a_piece_can_be_split_anywhere_and_its_parts_add_up_to_it() {
        for piece in [
            Piece { at: 5, stride: 10, rows: 6, width: 4 },
            Piece { at: 3, stride: 7, rows: 4, width: 7 },
            Piece { at: 0, stride: 9, rows: 1, width: 2 },
        ] {
            let all = positions(&[piece]);
            for a in 0..80 {
                for b in a..80 {
                    let cut: Vec<usize> = positions(&within(&[piece], &(a..b)));
                    let want: Vec<usize> = all.iter().copied().filter(|at| (a..b).contains(at)).collect();
                    assert_eq!(cut, want, "{piece:?} within {a}..{b}");
                }
                let both = [within(&[piece], &(0..a)), within(&[piece], &(a..100))].concat();
                assert_eq!(positions(&both), all, "{piece:?} cut at {a}");
            }
        }
    }
}
