//! A model that only answers: what the verbs `generate`, `logprobs` and `reward` ask. Each rank has all of it.
//!
//! It is put where a job of the same settings would put its actor, with the same reasons and errors, and a GPU is compared with
//! the CPU before it answers. Products are exact, so that a
//! log-probability has the same bits whatever it was computed beside, and those that were recorded with a draw.

use super::gpu;
use crate::comm::World;
use crate::config::Config;
use crate::config::job::DeviceName;
use crate::config::rollout::RolloutConfig;
use crate::device::cuda::{self, owned_by};
use crate::device::{self, Device};
use crate::error::{Result, size_words};
use crate::model::{Arch, Head, Transformer, Weights, load};
use crate::plan;
use crate::rollout::Request;
use crate::sys::memory;

/// The model and where it is.
pub struct InferenceModel {
    pub transformer: Transformer,
    pub weights: Weights,
    /// What it is on, and why, and what was compared before.
    pub words: String,
    /// Ranks of this host.
    local_size: usize,
}

impl InferenceModel {
    /// Loads the model of `model.actor` with the head `head`: on a GPU where `job.device` says so or may choose one, in
    /// `model.dtype`, behind the comparison of `job.check`. All ranks call this; only loading may fail on some of them alone.
    ///
    /// # Errors
    /// `Data` for a directory that cannot be used; `Usage` where a GPU is asked for and there is none, or none that knows this
    /// model's shapes; `Fault` where it computes other things than the CPU.
    pub fn open(mut config: Config, head: Head, world: &World) -> Result<Self> {
        let arch = Arch::load(&config.model.actor)?;
        if config.job.device == DeviceName::Gpu {
            // What is asked for wrongly is said before what this machine lacks.
            let mut asked = config.clone();
            asked.settle_on(DeviceName::Gpu);
            gpu::check(&asked).and_then(|()| gpu::check_arch(&arch, 1))?;
        }
        let opened = gpu::open(&mut config, world, &|_| Ok(vec![(arch.clone(), head)]))?;
        let device = if opened.gpu.is_some() { Device::Cuda } else { Device::Cpu };
        let dtype = config.model.dtype();
        let words = match device {
            Device::Cuda => {
                let checked = opened.checked.map(|test| test.words);
                let checked = checked.unwrap_or_else(|| "kernels as they are (job.check = false)".into());
                format!("{} in {}, {checked}", gpu::name(), dtype.name())
            }
            Device::Cpu => {
                let no_gpu = opened.no_gpu.map_or(String::new(), |why| format!(", no GPU: {why}"));
                format!("{} in {}{no_gpu}", device::describe(), dtype.name())
            }
        };
        if device == Device::Cuda {
            gpu::limit(&config, None);
        }
        let (dir, seed) = (&config.model.actor, config.job.seed);
        let (arch, weights) = owned_by("weights", || load::load(device, dir, head, dtype, seed))?;
        let transformer = Transformer::new(&arch, &weights.table);
        Ok(Self { transformer, weights, words, local_size: world.local_size.max(1) })
    }

    fn is_on_gpu(&self) -> bool {
        self.weights.device() == Device::Cuda
    }

    /// Bytes that the cache of an engine may take that answers `requests`: on a GPU what its forwards leave, on a CPU half of its
    /// share of what is free.
    pub fn cache_bytes(&self, config: &RolloutConfig, requests: &[Request]) -> u64 {
        if self.is_on_gpu() {
            gpu::cache_bytes_beside(plan::engine_bytes(&self.transformer.arch, config, requests.len()))
        } else {
            memory::available_bytes() / self.local_size as u64 / 2
        }
    }

    /// What it took of a GPU so far, in words that follow others; nothing of a CPU.
    pub fn memory_words(&self) -> String {
        if !self.is_on_gpu() {
            return String::new();
        }
        format!(", {} of the GPU at most", size_words(cuda::gpu().usage().peak as u64))
    }
}
