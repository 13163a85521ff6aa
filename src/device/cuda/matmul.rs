//! y = x W^T and its gradients, in our own kernels: every output is one chain of tensor core steps, so its bits depend neither
//! on m, nor on its row's position, nor on the tiles that were chosen. W is row-major [n][k].
//!
//! In the `fast` mode products of many rows are cuBLASLt's instead, and promise none of that.

use super::fast::{self, Call, Form};
use super::gpu::{Arg, gpu};
use super::memory::{View, ViewMut};
use super::shape::dim;
use crate::dtype::DType;

/// A matrix on the GPU: `rows` of `width` values, `stride` values from row to row.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    pub values: View<'a>,
    pub rows: usize,
    pub width: usize,
    pub stride: usize,
}

/// A matrix that is written.
#[derive(Debug)]
pub struct MatrixMut<'a> {
    pub values: ViewMut<'a>,
    pub rows: usize,
    pub width: usize,
    pub stride: usize,
}

impl<'a> Matrix<'a> {
    /// Rows without gaps.
    pub fn new(values: View<'a>, rows: usize, width: usize) -> Self {
        Self { values, rows, width, stride: width }
    }
}

impl<'a> MatrixMut<'a> {
    /// Rows without gaps.
    pub fn new(values: ViewMut<'a>, rows: usize, width: usize) -> Self {
        Self { values, rows, width, stride: width }
    }
}

/// Tiles of a forward kernel, by rows of y.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    Rows16,
    Rows32,
    Rows64,
    Rows128,
}

impl Family {
    pub const ALL: [Self; 4] = [Self::Rows16, Self::Rows32, Self::Rows64, Self::Rows128];

    /// The family for a product of m rows and n columns.
    ///
    /// Few rows: the time is that of reading W, and the smallest tile that holds all rows wastes least. Many: as in [`Size`].
    pub fn of(m: usize, n: usize) -> Self {
        match m {
            0..=16 => Self::Rows16,
            17..=32 => Self::Rows32,
            65.. if Size::of(m, n) == Size::Large => Self::Rows128,
            _ => Self::Rows64,
        }
    }

    fn tile(self) -> Tile {
        match self {
            Self::Rows16 => Tile { rows: 16, columns: 32, threads: 64, shared_bytes: 6 * (16 + 32) * 128 * 2 },
            Self::Rows32 => Tile { rows: 32, columns: 64, threads: 128, shared_bytes: 6 * (32 + 64) * 64 * 2 },
            Self::Rows64 => Size::Small.tile(),
            Self::Rows128 => Size::Large.tile(),
        }
    }

    fn kernel(self, y: DType) -> &'static str {
        match (self, y) {
            (Self::Rows16, DType::Bf16) => "matmul_forward_16",
            (Self::Rows16, DType::F32) => "matmul_forward_f32_16",
            (Self::Rows32, DType::Bf16) => "matmul_forward_32",
            (Self::Rows32, DType::F32) => "matmul_forward_f32_32",
            (Self::Rows64, DType::Bf16) => "matmul_forward_64",
            (Self::Rows64, DType::F32) => "matmul_forward_f32_64",
            (Self::Rows128, DType::Bf16) => "matmul_forward_128",
            (Self::Rows128, DType::F32) => "matmul_forward_f32_128",
        }
    }
}

/// A tile as `matmul.cu` and `matmul_backward.cu` have it: stages of slices of rows and columns, two bytes a value.
#[derive(Clone, Copy, Debug)]
struct Tile {
    rows: usize,
    columns: usize,
    threads: usize,
    shared_bytes: usize,
}

/// Tiles of many rows. Large ones compute more per byte, small ones fill the GPU: two large ones run on each of an A100's 108
/// multiprocessors at a time, and about two thirds of that is where they begin to win (reckoned, not measured).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// 64 x 64
    Small,
    /// 128 x 128
    Large,
}

/// Large tiles from which they are used.
const LARGE_FROM: usize = 144;

impl Size {
    pub const ALL: [Self; 2] = [Self::Small, Self::Large];

    /// Large where there are enough of them.
    pub fn of(rows: usize, columns: usize) -> Self {
        if Self::Large.tile().blocks(rows, columns) >= LARGE_FROM { Self::Large } else { Self::Small }
    }

    fn tile(self) -> Tile {
        match self {
            Self::Small => Tile { rows: 64, columns: 64, threads: 128, shared_bytes: 5 * (64 + 64) * 64 * 2 },
            Self::Large => Tile { rows: 128, columns: 128, threads: 128, shared_bytes: 4 * (128 + 128) * 32 * 2 },
        }
    }
}

impl Tile {
    fn blocks(&self, rows: usize, columns: usize) -> usize {
        rows.div_ceil(self.rows) * columns.div_ceil(self.columns)
    }

    fn launch(&self, kernel: &'static str, blocks: usize, args: &[Arg]) {
        gpu().launch(kernel, [blocks, 1, 1], self.threads, self.shared_bytes, args);
    }
}

/// Who computes a product.
#[derive(Clone, Copy, Debug)]
enum Way {
    Exact(Family),
    /// cuBLASLt.
    Fast,
}

/// What a finished sum is added to.
#[derive(Clone, Copy, Debug)]
enum Addend<'a> {
    Nothing,
    /// What the result holds.
    Result,
    /// A matrix apart from the result, of its shape, stride and dtype.
    Matrix(Matrix<'a>),
}

impl Addend<'_> {
    fn result(add: bool) -> Self {
        if add { Self::Result } else { Self::Nothing }
    }
}

/// y[m][n] (+)= sum_k x[m][k] W[n][k] + bias[n]; x, W and bias bf16, y bf16 or f32; k a multiple of 8. With `add` the
/// finished sum is added to what y holds; y is rounded once.
pub fn forward(x: Matrix, w: Matrix, bias: Option<View>, y: MatrixMut, add: bool) {
    forward_with(way(x, w, bias, &y), x, w, bias, Addend::result(add), y);
}

/// y[m][n] = c[m][n] + (sum_k x[m][k] W[n][k] + bias[n]), with the bits of a copy of c to y and `forward` with `add`. c has the
/// shape, stride and dtype of y and shares no memory with it, as their borrows say.
pub fn forward_onto(c: Matrix, x: Matrix, w: Matrix, bias: Option<View>, y: MatrixMut) {
    forward_with(way(x, w, bias, &y), x, w, bias, Addend::Matrix(c), y);
}

/// `forward` by cuBLASLt, whatever m is; y is bf16 where there is a bias.
pub fn forward_fast(x: Matrix, w: Matrix, bias: Option<View>, y: MatrixMut, add: bool) {
    forward_with(Way::Fast, x, w, bias, Addend::result(add), y);
}

/// `forward_onto` by cuBLASLt, as `forward_fast`.
pub fn forward_onto_fast(c: Matrix, x: Matrix, w: Matrix, bias: Option<View>, y: MatrixMut) {
    forward_with(Way::Fast, x, w, bias, Addend::Matrix(c), y);
}

/// `forward` in tiles of one family, whatever m is: the same bits.
pub fn forward_by(family: Family, x: Matrix, w: Matrix, bias: Option<View>, y: MatrixMut, add: bool) {
    forward_with(Way::Exact(family), x, w, bias, Addend::result(add), y);
}

/// `forward_onto` in tiles of one family, whatever m is: the same bits.
pub fn forward_onto_by(family: Family, c: Matrix, x: Matrix, w: Matrix, bias: Option<View>, y: MatrixMut) {
    forward_with(Way::Exact(family), x, w, bias, Addend::Matrix(c), y);
}

fn way(x: Matrix, w: Matrix, bias: Option<View>, y: &MatrixMut) -> Way {
    // cuBLASLt adds a bias of the result's own dtype.
    let is_fast = fast::takes(x.rows) && (bias.is_none() || y.values.dtype() == DType::Bf16);
    if is_fast { Way::Fast } else { Way::Exact(Family::of(x.rows, w.rows)) }
}

fn forward_with(way: Way, x: Matrix, w: Matrix, bias: Option<View>, c: Addend, mut y: MatrixMut) {
    const OP: &str = "matmul::forward";
    let (m, n, k) = (x.rows, w.rows, w.width);
    let (dtype, has_bias) = (y.values.dtype(), bias.is_some());
    let x_arg = read(OP, "x", x, m, k);
    let [w_arg, bias_arg, y_arg] = product(OP, m, k, w, bias, &mut y, dtype);
    let addend = match c {
        Addend::Nothing => None,
        Addend::Result => Some(y_arg),
        Addend::Matrix(c) => {
            assert!(c.stride == y.stride, "{OP}: rows of c are {} values apart, those of y {}", c.stride, y.stride);
            check(OP, "c", (c.rows, c.width, c.stride), (m, n), c.values.len(), n);
            Some(c.values.arg(dtype))
        }
    };
    let family = match way {
        Way::Exact(family) => family,
        Way::Fast => {
            return fast::start(Call {
                form: Form::Forward,
                mnk: [m, n, k],
                strides: [w.stride, x.stride, y.stride],
                factors: [w_arg, x_arg],
                addend,
                result: y_arg,
                dtype,
                bias: has_bias.then_some(bias_arg),
            });
        }
    };
    let dims = [m, n, k, x.stride, w.stride, y.stride].map(|n| dim(OP, n));
    let [m_arg, n_arg, k_arg, x_stride, w_stride, y_stride] = dims;
    let c_arg = addend.unwrap_or(Arg::Address(0));
    let args = [x_arg, w_arg, bias_arg, c_arg, y_arg, m_arg, n_arg, k_arg, x_stride, w_stride, y_stride];
    let tile = family.tile();
    tile.launch(family.kernel(dtype), tile.blocks(m, n), &args);
}

/// The arguments W, bias and y of a product of (m, k) values.
fn product(op: &str, m: usize, k: usize, w: Matrix, bias: Option<View>, y: &mut MatrixMut, dtype: DType) -> [Arg; 3] {
    let n = w.rows;
    let w_arg = read(op, "W", w, n, k);
    assert!(k.is_multiple_of(8), "{op}: rows of x and W have {k} values, needed a multiple of 8");
    let bias = bias.map_or(Arg::Address(0), |bias| {
        assert!(bias.len() == n, "{op}: bias has {} values, needed {n}", bias.len());
        bias.arg(DType::Bf16)
    });
    [w_arg, bias, written(op, "y", y, m, n, dtype)]
}

/// dx[m][k] (+)= sum_n dy[m][n] W[n][k], all bf16; k a multiple of 8, n anything: dy's stride is a multiple of 8 then, and
/// what stands behind the n values of a row is not used.
pub fn backward_input(dy: Matrix, w: Matrix, dx: MatrixMut, add: bool) {
    if fast::takes(dy.rows) {
        backward_input_fast(dy, w, dx, add);
    } else {
        backward_input_by(Size::of(dy.rows, w.width), dy, w, dx, add);
    }
}

/// `backward_input` by cuBLASLt, whatever m is.
pub fn backward_input_fast(dy: Matrix, w: Matrix, mut dx: MatrixMut, add: bool) {
    let ([m, n, k], [dy_arg, w_arg, dx_arg]) = input_args(dy, w, &mut dx);
    fast::start(Call {
        form: Form::Input,
        mnk: [m, n, k],
        strides: [w.stride, dy.stride, dx.stride],
        factors: [w_arg, dy_arg],
        addend: add.then_some(dx_arg),
        result: dx_arg,
        dtype: DType::Bf16,
        bias: None,
    });
}

const INPUT: &str = "matmul::backward_input";

/// m, n, k and the arguments dy, W, dx.
fn input_args(dy: Matrix, w: Matrix, dx: &mut MatrixMut) -> ([usize; 3], [Arg; 3]) {
    let (m, n, k) = (dy.rows, w.rows, w.width);
    let dy_arg = read(INPUT, "dy", dy, m, n);
    let w_arg = read(INPUT, "W", w, n, k);
    let dx_arg = written(INPUT, "dx", dx, m, k, DType::Bf16);
    assert!(k.is_multiple_of(8), "{INPUT}: rows of W have {k} values, needed a multiple of 8");
    ([m, n, k], [dy_arg, w_arg, dx_arg])
}

/// `backward_input` in tiles of one size: the same bits.
pub fn backward_input_by(size: Size, dy: Matrix, w: Matrix, mut dx: MatrixMut, add: bool) {
    let ([m, n, k], [dy_arg, w_arg, dx_arg]) = input_args(dy, w, &mut dx);
    let kernel = match (size, n.is_multiple_of(8)) {
        (Size::Small, true) => "matmul_backward_input_64",
        (Size::Small, false) => "matmul_backward_input_ragged_64",
        (Size::Large, true) => "matmul_backward_input_128",
        (Size::Large, false) => "matmul_backward_input_ragged_128",
    };
    let [m_arg, n_arg, k_arg, dy_stride, w_stride, dx_stride] =
        [m, n, k, dy.stride, w.stride, dx.stride].map(|n| dim(INPUT, n));
    let add = Arg::I32(i32::from(add));
    let args = [dy_arg, w_arg, dx_arg, m_arg, n_arg, k_arg, dy_stride, w_stride, dx_stride, add];
    let tile = size.tile();
    tile.launch(kernel, tile.blocks(m, k), &args);
}

/// dW[n][k] += sum_m dy[m][n] x[m][k]; dy and x bf16, dW f32; k a multiple of 8, n anything (as in `backward_input`).
pub fn backward_weight(dy: Matrix, x: Matrix, dw: MatrixMut) {
    if fast::takes(dy.rows) {
        backward_weight_fast(dy, x, dw);
    } else {
        backward_weight_by(Size::of(dy.width, x.width), dy, x, dw);
    }
}

/// `backward_weight` by cuBLASLt, whatever m is.
pub fn backward_weight_fast(dy: Matrix, x: Matrix, mut dw: MatrixMut) {
    let ([m, n, k], [dy_arg, x_arg, dw_arg]) = weight_args(dy, x, &mut dw);
    fast::start(Call {
        form: Form::Weight,
        mnk: [m, n, k],
        strides: [x.stride, dy.stride, dw.stride],
        factors: [x_arg, dy_arg],
        addend: Some(dw_arg),
        result: dw_arg,
        dtype: DType::F32,
        bias: None,
    });
}

const WEIGHT: &str = "matmul::backward_weight";

/// m, n, k and the arguments dy, x, dW.
fn weight_args(dy: Matrix, x: Matrix, dw: &mut MatrixMut) -> ([usize; 3], [Arg; 3]) {
    let (m, n, k) = (dy.rows, dy.width, x.width);
    let dy_arg = read(WEIGHT, "dy", dy, m, n);
    let x_arg = read(WEIGHT, "x", x, m, k);
    let dw_arg = written(WEIGHT, "dW", dw, n, k, DType::F32);
    assert!(k.is_multiple_of(8), "{WEIGHT}: rows of x have {k} values, needed a multiple of 8");
    ([m, n, k], [dy_arg, x_arg, dw_arg])
}

/// `backward_weight` in tiles of one size: the same bits.
pub fn backward_weight_by(size: Size, dy: Matrix, x: Matrix, mut dw: MatrixMut) {
    let ([m, n, k], [dy_arg, x_arg, dw_arg]) = weight_args(dy, x, &mut dw);
    if m == 0 {
        return;
    }
    let kernel = match size {
        Size::Small => "matmul_backward_weight_64",
        Size::Large => "matmul_backward_weight_128",
    };
    let [m_arg, n_arg, k_arg, dy_stride, x_stride, dw_stride] =
        [m, n, k, dy.stride, x.stride, dw.stride].map(|n| dim(WEIGHT, n));
    let args = [dy_arg, x_arg, dw_arg, m_arg, n_arg, k_arg, dy_stride, x_stride, dw_stride];
    let tile = size.tile();
    tile.launch(kernel, tile.blocks(n, k), &args);
}

/// db[n] += sum_m dy[m][n]; dy bf16, db f32.
pub fn backward_bias(dy: Matrix, mut db: ViewMut) {
    const OP: &str = "matmul::backward_bias";
    let (m, n) = (dy.rows, dy.width);
    let dy_arg = read(OP, "dy", dy, m, n);
    assert!(db.len() == n, "{OP}: db has {} values, needed {n}", db.len());
    let args = [dy_arg, db.arg(DType::F32), dim(OP, m), dim(OP, n), dim(OP, dy.stride)];
    gpu().launch("matmul_backward_bias", [n.div_ceil(32), 1, 1], 256, 0, &args);
}

/// The argument of a bf16 matrix that is read in pieces of 16 bytes.
fn read(op: &str, what: &str, matrix: Matrix, rows: usize, width: usize) -> Arg {
    let Matrix { values, stride, .. } = matrix;
    check(op, what, (matrix.rows, matrix.width, stride), (rows, width), values.len(), width.next_multiple_of(8));
    assert!(stride.is_multiple_of(8), "{op}: rows of {what} are {stride} values apart, needed a multiple of 8");
    let arg = values.arg(DType::Bf16);
    let aligned = matches!(arg, Arg::Address(address) if address.is_multiple_of(16));
    assert!(aligned, "{op}: {what} does not begin at a multiple of 16 bytes");
    arg
}

fn written(op: &str, what: &str, matrix: &mut MatrixMut, rows: usize, width: usize, dtype: DType) -> Arg {
    check(op, what, (matrix.rows, matrix.width, matrix.stride), (rows, width), matrix.values.len(), width);
    matrix.values.arg(dtype)
}

/// Holds a matrix of (rows, width, stride) to what is needed; its last row takes `row_end` values of `len`.
fn check(op: &str, what: &str, got: (usize, usize, usize), needed: (usize, usize), len: usize, row_end: usize) {
    let (rows, width, stride) = got;
    assert!((rows, width) == needed, "{op}: {what} is ({rows}, {width}), needed {needed:?}");
    assert!(stride >= width, "{op}: rows of {what} are {stride} values apart, needed at least {width}");
    let end = rows.checked_sub(1).map_or(0, |last| last * stride + row_end);
    assert!(len >= end, "{op}: {what} has {len} values, needed {end}");
}
