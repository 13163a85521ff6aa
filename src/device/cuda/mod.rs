//! NVIDIA GPUs: one per process, its memory, and one file per operation, which starts the kernels of `cuda/<operation>.cu`.
//!
//! Nothing of CUDA is linked: the driver is opened when a GPU is asked for. Tests run the same kernels, through the same
//! calls, on an emulated GPU: a driver for the CPU that `RLHF_CUDA_LIB` names (`tests/kernels/emulation`).

pub mod adamw;
mod arg;
pub mod attention;
pub mod attention_backward;
pub mod cache;
mod capture;
pub mod carried;
pub mod copy;
pub mod cublaslt;
pub mod decode;
pub mod devices;
mod driver;
pub mod embedding;
pub mod fast;
mod fx;
pub mod gpu;
pub mod graph;
mod kernels;
pub mod kv_cache;
pub mod late;
mod leaving;
pub mod library;
pub mod linear_logprob;
pub mod linear_logprob_fused;
pub mod links;
pub mod matmul;
pub mod memory;
pub mod module;
pub mod norm;
pub mod nvrtc;
pub mod paged_attention;
mod parts;
pub mod places;
pub mod pool;
pub mod rank_sum;
pub mod residual;
pub mod resources;
pub mod rmsnorm;
pub mod rope;
pub mod row_lists;
pub mod runs;
pub mod sample;
pub mod scan;
mod shape;
mod staging;
mod status;
pub mod swiglu;
mod sys;
mod timed;
pub mod token_loss;
pub mod value_head;
pub mod visit;
mod waits;
pub mod work;

pub use gpu::{Arg, Gpu, Stream, gpu};
pub use graph::{Graph, Pinned};
pub use memory::{Memory, View, ViewMut, owned_by};
pub use row_lists::RowLists;
pub use staging::STAGING_BYTES;
pub use visit::{Guest, Home, Leaving};
pub use waits::{Copied, Waits, standing_still};
pub use work::Work;
