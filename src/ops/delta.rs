//! The gated delta rule (arXiv:2412.06464) and the convolution before it, over whole sequences and over a cache of states.
//! No GPU kernel supports them.
//!
//! For each value head, with the state S (key dim, value dim), S_0 = 0: S' = a_t S_(t-1), u_t = b_t (v_t - S'^T k_t),
//! S_t = S' + k_t u_t^T, o_t = S_t^T q_t. All sums have one order, token by token, so training, prefill in any chunking,
//! and decoding agree bitwise.

use super::attention::Paged;
use crate::device::Device;
pub use crate::device::cpu::delta::{DeltaShape, StateRow};
use crate::device::cpu::delta::{Inputs, Slopes, StatePages};
use crate::device::cpu::{conv, delta};
use crate::device::null;
use crate::dtype::DType;
use crate::tensor::{Flat, Tensor};

/// The cache of one layer: pages with the state of a sequence, the inputs of the convolutions before its next token
/// and then S. All are f32.
#[derive(Debug)]
pub struct StateLayer {
    values: Flat,
    page_len: usize,
}

impl StateLayer {
    /// A cache of `pages` pages of `page_len` values.
    pub fn new(pages: usize, page_len: usize) -> Self {
        let mut values = Flat::weights(Device::Cpu, DType::F32, pages * page_len);
        values.clear();
        Self { values, page_len }
    }

    pub fn bytes(&self) -> usize {
        self.values.bytes()
    }

    /// Copies page `from` to page `to`, for a state from which several sequences continue.
    pub fn copy_page(&mut self, from: u32, to: u32) {
        let (from, to, len) = (from as usize * self.page_len, to as usize * self.page_len, self.page_len);
        self.values.all_mut().f32().copy_within(from..from + len, to);
    }

    fn pages(&mut self) -> StatePages<'_> {
        StatePages { page_len: self.page_len, values: self.values.all_mut().f32() }
    }
}

/// The rows of a batch, and the cache of their states if they are not whole sequences.
pub struct States<'a> {
    pub rows: Vec<StateRow>,
    pub cache: Option<&'a mut StateLayer>,
}

impl<'a> States<'a> {
    /// Whole sequences, one after another.
    pub fn whole(cu_seqlens: &[usize]) -> Self {
        Self { rows: StateRow::whole(cu_seqlens), cache: None }
    }

    /// New tokens of sequences whose last pages in the cache have their states.
    ///
    /// # Panics
    /// If a sequence has no page.
    pub fn cached(cache: &'a mut StateLayer, paged: &Paged) -> Self {
        let mut start = 0;
        let row = |sequence: &super::attention::PagedSequence| {
            let (tokens, page) = (sequence.tokens, sequence.blocks.last().expect("a sequence has a page"));
            start += tokens;
            StateRow { start: start - tokens, tokens, is_first: sequence.past == 0, page: Some(*page) }
        };
        Self { rows: paged.sequences().iter().map(row).collect(), cache: Some(cache) }
    }
}

/// y (t, c) = silu(the sum of the last n inputs x (t, c) times their taps w (c, n)). The inputs that later tokens need are
/// at `offset` in the pages.
pub fn conv_forward(x: &Tensor, w: &[f32], states: &mut States, offset: usize, y: &mut Tensor) {
    super::check("convolution", "y", y, x.rows(), x.width());
    assert!(w.len().is_multiple_of(x.width()), "convolution: {} taps for {} channels", w.len(), x.width());
    let mut pages = states.cache.as_mut().map(|cache| cache.pages());
    let pages = pages.as_mut().map(|pages| (pages, offset));
    conv::forward(x.data(), w, x.width(), &states.rows, pages, y.data_mut());
}

/// dx from dy, for whole sequences. Adds dw.
pub fn conv_backward(x: &Tensor, w: &[f32], rows: &[StateRow], mut dy: Tensor, dw: &mut [f32]) -> Tensor {
    super::check("convolution", "dy", &dy, x.rows(), x.width());
    let mut dx = x.like(x.rows(), x.width());
    conv::backward(x.data(), w, x.width(), rows, dy.data_mut(), dx.data_mut(), dw);
    dx
}

/// The tensors of the rule: q, k (t, key heads * key dim), v (t, value heads * value dim), decay and rate (t, value heads).
pub type Tensors<T> = [T; 5];

fn check(shape: &DeltaShape, [q, k, v, decay, rate]: Tensors<&Tensor>) {
    let (t, keys, values) = (v.rows(), shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim);
    for (name, x, width) in [
        ("q", q, keys),
        ("k", k, keys),
        ("v", v, values),
        ("decay", decay, shape.value_heads),
        ("rate", rate, shape.value_heads),
    ] {
        super::check("delta rule", name, x, t, width);
    }
}

fn inputs([q, k, v, decay, rate]: Tensors<&Tensor>) -> Inputs<'_> {
    Inputs { q: q.data(), k: k.data(), v: v.data(), decay: decay.data(), rate: rate.data() }
}

/// FLOPs of the rule for `tokens` tokens.
pub fn flops(shape: &DeltaShape, tokens: usize) -> f64 {
    6.0 * (shape.value_heads * shape.key_dim * shape.value_dim * tokens) as f64
}

/// o (t, value heads * value dim). The states are at `offset` in the pages.
pub fn forward(x: Tensors<&Tensor>, shape: &DeltaShape, states: &mut States, offset: usize) -> Tensor {
    check(shape, x);
    let mut o = x[2].like(x[2].rows(), x[2].width());
    null::note(null::ATTENTION, flops(shape, o.rows()), 0.0);
    let mut pages = states.cache.as_mut().map(|cache| cache.pages());
    let pages = pages.as_mut().map(|pages| (pages, offset));
    delta::forward(&inputs(x), &states.rows, shape, pages, o.data_mut());
    o
}

/// The gradients of the inputs from d_o, for whole sequences.
pub fn backward(x: Tensors<&Tensor>, shape: &DeltaShape, rows: &[StateRow], d_o: &Tensor) -> Tensors<Tensor> {
    check(shape, x);
    let mut slopes = x.map(|x| x.like(x.rows(), x.width()));
    null::note(null::ATTENTION_BACKWARD, 3.0 * flops(shape, d_o.rows()), 0.0);
    let [q, k, v, decay, rate] = slopes.each_mut().map(Tensor::data_mut);
    delta::backward(&inputs(x), rows, shape, d_o.data(), Slopes { q, k, v, decay, rate });
    slopes
}

/// The decay exp(-exp(A) softplus(x + d)) and the rate sigmoid(y) of each token and value head, from projections x and y
/// (t, heads) and parameters A and d (heads).
pub fn gates([x, y]: [&Tensor; 2], [log_a, bias]: [&[f32]; 2]) -> [Tensor; 2] {
    let [mut decay, mut rate] = [x, y].map(|x| x.like(x.rows(), x.width()));
    delta::gates(x.data(), y.data(), log_a, bias, decay.data_mut(), rate.data_mut());
    [decay, rate]
}

/// dx and dy from the gradients of decay and rate. Adds those of A and d.
pub fn gates_backward(
    [x, y]: [&Tensor; 2],
    parameters: [&[f32]; 2],
    [mut decay, mut rate]: [Tensor; 2],
    gradients: [&mut [f32]; 2],
) -> [Tensor; 2] {
    let slopes = [decay.data_mut(), rate.data_mut()];
    delta::gates_backward([x.data(), y.data()], parameters, slopes, gradients);
    [decay, rate]
}
