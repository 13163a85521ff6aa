//! The devices of ranks. Their peaks are declared by the manufacturer (GPUs) or measured (this CPU). A run reaches a
//! share of each peak.

use crate::device::null::NullGpu;
use crate::error::{Error, Result};
use crate::launch::gpu::program_bytes;

/// GB as manufacturers of memory and links count them.
const GB: f64 = 1e9;
const TFLOPS: f64 = 1e12;

/// One rank's device. Rates are per second and per rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    pub name: String,
    /// The properties that kernels depend on, for GPUs.
    pub gpu: Option<NullGpu>,
    /// Bytes available for the tensors of one rank.
    pub memory_bytes: u64,
    /// FLOP/s of GEMMs in the working dtype.
    pub flops: f64,
    /// FLOP/s of attention.
    pub attention_flops: f64,
    /// Bytes/s from memory.
    pub memory: f64,
    /// Bytes/s to ranks of the same node, one way.
    pub link: f64,
    /// Bytes/s to other nodes, one way, for each rank of a node.
    pub network: f64,
    /// Bytes/s to the host's memory, one way.
    pub host: f64,
    pub latency: Latency,
    pub ranks_per_node: usize,
    /// Threads of a rank.
    pub threads: usize,
    pub efficiency: Efficiency,
}

/// The latency of collectives. One with n steps takes at least `call_s + n step_s`, with `network_s` for each step that
/// goes to another node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latency {
    pub call_s: f64,
    pub step_s: f64,
    pub network_s: f64,
}

/// The latencies in NCCL's own tuning: a ring with the protocol LL128, within a node over NVLink (`baseLat` and `hwLat`
/// of src/graph/tuning.cc, NCCL 2.10).
const NCCL_LATENCY: Latency = Latency { call_s: 10e-6, step_s: 1.9e-6, network_s: 4e-6 };

/// The share of the peak that each kind of workload reaches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Efficiency {
    /// GEMMs of training, forward and backward.
    pub train: f64,
    /// GEMMs of forwards over packed rows, and of prefill.
    pub score: f64,
    /// Forwards of one token per sequence, without attention: for up to `NARROW_ROWS` sequences at a time, and for
    /// more.
    pub decode: f64,
    pub decode_wide: f64,
    /// Attention over packed rows, forward and backward.
    pub attention: f64,
    pub attention_backward: f64,
    /// Attention of one token per sequence over the cache.
    pub attention_decode: f64,
    /// The head's log-probabilities, without and with gradient.
    pub head: f64,
    pub head_train: f64,
    /// Sampling of tokens: passes over the logits.
    pub sample: f64,
    /// Passes of AdamW and of the norm over gradients, weights and state.
    pub optimizer: f64,
    /// Collectives, relative to the slowest link that they use.
    pub links: f64,
}

/// The most rows for which a GEMM of decoding has one tile of rows, and reads its weights once.
pub const NARROW_ROWS: f64 = 64.0;

impl Efficiency {
    /// The estimate for the exact kernels on an A100 or A800, from their tiles, their traffic and the blocks that run
    /// at a time. Not measured yet.
    const SM_80: Self = Self {
        train: 0.62,
        score: 0.62,
        decode: 0.62,
        decode_wide: 0.50,
        attention: 0.45,
        attention_backward: 0.35,
        attention_decode: 0.70,
        head: 0.65,
        head_train: 0.62,
        sample: 0.50,
        optimizer: 0.80,
        links: 0.70,
    };

    /// The measurements on an H200 (bench/runs/2026-11-26-h200). GEMMs of training: a step of the 1B model in 162 ms
    /// without its attention, head and optimizer, but with its norms. Decoding: the 7B model, 64 rows, 6.2 ms per
    /// token. More rows, sampling and links are estimated.
    const SM_90: Self = Self {
        train: 0.44,
        score: 0.44,
        decode: 0.45,
        decode_wide: 0.42,
        attention: 0.29,
        attention_backward: 0.24,
        attention_decode: 0.75,
        head: 0.50,
        head_train: 0.50,
        sample: 0.50,
        optimizer: 0.84,
        links: 0.70,
    };

    /// Shares of an ordinary core's peaks; `probe` measures those of this machine.
    pub fn declared_cpu() -> Self {
        Self {
            train: 0.7,
            score: 0.75,
            decode: 0.6,
            decode_wide: 0.6,
            attention: 0.5,
            attention_backward: 0.4,
            attention_decode: 0.4,
            head: 0.7,
            head_train: 0.6,
            sample: 0.3,
            optimizer: 0.7,
            links: 0.7,
        }
    }
}

/// A GPU as its manufacturer declares it: name; GB of memory; TFLOP/s; GB/s of memory, of NVLink (both ways together)
/// and of PCIe; and the properties that kernels depend on.
struct Declared(&'static str, f64, f64, f64, f64, f64, NullGpu);

/// Multiprocessors, and shared memory of a block: NVIDIA's white papers of both architectures.
const AMPERE: NullGpu = NullGpu { capability: (8, 0), multiprocessors: 108, shared_bytes: 163 << 10 };
const HOPPER: NullGpu = NullGpu { capability: (9, 0), multiprocessors: 132, shared_bytes: 227 << 10 };

/// Dense bf16 with f32 sums, SXM boards, 8 per node. Memory as `nvidia-smi` shows it.
///
/// - A30: NVIDIA A30 Tensor Core GPU datasheet (2022): 165 TFLOP/s, 24 GB at 933 GB/s, NVLink 200 GB/s, PCIe gen4 x16.
/// - A100: NVIDIA A100 Tensor Core GPU datasheet (2021): 312 TFLOP/s; 40 GB at 1,555 GB/s, 80 GB at 2,039 GB/s;
///   NVLink 600 GB/s; PCIe gen4 x16, 64 GB/s.
/// - A800: the A100 80 GB with NVLink of 400 GB/s (NVIDIA A800 Tensor Core GPU datasheet, 2022).
/// - H100: NVIDIA H100 Tensor Core GPU datasheet (2023): 989 TFLOP/s dense, 3.35 TB/s, NVLink 900 GB/s, PCIe gen5 x16,
///   128 GB/s. H800: the same with NVLink of 400 GB/s.
/// - H200: NVIDIA H200 Tensor Core GPU datasheet (2024): 141 GB at 4.8 TB/s, else as H100.
const GPUS: [Declared; 7] = [
    Declared("a30", 25.4, 165.0, 933.0, 200.0, 64.0, NullGpu { multiprocessors: 56, ..AMPERE }),
    Declared("a100-40g", 42.4, 312.0, 1555.0, 600.0, 64.0, AMPERE),
    Declared("a100-80g", 85.9, 312.0, 2039.0, 600.0, 64.0, AMPERE),
    Declared("a800-80g", 85.9, 312.0, 2039.0, 400.0, 64.0, AMPERE),
    Declared("h100", 85.5, 989.0, 3350.0, 900.0, 128.0, HOPPER),
    Declared("h800", 85.5, 989.0, 3350.0, 400.0, 128.0, HOPPER),
    Declared("h200", 150.8, 989.0, 4800.0, 900.0, 128.0, HOPPER),
];

/// The default share of the node's network per GPU: 200 Gbit/s.
const NETWORK_GB_S: f64 = 25.0;

/// The part of a GPU's memory that the driver reserves.
const DRIVER_SHARE: f64 = 0.01;

impl Device {
    /// A GPU of the table; `network_gb_s` is each GPU's share of its node's network, one way.
    ///
    /// # Errors
    /// `Usage` for an unknown name.
    pub fn gpu(name: &str, network_gb_s: f64) -> Result<Self> {
        let known = GPUS.iter().find(|gpu| gpu.0 == name.to_lowercase());
        let Some(&Declared(name, memory_gb, tflops, memory_gb_s, nvlink_gb_s, pcie_gb_s, kernels)) = known else {
            let known = GPUS.map(|gpu| gpu.0).join(", ");
            return Err(Error::usage(format!("unknown GPU type `{name}`")).hint(format!("use one of cpu, {known}")));
        };
        Ok(Self {
            name: name.to_string(),
            gpu: Some(kernels),
            memory_bytes: (memory_gb * GB * (1.0 - DRIVER_SHARE)) as u64,
            flops: tflops * TFLOPS,
            attention_flops: tflops * TFLOPS,
            memory: memory_gb_s * GB,
            link: nvlink_gb_s / 2.0 * GB,
            network: network_gb_s * GB,
            host: pcie_gb_s / 2.0 * GB,
            latency: NCCL_LATENCY,
            ranks_per_node: 8,
            threads: 1,
            efficiency: if kernels.capability.0 >= 9 { Efficiency::SM_90 } else { Efficiency::SM_80 },
        })
    }

    /// An existing GPU, by the name that its driver reports, with the manufacturer's peaks if the table has them.
    pub fn declared(name: &str, memory_bytes: u64) -> Option<Self> {
        let (lower, memory_gb) = (name.to_lowercase(), memory_bytes as f64 / GB);
        let is = |gpu: &&Declared| {
            let model = gpu.0.split('-').next().unwrap_or(gpu.0);
            lower.contains(model) && memory_gb <= gpu.1
        };
        GPUS.iter().find(is).and_then(|gpu| Self::gpu(gpu.0, NETWORK_GB_S).ok())
    }

    /// The same, with `memory_bytes` for the tensors of each rank; with the peaks of an A100 if the table has none.
    pub fn gpu_of(name: &str, memory_bytes: u64, ranks_per_node: usize, ranks: usize) -> Self {
        let usual = || Self::gpu("a100-80g", NETWORK_GB_S).expect("it is of the table");
        let known = Self::declared(name, memory_bytes).unwrap_or_else(usual);
        let memory_bytes = memory_bytes + program_bytes(ranks) as u64;
        Self { name: name.to_string(), memory_bytes, ranks_per_node: ranks_per_node.max(1), ..known }
    }

    /// A CPU rank with declared round numbers, for choices that must be the same in every start of a job. `probe`
    /// measures the numbers of this machine.
    pub fn cpu(memory_bytes: u64, ranks_per_node: usize) -> Self {
        Self {
            name: "cpu".into(),
            gpu: None,
            memory_bytes,
            flops: 1e11,
            attention_flops: 1e11,
            memory: 1e10,
            link: 2e9,
            network: 1e9,
            host: 1e9,
            latency: Latency { call_s: 0.0, step_s: 5e-5, network_s: 5e-5 },
            ranks_per_node: ranks_per_node.max(1),
            threads: 1,
            efficiency: Efficiency::declared_cpu(),
        }
    }

    pub fn is_cpu(&self) -> bool {
        self.gpu.is_none()
    }
}
