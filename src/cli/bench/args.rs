//! The command line of `bench`.

use crate::tensor::DType;
use argh::FromArgs;
use std::path::PathBuf;

/// Measure speed and compare it with the peaks of the machine (multiply-add, reading memory): medians, with the peaks
/// measured between the repeats of the same run.
///
/// Suites: kernels (products, attention, head, norms, AdamW), rollout (sampling), train (one update), ppo (one step with
/// actor, critic and reference), logprobs (a large vocabulary), all of these; and under mpirun collectives (ours and
/// MPI's own); and on a machine with a GPU cuda (its kernels, compared with a large copy and a large product).
#[derive(FromArgs, Debug)]
#[argh(subcommand, name = "bench")]
pub struct Args {
    /// kernels, rollout, train, ppo, logprobs, all; collectives; or cuda
    #[argh(positional)]
    pub suite: String,

    /// hugging Face model directory, or tiny or small: a Llama with random weights (default: tiny, then small)
    #[argh(option)]
    pub model: Option<PathBuf>,

    /// f32 or bf16: what the weights are held in (default: f32)
    #[argh(option, default = "DType::F32")]
    pub dtype: DType,

    /// threads (default: the cores of this process)
    #[argh(option)]
    pub threads: Option<usize>,

    /// measured repeats of each work, after one that warms up (default: 5)
    #[argh(option, default = "5")]
    pub repeats: usize,

    /// of the suite cuda only this part, as often as wanted: attention, streaming, head, decode, train, products
    #[argh(option)]
    pub part: Vec<String>,

    /// of the suite cuda: sizes that show that all of it runs, not how fast
    #[argh(switch)]
    pub small: bool,

    /// of the suite cuda: a file for the results, a JSON object a line
    #[argh(option)]
    pub record: Option<PathBuf>,

    /// a JSON object per result instead of the table
    #[argh(switch)]
    pub json: bool,

    /// measure the processor time of one thread, which other programs disturb less (needs --threads 1)
    #[argh(switch)]
    pub processor_time: bool,
}
