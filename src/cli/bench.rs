//! `bench`: the speed of this program on this machine, compared with the machine's peaks.

mod args;
mod collectives;
mod cuda;
mod kernels;
mod logprobs;
mod measure;
mod models;
mod ppo;
mod rollout;
mod train;

use crate::comm::{self, World};
use crate::config::limits::{self, THREADS_MAX};
use crate::device::cpu::pool;
use crate::error::{Error, Result};
use crate::sys::affinity;
pub use args::Args;
use measure::Meter;

const REPEATS_MAX: usize = 100_000;

/// The suite that runs on all ranks that a launcher started.
pub const COLLECTIVES: &str = "collectives";

const SUITES: [&str; 5] = ["kernels", "rollout", "train", "ppo", "logprobs"];

pub fn run(args: &Args) -> Result<()> {
    if args.suite == COLLECTIVES {
        return of_ranks(args);
    }
    if args.suite == "cuda" {
        return cuda::run(args);
    }
    let suites: Vec<&str> = SUITES.into_iter().filter(|s| args.suite == *s || args.suite == "all").collect();
    if suites.is_empty() {
        return Err(Error::usage(format!("bench has no suite `{}`", args.suite))
            .hint(format!("choose {} or all; collectives under mpirun; cuda with a GPU", SUITES.join(", "))));
    }
    let threads = args.threads.unwrap_or_else(|| affinity::mask().len());
    limits::check_option("--threads", threads, 1, THREADS_MAX)?;
    limits::check_option("--repeats", args.repeats, 1, REPEATS_MAX)?;
    if args.processor_time && threads != 1 {
        return Err(Error::usage("--processor-time measures one thread").hint("add --threads 1"));
    }
    pool::set_threads(threads);
    let mut meter = Meter::new(args);
    for suite in suites {
        meter.begin(suite);
        if suite == "logprobs" {
            logprobs::run(&mut meter)?;
            continue;
        }
        for source in models::sources(args.model.as_deref())? {
            match suite {
                "kernels" => kernels::run(&mut meter, &source),
                "rollout" => rollout::run(&mut meter, &source)?,
                "train" => train::run(&mut meter, &source)?,
                _ => ppo::run(&mut meter, &source)?,
            }
        }
    }
    Ok(())
}

fn of_ranks(args: &Args) -> Result<()> {
    let world = World::start()?;
    if world.size == 1 {
        comm::shutdown();
        return Err(
            Error::usage("bench collectives needs at least 2 ranks").hint("run mpirun -n 2 rlhf-hpc bench collectives")
        );
    }
    comm::abort::install(&world, None, None);
    pool::set_threads(args.threads.unwrap_or_else(|| world.threads().threads).max(1));
    collectives::run(&world, args);
    comm::shutdown();
    Ok(())
}
