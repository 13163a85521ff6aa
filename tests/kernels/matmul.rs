//! y = x W^T and its gradients: compared with f64, and bitwise independent of tiles, positions and thread order.

use crate::{bf16, device, in_every_order, numbers, on_a_real_gpu, on_gpu, refused, rounded};
use rlhf_hpc::device::cuda::matmul::{
    Addend, Factor, Matrix, MatrixMut, Output, Tile, Way, backward_bias, backward_input, backward_weight, forward,
    forward_each, glu,
};
use rlhf_hpc::device::cuda::{self, Memory, gpu};
use rlhf_hpc::dtype::DType;
use rlhf_hpc::ops::glu::Activation;

pub const TILES: [Tile; 12] = [
    Tile::Rows16,
    Tile::Rows32,
    Tile::Rows64,
    Tile::Narrow32,
    Tile::Narrow64,
    Tile::Tall128,
    Tile::Rows128,
    Tile::Broad128,
    Tile::Wide64x32,
    Tile::Wide64x128,
    Tile::Wide128x128,
    Tile::Wide256x128,
];
/// The bounds of the kernel families in rows, and their tails.
const ROWS: [usize; 12] = [1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 129, 300];
/// The value of memory that must not be read: NaN.
const NAN: u16 = 0xffff;
/// The value of memory that must not be written.
const GUARD: f32 = 7.0;

/// The tiles that this GPU supports; an emulated GPU supports all.
pub fn supported(tiles: &[Tile]) -> Vec<Tile> {
    let all = !on_a_real_gpu() || gpu().properties().has_wgmma();
    tiles.iter().copied().filter(|tile| all || !Tile::WIDE.contains(tile)).collect()
}

/// Rows that begin `stride` apart, of a matrix of one row at least, with `between` between them.
fn apart<T: Copy>(values: &[T], width: usize, stride: usize, between: T) -> Vec<T> {
    let row = |i: usize| values.iter().copied().skip(i * width).take(width);
    let rows = values.len().checked_div(width).unwrap_or(0).max(1);
    (0..rows).flat_map(|i| row(i).chain(std::iter::repeat(between)).take(stride)).collect()
}

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
        let memory = Memory::from_values(&apart(&bf16(&values), width, stride, NAN));
        Self { rows, width, stride, values, memory }
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
        let all = apart(&before, width, stride, GUARD);
        let memory = on_gpu(dtype, &all);
        Self { rows, width, stride, dtype, before, memory }
    }

    pub fn matrix(&mut self) -> MatrixMut<'_> {
        let values = self.memory.view_mut(self.dtype);
        MatrixMut { values, rows: self.rows, width: self.width, stride: self.stride }
    }

    /// The values; guards must be intact.
    pub fn read(&self) -> Vec<f32> {
        let all = self.memory.view(self.dtype).to_f32();
        let mut values = Vec::new();
        for row in all.chunks(self.stride).take(self.rows) {
            values.extend_from_slice(&row[..self.width]);
            assert!(row[self.width..].iter().all(|&x| x == GUARD), "written past the end of a row");
        }
        values
    }

    /// Holds the values to `factors(i, j)`: pairs whose products are summed, added to `others(i, j)`. The error of a
    /// chain of f32 sums is less than its length times 2^-24 of the sum of all parts, with tensor cores that cut
    /// instead of rounding twice as much; bf16 is off by 2^-8 at most. cuBLASLt (fast) may round the sum to bf16 before
    /// it adds to it: seen with 13.1.
    pub fn check(
        &self,
        what: &str,
        is_fast: bool,
        others: impl Fn(usize, usize) -> f64,
        factors: impl Fn(usize, usize) -> Vec<(f64, f64)>,
    ) {
        for (at, got) in self.read().into_iter().enumerate() {
            let (i, j) = (at / self.width, at % self.width);
            let (pairs, other) = (factors(i, j), others(i, j));
            let want = other + pairs.iter().map(|(a, b)| a * b).sum::<f64>();
            let parts = other.abs() + pairs.iter().map(|(a, b)| (a * b).abs()).sum::<f64>();
            let sums = parts * (pairs.len() + 4) as f64 * f64::exp2(-23.0);
            // A bias and an addend are up to 1 each.
            let rounded = want.abs() + if is_fast { parts + 2.0 } else { 0.0 };
            let rounding = if self.dtype == DType::Bf16 { rounded * f64::exp2(-8.0) } else { 0.0 };
            let error = (f64::from(got) - want).abs();
            assert!(error <= sums + rounding, "{what}: ({i}, {j}) is {got}, needed {want}");
        }
    }
}

/// Bits of an f32 or bf16 result.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// The addend of a GEMM: the result, or nothing.
pub fn addend<'a>(add: bool) -> Addend<'a> {
    if add { Addend::Result } else { Addend::Nothing }
}

/// Compares a forward GEMM with f64. Nothing is read or written in the gaps between the rows of x, W and y.
pub fn forward_holds(
    (m, n, k): (usize, usize, usize),
    gaps: [usize; 3],
    dtype: DType,
    [has_bias, add]: [bool; 2],
    way: Way,
) {
    let (x, w) = (Bf16Matrix::new(1, m, k, k + gaps[0]), Bf16Matrix::new(2, n, k, k + gaps[1]));
    let bias = Bf16Matrix::new(3, 1, n, n);
    let mut y = Written::new(4, m, n, n + gaps[2], dtype);
    let given = has_bias.then(|| bias.memory.view(DType::Bf16));
    forward(way, x.matrix(), w.matrix(), given, addend(add), y.matrix());
    let others = |i: usize, j: usize| {
        let bias = if has_bias { bias.at(0, j) } else { 0.0 };
        bias + if add { f64::from(y.before[i * n + j]) } else { 0.0 }
    };
    let what = format!("({m}, {n}, {k}) {way:?} {dtype:?} bias {has_bias} add {add}");
    y.check(&what, matches!(way, Way::Fast), others, |i, j| (0..k).map(|c| (x.at(i, c), w.at(j, c))).collect());
}

/// Compares gradients with f64, for any values past the rows. Returns their bits.
pub fn gradients_hold((m, n, k): (usize, usize, usize), way: Way) -> Vec<Vec<u32>> {
    let (dy, x) = (Bf16Matrix::new(1, m, n, n.next_multiple_of(8) + 8), Bf16Matrix::new(2, m, k, k + 8));
    let w = Bf16Matrix::new(3, n, k, k);
    let what = format!("({m}, {n}, {k}) {way:?}");
    let mut all = Vec::new();
    for add in [false, true] {
        let mut dx = Written::new(4, m, k, k + 8, DType::Bf16);
        backward_input(way, dy.matrix(), w.matrix(), dx.matrix(), add);
        let others = |i: usize, j: usize| if add { f64::from(dx.before[i * k + j]) } else { 0.0 };
        let factors = |i: usize, j: usize| (0..n).map(|r| (dy.at(i, r), w.at(r, j))).collect();
        dx.check(&format!("dx of {what} add {add}"), matches!(way, Way::Fast), others, factors);
        all.push(bits(&dx.read()));
    }
    let mut dw = Written::new(5, n, k, k + 3, DType::F32);
    backward_weight(way, dy.matrix(), x.matrix(), dw.matrix());
    let factors = |i: usize, j: usize| (0..m).map(|r| (dy.at(r, i), x.at(r, j))).collect();
    dw.check(&format!("dW of {what}"), false, |i, j| f64::from(dw.before[i * k + j]), factors);
    all.push(bits(&dw.read()));
    all
}

#[test]
fn forward_equals_the_f64_product_in_every_family_dtype_and_order_of_threads() {
    in_every_order(|| {
        for (i, (shape, gaps)) in [
            ((1, 1, 8), [0, 0, 0]),
            ((2, 33, 24), [16, 8, 1]),
            ((9, 65, 136), [0, 0, 0]),
            ((16, 32, 128), [0, 0, 4]),
            ((17, 64, 40), [16, 8, 4]),
            ((31, 129, 16), [0, 0, 0]),
            ((65, 31, 72), [16, 8, 5]),
            ((130, 36, 32), [0, 0, 0]),
            ((20, 40, 648), [0, 0, 0]),
        ]
        .into_iter()
        .enumerate()
        {
            for (j, family) in supported(&TILES).into_iter().enumerate() {
                let dtypes = if (i + j) % 2 == 0 { [DType::Bf16, DType::F32] } else { [DType::F32, DType::Bf16] };
                for (dtype, with) in dtypes.into_iter().zip([[true, true], [false, j >= 2]]) {
                    forward_holds(shape, gaps, dtype, with, Way::Exact(family));
                }
            }
        }
    });
}

#[test]
fn a_row_has_the_same_bits_in_every_kernel_family_at_every_position_among_any_rows() {
    let (_gpu, _one) = device();
    let (n, k) = (40, 136);
    let rows = *ROWS.last().expect("rows");
    let (x, w) = (Bf16Matrix::new(1, rows, k, k), Bf16Matrix::new(2, n, k, k));
    let run = |family, first: usize, m: usize| {
        let mut y = Written::new(5, m, n, n, DType::F32);
        forward(Way::Exact(family), x.rows(first, m), w.matrix(), None, Addend::Nothing, y.matrix());
        bits(&y.read())
    };
    let all = run(Tile::Rows16, 0, rows);
    for (m, family) in ROWS.into_iter().flat_map(|m| supported(&TILES).into_iter().map(move |family| (m, family))) {
        // Both the first and the last rows, so that a row has another position in its tile.
        for first in [0, rows - m] {
            assert_eq!(run(family, first, m), all[first * n..(first + m) * n], "{m} rows from {first}, {family:?}");
        }
    }
}

#[test]
fn gemms_of_the_same_x_have_the_bits_of_separate_gemms() {
    let (_gpu, _one) = device();
    let k = 40;
    for (i, (m, family)) in
        [9, 17, 70, 33, 64, 130, 130, 130, 65, 70, 130, 300].into_iter().zip(supported(&TILES)).enumerate()
    {
        let (x, dtype, sizes) = (Bf16Matrix::new(1, m, k, k), [DType::Bf16, DType::F32][i % 2], [136, 24, 70]);
        let factors = sizes.map(|n| (Bf16Matrix::new(n as u32, n, k, k + 8), Bf16Matrix::new(3, 1, n, n)));
        let bias = |i: usize| (i != 1).then(|| factors[i].1.memory.view(DType::Bf16));
        let mut alone = sizes.map(|n| Written::new(4, m, n, n, dtype));
        let mut together = sizes.map(|n| Written::new(5, m, n, n, dtype));
        for (i, y) in alone.iter_mut().enumerate() {
            forward(Way::Exact(family), x.matrix(), factors[i].0.matrix(), bias(i), Addend::Nothing, y.matrix());
        }
        let mut at = 0..3;
        let outputs = together.each_mut().map(|y| {
            let i = at.next().expect("three products");
            Output { w: factors[i].0.matrix(), bias: bias(i), y: y.matrix() }
        });
        forward_each(Way::Exact(family), x.matrix(), outputs, Addend::Nothing);
        let [alone, together] = [alone, together].map(|all| all.map(|y| bits(&y.read())));
        assert_eq!(alone, together, "{family:?}");
    }
}

/// silu(gate) up of GEMMs with m rows and n columns, each GEMM and the gate in its own kernel.
fn activated(way: Way, x: Matrix, factors: [Factor; 2], n: usize) -> Vec<u32> {
    let (m, wide) = (x.rows, n.next_multiple_of(8));
    let [gate, up] = factors.map(|Factor { w, bias }| {
        let mut y = Written::new(4, m, n, wide, DType::Bf16);
        forward(way, x, w, bias, Addend::Nothing, y.matrix());
        y
    });
    let mut act = Written::new(5, m, n, wide, DType::Bf16);
    let [gate, up] = [&gate, &up].map(|y| y.memory.view(DType::Bf16));
    cuda::glu::forward(Activation::Silu, gate, up, act.memory.view_mut(DType::Bf16));
    let all = act.memory.view(DType::Bf16).to_f32();
    bits(&all.chunks(wide).flat_map(|row| &row[..n]).copied().collect::<Vec<_>>())
}

#[test]
fn the_fused_glu_has_the_bits_of_three_kernels() {
    let tiles = [Tile::Rows16, Tile::Rows32, Tile::Rows64, Tile::Narrow32, Tile::Narrow64];
    let shapes = [(1, 96, 64), (9, 33, 136), (17, 40, 8), (33, 7, 264), (64, 72, 40), (70, 31, 128)];
    in_every_order(|| {
        for (i, ((m, n, k), tile)) in shapes.into_iter().flat_map(|shape| tiles.map(|tile| (shape, tile))).enumerate() {
            let (x, gaps) = (Bf16Matrix::new(1, m, k, k + [0, 8][i % 2]), [0, 1, 4][i % 3]);
            let factors = [2, 3].map(|seed| (Bf16Matrix::new(seed, n, k, k + 8), Bf16Matrix::new(seed + 7, 1, n, n)));
            let biases = [[true, true], [false, false], [true, false], [false, true]][i % 4];
            let factor = |at: usize| Factor {
                w: factors[at].0.matrix(),
                bias: biases[at].then(|| factors[at].1.memory.view(DType::Bf16)),
            };
            let want = activated(Way::Exact(tile), x.matrix(), [factor(0), factor(1)], n);
            let mut act = Written::new(6, m, n, n + gaps, DType::Bf16);
            assert!(glu(Way::Exact(tile), Activation::Silu, x.matrix(), [factor(0), factor(1)], act.matrix()));
            assert_eq!(bits(&act.read()), want, "({m}, {n}, {k}) {tile:?} biases {biases:?}");
        }
    });
}

#[test]
fn the_glu_of_many_rows_uses_separate_kernels() {
    let (_gpu, _one) = device();
    let (x, w) = (Bf16Matrix::new(1, 9, 24, 24), Bf16Matrix::new(2, 40, 24, 24));
    let (factor, mut act) = (Factor { w: w.matrix(), bias: None }, Written::new(3, 9, 40, 40, DType::Bf16));
    let large = [Tile::Rows128, Tile::Broad128].into_iter().chain(Tile::WIDE).map(Way::Exact);
    assert!(!large.chain([Way::Fast]).any(|way| glu(way, Activation::Silu, x.matrix(), [factor; 2], act.matrix())));
    assert_eq!(act.read(), act.before);
}

#[test]
fn a_finished_sum_is_added_in_one_rounding() {
    let (_gpu, _one) = device();
    let (m, n, k) = (5, 24, 48);
    let (x, w, bias) = (Bf16Matrix::new(1, m, k, k), Bf16Matrix::new(2, n, k, k), Bf16Matrix::new(3, 1, n, n));
    for family in supported(&TILES) {
        let [(sum, _), (got, before)] = [(DType::F32, false), (DType::Bf16, true)].map(|(dtype, add)| {
            let mut y = Written::new(4, m, n, n, dtype);
            let bias = Some(bias.memory.view(DType::Bf16));
            forward(Way::Exact(family), x.matrix(), w.matrix(), bias, addend(add), y.matrix());
            (y.read(), y.before)
        });
        let want: Vec<f32> = before.iter().zip(sum).map(|(before, sum)| before + sum).collect();
        assert_eq!(got, rounded(&want), "{family:?}");
    }
}

/// Holds a sum onto a matrix apart from its result to a copy and a sum in place: bit for bit, or `within` that share of
/// the largest value. `onto` and `in_place` are given (c, y) and y, and whether there is a bias. c begins at any
/// multiple of its values, and stays as it is.
pub fn onto_is_a_copy_and_a_sum(
    (m, n): (usize, usize),
    dtype: DType,
    within: f32,
    in_place: impl Fn(MatrixMut, bool),
    onto: impl Fn(Matrix, MatrixMut, bool),
) {
    for (gap, shift, bias) in [(0, 0, true), (4, 1, false), (3, 0, false), (4, 4, true)] {
        let what = format!("({m}, {n}) {dtype:?} gap {gap} shift {shift} bias {bias}");
        let mut want = Written::new(4, m, n, n + gap, dtype);
        let all = want.memory.view(dtype).to_f32();
        let shifted: Vec<f32> = [vec![GUARD; shift], all].concat();
        let c = on_gpu(dtype, &shifted);
        in_place(want.matrix(), bias);
        let mut got = Written::new(6, m, n, n + gap, dtype);
        let values = c.view(dtype).part(shift..shifted.len());
        onto(Matrix { values, rows: m, width: n, stride: n + gap }, got.matrix(), bias);
        let (got, want) = (got.read(), want.read());
        let largest = want.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
        let is_near = got.iter().zip(&want).all(|(got, want)| (got - want).abs() <= within * largest);
        assert!(is_near, "{what}: {got:?} against {want:?}");
        assert_eq!(c.view(dtype).to_f32(), shifted, "{what}: c has changed");
    }
}

#[test]
fn a_gemm_added_to_another_matrix_equals_a_copy_and_a_gemm_added_in_place() {
    let (_gpu, _one) = device();
    let (n, k) = (44, 40);
    for (i, (m, family)) in
        [9, 40, 70, 33, 70, 130, 130, 130, 65, 70, 130, 300].into_iter().zip(supported(&TILES)).enumerate()
    {
        let (x, w, bias) = (Bf16Matrix::new(1, m, k, k), Bf16Matrix::new(2, n, k, k), Bf16Matrix::new(3, 1, n, n));
        let bias = |has: bool| has.then(|| bias.memory.view(DType::Bf16));
        onto_is_a_copy_and_a_sum(
            (m, n),
            [DType::Bf16, DType::F32][i % 2],
            0.0,
            |y, has| forward(Way::Exact(family), x.matrix(), w.matrix(), bias(has), Addend::Result, y),
            |c, y, has| forward(Way::Exact(family), x.matrix(), w.matrix(), bias(has), Addend::Matrix(c), y),
        );
    }
}

#[test]
fn matrices_with_unsupported_strides_are_rejected() {
    let (_gpu, _one) = device();
    let (x, [gate, up]) = (Bf16Matrix::new(1, 3, 24, 24), [24, 32].map(|stride| Bf16Matrix::new(2, 40, 24, stride)));
    let (c, mut y) = (Bf16Matrix::new(3, 3, 40, 40), Written::new(4, 3, 40, 48, DType::Bf16));
    let (way, factors) = (Way::Exact(Tile::Rows16), [&gate, &up].map(|w| Factor { w: w.matrix(), bias: None }));
    refused("matmul::glu: W of gate has row stride 24, W of up has 32", || {
        glu(way, Activation::Silu, x.matrix(), factors, y.matrix());
    });
    refused("matmul::forward: c has row stride 40, y has 48", || {
        forward(way, x.matrix(), gate.matrix(), None, Addend::Matrix(c.matrix()), y.matrix());
    });
}

#[test]
fn added_gradients_equal_f64_and_have_equal_bits_for_all_tile_sizes_and_thread_orders() {
    let first = std::cell::OnceCell::new();
    // Odd and even n, and every tail.
    let shapes = [(1, 1, 8), (3, 33, 24), (65, 40, 72), (17, 131, 136), (130, 24, 16), (72, 67, 128), (200, 135, 72)];
    in_every_order(|| {
        let of = |size| shapes.map(|shape| gradients_hold(shape, Way::Exact(size)));
        let sizes: Vec<_> = supported(&Tile::OF_GRADIENTS).into_iter().map(of).collect();
        assert!(sizes.iter().all(|size| *size == sizes[0]), "tiles of all sizes");
        assert!(*first.get_or_init(|| sizes.clone()) == sizes, "another order");
        for (m, n) in [(1, 1), (3, 33), (64, 32), (200, 71)] {
            let dy = Bf16Matrix::new(1, m, n, n.next_multiple_of(8));
            let mut db = Written::new(2, 1, n, n, DType::F32);
            backward_bias(dy.matrix(), db.memory.view_mut(DType::F32));
            let column = |_: usize, j: usize| (0..m).map(|r| (dy.at(r, j), 1.0)).collect();
            db.check(&format!("({m}, {n})"), false, |_, j| f64::from(db.before[j]), column);
        }
    });
}
