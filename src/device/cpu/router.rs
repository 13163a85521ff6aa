//! The router of a mixture of experts: p = softmax(logits), the k experts with the largest logits, and their weights.
//! Everything of a row depends on that row only.

use super::exp::exp;
use super::pool::{Shares, pool};
use super::softmax::{floored, row_stats};
use crate::device::simd::{level, leveled};

/// The number of values below which one thread computes all rows.
pub(super) const SERIAL_BELOW: usize = 4096;

leveled! {
    fn probabilities(row: &mut [f32], max: f32, sum_exp: f32) {
        for x in row {
            *x = exp(floored(*x - max)) / sum_exp;
        }
    }
}

/// The indices of the largest values, ascending. Of equal values the lowest indices are chosen. NaN is below all numbers.
pub(super) fn choose(row: &[f32], best: &mut [(f32, u32)], chosen: &mut [u32]) {
    let mut found = 0;
    for (i, &x) in (0..).zip(row) {
        let x = if x.is_nan() { f32::NEG_INFINITY } else { x };
        let place = best[..found].iter().position(|(other, _)| x > *other).unwrap_or(found);
        if place < best.len() {
            found = (found + 1).min(best.len());
            best[place..found].rotate_right(1);
            best[place] = (x, i);
        }
    }
    for (chosen, (_, i)) in chosen.iter_mut().zip(&*best) {
        *chosen = *i;
    }
    chosen.sort_unstable();
}

/// Turns `logits` (t, experts) into probabilities. Writes the k chosen experts of each row, ascending, and their weights,
/// both (t, k): the probabilities, divided by their sum if `renormalizes`.
pub fn forward(logits: &mut [f32], experts: usize, renormalizes: bool, chosen: &mut [u32], weights: &mut [f32]) {
    let level = level();
    each_row(logits, experts, chosen, weights, |row, Room { best, .. }, chosen, weights| {
        choose(row, best, chosen);
        let stats = row_stats(level, row, 1.0);
        probabilities(level, row, stats.max, stats.sum_exp);
        for (weight, &e) in weights.iter_mut().zip(&*chosen) {
            *weight = row[e as usize];
        }
        if renormalizes {
            let sum: f32 = weights.iter().sum();
            for weight in weights {
                *weight /= sum;
            }
        }
    });
}

/// Scratch memory of a thread: the best values so far (k), and as many numbers as a row has.
pub(super) struct Room {
    pub best: Vec<(f32, u32)>,
    pub row: Vec<f32>,
}

/// Calls `choose` with each row of the logits (t, experts), its chosen experts and their weights, both (t, k).
pub(super) fn each_row(
    logits: &mut [f32],
    experts: usize,
    chosen: &mut [u32],
    weights: &mut [f32],
    choose: impl Fn(&mut [f32], &mut Room, &mut [u32], &mut [f32]) + Sync,
) {
    let t = logits.len() / experts;
    let k = chosen.len() / t.max(1);
    assert!(logits.len() == t * experts && chosen.len() == t * k && weights.len() == t * k && k <= experts);
    let [all, of_weights] = [logits, weights].map(Shares::new);
    let of_chosen = Shares::new(chosen);
    pool().ranges(t, 1, t * experts < SERIAL_BELOW, &|rows| {
        let mut room = Room { best: vec![(0.0, 0); k], row: vec![0.0; experts] };
        for i in rows {
            let own = i * k..(i + 1) * k;
            // SAFETY: rows do not overlap and lie within the slices, which outlive the call.
            let (row, chosen, weights) = unsafe {
                (all.slice(i * experts..(i + 1) * experts), of_chosen.slice(own.clone()), of_weights.slice(own))
            };
            choose(row, &mut room, chosen, weights);
        }
    });
}

/// Turns `dlogits` (t, experts) into the gradient of the logits, from the probabilities p, the weights g and the chosen
/// experts of `forward`, and the gradient dg (t, k) of the weights.
///
/// As they are: dp_i = dg_i, and dl = p (dp - sum p dp). Renormalized, the sum over all experts drops out:
/// dl_i = g_i (dg_i - sum g dg) for the chosen ones, else 0. With a `slope` a of p (experts): dl += p (a - sum p a).
pub fn backward(
    p: &[f32],
    experts: usize,
    renormalizes: bool,
    (chosen, weights, dweights): (&[u32], &[f32], &[f32]),
    slope: Option<&[f32]>,
    dlogits: &mut [f32],
) {
    let t = p.len() / experts;
    let k = chosen.len() / t.max(1);
    assert!(dlogits.len() == p.len() && weights.len() == t * k && dweights.len() == t * k);
    pool().rows(dlogits, experts, t * experts < SERIAL_BELOW, &|i, row| {
        let (p, own) = (&p[i * experts..(i + 1) * experts], i * k..(i + 1) * k);
        let (chosen, g, dg) = (&chosen[own.clone()], &weights[own.clone()], &dweights[own]);
        let sum: f32 = g.iter().zip(dg).map(|(g, dg)| g * dg).sum();
        if renormalizes {
            row.fill(0.0);
        } else {
            row.iter_mut().zip(p).for_each(|(row, p)| *row = -p * sum);
        }
        for ((&e, g), dg) in chosen.iter().zip(g).zip(dg) {
            row[e as usize] = g * (dg - sum);
        }
        if let Some(a) = slope {
            let mean: f32 = p.iter().zip(a).map(|(p, a)| p * a).sum();
            row.iter_mut().zip(p).zip(a).for_each(|((row, p), a)| *row += p * (a - mean));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_values_are_chosen_and_of_equal_ones_the_lowest_indices() {
        let choose = |row: &[f32], k: usize| {
            let mut chosen = vec![0; k];
            choose(row, &mut vec![(0.0, 0); k], &mut chosen);
            chosen
        };
        assert_eq!(choose(&[0.5, 2.0, 1.0, 2.0], 2), [1, 3]);
        assert_eq!(choose(&[1.0, 1.0, 1.0, 1.0], 3), [0, 1, 2]);
        assert_eq!(choose(&[0.0, 1.0, 0.0, 1.0, 1.0], 2), [1, 3]);
        assert_eq!(choose(&[f32::NAN, f32::NEG_INFINITY, 3.0, f32::NAN], 3), [0, 1, 2]);
        assert_eq!(choose(&[-1.0, -0.5, -2.0], 3), [0, 1, 2]);
    }
}
