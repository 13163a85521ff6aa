//! `rlhf-hpc info`: what this binary and this machine are.

use crate::comm::{self, World};
use crate::device::simd::Level;
use crate::error::Result;
use crate::sys::{affinity, memory};
use argh::FromArgs;
use std::fs;

/// Show the build, MPI, devices and topology, alone or under mpirun.
#[derive(FromArgs, Debug)]
#[argh(subcommand, name = "info")]
pub struct Args {}

/// # Errors
/// `Usage` where the launcher and MPI do not fit together.
pub fn run(_: &Args) -> Result<()> {
    let world = World::start()?;
    let threads = world.threads();
    let mine = format!(
        "rank {} on {}: {} threads, {} cores in its mask",
        world.rank, world.hosts[world.rank], threads.threads, threads.mask
    );
    let ranks = world.group().all_gather_bytes(mine.as_bytes());
    if world.rank == 0 {
        let level = Level::detected();
        let bf16 = if level.bf16_dot() { " with AVX512-BF16" } else { "" };
        let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
        println!(
            "rlhf-hpc   {} ({profile}, {}-{})",
            env!("CARGO_PKG_VERSION"),
            std::env::consts::ARCH,
            std::env::consts::OS
        );
        println!("mpi        {}", mpi_library());
        println!("cuda       none: this version computes on the CPU");
        println!("nccl       none");
        println!("kernels    f32 and bf16, instruction level {:?}{bf16}", level.isa());
        println!("cpu        {}", cpu());
        println!("cores      {} online, {} NUMA nodes, caches {}", affinity::cores(), numa_nodes(), caches());
        println!("memory     {:.1} GiB available", memory::available_bytes() as f64 / f64::from(1 << 30));
        println!("world      {} ranks", world.size);
        for rank in ranks {
            println!("           {}", String::from_utf8_lossy(&rank));
        }
        if let Some(warning) = threads.warning {
            eprintln!("warning: {warning}");
        }
    }
    comm::world::shutdown();
    Ok(())
}

/// The first line of what the MPI library says of itself.
fn mpi_library() -> String {
    let text = mpi::environment::library_version().unwrap_or_else(|_| "unknown".into());
    text.split([',', '\n', '\0']).next().unwrap_or("unknown").trim().to_owned()
}

/// Model and count of processors.
fn cpu() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        text.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':').map(str::trim))
    };
    field("model name").or_else(|| field("CPU implementer")).unwrap_or("unknown").to_owned()
}

fn numa_nodes() -> usize {
    let is_node = |name: &str| name.strip_prefix("node").is_some_and(|n| n.parse::<usize>().is_ok());
    let count = fs::read_dir("/sys/devices/system/node")
        .map_or(0, |dir| dir.flatten().filter(|entry| entry.file_name().to_str().is_some_and(is_node)).count());
    count.max(1)
}

/// Data caches of the first core, smallest first: `L1 48K, L2 1024K, L3 32768K`.
fn caches() -> String {
    let mut found: Vec<String> = Vec::new();
    for i in 0..8 {
        let read = |what: &str| {
            let path = format!("/sys/devices/system/cpu/cpu0/cache/index{i}/{what}");
            fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default()
        };
        if matches!(read("type").as_str(), "Data" | "Unified") {
            found.push(format!("L{} {}", read("level"), read("size")));
        }
    }
    if found.is_empty() { "unknown".into() } else { found.join(", ") }
}
