//! `rlhf-hpc info`: the build and the machine, or a model.

mod model;

use super::hub;
use super::out::{note, say};
use super::rows;
use crate::comm::nccl::Nccl;
use crate::comm::{self, World};
use crate::device::cuda::cublaslt::CublasLt;
use crate::device::cuda::devices::{Found, Properties, devices};
use crate::device::cuda::kernels::Resources;
use crate::device::cuda::nvrtc::Nvrtc;
use crate::device::cuda::{Gpu, embedded, library};
use crate::device::simd::Level;
use crate::error::{Error, Result, format_bytes};
use crate::metrics::counted;
use crate::sys::{affinity, memory};
use argh::{ArgsInfo, FromArgs};
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

/// Show a model; or without one the build, MPI, devices and topology, also under mpirun.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "info")]
pub struct Args {
    /// model directory to describe
    #[argh(positional, from_str_fn(hub::model))]
    model: Option<PathBuf>,
    /// only print a Markdown table of each CUDA kernel's registers, shared and local memory: from the GPU's driver, or
    /// without a GPU from the compiler
    #[argh(switch)]
    kernels: bool,
}

pub fn run(args: &Args) -> Result<()> {
    if let Some(dir) = &args.model {
        return if rows::is_worker() { model::describe(dir) } else { Ok(()) };
    }
    if args.kernels {
        let table = if devices().is_ok() { loaded()? } else { compiled()?.to_owned() };
        say!("{}", table.trim_end());
        return Ok(());
    }
    let world = World::start()?;
    let threads = world.threads();
    let found = devices();
    let seen = found.as_ref().map_or(&[][..], |(_, gpus)| gpus);
    let gpu = comm::gpus::mine(&world, seen);
    let on = gpu.map_or(String::new(), |at| format!(", GPU {} at {}", seen[at].index, seen[at].pci));
    let mine = format!(
        "rank {} on {}: {}, {} in its affinity mask{on}",
        world.rank,
        world.hosts[world.rank],
        counted(threads.threads, "thread"),
        counted(threads.mask, "core")
    );
    let ranks = world.group().all_gather_bytes(mine.as_bytes());
    if world.rank == 0 {
        let level = Level::detected();
        let bf16 = if level.bf16_dot() { " with AVX512-BF16" } else { "" };
        let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
        say!(
            "rlhf-hpc   {} ({profile}, {}-{})",
            env!("CARGO_PKG_VERSION"),
            std::env::consts::ARCH,
            std::env::consts::OS
        );
        say!("mpi        {}", mpi_library());
        for line in cuda(&found, gpu) {
            say!("{line}");
        }
        say!(
            "kernels    f32 and bf16 on the CPU, instruction level {}{bf16}",
            format!("{:?}", level.isa()).to_lowercase()
        );
        say!("cpu        {}", cpu());
        say!("cores      {} online, {}, caches {}", affinity::cores(), counted(numa_nodes(), "NUMA node"), caches());
        say!("memory     {} available", format_bytes(memory::available_bytes()));
        say!("world      {} ranks", world.size);
        for rank in ranks {
            say!("           {}", String::from_utf8_lossy(&rank));
        }
        if let Some(warning) = threads.warning {
            note!("warning: {warning}");
        }
    }
    comm::shutdown();
    Ok(())
}

/// The resources of the kernels, from the compiler of the build.
fn compiled() -> Result<&'static str> {
    embedded::resources().map_err(|why| {
        Error::usage(why)
            .hint("run it on a machine with a GPU, whose driver knows them, or build with nvcc (RLHF_NVCC names one)")
    })
}

/// The resources of the kernels, from the driver.
fn loaded() -> Result<String> {
    let gpu = Gpu::open(0)?;
    let all = gpu.resources();
    let in_memory = all.iter().filter(|(_, taken)| taken.local_bytes > 0).count();
    let mut text = format!(
        "# Kernel resources\n\nAs the driver loads them on {}, {}. Registers per thread; static shared memory per block in bytes \
         (a launch may\nrequest more); local memory per thread in bytes (arrays and spilled registers), which {in_memory} of {} \
         kernels use.\n\n| kernel | registers | shared | local |\n|---|---:|---:|---:|\n",
        gpu.properties().name,
        gpu.origin(),
        all.len()
    );
    for (kernel, Resources { registers, shared_bytes, local_bytes }) in all {
        let _ = writeln!(text, "| {kernel} | {registers} | {shared_bytes} | {local_bytes} |");
    }
    Ok(text)
}

/// The GPUs of this machine, the embedded cubins, and the libraries.
fn cuda(found: &Found, mine: Option<usize>) -> Vec<String> {
    let mut lines = Vec::new();
    match found {
        Err(why) => lines.push(format!("cuda       none: {why}; computing on the CPU")),
        Ok(((major, minor), gpus)) => {
            lines.push(format!("cuda       driver of CUDA {major}.{minor}, {} GPUs", gpus.len()));
            lines.extend(gpus.iter().map(|gpu| format!("           {}", describe_gpu(gpu))));
        }
    }
    lines.push(format!("carried    {}", embedded::describe()));
    if let Some(index) = mine {
        let loaded = Gpu::open(index).map(|gpu| gpu.origin());
        lines.push(format!("loaded     {}", loaded.unwrap_or_else(|error| format!("nothing: {}", error.message))));
    }
    let none = |why: String| format!("none: {why}");
    let nvrtc = library::NVRTC.open(|path| {
        let (major, minor) = Nvrtc::open(path)?.version;
        Ok(format!("{major}.{minor} ({})", path.display()))
    });
    let cublaslt = CublasLt::open().map(|lt| format!("{} ({})", lt.version_name(), lt.path.display()));
    let without = |why: String| format!("none: {why}; GEMM on a GPU is exact");
    let nccl = Nccl::open().map(|nccl| format!("{} ({})", nccl.version_name(), nccl.path.display()));
    lines.push(format!("nvrtc      {}", nvrtc.unwrap_or_else(none)));
    lines.push(format!("cublaslt   {}", cublaslt.unwrap_or_else(without)));
    lines.push(format!("nccl       {}", nccl.unwrap_or_else(none)));
    lines
}

/// `GPU 0 at 0000:3b:00.0: NVIDIA A800-SXM4-80GB, 79.3 GiB, 108 multiprocessors, capability 8.0, NUMA node 0, UUID
/// 5c1b2b9c-90b4-8a3e-7f5d-4c2c17f0e6aa`.
fn describe_gpu(gpu: &Properties) -> String {
    let (major, minor) = gpu.capability;
    let node = gpu.numa.map_or("unknown".into(), |node| node.to_string());
    format!(
        "GPU {} at {}: {}, {}, {} multiprocessors, capability {major}.{minor}, NUMA node {node}, UUID {}",
        gpu.index,
        gpu.pci,
        gpu.name,
        format_bytes(gpu.memory_bytes as u64),
        gpu.multiprocessors,
        gpu.uuid
    )
}

/// The first line of the MPI library's version string.
fn mpi_library() -> String {
    let text = mpi::environment::library_version().unwrap_or_else(|_| "unknown".into());
    text.split([',', '\n', '\0']).next().unwrap_or("unknown").trim().to_owned()
}

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
