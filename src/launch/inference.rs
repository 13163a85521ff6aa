//! A model that is not trained, for the verbs `generate`, `logprobs` and `reward`. Each rank has a full copy. Device,
//! errors and self-test are those of the actor in a job with the same settings. GEMMs are exact, so a log-probability
//! is bit-identical in every batch and to the one that sampling recorded.

use super::{gpu, pixels};
use crate::comm::World;
use crate::config::Config;
use crate::config::job::DeviceName;
use crate::config::mesh::RoleName;
use crate::config::rollout::RolloutConfig;
use crate::device::cuda::{self, owned_by};
use crate::device::{self, Device};
use crate::error::{Result, format_bytes};
use crate::model::{Arch, Head, Transformer, Weights, load};
use crate::rollout::{Request, forward_bytes};
use crate::sys::memory;

pub struct InferenceModel {
    pub transformer: Transformer,
    pub weights: Weights,
    /// The device, the reason for it, and the result of the self-test.
    pub description: String,
    local_size: usize,
}

impl InferenceModel {
    /// Loads the model of `model.actor`, on it the adapter of `model.adapter`, with the head `head` in `model.dtype`, after
    /// the self-test of `job.check`. It uses a GPU if `job.device` is `gpu`, or `auto` and there is one. All ranks call
    /// this; only loading may fail on some of them.
    pub fn open(mut config: Config, head: Head, world: &World) -> Result<Self> {
        let arch = Arch::load(&config.model.actor)?;
        if config.job.device == DeviceName::Gpu {
            // Wrong settings are reported before missing devices.
            gpu::check(&config).and_then(|()| gpu::check_arch(Device::Cuda, &arch, 1))?;
        }
        let opened = gpu::open(&mut config, world, &|_| Ok(vec![(RoleName::Actor, head, arch.clone())]))?;
        let device = if opened.gpu.is_some() { Device::Cuda } else { Device::Cpu };
        let dtype = config.model.dtype();
        let description = match device {
            Device::Cuda => {
                let (gpu, kernels) = (cuda::gpu().properties(), opened.describe_kernels());
                format!("{} at {} in {}, {kernels}", gpu.name, gpu.pci, dtype.name())
            }
            Device::Cpu => {
                let no_gpu = opened.no_gpu.map_or(String::new(), |why| format!(", no GPU: {why}"));
                format!("{} in {}{no_gpu}", device::describe(), dtype.name())
            }
        };
        if device == Device::Cuda {
            gpu::limit(&config, world);
        }
        let (dir, seed) = (&config.model.actor, config.job.seed);
        let adapter = Some(&*config.model.adapter).filter(|dir| !dir.as_os_str().is_empty());
        let (arch, weights) = owned_by("weights", || load::load_with(device, dir, adapter, head, dtype, seed))?;
        let mut transformer = Transformer::new(&arch, &weights.table);
        if let Some(pixels) = pixels::of_model(dir) {
            transformer.read_images_with(pixels);
        }
        Ok(Self { transformer, weights, description, local_size: world.local_size.max(1) })
    }

    /// Bytes that the KV cache may take for `requests` of `beams` sequences each. On a GPU this is the memory that
    /// forwards leave free, on a CPU half of this rank's share of the free memory.
    pub fn cache_bytes(&self, config: &RolloutConfig, requests: &[Request], beams: usize) -> u64 {
        if self.weights.device() == Device::Cuda {
            let are_edited = requests.iter().any(Request::edits_logits);
            gpu::cache_bytes(forward_bytes(&self.transformer.arch, 1, config, beams * requests.len(), are_edited))
        } else {
            memory::available_bytes() / self.local_size as u64 / 2
        }
    }

    /// The peak of GPU memory, as the end of a message; empty on a CPU.
    pub fn describe_memory(&self) -> String {
        if self.weights.device() == Device::Cpu {
            return String::new();
        }
        format!(", up to {} of GPU memory", format_bytes(cuda::gpu().usage().peak as u64))
    }
}
