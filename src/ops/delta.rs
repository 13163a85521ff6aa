//! The gated delta rule (arXiv:2412.06464) and the convolution before it, over whole sequences and over a cache of states.
//!
//! For each value head, with the state S (key dim, value dim), S_0 = 0: S' = a_t S_(t-1), u_t = b_t (v_t - S'^T k_t),
//! S_t = S' + k_t u_t^T, o_t = S_t^T q_t. All sums have one order, token by token, so training, prefill in any chunking,
//! and decoding agree bitwise.

use super::attention::{Packed, Paged};
pub use crate::device::cpu::delta::{DeltaShape, StateRow};
use crate::device::cpu::delta::{Inputs, Slopes, StatePages};
use crate::device::cpu::{conv, delta};
use crate::device::cuda;
use crate::device::cuda::states::{self, StateTable};
use crate::device::{Device, null};
use crate::sys::trace;
use crate::tensor::{Flat, Slice, SliceMut, Tensor};
use std::cell::OnceCell;
use std::sync::Arc;

/// The cache of one layer: pages with the state of a sequence, the inputs of the convolutions before its next token
/// and then S. All are f32.
#[derive(Debug)]
pub struct StateLayer {
    values: Flat,
    page_len: usize,
}

impl StateLayer {
    /// A cache of `pages` pages of `page_len` values.
    pub fn new(device: Device, pages: usize, page_len: usize) -> Self {
        Self { values: Flat::zeros(device, pages * page_len), page_len }
    }

    pub fn bytes(&self) -> usize {
        self.values.bytes()
    }

    /// Copies page `from` to page `to`, for a state from which several sequences continue.
    pub fn copy_page(&mut self, from: u32, to: u32) {
        let len = self.page_len;
        match self.values.all_mut() {
            SliceMut::Cuda(values) => states::copy_page(values, len, from, to),
            values => {
                let (from, to) = (from as usize * len, to as usize * len);
                values.f32().copy_within(from..from + len, to);
            }
        }
    }

    fn pages(&mut self) -> StatePages<'_> {
        StatePages { page_len: self.page_len, values: self.values.all_mut().f32() }
    }

    fn pages_on_gpu(&mut self, offset: usize) -> states::StatePages<'_> {
        states::StatePages { values: self.values.all_mut().cuda(), page_len: self.page_len, offset }
    }
}

/// The rows of a batch, and the cache of their states if they are not whole sequences.
pub struct States<'a> {
    /// On a CPU, or of whole sequences.
    pub rows: Vec<StateRow>,
    pub cache: Option<&'a mut StateLayer>,
    /// The same on a GPU.
    table: OnceCell<Arc<StateTable>>,
}

impl<'a> States<'a> {
    /// Whole sequences, one after another.
    pub fn whole(cu_seqlens: &[usize]) -> Self {
        Self { rows: StateRow::whole(cu_seqlens), cache: None, table: OnceCell::new() }
    }

    /// The same; on a GPU all layers share a table of them.
    pub fn packed(device: Device, packed: &Packed) -> Self {
        let states = Self::whole(packed.cu_seqlens);
        if device == Device::Cuda { Self { table: OnceCell::from(packed.states()), ..states } } else { states }
    }

    /// New tokens of sequences whose last pages in the cache have their states.
    ///
    /// # Panics
    /// If a sequence has no page.
    pub fn cached(cache: &'a mut StateLayer, paged: &Paged) -> Self {
        if cache.values.device() == Device::Cuda {
            return Self { rows: Vec::new(), cache: Some(cache), table: OnceCell::from(paged.states()) };
        }
        let mut start = 0;
        let row = |sequence: &super::attention::PagedSequence| {
            let (tokens, page) = (sequence.tokens, sequence.blocks.last().expect("a sequence has a page"));
            start += tokens;
            StateRow { start: start - tokens, tokens, is_first: sequence.past == 0, page: Some(*page) }
        };
        let rows = paged.sequences().iter().map(row).collect();
        Self { rows, cache: Some(cache), table: OnceCell::new() }
    }

    /// The table for GPU kernels.
    fn table(&self) -> Arc<StateTable> {
        self.table.get_or_init(|| Arc::new(StateTable::whole(&self.rows))).clone()
    }
}

/// y (t, c) = silu(the sum of the last n inputs x (t, c) times their taps w (c, n)). The inputs that later tokens need are
/// at `offset` in the pages.
pub fn conv_forward<'a>(x: &Tensor, w: impl Into<Slice<'a>>, states: &mut States, offset: usize, y: &mut Tensor) {
    let (w, channels) = (w.into(), x.width());
    super::check("convolution", "y", y, x.rows(), channels);
    assert!(w.len().is_multiple_of(channels), "convolution: {} taps for {channels} channels", w.len());
    match x.device() {
        Device::Cpu => {
            let mut pages = states.cache.as_mut().map(|cache| cache.pages());
            let pages = pages.as_mut().map(|pages| (pages, offset));
            conv::forward(x.data(), w.f32(), channels, &states.rows, pages, y.data_mut());
        }
        Device::Cuda => {
            let table = states.table();
            let pages = states.cache.as_mut().map(|cache| cache.pages_on_gpu(offset));
            cuda::conv::forward(x.cuda(), w.cuda(), channels, &table, pages, y.cuda_mut());
        }
    }
}

/// dx from dy, for whole sequences. Adds dw.
pub fn conv_backward<'a, 'b>(
    x: &Tensor,
    w: impl Into<Slice<'a>>,
    states: &States,
    mut dy: Tensor,
    dw: impl Into<SliceMut<'b>>,
) -> Tensor {
    super::check("convolution", "dy", &dy, x.rows(), x.width());
    let mut dx = x.like(x.rows(), x.width());
    let (w, dw, channels) = (w.into(), dw.into(), x.width());
    match x.device() {
        Device::Cpu => {
            conv::backward(x.data(), w.f32(), channels, &states.rows, dy.data_mut(), dx.data_mut(), dw.f32());
        }
        Device::Cuda => {
            let table = states.table();
            cuda::conv::backward(x.cuda(), w.cuda(), channels, &table, dy.cuda_mut(), dx.cuda_mut(), dw.cuda());
        }
    }
    dx
}

/// The tensors of the rule: q, k (t, key heads * key dim), v (t, value heads * value dim), decay and rate (t, value heads).
/// The last two are f32 on every device.
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
    let _span = trace::operation("delta rule", "tokens width", || [o.rows(), o.width()]);
    match o.device() {
        Device::Cpu => {
            null::note(null::ATTENTION, flops(shape, o.rows()), 0.0);
            let mut pages = states.cache.as_mut().map(|cache| cache.pages());
            let pages = pages.as_mut().map(|pages| (pages, offset));
            delta::forward(&inputs(x), &states.rows, shape, pages, o.data_mut());
        }
        Device::Cuda => {
            let table = states.table();
            // A state is read and written.
            let kept = if states.cache.is_some() { 2 * table.count * shape.state_len() * size_of::<f32>() } else { 0 };
            null::note(null::ATTENTION, flops(shape, o.rows()), kept as f64);
            let pages = states.cache.as_mut().map(|cache| cache.pages_on_gpu(offset));
            cuda::delta::forward(x.map(Tensor::cuda), shape, &table, pages, o.cuda_mut());
        }
    }
    o
}

/// The gradients of the inputs from d_o, for whole sequences.
pub fn backward(x: Tensors<&Tensor>, shape: &DeltaShape, states: &States, d_o: &Tensor) -> Tensors<Tensor> {
    check(shape, x);
    let [q, k, v] = [0, 1, 2].map(|i| x[i].like(x[i].rows(), x[i].width()));
    let [decay, rate] = [3, 4].map(|i| x[i].statistics(x[i].rows(), x[i].width()));
    let mut slopes = [q, k, v, decay, rate];
    null::note(null::ATTENTION_BACKWARD, 3.0 * flops(shape, d_o.rows()), 0.0);
    let _span = trace::operation("delta rule backward", "tokens width", || [d_o.rows(), d_o.width()]);
    match d_o.device() {
        Device::Cpu => {
            let [q, k, v, decay, rate] = slopes.each_mut().map(Tensor::data_mut);
            delta::backward(&inputs(x), &states.rows, shape, d_o.data(), Slopes { q, k, v, decay, rate });
        }
        Device::Cuda => {
            let to = slopes.each_mut().map(Tensor::cuda_mut);
            cuda::delta::backward(x.map(Tensor::cuda), shape, &states.table(), d_o.cuda(), to);
        }
    }
    slopes
}

/// The decay exp(-exp(A) softplus(x + d)) and the rate sigmoid(y) of each token and value head, from projections x and y
/// (t, heads) and parameters A and d (heads).
pub fn gates([x, y]: [&Tensor; 2], parameters: [Slice; 2]) -> [Tensor; 2] {
    let [mut decay, mut rate] = [x, y].map(|x| x.statistics(x.rows(), x.width()));
    match x.device() {
        Device::Cpu => {
            let [log_a, bias] = parameters.map(Slice::f32);
            delta::gates(x.data(), y.data(), log_a, bias, decay.data_mut(), rate.data_mut());
        }
        Device::Cuda => {
            let to = [decay.cuda_mut(), rate.cuda_mut()];
            cuda::delta::gates([x.cuda(), y.cuda()], parameters.map(Slice::cuda), to);
        }
    }
    [decay, rate]
}

/// dx and dy from the gradients of decay and rate. Adds those of A and d.
pub fn gates_backward(
    [x, y]: [&Tensor; 2],
    parameters: [Slice; 2],
    [mut decay, mut rate]: [Tensor; 2],
    gradients: [SliceMut; 2],
) -> [Tensor; 2] {
    match x.device() {
        Device::Cpu => {
            let slopes = [decay.data_mut(), rate.data_mut()];
            let (parameters, gradients) = (parameters.map(Slice::f32), gradients.map(SliceMut::f32));
            delta::gates_backward([x.data(), y.data()], parameters, slopes, gradients);
            [decay, rate]
        }
        Device::Cuda => {
            let [mut dx, mut dy] = [x, y].map(|x| x.like(x.rows(), x.width()));
            let (parameters, gradients) = (parameters.map(Slice::cuda), gradients.map(SliceMut::cuda));
            let (slopes, to) = ([decay.cuda(), rate.cuda()], [dx.cuda_mut(), dy.cuda_mut()]);
            cuda::delta::gates_backward([x.cuda(), y.cuda()], parameters, slopes, to, gradients);
            [dx, dy]
        }
    }
}
