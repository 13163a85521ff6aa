//! The order in which sequences are fed, and the owners of pages.

use rlhf_hpc::model::Kept;
use rlhf_hpc::ops::attention::PAGE;
use rlhf_hpc::rng::{Purpose, Rng};
use rlhf_hpc::rollout::blocks::{GroupPages, held_max, pages_of};
use rlhf_hpc::rollout::scheduler::{Chunk, Limits, Prefixes, Scheduler, Spec, pages_wanted};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Imitates a cache whose entries are (group, position, token), and a model that generates a sequence's tokens by
/// counting. At every feed it checks the entries that attention would read.
struct Rehearsal {
    scheduler: Scheduler,
    specs: Vec<Spec>,
    lengths: Vec<usize>,
    tokens: Vec<Vec<u64>>,
    /// The cache of each group.
    caches: Vec<Vec<Option<u64>>>,
    fed: usize,
    forwards: usize,
    running_max: usize,
    /// Used pages of the first cache group: the most, and the sum over all forwards.
    used: [usize; 2],
    limits: Limits,
    /// Groups that are not submitted yet, the next one last. Empty if all are submitted at the start.
    held: Option<Vec<Range<usize>>>,
    /// Whether pages that prompts have in common are held.
    shares: bool,
}

/// The token that a model would feed: prompt tokens are the group's, new ones the sequence's own.
fn token(spec: &Spec, sequence: usize, position: usize) -> u64 {
    let owner = if position < spec.prompt_tokens { spec.group } else { 1_000_000 + sequence };
    (owner * 10_000 + position) as u64
}

impl Rehearsal {
    /// `lengths`: new tokens after which each sequence ends.
    fn new(specs: &[Spec], lengths: &[usize], limits: Limits) -> Self {
        let scheduler = Scheduler::new(specs.iter().copied(), limits.clone()).expect("every sequence fits alone");
        let tokens =
            specs.iter().enumerate().map(|(s, spec)| (0..spec.prompt_tokens).map(|i| token(spec, s, i)).collect());
        Self {
            scheduler,
            tokens: tokens.collect(),
            specs: specs.to_vec(),
            lengths: lengths.to_vec(),
            caches: limits.pages.iter().map(|group| vec![None; group.pages * PAGE]).collect(),
            fed: 0,
            forwards: 0,
            running_max: 0,
            used: [0; 2],
            limits,
            held: None,
            shares: false,
        }
    }

    /// Submits its groups one after the other, as slots become free.
    fn held_back(mut self) -> Self {
        self.scheduler.open();
        let groups: Vec<usize> = self.specs.iter().map(|spec| spec.group).collect();
        let ranges = groups.chunk_by(|a, b| a == b).scan(0, |end, group| {
            *end += group.len();
            Some(*end - group.len()..*end)
        });
        self.held = Some(ranges.collect::<Vec<_>>().into_iter().rev().collect());
        self
    }

    /// The prompts of all groups but the second begin with the same `head` tokens, as far as they go.
    fn with_head(mut self, head: usize) -> Self {
        for (spec, tokens) in self.specs.iter().zip(&mut self.tokens).filter(|(spec, _)| spec.group != 1) {
            let end = head.min(spec.prompt_tokens);
            tokens[..end].iter_mut().zip(9_000_000..).for_each(|(token, head)| *token = head);
        }
        let groups = self.specs.iter().zip(&self.tokens).map(|(spec, tokens)| (spec.group, tokens));
        let prompts: BTreeMap<usize, Vec<u32>> =
            groups.map(|(group, tokens)| (group, tokens.iter().map(|&t| t as u32).collect())).collect();
        self.shares = true;
        self.scheduler.share_prefixes(Prefixes::new(prompts.values().map(Vec::as_slice)));
        self
    }

    fn take_more(&mut self) {
        let Some(held) = &mut self.held else { return };
        while self.scheduler.wants_more() {
            match held.pop() {
                Some(group) => self.scheduler.add(group),
                None => self.scheduler.close(),
            }
        }
    }

    fn run(mut self) -> Self {
        while !self.scheduler.is_done() {
            assert!(self.forwards < 100_000, "the schedule does not end");
            self.take_more();
            let forks = self.scheduler.admit().to_vec();
            self.running_max = self.running_max.max(self.scheduler.running());
            for &s in &forks {
                self.draw(s);
            }
            for s in forks {
                if self.drawn(s) == self.lengths[s] {
                    self.scheduler.finish(s);
                } else if let Some(copies) = self.scheduler.share(s) {
                    for ((from, to), cache) in copies.into_iter().zip(&mut self.caches) {
                        let (from, to) = (from as usize * PAGE, to as usize * PAGE);
                        cache.copy_within(from..from + PAGE, to);
                    }
                }
            }
            self.forward();
        }
        self
    }

    fn drawn(&self, s: usize) -> usize {
        self.tokens[s].len() - self.specs[s].prompt_tokens
    }

    fn draw(&mut self, s: usize) {
        assert!(self.drawn(s) < self.lengths[s], "a finished sequence continued");
        let next = token(&self.specs[s], s, self.tokens[s].len());
        self.tokens[s].push(next);
        self.scheduler.accept(s);
    }

    /// A page of states has the hash of the tokens of its sequence.
    fn feed_states(&mut self, group: usize, feeds: &[Chunk]) {
        let hash =
            |tokens: &[u64]| tokens.iter().fold(7u64, |hash, t| (hash.rotate_left(5) ^ t).wrapping_mul(0x9e37_79b9));
        let mut pages = BTreeSet::new();
        for feed in feeds {
            let page = *self.scheduler.tables(feed.sequence).of_group(group).last().expect("a page");
            assert!(pages.insert(page), "two sequences change page {page}");
            let (state, tokens) = (&mut self.caches[group][page as usize * PAGE], &self.tokens[feed.sequence]);
            let before = (feed.past > 0).then(|| hash(&tokens[..feed.past]));
            assert!(before.is_none() || *state == before, "sequence {} after {} tokens", feed.sequence, feed.past);
            *state = Some(hash(&tokens[..feed.past + feed.tokens]));
        }
    }

    fn forward(&mut self) {
        let feeds = self.scheduler.plan().to_vec();
        for (group, from, to) in self.scheduler.take_copies() {
            let (from, to) = (from as usize * PAGE, to as usize * PAGE);
            self.caches[group].copy_within(from..from + PAGE, to);
        }
        let prefill: usize = feeds.iter().map(|f| f.tokens).filter(|&t| t > 1).sum();
        assert!(prefill <= self.limits.prefill_tokens_max);
        let is_state = |group: usize| self.limits.pages[group].kept == Kept::State;
        for group in (0..self.caches.len()).filter(|group| is_state(*group)).collect::<Vec<_>>() {
            self.feed_states(group, &feeds);
        }
        for (group, cache) in self.caches.iter_mut().enumerate() {
            let window = match self.limits.pages[group].kept {
                Kept::All => usize::MAX,
                Kept::Window(window) => window,
                Kept::State => continue,
            };
            for feed in &feeds {
                let blocks = self.scheduler.tables(feed.sequence).of_group(group);
                assert!(blocks.len() >= pages_of(feed.past + feed.tokens));
                for i in feed.past..feed.past + feed.tokens {
                    cache[blocks[i / PAGE] as usize * PAGE + i % PAGE] = Some(self.tokens[feed.sequence][i]);
                }
            }
            for feed in &feeds {
                let (blocks, tokens) =
                    (self.scheduler.tables(feed.sequence).of_group(group), &self.tokens[feed.sequence]);
                let end = feed.past + feed.tokens;
                for (i, &token) in tokens[..end].iter().enumerate().skip((feed.past + 1).saturating_sub(window)) {
                    let cached = cache[blocks[i / PAGE] as usize * PAGE + i % PAGE];
                    assert_eq!(cached, Some(token), "sequence {} position {i}", feed.sequence);
                }
                assert_eq!(feed.complete, end == tokens.len());
            }
        }
        self.check_held(&feeds);
        let used = self.limits.pages[0].pages - self.scheduler.free_pages()[0];
        self.used = [self.used[0].max(used), self.used[1] + used];
        self.forwards += usize::from(!feeds.is_empty());
        for feed in feeds {
            self.fed += feed.tokens;
            self.scheduler.fed(feed);
            if feed.complete {
                self.draw(feed.sequence);
                if self.drawn(feed.sequence) == self.lengths[feed.sequence] {
                    self.scheduler.finish(feed.sequence);
                }
            }
        }
    }

    /// A sequence holds the pages of its window and of the tokens that it reads; a prompt whose samples wait, those of
    /// its window.
    fn check_held(&self, feeds: &[Chunk]) {
        if self.shares {
            return;
        }
        for (group, free) in self.limits.pages.iter().zip(self.scheduler.free_pages()) {
            let Kept::Window(window) = group.kept else { continue };
            let running = self.scheduler.running() - feeds.len().min(self.scheduler.running());
            let prompts = self.specs.iter().map(|spec| spec.group).collect::<BTreeSet<usize>>();
            let kept = prompts.into_iter().filter(|prompt| self.scheduler.is_prompt_kept(*prompt)).count();
            let read: usize = feeds.iter().map(|feed| (window + feed.tokens).div_ceil(PAGE) + 1).sum();
            let most = read + (running + kept) * (window.div_ceil(PAGE) + 1);
            assert!(group.pages - free <= most, "{} pages are held, at most {most}", group.pages - free);
        }
    }

    fn assert_complete(&self) {
        for s in 0..self.specs.len() {
            assert_eq!(self.drawn(s), self.lengths[s], "sequence {s}");
        }
        let all: Vec<usize> = self.limits.pages.iter().map(|group| group.pages).collect();
        assert_eq!(self.scheduler.free_pages(), all, "pages leaked");
    }
}

fn groups(prompts: &[usize], samples: usize, new_tokens_max: usize) -> Vec<Spec> {
    let spec = |group: usize| Spec { group, prompt_tokens: prompts[group], new_tokens_max };
    (0..prompts.len()).flat_map(|group| std::iter::repeat_n(spec(group), samples)).collect()
}

/// `pages` pages of one group without a window.
fn whole(pages: usize) -> Vec<GroupPages> {
    vec![GroupPages { kept: Kept::All, pages }]
}

/// Random prompts, samples, lengths and batches. Half of the cases run to the longest, as a job's may. Cache groups keep what
/// `kept` says.
fn case(number: u32, kept: &[Kept]) -> (Vec<Spec>, Vec<usize>, Limits) {
    let rng = Rng::new(2, Purpose::Shuffle);
    let pick = |bound: u64, what: u32| rng.below(bound, [number, what, 0, 0]) as usize;
    let (samples, new_max) = (1 + pick(5, 0), 1 + pick(150, 1));
    let prompts: Vec<usize> = (0..=pick(9, 2) as u32).map(|i| 1 + pick(130, 100 + i)).collect();
    let specs = groups(&prompts, samples, new_max);
    let length = |i: u32| if number.is_multiple_of(2) { new_max } else { 1 + pick(new_max as u64, 200 + i) };
    let lengths = (0..specs.len() as u32).map(length).collect();
    let longest = specs.iter().map(|s| s.prompt_tokens + new_max - 1).max().expect("some sequences");
    let (prefill_tokens_max, more) = (2 + pick(100, 4), pick(3, 5) * pick(20, 6));
    let of_group = |&kept: &Kept| {
        let least = held_max(kept, longest, prefill_tokens_max);
        let more = match kept {
            Kept::All => more,
            Kept::Window(_) => more / 2,
            Kept::State => more / 12,
        };
        GroupPages { kept, pages: least + more }
    };
    let limits = Limits {
        batch_max: 1 + pick(12, 3),
        prefill_tokens_max,
        pages: kept.iter().map(of_group).collect(),
        new_tokens_before: (pick(2, 7) == 0).then(|| pick(150, 8)),
    };
    (specs, lengths, limits)
}

#[test]
fn every_sequence_reads_its_own_tokens_for_any_pool_batch_budget_and_kept_part() {
    let mut preemptions = 0;
    for number in 0..280 {
        let window = Kept::Window(1 + 13 * number as usize % 130);
        let kept = match (number, number % 2) {
            (..120, _) => vec![Kept::All],
            (120..200, 0) => vec![window],
            (120..200, _) => vec![Kept::All, window],
            (_, 0) => vec![Kept::State],
            _ => vec![Kept::State, Kept::All],
        };
        let (specs, lengths, limits) = case(number, &kept);
        let done = Rehearsal::new(&specs, &lengths, limits.clone()).run();
        done.assert_complete();
        assert!(done.running_max <= limits.batch_max);
        preemptions += if kept[0] == Kept::All { 0 } else { done.scheduler.preemptions() };
        // With the requested number of pages, no sequence is preempted.
        let Limits { batch_max, prefill_tokens_max, .. } = limits;
        let wanted = |&kept: &Kept| GroupPages {
            kept,
            pages: pages_wanted(specs.iter().copied(), kept, batch_max, prefill_tokens_max),
        };
        let roomy = Limits { pages: kept.iter().map(wanted).collect(), ..limits.clone() };
        let done = Rehearsal::new(&specs, &lengths, roomy.clone()).run();
        done.assert_complete();
        assert_eq!(done.scheduler.preemptions(), 0, "case {number}: {roomy:?}");
        // The order and the number of running sequences are the same if groups are added as slots become free.
        let held = Rehearsal::new(&specs, &lengths, roomy.clone()).held_back().run();
        held.assert_complete();
        assert_eq!((held.forwards, held.running_max), (done.forwards, done.running_max), "case {number}: {roomy:?}");
        Rehearsal::new(&specs, &lengths, limits.clone()).held_back().run().assert_complete();
        if kept.contains(&Kept::State) {
            continue;
        }
        // Prompts with the same first pages, in a cache of any size.
        let shared = Rehearsal::new(&specs, &lengths, limits).with_head(100).run();
        shared.assert_complete();
        let shared = Rehearsal::new(&specs, &lengths, roomy.clone()).with_head(100).held_back().run();
        shared.assert_complete();
        assert_eq!(shared.scheduler.preemptions(), 0, "case {number}: {roomy:?}");
        let found = |done: &Rehearsal| done.fed + done.scheduler.prefix_hit_tokens();
        assert_eq!(found(&shared), found(&done), "case {number}: {roomy:?}");
    }
    assert!(preemptions > 0, "no cache with windows or states was tight");
}

#[test]
fn a_long_response_holds_only_the_pages_of_its_window() {
    let (kept, specs) = (Kept::Window(70), groups(&[100, 300], 3, 900));
    let pages = |pages| vec![GroupPages { kept: Kept::All, pages: 200 }, GroupPages { kept, pages }];
    let limits = Limits { batch_max: 6, prefill_tokens_max: 64, pages: pages(30), new_tokens_before: None };
    let done = Rehearsal::new(&specs, &[900; 6], limits.clone()).run();
    done.assert_complete();
    assert_eq!((done.running_max, done.scheduler.preemptions()), (6, 0));
    // Three hold 4 pages each. A fourth one would need 3 more for the tokens that a forward reads.
    let limits = Limits { pages: pages(3 * 4 + 3), ..limits };
    let done = Rehearsal::new(&specs, &[900; 6], limits).run();
    done.assert_complete();
    assert_eq!((done.running_max, done.scheduler.preemptions()), (3, 0));
}

#[test]
fn a_rollout_expects_the_lengths_of_the_previous_one_and_admits_as_many_as_then_fit() {
    let (specs, lengths) = (groups(&[10; 24], 1, 500), [20; 24]);
    let run = |new_tokens_before| {
        let limits = Limits { batch_max: 24, prefill_tokens_max: 240, pages: whole(20), new_tokens_before };
        Rehearsal::new(&specs, &lengths, limits).run()
    };
    let [unknown, known, too_short] = [None, Some(20), Some(1)].map(run);
    [&unknown, &known, &too_short].into_iter().for_each(Rehearsal::assert_complete);
    // One page for each. Of half of the maximum length, two fit 20 pages.
    assert_eq!((known.running_max, known.scheduler.preemptions(), known.used[0]), (20, 0, 20));
    assert!(unknown.running_max > 8, "{} ran at once", unknown.running_max);
    assert!(known.forwards < unknown.forwards, "{} and {}", known.forwards, unknown.forwards);
    assert_eq!(too_short.forwards, known.forwards);
}

/// 96 lengths around 120, with a maximum of 480.
fn spread() -> Vec<usize> {
    let rng = Rng::new(9, Purpose::Shuffle);
    let below = |i: u32, what| rng.below(120, [i, what, 0, 0]) as usize;
    (0..96).map(|i| (20 + below(i, 0) + if below(i, 1) < 30 { 3 * below(i, 2) } else { 0 }).min(480)).collect()
}

#[test]
fn the_cache_is_full_at_the_projected_peak() {
    let lengths = spread();
    let mean = lengths.iter().sum::<usize>() / lengths.len();
    // Equal lengths that are known; different ones with a known mean; the same in the first rollout.
    let cases = [
        (vec![480; 96], Some(480), 0.95, 0.4, 0),
        (lengths.clone(), Some(mean), 0.95, 0.6, 20),
        (lengths, None, 0.95, 0.5, 30),
    ];
    for (lengths, new_tokens_before, peak, on_average, preemptions) in cases {
        let pages = 6 * pages_of(10 + 480);
        let limits = Limits { batch_max: 96, prefill_tokens_max: 240, pages: whole(pages), new_tokens_before };
        let done = Rehearsal::new(&groups(&[10; 96], 1, 480), &lengths, limits).run();
        done.assert_complete();
        let [most, sum] = done.used.map(|used| used as f64 / pages as f64);
        assert!(most >= peak, "{new_tokens_before:?}: {most}");
        let average = sum / done.forwards as f64;
        assert!(average >= on_average, "{new_tokens_before:?}: {average}");
        assert!(done.scheduler.preemptions() <= preemptions, "{}", done.scheduler.preemptions());
    }
}

#[test]
fn a_cache_for_barely_one_sequence_ends_all_of_them_whatever_is_expected() {
    let lengths: Vec<usize> = spread().into_iter().take(24).collect();
    let once: usize = 24 * 40 + lengths.iter().map(|length| length - 1).sum::<usize>();
    for samples in [1, 4] {
        for new_tokens_before in [None, Some(1), Some(100), Some(480)] {
            let limits =
                Limits { batch_max: 8, prefill_tokens_max: 64, pages: whole(pages_of(40 + 479)), new_tokens_before };
            let done = Rehearsal::new(&groups(&vec![40; 24 / samples], samples, 480), &lengths, limits).run();
            done.assert_complete();
            let again = (done.fed as f64 - once as f64) / once as f64;
            assert!(again < 0.25, "{samples} samples, {new_tokens_before:?}: {again}");
        }
    }
}

#[test]
fn the_sequence_that_has_to_read_the_fewest_tokens_again_is_preempted() {
    // The prompts fill 3, 1 and 4 of 9 pages, and each sequence needs one more for its second token.
    let specs = [3, 1, 4].into_iter().enumerate();
    let specs = specs.map(|(group, pages)| Spec { group, prompt_tokens: pages * PAGE, new_tokens_max: 9 });
    let limits = Limits { batch_max: 3, prefill_tokens_max: 9 * PAGE, pages: whole(9), new_tokens_before: Some(1) };
    let mut scheduler = Scheduler::new(specs, limits).expect("each fits");
    scheduler.admit();
    for feed in scheduler.plan().to_vec() {
        scheduler.fed(feed);
        scheduler.accept(feed.sequence);
    }
    let fed: Vec<usize> = scheduler.plan().iter().map(|feed| feed.sequence).collect();
    assert_eq!((fed, scheduler.preemptions()), (vec![0, 2], 1));
}

#[test]
fn a_prompt_is_prefilled_once_for_all_its_samples() {
    let prompts = [100, 31, 32, 33, 1];
    for batch_max in [3, 7, 100] {
        let specs = groups(&prompts, 6, 20);
        let limits = Limits { batch_max, prefill_tokens_max: 64, pages: whole(1000), new_tokens_before: None };
        let done = Rehearsal::new(&specs, &[20; 30], limits).run();
        done.assert_complete();
        assert_eq!(done.fed, prompts.iter().sum::<usize>() + 30 * 19, "batch_max {batch_max}");
        assert_eq!(done.scheduler.preemptions(), 0);
    }
}

#[test]
fn pages_of_a_common_prefix_are_prefilled_once() {
    // Of 70 common tokens two pages are whole; the last page of a prompt is its own, as its logits are wanted.
    let prompts = [100, 90, 71, 64, 65, 30, 100];
    for batch_max in [1, 4, 100] {
        let specs = groups(&prompts, 2, 5);
        let limits = Limits { batch_max, prefill_tokens_max: 24, pages: whole(100), new_tokens_before: None };
        let done = Rehearsal::new(&specs, &[5; 14], limits).with_head(70).run();
        done.assert_complete();
        let found = 3 * 64 + 32 + prompts.iter().sum::<usize>();
        assert_eq!(done.scheduler.prefix_hit_tokens(), found, "batch {batch_max}");
        assert_eq!(done.fed, 2 * prompts.iter().sum::<usize>() + 14 * 4 - found, "batch {batch_max}");
    }
}

#[test]
fn a_finished_sequence_frees_its_slot_at_once() {
    // 2 slots, one long sequence: the 30 short ones use the other slot one after another.
    let specs = groups(&[5; 31], 1, 200);
    let mut lengths = [6; 31];
    lengths[0] = 150;
    let limits = Limits { batch_max: 2, prefill_tokens_max: 64, pages: whole(100), new_tokens_before: None };
    let done = Rehearsal::new(&specs, &lengths, limits).run();
    done.assert_complete();
    assert!(done.forwards < 200, "{} forwards", done.forwards);
}

#[test]
fn a_pool_for_few_sequences_runs_the_others_later_without_preemption() {
    // Responses of known length never have to be preempted.
    let (specs, new_tokens_before) = (groups(&[40; 20], 1, 100), Some(100));
    let limits = Limits { batch_max: 20, prefill_tokens_max: 2048, pages: whole(3 * pages_of(139)), new_tokens_before };
    let done = Rehearsal::new(&specs, &[100; 20], limits).run();
    done.assert_complete();
    assert_eq!(done.running_max, 3);
    assert_eq!(done.scheduler.preemptions(), 0);
}

#[test]
fn decoding_sequences_get_pages_while_some_are_free_and_a_freed_slot_is_reported() {
    let limits = Limits { batch_max: 2, prefill_tokens_max: 64, pages: whole(8), new_tokens_before: None };
    let mut scheduler = Scheduler::new(groups(&[PAGE - 2; 3], 1, 70), limits).expect("each fits");
    assert!(scheduler.admit().is_empty());
    assert_eq!(scheduler.decoding(), None, "prompts are read first");
    for feed in scheduler.plan().to_vec() {
        assert!(!scheduler.fed(feed));
        scheduler.accept(feed.sequence);
    }
    assert_eq!((scheduler.decoding(), scheduler.admissible()), (Some(&[0, 1][..]), None));
    assert_eq!(scheduler.pages_max(0), pages_of(PAGE - 2 + 69));
    assert!(scheduler.extend(0, 6 * PAGE), "five pages more are free");
    assert!(!scheduler.extend(1, 3 * PAGE), "one is left, and none is taken from the other sequence");
    assert_eq!((scheduler.free_pages(), scheduler.preemptions(), scheduler.running()), (vec![0], 0, 2));
    scheduler.finish(0);
    assert_eq!(scheduler.admissible(), Some(1));
    scheduler.decoded(1);
    assert_eq!(scheduler.decoding(), None, "it has no token to be fed");
    scheduler.accept(1);
    assert_eq!(scheduler.decoding(), Some(&[1][..]));
    assert!(scheduler.admit().is_empty());
    assert_eq!(scheduler.decoding(), None, "the one that came reads its prompt");
}

#[test]
fn prompts_with_one_sample_need_only_the_pages_of_their_rows() {
    // The last new token is never fed: 32 tokens of 16 + 17 fill a page.
    let wanted = |specs: &[Spec], batch_max| pages_wanted(specs.iter().copied(), Kept::All, batch_max, 64);
    let once = groups(&[PAGE / 2, PAGE / 2], 1, PAGE / 2 + 1);
    assert_eq!(wanted(&once, 8), 2);
    let twice = groups(&[PAGE / 2, PAGE / 2], 2, PAGE / 2 + 1);
    assert_eq!(wanted(&twice, 8), 4 + 2, "a prompt's partial page, kept for its second sample");
    assert_eq!(wanted(&twice, 1), 1 + 1);
}
