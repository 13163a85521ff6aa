//! The rows for each destination, so that their sums have one order.

use super::gpu::{Arg, gpu};
use super::memory::Memory;
use super::shape::{THREADS, block, count};

/// Rows by destination, ascending within each. Built on the host once, used by every pass through the same tokens or
/// rows.
#[derive(Debug)]
pub struct ScatterLists {
    /// Destinations (lists), the start of each list's rows (lists + 1), rows (len): one upload.
    tables: Memory,
    lists: usize,
}

impl ScatterLists {
    /// The lists in which row i belongs to `keys[i]`: the token of an embedding's gradient, or the row of a scatter.
    pub fn from_keys(keys: &[u32]) -> Self {
        let mut rows: Vec<u32> = (0..u32::try_from(keys.len()).expect("rows are counted in 32 bits")).collect();
        // The sort is stable, so rows of one key stay ascending.
        rows.sort_by_key(|&i| keys[i as usize]);
        let mut starts: Vec<u32> = (0..rows.len())
            .filter(|&i| i == 0 || keys[rows[i] as usize] != keys[rows[i - 1] as usize])
            .map(|i| i as u32)
            .collect();
        let of_lists: Vec<u32> = starts.iter().map(|&start| keys[rows[start as usize] as usize]).collect();
        starts.push(keys.len() as u32);
        let lists = of_lists.len();
        Self { tables: Memory::from_values(&[of_lists, starts, rows].concat()), lists }
    }

    /// Starts a kernel of `cuda/rows.cuh`: `from` goes to rows first..first + n of `to`, rows of `width` values.
    pub(super) fn launch(&self, op: &str, kernel: &'static str, from: Arg, to: Arg, [first, n, width]: [usize; 3]) {
        let threads = block(width / 8, THREADS);
        let grid = [self.lists, (width / 8).div_ceil(threads), 1];
        let table = |first: usize| Arg::Address(self.tables.address() + 4 * first as u64);
        let lists = [table(0), table(self.lists), table(2 * self.lists + 1), to];
        let args = [&[from][..], &lists, &[first, n, width].map(|n| count(op, n))].concat();
        gpu().launch(kernel, grid, threads, 0, &args);
    }
}
