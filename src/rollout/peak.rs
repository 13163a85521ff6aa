//! The projected peak of a cache group: the most pages that its sequences hold at once, if each ends when it is expected
//! to.

use crate::ops::attention::PAGE;

/// The pages that a sequence holds alone in a cache group, e steps from now until it ends:
///
/// c(e) = min(most, pages_of(tokens + e) + offset)
#[derive(Clone, Copy, Debug)]
pub(super) struct Holder {
    /// Steps until it ends, at least 1.
    pub end: usize,
    pub tokens: usize,
    pub offset: i64,
    pub most: usize,
}

impl Holder {
    /// The first step from which c(e) = most.
    fn full_from(&self) -> usize {
        let below = i64::try_from(self.most).unwrap_or(i64::MAX).saturating_sub(self.offset).saturating_sub(1);
        // pages_of(tokens + e) > below.
        (below.saturating_mul(PAGE as i64).saturating_add(1).saturating_sub(self.tokens as i64)).max(0) as usize
    }
}

/// The end of a holder, or the step from which it holds its most pages. Time runs backward over them.
#[derive(Clone, Copy, Debug)]
struct Event {
    /// Twice the step, and 1 more for an end: at the same step, ends come first.
    key: usize,
    holder: Holder,
}

/// The holders of a cache group.
#[derive(Clone, Debug, Default)]
pub(super) struct Timeline {
    /// The latest first.
    events: Vec<Event>,
}

impl Timeline {
    pub fn new(holders: impl Iterator<Item = Holder>) -> Self {
        let mut timeline = Self::default();
        holders.for_each(|holder| timeline.events.extend(events(holder)));
        timeline.events.sort_unstable_by_key(|event| std::cmp::Reverse(event.key));
        timeline
    }

    pub fn add(&mut self, holder: Holder) {
        for event in events(holder) {
            let at = self.events.partition_point(|other| other.key > event.key);
            self.events.insert(at, event);
        }
    }

    /// max over the ends e of the sum of c(e) over the holders that have not ended before e. No step has a larger sum,
    /// because it only grows between two ends. It visits each holder once.
    pub fn peak(&self) -> usize {
        let (mut growing, mut full, mut peak) = (Growing::default(), 0, 0);
        for Event { key, holder } in &self.events {
            let (step, ends) = (key / 2, key % 2 == 1);
            if ends && holder.full_from() <= step {
                full += holder.most;
            } else {
                growing.add(holder);
                full -= if ends { 0 } else { holder.most };
            }
            if ends {
                peak = peak.max(full + growing.pages(step));
            }
        }
        peak
    }
}

fn events(holder: Holder) -> impl Iterator<Item = Event> {
    let full_from = holder.full_from();
    let grows = (0 < full_from && full_from <= holder.end).then_some(Event { key: 2 * full_from, holder });
    [Event { key: 2 * holder.end + 1, holder }].into_iter().chain(grows)
}

/// The sum of pages_of(tokens + e) + offset over several holders, for any e.
#[derive(Default)]
struct Growing {
    count: i64,
    /// The sum of ⌊tokens / PAGE⌋ + offset.
    pages: i64,
    /// The number of holders for each rest of tokens / PAGE.
    rests: [u32; PAGE],
}

impl Growing {
    fn add(&mut self, holder: &Holder) {
        self.count += 1;
        self.pages += (holder.tokens / PAGE) as i64 + holder.offset;
        self.rests[holder.tokens % PAGE] += 1;
    }

    fn pages(&self, e: usize) -> usize {
        let (whole, rest) = (e / PAGE, e % PAGE);
        // rest + tokens % PAGE of 0 needs no page in addition, up to PAGE one, and more than that two.
        let none = if rest == 0 { self.rests[0] } else { 0 };
        let two: u32 = self.rests.iter().skip(PAGE + 1 - rest).sum();
        (self.pages + self.count * (whole as i64 + 1) - i64::from(none) + i64::from(two)).max(0) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::super::blocks::pages_of;
    use super::*;
    use crate::rng::{Purpose, Rng};

    /// The definition.
    fn by_steps(holders: &[Holder]) -> usize {
        let held = |holder: &Holder, e: usize| {
            let pages = pages_of(holder.tokens + e) as i64 + holder.offset;
            if e <= holder.end { holder.most.min(pages as usize) } else { 0 }
        };
        let last = holders.iter().map(|holder| holder.end).max().unwrap_or(0);
        (1..=last).map(|e| holders.iter().map(|holder| held(holder, e)).sum()).max().unwrap_or(0)
    }

    #[test]
    fn the_peak_of_three_sequences_is_before_the_end_of_the_second() {
        let all = |end, tokens| Holder { end, tokens, offset: 0, most: usize::MAX };
        // In pages: 3 until step 32; 10 to 12 until step 64; 1 to 5 until step 128.
        let holders = [all(PAGE, 2 * PAGE), all(2 * PAGE, 10 * PAGE), all(4 * PAGE, PAGE)];
        // Before the ends: 3 + 11 + 2, 12 + 3, 5.
        assert_eq!(Timeline::new(holders.into_iter()).peak(), 16);
        let holders = [all(PAGE, PAGE), all(3 * PAGE, 10 * PAGE), all(4 * PAGE, PAGE)];
        // 2 + 11 + 2, 13 + 4, 5.
        assert_eq!(Timeline::new(holders.into_iter()).peak(), 17);
    }

    #[test]
    fn the_peak_equals_the_largest_sum_over_all_steps() {
        let rng = Rng::new(5, Purpose::Shuffle);
        for case in 0..200 {
            let pick = |bound: usize, i: u32, what: u32| rng.below(bound as u64, [case, i, what, 0]) as usize;
            let holder = |i: u32| {
                let (tokens, shared) = (pick(300, i, 0), pick(4, i, 1));
                let most = if pick(2, i, 2) == 0 { usize::MAX } else { 1 + pick(9, i, 3) };
                let offset = if pick(5, i, 5) == 0 { 1 } else { -(shared.min(tokens / PAGE) as i64) };
                Holder { end: 1 + pick(200, i, 4), tokens, offset, most }
            };
            let holders: Vec<Holder> = (0..pick(9, 99, 0) as u32).map(holder).collect();
            let mut timeline = Timeline::default();
            for holder in &holders {
                timeline.add(*holder);
            }
            assert_eq!(timeline.peak(), by_steps(&holders), "case {case}: {holders:?}");
            assert_eq!(Timeline::new(holders.iter().copied()).peak(), timeline.peak());
        }
    }
}
