//! NVIDIA GPUs: one per process, its memory, and one file per operation, which starts the kernels of
//! `cuda/<operation>.cu`.
//!
//! Nothing of CUDA is linked: the driver is opened when a GPU is asked for. Tests run the same kernels, through the
//! same calls, on an emulated GPU: a driver for the CPU that `RLHF_CUDA_LIB` names (`tests/kernels/emulation`).

pub mod adamw;
pub mod attention;
pub mod attention_backward;
pub mod cache;
mod capture;
mod column_sums;
pub mod conv;
pub mod copy;
pub mod cublaslt;
pub mod decode;
pub mod delta;
pub mod devices;
pub mod embedded;
pub mod embedding;
pub mod experts;
pub mod fast;
pub mod glu;
pub mod gpu;
pub mod graph;
pub mod grouped;
pub mod kernels;
pub mod key_segments;
mod key_tiles;
pub mod kv_cache;
mod launch;
pub mod library;
pub mod linear_divergence;
pub mod linear_logprob;
pub mod linear_logprob_fused;
pub mod matmul;
pub mod memory;
pub mod nf4;
pub mod norm;
mod null_driver;
pub mod nvrtc;
pub mod onload;
pub mod paged_attention;
pub mod pool;
pub mod rank_sum;
pub mod readback;
pub mod rmsnorm;
pub mod rope;
pub mod row_gate;
pub mod sample;
pub mod scatter_lists;
mod shape;
pub mod softcap;
mod staging;
pub mod states;
mod streams;
mod sys;
pub mod traced;
mod transfer;
pub mod value_head;
mod waits;
pub mod work;

pub use gpu::{Arg, Gpu, Stream, gpu, standing_still};
pub use memory::{Memory, View, ViewMut, owned_by, owner};
pub use onload::HostCopy;
pub use scatter_lists::ScatterLists;
pub use sys::Handle;
pub use work::Work;
