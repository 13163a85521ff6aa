//! GEMMs of far rows, and with far weights.

use super::{Pair, assert_same_bits, get, has_room, only, small};
use crate::matmul::{TILES, supported};
use crate::{bf16, device, numbers};
use rlhf_hpc::device::cuda::Memory;
use rlhf_hpc::device::cuda::matmul::{self, Addend, Factor, Matrix, MatrixMut, Tile, Way};
use rlhf_hpc::dtype::DType::{self, Bf16, F32};
use rlhf_hpc::ops::glu::Activation;

/// Values from row to row, and rows beyond all bounds: those of a small product are a part of each.
const STRIDE: usize = 8192;
const ROWS: usize = (1 << 32) / STRIDE + 8;
/// The distance between the rows of a sum. A test can only compute the whole sum.
const APART: usize = 1 << 24;
const LINES: usize = (1 << 32) / APART + 48;

fn strided(values: &Memory, rows: usize, width: usize) -> Matrix<'_> {
    Matrix { values: values.view(Bf16), rows, width, stride: STRIDE }
}

fn strided_mut(values: &mut Memory, dtype: DType, rows: usize, width: usize) -> MatrixMut<'_> {
    MatrixMut { values: values.view_mut(dtype), rows, width, stride: STRIDE }
}

/// Tiles of gradients as high as wide.
const SQUARE: [Tile; 3] = [Tile::Rows64, Tile::Rows128, Tile::Wide128x128];

/// Tiles of one column: a block is a tile of rows.
#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn gemms_of_far_rows_equal_those_of_near_rows() {
    const K: usize = 128;
    let [families, squares] = {
        let (_gpu, _one) = device();
        [supported(&TILES), supported(&SQUARE)]
    };
    for (family, [rows, n]) in families.into_iter().map(|tile| (tile, tile.size())) {
        let dtype = if rows == 64 { F32 } else { Bf16 };
        assert_same_bits(
            &format!("forward {family:?}"),
            [(Bf16, STRIDE), (dtype, STRIDE)],
            ROWS,
            rows,
            |[x, y], all| {
                let (w, bias) = (small(7, n * K), small(8, n));
                let (w, y) = (Matrix::new(w.view(Bf16), n, K), strided_mut(y, dtype, all.len, n));
                let (way, x, bias) = (Way::Exact(family), strided(x, all.len, K), Some(bias.view(Bf16)));
                matmul::forward(way, x, w, bias, Addend::Result, y);
            },
        );
    }
    for (tile, [rows, columns]) in [Tile::Rows16, Tile::Rows32, Tile::Rows64].map(|tile| (tile, tile.size())) {
        assert_same_bits(&format!("swiglu {tile:?}"), [(Bf16, STRIDE); 2], ROWS, rows, |[x, y], all| {
            let n = columns / 2;
            let (gate, up) = (small(7, n * K), small(8, n * K));
            let factors = [&gate, &up].map(|w| Factor { w: Matrix::new(w.view(Bf16), n, K), bias: None });
            let y = strided_mut(y, Bf16, all.len, n);
            assert!(matmul::glu(Way::Exact(tile), Activation::Silu, strided(x, all.len, K), factors, y));
        });
    }
    for (size, rows) in squares.into_iter().map(|tile| (tile, tile.size()[0])) {
        for n in [64, 70] {
            assert_same_bits(&format!("backward {size:?} of {n}"), [(Bf16, STRIDE); 2], ROWS, rows, |[dy, dx], all| {
                let w = small(7, n * rows);
                let (w, dx) = (Matrix::new(w.view(Bf16), n, rows), strided_mut(dx, Bf16, all.len, rows));
                matmul::backward_input(Way::Exact(size), strided(dy, all.len, n), w, dx, true);
            });
        }
    }
}

/// Shapes of a head with many tokens: a block is a tile of columns.
#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn gemms_with_far_weights_equal_those_with_near_weights() {
    const K: usize = 128;
    const M: usize = 16;
    let (_gpu, _one) = device();
    // A tile of gate and up has half as many columns of each.
    for (dtype, columns) in [(F32, 32), (Bf16, 16)] {
        let Some(pair) = Pair::new([(Bf16, STRIDE)], ROWS, columns) else { return };
        let x = small(3, M * K);
        let product = |w: &Memory, n: usize| {
            let mut y = Memory::scratch(4 * M * n);
            let to = MatrixMut::new(y.view_mut(dtype).part(0..M * n), M, n);
            let (way, x, w) = (Way::Exact(Tile::Rows16), Matrix::new(x.view(Bf16), M, K), strided(w, n, K));
            match dtype {
                F32 => matmul::forward(way, x, w, None, Addend::Nothing, to),
                Bf16 => assert!(matmul::glu(way, Activation::Silu, x, [Factor { w, bias: None }; 2], to)),
            }
            y
        };
        let far = only(&pair.numbers(columns), || product(&pair.far[0], ROWS));
        let near = product(&pair.near[0], pair.rows.len());
        for m in 0..M {
            let mut at = 0;
            for &(first, n) in &pair.groups {
                let [far, near] =
                    [get(far.view(dtype), m * ROWS + first, n), get(near.view(dtype), m * pair.rows.len() + at, n)];
                assert_eq!(far, near, "{dtype:?}, row {m}, columns {first}..");
                at += n;
            }
        }
    }
}

#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn gradients_of_far_weights_equal_those_of_near_weights() {
    const M: usize = 64;
    let (_gpu, _one) = device();
    for (size, rows) in supported(&SQUARE).into_iter().map(|tile| (tile, tile.size()[0])) {
        let Some(mut pair) = Pair::new([(F32, STRIDE)], ROWS, rows) else { return };
        let (x, dy) = (small(3, M * rows), bf16(&numbers(4, M * pair.rows.len())));
        let near_dy = Memory::from_values(&dy);
        let mut far_dy = Memory::zeros(2 * M * ROWS);
        for m in 0..M {
            let mut rest = &dy[m * pair.rows.len()..];
            for &(first, n) in &pair.groups {
                far_dy.view_mut(Bf16).part(m * ROWS + first..m * ROWS + first + n).write_bits(&rest[..n]);
                rest = &rest[n..];
            }
        }
        let work = |dy: &Memory, dw: &mut Memory, n: usize| {
            // Rows of dy begin at multiples of eight values.
            assert!(n.is_multiple_of(8));
            let (dy, x) = (Matrix::new(dy.view(Bf16), M, n), Matrix::new(x.view(Bf16), M, rows));
            matmul::backward_weight(Way::Exact(size), dy, x, strided_mut(dw, F32, n, rows));
        };
        let (chosen, rows_near) = (pair.numbers(rows), pair.rows.len());
        only(&chosen, || work(&far_dy, &mut pair.far[0], ROWS));
        work(&near_dy, &mut pair.near[0], rows_near);
        pair.agree(&format!("backward weight {size:?}"));
    }
}

/// Lines of `width` values, `APART` apart, and one after the other.
fn lines(seed: u32, width: usize) -> (Memory, Memory) {
    let values = bf16(&numbers(seed, LINES * width));
    let mut far = Memory::scratch(2 * ((LINES - 1) * APART + width));
    for (line, values) in values.chunks_exact(width).enumerate() {
        far.view_mut(Bf16).part(line * APART..line * APART + width).write_bits(values);
    }
    (far, Memory::from_values(&values))
}

/// The end of the sum is beyond all bounds.
#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn sums_over_far_lines_equal_those_over_near_lines() {
    let (_gpu, _one) = device();
    if !has_room(4 * LINES * APART) {
        return;
    }
    for (size, n) in supported(&SQUARE).into_iter().map(|tile| (tile, tile.size()[0])) {
        let ((far_dy, near_dy), (far_x, near_x)) = (lines(1, n), lines(2, n));
        let chains = |dy: &Memory, x: &Memory, stride: usize| {
            let [dy, x] = [dy, x].map(|values| Matrix { values: values.view(Bf16), rows: LINES, width: n, stride });
            let [mut db, mut dw, mut dx] = [4 * n, 4 * n * n, 2 * 40 * n].map(Memory::zeros);
            matmul::backward_bias(dy, db.view_mut(F32));
            matmul::backward_weight(Way::Exact(size), dy, x, MatrixMut::new(dw.view_mut(F32), n, n));
            // Among the GEMMs with W, only dx is a sum over its rows.
            let (short, to) = (small(5, 40 * LINES), MatrixMut::new(dx.view_mut(Bf16), 40, n));
            matmul::backward_input(Way::Exact(size), Matrix::new(short.view(Bf16), 40, LINES), x, to, false);
            (db.read::<u32>(n), dw.read::<u32>(n * n), dx.read::<u16>(40 * n))
        };
        assert!(chains(&far_dy, &far_x, APART) == chains(&near_dy, &near_x, n), "{size:?}");
    }
}
