//! Collectives of values that may lie on a GPU. Those that do go from GPU to GPU where these are joined (`linked`), else they
//! travel through the host: with the same bits where an order of sums is promised.

use super::group::Group;
use crate::config::optim::GradientOrder;
use crate::device::Device;
use crate::device::cuda::{Memory, View, ViewMut};
use crate::tensor::{DType, Flat, SliceMut, Tensor, WordBuffer, Words, WordsMut};
use std::ops::Range;

impl Group {
    /// `all_reduce_sum_ordered` of a tensor.
    pub fn sum_ordered(&self, x: &mut Tensor) {
        match x.device() {
            _ if self.size() == 1 => {}
            Device::Cpu => self.all_reduce_sum_ordered(x.data_mut()),
            Device::Cuda => self.sum_view(&mut x.cuda_mut()),
        }
    }

    /// `all_reduce_sum_ordered` of a run of values.
    pub fn sum_slice(&self, x: SliceMut) {
        match x {
            _ if self.size() == 1 => {}
            SliceMut::Cpu(x) => self.all_reduce_sum_ordered(x),
            SliceMut::Cuda(mut x) => self.sum_view(&mut x),
        }
    }

    fn sum_view(&self, x: &mut ViewMut) {
        match self.link() {
            Some(link) => link.sum_ordered(x),
            None => on_host(x, |x| self.all_reduce_sum_ordered(x)),
        }
    }

    /// On return `x[ranges[rank]]` holds the sum over ranks, in the order that the job asks for; the rest is unspecified.
    pub fn sum_scattered(&self, x: &mut Flat, ranges: &[Range<usize>], order: GradientOrder) {
        if self.size() == 1 {
            return;
        }
        if let (Flat::Cuda(memory), Some(link)) = (&mut *x, self.link()) {
            let mut x = memory.view_mut(DType::F32);
            self.check(x.len(), ranges);
            return match order {
                GradientOrder::Fast => link.sum_scattered(&mut x, ranges),
                GradientOrder::Fixed => link.sum_tree(&mut x, ranges),
            };
        }
        x.on_host(|x| match order {
            GradientOrder::Fast => self.reduce_scatter_sum(x, ranges),
            GradientOrder::Fixed => self.reduce_scatter_tree(x, ranges),
        });
    }

    /// `all_gather` of f32 values.
    pub fn gather_flat(&self, x: &mut Flat, ranges: &[Range<usize>]) {
        match x {
            _ if self.size() == 1 => {}
            Flat::Cpu(x) => self.all_gather(x, ranges),
            Flat::Cuda(memory) => self.gather_view(&mut memory.view_mut(DType::F32), ranges),
        }
    }

    /// `all_gather` of f32 values on the GPU.
    pub fn gather_view(&self, x: &mut ViewMut, ranges: &[Range<usize>]) {
        self.check(x.len(), ranges);
        match self.link() {
            _ if self.size() == 1 => {}
            Some(link) => link.gather(x, ranges),
            None => on_host(x, |x| self.all_gather(x, ranges)),
        }
    }

    /// `all_gather` of bf16 weights on the GPU.
    pub fn gather_weights(&self, x: &mut Memory, ranges: &[Range<usize>]) {
        if self.size() == 1 {
            return;
        }
        let len = ranges.iter().map(|range| range.end).max().unwrap_or(0);
        if let Some(link) = self.link() {
            self.check(len, ranges);
            return link.gather(&mut x.view_mut(DType::Bf16).part(0..len), ranges);
        }
        // Down goes what this rank has, up what the others had.
        let own = ranges[self.rank()].clone();
        let mut values = vec![0u16; len];
        let mut x = x.view_mut(DType::Bf16).part(0..len);
        x.as_view().part(own.clone()).read_bits(&mut values[own.clone()]);
        self.all_gather_u16(&mut values, ranges);
        for range in ranges.iter().filter(|range| **range != own && !range.is_empty()) {
            x.reborrow().part(range.clone()).write_bits(&values[range.clone()]);
        }
    }

    /// `all_to_all` of bf16 weights on the GPU. Through the host go those that travel, and no others.
    ///
    /// # Panics
    /// As `all_to_all`.
    pub fn weights_to_all(&self, send: &Memory, to: &[Range<usize>], receive: &mut Memory, from: &[Range<usize>]) {
        if let Some(link) = self.link() {
            return link.all_to_all(send.view(DType::Bf16), to, &mut receive.view_mut(DType::Bf16), from);
        }
        let end = |ranges: &[Range<usize>]| ranges.iter().map(|range| range.end).max().unwrap_or(0);
        let (values, mut received): (Vec<u16>, _) = (send.read(end(to)), vec![0u16; end(from)]);
        self.all_to_all_u16(&values, to, &mut received, from);
        receive.write(&received);
    }

    /// `all_gather` of weights.
    pub fn gather_words(&self, x: &mut WordBuffer, ranges: &[Range<usize>]) {
        if let WordBuffer::Cuda(memory) = x {
            return self.gather_weights(memory, ranges);
        }
        match x.words_mut() {
            WordsMut::F32(x) => self.all_gather(x, ranges),
            WordsMut::Bf16(x) => self.all_gather_u16(x, ranges),
            WordsMut::Cuda(_) => unreachable!("gathered above"),
        }
    }

    /// `all_to_all` of weights.
    ///
    /// # Panics
    /// As `all_to_all`, or if they are of different kinds.
    pub fn words_to_all(
        &self,
        send: &WordBuffer,
        to: &[Range<usize>],
        receive: &mut WordBuffer,
        from: &[Range<usize>],
    ) {
        if let (WordBuffer::Cuda(send), WordBuffer::Cuda(receive)) = (send, &mut *receive) {
            return self.weights_to_all(send, to, receive, from);
        }
        match (send.words(), receive.words_mut()) {
            (Words::F32(send), WordsMut::F32(receive)) => self.all_to_all(send, to, receive, from),
            (Words::Bf16(send), WordsMut::Bf16(receive)) => self.all_to_all_u16(send, to, receive, from),
            (send, receive) => panic!("{send:?} into {receive:?}"),
        }
    }

    /// `shift` of a block of values on the GPU.
    ///
    /// # Panics
    /// If the dtypes differ.
    pub fn shift_block(&self, send: View, receive: &mut ViewMut) {
        assert_eq!(send.dtype(), receive.dtype(), "a block of another dtype comes around the ring");
        match self.link() {
            _ if self.size() == 1 => receive.copy_from(send),
            Some(link) => link.shift(send, receive),
            None => {
                let mut received = vec![0.0; receive.len()];
                self.shift(&send.to_f32(), &mut received);
                receive.write(&received);
            }
        }
    }

    /// `shift` of a tensor.
    ///
    /// # Panics
    /// If the dtypes differ.
    pub fn shift_tensor(&self, send: &Tensor, receive: &mut Tensor) {
        match send.device() {
            Device::Cpu => self.shift(send.data(), receive.data_mut()),
            Device::Cuda => self.shift_block(send.cuda(), &mut receive.cuda_mut()),
        }
    }

    /// `all[ranges[r]]` = rank r's `part`, in f32.
    pub fn gather_tensor(&self, part: &Tensor, all: &mut Tensor, ranges: &[Range<usize>]) {
        let own = ranges[self.rank()].clone();
        match part.device() {
            Device::Cpu => {
                all.data_mut()[own].copy_from_slice(part.data());
                self.all_gather(all.data_mut(), ranges);
            }
            Device::Cuda => {
                all.cuda_mut().part(own).copy_from(part.cuda());
                self.gather_view(&mut all.cuda_mut(), ranges);
            }
        }
    }

    /// `all_to_all` of f32 tensors of one device.
    ///
    /// # Panics
    /// As `all_to_all`.
    pub fn tensor_to_all(&self, send: &Tensor, to: &[Range<usize>], receive: &mut Tensor, from: &[Range<usize>]) {
        if let (Device::Cuda, Some(link)) = (send.device(), self.link()) {
            assert_eq!((to.len(), from.len()), (self.size(), self.size()), "one range a rank of axis {}", self.axis());
            return link.all_to_all(send.cuda(), to, &mut receive.cuda_mut(), from);
        }
        let send = send.host();
        receive.on_host(|receive| self.all_to_all(&send, to, receive, from));
    }
}

/// Calls `work` with a copy of the values on the host, and writes it back.
fn on_host(x: &mut ViewMut, work: impl FnOnce(&mut [f32])) {
    let mut values = x.to_f32();
    work(&mut values);
    x.write(&values);
}
