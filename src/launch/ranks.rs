//! The ranks of a job: who is where, and the groups of this one.

use super::layout::Layout;
use crate::comm::{Axes, Group, World, records};
use crate::config::mesh::{Placement, RoleName};
use crate::error::Result;
use serde::{Serialize, de::DeserializeOwned};

/// All ranks, their placements, and this rank's groups.
pub struct Ranks {
    pub world: World,
    pub all: Group,
    /// The roles of each range of ranks.
    pub placements: Vec<Placement>,
    /// This rank's index in `placements`.
    pub placement: usize,
    /// The layout of each placement.
    pub layouts: Vec<Layout>,
    /// This rank's groups within its placement.
    pub axes: Axes,
    /// Its groups in the rollout: those of training, where both shard matrices the same way.
    pub rollout_axes: Axes,
}

impl Ranks {
    /// This rank's groups, where roles are `placed` so. All ranks call this.
    pub fn new(world: World, placed: Vec<(Placement, Layout)>) -> Result<Self> {
        let mut own = None;
        for (i, (placement, layout)) in placed.iter().enumerate() {
            own = own.or(world.axes_of(placement.ranks.clone(), &layout.mesh)?.map(|axes| (i, axes)));
        }
        let (placement, axes) = own.expect("every rank has a placement");
        let (placements, layouts): (Vec<Placement>, Vec<Layout>) = placed.into_iter().unzip();
        let layout = &layouts[placement];
        let is_same = layout.rollout_tensor == layout.mesh.tensor;
        let rollout_axes = if is_same { axes.clone() } else { Axes::of(&axes.all, &layout.rollout()) };
        Ok(Self { all: world.group(), world, placements, placement, layouts, axes, rollout_axes })
    }

    /// What the first rank of each placement has, on all ranks, who all call this; with one placement nothing is exchanged.
    pub fn of_placements<T: Serialize + DeserializeOwned>(&self, here: T) -> Result<Vec<T>> {
        if self.placements.len() == 1 {
            return Ok(vec![here]);
        }
        let mine = if self.axes.all.rank() == 0 { vec![here] } else { Vec::new() };
        records::gather(&self.all, &mine)
    }

    pub fn layout(&self) -> &Layout {
        &self.layouts[self.placement]
    }

    pub fn has(&self, role: RoleName) -> bool {
        self.placements[self.placement].roles.contains(&role)
    }
}
