//! Matrices in nf4: dequantization to bf16, and the GEMM of few rows that reads four bits a weight.

use super::gpu::{Arg, gpu};
use super::matmul::{Addend, Matrix, MatrixMut};
use super::memory::{View, ViewMut};
use super::shape::{THREADS, check_aligned, dim, grid_of_eights, is_aligned};
use crate::device::cpu::nf4::{BLOCK, Place};
use crate::dtype::DType;

/// A quantized matrix of n outputs and k inputs on the GPU.
#[derive(Clone, Copy, Debug)]
pub struct Nf4<'a> {
    place: &'a Place,
    bytes: View<'a>,
}

/// The tile of the GEMM: rows, columns, threads, shared memory. Six stages hold 16 x 128 values of x, and 32 lines of
/// codes of 80 bytes.
const TILE: [usize; 2] = [16, 32];
const TILE_THREADS: usize = 64;
/// Rows up to which the codes are read. Each tile of 16 rows reads them, 0.53 bytes a value. Dequantization and the GEMM
/// of its result move 4.5 bytes a value, but from 65 rows on tiles of many rows multiply faster (estimated, not measured).
const ROWS_MAX: usize = 64;
const SHARED_BYTES: usize = 6 * (16 * 128 * 2 + 32 * 80);

impl<'a> Nf4<'a> {
    /// The matrix at a place in `bytes`, of any dtype.
    pub fn new(place: &'a Place, bytes: View<'a>) -> Self {
        let len = bytes.len() * bytes.dtype().bytes();
        assert!(place.end <= len, "nf4: the place ends at byte {} of {len}", place.end);
        Self { place, bytes }
    }

    pub fn dims(self) -> (usize, usize) {
        (self.place.n, self.place.k)
    }

    /// The bytes of codes and scales that `product` reads for `rows` rows of x.
    pub fn bytes_read(self, rows: usize) -> usize {
        self.place.bytes() * rows.div_ceil(TILE[0])
    }

    fn args(self) -> Vec<Arg> {
        let at = |start: usize| Arg::Address(self.bytes.address() + start as u64);
        let Place { nested, tables, scales, scale_codes, codes, .. } = *self.place;
        let none = Arg::Address(0);
        let [tables, scales, scale_codes, codes] = [tables, scales, scale_codes, codes].map(at);
        let (of_scales, offset, first) = match nested {
            None => ([scales, none, none], 0.0, 0),
            Some((offset, first)) => ([none, scale_codes, scales], offset, first),
        };
        let [scales, nested, largest] = of_scales;
        vec![codes, tables, scales, nested, largest, Arg::F32(offset), Arg::U32(first as u32)]
    }

    /// Writes the bf16 values of the flattened matrix from index `start` on, a multiple of 8.
    pub fn dequantize(self, start: usize, mut to: ViewMut) {
        const OP: &str = "nf4::dequantize";
        let (len, (n, k)) = (to.len(), self.dims());
        assert!(start.is_multiple_of(8), "{OP}: the start must be a multiple of 8 (got {start})");
        assert!(start + len <= n * k, "{OP}: {len} values from {start} exceed ({n}, {k})");
        let mut args = self.args();
        args.extend([to.arg(DType::Bf16), start.into(), len.into()]);
        check_aligned(OP, &args[7..8]);
        gpu().launch("nf4_dequantize", grid_of_eights(len), THREADS, 0, &args);
    }

    /// Whether `product` supports the matrix and `rows` rows of x.
    pub fn has_product(self, rows: usize) -> bool {
        rows <= ROWS_MAX && self.place.k.is_multiple_of(BLOCK)
    }

    /// y[m][n] = c[m][n] + (sum_k x[m][k] W[n][k] + bias[n]): the bits of `matmul::forward` in exact mode on the
    /// dequantized matrix, for any m, but fast only for few rows.
    ///
    /// # Panics
    /// If k is not a multiple of 64.
    pub fn product(self, x: Matrix, bias: Option<View>, c: Addend, mut y: MatrixMut) {
        const OP: &str = "nf4::product";
        let (m, (n, k)) = (x.rows, self.dims());
        assert!(k.is_multiple_of(BLOCK), "{OP}: the width of W must be a multiple of {BLOCK} (got {k})");
        assert!(x.width == k && y.width == n && y.rows == m, "{OP}: x ({m}, {}), W ({n}, {k}), y {y:?}", x.width);
        assert!(x.stride.is_multiple_of(8), "{OP}: the row stride of x must be a multiple of 8 (got {})", x.stride);
        let (from, to) = (x.values.arg(DType::Bf16), y.values.arg(DType::Bf16));
        assert!(is_aligned(from), "{OP}: x must be aligned to 16 bytes");
        let bias = bias.map_or(Arg::Address(0), |bias| {
            assert!(bias.len() == n, "{OP}: bias must have {n} values (got {})", bias.len());
            bias.arg(DType::Bf16)
        });
        let c = match c {
            Addend::Nothing => Arg::Address(0),
            Addend::Result => to,
            Addend::Matrix(c) => {
                assert!(c.stride == y.stride, "{OP}: c has row stride {}, y has {}", c.stride, y.stride);
                c.values.arg(DType::Bf16)
            }
        };
        let mut args = vec![from];
        args.extend(self.args());
        args.extend([bias, c, to]);
        args.extend([m, n, k, x.stride, y.stride].map(|n| dim(OP, n)));
        let blocks = m.div_ceil(TILE[0]) * n.div_ceil(TILE[1]);
        gpu().launch("nf4_matmul_16", [blocks, 1, 1], TILE_THREADS, SHARED_BYTES, &args);
    }
}
