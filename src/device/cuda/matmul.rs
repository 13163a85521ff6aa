//! y = x W^T and its gradients, in our own kernels. Every output is one chain of tensor core steps, so its bits depend
//! neither on m, nor on its row's position, nor on the choice of tiles. W is row-major [n][k].
//!
//! In the `fast` mode cuBLASLt computes GEMMs of many rows instead, without that guarantee.

use super::fast::{self, Call, Form};
use super::gpu::{Arg, gpu};
use super::memory::{View, ViewMut};
use super::shape::{dim, is_aligned};
use crate::device::cpu::glu::Activation;
use crate::dtype::DType;

/// A matrix on the GPU: `rows` of `width` values, `stride` values from row to row.
#[derive(Clone, Copy, Debug)]
pub struct MatrixOf<V> {
    pub values: V,
    pub rows: usize,
    pub width: usize,
    pub stride: usize,
}

pub type Matrix<'a> = MatrixOf<View<'a>>;
/// A matrix that is written.
pub type MatrixMut<'a> = MatrixOf<ViewMut<'a>>;

impl<V> MatrixOf<V> {
    /// Rows without gaps.
    pub fn new(values: V, rows: usize, width: usize) -> Self {
        Self { values, rows, width, stride: width }
    }
}

/// The tiles of our own kernels in `matmul.cu` and `matmul_backward.cu`. Gradients support the tiles in `OF_GRADIENTS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tile {
    /// 16 x 32
    Rows16,
    /// 32 x 64
    Rows32,
    /// 64 x 64
    Rows64,
    /// 32 x 32 and 64 x 32: for few columns, so that twice as many blocks read.
    Narrow32,
    Narrow64,
    /// 128 x 64
    Tall128,
    /// 128 x 128
    Rows128,
    /// 128 x 256
    Broad128,
    /// Tiles that four warps multiply together on sm_90a.
    Wide64x32,
    Wide64x128,
    Wide128x128,
    Wide256x128,
}

/// The kernel for a tile, whose name ends with it.
macro_rules! kernel_of_tile {
    ($name:literal, $tile:expr) => {
        match $tile {
            Tile::Rows16 => concat!($name, "16"),
            Tile::Rows32 => concat!($name, "32"),
            Tile::Rows64 => concat!($name, "64"),
            Tile::Narrow32 => concat!($name, "narrow_32"),
            Tile::Narrow64 => concat!($name, "narrow_64"),
            Tile::Tall128 => concat!($name, "tall_128"),
            Tile::Rows128 => concat!($name, "128"),
            Tile::Broad128 => concat!($name, "broad_128"),
            Tile::Wide64x32 => concat!($name, "64x32"),
            Tile::Wide64x128 => concat!($name, "64x128"),
            Tile::Wide128x128 => concat!($name, "128x128"),
            Tile::Wide256x128 => concat!($name, "256x128"),
        }
    };
}

/// The number of large tiles from which they are used. Each of an A100's 108 multiprocessors runs two of them at a
/// time. They begin to win at about two thirds of that number (estimated, not measured).
const LARGE_FROM: usize = 144;
/// Columns up to which narrow tiles are used: 128 tiles with 64 columns leave an A100 less than two blocks per
/// multiprocessor (estimated, not measured).
const NARROW_TO: usize = 8192;
/// Rows up to which tall tiles are used, and the minimum number of them: one for each of an A100's multiprocessors
/// (estimated, not measured).
const TALL_TO: usize = 256;
const TALL_FROM: usize = 108;
/// Rows and columns from which broad tiles are used: from there on they leave no more multiprocessors idle than square
/// ones.
const BROAD_ROWS: usize = 1024;
const BROAD_COLUMNS: usize = 4096;
/// The overhead of a wide tile besides its slices, in rows or columns: fits the times of 64 to 256 rows on an H200
/// within 10 %.
const WIDE_BEGIN: usize = 96;

impl Tile {
    /// The tiles of sm_90a.
    pub const WIDE: [Self; 4] = [Self::Wide64x32, Self::Wide64x128, Self::Wide128x128, Self::Wide256x128];
    pub const OF_GRADIENTS: [Self; 5] =
        [Self::Rows64, Self::Rows128, Self::Broad128, Self::Wide128x128, Self::Wide256x128];

    /// The tile for a GEMM of m rows and n columns on this process's GPU.
    fn chosen(form: Form, rows: usize, columns: usize) -> Self {
        let properties = gpu().properties();
        let count = properties.multiprocessors;
        match (form, properties.has_wgmma()) {
            (Form::Forward, true) if rows > 32 => Self::of_wide(&Self::WIDE, rows, columns, count),
            (Form::Forward, _) => Self::for_shape(rows, columns),
            (Form::Input | Form::Weight, true) => Self::of_gradient(rows, columns, count),
            (Form::Input | Form::Weight, false) => Self::of_many(rows, columns),
        }
    }

    /// The tile without wide ones.
    ///
    /// Few rows: the time is that of reading W, and the smallest tile that holds all rows wastes least.
    pub fn for_shape(m: usize, n: usize) -> Self {
        match m {
            0..=16 => Self::Rows16,
            17..=32 if n <= NARROW_TO => Self::Narrow32,
            17..=32 => Self::Rows32,
            33..=64 if n <= NARROW_TO => Self::Narrow64,
            33..=64 => Self::Rows64,
            65..=TALL_TO if Self::Tall128.blocks(m, n) >= TALL_FROM => Self::Tall128,
            _ => Self::of_many(m, n),
        }
    }

    /// Large tiles, which compute more per byte, if there are enough of them to fill the GPU.
    fn of_many(rows: usize, columns: usize) -> Self {
        if rows >= BROAD_ROWS && columns >= BROAD_COLUMNS {
            return Self::Broad128;
        }
        if Self::Rows128.blocks(rows, columns) >= LARGE_FROM { Self::Rows128 } else { Self::Rows64 }
    }

    /// The wide tile with the least to read in turn, if a multiprocessor computes one tile at a time.
    pub fn of_wide(tiles: &[Self], rows: usize, columns: usize, multiprocessors: usize) -> Self {
        let time = |tile: &Self| {
            let [of_rows, of_columns] = tile.size();
            tile.blocks(rows, columns).div_ceil(multiprocessors) * (of_rows + of_columns + WIDE_BEGIN)
        };
        tiles.iter().copied().min_by_key(time).expect("tiles to choose from")
    }

    /// The tile for a gradient. A result that does not fill half of the multiprocessors with wide tiles is cut finer.
    fn of_gradient(rows: usize, columns: usize, multiprocessors: usize) -> Self {
        let wide = Self::of_wide(&Self::WIDE[2..], rows, columns, multiprocessors);
        if 2 * wide.blocks(rows, columns) >= multiprocessors { wide } else { Self::of_many(rows, columns) }
    }

    /// Rows and columns.
    pub fn size(self) -> [usize; 2] {
        match self {
            Self::Rows16 => [16, 32],
            Self::Rows32 => [32, 64],
            Self::Rows64 => [64, 64],
            Self::Narrow32 => [32, 32],
            Self::Tall128 => [128, 64],
            Self::Rows128 | Self::Wide128x128 => [128, 128],
            Self::Broad128 => [128, 256],
            Self::Narrow64 | Self::Wide64x32 => [64, 32],
            Self::Wide64x128 => [64, 128],
            Self::Wide256x128 => [256, 128],
        }
    }

    fn blocks(self, rows: usize, columns: usize) -> usize {
        let [of_rows, of_columns] = self.size();
        rows.div_ceil(of_rows) * columns.div_ceil(of_columns)
    }

    /// Starts a kernel of `blocks` blocks. The tile sets the threads of a block and the shared memory: stages of row
    /// and column slices, two bytes per value.
    pub(super) fn launch(self, kernel: &'static str, blocks: usize, args: &[Arg]) {
        let (threads, stages, depth) = match self {
            Self::Rows16 => (64, 6, 128),
            Self::Rows32 | Self::Narrow64 => (128, 6, 64),
            Self::Rows64 => (128, 5, 64),
            Self::Tall128 => (128, 3, 64),
            Self::Narrow32 => (64, 5, 128),
            Self::Rows128 => (128, 4, 32),
            Self::Broad128 => (256, 4, 32),
            Self::Wide64x32 => (128, 12, 64),
            Self::Wide64x128 => (128, 8, 64),
            Self::Wide128x128 => (256, 6, 64),
            Self::Wide256x128 => (512, 4, 64),
        };
        let [of_rows, of_columns] = self.size();
        let shared_bytes = stages * (of_rows + of_columns) * depth * 2;
        gpu().launch(kernel, [blocks, 1, 1], threads, shared_bytes, args);
    }

    fn forward_kernel(self, y: DType) -> &'static str {
        match y {
            DType::Bf16 => kernel_of_tile!("matmul_forward_", self),
            DType::F32 => kernel_of_tile!("matmul_forward_f32_", self),
        }
    }

    /// The kernel of a gated linear unit. Wide tiles have none. Neither have tiles of many rows, for which one more
    /// launch costs no visible time.
    fn glu_kernel(self, activation: Activation) -> Option<&'static str> {
        let has = [Self::Rows16, Self::Rows32, Self::Rows64, Self::Narrow32, Self::Narrow64].contains(&self);
        let kernel = match activation {
            Activation::Silu => kernel_of_tile!("matmul_swiglu_", self),
            Activation::GeluTanh | Activation::Sigmoid | Activation::ClampedSilu { .. } => return None,
        };
        has.then_some(kernel)
    }

    fn input_kernel(self, is_ragged: bool) -> &'static str {
        let tile = self.or_rows_64();
        if is_ragged {
            kernel_of_tile!("matmul_backward_input_ragged_", tile)
        } else {
            kernel_of_tile!("matmul_backward_input_", tile)
        }
    }

    fn weight_kernel(self) -> &'static str {
        kernel_of_tile!("matmul_backward_weight_", self.or_rows_64())
    }

    /// The tile, if gradients support it.
    fn or_rows_64(self) -> Self {
        if Self::OF_GRADIENTS.contains(&self) { self } else { Self::Rows64 }
    }
}

/// The implementation of a GEMM.
#[derive(Clone, Copy, Debug)]
pub enum Way {
    /// The implementation that suits its shape and the mode.
    Chosen,
    /// Our own kernels in these tiles: the bits are the same in all.
    Exact(Tile),
    /// cuBLASLt for every m; y is bf16 if there is a bias.
    Fast,
}

/// The addend of a finished sum.
#[derive(Clone, Copy, Debug)]
pub enum Addend<'a> {
    Nothing,
    /// The contents of the result.
    Result,
    /// A matrix of the shape, stride and dtype of the result, with which it shares no memory, as the borrows guarantee.
    /// The bits are those of a copy to the result and `Result`.
    Matrix(Matrix<'a>),
}

/// One of several GEMMs of the same x.
#[derive(Debug)]
pub struct Output<'a> {
    pub w: Matrix<'a>,
    pub bias: Option<View<'a>>,
    pub y: MatrixMut<'a>,
}

/// y[m][n] = c[m][n] + (sum_k x[m][k] W[n][k] + bias[n]); x, W and bias bf16, y bf16 or f32; k a multiple of 8. y is
/// rounded once.
pub fn forward(way: Way, x: Matrix, w: Matrix, bias: Option<View>, c: Addend, y: MatrixMut) {
    forward_each(way, x, [Output { w, bias, y }], c);
}

/// `forward` with up to three W of one width and stride, bit for bit, in one launch. Results have one dtype. If there
/// are several, all but the first have no gaps between rows, and there is no c.
pub fn forward_each<const N: usize>(way: Way, x: Matrix, outputs: [Output; N], c: Addend) {
    const { assert!(0 < N && N <= TOGETHER) };
    let calls = outputs.map(|output| of_forward(x, output, c));
    let alike = |c: &Call| (c.mnk[2], c.strides[0], c.dtype) == (calls[0].mnk[2], calls[0].strides[0], calls[0].dtype);
    let suits = |call: &Call| alike(call) && call.addend.is_none() && call.strides[2] == call.mnk[1];
    assert!(calls[1..].iter().all(suits), "{}: {calls:?} cannot share one launch", Form::Forward.op());
    start(way, &calls);
}

/// The maximum number of GEMMs in one launch.
const TOGETHER: usize = 3;

fn of_forward(x: Matrix, Output { w, bias, mut y }: Output, c: Addend) -> Call {
    let (op, m, n, k) = (Form::Forward.op(), x.rows, w.rows, w.width);
    let dtype = y.values.dtype();
    let factors = [read(op, "W", w), read(op, "x", x)];
    check_depth(op, "x and W", k);
    let bias = bias.map(|bias| bias_arg(op, bias, n));
    let result = y.values.arg(dtype);
    let addend = match c {
        Addend::Nothing => None,
        Addend::Result => Some(result),
        Addend::Matrix(c) => {
            assert!(c.stride == y.stride, "{op}: c has row stride {}, y has {}", c.stride, y.stride);
            Some(c.values.arg(dtype))
        }
    };
    let strides = [w.stride, x.stride, y.stride];
    Call { form: Form::Forward, mnk: [m, n, k], strides, factors, addend, result, dtype, bias }
}

/// A matrix that x is multiplied by, and its bias.
#[derive(Clone, Copy, Debug)]
pub struct Factor<'a> {
    pub w: Matrix<'a>,
    pub bias: Option<View<'a>>,
}

/// y[m][n] = act(gate) up, where gate and up are GEMMs of x rounded to bf16. One launch gives the bits of `forward`
/// and `glu::forward`. Both W have one stride. Returns false, with nothing done, if the shape or the mode is not
/// supported; the caller then uses those two.
pub fn glu(way: Way, activation: Activation, x: Matrix, [gate, up]: [Factor; 2], mut y: MatrixMut) -> bool {
    const OP: &str = "matmul::glu";
    let (m, n, k) = (x.rows, gate.w.rows, x.width);
    let tile = match way {
        Way::Exact(tile) => tile,
        Way::Chosen if !fast::takes(m) => Tile::chosen(Form::Forward, m, 2 * n),
        Way::Chosen | Way::Fast => return false,
    };
    let Some(kernel) = tile.glu_kernel(activation) else { return false };
    check_depth(OP, "x and W", k);
    let [w_stride, up_stride] = [gate.w.stride, up.w.stride];
    assert!(w_stride == up_stride, "{OP}: W of gate has row stride {w_stride}, W of up has {up_stride}");
    let mut args = vec![read(OP, "x", x)];
    for (what, Factor { w, bias }) in [("W of gate", gate), ("W of up", up)] {
        args.extend([read(OP, what, w), bias.map_or(Arg::Address(0), |bias| bias_arg(OP, bias, n))]);
    }
    args.push(y.values.arg(DType::Bf16));
    args.extend([m, n, k, x.stride, w_stride, y.stride].map(|n| dim(OP, n)));
    tile.launch(kernel, tile.blocks(m, 2 * n), &args);
    true
}

fn bias_arg(op: &str, bias: View, n: usize) -> Arg {
    assert!(bias.len() == n, "{op}: bias must have {n} values (got {})", bias.len());
    bias.arg(DType::Bf16)
}

/// dx[m][k] (+)= sum_n dy[m][n] W[n][k], all bf16; k a multiple of 8, any n. dy's stride is a multiple of 8, and values
/// past the n values of a row are not used.
pub fn backward_input(way: Way, dy: Matrix, w: Matrix, mut dx: MatrixMut, add: bool) {
    let (op, m, n, k) = (Form::Input.op(), dy.rows, w.rows, w.width);
    let factors = [read(op, "W", w), read(op, "dy", dy)];
    let (dtype, strides) = (DType::Bf16, [w.stride, dy.stride, dx.stride]);
    let result = dx.values.arg(dtype);
    check_depth(op, "W", k);
    let addend = add.then_some(result);
    start(way, &[Call { form: Form::Input, mnk: [m, n, k], strides, factors, addend, result, dtype, bias: None }]);
}

/// dW[n][k] += sum_m dy[m][n] x[m][k]; dy and x bf16, dW f32; k a multiple of 8, any n (as in `backward_input`).
pub fn backward_weight(way: Way, dy: Matrix, x: Matrix, mut dw: MatrixMut) {
    let (op, m, n, k) = (Form::Weight.op(), dy.rows, dy.width, x.width);
    let factors = [read(op, "x", x), read(op, "dy", dy)];
    let (dtype, strides) = (DType::F32, [x.stride, dy.stride, dw.stride]);
    let result = dw.values.arg(dtype);
    check_depth(op, "x", k);
    let addend = Some(result);
    start(way, &[Call { form: Form::Weight, mnk: [m, n, k], strides, factors, addend, result, dtype, bias: None }]);
}

/// Starts GEMMs of one form and the same left factor after all earlier work of the stream: in one launch, except for
/// cuBLASLt.
fn start(way: Way, calls: &[Call]) {
    let call = calls[0];
    let [m, n, k] = call.mnk;
    // cuBLASLt adds a bias of the result's own dtype.
    let suits = |call: &Call| call.bias.is_none() || call.dtype == DType::Bf16;
    let tile = match (way, call.form) {
        (Way::Fast, _) => return calls.iter().copied().for_each(fast::start),
        (Way::Exact(tile), _) => tile,
        _ if fast::takes(m) && calls.iter().all(suits) => return calls.iter().copied().for_each(fast::start),
        (_, Form::Forward) => Tile::chosen(call.form, m, calls.iter().map(|call| call.mnk[1]).sum()),
        (_, Form::Input) => Tile::chosen(call.form, m, k),
        (_, Form::Weight) => Tile::chosen(call.form, n, k),
    };
    let ([b, a], y, [b_stride, a_stride, y_stride]) = (call.factors, call.result, call.strides);
    let dims = [m, n, k, a_stride, b_stride, y_stride].map(|n| dim(call.form.op(), n));
    let [m_arg, n_arg, k_arg, a_stride, b_stride, y_stride] = dims;
    match call.form {
        Form::Forward => {
            let [bias, c] = [call.bias, call.addend].map(|arg| arg.unwrap_or(Arg::Address(0)));
            let mut args = vec![a, b, bias, c, y, m_arg, n_arg, k_arg, a_stride, b_stride, y_stride];
            for other in 1..TOGETHER {
                let none = Arg::Address(0);
                args.extend(calls.get(other).map_or([none, none, none, Arg::I32(0)], |call| {
                    [call.factors[0], call.bias.unwrap_or(none), call.result, dim(call.form.op(), call.mnk[1])]
                }));
            }
            let blocks = calls.iter().map(|call| tile.blocks(m, call.mnk[1])).sum();
            tile.launch(tile.forward_kernel(call.dtype), blocks, &args);
        }
        Form::Input => {
            let add = Arg::I32(i32::from(call.addend.is_some()));
            let kernel = tile.input_kernel(!n.is_multiple_of(8));
            tile.launch(kernel, tile.blocks(m, k), &[a, b, y, m_arg, n_arg, k_arg, a_stride, b_stride, y_stride, add]);
        }
        Form::Weight if m == 0 => {}
        Form::Weight => {
            let args = [a, b, y, m_arg, n_arg, k_arg, a_stride, b_stride, y_stride];
            tile.launch(tile.weight_kernel(), tile.blocks(n, k), &args);
        }
    }
}

pub(super) fn check_depth(op: &str, whose: &str, k: usize) {
    assert!(k.is_multiple_of(8), "{op}: the width of {whose} must be a multiple of 8 (got {k})");
}

/// db[n] += sum_m dy[m][n]; dy bf16, db f32.
pub fn backward_bias(dy: Matrix, mut db: ViewMut) {
    const OP: &str = "matmul::backward_bias";
    let (m, n) = (dy.rows, dy.width);
    let args = [read(OP, "dy", dy), db.arg(DType::F32), dim(OP, m), dim(OP, n), dim(OP, dy.stride)];
    gpu().launch("matmul_backward_bias", [n.div_ceil(32), 1, 1], 256, 0, &args);
}

/// The argument of a bf16 matrix that is read in pieces of 16 bytes.
pub(super) fn read(op: &str, what: &str, matrix: Matrix) -> Arg {
    let Matrix { values, stride, .. } = matrix;
    assert!(stride.is_multiple_of(8), "{op}: the row stride of {what} must be a multiple of 8 (got {stride})");
    let arg = values.arg(DType::Bf16);
    assert!(is_aligned(arg), "{op}: {what} must be aligned to 16 bytes");
    arg
}
