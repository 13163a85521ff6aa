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
    /// What is measured of the peaks and of the shares that kernels reach, and what is assumed. Empty if all is measured
    /// here.
    pub rates: &'static str,
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

    /// An assumption for Blackwell: the kernels use mma.sync there, of which no peak is declared, about as fast as on Hopper.
    const SM_100: Self = Self {
        train: 0.20,
        score: 0.20,
        attention: 0.13,
        attention_backward: 0.11,
        head: 0.22,
        head_train: 0.22,
        ..Self::SM_90
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
/// and of PCIe; the properties that kernels depend on; and what is assumed.
struct Declared(&'static str, f64, f64, f64, f64, f64, NullGpu, &'static str);

/// Multiprocessors, and shared memory of a block: NVIDIA's white papers of the architectures, and the table of compute
/// capabilities in the CUDA C++ Programming Guide.
const AMPERE: NullGpu = NullGpu { capability: (8, 0), multiprocessors: 108, shared_bytes: 163 << 10 };
const GA102: NullGpu = NullGpu { capability: (8, 6), multiprocessors: 82, shared_bytes: 99 << 10 };
const ADA: NullGpu = NullGpu { capability: (8, 9), multiprocessors: 128, shared_bytes: 99 << 10 };
const HOPPER: NullGpu = NullGpu { capability: (9, 0), multiprocessors: 132, shared_bytes: 227 << 10 };
const BLACKWELL: NullGpu = NullGpu { capability: (10, 0), multiprocessors: 148, shared_bytes: 227 << 10 };

const MEASURED: &str = "peaks declared; the shares of them that kernels reach were measured on an H200";
const OF_H200: &str = "peaks declared; the shares of them that kernels reach are assumed, as measured on an H200";
const OF_TILES: &str =
    "peaks declared; the shares of them that kernels reach are assumed, from the kernels' tiles and traffic";
const ALL_ASSUMED: &str =
    "peaks assumed, not compared with a data sheet; the shares of them are assumed, as measured on an H200";
const ALL_OF_TILES: &str = "peaks assumed, not compared with a data sheet; the shares of them are assumed, from the kernels' tiles and traffic";
const UNTUNED: &str = "peaks assumed, not compared with a data sheet; the shares of them are assumed: no kernel is tuned for this architecture";

/// Dense bf16 with f32 sums, 8 per node. Memory as `nvidia-smi` shows it. GPUs without NVLink exchange data over PCIe. Rows
/// with assumed peaks have the figures that public lists attribute to these documents, which were not compared.
///
/// - A30: NVIDIA A30 Tensor Core GPU datasheet (2022): 165 TFLOP/s, 24 GB at 933 GB/s, NVLink 200 GB/s, PCIe gen4 x16.
/// - A100: NVIDIA A100 Tensor Core GPU datasheet (2021): 312 TFLOP/s; 40 GB at 1,555 GB/s, 80 GB at 2,039 GB/s;
///   NVLink 600 GB/s; PCIe gen4 x16, 64 GB/s.
/// - A800: the A100 80 GB with NVLink of 400 GB/s (NVIDIA A800 Tensor Core GPU datasheet, 2022).
/// - H100: NVIDIA H100 Tensor Core GPU datasheet (2023): 989 TFLOP/s dense, 3.35 TB/s, NVLink 900 GB/s, PCIe gen5 x16,
///   128 GB/s; H100 NVL: 835 TFLOP/s dense, 94 GB at 3.9 TB/s, NVLink 600 GB/s. H800: H100 with NVLink of 400 GB/s.
/// - H200: NVIDIA H200 Tensor Core GPU datasheet (2024): 141 GB at 4.8 TB/s, else as H100.
/// - H20: no data sheet of NVIDIA; resellers list 148 TFLOP/s, 96 GB at 4.0 TB/s, 78 multiprocessors, NVLink 900 GB/s.
/// - GH200: NVIDIA GH200 Grace Hopper Superchip datasheet (2023): 990 TFLOP/s dense, 96 GB at 4 TB/s, NVLink 900 GB/s,
///   and NVLink-C2C of 900 GB/s to the host's memory.
/// - B200: NVIDIA HGX B200 in the Blackwell datasheet (2025): 4.5 PFLOP/s with sparsity, 180 GB at 7.7 TB/s, NVLink
///   1.8 TB/s, PCIe gen5.
/// - L40S: NVIDIA L40S datasheet (2023): 362.05 TFLOP/s, 48 GB at 864 GB/s, PCIe gen4 x16.
/// - RTX 3090: NVIDIA Ampere GA102 GPU Architecture white paper (2020): 71 TFLOP/s with f32 sums, 936 GB/s.
/// - RTX 4090 and L4: NVIDIA Ada GPU Architecture white paper (V2.01, 2023): 165.2 and 121 TFLOP/s, 1,008 and 300 GB/s.
/// - RTX A5000: NVIDIA RTX A5000 datasheet (2021): 222.2 TFLOP/s with sparsity, 768 GB/s, PCIe gen4 x16.
/// - A10: NVIDIA A10 Tensor Core GPU datasheet (2021): 125 TFLOP/s, 600 GB/s, PCIe gen4 x16.
const GPUS: [Declared; 17] = [
    Declared("a30", 25.4, 165.0, 933.0, 200.0, 64.0, NullGpu { multiprocessors: 56, ..AMPERE }, OF_TILES),
    Declared("a100-40g", 42.4, 312.0, 1555.0, 600.0, 64.0, AMPERE, OF_TILES),
    Declared("a100-80g", 85.9, 312.0, 2039.0, 600.0, 64.0, AMPERE, OF_TILES),
    Declared("a800-80g", 85.9, 312.0, 2039.0, 400.0, 64.0, AMPERE, OF_TILES),
    Declared("h100-nvl", 100.5, 835.0, 3900.0, 600.0, 128.0, HOPPER, ALL_ASSUMED),
    Declared("h100", 85.5, 989.0, 3350.0, 900.0, 128.0, HOPPER, OF_H200),
    Declared("h800", 85.5, 989.0, 3350.0, 400.0, 128.0, HOPPER, OF_H200),
    Declared("h200", 150.8, 989.0, 4800.0, 900.0, 128.0, HOPPER, MEASURED),
    Declared("h20", 102.6, 148.0, 4000.0, 900.0, 128.0, NullGpu { multiprocessors: 78, ..HOPPER }, ALL_ASSUMED),
    Declared("gh200", 102.6, 990.0, 4000.0, 900.0, 900.0, HOPPER, ALL_ASSUMED),
    Declared("b200", 192.3, 2250.0, 7700.0, 1800.0, 128.0, BLACKWELL, UNTUNED),
    Declared("l40s", 48.3, 362.0, 864.0, 64.0, 64.0, NullGpu { multiprocessors: 142, ..ADA }, ALL_OF_TILES),
    Declared("rtx-3090", 25.8, 71.0, 936.0, 64.0, 64.0, GA102, ALL_OF_TILES),
    Declared("rtx-4090", 25.8, 165.2, 1008.0, 64.0, 64.0, ADA, ALL_OF_TILES),
    Declared("a5000", 25.8, 111.1, 768.0, 64.0, 64.0, NullGpu { multiprocessors: 64, ..GA102 }, ALL_OF_TILES),
    Declared("a10", 24.2, 125.0, 600.0, 64.0, 64.0, NullGpu { multiprocessors: 72, ..GA102 }, ALL_OF_TILES),
    Declared("l4", 24.2, 121.0, 300.0, 64.0, 64.0, NullGpu { multiprocessors: 58, ..ADA }, ALL_OF_TILES),
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
        let Some(&Declared(name, memory_gb, tflops, memory_gb_s, nvlink_gb_s, pcie_gb_s, kernels, rates)) = known
        else {
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
            efficiency: match kernels.capability.0 {
                ..9 => Efficiency::SM_80,
                9 => Efficiency::SM_90,
                10.. => Efficiency::SM_100,
            },
            rates,
        })
    }

    /// An existing GPU, by the name that its driver reports, with the manufacturer's peaks if the table has them.
    pub fn declared(name: &str, memory_bytes: u64) -> Option<Self> {
        let (lower, memory_gb) = (name.to_lowercase(), memory_bytes as f64 / GB);
        let words: Vec<&str> = lower.split([' ', '-']).collect();
        let is_size = |word: &str| word.strip_suffix('g').is_some_and(|size| size.parse::<u32>().is_ok());
        let is = |gpu: &&Declared| {
            let mut model = gpu.0.split('-').filter(|word| !is_size(word));
            model.all(|word| words.contains(&word)) && memory_gb <= gpu.1
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
            rates: "",
        }
    }

    pub fn is_cpu(&self) -> bool {
        self.gpu.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_found_by_the_name_of_its_driver() {
        let cases = [
            ("NVIDIA A800-SXM4-80GB", 85.1, "a800-80g"),
            ("NVIDIA A100-SXM4-40GB", 42.2, "a100-40g"),
            ("NVIDIA A100 80GB PCIe", 85.1, "a100-80g"),
            ("NVIDIA H100 80GB HBM3", 85.0, "h100"),
            ("NVIDIA H100 NVL", 100.4, "h100-nvl"),
            ("NVIDIA H200", 150.1, "h200"),
            ("NVIDIA H20", 102.0, "h20"),
            ("NVIDIA GH200 480GB", 102.0, "gh200"),
            ("NVIDIA L40S", 47.8, "l40s"),
            ("NVIDIA L4", 23.6, "l4"),
            ("NVIDIA A10", 23.7, "a10"),
            ("NVIDIA RTX A5000", 25.4, "a5000"),
            ("NVIDIA GeForce RTX 4090", 25.4, "rtx-4090"),
            ("Tesla V100-SXM2-32GB", 34.0, "none"),
        ];
        for (name, memory_gb, found) in cases {
            let device = Device::declared(name, (memory_gb * GB) as u64);
            assert_eq!(device.map_or("none".into(), |device| device.name), found, "{name}");
        }
    }
}
