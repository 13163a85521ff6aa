//! The devices that compute. An operation matches on `Device` once, in its file under `ops/`.

pub mod cpu;
pub mod cuda;
pub mod null;
pub mod simd;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    #[default]
    Cpu,
    /// The GPU of this process.
    Cuda,
}

impl Device {
    /// Whether a captured step can be replayed as one graph.
    pub fn has_graphs(self) -> bool {
        self == Self::Cuda
    }

    /// Whether a phase frees the memory that the next one needs: a GPU holds the KV cache in the memory of the
    /// gradients.
    pub fn frees_between_phases(self) -> bool {
        self == Self::Cuda
    }
}

/// A description of this process's CPU and instruction set: `cpu (avx512, bf16)`.
pub fn describe() -> String {
    let level = simd::level();
    let isa = format!("{:?}", level.isa()).to_lowercase();
    format!("cpu ({isa}{})", if level.bf16_dot() { ", bf16" } else { "" })
}
