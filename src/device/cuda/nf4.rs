//! Matrices in nf4: dequantization to bf16, and the GEMM of few rows that reads four bits a weight.

use super::gpu::{Arg, gpu};
use super::matmul::{Addend, Matrix, MatrixMut};
use super::memory::{Memory, View, ViewMut};
use super::shape::{THREADS, check_aligned, dim, grid_of_eights, is_aligned};
use crate::device::cpu::nf4::{self as cpu, BLOCK, Scales, TABLE};
use crate::dtype::DType;

/// A quantized matrix of n outputs and k inputs on the GPU.
#[derive(Debug)]
pub struct Nf4 {
    n: usize,
    k: usize,
    codes: Memory,
    /// The values of codes, then those of the codes of scales.
    tables: Memory,
    scales: OnGpu,
}

#[derive(Debug)]
enum OnGpu {
    F32(Memory),
    Nested { codes: Memory, largest: Memory, offset: f32, first: usize },
}

/// The tile of the GEMM: rows, columns, threads, shared memory. Six stages hold 16 x 128 values of x, and 32 lines of
/// codes of 80 bytes.
const TILE: [usize; 2] = [16, 32];
const TILE_THREADS: usize = 64;
const SHARED_BYTES: usize = 6 * (16 * 128 * 2 + 32 * 80);

impl Nf4 {
    /// A copy of a matrix with n rows.
    pub fn new(matrix: &cpu::Matrix, n: usize) -> Self {
        let (mut tables, codes) = (TABLE.to_vec(), Memory::from_values(matrix.codes));
        let scales = match matrix.scales {
            Scales::F32(scales) => OnGpu::F32(Memory::from_values(scales)),
            Scales::Nested { codes, largest, map, offset, first } => {
                tables.extend(map);
                let (codes, largest) = (Memory::from_values(codes), Memory::from_values(largest));
                OnGpu::Nested { codes, largest, offset, first }
            }
        };
        Self { n, k: matrix.k, codes, tables: Memory::from_values(&tables), scales }
    }

    pub fn bytes(&self) -> usize {
        let of_scales = match &self.scales {
            OnGpu::F32(scales) => scales.bytes(),
            OnGpu::Nested { codes, largest, .. } => codes.bytes() + largest.bytes(),
        };
        self.codes.bytes() + self.tables.bytes() + of_scales
    }

    fn args(&self) -> Vec<Arg> {
        let mut args = vec![self.codes.arg(), self.tables.arg()];
        args.extend(match &self.scales {
            OnGpu::F32(scales) => [scales.arg(), Arg::Address(0), Arg::Address(0), Arg::F32(0.0), Arg::U32(0)],
            OnGpu::Nested { codes, largest, offset, first } => {
                [Arg::Address(0), codes.arg(), largest.arg(), Arg::F32(*offset), Arg::U32(*first as u32)]
            }
        });
        args
    }

    /// Writes the bf16 values of the flattened matrix from index `start` on, a multiple of 8.
    pub fn dequantize(&self, start: usize, mut to: ViewMut) {
        const OP: &str = "nf4::dequantize";
        let len = to.len();
        assert!(start.is_multiple_of(8), "{OP}: the start must be a multiple of 8 (got {start})");
        assert!(start + len <= self.n * self.k, "{OP}: {len} values from {start} exceed ({}, {})", self.n, self.k);
        let mut args = self.args();
        args.extend([to.arg(DType::Bf16), start.into(), len.into()]);
        check_aligned(OP, &args[7..8]);
        gpu().launch("nf4_dequantize", grid_of_eights(len), THREADS, 0, &args);
    }

    /// Whether `product` supports the matrix and `rows` rows of x.
    pub fn has_product(&self, rows: usize) -> bool {
        rows <= TILE[0] && self.k.is_multiple_of(BLOCK)
    }

    /// y[m][n] = c[m][n] + (sum_k x[m][k] W[n][k] + bias[n]): the bits of `matmul::forward` in exact mode on the
    /// dequantized matrix, for any m, but fast only for few rows.
    ///
    /// # Panics
    /// If k is not a multiple of 64.
    pub fn product(&self, x: Matrix, bias: Option<View>, c: Addend, mut y: MatrixMut) {
        const OP: &str = "nf4::product";
        let (m, n, k) = (x.rows, self.n, self.k);
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
