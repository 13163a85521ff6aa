//! The measurements of a method: a list of (key, sum) over tokens, micro-batches, ranks and the updates of a step.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Sums by key. A key that ends in `_max` keeps the largest number, all others add up.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sums(pub BTreeMap<String, f64>);

impl Sums {
    pub fn from_list<const N: usize>(list: [(&str, f64); N]) -> Self {
        Self(list.map(|(key, value)| (key.to_string(), value)).into())
    }

    /// The sum of `key`, 0 if nothing was added.
    pub fn get(&self, key: &str) -> f64 {
        self.0.get(key).copied().unwrap_or(0.0)
    }

    pub fn add(&mut self, more: &Self) {
        for (key, value) in &more.0 {
            match self.0.get_mut(key) {
                Some(max) if key.ends_with("_max") => *max = larger(*max, *value),
                Some(sum) => *sum += value,
                None => drop(self.0.insert(key.clone(), *value)),
            }
        }
    }

    /// The total of several lists.
    pub fn total<'a>(lists: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut total = Self::default();
        for list in lists {
            total.add(list);
        }
        total
    }

    /// For each pair of `of` whose key is known: (key, its sum divided by the sum of the second key). If the second key
    /// is empty, the sum itself.
    pub fn means(&self, of: &[(&'static str, &str)]) -> Vec<(&'static str, f64)> {
        of.iter().filter_map(|(key, count)| Some((*key, self.0.get(*key)? / self.get(count).max(1.0)))).collect()
    }
}

/// The larger of two numbers. NaN wins, so that it is seen.
pub fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_add_up_by_key_and_maxima_are_kept() {
        let mut sums = Sums::from_list([("loss", 1.0), ("tokens", 4.0), ("gap_max", 0.5)]);
        sums.add(&Sums::from_list([("gap_max", 0.25), ("loss", 2.0), ("norm", 7.0)]));
        assert_eq!(sums, Sums::from_list([("loss", 3.0), ("tokens", 4.0), ("gap_max", 0.5), ("norm", 7.0)]));
        assert_eq!(
            sums.means(&[("loss", "tokens"), ("norm", "steps"), ("unknown", "tokens")]),
            [("loss", 0.75), ("norm", 7.0)]
        );
        sums.add(&Sums::from_list([("gap_max", f64::NAN)]));
        sums.add(&Sums::from_list([("gap_max", 9.0)]));
        assert!(sums.get("gap_max").is_nan(), "what is not a number is seen");
    }
}
