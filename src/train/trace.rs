//! Traces of steps: `metrics.trace_steps`, or a request while the job runs. Spans of all ranks go to one file, with the
//! times of the first rank's clock.

use crate::comm::{Clock, records};
use crate::device::Device;
use crate::device::cuda::traced;
use crate::error::{Error, Kind, Result};
use crate::launch::run::{Run, TRACE_REQUEST};
use crate::metrics::trace::{RankTrace, TraceFile};
use crate::sys::trace;
use std::path::PathBuf;

/// Runs `work`: step `step` until the begin of the next one. Writes its trace if one is due. All ranks
/// call this.
///
/// A step that was stopped with a checkpoint has a trace of the finished part. After another error there is none.
pub fn step<T>(run: &mut Run, step: u64, work: impl FnOnce(&mut Run) -> Result<T>) -> Result<T> {
    let is_asked = run.trace_asked.take();
    if !is_asked && !run.config.metrics.trace_steps.contains(&step) {
        return work(run);
    }
    if is_asked && run.ranks.all.rank() == 0 {
        let path = run.dir.join(TRACE_REQUEST);
        if let Err(error) = std::fs::remove_file(&path) {
            run.recorder.warn(&Error::io("remove", &path, &error).message);
        }
    }
    let all = run.ranks.all.clone();
    let first = all.compare_clocks();
    let begun = records::of_first(&all, trace::now);
    trace::begin();
    if run.device == Device::Cuda {
        traced::begin();
    }
    let done = work(run);
    if run.device == Device::Cuda {
        traced::end();
    }
    let recorded = trace::end();
    if done.as_ref().is_err_and(|error| error.kind != Kind::Stopped) {
        return done;
    }
    let clock = Clock::between(first, all.compare_clocks());
    let host = &run.ranks.world.hosts[run.ranks.world.rank];
    match write(run, step, &RankTrace::new(host, recorded, &clock, begun)) {
        Ok(Some(path)) => run.recorder.say(&format!("trace of step {step}: {}", path.display())),
        Ok(None) => {}
        Err(error) => run.recorder.warn(&format!("step {step} has no trace: {}", error.message)),
    }
    done
}

/// Sends the spans of all ranks to the first one, which writes them and returns the path. Only one rank's spans are in
/// memory at a time.
fn write(run: &Run, step: u64, mine: &RankTrace) -> Result<Option<PathBuf>> {
    let all = &run.ranks.all;
    let mut sums = [mine.len() as f64, mine.left_out() as f64];
    all.all_reduce_sum_f64(&mut sums);
    let [spans, left_out] = sums;
    if left_out > 0.0 {
        run.recorder
            .warn(&format!("the trace of step {step} lacks {left_out} spans: a rank keeps {}", trace::SPANS_MAX));
    }
    let is_first = all.rank() == 0;
    let mut file = is_first.then(|| TraceFile::begin(&run.dir, step, &run.config.job.name, spans as usize));
    let mut read = Ok(());
    for rank in 0..all.size() {
        let mut bytes = if rank == all.rank() { records::encode(mine) } else { Vec::new() };
        all.broadcast_bytes(rank, &mut bytes);
        if let Some(file) = &mut file {
            read = read.and_then(|()| records::decode(&bytes).map(|trace| file.add(rank, &trace)));
        }
    }
    read?;
    file.map(TraceFile::finish).transpose()
}
