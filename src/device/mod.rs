//! Where arithmetic happens. An operation matches on `Device` once, in its file under `ops/`.

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
    /// Whether a step that was captured can be launched again as one graph.
    pub fn has_graphs(self) -> bool {
        self == Self::Cuda
    }

    /// Whether what a phase does not need is freed for the next: a GPU holds the KV cache where gradients were.
    pub fn frees_between_phases(self) -> bool {
        self == Self::Cuda
    }
}

/// What this process computes on, in words: `cpu (avx512, bf16)`.
pub fn describe() -> String {
    let level = simd::level();
    let isa = format!("{:?}", level.isa()).to_lowercase();
    format!("cpu ({isa}{})", if level.bf16_dot() { ", bf16" } else { "" })
}
