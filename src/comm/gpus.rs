//! The GPU of each rank.

use super::records;
use super::world::World;
use crate::device::cuda::devices::Properties;
use crate::device::cuda::gpu_assignment::{self, Bound, Seat};
use crate::sys::affinity;

/// The index among `seen`, the GPUs that this rank sees, of the one that it takes; none where it sees none. All ranks call
/// this.
pub fn mine(world: &World, seen: &[Properties]) -> Option<usize> {
    let seats = seen.iter().map(|gpu| Seat { pci: gpu.pci.clone(), numa: gpu.numa }).collect();
    let bound = Bound { nodes: affinity::nodes(), seats };
    let all = records::gather(&world.group(), &[bound]).expect("a peer of the same build wrote it");
    let here = |rank: &usize| world.hosts[*rank] == world.hosts[world.rank];
    let ranks: Vec<usize> = (0..world.size).filter(here).collect();
    let bounds: Vec<Bound> = ranks.iter().map(|&rank| all[rank].clone()).collect();
    let me = ranks.iter().position(|&rank| rank == world.rank)?;
    gpu_assignment::choose(&bounds)[me]
}
