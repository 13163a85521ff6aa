//! y[t] = W[token[t]], for W in row or panel layout (tied embeddings share the head's panels), f32 or bf16.

use crate::device::cpu::embedding::Place;
use crate::device::cuda::ScatterLists;
use crate::device::{Device, cpu, cuda};
use crate::tensor::{Indices, Layout, PANEL, Slice, Tensor, Weight, WeightMut};

/// A forward with W as the rows of the tokens from `first` on. y is 0 for other tokens, so the sum over all parts is
/// the result.
pub fn forward_part(tokens: &Indices, first: usize, w: Weight, y: &mut Tensor) {
    check(tokens.len(), w.k, w.layout, y);
    let place = |t: usize| Some(place(w.layout, w.k, row(tokens[t], first, w.n)?));
    match w.values {
        Slice::F32(values) => cpu::embedding::gather(values, w.k, &place, y.data_mut()),
        Slice::Cuda(values) => {
            cuda::embedding::forward(tokens.cuda(), first, values.part(0..w.n * w.k), w.k, y.cuda_mut());
        }
        Slice::Bf16(values) => {
            assert_eq!(w.layout, Layout::Panel, "embedding: bf16 values must be in panels");
            let pairs = |t: usize| {
                let lane = row(tokens[t], first, w.n)? % PANEL;
                let Place { start, step } = place(t)?;
                // The lane's pair, not the lane: two columns interleave.
                Some(Place { start: start + lane, step })
            };
            cpu::embedding::gather_bf16(values, w.k, &pairs, y.data_mut());
        }
    }
}

/// dW[token[t]] += dy[t], for the rows of the tokens from `first` on.
pub fn backward_part(tokens: &[u32], first: usize, dy: &Tensor, dw: WeightMut) {
    check(tokens.len(), dw.k, dw.layout, dy);
    let (layout, n, k) = (dw.layout, dw.n, dw.k);
    let place = |t: usize| Some(place(layout, k, row(tokens[t], first, n)?));
    match dy.device() {
        Device::Cpu => cpu::embedding::scatter(dy.data(), k, &place, dw.values.f32()),
        Device::Cuda => {
            let dw = dw.values.cuda().part(0..n * k);
            cuda::embedding::backward(&ScatterLists::from_keys(tokens), first, dy.cuda(), k, dw);
        }
    }
}

/// The row of a token among the `n` from `first` on.
fn row(token: u32, first: usize, n: usize) -> Option<usize> {
    (token as usize).checked_sub(first).filter(|&row| row < n)
}

/// Row n of a matrix of k columns, by `Layout::index`.
fn place(layout: Layout, k: usize, n: usize) -> Place {
    let step = match layout {
        Layout::Row => 1,
        Layout::Panel => PANEL,
    };
    Place { start: layout.index(k, n, 0), step }
}

fn check(tokens: usize, k: usize, layout: Layout, y: &Tensor) {
    assert!(
        y.rows() == tokens && y.width() == k,
        "embedding: {tokens} tokens of width {k} do not fit ({}, {}) ({layout:?} layout)",
        y.rows(),
        y.width()
    );
}
