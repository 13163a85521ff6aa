//! The statistics of a softmax row, in one fixed order for sampling, scoring and training.
//!
//! Element i belongs to lane i mod 64; each lane adds its elements in ascending order; then the upper half of the
//! lanes is added to the lower half until one is left. All instruction levels do exactly this.

use super::exp::{LOWEST, exp};
use super::lanes::{self, fold};
use super::pool::pool;
use crate::device::simd::{Level, level, leveled};
use crate::experience::SamplingMask;

const LANES: usize = 64;
/// The number of values below which one thread computes all rows.
pub(super) const SERIAL_BELOW: usize = 4096;

/// Statistics of z = logits * inverse_temperature.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowStats {
    pub inverse_temperature: f32,
    /// max_v z[v]
    pub max: f32,
    /// sum_v exp(z[v] - max)
    pub sum_exp: f32,
    /// sum_v exp(z[v] - max) (z[v] - max); terms of vanishing probability count 0.
    pub dot: f32,
}

impl RowStats {
    /// log softmax(z)[v] = (z[v] - max) - ln(sum_exp), for the logit of v: the one formula of sampler, scorer and
    /// trainer.
    #[inline]
    pub fn logprob(&self, logit: f32) -> f32 {
        (logit * self.inverse_temperature - self.max) - self.sum_exp.ln()
    }

    /// Whether no token is likelier than the one with this logit.
    pub fn is_top(&self, logit: f32) -> bool {
        logit * self.inverse_temperature >= self.max
    }

    /// lse - sum_v softmax(z)[v] z[v] = ln(sum_exp) - dot / sum_exp, in nats.
    pub fn entropy(&self) -> f32 {
        self.sum_exp.ln() - self.dot / self.sum_exp
    }

    /// The statistics of a row from those of its parts, left to right. For a single part they are its own.
    ///
    /// Let m be the max of the parts' max. Then sum_exp = sum_p exp(max_p - m) sum_exp_p, and dot = sum_p exp(max_p -
    /// m) (dot_p + (max_p - m) sum_exp_p).
    ///
    /// # Panics
    /// If there is no part.
    pub fn combined(parts: &[Self]) -> Self {
        let (first, rest) = parts.split_first().expect("a row has a part");
        if rest.is_empty() {
            return *first;
        }
        let max = parts.iter().fold(f32::NEG_INFINITY, |a, part| if part.max > a { part.max } else { a });
        let (mut sum_exp, mut dot) = (0.0, 0.0);
        for part in parts {
            let d = floored(part.max - max);
            let scale = exp(d);
            sum_exp += scale * part.sum_exp;
            dot += scale * (part.dot + d * part.sum_exp);
        }
        Self { inverse_temperature: first.inverse_temperature, max, sum_exp, dot }
    }
}

leveled! {
    /// The largest logit (the order does not matter to a maximum). NaN is ignored here and shows in the sums.
    fn row_max(row: &[f32]) -> f32 {
        lanes::max::<LANES>(row)
    }
}

leveled! {
    fn row_sums(row: &[f32], inverse_temperature: f32, max: f32) -> (f32, f32) {
        let (blocks, tail) = row.as_chunks::<LANES>();
        let mut sum = [0.0f32; LANES];
        let mut dot = [0.0f32; LANES];
        // Groups of 16 lanes keep the live values in registers; a lane's own order is untouched.
        for block in blocks {
            for group in 0..LANES / 16 {
                for j in 16 * group..16 * (group + 1) {
                    let d = floored(block[j] * inverse_temperature - max);
                    let e = exp(d);
                    sum[j] += e;
                    dot[j] = e.mul_add(d, dot[j]);
                }
            }
        }
        for (j, &z) in tail.iter().enumerate() {
            let d = floored(z * inverse_temperature - max);
            let e = exp(d);
            sum[j] += e;
            dot[j] = e.mul_add(d, dot[j]);
        }
        (fold(sum), fold(dot))
    }
}

/// Keeps 0 * -inf out of the sums: below this exp is zero. NaN passes.
#[inline(always)]
pub(super) fn floored(d: f32) -> f32 {
    if d < LOWEST { LOWEST } else { d }
}

/// max, sum_exp and dot of `row` * `inverse_temperature` (positive), on the calling thread.
pub fn row_stats(level: Level, row: &[f32], inverse_temperature: f32) -> RowStats {
    // Scaling by a positive number keeps the order, so this is the largest scaled value. It is finite even if a mask
    // removes all tokens of a part.
    let max = (row_max(level, row) * inverse_temperature).max(f32::MIN);
    let (sum_exp, dot) = row_sums(level, row, inverse_temperature, max);
    RowStats { inverse_temperature, max, sum_exp, dot }
}

leveled! {
    /// Turns a row of logits into the row of d loss / d logits, in place:
    /// (dlogprob (1[v = target] - s_v) - dentropy s_v (log s_v + entropy)) * inverse_temperature. The row may be only
    /// part of a row with statistics; a target past its end is in another part.
    pub fn row_backward(
        row: &mut [f32],
        stats: &RowStats,
        target: usize,
        dlogprob: f32,
        dentropy: f32,
    ) {
        let &RowStats { inverse_temperature, max, sum_exp, .. } = stats;
        let inverse_sum = 1.0 / sum_exp;
        let ln_sum = sum_exp.ln();
        // s (dlogprob + dentropy (log s + entropy)) = s (base + dentropy d), d = z - max
        let base = dentropy.mul_add(stats.entropy() - ln_sum, dlogprob);
        let scale = -inverse_temperature * inverse_sum;
        for logit in row.iter_mut() {
            let d = floored(*logit * inverse_temperature - max);
            *logit = (exp(d) * scale) * dentropy.mul_add(d, base);
        }
        if let Some(logit) = row.get_mut(target) {
            *logit += dlogprob * inverse_temperature;
        }
    }
}

/// The statistics of each row of `logits` (rows, v).
pub fn stats_of_rows(logits: &[f32], v: usize, inverse_temperature: f32) -> Vec<RowStats> {
    let level = level();
    let mut all = vec![RowStats { inverse_temperature, max: 0.0, sum_exp: 1.0, dot: 0.0 }; logits.len() / v];
    pool().parts(&mut all, 1, logits.len() < SERIAL_BELOW, &|part, stats| {
        for (stats, row) in stats.iter_mut().zip(logits[part.start * v..part.end * v].chunks_exact(v)) {
            *stats = row_stats(level, row, inverse_temperature);
        }
    });
    all
}

/// Applies each row's mask to its logits, which are of tokens from `first` on.
pub fn mask_rows(logits: &mut [f32], v: usize, first: usize, masks: &[SamplingMask]) {
    pool().rows(logits, v, logits.len() < SERIAL_BELOW, &|i, row| masks[i].apply(first, row));
}

/// Turns each row of logits into its gradient (`row_backward`).
pub fn backward_rows(
    logits: &mut [f32],
    v: usize,
    stats: &[RowStats],
    targets: &[usize],
    dlogprobs: &[f32],
    dentropy: &[f32],
) {
    let level = level();
    pool().rows(logits, v, stats.len() * v < SERIAL_BELOW, &|i, row| {
        row_backward(level, row, &stats[i], targets[i], dlogprobs[i], dentropy[i]);
    });
}
