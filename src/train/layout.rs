//! How a job lies on the ranks that were started: what it names, and for `"auto"` what the plan chooses.

use crate::comm::World;
use crate::config::Config;
use crate::config::job::JobKind;
use crate::config::mesh::{Auto, Place, RoleName};
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::plan::{self, Archs, Device};
use crate::sys::memory;
use std::ops::Range;

/// The layout of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub mesh: Mesh,
    /// ZeRO stage, 0 to 3.
    pub stage: usize,
    /// Of the rollout.
    pub rollout: Mesh,
    /// The plan finds no layout that is sure to fit. It counts the longest rows that the job allows: shorter ones may, and
    /// a rank that finds no memory says so.
    pub is_tight: bool,
}

impl Layout {
    /// The places of a run and how each lies on its ranks. The same on all ranks, who all call this.
    ///
    /// # Errors
    /// `Usage` where a role has no place, where the axes do not fit the ranks, the models or each other, or nothing fits
    /// the memory.
    pub fn of_places(config: &Config, world: &World) -> Result<Vec<(Place, Self)>> {
        let free = memory::available_bytes() / world.local_size.max(1) as u64;
        // The fullest host decides for all.
        let mut least = [-(free as f64)];
        world.group().all_reduce_max_f64(&mut least);
        let memory = -least[0] as u64;
        let of = |place: Place| {
            let layout = Self::on(config, &place, world, memory);
            let Range { start, end } = place.ranks;
            let within = |e: Error| e.within(format!("mesh.placement, ranks {start}..{end}"));
            Ok((place, if config.mesh.placement.is_empty() { layout? } else { layout.map_err(within)? }))
        };
        let places = config.mesh.places(world.size).and_then(|places| check_roles(config, places));
        // Agreed on, an error that all ranks meet alike names no rank.
        world.group().agree(places.and_then(|places| places.into_iter().map(of).collect()))
    }

    fn on(config: &Config, place: &Place, world: &World, memory: u64) -> Result<Self> {
        let (mut axes, ranks) = (config.mesh.clone(), place.ranks.len());
        // What the job itself says wrong is said in its own words.
        let named = axes.resolve(ranks);
        let open = axes.tensor == Auto::Auto || axes.zero == Auto::Auto;
        let mut is_tight = false;
        if ranks > 1 && open && config.mesh.placement.is_empty() {
            let archs = Archs::load(config, None)?;
            match plan::choose(config, &archs, ranks, &Device::cpu(memory, world.local_size)) {
                Ok(choice) => {
                    let chosen = choice.layout();
                    axes.tensor = Auto::Is(chosen.mesh.tensor);
                    axes.zero = Auto::Is(chosen.zero);
                }
                Err(error) => {
                    let tensor = named?.tensor;
                    is_tight = archs.roles().iter().all(|(_, arch)| arch.check_tensor(tensor).is_ok());
                    if !is_tight {
                        return Err(error);
                    }
                }
            }
        }
        let mesh = axes.resolve(ranks)?;
        let stage = axes.stage()?;
        config.gradient.check_layout(&mesh, stage)?;
        let plays = place.roles.contains(&RoleName::Actor);
        let rollout = if plays { config.rollout.layout(&mesh)? } else { mesh };
        Ok(Self { mesh, stage, rollout, is_tight })
    }
}

/// `stage 2: optimizer state and gradients sharded over 4 ranks`
pub fn zero_words(mesh: &Mesh, stage: usize) -> String {
    let ranks = mesh.data * mesh.sequence;
    let sharded =
        ["nothing", "optimizer state", "optimizer state and gradients", "optimizer state, gradients and weights"];
    let plural = if ranks == 1 { "" } else { "s" };
    format!("stage {stage}: {} sharded over {ranks} rank{plural}", sharded[stage])
}

/// Refuses places that leave out a role which the job needs.
fn check_roles(config: &Config, places: Vec<Place>) -> Result<Vec<Place>> {
    if config.mesh.placement.is_empty() {
        return Ok(places);
    }
    if config.job.kind != JobKind::Ppo {
        let kind = config.job.kind.name();
        return Err(
            Error::usage(format!("mesh.placement is set, a {kind} job has one role")).hint("leave mesh.placement out")
        );
    }
    let needed = [
        (RoleName::Reward, true),
        (RoleName::Critic, config.ppo.advantage.has_critic()),
        (RoleName::Reference, config.needs_reference()),
    ];
    for (role, needed) in needed {
        if needed && !places.iter().any(|place| place.roles.contains(&role)) {
            return Err(Error::usage(format!("mesh.placement has no place for the {}", role.name()))
                .hint("name it in the roles of one of the entries"));
        }
    }
    Ok(places)
}
