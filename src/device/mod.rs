//! Where arithmetic happens. An operation matches on `Device` once, in its file under `ops/`.

pub mod cpu;
pub mod simd;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    #[default]
    Cpu,
}
