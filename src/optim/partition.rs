//! How a flat buffer of parameters is dealt to ranks.

use std::ops::Range;

/// Ranges are cut at multiples of this many elements, and the gradient norm is summed in blocks of as many, so that a
/// block is never split and the norm does not depend on the number of ranks.
pub const BLOCK: usize = 4096;

/// One contiguous range a rank; whole blocks, as even as blocks allow. Later ranks may get nothing from a small buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    len: usize,
    ranges: Vec<Range<usize>>,
}

impl Partition {
    pub fn new(len: usize, ranks: usize) -> Self {
        let blocks = len.div_ceil(BLOCK);
        let at = |r: usize| (r * blocks / ranks * BLOCK).min(len);
        Self { len, ranges: (0..ranks).map(|r| at(r)..at(r + 1)).collect() }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    pub fn of(&self, rank: usize) -> Range<usize> {
        self.ranges[rank].clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_cover_a_buffer_once_in_whole_blocks() {
        for len in [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK + 17] {
            for ranks in 1..6 {
                let partition = Partition::new(len, ranks);
                let mut end = 0;
                for range in partition.ranges() {
                    assert_eq!(range.start, end);
                    assert!(range.start.is_multiple_of(BLOCK) || range.start == len);
                    end = range.end;
                }
                assert_eq!(end, len);
                let most = partition.ranges().iter().map(Range::len).max().expect("a rank");
                assert!(most <= len.div_ceil(ranks).next_multiple_of(BLOCK), "{len} over {ranks}: {most}");
            }
        }
    }
}
