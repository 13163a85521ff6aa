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
            channel.sum_ordered(x, rank, size);
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

    /// Everyone gets every rank's values of its own share of x, adds them in rank order while the next ones come, and gives
    /// the sums to all.
    fn sum_ordered(&mut self, x: &mut [f32], rank: usize, size: usize) {
        let at = |r: usize| r * x.len() / size;
        let shares: Vec<Range<usize>> = (0..size).map(|r| at(r)..at(r + 1)).collect();
        let piece = CHUNK.div_ceil(size);
        let of = |share: &Range<usize>, i: usize| {
            let at = |i: usize| (share.start + i * piece).min(share.end);
            at(i)..at(i + 1)
        };
        let scratch = room(&mut self.scratch, 2 * size * piece);
        let (mut even, mut odd) = scratch.split_at_mut(size * piece);
        let mut outstanding: Option<(Vec<Request>, Range<usize>)> = None;
        for i in 0..x.len().div_ceil(size).div_ceil(piece) {
            let mine = of(&shares[rank], i);
            let mut requests = Vec::with_capacity(2 * size);
            for s in 1..size {
                let (to, from) = ((rank + s) % size, (rank + size - s) % size);
                // SAFETY: all are waited for in the next turn or after the loop, before `x` and the scratch are released;
                // only this rank's share of x is written, and that is never sent here; `even` is not touched until its
                // requests were waited for, because the halves swap each turn, and each rank has a place of its own.
                unsafe {
                    requests.push(self.comm.receive(from, TAG, &mut even[from * piece..from * piece + mine.len()]));
                    requests.push(self.comm.send(to, TAG, &x[of(&shares[to], i)]));
                }
            }
            if let Some((requests, range)) = outstanding.replace((requests, mine)) {
                requests.into_iter().for_each(Request::wait);
                add_in_order(&mut x[range], rank, odd, piece);
            }
            std::mem::swap(&mut even, &mut odd);
        }
        if let Some((requests, range)) = outstanding {
            requests.into_iter().for_each(Request::wait);
            add_in_order(&mut x[range], rank, odd, piece);
        }
        self.gather(x, &shares, rank);
    }
}

/// x, rank `rank`'s values, becomes the sum in rank order with the others', which stand at multiples of `piece`.
fn add_in_order(x: &mut [f32], rank: usize, others: &mut [f32], piece: usize) {
    let add = |to: &mut [f32], from: &[f32]| to.iter_mut().zip(from).for_each(|(a, b)| *a += b);
    let (before, behind) = others.split_at_mut(rank * piece);
    if let Some((first, more)) = before.split_at_mut_checked(piece) {
        more.chunks_exact(piece).for_each(|other| add(first, &other[..x.len()]));
        // A sum of two does not mind their order.
        add(x, first);
    }
    behind.chunks_exact(piece).skip(1).for_each(|other| add(x, other));
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
