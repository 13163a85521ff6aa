//! The ranks of a verb that runs a model. Each processes a share of the rows on its own device, and the first one
//! writes all results in the order of the rows. The result of a row does not depend on the rank that computes it.

use super::out;
use super::out::note;
use crate::comm::{self, World, abort};
use crate::device::cpu::pool;
use crate::error::{Error, Result};
use serde::Serialize;
use std::ops::Range;
use std::path::Path;

/// Bytes of results that one message between ranks carries.
const PIECE_BYTES: usize = 16 << 20;

/// The ranks of a verb, and the results of this one.
pub struct Ranks {
    pub world: World,
    /// Lines of this rank that are not written yet.
    kept: Vec<u8>,
}

impl Ranks {
    /// Joins the ranks that a launcher started; without one, this process is alone.
    pub fn start(input: &Path) -> Result<Self> {
        let world = World::start()?;
        if world.size > 1 {
            abort::install(&world, None, None);
            pool::set_threads(world.threads().threads.max(1));
            if input.as_os_str() == "-" {
                return Err(Error::usage("--input - needs a single rank: only the first rank can read standard input")
                    .hint("pass a file that all ranks can read"));
            }
        }
        Ok(Self { world, kept: Vec::new() })
    }

    pub fn agree<T>(&self, local: Result<T>) -> Result<T> {
        self.world.group().agree(local)
    }

    /// The contiguous rows of this rank, if row i is `weights[i]` of the work.
    pub fn share(&self, weights: &[usize]) -> Range<usize> {
        share(weights, self.world.rank, self.world.size)
    }

    pub fn sums<const N: usize>(&self, mut numbers: [f64; N]) -> [f64; N] {
        self.world.group().all_reduce_sum_f64(&mut numbers);
        numbers
    }

    /// Logs a message once.
    pub fn say(&self, message: &str) {
        if self.world.rank == 0 {
            note!("{message}");
        }
    }

    /// Writes the result of the next row of this rank.
    pub fn write(&mut self, line: &impl Serialize) -> Result<()> {
        let mut bytes =
            serde_json::to_vec(line).map_err(|e| Error::fault(format!("a result is not valid JSON: {e}")))?;
        bytes.push(b'\n');
        if self.world.rank == 0 {
            return out::write(&bytes);
        }
        self.kept.extend_from_slice(&bytes);
        Ok(())
    }

    /// Writes the pending lines, rank by rank, and ends MPI. All ranks call this after their rows.
    pub fn finish(mut self) -> Result<()> {
        self.flush()?;
        comm::shutdown();
        Ok(())
    }

    /// Writes the pending lines, rank by rank. All ranks call this, each after some of its rows.
    pub fn flush(&mut self) -> Result<()> {
        let (group, rank) = (self.world.group(), self.world.rank);
        for root in 1..self.world.size {
            let mut pieces = self.kept.chunks(PIECE_BYTES).filter(|_| rank == root);
            loop {
                let mut piece = pieces.next().unwrap_or_default().to_vec();
                group.broadcast_bytes(root, &mut piece);
                if piece.is_empty() {
                    break;
                }
                if rank == 0 {
                    out::write(&piece)?;
                }
            }
        }
        self.kept.clear();
        Ok(())
    }
}

/// The contiguous share of rank `rank` of `size`. The middle of a row, by weight, decides to which rank it belongs.
fn share(weights: &[usize], rank: usize, size: usize) -> Range<usize> {
    let total: usize = weights.iter().sum::<usize>().max(1);
    let mut before = 0;
    let owners = weights.iter().map(|weight| {
        let middle = 2 * before + weight;
        before += weight;
        (middle * size / (2 * total)).min(size - 1)
    });
    let owners: Vec<usize> = owners.collect();
    owners.partition_point(|owner| *owner < rank)..owners.partition_point(|owner| *owner <= rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_contain_every_row_once_in_order_and_have_about_equal_cost() {
        let weights: Vec<usize> = (0..50).map(|i| 1 + i * 37 % 23).collect();
        for size in [1, 2, 3, 8] {
            let mut next = 0;
            for rank in 0..size {
                let share = share(&weights, rank, size);
                assert_eq!(share.start, next);
                next = share.end;
                let own: usize = weights[share].iter().sum();
                let even = weights.iter().sum::<usize>() / size;
                assert!(own.abs_diff(even) <= 24, "{own} of rank {rank}, {even} each");
            }
            assert_eq!(next, weights.len());
        }
        assert_eq!([0, 1, 2].map(|rank| share(&[9], rank, 3)), [0..0, 0..1, 1..1]);
        assert_eq!(share(&[0, 0], 0, 2).len() + share(&[0, 0], 1, 2).len(), 2);
    }
}
