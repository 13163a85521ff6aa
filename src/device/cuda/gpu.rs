//! The GPU of this process: memory, copies, and kernels in the order of one stream.

use super::emulated::Emulated;
use crate::error::Result;
use std::path::Path;
use std::sync::OnceLock;

/// A device and how it is reached.
#[derive(Debug)]
pub struct Gpu {
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Emulated(Emulated),
}

/// An argument of a kernel, as its parameter list has it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    Address(u64),
    I32(i32),
    U32(u32),
    U64(u64),
    F32(f32),
}

static GPU: OnceLock<Gpu> = OnceLock::new();

/// The GPU that this process computes on.
///
/// # Panics
/// If none was started.
pub fn gpu() -> &'static Gpu {
    GPU.get().expect("a GPU was started before anything was put on it")
}

/// Whether this process has a GPU.
pub fn is_started() -> bool {
    GPU.get().is_some()
}

/// Makes `gpu` the one of this process. The first one stays.
pub fn start(gpu: Gpu) -> &'static Gpu {
    GPU.get_or_init(|| gpu)
}

impl Gpu {
    /// A GPU played on the CPU by the kernels of a shared library (`tests/kernels/emulation`).
    ///
    /// # Errors
    /// `Io` where the library cannot be opened.
    pub fn emulated(library: &Path) -> Result<Self> {
        Ok(Self { backend: Backend::Emulated(Emulated::open(library)?) })
    }

    /// The address of `bytes` of memory, aligned to 256. Contents unspecified.
    ///
    /// # Errors
    /// `Memory` where there is not as much.
    pub(super) fn allocate(&self, bytes: usize) -> Result<u64> {
        match &self.backend {
            Backend::Emulated(emulated) => emulated.allocate(bytes),
        }
    }

    pub(super) fn free(&self, address: u64, bytes: usize) {
        match &self.backend {
            Backend::Emulated(emulated) => emulated.free(address, bytes),
        }
    }

    /// Copies to the device, behind what was started before. `from` may change when this returns.
    pub(super) fn upload(&self, to: u64, from: &[u8]) {
        match &self.backend {
            Backend::Emulated(emulated) => emulated.upload(to, from),
        }
    }

    /// Copies from the device when all that was started before has ended.
    pub(super) fn download(&self, to: &mut [u8], from: u64) {
        match &self.backend {
            Backend::Emulated(emulated) => emulated.download(to, from),
        }
    }

    /// Copies within the device, behind what was started before.
    pub(super) fn copy(&self, to: u64, from: u64, bytes: usize) {
        match &self.backend {
            Backend::Emulated(emulated) => emulated.copy(to, from, bytes),
        }
    }

    /// Sets `bytes` to 0, behind what was started before.
    pub(super) fn clear(&self, at: u64, bytes: usize) {
        match &self.backend {
            Backend::Emulated(emulated) => emulated.clear(at, bytes),
        }
    }

    /// Starts a kernel behind what was started before. Blocks are of `block` threads in x. A grid without blocks starts
    /// nothing.
    ///
    /// # Panics
    /// If there is no such kernel, or it fails: the message names it, its grid and its arguments.
    pub fn launch(&self, kernel: &'static str, grid: [usize; 3], block: usize, shared_bytes: usize, args: &[Arg]) {
        if grid.contains(&0) {
            return;
        }
        let [x, y, z] = grid;
        let started = match &self.backend {
            Backend::Emulated(emulated) => emulated.launch(kernel, grid.map(to_u32), to_u32(block), shared_bytes, args),
        };
        if let Err(why) = started {
            panic!("kernel {kernel}, grid {x} x {y} x {z} of {block} threads, {args:?}: {why}");
        }
    }

    /// Waits until all that was started has ended.
    pub fn wait(&self) {
        match &self.backend {
            Backend::Emulated(_) => {}
        }
    }

    /// Runs the fibers of the played GPU in another order (0 to 4); no effect on a real one.
    pub fn set_order(&self, order: i32) {
        match &self.backend {
            Backend::Emulated(emulated) => emulated.set_order(order),
        }
    }
}

fn to_u32(n: usize) -> u32 {
    u32::try_from(n).expect("grids and blocks are counted in 32 bits")
}

macro_rules! from_number {
    ($($number:ty => $variant:ident),*) => {
        $(impl From<$number> for Arg {
            fn from(x: $number) -> Self {
                Self::$variant(x)
            }
        })*
    };
}

from_number!(i32 => I32, u32 => U32, u64 => U64, f32 => F32);

impl From<usize> for Arg {
    /// Lengths go to kernels as u64; dims that kernels take as int are `i32`.
    fn from(x: usize) -> Self {
        Self::U64(x as u64)
    }
}
