//! The search for the cause of a difference: the changes under which our numbers become theirs.

use super::changes::{self, Change, DIALS, Dial};
use super::compare::{Gap, Mask, gap};
use super::compute::Case;
use super::models::Models;
use super::rows::{Numbers, Quantity};
use crate::dtype::round_bf16;

/// The largest number of tokens with which a gradient is computed again for each change.
const GRADIENT_TOKENS_MAX: usize = 4096;
/// The largest number of columns with which pairs of changes are tried.
const PAIR_COLUMNS_MAX: usize = 1 << 14;
/// The number of values of a dial that are tried before the search narrows.
const GRID: usize = 80;
/// The steps of the narrowing.
const NARROWINGS: usize = 48;

/// The difference of one quantity.
pub struct Difference<'a> {
    pub case: &'a Case,
    pub quantity: Quantity,
    pub theirs: &'a Numbers,
    pub ours: &'a Numbers,
    pub tolerance: f64,
}

/// A cause, and the gap that remains if it is removed.
type Cause = (String, Gap);

impl Difference<'_> {
    /// The causes that explain the difference, the best one first. Empty if none is known.
    pub fn causes(&self, models: &mut Models) -> Vec<String> {
        let mut found = self.shifted();
        let changes = changes::all(self.case);
        if self.is_cheap() {
            found.extend(changes.iter().filter_map(|one| self.tried(&[one], models)));
        }
        if found.is_empty() && !self.quantity.is_of_model() {
            found.extend(DIALS.iter().filter_map(|dial| self.turned(dial, models)));
        }
        if found.is_empty() {
            found.extend(self.scaled());
        }
        let columns: usize = self.case.rows.samples.iter().map(|sample| sample.mask.len()).sum();
        if found.is_empty() && !self.quantity.is_of_model() && columns <= PAIR_COLUMNS_MAX {
            found = self.pairs(&changes, models);
        }
        found.sort_by(|(_, a), (_, b)| a.largest.total_cmp(&b.largest));
        let best = found.first().map_or(0.0, |(_, gap)| gap.largest);
        found.retain(|(_, gap)| gap.largest <= 10.0 * best + 0.01 * self.tolerance);
        found.into_iter().map(|(text, _)| text).collect()
    }

    fn is_cheap(&self) -> bool {
        let tokens: usize = self.case.rows.lines.iter().map(|line| line.tokens.len()).sum();
        !self.quantity.is_of_model() || tokens <= GRADIENT_TOKENS_MAX
    }

    /// The gap to `ours` if it is within the tolerance, and if the difference is gone by it.
    fn explained(&self, ours: &Numbers, changed: &Case) -> Option<Gap> {
        let masks = Mask::of_both(self.case, changed);
        let effect = gap(self.ours, ours, &masks)?;
        let gap = gap(self.theirs, ours, &masks)?;
        (effect.largest > 0.0 && gap.is_within(self.tolerance)).then_some(gap)
    }

    fn tried(&self, changes: &[&Change], models: &mut Models) -> Option<Cause> {
        let mut changed = self.case.clone();
        for change in changes {
            (change.apply)(&mut changed);
        }
        let ours = models.compute(&changed, self.quantity).ok()?;
        let texts: Vec<&str> = changes.iter().map(|change| &change.text[..]).collect();
        Some((texts.join(", and "), self.explained(&ours, &changed)?))
    }

    fn pairs(&self, changes: &[Change], models: &mut Models) -> Vec<Cause> {
        let pairs = changes.iter().enumerate().flat_map(|(i, a)| changes[..i].iter().map(move |b| [b, a]));
        pairs.filter_map(|pair| self.tried(&pair, models)).collect()
    }

    /// Numbers of neighbors, and numbers that were rounded.
    fn shifted(&self) -> Vec<Cause> {
        let (Numbers::Tokens(ours), Numbers::Tokens(theirs)) = (self.ours, self.theirs) else { return Vec::new() };
        let moved = |by: isize| {
            let row = |row: &Vec<f32>| {
                let at = |t: usize| t.checked_add_signed(by).and_then(|t| row.get(t)).copied().unwrap_or(f32::NAN);
                (0..row.len()).map(at).collect()
            };
            Numbers::Tokens(ours.iter().map(row).collect())
        };
        let what = self.quantity.name();
        let mut found = Vec::new();
        for (by, side) in [(1, "left"), (-1, "right")] {
            let gap = gap(self.theirs, &moved(by), &Mask::without_ends(self.case));
            if let Some(gap) = gap.filter(|gap| gap.is_within(self.tolerance)) {
                found.push((format!("{what} shifted by one token to the {side}"), gap));
            }
        }
        let rounded = |x: &f32| f32::from_bits(u32::from(round_bf16(*x)) << 16) == *x;
        let coarse = gap(self.theirs, self.ours, &Mask::of(self.case)).filter(|gap| gap.is_within(1.0 / 128.0));
        if let Some(coarse) = coarse.filter(|_| theirs.iter().flatten().all(rounded)) {
            found.push((format!("their {what} are rounded to bf16"), coarse));
        }
        found
    }

    /// The value of a dial that explains the difference.
    fn turned(&self, dial: &Dial, models: &mut Models) -> Option<Cause> {
        let mut at = |value: f32| -> (f64, Option<Gap>) {
            let mut changed = self.case.clone();
            (dial.set)(&mut changed, value);
            let Ok(ours) = models.compute(&changed, self.quantity) else { return (f64::INFINITY, None) };
            let distance = gap(self.theirs, &ours, &Mask::of(self.case)).map_or(f64::INFINITY, |gap| gap.largest);
            (distance, self.explained(&ours, &changed))
        };
        let [low, high] = dial.range;
        let step = (high - low) / GRID as f32;
        let grid = (0..=GRID).map(|i| low + step * i as f32);
        let best = grid.map(|value| (at(value).0, value)).min_by(|a, b| a.0.total_cmp(&b.0))?.1;
        let (mut low, mut high) = ((best - step).max(low), (best + step).min(high));
        for _ in 0..NARROWINGS {
            let third = (high - low) / 3.0;
            if at(low + third).0 <= at(high - third).0 { high -= third } else { low += third }
        }
        let value = f32::midpoint(low, high);
        // A setting is a short number. Another one may give a single number of theirs by chance.
        let (digits, tolerance) = if matches!(self.ours, Numbers::One(_)) { (2, 0.2) } else { (3, 1.0) };
        let mut short = (1..=digits).map(|digits| rounded(value, digits));
        let explained = |gap: &Gap| gap.is_within(tolerance * self.tolerance);
        let (value, gap) = short.find_map(|value| Some((value, at(value).1.filter(explained)?)))?;
        let ours = (dial.get)(self.case);
        (value != ours).then(|| (format!("{} {value} instead of {ours}", dial.text), gap))
    }

    /// A whole factor between two numbers.
    fn scaled(&self) -> Option<Cause> {
        let (Numbers::One(theirs), Numbers::One(ours)) = (self.theirs, self.ours) else { return None };
        let is_gradient = matches!(self.quantity, Quantity::GradNorm | Quantity::CriticGradNorm);
        if is_gradient && *ours > 1.0 && (theirs - 1.0).abs() < 1e-4 {
            return Some(("their norm is measured after clipping to 1".into(), Gap::default()));
        }
        for n in 2..=1024 {
            for (factor, text) in [(f64::from(n), "times"), (1.0 / f64::from(n), "parts:")] {
                let (one, scaled) = (*theirs, ours * factor);
                if scaled != 0.0 && ((one - scaled) / scaled).abs() < 1e-5 {
                    let text = match text {
                        "times" => {
                            format!("theirs is {n} times ours: a sum over {n} ranks or micro-batches instead of a mean")
                        }
                        _ => format!("ours is {n} times theirs: a loss divided by {n} micro-batches or ranks"),
                    };
                    return Some((text, Gap::default()));
                }
            }
        }
        None
    }
}

/// A number with this many significant digits.
fn rounded(x: f32, digits: usize) -> f32 {
    format!("{x:.*e}", digits - 1).parse().expect("it was a number")
}
