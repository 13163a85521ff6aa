//! What each rank sends to which so that a unit comes into another layout: every element that a part lacks once, from the rank
//! itself where it has it, else from the first that does. All of it follows from the tables of the parts, so that who sends and
//! who receives count alike.

use super::cut::held_rows;
use super::params::{ParamSpec, ParamTable};
use crate::device::cuda::copy;
use crate::device::cuda::{View, ViewMut};
use std::ops::Range;
use std::sync::Arc;

/// Runs of values of a part of a unit, counted from where that begins: `rows` of `width` values, `stride` apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub at: usize,
    pub stride: usize,
    pub rows: usize,
    pub width: usize,
}

/// Values that a part of the new layout takes from a part of the old one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Take {
    /// The rank of the tensor axis that has them; none: the new part itself, which holds them twice.
    pub source: Option<usize>,
    pub from: Piece,
    pub to: Piece,
}

impl Piece {
    pub fn len(&self) -> usize {
        self.rows * self.width
    }

    /// Rows without gaps are one.
    fn joined(self) -> Self {
        if self.stride != self.width {
            return self;
        }
        Self { stride: self.len(), rows: 1, width: self.len(), ..self }
    }

    /// What of it lies within a range of the part: a row that is cut at its beginning, whole ones, one that is cut at its end.
    fn within(self, range: &Range<usize>) -> Vec<Self> {
        let piece = self.joined();
        let (start, end) = (range.start.max(piece.at), range.end);
        let first = (start - piece.at) / piece.stride;
        let last = end.saturating_sub(piece.at).div_ceil(piece.stride).min(piece.rows);
        let clipped = |row: usize| {
            let at = piece.at + row * piece.stride;
            let (from, to) = (at.max(start), (at + piece.width).min(end));
            Self { at: from, stride: piece.stride, rows: 1, width: to.saturating_sub(from) }
        };
        let whole = |row: &usize| clipped(*row).width == piece.width;
        let mut found = Vec::new();
        let mut row = first;
        while row < last {
            let run = (row..last).take_while(whole).count();
            if run > 0 {
                found.push(Self { at: piece.at + row * piece.stride, rows: run, ..piece });
            } else {
                found.extend(Some(clipped(row)).filter(|part| part.width > 0));
            }
            row += run.max(1);
        }
        found
    }
}

/// Those of `pieces` that lie in `range`.
pub fn within(pieces: &[Piece], range: &Range<usize>) -> Vec<Piece> {
    pieces.iter().flat_map(|piece| piece.within(range)).collect()
}

pub fn len(pieces: &[Piece]) -> usize {
    pieces.iter().map(Piece::len).sum()
}

/// Copies runs of values end to end.
pub fn pack(pieces: &[Piece], from: View, to: &mut ViewMut) {
    let mut end = 0;
    for piece in pieces {
        let packed = Piece { at: end, stride: piece.width, ..*piece };
        copied(piece, from, &packed, to);
        end += piece.len();
    }
}

/// Puts values that lie end to end where they belong.
pub fn unpack(pieces: &[Piece], from: View, to: &mut ViewMut) {
    let mut end = 0;
    for piece in pieces {
        let packed = Piece { at: end, stride: piece.width, ..*piece };
        copied(&packed, from, piece, to);
        end += piece.len();
    }
}

/// Copies a piece whose rows lie otherwise there.
pub fn copied(piece: &Piece, from: View, place: &Piece, to: &mut ViewMut) {
    let (piece, place, rows, width) = match (piece.joined(), place.joined()) {
        (a, b) if a.rows == 1 && b.rows == 1 => (a, b, 1, a.width),
        _ => (*piece, *place, piece.rows, piece.width),
    };
    let end = |of: &Piece| of.at + (rows.max(1) - 1) * of.stride + width;
    let (old, mut new) = (from.part(piece.at..end(&piece)), to.reborrow().part(place.at..end(&place)));
    if rows == 1 {
        new.copy_from(old);
    } else {
        copy::columns(old, piece.stride, new, place.stride, rows, width);
    }
}

/// What the part `to` of a unit takes from the parts `from` of the tensor ranks, of which `own` is this rank's.
pub fn takes(from: &[Arc<ParamTable>], own: usize, to: &ParamTable, unit: usize) -> Vec<Take> {
    let begins = to.units()[unit].clone();
    let mut found = Vec::new();
    for (i, spec) in to.specs().iter().enumerate().filter(|(_, spec)| begins.contains(&spec.offset)) {
        of_spec(from, own, (i, spec), [unit, begins.start], &mut found);
    }
    found
}

fn of_spec(
    from: &[Arc<ParamTable>],
    own: usize,
    (i, to): (usize, &ParamSpec),
    [unit, begins]: [usize; 2],
    found: &mut Vec<Take>,
) {
    let stride = to.columns.len();
    let here = |row: usize, column: usize| to.offset - begins + row * stride + column;
    let mut there: Vec<(usize, Range<usize>)> = Vec::new();
    for (to_row, wanted) in held_rows(to) {
        let mut missing = vec![wanted.clone()];
        // Heads that this part holds twice come once.
        for (row, held) in &there {
            missing = without(missing, held, |rows| {
                let [from, place] = [row + rows.start - held.start, to_row + rows.start - wanted.start];
                let piece = |row| Piece { at: here(row, 0), stride, rows: rows.len(), width: stride };
                found.push(Take { source: None, from: piece(from), to: piece(place) });
                true
            });
        }
        for source in std::iter::once(own).chain((0..from.len()).filter(|source| *source != own)) {
            let (table, spec) = (&from[source], &from[source].specs()[i]);
            let columns = spec.columns.start.max(to.columns.start)..spec.columns.end.min(to.columns.end);
            if columns.is_empty() {
                continue;
            }
            let (offset, old) = (spec.offset - table.units()[unit].start, spec.columns.len());
            for (row, held) in held_rows(spec) {
                missing = without(missing, held, |rows| {
                    let (rows, width) = (rows.clone(), columns.len());
                    let at = offset + (row + rows.start - held.start) * old + columns.start - spec.columns.start;
                    let place = here(to_row + rows.start - wanted.start, columns.start - to.columns.start);
                    let from = Piece { at, stride: old, rows: rows.len(), width };
                    let to = Piece { at: place, stride, rows: rows.len(), width };
                    found.push(Take { source: Some(source), from, to });
                    // Else others have the rest of the columns.
                    width == stride
                });
            }
        }
        there.push((to_row, wanted.clone()));
    }
}

/// Calls `found` with what of `missing` is among `held`; what is missing then, where it says that this is all of the rows.
fn without(
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

/// What of a part several takers need, each value once. The pieces of a parameter are whole rows, or columns of the same rows.
pub fn union(table: &ParamTable, unit: usize, mut pieces: Vec<Piece>) -> Vec<Piece> {
    pieces.sort_by_key(|piece| (piece.at, piece.len()));
    let begins = table.units()[unit].clone();
    let mut all = Vec::new();
    for spec in table.specs().iter().filter(|spec| begins.contains(&spec.offset)) {
        let start = spec.offset - begins.start;
        let of_spec = pieces.iter().filter(|piece| (start..start + spec.len).contains(&piece.at));
        let mut last: Option<Piece> = None;
        for piece in of_spec.map(|piece| piece.joined()) {
            match &mut last {
                // Neighbours and what overlaps are one; rows of columns are those of the same rows.
                Some(last) if last.rows == piece.rows && piece.at <= last.at + last.width => {
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
    fn a_piece_is_cut_anywhere_and_its_parts_are_all_of_it() {
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
