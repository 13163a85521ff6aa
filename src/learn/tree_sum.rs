//! `gradient.order = "fixed"`: gradients of chunks are summed as one binary tree over all chunks of all ranks, so that
//! the bits do not depend on the number of ranks (a power of two).
//!
//! C chunks are leaves of a tree of P = 2^ceil(log2 C) leaves: chunk c sits at leaf bitreverse(c). With R ranks, rank r
//! sums the subtree of the leaves r P/R .. (r+1) P/R, which bit reversal makes the chunks c = bitreverse(r) mod R: the
//! numbers of chunks per rank differ by at most one. `Group::reduce_scatter_tree` does the levels above. A leaf without
//! a chunk adds nothing.

use crate::device::Device;
use crate::device::cpu::pool::pool;
use crate::ops::residual;
use crate::tensor::Flat;

/// The chunks of rank `rank` of `ranks`, as (leaf, chunk), in the order in which `TreeSum::add` wants them.
///
/// # Panics
/// If `ranks` is not a power of two.
pub fn leaves(chunks: usize, rank: usize, ranks: usize) -> Vec<(usize, usize)> {
    assert!(ranks.is_power_of_two(), "a tree over {ranks} ranks");
    let width = chunks.next_power_of_two().max(ranks);
    let share = width / ranks;
    (rank * share..(rank + 1) * share)
        .map(|leaf| (leaf, reverse(leaf, width)))
        .filter(|&(_, chunk)| chunk < chunks)
        .collect()
}

fn reverse(i: usize, width: usize) -> usize {
    if width == 1 { 0 } else { i.reverse_bits() >> (usize::BITS - width.trailing_zeros()) }
}

/// The sum of chunk gradients as a binary tree. Like the digits of a binary counter, partial sums wait on a stack until
/// their sibling is ready, so at most log2(leaves) + 1 buffers live.
#[derive(Debug)]
pub struct TreeSum {
    device: Device,
    len: usize,
    /// A leaf of each subtree, and its sum. The higher two neighbors are on the stack, the closer they are in the tree.
    stack: Vec<(usize, Flat)>,
}

impl TreeSum {
    /// An empty sum of `len` values on a device.
    pub fn new(device: Device, len: usize) -> Self {
        Self { device, len, stack: Vec::new() }
    }

    /// Puts the gradient of a chunk at its leaf. Leaves are added in ascending order.
    pub fn add(&mut self, leaf: usize, chunk: Flat) {
        self.settle(leaf);
        self.stack.push((leaf, chunk));
        self.settle(leaf + 1);
    }

    /// Merges the subtrees that are complete if all later leaves are `next` or higher: the subtrees that meet below it.
    fn settle(&mut self, next: usize) {
        while let [.., (a, into), (b, from)] = &mut self.stack[..]
            && meeting(*a, *b) < meeting(*b, next)
        {
            residual::accumulate(from.slice(0..self.len), into.slice_mut(0..self.len));
            self.stack.pop();
        }
    }

    /// The sum of all chunks, zeros if there are none. No element is -0, so a rank without chunks adds zeros to the
    /// others and changes no bit.
    pub fn finish(&mut self) -> Flat {
        self.settle(usize::MAX);
        let zeros = || Flat::zeros(self.device, self.len);
        let Some((_, mut sum)) = self.stack.pop() else { return zeros() };
        match &mut sum {
            Flat::F32(sum) => {
                let small = sum.len() < 1 << 15;
                pool().parts(sum, 1024, small, &|_, part| part.iter_mut().for_each(|x| *x += 0.0));
            }
            _ => residual::accumulate(zeros().slice(0..self.len), sum.slice_mut(0..self.len)),
        }
        sum
    }
}

/// The level of the smallest subtree that holds both leaves.
fn meeting(a: usize, b: usize) -> u32 {
    usize::BITS - (a ^ b).leading_zeros()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = 37;

    /// Values that round, cancel, and are -0 here and there.
    fn gradient(chunk: usize) -> Vec<f32> {
        (0..LEN)
            .map(|i| if i % 5 == 0 { -0.0 } else { ((chunk * 7919 + i * 104_729) % 1009) as f32 * 0.013 - 6.5 })
            .collect()
    }

    /// The definition, by recursion: the sum of the chunks whose leaves lie in `from..to`.
    fn defined(from: usize, to: usize, chunks: usize, width: usize) -> Option<Vec<f32>> {
        if to - from == 1 {
            let chunk = reverse(from, width);
            return (chunk < chunks).then(|| gradient(chunk));
        }
        let half = usize::midpoint(from, to);
        match (defined(from, half, chunks, width), defined(half, to, chunks, width)) {
            (Some(a), Some(b)) => Some(a.iter().zip(&b).map(|(x, y)| x + y).collect()),
            (a, b) => a.or(b),
        }
    }

    fn summed(chunks: usize, rank: usize, ranks: usize) -> Vec<f32> {
        let mut sum = TreeSum::new(Device::Cpu, LEN);
        for (leaf, chunk) in leaves(chunks, rank, ranks) {
            let mut buffer = Flat::zeros(Device::Cpu, LEN);
            residual::accumulate(gradient(chunk)[..].into(), buffer.slice_mut(0..LEN));
            sum.add(leaf, buffer);
        }
        sum.finish().slice(0..LEN).to_host()
    }

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|x| x.to_bits()).collect()
    }

    #[test]
    fn the_sum_has_equal_bits_on_one_rank_and_on_any_power_of_two() {
        for chunks in 1..40usize {
            let width = chunks.next_power_of_two();
            let mut want = defined(0, width, chunks, width).expect("at least one chunk");
            for x in &mut want {
                *x += 0.0;
            }
            for ranks in [1, 2, 4, 8, 64] {
                let even = chunks / ranks..=chunks.div_ceil(ranks);
                assert!((0..ranks).all(|r| even.contains(&leaves(chunks, r, ranks).len())), "dealt evenly");
                let mut level: Vec<Vec<f32>> = (0..ranks).map(|r| summed(chunks, r, ranks)).collect();
                while level.len() > 1 {
                    level = level.chunks(2).map(|p| p[0].iter().zip(&p[1]).map(|(a, b)| a + b).collect()).collect();
                }
                assert_eq!(bits(&level[0]), bits(&want), "{chunks} chunks on {ranks} ranks");
            }
        }
    }

    #[test]
    fn few_buffers_are_live_at_a_time() {
        let mut sum = TreeSum::new(Device::Cpu, LEN);
        for (leaf, _) in leaves(64, 0, 1) {
            sum.add(leaf, Flat::zeros(Device::Cpu, LEN));
            assert!(sum.stack.len() <= 7);
        }
        assert_eq!(sum.stack.len(), 1);
    }
}
