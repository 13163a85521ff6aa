//! y = x W^T and its gradients: right against f64, and the bits that must not move.

use crate::{bf16, device, in_every_order, numbers, rounded};
use rlhf_hpc::device::cuda::Memory;
use rlhf_hpc::device::cuda::matmul::{
    Family, Matrix, MatrixMut, Size, backward_bias, backward_input_by, backward_weight_by, forward_by, forward_onto_by,
};
use rlhf_hpc::dtype::DType;

/// Rows at which families begin and end, and their tails.
const ROWS: [usize; 12] = [1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 129, 300];
/// What stands where nothing may be read: NaN.
const NAN: u16 = 0xffff;
/// What stands where nothing may be written.
const GUARD: f32 = 7.0;

/// A bf16 matrix on the GPU and its values, with NaN between its rows.
pub struct Bf16Matrix {
    rows: usize,
    width: usize,
    stride: usize,
    pub values: Vec<f32>,
    pub memory: Memory,
}

impl Bf16Matrix {
    pub fn new(seed: u32, rows: usize, width: usize, stride: usize) -> Self {
        let values = rounded(&numbers(seed, rows * width));
        let mut all = vec![NAN; rows.max(1) * stride];
        for i in 0..rows {
            all[i * stride..i * stride + width].copy_from_slice(&bf16(&values[i * width..(i + 1) * width]));
        }
        Self { rows, width, stride, values, memory: Memory::of(&all) }
    }

    pub fn at(&self, row: usize, column: usize) -> f64 {
        f64::from(self.values[row * self.width + column])
    }

    pub fn matrix(&self) -> Matrix<'_> {
        self.rows(0, self.rows)
    }

    pub fn rows(&self, first: usize, rows: usize) -> Matrix<'_> {
        let values = self.memory.view(DType::Bf16).part(first * self.stride..(first + rows) * self.stride);
        Matrix { values, rows, width: self.width, stride: self.stride }
    }
}

/// A matrix to write, filled with numbers, with a guard between its rows.
pub struct Written {
    rows: usize,
    width: usize,
    stride: usize,
    dtype: DType,
    pub before: Vec<f32>,
    pub memory: Memory,
}

impl Written {
    pub fn new(seed: u32, rows: usize, width: usize, stride: usize, dtype: DType) -> Self {
        let before = rounded(&numbers(seed, rows * width));
        let mut all = vec![GUARD; rows.max(1) * stride];
        for i in 0..rows {
            all[i * stride..i * stride + width].copy_from_slice(&before[i * width..(i + 1) * width]);
        }
        let memory = match dtype {
            DType::F32 => Memory::of(&all),
            DType::Bf16 => Memory::of(&bf16(&all)),
        };
        Self { rows, width, stride, dtype, before, memory }
    }

    pub fn matrix(&mut self) -> MatrixMut<'_> {
        let values = self.memory.view_mut(self.dtype);
        MatrixMut { values, rows: self.rows, width: self.width, stride: self.stride }
    }

    /// The values; guards must still stand.
    pub fn read(&self) -> Vec<f32> {
        let all = self.memory.view(self.dtype).to_f32();
        let mut values = Vec::new();
        for row in all.chunks(self.stride).take(self.rows) {
            values.extend_from_slice(&row[..self.width]);
            assert!(row[self.width..].iter().all(|&x| x == GUARD), "written behind the end of a row");
        }
        values
    }

    /// Holds the values to `factors(i, j)`, added to `others(i, j)`.
    pub fn check(
        &self,
        what: &str,
        others: impl Fn(usize, usize) -> f64,
        factors: impl Fn(usize, usize) -> Vec<(f64, f64)>,
    ) {
        check_sums(what, &self.read(), self.width, self.dtype, others, factors);
    }
}

/// Holds rows of `width` values to `factors(i, j)`: pairs whose products are summed, added to `others(i, j)`. The error of a
/// chain of f32 sums is less than its length times 2^-24 of the sum of all parts, with tensor cores that cut instead of
/// rounding twice as much; bf16 is off by 2^-8 at most.
pub fn check_sums(
    what: &str,
    values: &[f32],
    width: usize,
    dtype: DType,
    others: impl Fn(usize, usize) -> f64,
    factors: impl Fn(usize, usize) -> Vec<(f64, f64)>,
) {
    for (at, &got) in values.iter().enumerate() {
        let pairs = factors(at / width, at % width);
        let other = others(at / width, at % width);
        let want = other + pairs.iter().map(|(a, b)| a * b).sum::<f64>();
        let parts = other.abs() + pairs.iter().map(|(a, b)| (a * b).abs()).sum::<f64>();
        let sums = parts * (pairs.len() + 4) as f64 * f64::exp2(-23.0);
        let rounding = if dtype == DType::Bf16 { want.abs() * f64::exp2(-8.0) } else { 0.0 };
        let error = (f64::from(got) - want).abs();
        assert!(error <= sums + rounding, "{what}: ({}, {}) is {got}, needed {want}", at / width, at % width);
    }
}

/// Bits of an f32 or bf16 result.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

struct Product {
    x: Bf16Matrix,
    w: Bf16Matrix,
    bias: Bf16Matrix,
}

impl Product {
    fn new(m: usize, n: usize, k: usize) -> Self {
        Self { x: Bf16Matrix::new(1, m, k, k), w: Bf16Matrix::new(2, n, k, k), bias: Bf16Matrix::new(3, 1, n, n) }
    }

    fn run(&self, family: Family, y: &mut Written, bias: bool, add: bool) {
        let bias = bias.then(|| self.bias.memory.view(DType::Bf16));
        forward_by(family, self.x.matrix(), self.w.matrix(), bias, y.matrix(), add);
    }

    fn check(&self, what: &str, y: &Written, bias: bool, add: bool) {
        let others = |i: usize, j: usize| {
            let bias = if bias { self.bias.at(0, j) } else { 0.0 };
            bias + if add { f64::from(y.before[i * y.width + j]) } else { 0.0 }
        };
        y.check(what, others, |i, j| (0..self.x.width).map(|k| (self.x.at(i, k), self.w.at(j, k))).collect());
    }
}

#[test]
fn forward_equals_the_f64_product_in_every_family_and_dtype() {
    let (_gpu, _one) = device();
    let shapes =
        [(1, 1, 8), (2, 33, 24), (9, 65, 136), (16, 32, 128), (17, 64, 40), (31, 129, 16), (65, 31, 72), (130, 36, 32)];
    for (m, n, k) in shapes {
        let product = Product::new(m, n, k);
        for (i, family) in Family::ALL.into_iter().enumerate() {
            let dtypes = if i % 2 == 0 { [DType::Bf16, DType::F32] } else { [DType::F32, DType::Bf16] };
            for (dtype, (bias, add)) in dtypes.into_iter().zip([(true, true), (false, i >= 2)]) {
                let what = format!("({m}, {n}, {k}) {family:?} {dtype:?} bias {bias} add {add}");
                let mut y = Written::new(4, m, n, n, dtype);
                product.run(family, &mut y, bias, add);
                product.check(&what, &y, bias, add);
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_every_family_at_every_place_among_any_others() {
    let (_gpu, _one) = device();
    let (n, k) = (40, 136);
    let rows = *ROWS.last().expect("rows");
    let product = Product::new(rows, n, k);
    let mut all = Written::new(4, rows, n, n, DType::F32);
    product.run(Family::Rows16, &mut all, false, false);
    let all = bits(&all.read());
    for m in ROWS {
        for family in Family::ALL {
            // The last rows as well as the first, so that a row stands at another place of its tile.
            for first in if m < rows { vec![0, rows - m] } else { vec![0] } {
                let mut y = Written::new(5, m, n, n, DType::F32);
                forward_by(family, product.x.rows(first, m), product.w.matrix(), None, y.matrix(), false);
                assert_eq!(bits(&y.read()), all[first * n..(first + m) * n], "{m} rows from {first}, {family:?}");
            }
        }
    }
}

#[test]
fn a_finished_sum_is_added_in_one_rounding() {
    let (_gpu, _one) = device();
    let (m, n, k) = (5, 24, 48);
    let product = Product::new(m, n, k);
    for family in Family::ALL {
        let mut sum = Written::new(4, m, n, n, DType::F32);
        product.run(family, &mut sum, true, false);
        let mut y = Written::new(4, m, n, n, DType::Bf16);
        product.run(family, &mut y, true, true);
        let want: Vec<f32> = y.before.iter().zip(sum.read()).map(|(before, sum)| before + sum).collect();
        assert_eq!(y.read(), rounded(&want), "{family:?}");
    }
}

/// Holds a sum onto a matrix apart from its result to a copy and a sum in place, bit for bit: `onto` and `in_place` are given
/// (c, y) and y, and whether there is a bias. c begins at any multiple of its values, and stays as it is.
pub fn onto_is_a_copy_and_a_sum(
    (m, n): (usize, usize),
    dtype: DType,
    in_place: impl Fn(MatrixMut, bool),
    onto: impl Fn(Matrix, MatrixMut, bool),
) {
    for (gap, shift, bias) in [(0, 0, true), (4, 1, false), (3, 0, false), (4, 4, true)] {
        let what = format!("({m}, {n}) {dtype:?} gap {gap} shift {shift} bias {bias}");
        let mut want = Written::new(4, m, n, n + gap, dtype);
        let all = want.memory.view(dtype).to_f32();
        let shifted: Vec<f32> = [vec![GUARD; shift], all].concat();
        let c = if dtype == DType::F32 { Memory::of(&shifted) } else { Memory::of(&bf16(&shifted)) };
        in_place(want.matrix(), bias);
        let mut got = Written::new(6, m, n, n + gap, dtype);
        let values = c.view(dtype).part(shift..shifted.len());
        onto(Matrix { values, rows: m, width: n, stride: n + gap }, got.matrix(), bias);
        assert_eq!(bits(&got.read()), bits(&want.read()), "{what}");
        assert_eq!(c.view(dtype).to_f32(), shifted, "{what}: c has changed");
    }
}

#[test]
fn a_sum_onto_another_matrix_is_a_copy_and_a_sum_in_place() {
    let (_gpu, _one) = device();
    let (n, k) = (44, 40);
    for (i, (m, family)) in [9, 40, 70, 130].into_iter().zip(Family::ALL).enumerate() {
        let Product { x, w, bias } = Product::new(m, n, k);
        let bias = |has: bool| has.then(|| bias.memory.view(DType::Bf16));
        onto_is_a_copy_and_a_sum(
            (m, n),
            [DType::Bf16, DType::F32][i % 2],
            |y, has| forward_by(family, x.matrix(), w.matrix(), bias(has), y, true),
            |c, y, has| forward_onto_by(family, c, x.matrix(), w.matrix(), bias(has), y),
        );
    }
}

#[test]
#[should_panic(expected = "matmul::forward: rows of c are 40 values apart, those of y 48")]
fn a_sum_onto_a_matrix_of_other_strides_is_refused() {
    let (_gpu, _one) = device();
    let (x, w, c) = (Bf16Matrix::new(1, 3, 24, 24), Bf16Matrix::new(2, 40, 24, 24), Bf16Matrix::new(3, 3, 40, 40));
    let mut y = Written::new(4, 3, 40, 48, DType::Bf16);
    forward_onto_by(Family::Rows16, c.matrix(), x.matrix(), w.matrix(), None, y.matrix());
}

#[test]
fn forward_does_not_look_between_rows_nor_write_there() {
    let (_gpu, _one) = device();
    for (m, n, k, gap) in [(3, 30, 24, 1), (18, 32, 40, 4), (66, 64, 32, 5)] {
        let product = Product {
            x: Bf16Matrix::new(1, m, k, k + 16),
            w: Bf16Matrix::new(2, n, k, k + 8),
            bias: Bf16Matrix::new(3, 1, n, n),
        };
        for family in Family::ALL {
            for dtype in [DType::Bf16, DType::F32] {
                let mut y = Written::new(4, m, n, n + gap, dtype);
                product.run(family, &mut y, true, true);
                product.check(&format!("({m}, {n}, {k}) {family:?} {dtype:?}"), &y, true, true);
            }
        }
    }
}

#[test]
fn forward_is_the_same_in_every_order_of_threads() {
    drop(device());
    for (family, m, n, k) in [
        (Family::Rows16, 9, 40, 648),
        (Family::Rows32, 20, 72, 520),
        (Family::Rows64, 70, 40, 392),
        (Family::Rows128, 130, 24, 232),
    ] {
        let product = Product::new(m, n, k);
        in_every_order(|| {
            let mut y = Written::new(4, m, n, n, DType::Bf16);
            product.run(family, &mut y, true, false);
            product.check(&format!("{family:?}"), &y, true, false);
        });
    }
}

#[test]
fn the_family_is_a_function_of_shapes_and_large_tiles_are_for_many() {
    let of = |m| Family::of(m, 4096);
    let few = [1, 16, 17, 32, 33, 64].map(of);
    let [a, b, c] = [Family::Rows16, Family::Rows32, Family::Rows64];
    assert_eq!(few, [a, a, b, b, c, c]);
    assert_eq!([of(65), of(512), of(640), of(8192)], [c, c, Family::Rows128, Family::Rows128]);
    assert_eq!(Family::of(8192, 128), c, "64 large tiles do not fill a GPU");
}

/// (m, n, k): n odd and even, every tail.
const GRADIENTS: [(usize, usize, usize); 6] =
    [(1, 1, 8), (3, 33, 24), (65, 40, 72), (17, 131, 136), (130, 24, 16), (72, 67, 128)];

#[test]
fn the_gradient_of_the_input_equals_f64_whatever_stands_behind_rows_of_dy() {
    let (_gpu, _one) = device();
    for (m, n, k) in GRADIENTS {
        let dy = Bf16Matrix::new(1, m, n, n.next_multiple_of(8) + 8);
        let w = Bf16Matrix::new(2, n, k, k);
        let mut sizes = Vec::new();
        for (size, add) in Size::ALL.into_iter().flat_map(|size| [(size, false), (size, true)]) {
            let mut dx = Written::new(3, m, k, k + 8, DType::Bf16);
            backward_input_by(size, dy.matrix(), w.matrix(), dx.matrix(), add);
            let others = |i: usize, j: usize| if add { f64::from(dx.before[i * k + j]) } else { 0.0 };
            dx.check(&format!("({m}, {n}, {k}) {size:?} add {add}"), others, |i, j| {
                (0..n).map(|r| (dy.at(i, r), w.at(r, j))).collect()
            });
            sizes.push(bits(&dx.read()));
        }
        assert_eq!(sizes[..2], sizes[2..], "({m}, {n}, {k}): tiles of both sizes");
    }
}

#[test]
fn the_gradient_of_the_weight_is_added_and_equals_f64() {
    let (_gpu, _one) = device();
    for (m, n, k) in GRADIENTS {
        let dy = Bf16Matrix::new(1, m, n, n.next_multiple_of(8));
        let x = Bf16Matrix::new(2, m, k, k + 8);
        let mut sizes = Vec::new();
        for size in Size::ALL {
            let mut dw = Written::new(3, n, k, k + 3, DType::F32);
            backward_weight_by(size, dy.matrix(), x.matrix(), dw.matrix());
            dw.check(
                &format!("({m}, {n}, {k}) {size:?}"),
                |i, j| f64::from(dw.before[i * k + j]),
                |i, j| (0..m).map(|r| (dy.at(r, i), x.at(r, j))).collect(),
            );
            sizes.push(bits(&dw.read()));
        }
        assert_eq!(sizes[0], sizes[1], "({m}, {n}, {k}): tiles of both sizes");
    }
}

#[test]
fn the_gradient_of_the_bias_is_added_and_equals_f64() {
    in_every_order(|| {
        for (m, n) in [(1, 1), (3, 33), (64, 32), (200, 71)] {
            let dy = Bf16Matrix::new(1, m, n, n.next_multiple_of(8));
            let mut db = Written::new(2, 1, n, n, DType::F32);
            backward_bias(dy.matrix(), db.memory.view_mut(DType::F32));
            let column = |_: usize, j: usize| (0..m).map(|r| (dy.at(r, j), 1.0)).collect();
            db.check(&format!("({m}, {n})"), |_, j| f64::from(db.before[j]), column);
        }
    });
}

#[test]
fn gradients_are_the_same_in_every_order_of_threads() {
    drop(device());
    let (m, n, k) = (200, 135, 72);
    let dy = Bf16Matrix::new(1, m, n, n.next_multiple_of(8));
    let (x, w) = (Bf16Matrix::new(2, m, k, k), Bf16Matrix::new(3, n, k, k));
    for size in Size::ALL {
        in_every_order(|| {
            let mut dx = Written::new(4, 40, k, k, DType::Bf16);
            backward_input_by(size, dy.rows(100, 40), w.matrix(), dx.matrix(), false);
            dx.check("dx", |_, _| 0.0, |i, j| (0..n).map(|r| (dy.at(100 + i, r), w.at(r, j))).collect());
            let mut dw = Written::new(4, n, k, k, DType::F32);
            backward_weight_by(size, dy.matrix(), x.matrix(), dw.matrix());
            let others = |i: usize, j: usize| f64::from(dw.before[i * k + j]);
            dw.check("dW", others, |i, j| (0..m).map(|r| (dy.at(r, i), x.at(r, j))).collect());
        });
    }
}
