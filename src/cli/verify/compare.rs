//! Where two computations of the same tokens differ, and whether rounding explains it.
//!
//! The gap of a state is ||a - b|| / ||b||. In the same layer, weights and activations in bf16 have a gap g to f32 that
//! shows how this model enlarges rounding. A dtype with epsilon e explains gaps up to
//!
//! allowed = margin * max(g, e_bf16) * e / e_bf16
//!
//! in that layer, where e is that of the coarser dtype of the two.

use super::computation::Computation;
use crate::error::{Error, Result};
use crate::tensor::DType;

/// How much larger than its measure rounding may be. Other kernels add in another order, and round at other places. In
/// f32, sums round as much as their terms do; the measure in bf16 has sums in f32.
pub fn margin(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 32.0,
        DType::Bf16 => 8.0,
    }
}

/// The likeliest tokens of which the overlap is counted.
pub const TOP: usize = 10;

/// The distance from 1 to the next number.
pub fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => f64::from(f32::EPSILON),
        DType::Bf16 => 1.0 / 128.0,
    }
}

/// The gap of a hidden state, or of the logits.
#[derive(Clone, Debug, PartialEq)]
pub struct Gap {
    pub name: String,
    pub gap: f64,
    /// The largest gap that rounding explains.
    pub allowed: f64,
    /// The gaps of the tokens.
    pub rows: Vec<f64>,
}

/// Whether a gap is larger than allowed, or no number.
pub fn exceeds(gap: f64, allowed: f64) -> bool {
    gap > allowed || gap.is_nan()
}

impl Gap {
    pub fn is_explained(&self) -> bool {
        !exceeds(self.gap, self.allowed)
    }

    /// The first token whose gap rounding does not explain.
    pub fn first_token(&self) -> Option<usize> {
        self.rows.iter().position(|gap| exceeds(*gap, self.allowed))
    }
}

/// The comparison of two computations.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// The hidden states in the order in which they are computed, then the logits.
    pub gaps: Vec<Gap>,
    pub of_words: Option<Words>,
    /// The number of greedy tokens of both, and the first one that differs.
    pub greedy: Option<(usize, Option<usize>)>,
}

/// The comparison of next-token distributions.
#[derive(Clone, Copy, Debug)]
pub struct Words {
    /// KL(a || b) over the vocabulary: its mean and its maximum over tokens, and the token of the maximum.
    pub kl: (f64, f64, usize),
    /// The share of the `TOP` likeliest tokens that both have.
    pub overlap: f64,
    /// Tokens with the same likeliest next token.
    pub same_first: usize,
    /// The largest difference of the log-probability of the next token of the sequence, and the token before it.
    pub logprob: (f64, usize),
}

impl Comparison {
    /// The first state whose gap rounding does not explain.
    pub fn first(&self) -> Option<&Gap> {
        self.gaps.iter().find(|gap| !gap.is_explained())
    }
}

/// ||a - b|| / ||b|| of each row, and of all rows.
pub fn row_gaps(a: &[f32], b: &[f32], width: usize) -> (f64, Vec<f64>) {
    let square = |x: f64| x * x;
    let (mut all, mut rows) = ([0.0; 2], Vec::with_capacity(a.len() / width.max(1)));
    for (a, b) in a.chunks_exact(width).zip(b.chunks_exact(width)) {
        let gap: f64 = a.iter().zip(b).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
        let norm: f64 = b.iter().map(|b| square(f64::from(*b))).sum();
        all = [all[0] + gap, all[1] + norm];
        rows.push(ratio(gap, norm));
    }
    (ratio(all[0], all[1]), rows)
}

fn ratio(gap: f64, norm: f64) -> f64 {
    if gap == 0.0 { 0.0 } else { (gap / norm.max(1e-60)).sqrt() }
}

/// The gaps of a model in bf16 to itself in f32, for each hidden state and for the logits.
pub fn growth(rounded: &Computation, exact: &Computation) -> Vec<f64> {
    states(rounded, exact).into_iter().map(|(a, b, width)| row_gaps(a, b, width).0).collect()
}

/// The states of both, and their widths.
fn states<'a>(a: &'a Computation, b: &'a Computation) -> Vec<(&'a [f32], &'a [f32], usize)> {
    let hidden = a.hidden.iter().zip(&b.hidden).map(|(x, y)| (&x[..], &y[..], a.width));
    hidden.chain([(&a.logits[..], &b.logits[..], a.outputs())]).collect()
}

/// Compares `a` with `b` of the same tokens. `growth` are this model's gaps of bf16.
///
/// # Errors
/// `Data` if they are of other tokens or shapes.
pub fn compare(a: &Computation, b: &Computation, growth: &[f64]) -> Result<Comparison> {
    check(a, b)?;
    let coarser = if a.dtype == b.dtype { a.dtype } else { DType::Bf16 };
    let of_bf16 = epsilon(DType::Bf16);
    let gap = |(i, (x, y, width)): (usize, (&[f32], &[f32], usize))| {
        let (gap, rows) = row_gaps(x, y, width);
        let allowed = margin(coarser) * growth[i].max(of_bf16) * epsilon(coarser) / of_bf16;
        let name = if i < a.hidden.len() { a.name_of(i) } else { a.name_of_outputs().to_owned() };
        Gap { name, gap, allowed, rows }
    };
    let gaps = states(a, b).into_iter().enumerate().map(gap).collect();
    let of_words = (a.outputs() > 1).then(|| words(a, b));
    let count = a.greedy.len().min(b.greedy.len());
    let differs = a.greedy.iter().zip(&b.greedy).position(|(a, b)| a != b);
    Ok(Comparison { gaps, of_words, greedy: (count > 0).then_some((count, differs)) })
}

fn check(a: &Computation, b: &Computation) -> Result<()> {
    let shapes = |of: &Computation| [of.hidden.len(), of.width, of.outputs()];
    let (own, other) = (shapes(a), shapes(b));
    for (what, i) in [("hidden states", 0), ("columns of hidden states", 1), ("logits for each token", 2)] {
        if own[i] != other[i] {
            return Err(Error::data(format!(
                "{} has {} {what}, but {} has {}: they are not the same model",
                a.name, own[i], b.name, other[i]
            )));
        }
    }
    Error::need(a.ids == b.ids, format!("{} and {} must have the same tokens", a.name, b.name))
}

/// Compares the distributions of the next token.
fn words(a: &Computation, b: &Computation) -> Words {
    let (v, t) = (a.outputs(), a.ids.len());
    let mut found = Words { kl: (0.0, 0.0, 0), overlap: 0.0, same_first: 0, logprob: (0.0, 0) };
    for (i, (x, y)) in a.logits.chunks_exact(v).zip(b.logits.chunks_exact(v)).enumerate() {
        let (of_x, of_y) = (log_sum_exp(x), log_sum_exp(y));
        let kl: f64 = x
            .iter()
            .zip(y)
            .map(|(x, y)| (f64::from(*x) - of_x, f64::from(*y) - of_y))
            .map(|(p, q)| p.exp() * (p - q))
            .sum();
        let kl = kl.max(0.0);
        found.kl.0 += kl / t as f64;
        if kl > found.kl.1 {
            (found.kl.1, found.kl.2) = (kl, i);
        }
        let (top_x, top_y) = (likeliest(x), likeliest(y));
        let shared = top_x.iter().filter(|id| top_y.contains(id)).count();
        found.overlap += shared as f64 / (top_x.len() * t) as f64;
        found.same_first += usize::from(top_x[0] == top_y[0]);
        if let Some(next) = a.ids.get(i + 1).map(|id| *id as usize) {
            let gap = ((f64::from(x[next]) - of_x) - (f64::from(y[next]) - of_y)).abs();
            if gap > found.logprob.0 {
                found.logprob = (gap, i);
            }
        }
    }
    found
}

fn log_sum_exp(x: &[f32]) -> f64 {
    let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    f64::from(largest) + x.iter().map(|x| f64::from(x - largest).exp()).sum::<f64>().ln()
}

/// The `TOP` likeliest tokens, the likeliest first.
fn likeliest(logits: &[f32]) -> Vec<usize> {
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    let by_logit = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    let kept = TOP.min(ids.len());
    if kept < ids.len() {
        ids.select_nth_unstable_by(kept - 1, by_logit);
    }
    ids.truncate(kept);
    ids.sort_by(by_logit);
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    fn computation(hidden: &[f32], logits: &[f32]) -> Computation {
        Computation {
            name: "a".into(),
            dtype: DType::F32,
            ids: vec![1, 0],
            width: 2,
            hidden: vec![hidden.to_vec()],
            logits: logits.to_vec(),
            greedy: vec![1, 2, 3],
            greedy_logprobs: Vec::new(),
        }
    }

    #[test]
    fn a_comparison_names_the_first_state_and_token_that_rounding_does_not_explain() {
        let a = computation(&[3.0, 4.0, 0.0, 2.0], &[0.0, 1.0, 2.0, 0.5, 0.5, 0.5]);
        let mut b = computation(&[3.0, 4.0, 0.0, 1.0], &[0.0, 1.0, 2.0, 1.5, 0.5, 0.5]);
        b.greedy[1] = 7;
        let found = compare(&a, &b, &[0.01, 0.0]).unwrap();
        let first = found.first().expect("half of a row is no rounding");
        assert_eq!((&*first.name, first.first_token(), &first.rows[..]), ("embedding", Some(1), &[0.0, 1.0][..]));
        assert!((first.gap - (1.0f64 / 26.0).sqrt()).abs() < 1e-12);
        assert!((first.allowed - 32.0 * 0.01 * f64::from(f32::EPSILON) * 128.0).abs() < 1e-12);
        // The second token: KL of the uniform distribution to softmax(1.5, 0.5, 0.5).
        let words = found.of_words.unwrap();
        let log_sum = (1.5f64.exp() + 2.0 * 0.5f64.exp()).ln();
        let kl = log_sum - (1.5 + 0.5 + 0.5) / 3.0 - 3.0f64.ln();
        assert!((words.kl.1 - kl).abs() < 1e-9 && (words.kl.0 - kl / 2.0).abs() < 1e-9 && words.kl.2 == 1, "{words:?}");
        assert_eq!((words.same_first, words.overlap, words.logprob), (2, 1.0, (0.0, 0)));
        assert_eq!(found.greedy, Some((3, Some(1))));
        let same = compare(&a, &a, &[0.0, 0.0]).unwrap();
        assert!(same.first().is_none() && same.greedy == Some((3, None)));
    }

    #[test]
    fn models_of_other_shapes_are_not_compared() {
        let a = computation(&[3.0, 4.0, 0.0, 2.0], &[0.0; 6]);
        let error = compare(&a, &computation(&[3.0, 4.0, 0.0, 2.0], &[0.0; 8]), &[0.0; 2]).unwrap_err();
        assert!(error.message.contains("a has 3 logits for each token, but a has 4"), "{error}");
    }
}
