//! Selected rows of a tensor: y[i] = x[rows[i]], and the transpose.

use crate::device::cuda::{Memory, ScatterLists};
use crate::device::{Device, cpu, cuda};
use crate::tensor::{Indices, Tensor};

/// y[i] = x[rows[i]]
pub fn gather(x: &Tensor, rows: &Indices, y: &mut Tensor) {
    check("gather", rows, x, y);
    match x.device() {
        Device::Cpu => cpu::copy::gather(x.data(), x.width(), rows, y.data_mut()),
        Device::Cuda => cuda::copy::gather(x.cuda(), x.width(), rows.cuda(), y.cuda_mut()),
    }
}

/// The same for rows of `width` values, whatever the width of x.
pub fn gather_runs(x: &Tensor, width: usize, rows: &Indices, y: &mut Tensor) {
    let (len, last) = (x.rows() * x.width(), rows.largest().map_or(0, |row| row as usize + 1));
    assert!(
        y.rows() == rows.len() && y.width() == width && last * width <= len,
        "rows::gather_runs: {} runs of {width} from {len} values do not fit ({}, {})",
        rows.len(),
        y.rows(),
        y.width()
    );
    match x.device() {
        Device::Cpu => cpu::copy::gather(x.data(), width, rows, y.data_mut()),
        Device::Cuda => cuda::copy::gather(x.cuda(), width, rows.cuda(), y.cuda_mut()),
    }
}

/// x[rows[i]] = y[i], on a CPU. Rows ascend.
pub fn place(y: &Tensor, rows: &[u32], x: &mut Tensor) {
    check("place", rows, x, y);
    cpu::copy::place(y.data(), y.width(), rows, x.data_mut());
}

/// x[rows[i]] = 0, on a CPU. Rows ascend.
pub fn clear(rows: &[u32], x: &mut Tensor) {
    let zeros = x.zeros_like(rows.len(), x.width());
    place(&zeros, rows, x);
}

/// x[rows[i]] += y[i]. A row that occurs several times gets all of them, in ascending i.
pub fn scatter(y: &Tensor, rows: &[u32], x: &mut Tensor) {
    check("scatter", rows, x, y);
    match y.device() {
        Device::Cpu => cpu::copy::scatter(y.data(), y.width(), rows, x.data_mut()),
        Device::Cuda => cuda::copy::scatter(y.cuda(), y.width(), &ScatterLists::from_keys(rows), x.cuda_mut()),
    }
}

/// An order of rows, which has each of them once.
#[derive(Debug, Default)]
pub struct Order {
    /// The row at each place, and the place of each row.
    ways: [Vec<u32>; 2],
    /// The same, for rows on a GPU.
    on_gpu: Option<[Memory; 2]>,
}

impl Order {
    /// An order of rows on `device`.
    pub fn new(device: Device, order: Vec<u32>) -> Self {
        let mut inverse = vec![0; order.len()];
        (0..).zip(&order).for_each(|(place, row)| inverse[*row as usize] = place);
        let ways = [order, inverse];
        let on_gpu = (device == Device::Cuda).then(|| ways.each_ref().map(|way| Memory::from_values(way)));
        Self { ways, on_gpu }
    }

    /// y[i] = x[order[i]]
    pub fn apply(&self, x: &Tensor) -> Tensor {
        self.moved(x, 0)
    }

    /// y[order[i]] = x[i]
    pub fn undo(&self, x: &Tensor) -> Tensor {
        self.moved(x, 1)
    }

    fn moved(&self, x: &Tensor, way: usize) -> Tensor {
        let mut y = x.as_wide(x.rows());
        check("Order", &self.ways[way], x, &y);
        match self.on_gpu.as_ref().map(|ways| &ways[way]) {
            None => cpu::copy::gather(x.data(), x.width(), &self.ways[way], y.data_mut()),
            Some(rows) if x.width() == 1 => cuda::experts::collect(x.cuda(), rows, y.cuda_mut()),
            Some(rows) => cuda::copy::gather(x.cuda(), x.width(), rows, y.cuda_mut()),
        }
        y
    }
}

fn check(op: &str, rows: &[u32], x: &Tensor, y: &Tensor) {
    assert!(
        y.rows() == rows.len() && y.width() == x.width(),
        "rows::{op}: {} rows of ({}, {}) do not fit ({}, {})",
        rows.len(),
        x.rows(),
        x.width(),
        y.rows(),
        y.width()
    );
    if let Some(row) = rows.iter().find(|&&row| row as usize >= x.rows()) {
        panic!("rows::{op}: row {row} of {}", x.rows());
    }
}
