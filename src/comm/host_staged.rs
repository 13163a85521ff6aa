//! Collectives of values on the CPU or on GPUs. GPU values move by NCCL if the ranks have joined it
//! (`nccl_collectives`). Otherwise they are staged through the host. Ordered sums have the same bits either way.

use super::group::Group;
use crate::config::optim::GradientOrder;
use crate::device::cuda::{View, ViewMut};
use crate::tensor::{DType, Flat, Slice, SliceMut};
use std::ops::Range;

impl Group {
    /// `all_reduce_sum_ordered` for values on either device.
    pub fn sum_slice(&self, x: SliceMut) {
        match x {
            _ if self.size() == 1 => {}
            SliceMut::F32(x) => self.all_reduce_sum_ordered(x),
            SliceMut::Bf16(_) => panic!("weights cannot be summed over the {} axis", self.axis()),
            SliceMut::Cuda(mut x) => match self.nccl() {
                Some(nccl) => nccl.sum_ordered(&mut x),
                None => x.on_host(|x| self.all_reduce_sum_ordered(x)),
            },
        }
    }

    /// On return `x[ranges[rank]]` contains the sum over ranks, in the given order. The rest is unspecified.
    pub fn sum_scattered(&self, x: &mut Flat, ranges: &[Range<usize>], order: GradientOrder) {
        if self.size() == 1 {
            return;
        }
        let sum = |x: &mut [f32]| match order {
            GradientOrder::Fast => self.reduce_scatter_sum(x, ranges),
            GradientOrder::Fixed => self.reduce_scatter_tree(x, ranges),
        };
        match (x.all_mut(), self.nccl()) {
            (SliceMut::Cuda(mut x), Some(nccl)) => {
                self.check(x.len(), ranges);
                match order {
                    GradientOrder::Fast => nccl.sum_scattered(&mut x, ranges),
                    GradientOrder::Fixed => nccl.sum_tree(&mut x, ranges),
                }
            }
            (SliceMut::Cuda(mut x), None) => x.on_host(sum),
            (x, _) => sum(x.f32()),
        }
    }

    /// `all_gather` for values on the GPU.
    pub fn gather_view(&self, x: &mut ViewMut, ranges: &[Range<usize>]) {
        self.check(x.len(), ranges);
        match self.nccl() {
            _ if self.size() == 1 => {}
            Some(nccl) => nccl.gather(x, ranges),
            None if x.dtype() == DType::F32 => x.on_host(|x| self.all_gather(x, ranges)),
            None => {
                // This rank's values are copied to the host, and the others' values to the GPU.
                let own = ranges[self.rank()].clone();
                let mut values = vec![0u16; x.len()];
                x.as_view().part(own.clone()).read_bits(&mut values[own.clone()]);
                self.all_gather(&mut values, ranges);
                for range in ranges.iter().filter(|range| **range != own && !range.is_empty()) {
                    x.reborrow().part(range.clone()).write_bits(&values[range.clone()]);
                }
            }
        }
    }

    /// `all_gather` for values of any dtype.
    pub fn gather_slice(&self, x: SliceMut, ranges: &[Range<usize>]) {
        match x {
            SliceMut::F32(x) => self.all_gather(x, ranges),
            SliceMut::Bf16(x) => self.all_gather(x, ranges),
            SliceMut::Cuda(mut x) => self.gather_view(&mut x, ranges),
        }
    }

    /// Replaces the values on all ranks by the root's. Values of a GPU go through the host.
    pub fn broadcast_slice(&self, root: usize, x: SliceMut) {
        match x {
            _ if self.size() == 1 => {}
            SliceMut::F32(x) => self.broadcast(root, x),
            SliceMut::Bf16(x) => self.broadcast(root, x),
            SliceMut::Cuda(x) if self.is_null() => self.note_broadcast(x.len() * x.dtype().bytes()),
            SliceMut::Cuda(mut x) => {
                let mut bits = vec![0u16; x.len() * x.dtype().bytes() / size_of::<u16>()];
                if self.rank() == root {
                    x.as_view().read_bits(&mut bits);
                }
                self.broadcast(root, &mut bits);
                if self.rank() != root {
                    x.write_bits(&bits);
                }
            }
        }
    }

    /// `all_to_all` for values of one device and dtype. Without NCCL, only the exchanged values of a GPU go through the
    /// host.
    ///
    /// # Panics
    /// If `all_to_all` panics, or if devices or dtypes differ.
    pub fn slice_to_all(&self, send: Slice, to: &[Range<usize>], receive: SliceMut, from: &[Range<usize>]) {
        match (send, receive) {
            (Slice::F32(send), SliceMut::F32(receive)) => self.all_to_all(send, to, receive, from),
            (Slice::Bf16(send), SliceMut::Bf16(receive)) => self.all_to_all(send, to, receive, from),
            (Slice::Cuda(send), SliceMut::Cuda(mut receive)) => {
                assert_eq!([to.len(), from.len()], [self.size(); 2], "one range per rank of axis {}", self.axis());
                match self.nccl() {
                    Some(nccl) => nccl.all_to_all(send, to, &mut receive, from),
                    None => self.through_the_host(send, to, &mut receive, from),
                }
            }
            (send, receive) => panic!("cannot send {send:?} into {receive:?}"),
        }
    }

    fn through_the_host(&self, send: View, to: &[Range<usize>], receive: &mut ViewMut, from: &[Range<usize>]) {
        let bytes = send.dtype().bytes();
        let in_bytes = |ranges: &[Range<usize>]| ranges.iter().map(|r| r.start * bytes..r.end * bytes).collect();
        let (from_bytes, to_bytes): (Vec<_>, Vec<_>) = (in_bytes(from), in_bytes(to));
        let end = |ranges: &[Range<usize>]| ranges.iter().map(|range| range.end).max().unwrap_or(0);
        let [mut values, mut received] = [&to_bytes, &from_bytes].map(|ranges| vec![0u8; end(ranges)]);
        send.part(0..end(to)).read_bits(&mut values);
        self.all_to_all(&values, &to_bytes, &mut received, &from_bytes);
        for (range, bytes) in from.iter().zip(from_bytes).filter(|(range, _)| !range.is_empty()) {
            receive.reborrow().part(range.clone()).write_bits(&received[bytes]);
        }
    }

    /// `shift` for values of one device and dtype.
    ///
    /// # Panics
    /// If devices or dtypes differ.
    pub fn shift_slice(&self, send: Slice, receive: SliceMut) {
        let (send, mut receive) = match (send, receive) {
            (Slice::F32(send), SliceMut::F32(receive)) => return self.shift(send, receive),
            (send, receive) => (send.cuda(), receive.cuda()),
        };
        assert_eq!(send.dtype(), receive.dtype(), "the blocks of a ring must have one dtype");
        match self.nccl() {
            _ if self.size() == 1 => receive.copy_from(send),
            Some(nccl) => nccl.shift(send, &mut receive),
            None => {
                let mut received = vec![0.0; receive.len()];
                self.shift(&send.to_f32(), &mut received);
                receive.write(&received);
            }
        }
    }
}
