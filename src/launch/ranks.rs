//! The ranks of a job: their placements and layouts, and the groups of this rank.

use super::layout::Layout;
use crate::comm::{Axes, Group, World, records};
use crate::config::mesh::{Placement, RoleName};
use crate::error::Result;
use serde::{Serialize, de::DeserializeOwned};

/// All ranks, their placements, and this rank's groups.
pub struct Ranks {
    pub world: World,
    pub all: Group,
    /// The ranks that do the phases of a step together: all ranks, unless the rollout runs ahead on its own ranks.
    pub together: Group,
    /// The roles of each range of ranks.
    pub placements: Vec<Placement>,
    /// This rank's index in `placements`.
    pub placement: usize,
    /// The layout of each placement.
    pub layouts: Vec<Layout>,
    /// This rank's groups within its placement.
    pub axes: Axes,
    /// Its groups in the rollout; the groups of training, if both shard matrices the same way.
    pub rollout_axes: Axes,
}

impl Ranks {
    /// Creates the groups of this rank for roles that are `placed` this way. All ranks call this.
    pub fn new(world: World, placed: Vec<(Placement, Layout)>, runs_ahead: bool) -> Result<Self> {
        let mut own = None;
        for (i, (placement, layout)) in placed.iter().enumerate() {
            own = own.or(world.axes_of(placement.ranks.clone(), &layout.mesh).map(|axes| (i, axes)));
        }
        let (placement, axes) = own.expect("every rank has a placement");
        let (placements, layouts): (Vec<Placement>, Vec<Layout>) = placed.into_iter().unzip();
        let layout = &layouts[placement];
        let is_same = layout.rollout_tensor == layout.mesh.tensor;
        let rollout_axes = if is_same { axes.clone() } else { Axes::of(&axes.all, &layout.rollout()) };
        let all = world.group();
        let mut ranks = Self { together: all.clone(), all, world, placements, placement, layouts, axes, rollout_axes };
        if runs_ahead {
            ranks.together = ranks.all.split("together", usize::from(ranks.samples()), ranks.world.rank);
        }
        Ok(ranks)
    }

    /// Gathers the value of the first rank of each placement on all ranks of `group`, who all call this. With one
    /// placement nothing is exchanged.
    pub fn of_placements<T: Serialize + DeserializeOwned>(&self, group: &Group, here: T) -> Result<Vec<T>> {
        if group.size() == self.axes.all.size() {
            return Ok(vec![here]);
        }
        let mine = if self.axes.all.rank() == 0 { vec![here] } else { Vec::new() };
        records::gather(group, &mine)
    }

    pub fn layout(&self) -> &Layout {
        &self.layouts[self.placement]
    }

    /// The layouts of the actor in training, and on the ranks that sample.
    pub fn layouts_of_actor(&self) -> [&Layout; 2] {
        let of = |role| self.placements.iter().position(|placement| placement.roles.contains(&role));
        let actor = of(RoleName::Actor).unwrap_or(self.placement);
        [actor, of(RoleName::Rollout).unwrap_or(actor)].map(|placement| &self.layouts[placement])
    }

    /// Whether ranks without the actor sample.
    pub fn rollout_is_apart(&self) -> bool {
        let is_apart = |p: &Placement| p.roles.contains(&RoleName::Rollout) && !p.roles.contains(&RoleName::Actor);
        self.placements.iter().any(is_apart)
    }

    /// Whether this rank samples.
    pub fn samples(&self) -> bool {
        self.has(if self.rollout_is_apart() { RoleName::Rollout } else { RoleName::Actor })
    }

    pub fn has(&self, role: RoleName) -> bool {
        self.placements[self.placement].roles.contains(&role)
    }
}
