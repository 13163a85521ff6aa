//! Activations (`Tensor`) and views of parameters (`Weight`, `WeightMut`).

pub mod arena;
mod shelf;

pub use crate::config::model::DType;
use crate::device::Device;
use arena::Buffer;

/// A dense row-major f32 activation, usually (rows, width).
#[derive(Clone, Debug)]
pub struct Tensor {
    rows: usize,
    width: usize,
    device: Device,
    data: Buffer,
}

impl Tensor {
    /// Contents unspecified: the caller overwrites all of it.
    pub fn scratch(rows: usize, width: usize) -> Self {
        Self { rows, width, device: Device::Cpu, data: Buffer::scratch(rows * width) }
    }

    pub fn zeros(rows: usize, width: usize) -> Self {
        Self { rows, width, device: Device::Cpu, data: Buffer::zeros(rows * width) }
    }

    /// # Panics
    /// If `data` does not hold `rows * width` values.
    pub fn from_slice(rows: usize, width: usize, data: &[f32]) -> Self {
        assert_eq!(data.len(), rows * width, "Tensor::from_slice: {rows} x {width} from {} values", data.len());
        let mut tensor = Self::scratch(rows, width);
        tensor.data.copy_from_slice(data);
        tensor
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn width(&self) -> usize {
        self.width
    }

    pub fn device(&self) -> Device {
        self.device
    }

    pub fn data(&self) -> &[f32] {
        &self.data
    }

    pub fn data_mut(&mut self) -> &mut [f32] {
        &mut self.data
    }

    pub fn row(&self, i: usize) -> &[f32] {
        &self.data[i * self.width..(i + 1) * self.width]
    }

    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        &mut self.data[i * self.width..(i + 1) * self.width]
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

/// The values of a parameter.
#[derive(Clone, Copy, Debug)]
pub enum Values<'a> {
    F32(&'a [f32]),
    /// Panel layout only; each u16 is a bf16.
    Bf16(&'a [u16]),
}

/// A matrix parameter W[n][k]: n outputs, k inputs.
#[derive(Clone, Copy, Debug)]
pub struct Weight<'a> {
    pub n: usize,
    pub k: usize,
    pub layout: Layout,
    pub values: Values<'a>,
}

impl Weight<'_> {
    pub fn dtype(&self) -> DType {
        match self.values {
            Values::F32(_) => DType::F32,
            Values::Bf16(_) => DType::Bf16,
        }
    }
}

/// The gradient of a matrix parameter: f32, in the same layout as the parameter.
#[derive(Debug)]
pub struct WeightMut<'a> {
    pub n: usize,
    pub k: usize,
    pub layout: Layout,
    pub values: &'a mut [f32],
}
