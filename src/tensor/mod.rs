//! Activations (`Tensor`), views of parameters (`Weight`, `WeightMut`, `Slice`, `SliceMut`), and `Indices`.
//!
//! What asks for f32 on the CPU (`f32`, `data`, `row`) panics on other values, `cuda` on those of the CPU; so does a range that lies
//! outside, and a copy between values of different kinds or lengths.

pub mod arena;
mod flat;
mod free_list;
mod indices;
mod piece;
mod slice;

pub use crate::dtype::DType;
pub use flat::{Flat, Later};
pub use indices::Indices;
pub use piece::Piece;
pub use slice::{Slice, SliceMut};

use crate::device::cuda::{View, ViewMut};
use crate::device::{Device, cpu};
use arena::Buffer;

/// A dense row-major activation, usually (rows, width): f32 on the CPU; on a GPU bf16, and f32 where it holds statistics.
#[derive(Clone, Debug)]
pub struct Tensor {
    rows: usize,
    width: usize,
    data: Flat,
}

impl Tensor {
    /// On the CPU. Contents unspecified: the caller overwrites all of it.
    pub fn scratch(rows: usize, width: usize) -> Self {
        Self { rows, width, data: Flat::F32(Buffer::scratch(rows * width)) }
    }

    /// On the CPU.
    pub fn zeros(rows: usize, width: usize) -> Self {
        Self { rows, width, data: Flat::F32(Buffer::zeros(rows * width)) }
    }

    /// On a device, in its dtype of activations. Contents unspecified.
    pub fn scratch_on(device: Device, rows: usize, width: usize) -> Self {
        match device {
            Device::Cpu => Self::scratch(rows, width),
            Device::Cuda => Self::on_gpu(rows, width, DType::Bf16),
        }
    }

    fn on_gpu(rows: usize, width: usize, dtype: DType) -> Self {
        Self { rows, width, data: Flat::on_gpu(dtype, rows * width) }
    }

    /// On the device of `self`, in its dtype of activations. Contents unspecified.
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

    /// f32 on the device of `self`: statistics of rows, or logits. Contents unspecified.
    #[must_use]
    pub fn statistics(&self, rows: usize, width: usize) -> Self {
        Self { rows, width, data: Flat::scratch(self.device(), rows * width) }
    }

    /// As wide as `self`, on its device and of its dtype. Contents unspecified.
    #[must_use]
    pub fn as_wide(&self, rows: usize) -> Self {
        match self.data {
            Flat::Cuda(_, dtype) => Self::on_gpu(rows, self.width, dtype),
            _ => Self::scratch(rows, self.width),
        }
    }

    /// On the CPU.
    pub fn from_slice(rows: usize, width: usize, data: &[f32]) -> Self {
        assert_eq!(data.len(), rows * width, "Tensor::from_slice: {rows} x {width} from {} values", data.len());
        let mut tensor = Self::scratch(rows, width);
        cpu::copy::copy(data, tensor.data_mut());
        tensor
    }

    /// A copy on `device`, which a GPU holds in `dtype`.
    #[must_use]
    pub fn on(&self, device: Device, dtype: DType) -> Self {
        if device == Device::Cpu {
            return self.clone();
        }
        let mut tensor = Self::on_gpu(self.rows, self.width, dtype);
        tensor.cuda_mut().write(self.data());
        tensor
    }

    /// One behind the other, as a tensor of their device and dtype.
    ///
    /// # Panics
    /// Without tensors, or where widths, devices or dtypes differ.
    pub fn stacked(tensors: &[&Self]) -> Self {
        let first = tensors.first().expect("a stack has a tensor");
        let mut all = first.as_wide(tensors.iter().map(|tensor| tensor.rows).sum());
        let mut at = 0;
        for tensor in tensors {
            assert_eq!(tensor.width, first.width, "tensors of one width");
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

    /// All values, where they lie.
    pub fn slice(&self) -> Slice<'_> {
        self.data.all()
    }

    pub fn slice_mut(&mut self) -> SliceMut<'_> {
        self.data.all_mut()
    }

    /// The values on the host, wherever they lie.
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

/// Order of a parameter's elements in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// W[n][k] row-major, as on disk. Vectors are (1, k).
    Row,
    /// Panels of 32 outputs: [n/32 panels][k, rounded up to even][32 lanes]; missing n and k are zeros that stay zero.
    /// In bf16 two neighbouring k interleave: [panel][k/2][32 lanes][2], so 64 consecutive f32 of the f32 panel become
    /// 64 consecutive bf16 of the bf16 panel.
    Panel,
}

impl Layout {
    /// The order on a device of what lies like this on the CPU: kernels of a GPU read rows.
    #[must_use]
    pub fn on(self, device: Device) -> Self {
        match device {
            Device::Cpu => self,
            Device::Cuda => Self::Row,
        }
    }
}

/// Outputs (lanes) of one panel.
pub const PANEL: usize = 32;
/// Every parameter starts at a multiple of this many elements in a flat buffer.
pub const FLAT_ALIGN: usize = 64;

impl Layout {
    /// Elements that a parameter of `n` rows and `k` columns takes in a flat buffer, padding included.
    pub fn len(self, n: usize, k: usize) -> usize {
        match self {
            Self::Row => (n * k).next_multiple_of(FLAT_ALIGN),
            Self::Panel => n.next_multiple_of(PANEL) * k.next_multiple_of(2),
        }
    }

    /// Index of W[row n][column c] in the parameter's elements. `k` is the number of columns. (f32 order.)
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

/// The gradient of a matrix parameter: f32, in the same layout as the parameter.
#[derive(Debug)]
pub struct WeightMut<'a> {
    pub n: usize,
    pub k: usize,
    pub layout: Layout,
    pub values: SliceMut<'a>,
}
