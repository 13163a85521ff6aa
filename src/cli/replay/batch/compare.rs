//! The largest difference of two lists of numbers.

use super::compute::Case;
use super::rows::Numbers;

/// The columns that are compared, row by row.
pub struct Mask(Vec<Vec<bool>>);

impl Mask {
    /// The learned tokens.
    pub fn of(case: &Case) -> Self {
        Self(case.rows.samples.iter().map(|sample| sample.mask.iter().map(|m| *m != 0).collect()).collect())
    }

    /// The learned tokens before and after a change.
    pub fn of_both(case: &Case, changed: &Case) -> Self {
        let (Self(mut all), Self(other)) = (Self::of(case), Self::of(changed));
        let pairs = all.iter_mut().flatten().zip(other.iter().flatten());
        pairs.for_each(|(one, other)| *one &= other);
        Self(all)
    }

    /// The learned tokens without the first and the last one of each row.
    pub fn without_ends(case: &Case) -> Self {
        let Self(mut all) = Self::of(case);
        for row in &mut all {
            let ends = [row.iter().position(|m| *m), row.iter().rposition(|m| *m)];
            ends.into_iter().flatten().for_each(|at| row[at] = false);
        }
        Self(all)
    }
}

/// The largest difference of two lists, and its place.
#[derive(Clone, Copy, Debug, Default)]
pub struct Gap {
    pub largest: f64,
    /// The same as a part of the larger number, if that is above 1.
    pub relative: f64,
    /// Row and column of tokens.
    pub at: Option<(usize, usize)>,
}

impl Gap {
    pub fn is_within(&self, tolerance: f64) -> bool {
        self.relative <= tolerance
    }

    fn of(a: f64, b: f64, at: Option<(usize, usize)>) -> Self {
        let largest = if a == b { 0.0 } else { (a - b).abs() };
        let largest = if largest.is_nan() { f64::INFINITY } else { largest };
        Self { largest, relative: largest / a.abs().max(b.abs()).max(1.0), at }
    }
}

/// The gap of two lists over the tokens of `mask`; none if nothing is compared.
pub fn gap(theirs: &Numbers, ours: &Numbers, Mask(mask): &Mask) -> Option<Gap> {
    match (theirs, ours) {
        (Numbers::One(a), Numbers::One(b)) => Some(Gap::of(*a, *b, None)),
        (Numbers::Tokens(a), Numbers::Tokens(b)) => {
            let places =
                mask.iter().enumerate().flat_map(|(i, row)| (0..row.len()).filter(|t| row[*t]).map(move |t| (i, t)));
            let gaps = places.map(|(i, t)| Gap::of(f64::from(a[i][t]), f64::from(b[i][t]), Some((i, t))));
            gaps.reduce(|most, gap| if gap.relative > most.relative { gap } else { most })
        }
        _ => None,
    }
}

/// The mean over the tokens of `mask`, or the number itself.
pub fn mean(numbers: &Numbers, Mask(mask): &Mask) -> f64 {
    match numbers {
        Numbers::One(x) => *x,
        Numbers::Tokens(rows) => {
            let all = rows.iter().flatten().zip(mask.iter().flatten()).filter(|(_, m)| **m);
            let (sum, n) = all.fold((0.0, 0.0), |(sum, n), (x, _)| (sum + f64::from(*x), n + 1.0));
            if n == 0.0 { 0.0 } else { sum / n }
        }
    }
}
