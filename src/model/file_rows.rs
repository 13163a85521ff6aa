//! Where the rows of a parameter are in the files of a model. Most parameters have a tensor of their own, in the same
//! order. Some families join matrices, and some rotate other columns of a head than `ops::rope` does.

/// The rows of a parameter in a tensor of the files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRows {
    pub tensor: String,
    /// The first row of the parameter, and the number of rows of the tensor.
    pub first: usize,
    pub of: usize,
    /// The number of matrices in the tensor, if it has three dims: all rows of one matrix, then those of the next.
    pub matrices: Option<usize>,
    /// Whether each matrix is transposed in the tensor. Rows are those of the matrices before that.
    pub is_transposed: bool,
    /// The order of the columns of heads, which are the rows here, if it is another one.
    pub heads: Option<HeadRows>,
    /// The distances of its rows, if those of other parameters are between them.
    pub runs: Option<Runs>,
    /// Its columns, if those of other parameters are between them.
    pub columns: Option<Columns>,
}

/// Columns at equal distances in a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Columns {
    /// The first column of the parameter, the distance to the next, and the number of columns of the tensor.
    pub first: usize,
    pub step: usize,
    pub of: usize,
}

/// Runs of neighboring rows at equal distances in a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runs {
    /// Rows of a run.
    pub rows: usize,
    /// Rows of the tensor from the first one of a run to that of the next.
    pub step: usize,
}

impl Runs {
    /// The row of the tensor of row `row` of the parameter, without `FileRows::first`.
    fn in_file(self, row: usize) -> usize {
        row / self.rows * self.step + row % self.rows
    }
}

/// The columns of a head that are rotated: the first ones in the files. `ops::rope` turns column i with i + e/2, so here
/// the first columns of each half turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadRows {
    pub head_dim: usize,
    pub rotated: usize,
    /// Whether the files turn column 2i with 2i + 1, not i with i + rotated/2.
    pub is_interleaved: bool,
    /// Whether each head has as many further rows after it, in the same order.
    pub has_gate: bool,
    /// The number of rows before those of each head, in the same order.
    pub skipped: usize,
}

impl HeadRows {
    /// The order of a head, unless it is that of `ops::rope`.
    pub fn new(head_dim: usize, rotated: usize, is_interleaved: bool) -> Option<Self> {
        let is_same = rotated == 0 || (rotated == head_dim && !is_interleaved);
        (!is_same).then_some(Self { head_dim, rotated, is_interleaved, has_gate: false, skipped: 0 })
    }

    /// Rows of a head, with those of its gate and those before it.
    pub fn unit(self) -> usize {
        self.skipped + self.head_dim * (1 + usize::from(self.has_gate))
    }

    /// The row in the files of row `row` of the parameter.
    pub fn in_file(self, row: usize) -> usize {
        let Self { head_dim, rotated, is_interleaved, skipped, .. } = self;
        let (half, pairs) = (head_dim / 2, rotated / 2);
        let column = match (row % self.unit()).checked_sub(skipped) {
            Some(column) if column < head_dim => column,
            _ => return row,
        };
        let (second, i) = (column / half, column % half);
        let found = match i.checked_sub(pairs) {
            None if is_interleaved => 2 * i + second,
            None => i + second * pairs,
            Some(i) => rotated + second * (half - pairs) + i,
        };
        row - column + found
    }
}

impl FileRows {
    /// A tensor of its own, of `rows` rows.
    pub fn own(name: &str, rows: usize) -> Self {
        let tensor = name.to_owned();
        Self {
            tensor,
            first: 0,
            of: rows,
            matrices: None,
            is_transposed: false,
            heads: None,
            runs: None,
            columns: None,
        }
    }

    /// Whether the values are not neighbors in the order of the parameter.
    pub fn is_scattered(&self) -> bool {
        self.heads.is_some() || self.runs.is_some() || self.is_transposed || self.columns.is_some()
    }

    /// The number of columns of the tensor, for a parameter of `width` columns.
    pub fn width(&self, width: usize) -> usize {
        self.columns.map_or(width, |columns| columns.of)
    }

    /// The number of rows of each matrix of the tensor.
    pub fn matrix_rows(&self) -> usize {
        self.of / self.matrices.unwrap_or(1)
    }

    /// The place in the matrix of the tensor that has the first row.
    #[must_use]
    pub fn in_matrix(&self) -> Self {
        let of = self.matrix_rows();
        Self { first: self.first % of, of, matrices: self.matrices.map(|_| 1), ..self.clone() }
    }

    /// The index in the tensor of element `element` of the parameter, in rows of `width` values.
    fn index(&self, width: usize, element: usize) -> usize {
        let (row, column) = (self.in_file(element / width), element % width);
        let column = self.columns.map_or(column, |columns| columns.first + column * columns.step);
        let width = self.width(width);
        if !self.is_transposed {
            return row * width + column;
        }
        let rows = self.matrix_rows();
        (row / rows * width + column) * rows + row % rows
    }

    /// The row of the tensor that row `row` of the parameter is.
    fn in_file(&self, row: usize) -> usize {
        let row = self.heads.map_or(row, |heads| heads.in_file(row));
        self.first + self.runs.map_or(row, |runs| runs.in_file(row))
    }

    /// Fills `out` with row-major values of the parameter from element `start` on, in rows of `width` values. `read`
    /// does so for the tensor.
    pub fn read(&self, width: usize, start: usize, out: &mut [f32], read: &dyn Fn(usize, &mut [f32])) {
        if !self.is_scattered() {
            return read(self.first * width + start, out);
        }
        if self.is_transposed || self.columns.is_some() {
            return (start..).zip(out).for_each(|(at, x)| read(self.index(width, at), std::slice::from_mut(x)));
        }
        let (mut at, mut rest) = (start, out);
        while !rest.is_empty() {
            let (row, column) = (at / width, at % width);
            let (part, after) = rest.split_at_mut((width - column).min(rest.len()));
            read(self.in_file(row) * width + column, part);
            at += part.len();
            rest = after;
        }
    }

    /// Writes rows of the parameter of `width` values, from row `first` on, to their places in the tensor.
    pub fn write(&self, width: usize, first: usize, rows: &[f32], tensor: &mut [f32]) {
        if self.is_transposed || self.columns.is_some() {
            return (first * width..).zip(rows).for_each(|(at, x)| tensor[self.index(width, at)] = *x);
        }
        for (row, values) in rows.chunks_exact(width).enumerate() {
            tensor[self.in_file(first + row) * width..][..width].copy_from_slice(values);
        }
    }

    /// The rows of the tensor among which rows `rows` of the parameter are.
    pub fn span(&self, rows: std::ops::Range<usize>) -> std::ops::Range<usize> {
        let e = self.heads.map_or(1, HeadRows::unit);
        let (start, end) = (rows.start / e * e, rows.end.next_multiple_of(e));
        let span = match self.runs {
            Some(runs) if start < end => self.first + runs.in_file(start)..self.first + runs.in_file(end - 1) + 1,
            _ => self.first + start..self.first + end,
        };
        // Rows of a transposed matrix are all over it.
        let rows = if self.is_transposed { self.matrix_rows() } else { 1 };
        span.start / rows * rows..span.end.next_multiple_of(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pairs_of_a_head_meet_half_a_head_apart_and_every_row_has_one_place() {
        for (e, rotated, is_interleaved) in [(8, 4, false), (8, 4, true), (16, 12, false), (8, 8, true), (6, 2, true)] {
            let order = HeadRows { head_dim: e, rotated, is_interleaved, has_gate: false, skipped: 0 };
            let file: Vec<usize> = (0..2 * e).map(|row| order.in_file(row)).collect();
            let mut all = file.clone();
            all.sort_unstable();
            assert_eq!(all, (0..2 * e).collect::<Vec<_>>());
            for i in 0..rotated / 2 {
                let pair = if is_interleaved { [2 * i, 2 * i + 1] } else { [i, i + rotated / 2] };
                assert_eq!([file[e + i], file[e + i + e / 2]], pair.map(|column| e + column), "{order:?}");
            }
            let rows: Vec<f32> = (0..2 * e).map(|row| file[row] as f32).collect();
            let (place, mut tensor) = (FileRows { heads: Some(order), ..FileRows::own("q", 2 * e) }, vec![0.0; 2 * e]);
            place.write(1, 0, &rows, &mut tensor);
            assert_eq!(tensor, (0..2 * e).map(|row| row as f32).collect::<Vec<_>>());
        }
        assert_eq!(HeadRows::new(8, 8, false), None);
        let behind = HeadRows { skipped: 3, ..HeadRows::new(4, 4, true).unwrap() };
        let file: Vec<usize> = (0..14).map(|row| behind.in_file(row)).collect();
        assert_eq!(file, [0, 1, 2, 3, 5, 4, 6, 7, 8, 9, 10, 12, 11, 13]);
    }

    #[test]
    fn parts_of_a_joined_tensor_are_read_row_by_row() {
        let heads = HeadRows::new(4, 2, false);
        let rows = FileRows { first: 3, heads, ..FileRows::own("joined", 9) };
        let read = |start: usize, out: &mut [f32]| {
            out.iter_mut().enumerate().for_each(|(i, x)| *x = (start + i) as f32);
        };
        let mut out = [0.0; 5];
        rows.read(2, 1, &mut out, &read);
        assert_eq!(out, [7.0, 10.0, 11.0, 8.0, 9.0], "rows 0, 2 and 1 of a head");
        assert_eq!(rows.span(1..3), 3..7);
    }

    #[test]
    fn matrices_whose_heads_alternate_in_a_tensor_are_read_and_written_run_by_run() {
        // Three heads, each with one row of a matrix, and two of another.
        let place = |first: usize, rows: usize| FileRows {
            first,
            runs: Some(Runs { rows, step: 3 }),
            ..FileRows::own("joined", 9)
        };
        let read = |start: usize, out: &mut [f32]| {
            out.iter_mut().enumerate().for_each(|(i, x)| *x = (start + i) as f32);
        };
        let ([one, two], mut tensor) = ([place(0, 1), place(1, 2)], vec![f32::NAN; 18]);
        for (rows, count) in [(&one, 3), (&two, 6)] {
            let mut all = vec![0.0; count * 2];
            rows.read(2, 0, &mut all, &read);
            // In pieces.
            rows.write(2, 0, &all[..4], &mut tensor);
            rows.write(2, 2, &all[4..], &mut tensor);
        }
        assert_eq!(tensor, (0..18).map(|x| x as f32).collect::<Vec<_>>());
        let mut out = [0.0; 4];
        two.read(2, 3, &mut out, &read);
        assert_eq!(out, [5.0, 8.0, 9.0, 10.0], "the end of row 2, row 4, the beginning of row 5");
        assert_eq!((two.span(1..4), two.span(0..6), one.span(1..2)), (2..6, 1..9, 3..4));
    }

    #[test]
    fn columns_of_several_parameters_in_turn_are_read_and_written_one_by_one() {
        // Of two experts, gates in rows 0 to 2 and ups in rows 3 to 5, with two columns each.
        let place = |first: usize, expert: usize| FileRows {
            first,
            columns: Some(Columns { first: expert, step: 2, of: 4 }),
            ..FileRows::own("both", 6)
        };
        let mut tensor = vec![f32::NAN; 24];
        for (first, expert) in [(0, 0), (3, 0), (0, 1), (3, 1)] {
            let rows = place(first, expert);
            let at = |row: usize, column: usize| ((first + row) * 4 + 2 * column + expert) as f32;
            let mut out = [0.0; 3];
            rows.read(2, 1, &mut out, &|start, out: &mut [f32]| out[0] = start as f32);
            assert_eq!(out, [at(0, 1), at(1, 0), at(1, 1)]);
            let all: Vec<f32> = (0..6).map(|i| at(i / 2, i % 2)).collect();
            rows.write(2, 0, &all[..2], &mut tensor);
            rows.write(2, 1, &all[2..], &mut tensor);
            assert!(rows.is_scattered() && rows.width(2) == 4);
        }
        assert_eq!(tensor, (0..24).map(|x| x as f32).collect::<Vec<_>>());
    }

    #[test]
    fn every_element_of_transposed_matrices_with_rows_in_turn_has_one_place() {
        // Two matrices of three gates and three ups of five columns, in turn.
        let place = |matrix: usize, turn: usize| FileRows {
            first: 6 * matrix + turn,
            matrices: Some(2),
            is_transposed: true,
            runs: Some(Runs { rows: 1, step: 2 }),
            ..FileRows::own("both", 12)
        };
        let mut tensor = vec![f32::NAN; 60];
        for (matrix, turn) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let rows = place(matrix, turn);
            let at = |row: usize, column: usize| (matrix * 30 + column * 6 + 2 * row + turn) as f32;
            let mut out = [0.0; 4];
            rows.read(5, 8, &mut out, &|start, out: &mut [f32]| out[0] = start as f32);
            assert_eq!(out, [at(1, 3), at(1, 4), at(2, 0), at(2, 1)]);
            let all: Vec<f32> = (0..15).map(|i| at(i / 5, i % 5)).collect();
            rows.write(5, 0, &all[..5], &mut tensor);
            rows.write(5, 1, &all[5..], &mut tensor);
            let mut own = vec![0.0; 30];
            rows.in_matrix().write(5, 0, &all, &mut own);
            assert_eq!(own[turn], at(0, 0), "its matrix alone");
            assert_eq!(rows.span(1..2), 6 * matrix..6 * matrix + 6);
        }
        assert_eq!(tensor, (0..60).map(|x| x as f32).collect::<Vec<_>>());
    }
}
