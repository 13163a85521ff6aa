//! y += x

use crate::device::{cpu, cuda};
use crate::tensor::{Slice, SliceMut};

/// y += x in f32, on either device.
pub fn accumulate(x: Slice, y: SliceMut) {
    assert_eq!(x.len(), y.len(), "residual: the lengths must be equal ({} and {})", x.len(), y.len());
    match y {
        SliceMut::Cuda(y) => cuda::copy::add(x.cuda(), y),
        y => cpu::copy::add(x.f32(), y.f32()),
    }
}
