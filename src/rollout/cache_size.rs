//! The size of the KV cache: pages for each cache group.

use super::blocks::held_max;
use super::scheduler::{Spec, pages_wanted};
use crate::config::rollout::RolloutConfig;
use crate::model::Kept;

/// The pages of one cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GroupNeed {
    /// Bytes of a page in all layers of the group.
    pub page_bytes: usize,
    /// Pages with which no sequence waits for another.
    pub wanted: usize,
    /// The same for sequences halfway to the expected lengths, because they begin at different times.
    pub expected: usize,
    /// Pages without which a sequence alone does not fit.
    pub least: usize,
}

impl GroupNeed {
    /// The needs of sequences whose mean number of new tokens was `new_tokens_before` in the previous call.
    pub fn of_sequences(
        specs: &[Spec],
        kept: Kept,
        page_bytes: usize,
        config: &RolloutConfig,
        new_tokens_before: Option<usize>,
    ) -> Self {
        let RolloutConfig { batch_max, prefill_tokens_max, .. } = *config;
        let expected_new = new_tokens_before.map_or(usize::MAX, |mean| mean / 2 + 1);
        let expected = |spec: &Spec| Spec { new_tokens_max: spec.new_tokens_max.min(expected_new), ..*spec };
        let all = |specs: Vec<Spec>| pages_wanted(specs, kept, batch_max, prefill_tokens_max);
        let least = specs.iter().map(|spec| held_max(kept, spec.cached_max(), prefill_tokens_max));
        Self {
            page_bytes,
            wanted: all(specs.to_vec()),
            expected: all(specs.iter().map(expected).collect()),
            least: least.max().unwrap_or(0),
        }
    }
}

/// Bytes of `pages` pages of each group.
pub(super) fn bytes(needs: &[GroupNeed], pages: impl Fn(&GroupNeed) -> usize) -> u64 {
    needs.iter().map(|need| need.page_bytes as u64 * pages(need) as u64).sum()
}

/// Pages of each group within `allowed` bytes. If not all wanted pages fit, each group gets the pages of one sequence and
/// a share of the other bytes, in proportion to its expected pages. So all groups are full at the same time.
pub(super) fn divide(needs: &[GroupNeed], allowed: u64) -> Vec<usize> {
    let mut pages: Vec<usize> = needs.iter().map(|need| need.wanted).collect();
    if bytes(needs, |need| need.wanted) <= allowed {
        return pages;
    }
    let holds_one = bytes(needs, |need| need.least) <= allowed;
    let least = |need: &GroupNeed| if holds_one { need.least } else { 0 };
    let expected = |need: &GroupNeed| need.expected.max(1);
    // The groups that do not get all pages that they want.
    let (mut short, mut left) = ((0..needs.len()).collect::<Vec<_>>(), allowed);
    loop {
        let own: Vec<GroupNeed> = short.iter().map(|&i| needs[i]).collect();
        let (spare, all) = (left - bytes(&own, least), bytes(&own, expected));
        for (&i, need) in short.iter().zip(&own) {
            let share = u128::from(spare) * expected(need) as u128 / u128::from(all);
            pages[i] = (least(need) + share as usize).min(need.wanted);
        }
        let (full, rest): (Vec<usize>, Vec<usize>) = short.into_iter().partition(|&i| pages[i] == needs[i].wanted);
        if full.is_empty() || rest.is_empty() {
            return pages;
        }
        left -= full.iter().map(|&i| (needs[i].page_bytes * pages[i]) as u64).sum::<u64>();
        short = rest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_share_the_bytes_by_their_expected_pages_and_hold_at_least_one_sequence() {
        let full = GroupNeed { page_bytes: 10, wanted: 100, expected: 40, least: 10 };
        let window = GroupNeed { page_bytes: 50, wanted: 30, expected: 20, least: 3 };
        // One group has as many pages as fit.
        assert_eq!([0, 105, 999, 1000, 5000].map(|bytes| divide(&[full], bytes)[0]), [0, 10, 99, 100, 100]);
        let both = |bytes| divide(&[full, window], bytes);
        assert_eq!(both(2500), [100, 30]);
        assert_eq!(both(250), [10, 3]);
        // 1400 more than one sequence: 40 and 20 pages.
        assert_eq!(both(250 + 700), [10 + 20, 3 + 10]);
        // The window's group gets all that it wants, and the other one the rest.
        assert_eq!(both(2400), [90, 30]);
        let short = both(249);
        assert!(short[0] < full.least || short[1] < window.least, "{short:?} do not hold one sequence");
    }
}
