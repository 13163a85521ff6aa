//! `plan`: memory and time of a job before it runs.

use super::hub;
use super::out::{note, say};
use crate::comm::{self, Group, World, records};
use crate::config::job::{DeviceName, Gemm};
use crate::config::limits::{self, RANKS_MAX, TOKENS_MAX};
use crate::config::{self, Config};
use crate::device::cpu::pool;
use crate::error::{Error, Result};
use crate::launch::gpu;
use crate::launch::step_shape::StepShape;
use crate::metrics::{jsonl, keys};
use crate::plan::{Device, Job, Rows, Sharing, microbatch, probe, show};
use crate::sys::memory;
use crate::train::{self, Archs};
use argh::{ArgsInfo, FromArgs};
use std::path::PathBuf;

/// Show the memory that each rank of a job needs in each phase, tensor by tensor, and the seconds of each phase. Choose
/// the best layout for "auto" axes. Reads config.json files, and row lengths if data and tokenizer exist. Needs no
/// weights and no GPU.
///
/// The speed of a CPU is measured (under mpirun by all ranks at once); GPUs have declared peaks.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "plan")]
pub struct Args {
    /// the job file
    #[argh(positional)]
    job: PathBuf,
    /// changes to the job: key.path=value ...
    #[argh(positional)]
    overrides: Vec<String>,
    /// number of ranks (default: the started ranks; 8 with --gpu)
    #[argh(option)]
    ranks: Option<usize>,
    /// device: cpu, or a GPU: a30, a100-40g, a100-80g, a800-80g, h100, h100-nvl, h800, h200, h20, gh200, b200, l40s,
    /// rtx-3090, rtx-4090, a5000, a10 or l4 (default: cpu)
    #[argh(option, default = "String::from(\"cpu\")")]
    gpu: String,
    /// ranks per node (default: 8 with --gpu; on CPUs all ranks)
    #[argh(option)]
    ranks_per_node: Option<usize>,
    /// network bandwidth between nodes in GB/s per GPU, one way (default: 25)
    #[argh(option, default = "25.0")]
    network_gb_s: f64,
    /// directory with a reward model's config.json (default: the first of reward.models)
    #[argh(option, from_str_fn(hub::model))]
    reward_model: Option<PathBuf>,
    /// expected tokens per prompt (default: from the job's data, else data.prompt_tokens_max)
    #[argh(option)]
    prompt_tokens: Option<usize>,
    /// expected tokens per response (default: rollout.response_tokens_max; sft: from the job's data)
    #[argh(option)]
    response_tokens: Option<usize>,
    /// print a JSON object instead of the table
    #[argh(switch)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let world = World::start()?;
    let group = world.group();
    let text = group.agree(Ok(())).and_then(|()| plan(args, &world));
    // If one rank fails, all end.
    let text = group.agree(text)?;
    if world.rank == 0 {
        say!("{text}");
    }
    comm::shutdown();
    Ok(())
}

fn plan(args: &Args, world: &World) -> Result<String> {
    let mut config = config::load(&args.job, &args.overrides)?;
    train::saved::locate(&mut config, &world.group());
    let on_cpu = args.gpu.eq_ignore_ascii_case("cpu");
    config.resolve_device(if on_cpu { DeviceName::Cpu } else { DeviceName::Gpu });
    if config.job.gemm == Gemm::Auto {
        // Only a GPU shows which is faster; in a plan both are equally fast, and cuBLASLt costs one more forward.
        config.job.gemm = Gemm::Exact;
    }
    check(&config)?;
    if let Some(files) = config.bases().filter(|_| world.rank == 0) {
        note!("job: {files}");
    }
    config.notes.iter().filter(|_| world.rank == 0).for_each(|text| note!("note: {text}"));
    if let Some(warning) = config.unused().filter(|_| world.rank == 0) {
        note!("warning: {warning}");
    }
    for (option, tokens) in [("--prompt-tokens", args.prompt_tokens), ("--response-tokens", args.response_tokens)] {
        limits::check_option(option, tokens.unwrap_or(1), 1, TOKENS_MAX)?;
    }
    let archs = train::planned_archs(&config, args.reward_model.as_deref())?;
    let expected_from = expect_lengths(&mut config, &world.group());
    let asked = config.clone();
    config.set_microbatches(microbatch::ENOUGH);
    let shape = train::shape(&config);
    let rows = Rows { expected_from, ..rows(args, &config, &shape, &archs, &world.group())? };
    let job = Job::new(&config, &archs, Some(rows));
    job.check()?;
    let ranks = args.ranks.unwrap_or(if on_cpu || world.size > 1 { world.size } else { 8 });
    for (option, value) in [("--ranks", ranks), ("--ranks-per-node", args.ranks_per_node.unwrap_or(1))] {
        limits::check_option(option, value, 1, RANKS_MAX)?;
    }
    if !(args.network_gb_s > 0.0 && args.network_gb_s.is_finite()) {
        return Err(Error::usage(format!("--network-gb-s must be above 0 (got {})", args.network_gb_s)));
    }
    let device = if on_cpu {
        let per_node = args.ranks_per_node.unwrap_or(ranks).min(ranks);
        let started = world.threads().threads;
        pool::set_threads(started);
        let sharing = Sharing::of(world.local_size, started, per_node.max(world.local_size), config.job.threads);
        let each = memory::available_bytes() / sharing.ranks_per_node as u64;
        let declared = Device { threads: sharing.threads, ..Device::cpu(each, sharing.ranks_per_node) };
        // Memory alone decides whether a job fits. A job that does not fit is rejected before its seconds are measured.
        world.group().agree(microbatch::chosen(&asked, &archs, &job.rows, ranks, &declared).map(drop))?;
        probe(&job, world, sharing, declared)
    } else {
        let mut device = Device::gpu(&args.gpu, args.network_gb_s)?;
        device.ranks_per_node = args.ranks_per_node.unwrap_or(device.ranks_per_node);
        device
    };
    let (config, choice) = microbatch::chosen(&asked, &archs, &job.rows, ranks, &device)?;
    let job = Job::new(&config, &archs, Some(job.rows));
    if args.json {
        return Ok(show::object(&job, &choice, &device, ranks).to_string());
    }
    Ok(show::table(&job, &choice, &device, ranks).trim_end().to_string())
}

/// Sets the expected length of responses to the mean of the last step in the job's directory, if the job sets none. Returns
/// where it is from.
fn expect_lengths(config: &mut Config, group: &Group) -> String {
    if config.rollout.response_tokens_expected > 0 || !train::shape(config).has_rollout() {
        return String::new();
    }
    let path = config.job.dir.join("metrics.jsonl");
    let last = || {
        let lines = jsonl::lines(&path).ok()?;
        let mean = lines.iter().rev().find_map(|line| line.get(keys::RESPONSE_TOKENS_MEAN))?;
        Some((mean.round() as usize).clamp(1, config.rollout.response_tokens_max))
    };
    let found: Vec<usize> = records::of_first(group, || last().into_iter().collect());
    let Some(tokens) = found.first() else { return String::new() };
    config.rollout.response_tokens_expected = *tokens;
    format!("the mean of the last step in {}", config.job.dir.display())
}

/// The lengths of rows: from the command line, or else from the job's data, which one rank reads for all.
fn rows(args: &Args, config: &Config, shape: &StepShape, archs: &Archs, group: &Group) -> Result<Rows> {
    let (prompt, response) = (args.prompt_tokens, args.response_tokens);
    let are_given = prompt.is_some() && response.is_some();
    let read = || match Rows::read(config, shape, archs) {
        Ok(rows) => (Some(rows), String::new()),
        Err(error) => (None, error.message),
    };
    let mine = (group.rank() == 0).then(|| if are_given { (None, String::new()) } else { read() });
    let (found, why): (Option<Rows>, String) = records::gather(group, mine.as_slice())?.swap_remove(0);
    let rows = found.unwrap_or_else(|| Rows::longest(config, shape, archs.actor().context, why));
    Ok(rows.with(prompt, response))
}

/// Checks the keys that a plan depends on, but not the rewards or the location of the data.
fn check(config: &Config) -> Result<()> {
    config.check_ranges()?;
    gpu::check(config)?;
    if train::shape(config).has_rollout() {
        config.rollout.check()?;
        config.ppo.check_keys()?;
    }
    Ok(())
}
