//! Activations (`Tensor`), views of parameters (`Weight`, `WeightMut`, `Slice`, `SliceMut`), and `Indices`.
//!
//! Methods for f32 on the CPU (`f32`, `data`, `row`) panic for other values, and `cuda` panics for values on the CPU. A
//! range that is out of bounds, and a copy between values of different kinds or lengths, panic too.

pub mod arena;
mod flat;
mod host_pool;
mod indices;
pub mod nf4;
mod piece;
mod slice;

pub use crate::dtype::DType;
pub use flat::{Flat, Later};
pub use indices::Indices;
pub use piece::{Piece, convert, copy};
pub use slice::{Slice, SliceMut};

use crate::device::cuda::{View, ViewMut};
use crate::device::{Device, cpu, cuda};
use arena::Buffer;

/// A dense row-major activation, usually (rows, width): f32 on the CPU; on a GPU bf16, or f32 for statistics.
#[derive(Clone, Debug)]
pub struct Tensor {
    rows: usize,
    width: usize,
    data: Flat,
}

impl Tensor {
    /// A tensor on the CPU with unspecified contents. The caller overwrites all of it.
    pub fn scratch(rows: usize, width: usize) -> Self {
        Self { rows, width, data: Flat::F32(Buffer::scratch(rows * width)) }
    }

    /// Zeros on the CPU.
    pub fn zeros(rows: usize, width: usize) -> Self {
        Self { rows, width, data: Flat::F32(Buffer::zeros(rows * width)) }
    }

    /// A tensor on a device, in its dtype for activations, with unspecified contents.
    pub fn scratch_on(device: Device, rows: usize, width: usize) -> Self {
        match device {
            Device::Cpu => Self::scratch(rows, width),
            Device::Cuda => Self::on_gpu(rows, width, DType::Bf16),
        }
    }

    fn on_gpu(rows: usize, width: usize, dtype: DType) -> Self {
        Self { rows, width, data: Flat::on_gpu(dtype, rows * width) }
    }

    /// A tensor on the device of `self`, in its dtype for activations, with unspecified contents.
    #[must_use]
    pub fn like(&self, rows: usize, width: usize) -> Self {
        Self::scratch_on(self.device(), rows, width)
    }

    /// The same, all zeros.
    #[must_use]
    pub fn zeros_like(&self, rows: usize, width: usize) -> Self {
        let mut tensor = self.like(rows, width);
        tensor.data.clear();
        tensor
    }

    /// An f32 tensor on the device of `self`, for statistics of rows or logits, with unspecified contents.
    #[must_use]
    pub fn statistics(&self, rows: usize, width: usize) -> Self {
        Self { rows, width, data: Flat::scratch(self.device(), rows * width) }
    }

    /// A tensor with the width, device and dtype of `self` and unspecified contents.
    #[must_use]
    pub fn as_wide(&self, rows: usize) -> Self {
        match self.data {
            Flat::Cuda(_, dtype) => Self::on_gpu(rows, self.width, dtype),
            _ => Self::scratch(rows, self.width),
        }
    }

    /// A tensor on the CPU from a slice.
    pub fn from_slice(rows: usize, width: usize, data: &[f32]) -> Self {
        assert_eq!(data.len(), rows * width, "Tensor::from_slice: ({rows}, {width}) from {} values", data.len());
        let mut tensor = Self::scratch(rows, width);
        cpu::copy::copy(data, tensor.data_mut());
        tensor
    }

    /// A copy on `device`, in `dtype` on a GPU.
    #[must_use]
    pub fn on(&self, device: Device, dtype: DType) -> Self {
        if device == Device::Cpu {
            return self.clone();
        }
        let mut tensor = Self::on_gpu(self.rows, self.width, dtype);
        tensor.cuda_mut().write(self.data());
        tensor
    }

    /// Stacks tensors in order into one of their device and dtype.
    ///
    /// # Panics
    /// Without tensors, or if widths, devices or dtypes differ.
    pub fn stacked(tensors: &[&Self]) -> Self {
        let first = tensors.first().expect("a stack needs a tensor");
        let mut all = first.as_wide(tensors.iter().map(|tensor| tensor.rows).sum());
        let mut at = 0;
        for tensor in tensors {
            assert_eq!(tensor.width, first.width, "stacked tensors must have one width");
            let len = tensor.rows * tensor.width;
            all.slice_mut().copy_from(tensor.slice(), &Piece::run(0, len), &Piece::run(at, len));
            at += len;
        }
        all
    }

    /// A copy of row `i`.
    #[must_use]
    pub fn row_copy(&self, i: usize) -> Self {
        let mut row = self.as_wide(1);
        row.slice_mut().copy_from(self.slice(), &Piece::run(i * self.width, self.width), &Piece::run(0, self.width));
        row
    }

    /// The same values in rows of another width.
    ///
    /// # Panics
    /// If the width does not divide the number of values.
    #[must_use]
    pub fn in_rows_of(self, width: usize) -> Self {
        let len = self.rows * self.width;
        assert!(len.is_multiple_of(width), "rows of {width} from {len} values");
        Self { rows: len / width, width, ..self }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn width(&self) -> usize {
        self.width
    }

    pub fn device(&self) -> Device {
        self.data.device()
    }

    pub fn data(&self) -> &[f32] {
        self.data.all().f32()
    }

    pub fn data_mut(&mut self) -> &mut [f32] {
        self.data.all_mut().f32()
    }

    pub fn cuda(&self) -> View<'_> {
        self.data.all().cuda()
    }

    pub fn cuda_mut(&mut self) -> ViewMut<'_> {
        self.data.all_mut().cuda()
    }

    /// All values, on their device.
    pub fn slice(&self) -> Slice<'_> {
        self.data.all()
    }

    pub fn slice_mut(&mut self) -> SliceMut<'_> {
        self.data.all_mut()
    }

    /// A copy of the values on the host.
    pub fn to_host(&self) -> Vec<f32> {
        self.data.all().to_host()
    }

    pub fn row(&self, i: usize) -> &[f32] {
        &self.data()[i * self.width..(i + 1) * self.width]
    }

    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        let width = self.width;
        &mut self.data_mut()[i * width..(i + 1) * width]
    }
}

/// The order of a parameter's elements in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// W[n][k] row-major, as on disk. Vectors are (1, k).
    Row,
    /// Panels of 32 outputs: [n/32 panels][k, rounded up to even][32 lanes]. Missing n and k are zeros that stay zero.
    /// In bf16 two neighboring k interleave: [panel][k/2][32 lanes][2], so 64 consecutive f32 of the f32 panel become
    /// 64 consecutive bf16 of the bf16 panel.
    Panel,
}

impl Layout {
    /// The layout on a device for this layout on the CPU. GPU kernels read rows.
    #[must_use]
    pub fn on(self, device: Device) -> Self {
        match device {
            Device::Cpu => self,
            Device::Cuda => Self::Row,
        }
    }
}

/// The number of outputs (lanes) in one panel.
pub const PANEL: usize = 32;
/// The alignment, in elements, of every parameter in a flat buffer.
pub const FLAT_ALIGN: usize = 64;

impl Layout {
    /// The number of elements of a parameter with `n` rows and `k` columns in a flat buffer, padding included.
    pub fn len(self, n: usize, k: usize) -> usize {
        match self {
            Self::Row => (n * k).next_multiple_of(FLAT_ALIGN),
            Self::Panel => n.next_multiple_of(PANEL) * k.next_multiple_of(2),
        }
    }

    /// The index of W[row n][column c] in the parameter's elements. `k` is the number of columns. (f32 order.)
    pub fn index(self, k: usize, n: usize, c: usize) -> usize {
        match self {
            Self::Row => n * k + c,
            Self::Panel => (n / PANEL) * PANEL * k.next_multiple_of(2) + c * PANEL + n % PANEL,
        }
    }
}

/// A matrix parameter W[n][k]: n outputs, k inputs.
#[derive(Clone, Copy, Debug)]
pub struct Weight<'a> {
    pub n: usize,
    pub k: usize,
    pub layout: Layout,
    pub values: Slice<'a>,
}

impl Weight<'_> {
    pub fn dtype(&self) -> DType {
        self.values.dtype()
    }
}

/// A matrix W[n][k] that x is multiplied by: its values or, on a GPU, its codes in nf4.
#[derive(Clone, Copy, Debug)]
pub enum Operand<'a> {
    Values(Weight<'a>),
    Nf4(cuda::nf4::Nf4<'a>),
}

impl Operand<'_> {
    /// Outputs and inputs.
    pub fn dims(&self) -> (usize, usize) {
        match self {
            Self::Values(w) => (w.n, w.k),
            Self::Nf4(w) => w.dims(),
        }
    }

    /// The bytes that a GEMM with `rows` rows reads.
    pub fn bytes_read(&self, rows: usize) -> usize {
        match self {
            Self::Values(w) => w.n * w.k * w.dtype().bytes(),
            Self::Nf4(w) => w.bytes_read(rows),
        }
    }
}

impl<'a> From<Weight<'a>> for Operand<'a> {
    fn from(w: Weight<'a>) -> Self {
        Self::Values(w)
    }
}

/// The gradient of a matrix parameter: f32, in the same layout as the parameter.
#[derive(Debug)]
pub struct WeightMut<'a> {
    pub n: usize,
    pub k: usize,
    pub layout: Layout,
    pub values: SliceMut<'a>,
}
