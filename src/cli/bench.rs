//! `bench`: the speed of this machine with this program, compared with its peaks.

mod collectives;
mod cost;
mod cuda;
mod kernels;
mod logprobs;
mod measure;
mod models;
mod ppo;
mod rollout;
mod train;

use super::device::dtype;
use crate::comm::{self, World};
use crate::config::limits::{self, THREADS_MAX};
use crate::device::cpu::pool;
use crate::error::{Error, Result};
use crate::sys::affinity;
use crate::tensor::DType;
use argh::FromArgs;
use measure::Meter;
use std::path::PathBuf;

const REPEATS_MAX: usize = 100_000;

/// Measure speed and compare it with the peaks of the machine (multiply-add, reading memory): medians, with the peaks
/// measured between the repeats of the same run.
///
/// Suites: kernels (products, attention, head, norms, AdamW), rollout (sampling), train (one update), ppo (one step with
/// actor, critic and reference), logprobs (a large vocabulary), all of these; and under mpirun collectives (ours and
/// MPI's own); and on a machine with a GPU cuda (its kernels, compared with a large copy and a large product).
#[derive(FromArgs, Debug)]
#[argh(subcommand, name = "bench")]
pub struct Args {
    /// kernels, rollout, train, ppo, logprobs, all; collectives; or cuda
    #[argh(positional)]
    suite: String,

    /// hugging Face model directory, or tiny or small: a Llama with random weights (default: tiny, then small)
    #[argh(option)]
    model: Option<PathBuf>,

    /// f32 or bf16: what the weights are held in (default: f32)
    #[argh(option, default = "DType::F32", from_str_fn(dtype))]
    dtype: DType,

    /// threads (default: the cores of this process)
    #[argh(option)]
    threads: Option<usize>,

    /// measured repeats of each work, after one that warms up (default: 5)
    #[argh(option, default = "5")]
    repeats: usize,

    /// of the suite cuda only this part, as often as wanted: attention, streaming, head, decode, train, products
    #[argh(option)]
    part: Vec<String>,

    /// of the suite cuda: sizes that show that all of it runs, not how fast
    #[argh(switch)]
    small: bool,

    /// of the suite cuda: a file for the results, a JSON object a line
    #[argh(option)]
    record: Option<PathBuf>,

    /// a JSON object per result instead of the table
    #[argh(switch)]
    json: bool,

    /// measure the processor time of one thread, which other programs disturb less (needs --threads 1)
    #[argh(switch)]
    processor_time: bool,
}

const SUITES: [&str; 5] = ["kernels", "rollout", "train", "ppo", "logprobs"];

impl Args {
    /// Whether every rank of a launcher has a part in it.
    pub fn of_all_ranks(&self) -> bool {
        self.suite == "collectives"
    }
}

pub fn run(args: &Args) -> Result<()> {
    if args.of_all_ranks() {
        return of_ranks(args);
    }
    if args.suite == "cuda" {
        return cuda::run(args);
    }
    let suites: Vec<&str> = SUITES.into_iter().filter(|s| args.suite == *s || args.suite == "all").collect();
    if suites.is_empty() {
        return Err(Error::usage(format!("bench has no suite {}", args.suite))
            .hint(format!("suites: {}, all; under mpirun: collectives; with a GPU: cuda", SUITES.join(", "))));
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
        for source in models::sources(args.model.as_deref()) {
            match suite {
                "kernels" => kernels::run(&mut meter, &source)?,
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
            Error::usage("bench collectives needs several ranks").hint("mpirun -n 2 rlhf-hpc bench collectives")
        );
    }
    comm::abort::install(&world, None, None);
    pool::set_threads(args.threads.unwrap_or_else(|| world.threads().threads).max(1));
    collectives::run(&world, args);
    comm::shutdown();
    Ok(())
}
