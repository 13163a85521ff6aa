//! y += x

use crate::device::{Device, cpu, cuda};
use crate::tensor::{Slice, SliceMut, Tensor};

/// y[t][d] += x[t][d]
///
/// # Panics
/// If the shapes differ.
pub fn add(x: &Tensor, y: &mut Tensor) {
    super::check("residual", "y", y, x.rows(), x.width());
    match x.device() {
        Device::Cpu => cpu::residual::add(x.data(), y.data_mut()),
        Device::Cuda => cuda::residual::add(x.cuda(), y.cuda_mut()),
    }
}

/// y += x, f32 wherever they lie.
///
/// # Panics
/// If the lengths differ.
pub fn accumulate(x: Slice, y: SliceMut) {
    assert_eq!(x.len(), y.len(), "residual: {} values to {}", x.len(), y.len());
    match y {
        SliceMut::Cpu(y) => cpu::residual::add(x.cpu(), y),
        SliceMut::Cuda(y) => cuda::copy::add(x.cuda(), y),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_added_once_below_and_above_the_size_that_threads_share() {
        for rows in [1, 3, 300] {
            let x: Vec<f32> = (0..rows * 99).map(|i| i as f32).collect();
            let y: Vec<f32> = x.iter().map(|x| 0.5 - x).collect();
            let (x, mut y) = (Tensor::from_slice(rows, 99, &x), Tensor::from_slice(rows, 99, &y));
            add(&x, &mut y);
            assert!(y.data().iter().all(|&y| y == 0.5));
        }
    }
}
