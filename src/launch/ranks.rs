//! The ranks of a job: their placements and layouts, and the groups of this rank.

use super::layout::Layout;
use crate::comm::group::list_ranks;
use crate::comm::{Axes, Group, World, phase, records};
use crate::config::mesh::{Placement, RoleName};
use crate::error::{Error, Result};
use serde::{Serialize, de::DeserializeOwned};
use std::ops::Range;

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
    /// This rank's groups in the rollout. If both shard matrices the same way, these are the groups of training.
    pub rollout_axes: Axes,
}

impl Ranks {
    /// Creates the groups of this rank for roles that are `placed` this way. All ranks call this.
    pub fn new(world: World, placed: Vec<(Placement, Layout)>, runs_ahead: bool) -> Result<Self> {
        let mut own = None;
        for (i, (placement, layout)) in placed.iter().enumerate() {
            own = own.or(world.axes_of(placement.ranks.clone(), &layout.mesh).map(|axes| (i, axes)));
        }
        let (placement, mut axes) = own.expect("every rank has a placement");
        phase::set_stage(axes.pipeline.rank(), axes.pipeline.size());
        let (placements, layouts): (Vec<Placement>, Vec<Layout>) = placed.into_iter().unzip();
        let layout = &layouts[placement];
        axes.chunks = layout.chunks;
        let is_same =
            layout.rollout_tensor == layout.mesh.tensor && layout.mesh.expert == 1 && layout.mesh.pipeline == 1;
        let mut rollout_axes = if is_same { axes.clone() } else { Axes::split_mesh(&axes.all, &layout.rollout()) };
        // The same ranks share matrices in the same order: they need one group, and one backend for it.
        if layout.rollout_tensor == layout.mesh.tensor {
            rollout_axes.tensor = axes.tensor.clone();
        }
        let all = world.group();
        let mut ranks = Self { together: all.clone(), all, world, placements, placement, layouts, axes, rollout_axes };
        if runs_ahead {
            ranks.together = ranks.all.split("together", usize::from(ranks.samples()), ranks.world.rank);
        }
        Ok(ranks)
    }

    /// A warning if tensor ranks are on several hosts although one host has enough ranks for them. Their collectives,
    /// several in each layer, then use the network.
    pub fn warn_of_split_tensors(&self) -> Option<String> {
        let groups = self.placements.iter().zip(&self.layouts).flat_map(|(placement, layout)| {
            let sizes = [layout.mesh.tensor, layout.rollout_tensor];
            sizes.into_iter().flat_map(|size| {
                let firsts = placement.ranks.clone().step_by(size);
                firsts.map(move |first| first..first + size)
            })
        });
        groups.into_iter().find_map(|group| split_over_hosts(&self.world.hosts, group))
    }

    /// Rejects tensor ranks whose kernels are not the same machine code: they compute the same values again on each rank,
    /// and must find the same bits. `code` is the name of the code of this rank. All ranks call this.
    pub fn check_code(&self, code: &str) -> Result<()> {
        let differ = |group: &Group| {
            let all = group.all_gather_bytes(code.as_bytes());
            let Some(i) = all.iter().position(|other| *other != all[0]) else { return Ok(()) };
            let rank = |i: usize| group.world_ranks().nth(i).unwrap_or(i);
            let [first, other] = [&all[0], &all[i]].map(|code| String::from_utf8_lossy(code));
            Err(Error::usage(format!(
                "ranks of a tensor group need the same kernels: rank {} has {first}, rank {} has {other}",
                rank(0),
                rank(i)
            ))
            .hint("set mesh.tensor and rollout.tensor to the GPUs of one kind of node, or install the same driver and NVRTC on all nodes"))
        };
        let checked = differ(&self.axes.tensor).and_then(|()| differ(&self.rollout_axes.tensor));
        self.all.agree(checked)
    }

    /// Gathers the value of the first rank of each placement on all ranks of `group`. All of them call this. With one
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

    /// Whether the rollout is on ranks without the actor.
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

/// The warning for a tensor group of consecutive ranks, if its hosts are several and one has enough ranks for it.
fn split_over_hosts(hosts: &[String], group: Range<usize>) -> Option<String> {
    let mine = &hosts[group.clone()];
    let others = mine.iter().filter(|host| **host != mine[0]).count();
    let on = |host: &String| hosts.iter().filter(|other| *other == host).count();
    let most = mine.iter().map(on).max()?;
    let size = group.len();
    if others == 0 || most < size {
        return None;
    }
    let ranks = list_ranks(&group.collect::<Vec<_>>());
    Some(format!(
        "the tensor group of {ranks} is on several hosts, although a host has {most} ranks; every layer then waits for the \
         network. Start consecutive ranks on one host (mpirun --map-by slot, srun --distribution=block), with a multiple \
         of {size} on each"
    ))
}

#[cfg(test)]
mod tests {
    use super::split_over_hosts;

    #[test]
    fn a_tensor_group_over_several_hosts_is_a_warning_only_if_one_could_hold_it() {
        let split = |hosts: &str, group| split_over_hosts(&hosts.chars().map(String::from).collect::<Vec<_>>(), group);
        for (hosts, group) in [("aabb", 0..2), ("aabb", 2..4), ("aabb", 0..4), ("abcd", 0..2), ("a", 0..1)] {
            assert_eq!(split(hosts, group.clone()), None, "{hosts} {group:?}");
        }
        for (hosts, group, words) in [
            ("abab", 0..2, "ranks 0 to 1 is on several hosts, although a host has 2 ranks"),
            ("aaabbb", 2..4, "ranks 2 to 3 is on several hosts, although a host has 3 ranks"),
        ] {
            let warning = split(hosts, group).unwrap_or_default();
            assert!(warning.contains(words) && warning.contains("multiple of 2"), "{hosts}: {warning}");
        }
    }
}
