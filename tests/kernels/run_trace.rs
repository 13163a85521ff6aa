//! Traces of jobs on GPUs: rows of their streams, with times of the host's clock.

use crate::jobs::{CONFIG, assert_same, command, emulated, well};
use rlhf_hpc::metrics::traced::{TracedSpan, TracedStep};
use rlhf_hpc::sys::trace::Category;

#[test]
fn a_trace_has_rows_of_the_streams_of_each_gpu_within_the_step() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    let line = "run ppo.toml job.collectives=nccl mesh.tensor=1 mesh.zero=1";
    well(&mut command(2, at, &format!("{line} job.dir=traced metrics.trace_steps=[2]")));
    well(&mut command(2, at, &format!("{line} job.dir=untraced")));
    assert_same(at, "traced", "untraced");
    let step = TracedStep::read(&at.join("traced/traces/step-2.json")).expect("a trace");
    assert_eq!(step.ranks.len(), 2);
    for rank in &step.ranks {
        let row = |name: &str| -> Vec<&TracedSpan> {
            let lane = rank.lanes.iter().find(|(_, lane)| *lane == name).unwrap_or_else(|| panic!("a row {name}")).0;
            rank.spans.iter().filter(|span| span.lane == *lane).collect()
        };
        let end = row("compute").iter().map(|span| span.end).max().expect("spans");
        for (name, spans) in
            [("GPU stream compute", ["layer", "layer backward"]), ("GPU stream zero", ["gather", "sum"])]
        {
            let found = row(name);
            for wanted in spans {
                assert!(found.iter().any(|span| span.name.starts_with(wanted)), "{name} has no {wanted}");
            }
            for pair in found.windows(2) {
                assert!(pair[0].end <= pair[1].start, "{name}: {pair:?} are one after the other");
            }
            let is_within = |span: &&TracedSpan| span.category == Category::Gpu && span.end <= end + 10_000_000;
            assert!(found.iter().all(is_within), "{name}: {found:?}");
        }
    }
}
