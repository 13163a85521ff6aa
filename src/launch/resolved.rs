//! `config.resolved.toml`: the job with all chosen values, a complete record of the configuration that ran.

use super::run::Run;
use crate::config::Config;
use crate::config::job::Collectives;
use crate::config::mesh::Auto;
use crate::config::method::ppo::OldLogprobs;
use crate::device::Device;
use crate::device::cpu::pool::pool;
use crate::error::Result;
use crate::sys::files::write_atomic;

impl Run {
    /// Writes the file for a run of `steps` steps, but not in a dry run. All ranks call this.
    pub fn write_resolved(&self, steps: u64) -> Result<()> {
        let is_writer = self.ranks.all.rank() == 0 && !self.dry_run;
        let head = self.config.bases().map_or_else(String::new, |files| format!("# {files}\n"));
        let text = || head + &self.resolved(steps).to_toml();
        let write = || write_atomic(&self.dir.join("config.resolved.toml"), text().as_bytes());
        self.ranks.all.agree(if is_writer { write() } else { Ok(()) })
    }

    /// The job with values for "auto", and for defaults that refer to another key.
    fn resolved(&self, steps: u64) -> Config {
        let (mut config, layout) = (self.config.clone(), *self.ranks.layout());
        (config.job.steps, config.job.threads) = (steps, pool().threads());
        if let Ok(here) = std::env::current_dir() {
            config.make_absolute(&here);
        }
        if self.device == Device::Cpu {
            config.job.collectives = Collectives::Mpi;
        }
        config.model.reference = config.model.reference_dir().to_path_buf();
        config.model.critic = config.critic_dir().to_path_buf();
        config.ppo.aggregation = config.ppo.aggregation_in_force();
        let is_recomputed = self.recomputes_old_logprobs();
        config.ppo.old_logprobs = if is_recomputed { OldLogprobs::Recompute } else { OldLogprobs::Rollout };
        let mesh = &mut config.mesh;
        (mesh.pipeline, mesh.sequence) = (Auto::Is(layout.mesh.pipeline), Auto::Is(layout.mesh.sequence));
        (mesh.tensor, mesh.zero) = (Auto::Is(layout.mesh.tensor), Auto::Is(layout.zero));
        config.rollout.tensor = Auto::Is(self.ranks.layouts_of_actor()[1].rollout_tensor);
        // Parts of a placement may have data axes of different sizes.
        if self.ranks.placements.len() == 1 {
            (mesh.data, config.rollout.data) = (Auto::Is(layout.mesh.data), Auto::Is(layout.rollout_data()));
        }
        mesh.offload = layout.swap.offload();
        config
    }
}
