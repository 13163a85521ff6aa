//! Which GPU of its host each rank takes.

use serde::{Deserialize, Serialize};

/// A GPU as a rank sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seat {
    /// The same GPU has the same address for all ranks of a host.
    pub pci: String,
    pub numa: Option<usize>,
}

/// A rank of the host: the NUMA nodes of the cores that it may use, and the GPUs that it sees, in its own order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bound {
    pub nodes: Vec<usize>,
    pub seats: Vec<Seat>,
}

/// For each rank of a host the index of its GPU among those that it sees; none where it sees none.
///
/// No GPU gets more ranks than it must. Ranks whose cores lie all on the nodes of some of the GPUs choose first, among those
/// GPUs; the others take the least used ones, in the order in which they see them. So ranks that are bound to a socket get its
/// GPUs, ranks that are not bound get the GPU of their number, and a launcher that shows each rank one GPU is obeyed.
pub fn choose(ranks: &[Bound]) -> Vec<Option<usize>> {
    let mut all: Vec<&str> = ranks.iter().flat_map(|rank| &rank.seats).map(|seat| &seat.pci[..]).collect();
    all.sort_unstable();
    all.dedup();
    let share = ranks.len().div_ceil(all.len().max(1));
    let mut chosen: Vec<Option<usize>> = vec![None; ranks.len()];
    for only_near in [true, false] {
        for (i, rank) in ranks.iter().enumerate() {
            let used = |seat: &Seat| {
                let on_it =
                    |(at, other): (&Option<usize>, &Bound)| at.is_some_and(|at| other.seats[at].pci == seat.pci);
                chosen.iter().zip(ranks).filter(|pair| on_it(*pair)).count()
            };
            let free = |seat: &Seat| !only_near || (near(rank, seat) && used(seat) < share);
            if chosen[i].is_some() || (only_near && rank.seats.iter().all(|seat| near(rank, seat))) {
                continue;
            }
            let open = rank.seats.iter().enumerate().filter(|(_, seat)| free(seat));
            chosen[i] = open.min_by_key(|(at, seat)| (used(seat), *at)).map(|(at, _)| at);
        }
    }
    chosen
}

fn near(rank: &Bound, seat: &Seat) -> bool {
    seat.numa.is_none_or(|node| rank.nodes.contains(&node))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Eight GPUs, four at each socket, interleaved as some boards number them.
    fn board(nodes: [usize; 4]) -> Vec<Seat> {
        let seat = |(i, node): (usize, usize)| Seat { pci: format!("0000:{i:02x}:00.0"), numa: Some(node) };
        nodes.into_iter().enumerate().map(seat).collect()
    }

    fn rank(nodes: &[usize], seats: &[Seat]) -> Bound {
        Bound { nodes: nodes.to_vec(), seats: seats.to_vec() }
    }

    fn chosen(ranks: &[Bound]) -> Vec<usize> {
        choose(ranks).into_iter().map(|at| at.expect("each rank sees a GPU")).collect()
    }

    #[test]
    fn ranks_that_are_not_bound_take_the_gpu_of_their_number() {
        let gpus = board([0, 0, 1, 1]);
        assert_eq!(chosen(&[(); 4].map(|()| rank(&[0, 1], &gpus))), [0, 1, 2, 3]);
        assert_eq!(chosen(&[(); 2].map(|()| rank(&[0, 1], &gpus))), [0, 1]);
    }

    #[test]
    fn ranks_bound_to_a_socket_take_its_gpus() {
        let gpus = board([1, 0, 1, 0]);
        let ranks = [&[0][..], &[0], &[1], &[1]].map(|nodes| rank(nodes, &gpus));
        assert_eq!(chosen(&ranks), [1, 3, 0, 2]);
    }

    #[test]
    fn a_bound_rank_chooses_before_one_that_is_not() {
        let gpus = board([0, 0, 1, 1]);
        let ranks = [&[0, 1][..], &[0, 1], &[0], &[0]].map(|nodes| rank(nodes, &gpus));
        assert_eq!(chosen(&ranks), [2, 3, 0, 1]);
    }

    #[test]
    fn no_gpu_idles_while_another_has_two_ranks() {
        let gpus = board([0, 0, 1, 1]);
        let all_on_one_socket = [(); 4].map(|()| rank(&[0], &gpus));
        assert_eq!(chosen(&all_on_one_socket), [0, 1, 2, 3]);
    }

    #[test]
    fn more_ranks_than_gpus_share_them_evenly() {
        let gpus = board([0, 0, 1, 1]);
        let on = chosen(&[(); 8].map(|()| rank(&[0, 1], &gpus[..2])));
        assert_eq!(on, [0, 1, 0, 1, 0, 1, 0, 1]);
    }

    #[test]
    fn a_launcher_that_shows_each_rank_one_gpu_is_obeyed() {
        let gpus = board([0, 0, 1, 1]);
        let ranks: Vec<Bound> = gpus.iter().rev().map(|gpu| rank(&[0, 1], std::slice::from_ref(gpu))).collect();
        assert_eq!(chosen(&ranks), [0, 0, 0, 0]);
        assert_eq!(choose(&[rank(&[0], &[]), rank(&[0], &gpus)]), [None, Some(0)]);
    }

    #[test]
    fn a_board_whose_nodes_are_unknown_binds_nobody() {
        let gpus: Vec<Seat> = board([0; 4]).into_iter().map(|seat| Seat { numa: None, ..seat }).collect();
        assert_eq!(chosen(&[(); 4].map(|()| rank(&[1], &gpus))), [0, 1, 2, 3]);
    }
}
