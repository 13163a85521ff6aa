//! Traces of ranks whose clocks differ.

use crate::Test;
use rlhf_hpc::comm::{Clock, World, records};
use rlhf_hpc::metrics::trace::{RankTrace, TraceFile};
use rlhf_hpc::metrics::traced::{TracedSpan, TracedStep};
use rlhf_hpc::sys::trace::{self, Category};
use std::time::Duration;

pub const TESTS: &[Test] = &[Test {
    name: "collectives of ranks with shifted clocks overlap in a trace",
    ranks: &[1, 2, 4],
    check: shifted_clocks,
}];

/// Each rank's clock is hours ahead of the one before it. Ranks enter the collectives one after the other.
fn shifted_clocks(world: &World) {
    let (all, hour) = (world.group(), 3_600_000_000_000i64);
    trace::shift_clock(world.rank as i64 * hour);
    let first = all.compare_clocks();
    assert!(first.offset.abs_diff(world.rank as i64 * hour) <= first.doubt, "{first:?}");
    let begun = records::of_first(&all, trace::now);
    trace::begin();
    for turn in 0..3 {
        let _span = trace::span(Category::Pass, "turn", "number", || [turn]);
        std::thread::sleep(Duration::from_millis(2 * (world.rank as u64 + 1)));
        all.max(world.rank as f64);
        all.all_gather_bytes(&vec![0; 1000 * world.rank]);
    }
    let recorded = trace::end();
    let clock = Clock::between(first, all.compare_clocks());
    trace::shift_clock(0);
    let mine = RankTrace::new("host", recorded, &clock, begun);
    let dir = tempfile::tempdir().expect("a directory");
    let mut file = TraceFile::begin(dir.path(), 7, "job", 0);
    for (rank, bytes) in all.all_gather_bytes(&records::encode(&mine)).iter().enumerate() {
        file.add(rank, &records::decode(bytes).expect("a trace"));
    }
    let step = TracedStep::read(&file.finish().expect("it is written")).expect("it is read");
    assert_eq!((step.step, step.ranks.len()), (7, world.size));
    let calls = |rank: usize| -> Vec<&TracedSpan> {
        step.ranks[rank].spans.iter().filter(|span| span.category == Category::Collective).collect()
    };
    for rank in 0..world.size {
        let traced = &step.ranks[rank];
        assert_eq!(traced.spans.iter().filter(|span| span.name == "turn").count(), 3, "rank {rank}");
        assert_eq!(calls(rank).len(), if world.size > 1 { 6 } else { 0 }, "rank {rank}");
        for (mine, first) in calls(rank).into_iter().zip(calls(0)) {
            assert_eq!((&mine.name, &mine.call), (&first.name, &first.call));
            // The doubt of the comparison, which is half of a round trip.
            let slack = 2 * clock.doubt() + 1_000_000;
            assert!(mine.start <= first.end + slack && first.start <= mine.end + slack, "{mine:?} and {first:?}");
            assert!(mine.end < 10_000_000_000, "times begin with the step: {mine:?}");
        }
    }
}
