//! The router of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2): s = sigmoid(logits). Experts are chosen by s + b, where b
//! is a correction of each expert without a gradient, and their weights are those of s alone. Everything of a row depends
//! on that row only.

use super::exp::exp;
use super::pool::pool;
use super::router::{Room, SERIAL_BELOW, choose, each_row};
use crate::device::simd::{level, leveled};
use std::sync::Arc;

/// How experts are chosen and weighed.
#[derive(Clone, Debug)]
pub struct SigmoidRule {
    /// b (experts).
    pub correction: Arc<[f32]>,
    /// The number of groups of neighbouring experts, and how many of them have the experts that a token can choose: those
    /// with the largest sums of their two largest s + b.
    pub groups: usize,
    pub top_groups: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    pub renormalizes: bool,
    /// The factor on weights.
    pub scale: f32,
}

/// What is added to the sum of a token's scores before it divides them.
const SUM_FLOOR: f32 = 1e-20;

leveled! {
    fn scores(row: &mut [f32]) {
        for x in row {
            *x = 1.0 / (1.0 + exp(-*x));
        }
    }
}

impl SigmoidRule {
    /// s + b of the experts that may be chosen, minus infinity of the others.
    fn corrected(&self, scores: &[f32], corrected: &mut [f32]) {
        for ((x, s), b) in corrected.iter_mut().zip(scores).zip(&*self.correction) {
            *x = s + b;
        }
        if self.top_groups == self.groups {
            return;
        }
        let each = scores.len() / self.groups;
        let of_group = |group: &[f32]| {
            let larger =
                |[first, second]: [f32; 2], x: f32| if x > first { [x, first] } else { [first, second.max(x)] };
            let [first, second] = group.iter().copied().fold([f32::NEG_INFINITY; 2], larger);
            first + second
        };
        let sums: Vec<f32> = corrected.chunks_exact(each).map(of_group).collect();
        let mut kept = vec![0; self.top_groups];
        choose(&sums, &mut vec![(0.0, 0); self.top_groups], &mut kept);
        for (group, values) in (0..).zip(corrected.chunks_exact_mut(each)) {
            if !kept.contains(&group) {
                values.fill(f32::NEG_INFINITY);
            }
        }
    }

    /// Turns `logits` (t, experts) into scores s. Writes the k chosen experts of each row, ascending, and their weights,
    /// both (t, k): s times the scale, divided by the sum of the chosen s if they are renormalized.
    pub fn forward(&self, logits: &mut [f32], chosen: &mut [u32], weights: &mut [f32]) {
        let level = level();
        each_row(
            logits,
            self.correction.len(),
            chosen,
            weights,
            |row, Room { best, row: corrected }, chosen, weights| {
                scores(level, row);
                self.corrected(row, corrected);
                choose(corrected, best, chosen);
                let sum = self.divisor(row, chosen);
                for (weight, &e) in weights.iter_mut().zip(&*chosen) {
                    *weight = row[e as usize] / sum * self.scale;
                }
            },
        );
    }

    /// The sum of the chosen scores, or 1.
    fn divisor(&self, scores: &[f32], chosen: &[u32]) -> f32 {
        let sum = || chosen.iter().map(|e| scores[*e as usize]).sum::<f32>() + SUM_FLOOR;
        if self.renormalizes { sum() } else { 1.0 }
    }

    /// Turns `dlogits` (t, experts) into the gradient of the logits, from the scores s and the chosen experts of `forward`,
    /// and the gradient dg (t, k) of the weights g. With the divisor S and the scale c: ds_i = (c dg_i - sum g dg) / S for
    /// the chosen ones, without the sum if S is 1, and dl = ds s (1 - s).
    pub fn backward(&self, scores: &[f32], (chosen, weights, dweights): (&[u32], &[f32], &[f32]), dlogits: &mut [f32]) {
        let experts = self.correction.len();
        let t = scores.len() / experts;
        let k = chosen.len() / t.max(1);
        assert!(dlogits.len() == scores.len() && weights.len() == t * k && dweights.len() == t * k);
        pool().rows(dlogits, experts, t * experts < SERIAL_BELOW, &|i, row| {
            let (s, own) = (&scores[i * experts..(i + 1) * experts], i * k..(i + 1) * k);
            let (chosen, g, dg) = (&chosen[own.clone()], &weights[own.clone()], &dweights[own]);
            let (divisor, mut sum) = (self.divisor(s, chosen), 0.0);
            if self.renormalizes {
                sum = g.iter().zip(dg).map(|(g, dg)| g * dg).sum();
            }
            row.fill(0.0);
            for (&e, dg) in chosen.iter().zip(dg) {
                let s = s[e as usize];
                row[e as usize] = (self.scale * dg - sum) / divisor * s * (1.0 - s);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_are_chosen_by_corrected_scores_within_the_best_groups() {
        let correction: Vec<f32> = vec![0.0, 0.0, 0.9, 0.0, 0.3, 0.3, 0.0, -9.0];
        let rule =
            SigmoidRule { correction: correction.into(), groups: 4, top_groups: 2, renormalizes: true, scale: 2.0 };
        let mut logits = [0.0; 8];
        let (mut chosen, mut weights) = ([0; 2], [0.0; 2]);
        // Sums of groups: 1, 1.9, 1.6 and less. Expert 3 is as good as 0, but of a better group.
        rule.forward(&mut logits, &mut chosen, &mut weights);
        assert_eq!((chosen, weights), ([2, 4], [1.0; 2]));
        let all = SigmoidRule { top_groups: 4, renormalizes: false, ..rule };
        let mut logits = [9.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        all.forward(&mut logits, &mut chosen, &mut weights);
        assert_eq!(chosen, [0, 2]);
        assert_eq!(weights[1], 1.0, "the correction has no part in weights");
    }
}
