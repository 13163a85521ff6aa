//! What the ranks of the sequence axis hold of a packed row, and how their parts come together again.

use super::exchange;
use crate::comm::Group;
use crate::gradient::microbatch::PackedRow;
use crate::ops::zigzag;

/// This rank's part of a packed row.
#[derive(Clone, Debug)]
pub struct Cut {
    pub row: PackedRow,
    /// Which of the whole row's predicted tokens are predicted here, ascending.
    pub held: Vec<usize>,
}

impl Cut {
    /// The part of a rank along the sequence axis.
    pub fn of(whole: &PackedRow, sequence: &Group) -> Self {
        Self::part(whole, sequence.rank(), sequence.size())
    }

    fn part(whole: &PackedRow, rank: usize, size: usize) -> Self {
        let local = zigzag::rows(&whole.cu_seqlens, rank, size);
        let mut row = PackedRow {
            tokens: local.iter().map(|&i| whole.tokens[i]).collect(),
            positions: local.iter().map(|&i| whole.positions[i]).collect(),
            cu_seqlens: whole.cu_seqlens.clone(),
            ..PackedRow::new()
        };
        let held = held(whole, rank, size);
        for &j in &held {
            row.rows.push(local.partition_point(|&i| i < whole.rows[j] as usize) as u32);
            row.targets.push(whole.targets[j]);
        }
        row.row_offsets.extend(whole.row_offsets[1..].iter().map(|&end| held.partition_point(|&j| j < end)));
        Self { row, held }
    }

    /// The values of the predicted tokens held here, of one value a predicted token of the whole row; none of none.
    pub fn pick(&self, whole: &[f32]) -> Vec<f32> {
        if whole.is_empty() { Vec::new() } else { self.held.iter().map(|&j| whole[j]).collect() }
    }
}

/// Which of the row's predicted tokens a rank predicts: those behind the tokens that it holds.
fn held(whole: &PackedRow, rank: usize, size: usize) -> Vec<usize> {
    let local = zigzag::rows(&whole.cu_seqlens, rank, size);
    (0..whole.rows.len()).filter(|&j| local.binary_search(&(whole.rows[j] as usize)).is_ok()).collect()
}

/// One value a predicted token of the whole row from those that each rank of the sequence axis has.
pub fn join(whole: &PackedRow, sequence: &Group, mine: &[f32]) -> Vec<f32> {
    let mut joined = vec![0.0; whole.rows.len()];
    for (rank, values) in exchange::gather_f32(sequence, mine).iter().enumerate() {
        held(whole, rank, sequence.size()).into_iter().zip(values).for_each(|(j, value)| joined[j] = *value);
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> PackedRow {
        let mut row = PackedRow::new();
        for (tokens, first) in [(1, 1), (9, 4), (2, 1), (40, 17), (5, 5)] {
            row.push(&(0..tokens).map(|i| 100 * tokens + i).collect::<Vec<u32>>(), first);
        }
        row
    }

    #[test]
    fn one_rank_holds_the_row_as_it_is() {
        let cut = Cut::of(&row(), &Group::one());
        assert_eq!(cut.row, row());
        assert_eq!(cut.held, (0..row().rows.len()).collect::<Vec<_>>());
    }

    #[test]
    fn labels_at_the_borders_of_parts_are_kept_and_each_is_on_one_rank() {
        let whole = row();
        for size in 1..6 {
            let mut seen = vec![0; whole.rows.len()];
            for rank in 0..size {
                let Cut { row, held } = Cut::part(&whole, rank, size);
                assert_eq!((row.cu_seqlens.clone(), row.row_offsets.len()), (whole.cu_seqlens.clone(), 6));
                for (i, &j) in held.iter().enumerate() {
                    seen[j] += 1;
                    let here = row.rows[i] as usize;
                    assert_eq!(row.targets[i], whole.targets[j]);
                    assert_eq!(row.targets[i], row.tokens[here] + 1, "the token behind the one held, wherever it is");
                    assert_eq!(row.positions[here], row.tokens[here] % 100);
                    let sequence = |offsets: &[usize], j| offsets.partition_point(|&end| end <= j);
                    assert_eq!(sequence(&row.row_offsets, i), sequence(&whole.row_offsets, j));
                }
            }
            assert!(seen.iter().all(|&times| times == 1), "{size} ranks: {seen:?}");
        }
    }
}
