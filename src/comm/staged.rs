//! Collectives of values that may lie on a GPU. Those that do travel through the host.

use super::group::Group;
use crate::config::optim::GradientOrder;
use crate::device::cuda::{Memory, View, ViewMut};
use crate::tensor::{Flat, Tensor};
use std::ops::Range;

impl Group {
    /// `all_reduce_sum_ordered` of a tensor.
    pub fn sum_ordered(&self, x: &mut Tensor) {
        if self.size() > 1 {
            x.on_host(|x| self.all_reduce_sum_ordered(x));
        }
    }

    /// On return `x[ranges[rank]]` holds the sum over ranks, in the order that the job asks for; the rest is unspecified.
    pub fn sum_scattered(&self, x: &mut Flat, ranges: &[Range<usize>], order: GradientOrder) {
        if self.size() > 1 {
            x.on_host(|x| match order {
                GradientOrder::Fast => self.reduce_scatter_sum(x, ranges),
                GradientOrder::Fixed => self.reduce_scatter_tree(x, ranges),
            });
        }
    }

    /// `all_gather` of f32 values.
    pub fn gather_flat(&self, x: &mut Flat, ranges: &[Range<usize>]) {
        if self.size() > 1 {
            x.on_host(|x| self.all_gather(x, ranges));
        }
    }

    /// `all_gather` of bf16 weights on the GPU.
    pub fn gather_weights(&self, x: &mut Memory, ranges: &[Range<usize>]) {
        if self.size() > 1 {
            let len = ranges.iter().map(|range| range.end).max().unwrap_or(0);
            let mut values: Vec<u16> = x.read(len);
            self.all_gather_u16(&mut values, ranges);
            x.write(&values);
        }
    }

    /// `shift` of a block of values on the GPU.
    ///
    /// # Panics
    /// If the dtypes differ.
    pub fn shift_block(&self, send: View, receive: &mut ViewMut) {
        assert_eq!(send.dtype(), receive.dtype(), "a block of another dtype comes around the ring");
        let mut received = vec![0.0; receive.len()];
        self.shift(&send.to_f32(), &mut received);
        receive.write(&received);
    }

    /// `all_to_all` of f32 tensors of one device.
    pub fn tensor_to_all(&self, send: &Tensor, to: &[Range<usize>], receive: &mut Tensor, from: &[Range<usize>]) {
        let send = send.host();
        receive.on_host(|receive| self.all_to_all(&send, to, receive, from));
    }
}
