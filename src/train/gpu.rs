//! `job.device`: what the models of a run are put on.

use crate::comm::{Group, World, gpus};
use crate::config::Config;
use crate::config::job::DeviceName;
use crate::config::optim::GradientOrder;
use crate::device::Device;
use crate::device::cuda::attention::HEAD_DIMS;
use crate::device::cuda::{self, Gpu, devices};
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::model::Arch;
use crate::tensor::DType;
use std::path::Path;
use std::sync::OnceLock;

/// A shared library whose kernels play a GPU on the CPU, for tests of whole runs.
const PLAYED: &str = "RLHF_HPC_PLAYED_GPU";

/// Starts this rank's GPU where the job asks for one. All ranks call this.
///
/// # Errors
/// `Usage` where there is no GPU, or the job asks for what is not done on GPUs yet.
pub fn start(config: &Config, world: &World, mesh: &Mesh, stage: usize, rollout: &Mesh) -> Result<Device> {
    if config.job.device == DeviceName::Cpu {
        return Ok(Device::Cpu);
    }
    check(config, mesh, stage, rollout)?;
    if cuda::gpu::is_started() {
        return Ok(Device::Cuda);
    }
    let gpu = if let Some(library) = std::env::var_os(PLAYED) {
        Gpu::emulated(Path::new(&library))?
    } else {
        let none = |why| Error::usage(format!("job.device = \"gpu\": {why}")).hint("set job.device = \"cpu\"");
        let (_, seen) = world.group().agree(devices::devices().map_err(none))?;
        let index = gpus::mine(world, &seen).ok_or_else(|| none("this rank sees no GPU".into()))?;
        SHARERS.get_or_init(|| world.local_size.div_ceil(seen.len()) as u64);
        Gpu::open(index)?
    };
    cuda::gpu::start(gpu);
    Ok(Device::Cuda)
}

/// Ranks of this host for each GPU that a rank sees.
static SHARERS: OnceLock<u64> = OnceLock::new();

/// What a GPU is not asked to do yet.
fn check(config: &Config, mesh: &Mesh, stage: usize, rollout: &Mesh) -> Result<()> {
    let refused = |what: String, hint: &str| Err(Error::usage(format!("{what} with job.device = \"gpu\"")).hint(hint));
    if config.model.dtype != DType::Bf16 {
        return refused(
            "model.dtype = \"f32\"".into(),
            "set model.dtype = \"bf16\": GPUs hold weights and activations in it",
        );
    }
    if mesh.sequence > 1 {
        return refused(format!("mesh.sequence = {}", mesh.sequence), "set mesh.sequence = 1");
    }
    if stage == 3 || rollout.tensor != mesh.tensor {
        return refused(
            "mesh.zero = 3, or another rollout.tensor than mesh.tensor,".into(),
            "set mesh.zero = 2 at most",
        );
    }
    if config.gradient.order == GradientOrder::Fixed {
        return refused("gradient.order = \"fixed\"".into(), "set gradient.order = \"fast\"");
    }
    if !config.mesh.offload.is_empty() {
        return refused("mesh.offload".into(), "leave mesh.offload empty");
    }
    Ok(())
}

/// Refuses a model whose shapes no kernel knows.
///
/// # Errors
/// `Usage`.
pub fn check_arch(arch: &Arch) -> Result<()> {
    let hint = "set job.device = \"cpu\"";
    if !HEAD_DIMS.contains(&arch.head_dim) {
        let (dim, known) = (arch.head_dim, HEAD_DIMS.map(|dim| dim.to_string()).join(", "));
        return Err(
            Error::usage(format!("a head dim of {dim} with job.device = \"gpu\", needed one of {known}")).hint(hint)
        );
    }
    let widths = [("hidden_size", arch.width), ("intermediate_size", arch.mlp_width)];
    if let Some((name, width)) = widths.into_iter().find(|(_, width)| !width.is_multiple_of(8)) {
        return Err(
            Error::usage(format!("{name} = {width} with job.device = \"gpu\", needed a multiple of 8")).hint(hint)
        );
    }
    Ok(())
}

/// Bytes of this rank's share of its GPU's memory that it may still take; `None` on a played one, which has the host's.
pub fn memory_free() -> Option<u64> {
    let gpu = cuda::gpu();
    let share = gpu.properties()?.memory_bytes as u64 / SHARERS.get().copied().unwrap_or(1).max(1);
    Some(share.saturating_sub(gpu.usage().in_use as u64))
}

/// What the banner shows: the GPU of each rank. A collective.
pub fn describe(all: &Group) -> Vec<String> {
    let gpu = cuda::gpu();
    let mine = gpu.properties().map_or_else(
        || "a GPU played on the CPU".to_string(),
        |p| format!("{}, {:.0} GiB at {}", p.name, p.memory_bytes as f64 / f64::from(1 << 30), p.pci),
    );
    let ranks = all.all_gather_bytes(mine.as_bytes()).into_iter().enumerate();
    let mut rows: Vec<String> =
        ranks.map(|(rank, gpu)| format!("rank {rank}: {}", String::from_utf8_lossy(&gpu))).collect();
    rows.push(format!("kernels from {}", gpu.origin()));
    rows
}
