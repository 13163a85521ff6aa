//! NVIDIA GPUs: one per process, its memory, and one file per operation, which starts the kernels of `cuda/<operation>.cu`.
//!
//! Nothing of CUDA is linked: the driver is opened when a GPU is asked for. Tests run the same kernels, through the same
//! calls, on a GPU that is played on the CPU (`emulated`).

mod emulated;
pub mod gpu;
pub mod memory;
pub mod residual;

pub use gpu::{Arg, Gpu, gpu};
pub use memory::{Memory, View, ViewMut};
