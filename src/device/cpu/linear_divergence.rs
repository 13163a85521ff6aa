//! Divergences of a student's distribution q from a teacher's p, row by row of their logits, with the statistics of
//! both.
//!
//! Sums run in the order of `softmax`: 64 lanes, each ascending, then folded. A row's bits depend only on the row.

use super::exp::exp;
use super::lanes::fold;
use super::pool::pool;
use super::softmax::{RowStats, SERIAL_BELOW, floored};
use crate::config::method::distill::Divergence;
use crate::device::simd::{level, leveled};

const LANES: usize = 64;

/// A token in a distribution.
#[derive(Clone, Copy)]
struct Token {
    logprob: f32,
    probability: f32,
}

/// The constants of a row: z = logit * inverse_temperature, log p = (z - max) - ln(sum).
#[derive(Clone, Copy)]
struct Row {
    inverse_temperature: f32,
    max: f32,
    ln_sum: f32,
    inverse_sum: f32,
}

impl Row {
    fn from_stats(stats: &RowStats) -> Self {
        let &RowStats { inverse_temperature, max, sum_exp, .. } = stats;
        Self { inverse_temperature, max, ln_sum: sum_exp.ln(), inverse_sum: 1.0 / sum_exp }
    }

    #[inline(always)]
    fn token(self, logit: f32) -> Token {
        let d = floored(logit * self.inverse_temperature - self.max);
        Token { logprob: d - self.ln_sum, probability: exp(d) * self.inverse_sum }
    }
}

/// The terms that one token adds to a row's two sums.
#[inline(always)]
fn terms(of: Divergence, q: Token, p: Token) -> (f32, f32) {
    match of {
        Divergence::ForwardKl => (p.probability * (p.logprob - q.logprob), -p.probability * q.logprob),
        Divergence::ReverseKl => (q.probability * (q.logprob - p.logprob), 0.0),
        Divergence::Jsd => {
            let (of_p, of_q) = above_middle(p.logprob - q.logprob);
            (p.probability * of_p, q.probability * of_q)
        }
    }
}

/// The slope by the student's logits / temperature.
#[inline(always)]
fn slope(of: Divergence, q: Token, p: Token, (first, second): (f32, f32)) -> f32 {
    match of {
        Divergence::ForwardKl => q.probability - p.probability,
        Divergence::ReverseKl => q.probability * ((q.logprob - p.logprob) - first),
        Divergence::Jsd => 0.5 * q.probability * (above_middle(p.logprob - q.logprob).1 - second),
    }
}

/// (log(p / m), log(q / m)) with m = (p + q) / 2, given d = log p - log q: log(p / m) = ln 2 - log(1 + exp(-d)).
#[inline(always)]
fn above_middle(d: f32) -> (f32, f32) {
    let rest = ln_1p(exp(-d.abs()));
    let ln_2 = std::f32::consts::LN_2;
    (ln_2 - (rest + (-d).max(0.0)), ln_2 - (rest + d.max(0.0)))
}

/// log(1 + x) for x in 0..=1, to 2e-8: 2 atanh(s) with s = x / (2 + x) up to 1/3.
#[inline(always)]
fn ln_1p(x: f32) -> f32 {
    let s = x / (2.0 + x);
    let square = s * s;
    let mut sum = 1.0 / 15.0;
    for odd in [13.0f32, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        sum = square.mul_add(sum, 1.0 / odd);
    }
    2.0 * s * sum
}

#[inline(always)]
fn sums_of(of: Divergence, student: &[f32], teacher: &[f32], q: Row, p: Row) -> (f32, f32) {
    let (mut first, mut second) = ([0.0f32; LANES], [0.0f32; LANES]);
    for (student, teacher) in student.chunks(LANES).zip(teacher.chunks(LANES)) {
        for (j, (&s, &t)) in student.iter().zip(teacher).enumerate() {
            let (a, b) = terms(of, q.token(s), p.token(t));
            first[j] += a;
            second[j] += b;
        }
    }
    (fold(first), fold(second))
}

#[inline(always)]
fn add_slopes(
    of: Divergence,
    student: &[f32],
    teacher: &[f32],
    (q, p): (Row, Row),
    sums: (f32, f32),
    scale: f32,
    dlogits: &mut [f32],
) {
    for ((&s, &t), dlogit) in student.iter().zip(teacher).zip(dlogits) {
        *dlogit += scale * slope(of, q.token(s), p.token(t), sums);
    }
}

leveled! {
    fn row_sums(of: Divergence, student: &[f32], teacher: &[f32], q: Row, p: Row) -> (f32, f32) {
        // One loop for each.
        match of {
            Divergence::ForwardKl => sums_of(Divergence::ForwardKl, student, teacher, q, p),
            Divergence::ReverseKl => sums_of(Divergence::ReverseKl, student, teacher, q, p),
            Divergence::Jsd => sums_of(Divergence::Jsd, student, teacher, q, p),
        }
    }
}

leveled! {
    fn row_add(
        of: Divergence,
        student: &[f32],
        teacher: &[f32],
        rows: (Row, Row),
        sums: (f32, f32),
        scale: f32,
        dlogits: &mut [f32],
    ) {
        match of {
            Divergence::ForwardKl => add_slopes(Divergence::ForwardKl, student, teacher, rows, sums, scale, dlogits),
            Divergence::ReverseKl => add_slopes(Divergence::ReverseKl, student, teacher, rows, sums, scale, dlogits),
            Divergence::Jsd => add_slopes(Divergence::Jsd, student, teacher, rows, sums, scale, dlogits),
        }
    }
}

/// Logits of student and teacher, `v` tokens per row, and the statistics of whole rows. The logits may be parts of
/// these rows.
#[derive(Clone, Copy)]
pub struct Pair<'a> {
    pub v: usize,
    pub student: &'a [f32],
    pub teacher: &'a [f32],
    pub of_student: &'a [RowStats],
    pub of_teacher: &'a [RowStats],
}

impl Pair<'_> {
    fn row(&self, i: usize) -> (&[f32], &[f32], Row, Row) {
        let at = i * self.v..(i + 1) * self.v;
        let (q, p) = (Row::from_stats(&self.of_student[i]), Row::from_stats(&self.of_teacher[i]));
        (&self.student[at.clone()], &self.teacher[at], q, p)
    }

    /// Two sums over the tokens of each row, as `sum_exp` and `dot` of statistics whose `max` is 0. So the sums of
    /// parts of the vocabulary add up like statistics. `ForwardKl`: sum p log(p / q), sum p (-log q); `ReverseKl`: sum
    /// q log(q / p), 0; `Jsd`: sum p log(p / m), sum q log(q / m).
    pub fn sums(&self, of: Divergence) -> Vec<RowStats> {
        let level = level();
        let none = RowStats { inverse_temperature: 1.0, max: 0.0, sum_exp: 0.0, dot: 0.0 };
        let mut all = vec![none; self.of_student.len()];
        pool().rows(&mut all, 1, self.student.len() < SERIAL_BELOW, &|i, sums| {
            let (student, teacher, q, p) = self.row(i);
            (sums[0].sum_exp, sums[0].dot) = row_sums(level, of, student, teacher, q, p);
        });
        all
    }

    /// dlogits += `scale` times the slope by the student's logits / temperature. `ForwardKl`: q - p; `ReverseKl`:
    /// q (log(q / p) - KL); `Jsd`: q (log(q / m) - sum q log(q / m)) / 2. `sums` are those of whole rows.
    pub fn add(&self, of: Divergence, sums: &[RowStats], scale: f32, dlogits: &mut [f32]) {
        let level = level();
        pool().rows(dlogits, self.v, self.student.len() < SERIAL_BELOW, &|i, dlogits| {
            let (student, teacher, q, p) = self.row(i);
            row_add(level, of, student, teacher, (q, p), (sums[i].sum_exp, sums[i].dot), scale, dlogits);
        });
    }
}
