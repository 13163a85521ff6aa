//! Packed rows: sequences laid end to end in one row of tokens, no padding.

use crate::model::Keys;

/// One packed row. `cu_seqlens` = [0, end of sequence 0, ..., tokens].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PackedRow {
    pub tokens: Vec<u32>,
    /// Position of each token in its sequence.
    pub positions: Vec<u32>,
    pub cu_seqlens: Vec<usize>,
    /// Rows of the hidden state whose next token is predicted, in order.
    pub rows: Vec<u32>,
    /// The token that each of `rows` predicts.
    pub targets: Vec<u32>,
    /// `rows` of sequence i are row_offsets[i] .. row_offsets[i + 1].
    pub row_offsets: Vec<usize>,
}

impl PackedRow {
    pub fn new() -> Self {
        Self { cu_seqlens: vec![0], row_offsets: vec![0], ..Self::default() }
    }

    /// Appends a sequence; its tokens from index `first` on are predicted (`first` is at least 1).
    pub fn push(&mut self, tokens: &[u32], first: usize) {
        self.push_where(tokens, |i| i >= first);
    }

    /// Appends a sequence; token i (from 1 on) is predicted where `learned(i)`.
    pub fn push_where(&mut self, tokens: &[u32], learned: impl Fn(usize) -> bool) {
        let start = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        self.positions.extend(0..tokens.len() as u32);
        self.cu_seqlens.push(self.tokens.len());
        for i in (1..tokens.len()).filter(|&i| learned(i)) {
            self.rows.push((start + i - 1) as u32);
            self.targets.push(tokens[i]);
        }
        self.row_offsets.push(self.rows.len());
    }

    /// Attention over exactly these sequences.
    pub fn keys(&self) -> Keys<'_> {
        Keys::Packed { cu_seqlens: &self.cu_seqlens }
    }

    pub fn sequences(&self) -> usize {
        self.cu_seqlens.len() - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_never_cross_the_border_of_two_sequences() {
        let mut row = PackedRow::new();
        row.push(&[5, 6, 7], 1);
        row.push(&[8, 9], 1);
        assert_eq!(row.cu_seqlens, [0, 3, 5]);
        assert_eq!(row.positions, [0, 1, 2, 0, 1]);
        assert_eq!(row.rows, [0, 1, 3]);
        assert_eq!(row.targets, [6, 7, 9]);
        assert_eq!(row.row_offsets, [0, 2, 3]);
    }
}
