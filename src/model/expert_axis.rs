//! The ranks of the expert axis: each has equally many neighbouring experts of a layer, and all tokens of its own rows.
//! Rows travel to the ranks of their experts and back (arXiv:2006.16668, section 3.2).
//!
//! A row's result does not depend on other rows, and each token adds the results of its experts itself, in
//! ascending order. So the bits of a forward are those of one rank with all experts. Where a GPU chose the experts, the
//! host waits for the numbers of rows.

use super::context::Context;
use crate::comm::Group;
use crate::ops::experts::{Groups, Routing};
use crate::ops::rows::Order;
use crate::tensor::Tensor;
use std::ops::Range;

/// Where the rows of one layer's experts are computed.
#[derive(Debug)]
pub(super) struct Exchange {
    group: Group,
    /// The rows that each rank gets of this rank's rows (s), which are sorted by expert.
    sent: Vec<Range<usize>>,
    /// The rows that this rank gets of each rank (r).
    received: Vec<Range<usize>>,
    /// For each row that this rank computes, the received row: sorted by expert, and by rank within each expert.
    order: Order,
    /// The rows that this rank computes, by expert.
    pub groups: Groups,
}

/// The experts that this rank has, of a list of all.
pub(super) fn own<'a, T>(c: Context, all: &'a [T]) -> &'a [T] {
    &all[part(all.len(), c.expert.rank(), c.expert.size())]
}

/// The part of `experts` experts that rank `rank` of `ranks` has.
fn part(experts: usize, rank: usize, ranks: usize) -> Range<usize> {
    let each = experts / ranks;
    rank * each..(rank + 1) * each
}

impl Exchange {
    /// Exchanges the numbers of rows over the axis. All ranks of it call this.
    pub(super) fn new(group: &Group, routing: &Routing) -> Self {
        if group.size() == 1 {
            let [sent, received] = [Vec::new(), Vec::new()];
            return Self {
                group: group.clone(),
                sent,
                received,
                order: Order::default(),
                groups: routing.groups.clone(),
            };
        }
        let counts: Vec<u64> = routing.counts().into_iter().map(|rows| rows as u64).collect();
        let (own, ranks) = (part(counts.len(), group.rank(), group.size()), group.size());
        let sums = |lens: Vec<u64>| -> Vec<Range<usize>> {
            let mut end = 0;
            let mut next = |len: u64| {
                end += len as usize;
                end - len as usize..end
            };
            lens.into_iter().map(&mut next).collect()
        };
        let sent = sums((0..ranks).map(|rank| counts[part(counts.len(), rank, ranks)].iter().sum()).collect());
        let of_ranks = group.all_gather_numbers(&counts);
        let pieces = sums(of_ranks.iter().flat_map(|counts| counts[own.clone()].iter().copied()).collect());
        let received = pieces.chunks(own.len()).map(|of_rank| of_rank[0].start..of_rank[own.len() - 1].end).collect();
        let by_expert = |e: usize| (0..ranks).flat_map(|rank| pieces[rank * own.len() + e].clone()).collect::<Vec<_>>();
        let sorted: Vec<Vec<usize>> = (0..own.len()).map(by_expert).collect();
        let device = routing.probabilities.device();
        let groups = Groups::on(device, sorted.iter().map(Vec::len).collect());
        let order = Order::new(device, sorted.into_iter().flatten().map(|row| row as u32).collect());
        Self { group: group.clone(), sent, received, order, groups }
    }

    /// Sends each row (s, d) to the rank of its expert, and returns the rows that this rank computes.
    pub(super) fn there(&self, x: Tensor) -> Tensor {
        if self.group.size() == 1 {
            return x;
        }
        self.order.apply(&self.moved(&x, &self.sent, &self.received))
    }

    /// The reverse of `there`.
    pub(super) fn back(&self, y: Tensor) -> Tensor {
        if self.group.size() == 1 {
            return y;
        }
        self.moved(&self.order.undo(&y), &self.received, &self.sent)
    }

    fn moved(&self, x: &Tensor, to: &[Range<usize>], from: &[Range<usize>]) -> Tensor {
        let width = x.width();
        let values = |rows: &[Range<usize>]| -> Vec<Range<usize>> {
            rows.iter().map(|rows| rows.start * width..rows.end * width).collect()
        };
        let mut y = x.as_wide(from.last().map_or(0, |rows| rows.end));
        self.group.slice_to_all(x.slice(), &values(to), y.slice_mut(), &values(from));
        y
    }
}
