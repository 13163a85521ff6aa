//! Products of groups of rows, each with a matrix of its own. Only the GPU knows which rows a group has, so the host
//! starts as many tiles as any groups may need. The bits of a group are those of `matmul` on its rows, in every tile.

use super::gpu::{Arg, gpu};
use super::matmul::{Matrix, MatrixMut, Tile, Way, check_depth, read};
use super::memory::Memory;
use super::shape::dim;
use crate::dtype::DType::{Bf16, F32};
use std::sync::Arc;

/// Rows of a group up to which the smallest tiles are used, and from which large ones are (estimated, not measured).
const FEW_TO: usize = 16;
const LARGE_FROM: usize = 96;

impl Tile {
    pub const OF_GROUPS: [Self; 4] = [Self::Rows16, Self::Rows64, Self::Rows128, Self::Wide128x128];

    /// The tile for groups of `rows` rows on average.
    fn for_groups(way: Way, rows: usize, is_forward: bool) -> Self {
        let tile = match way {
            Way::Exact(tile) => tile,
            _ if rows <= FEW_TO => Self::Rows16,
            _ if rows < LARGE_FROM => Self::Rows64,
            _ if gpu().properties().has_wgmma() => Self::Wide128x128,
            _ => Self::Rows128,
        };
        if tile == Self::Rows16 && !is_forward { Self::Rows64 } else { tile }
    }

    fn grouped_kernel(self, [small, middle, large, wide]: [&'static str; 4]) -> &'static str {
        match self {
            Self::Rows16 => small,
            Self::Rows64 => middle,
            Self::Rows128 => large,
            Self::Wide128x128 => wide,
            other => panic!("grouped: there is no kernel for {other:?}"),
        }
    }

    /// The most tiles of rows that `rows` rows of `groups` groups may need.
    fn rows_of_groups(self, rows: usize, groups: usize) -> usize {
        let height = self.size()[0];
        (rows + groups.min(rows) * (height - 1)) / height
    }
}

/// The rows of all groups: those of group e are `ends[e]..ends[e + 1]` (u32).
#[derive(Clone, Debug)]
pub struct Groups {
    pub ends: Arc<Memory>,
    pub count: usize,
    /// The number of all rows.
    pub rows: usize,
}

impl Groups {
    pub fn row_count(&self) -> usize {
        self.rows
    }
}

/// Matrices of one shape, each at the same distance from the one before.
fn apart(op: &str, addresses: &[u64], bytes: usize) -> Arg {
    let step = addresses.get(1).map_or(0, |second| second.wrapping_sub(addresses[0]));
    let is_even = addresses.windows(2).all(|pair| pair[1].wrapping_sub(pair[0]) == step);
    assert!(
        is_even && step < 1 << 40 && step.is_multiple_of(16),
        "{op}: the matrices of groups must be equally far apart"
    );
    Arg::U64(step / bytes as u64)
}

/// The first matrix, and how far the others are apart.
fn matrices(op: &str, groups: &Groups, w: &[Matrix]) -> [Arg; 2] {
    assert!(w.len() == groups.count, "{op}: {} groups need as many matrices (got {})", groups.count, w.len());
    let alike = |of: &Matrix| (of.rows, of.width, of.stride) == (w[0].rows, w[0].width, w[0].width);
    assert!(w.iter().all(alike), "{op}: matrices of groups must have one shape, without gaps between their rows");
    check_depth(op, "W", w[0].width);
    let addresses: Vec<u64> = w.iter().map(|w| w.values.address()).collect();
    [read(op, "W", w[0]), apart(op, &addresses, 2)]
}

fn check_rows(op: &str, what: &str, x: Matrix, [rows, width]: [usize; 2]) -> Arg {
    let fits = (x.rows, x.width, x.stride) == (rows, width, width);
    assert!(fits, "{op}: {what} must be ({rows}, {width}) without gaps, got ({}, {})", x.rows, x.width);
    read(op, what, x)
}

/// y[i] = x[i] W_e^T for the rows i of group e, and the same for a second list of matrices of the same shape; all bf16.
pub fn forward<const N: usize>(way: Way, x: Matrix, groups: &Groups, lists: [(Vec<Matrix>, MatrixMut); N]) {
    const OP: &str = "grouped::forward";
    const { assert!(N == 1 || N == 2) };
    let (s, n, k) = (groups.rows, lists[0].0[0].rows, x.width);
    let (none, mut addresses) = ([Arg::Address(0); 2], Vec::new());
    for (w, y) in lists {
        assert!((w[0].rows, w[0].width) == (n, k), "{OP}: the lists must have matrices of one shape");
        let MatrixMut { mut values, rows, width, stride } = y;
        check_rows(OP, "y", Matrix { values: values.as_view(), rows, width, stride }, [s, n]);
        let [first, apart] = matrices(OP, groups, &w);
        addresses.push(([first, values.arg(Bf16)], apart));
    }
    let (first, second) = (addresses[0], addresses.get(1).map_or(none, |of| of.0));
    assert!(addresses.iter().all(|of| of.1 == first.1), "{OP}: the matrices of all lists must be equally far apart");
    let tile = Tile::for_groups(way, s.div_ceil(groups.count), true);
    let kernel = tile.grouped_kernel([
        "grouped_forward_16",
        "grouped_forward_64",
        "grouped_forward_128",
        "grouped_forward_128x128",
    ]);
    let (x, ends) = (check_rows(OP, "x", x, [s, k]), groups.ends.arg());
    let [w, y] = first.0;
    let [w_1, y_1] = second;
    let [lists, count, columns, depth] = [N, groups.count, n, k].map(|n| dim(OP, n));
    let blocks = tile.rows_of_groups(s, groups.count) * n.div_ceil(tile.size()[1]) * N;
    tile.launch(kernel, blocks, &[x, ends, w, w_1, y, y_1, lists, count, columns, depth, first.1]);
}

/// dx[i] (+)= dy[i] W_e for the rows i of group e; all bf16, n and k multiples of 8.
pub fn backward_input(way: Way, dy: Matrix, groups: &Groups, w: &[Matrix], mut dx: MatrixMut, add: bool) {
    const OP: &str = "grouped::backward_input";
    let (s, n, k) = (groups.rows, w[0].rows, w[0].width);
    assert!((dx.rows, dx.width, dx.stride) == (s, k, k), "{OP}: dx must be ({s}, {k}) without gaps");
    let [first, apart] = matrices(OP, groups, w);
    let tile = Tile::for_groups(way, s.div_ceil(groups.count), false);
    let kernel = tile.grouped_kernel([
        "",
        "grouped_backward_input_64",
        "grouped_backward_input_128",
        "grouped_backward_input_128x128",
    ]);
    let (dy, ends, dx) = (check_rows(OP, "dy", dy, [s, n]), groups.ends.arg(), dx.values.arg(Bf16));
    let [count, n_arg, k_arg] = [groups.count, n, k].map(|n| dim(OP, n));
    let blocks = tile.rows_of_groups(s, groups.count) * k.div_ceil(tile.size()[1]);
    tile.launch(kernel, blocks, &[dy, ends, first, dx, count, n_arg, k_arg, apart, Arg::I32(i32::from(add))]);
}

/// dW_e[n][k] += sum over the rows i of group e of dy[i][n] x[i][k]; dy and x bf16, dW f32; n and k multiples of 8.
pub fn backward_weight(way: Way, dy: Matrix, x: Matrix, groups: &Groups, dw: Vec<MatrixMut>) {
    const OP: &str = "grouped::backward_weight";
    let (s, n, k) = (groups.rows, dy.width, x.width);
    assert!(dw.len() == groups.count, "{OP}: {} groups need as many gradients (got {})", groups.count, dw.len());
    let alike = |dw: &MatrixMut| (dw.rows, dw.width, dw.stride) == (n, k, k);
    assert!(dw.iter().all(alike), "{OP}: each dW must be ({n}, {k}) without gaps");
    if s == 0 {
        return;
    }
    let addresses: Vec<u64> = dw.iter().map(|dw| dw.values.as_view().address()).collect();
    let apart = apart(OP, &addresses, 4);
    let tile = Tile::for_groups(way, n.min(k).min(LARGE_FROM), false);
    let kernel = tile.grouped_kernel([
        "",
        "grouped_backward_weight_64",
        "grouped_backward_weight_128",
        "grouped_backward_weight_128x128",
    ]);
    let first = dw.into_iter().next().expect("a group").values.arg(F32);
    let [of_rows, of_columns] = tile.size();
    let blocks = groups.count * n.div_ceil(of_rows) * k.div_ceil(of_columns);
    let (dy, x) = (check_rows(OP, "dy", dy, [s, n]), check_rows(OP, "x", x, [s, k]));
    tile.launch(kernel, blocks, &[dy, x, groups.ends.arg(), first, dim(OP, n), dim(OP, k), apart]);
}
