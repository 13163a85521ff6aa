//! Sums of rows that ranks share: one order for every element.

use super::accounting::enter;
use super::group::{CHUNK, Channel, Group, TAG};
use super::raw::Request;
use std::ops::Range;

/// Elements of all ranks together below which everyone gets everything and adds by itself: one round, not two.
const WHOLE_MAX: usize = 1 << 14;

impl Group {
    /// x = ((x_0 + x_1) + x_2) + ..., in rank order for every element, wherever it stands and however long x is: what a
    /// row of activations gets does not depend on the rows beside it. All ranks get equal bits.
    pub fn all_reduce_sum_ordered(&self, x: &mut [f32]) {
        let Some(mut channel) = self.channel() else { return };
        let _call = enter(self.axis(), "all_reduce_sum_ordered", size_of_val(x));
        let (rank, size) = (self.rank(), self.size());
        if x.len() * size <= WHOLE_MAX {
            channel.sum_whole(x, size);
        } else {
            for block in x.chunks_mut(CHUNK) {
                channel.sum_ordered(block, rank, size);
            }
        }
    }
}

impl Channel {
    /// Everyone gets every rank's x, and adds them in rank order.
    fn sum_whole(&mut self, x: &mut [f32], size: usize) {
        let all = room(&mut self.scratch, size * x.len());
        self.comm.all_gather(x, all);
        fold(x, all);
    }

    /// Everyone gets every rank's values of its own share of the block, adds them in rank order, and gives the sums to all.
    fn sum_ordered(&mut self, block: &mut [f32], rank: usize, size: usize) {
        let at = |r: usize| r * block.len() / size;
        let ranges: Vec<Range<usize>> = (0..size).map(|r| at(r)..at(r + 1)).collect();
        let mine = ranges[rank].clone();
        let all = room(&mut self.scratch, size * mine.len());
        all[rank * mine.len()..(rank + 1) * mine.len()].copy_from_slice(&block[mine.clone()]);
        let mut requests = Vec::new();
        for s in 1..size {
            let (to, from) = ((rank + s) % size, (rank + size - s) % size);
            let into = &mut all[from * mine.len()..(from + 1) * mine.len()];
            // SAFETY: waited for below, before `block` and the scratch are released; places of ranks do not overlap, and
            // the block is not written before.
            unsafe {
                requests.push(self.comm.receive(from, TAG, into));
                requests.push(self.comm.send(to, TAG, &block[ranges[to].clone()]));
            }
        }
        requests.into_iter().for_each(Request::wait);
        fold(&mut block[mine], all);
        self.gather(block, &ranges, rank);
    }
}

fn room(scratch: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if scratch.len() < len {
        scratch.resize(len, 0.0);
    }
    &mut scratch[..len]
}

/// x = the sum of the parts of `all`, each as long as x, in order.
fn fold(x: &mut [f32], all: &[f32]) {
    if x.is_empty() {
        return;
    }
    let (first, rest) = all.split_at(x.len());
    x.copy_from_slice(first);
    for part in rest.chunks_exact(x.len()) {
        x.iter_mut().zip(part).for_each(|(a, b)| *a += b);
    }
}
