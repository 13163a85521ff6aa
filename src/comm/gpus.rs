//! The GPU of each rank, and the cores near it.

use super::records;
use super::world::World;
use crate::device::cuda::devices::Properties;
use crate::sys::affinity;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The index of this rank's GPU among `seen`, the GPUs that it sees. `None` if it sees none. All ranks call
/// this.
pub fn mine(world: &World, seen: &[Properties]) -> Option<usize> {
    let gpus = seen.iter().map(|gpu| VisibleGpu { uuid: gpu.uuid.clone(), numa: gpu.numa }).collect();
    let (bounds, me) = of_host(world, Bound { nodes: affinity::nodes(), gpus });
    choose(&bounds)[me]
}

/// The cores to which this rank may move to be near its GPU (`affinity::near`). All ranks call this.
pub fn near_cores(world: &World, gpu: &Properties) -> Option<Vec<usize>> {
    let (ranks, me) = of_host(world, (affinity::mask(), gpu.numa));
    affinity::near(&ranks, me)
}

/// Gathers the values of this host's ranks. Also returns the index of this rank among them. All ranks call this.
fn of_host<T: Serialize + DeserializeOwned>(world: &World, mine: T) -> (Vec<T>, usize) {
    let is_here = |rank: usize| world.hosts[rank] == world.hosts[world.rank];
    let all = records::gather(&world.group(), &[mine]).expect("a peer of the same build wrote it");
    let here = all.into_iter().enumerate().filter(|(rank, _)| is_here(*rank)).map(|(_, of_rank)| of_rank).collect();
    (here, (0..world.rank).filter(|rank| is_here(*rank)).count())
}

/// A GPU as a rank sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct VisibleGpu {
    /// The UUID of the GPU or of its MIG instance, which is the same for all ranks of a host.
    uuid: String,
    numa: Option<usize>,
}

/// A rank of the host: the NUMA nodes of its cores, and the GPUs that it sees, in its own order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Bound {
    nodes: Vec<usize>,
    gpus: Vec<VisibleGpu>,
}

/// Assigns a GPU of the host to each rank: its index among the GPUs that the rank sees. `None` if it sees none.
///
/// Ranks are spread evenly over the GPUs. Ranks whose cores are near only some of the GPUs choose first, among those
/// GPUs. The others take the least used GPUs, in the order in which they see them. So ranks that are bound to a socket
/// get its GPUs, and unbound ranks get the GPU of their number. If a launcher shows each rank one GPU, the rank gets
/// that GPU.
fn choose(ranks: &[Bound]) -> Vec<Option<usize>> {
    let mut all: Vec<&str> = ranks.iter().flat_map(|rank| &rank.gpus).map(|gpu| &gpu.uuid[..]).collect();
    all.sort_unstable();
    all.dedup();
    let share = ranks.len().div_ceil(all.len().max(1));
    let mut chosen: Vec<Option<usize>> = vec![None; ranks.len()];
    for only_near in [true, false] {
        for (i, rank) in ranks.iter().enumerate() {
            let used = |gpu: &VisibleGpu| {
                let on_it =
                    |(at, other): (&Option<usize>, &Bound)| at.is_some_and(|at| other.gpus[at].uuid == gpu.uuid);
                chosen.iter().zip(ranks).filter(|pair| on_it(*pair)).count()
            };
            let free = |gpu: &VisibleGpu| !only_near || (near(rank, gpu) && used(gpu) < share);
            if chosen[i].is_some() || (only_near && rank.gpus.iter().all(|gpu| near(rank, gpu))) {
                continue;
            }
            let open = rank.gpus.iter().enumerate().filter(|(_, gpu)| free(gpu));
            chosen[i] = open.min_by_key(|(at, gpu)| (used(gpu), *at)).map(|(at, _)| at);
        }
    }
    chosen
}

fn near(rank: &Bound, gpu: &VisibleGpu) -> bool {
    gpu.numa.is_none_or(|node| rank.nodes.contains(&node))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four GPUs on the NUMA nodes `nodes`, which may be interleaved as on some boards.
    fn board(nodes: [usize; 4]) -> Vec<VisibleGpu> {
        let gpu = |(i, node): (usize, usize)| VisibleGpu { uuid: format!("{i:02x}"), numa: Some(node) };
        nodes.into_iter().enumerate().map(gpu).collect()
    }

    fn rank(nodes: &[usize], gpus: &[VisibleGpu]) -> Bound {
        Bound { nodes: nodes.to_vec(), gpus: gpus.to_vec() }
    }

    fn chosen(ranks: &[Bound]) -> Vec<usize> {
        choose(ranks).into_iter().map(|at| at.expect("each rank sees a GPU")).collect()
    }

    /// A description, the nodes of the GPUs, the nodes of each rank, and the GPUs that the ranks get.
    type Case<'a> = (&'a str, [usize; 4], &'a [&'a [usize]], &'a [usize]);

    #[test]
    fn ranks_use_near_gpus_first_and_no_gpu_idles_while_another_has_two_ranks() {
        let (node_0, node_1, both) = (&[0][..], &[1][..], &[0, 1][..]);
        let cases: [Case; 6] = [
            ("unbound ranks get the GPU of their number", [0, 0, 1, 1], &[both; 4], &[0, 1, 2, 3]),
            ("and so do fewer of them", [0, 0, 1, 1], &[both; 2], &[0, 1]),
            ("bound to a socket", [1, 0, 1, 0], &[node_0, node_0, node_1, node_1], &[1, 3, 0, 2]),
            ("a bound rank chooses first", [0, 0, 1, 1], &[both, both, node_0, node_0], &[2, 3, 0, 1]),
            ("all on one socket", [0, 0, 1, 1], &[node_0; 4], &[0, 1, 2, 3]),
            ("more ranks than GPUs share them evenly", [0, 0, 1, 1], &[both; 8], &[0, 1, 2, 3, 0, 1, 2, 3]),
        ];
        for (what, nodes, ranks, want) in cases {
            let gpus = board(nodes);
            let ranks: Vec<Bound> = ranks.iter().map(|nodes| rank(nodes, &gpus)).collect();
            assert_eq!(chosen(&ranks), want, "{what}");
        }
        let unknown: Vec<VisibleGpu> = board([0; 4]).into_iter().map(|gpu| VisibleGpu { numa: None, ..gpu }).collect();
        assert_eq!(chosen(&[(); 4].map(|()| rank(&[1], &unknown))), [0, 1, 2, 3], "unknown nodes bind no rank");
    }

    #[test]
    fn a_launcher_that_shows_each_rank_one_gpu_is_respected() {
        let gpus = board([0, 0, 1, 1]);
        let ranks: Vec<Bound> = gpus.iter().rev().map(|gpu| rank(&[0, 1], std::slice::from_ref(gpu))).collect();
        assert_eq!(chosen(&ranks), [0, 0, 0, 0]);
        assert_eq!(choose(&[rank(&[0], &[]), rank(&[0], &gpus)]), [None, Some(0)]);
    }
}
