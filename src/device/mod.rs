//! Where arithmetic happens. An operation matches on `Device` once, in its file under `ops/`.

pub mod cpu;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    #[default]
    Cpu,
}
