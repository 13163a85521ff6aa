//! The GPU of each rank, and the cores beside it.

use super::records;
use super::world::World;
use crate::device::cuda::devices::Properties;
use crate::device::cuda::gpu_assignment::{self, Bound, VisibleGpu};
use crate::sys::affinity;
use serde::{Serialize, de::DeserializeOwned};

/// The index among `seen`, the GPUs that this rank sees, of the one that it takes; none where it sees none. All ranks call
/// this.
pub fn mine(world: &World, seen: &[Properties]) -> Option<usize> {
    let gpus = seen.iter().map(|gpu| VisibleGpu { pci: gpu.pci.clone(), numa: gpu.numa }).collect();
    let (bounds, me) = of_host(world, Bound { nodes: affinity::nodes(), gpus });
    gpu_assignment::choose(&bounds)[me]
}

/// The cores to which this rank may move to be near its GPU (`affinity::near`). All ranks call this.
pub fn near_cores(world: &World, gpu: &Properties) -> Option<Vec<usize>> {
    let (ranks, me) = of_host(world, (affinity::mask(), gpu.numa));
    affinity::near(&ranks, me)
}

/// What each rank of this host gives, and which of them is this one. All ranks call this.
fn of_host<T: Serialize + DeserializeOwned>(world: &World, mine: T) -> (Vec<T>, usize) {
    let is_here = |rank: usize| world.hosts[rank] == world.hosts[world.rank];
    let all = records::gather(&world.group(), &[mine]).expect("a peer of the same build wrote it");
    let here = all.into_iter().enumerate().filter(|(rank, _)| is_here(*rank)).map(|(_, of_rank)| of_rank).collect();
    (here, (0..world.rank).filter(|rank| is_here(*rank)).count())
}
