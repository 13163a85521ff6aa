//! y += x

use crate::device::{cpu, cuda};
use crate::tensor::{Slice, SliceMut};

/// y += x, f32 wherever they lie.
pub fn accumulate(x: Slice, y: SliceMut) {
    assert_eq!(x.len(), y.len(), "residual: {} values to {}", x.len(), y.len());
    match y {
        SliceMut::Cuda(y) => cuda::copy::add(x.cuda(), y),
        y => cpu::copy::add(x.f32(), y.f32()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_added_once_below_and_above_the_size_that_threads_share() {
        for rows in [1, 3, 300] {
            let x: Vec<f32> = (0..rows * 99).map(|i| i as f32).collect();
            let mut y: Vec<f32> = x.iter().map(|x| 0.5 - x).collect();
            accumulate((&x).into(), (&mut y).into());
            assert!(y.iter().all(|&y| y == 0.5));
        }
    }
}
