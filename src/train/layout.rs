//! How a job lies on the ranks that were started: what it names, and for `"auto"` what the plan chooses.

use crate::comm::World;
use crate::config::Config;
use crate::config::mesh::Auto;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::plan::{self, Archs, Device};
use crate::sys::memory;

/// The layout of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub mesh: Mesh,
    /// ZeRO stage, 0 to 3.
    pub stage: usize,
    /// Of the rollout.
    pub rollout: Mesh,
}

impl Layout {
    /// The same on all ranks, who all call this.
    ///
    /// # Errors
    /// `Usage` where the axes do not fit the ranks, the models or each other, or nothing fits the memory.
    pub fn of(config: &Config, world: &World) -> Result<Self> {
        let free = memory::available_bytes() / world.local_size.max(1) as u64;
        // The fullest host decides for all.
        let mut least = [-(free as f64)];
        world.group().all_reduce_max_f64(&mut least);
        // Agreed on, an error that all ranks meet alike names no rank.
        world.group().agree(Self::on(config, world, -least[0] as u64))
    }

    fn on(config: &Config, world: &World, memory: u64) -> Result<Self> {
        let mut axes = config.mesh.clone();
        // What the job itself says wrong is said in its own words.
        let named = axes.resolve(world.size);
        if world.size > 1 && (axes.tensor == Auto::Auto || axes.zero == Auto::Auto) {
            let archs = Archs::load(config, None)?;
            match plan::choose(config, &archs, world.size, &Device::cpu(memory, world.local_size)) {
                Ok(choice) => {
                    let chosen = choice.layout();
                    axes.tensor = Auto::Is(chosen.mesh.tensor);
                    axes.zero = Auto::Is(chosen.zero);
                }
                Err(error) => return Err(named.err().unwrap_or(error)),
            }
        }
        let mesh = axes.resolve(world.size)?;
        let stage = axes.stage()?;
        config.gradient.check_layout(&mesh, stage)?;
        let rollout = config.rollout.layout(&mesh)?;
        if !config.mesh.placement.is_empty() {
            return Err(Error::usage("mesh.placement is set, but this version has every role on every rank")
                .hint("leave mesh.placement out"));
        }
        Ok(Self { mesh, stage, rollout })
    }

    /// `stage 2: optimizer state and gradients sharded over 4 ranks`
    pub fn zero_words(&self) -> String {
        let ranks = self.mesh.data * self.mesh.sequence;
        let sharded =
            ["nothing", "optimizer state", "optimizer state and gradients", "optimizer state, gradients and weights"];
        let plural = if ranks == 1 { "" } else { "s" };
        format!("stage {}: {} sharded over {ranks} rank{plural}", self.stage, sharded[self.stage])
    }
}
