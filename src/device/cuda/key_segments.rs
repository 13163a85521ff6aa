//! Runs of keys: all attention kernels cut a row at their ends, as in `cuda/key_segments.cuh`.

use super::gpu::Arg;
use super::memory::Memory;
use crate::dtype::DType;

/// Keys of a run.
pub const RUN: usize = 4096;

/// A launch for the rows of a table's first tiles, over one run or over all keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    from: usize,
    to: usize,
    pub tiles: usize,
}

impl Run {
    /// All keys, not cut.
    pub fn whole(tiles: usize) -> Self {
        Self { from: 0, to: i32::MAX as usize, tiles }
    }

    /// The arguments of the run: its ends, and the memory for rows between runs.
    pub fn args(&self, before: Option<&mut Memory>) -> [Arg; 3] {
        let before = before.map_or(Arg::Address(0), |before| before.view_mut(DType::F32).arg(DType::F32));
        let end = |at: usize| Arg::I32(i32::try_from(at).expect("keys are counted in 31 bits"));
        [end(self.from), end(self.to), before]
    }
}

/// The launches, ascending, for tiles that see keys `first` .. `end` each: one launch if no tile sees keys of two runs.
pub(super) fn launches(tiles: &[(usize, usize)]) -> Vec<Run> {
    if tiles.iter().all(|&(first, end)| first / RUN == end.saturating_sub(1) / RUN) {
        return vec![Run::whole(tiles.len())];
    }
    let longest = tiles.iter().map(|tile| tile.1).max().unwrap_or(0);
    let of = |from: usize| {
        let sees = |&(first, end): &(usize, usize)| first < from + RUN && end > from;
        Run { from, to: from + RUN, tiles: tiles.iter().rposition(sees).map_or(0, |last| last + 1) }
    };
    (0..longest).step_by(RUN).map(of).filter(|run| run.tiles > 0).collect()
}

/// Memory for `rows` rows of one head between runs, if there are several.
pub(super) fn between(runs: &[Run], rows: usize, head_dim: usize) -> Option<Memory> {
    (runs.len() > 1).then(|| Memory::scratch(bytes(rows, head_dim)))
}

/// Bytes of rows of a head: columns, maximum and sum, a multiple of 32.
pub fn bytes(rows: usize, head_dim: usize) -> usize {
    rows * (head_dim + 8) * size_of::<f32>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_with_one_key_segment_each_are_not_split() {
        assert_eq!(launches(&[]), [Run::whole(0)]);
        assert_eq!(launches(&[(0, RUN), (3, 8), (RUN, 2 * RUN)]), [Run::whole(3)]);
    }

    #[test]
    fn a_key_segment_launches_the_tiles_up_to_the_last_that_attends_to_it() {
        let tiles = [(0, 2 * RUN + 1), (RUN - 1, RUN + 1), (0, 5)];
        let run = |i: usize, tiles| Run { from: i * RUN, to: (i + 1) * RUN, tiles };
        assert_eq!(launches(&tiles), [run(0, 3), run(1, 2), run(2, 1)]);
        // None sees the first run.
        assert_eq!(launches(&[(RUN + 1, 2 * RUN + 2)]), [run(1, 1), run(2, 1)]);
    }
}
