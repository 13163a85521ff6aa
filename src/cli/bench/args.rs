//! The command line of `bench`.

use crate::tensor::DType;
use argh::{ArgsInfo, FromArgs};
use std::path::PathBuf;

/// Measure speed and compare it with the machine's peaks (multiply-add and memory reads). Results are medians; the
/// peaks are measured between the repeats.
///
/// Suites: kernels (GEMM, attention, head, norms, AdamW), rollout (sampling), train (one optimizer step), ppo (one step
/// with actor, critic and reference), logprobs (a large vocabulary), or all of these. Under mpirun: collectives.
/// With a GPU: cuda (the kernels, compared with a large copy and a large GEMM).
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "bench")]
pub struct Args {
    /// kernels, rollout, train, ppo, logprobs, all, collectives or cuda
    #[argh(positional)]
    pub suite: String,

    /// a Hugging Face model directory, or tiny or small: a Llama with random weights (default: tiny, then small)
    #[argh(option)]
    pub model: Option<PathBuf>,

    /// dtype of the weights: f32 or bf16 (default: f32)
    #[argh(option, default = "DType::F32")]
    pub dtype: DType,

    /// number of threads (default: the cores of this process)
    #[argh(option)]
    pub threads: Option<usize>,

    /// measured repeats of each workload, after one warm-up (default: 5)
    #[argh(option, default = "5")]
    pub repeats: usize,

    /// suite cuda: run only this part (attention, streaming, head, decode, train or products); may be repeated
    #[argh(option)]
    pub part: Vec<String>,

    /// suite cuda: small sizes, which test that everything runs but do not measure speed
    #[argh(switch)]
    pub small: bool,

    /// suite cuda: file for the results, one JSON object per line
    #[argh(option)]
    pub record: Option<PathBuf>,

    /// print one JSON object per result instead of the table
    #[argh(switch)]
    pub json: bool,

    /// measure the CPU time of one thread, which other programs disturb less (needs --threads 1)
    #[argh(switch)]
    pub processor_time: bool,
}
