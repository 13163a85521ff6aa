//! Attention over blocks of keys, which are passed around the ranks of the sequence axis (arXiv:2310.01889).
//!
//! A block (2t, g*e) contains the keys of a rank's rows, followed by their values. Its gradients are f32 in the same
//! layout. (sum, lse) hold the result over the blocks so far: the softmax over their keys, in f32 on every device, and
//! the log-sum-exp of the scaled scores. The keys of the next block are merged in: l = ln(exp l0 + exp l1), o =
//! exp(l0 - l) o0 + exp(l1 - l) o1 (arXiv:2205.14135, section 3.1). The order of the blocks affects the last bits of
//! f32. A GPU rounds the same values to bf16 as without a ring: probabilities as factors, and o once, at the end.

use super::attention_shape::{AttentionShape, Span, check, check_heads, delta, note_backward, note_pairs};
use super::zigzag;
use crate::device::cuda::attention::SpanTable;
use crate::device::cuda::{View, ViewMut};
use crate::device::{Device, cpu, cuda, null};
use crate::sys::trace;
use crate::tensor::Tensor;

/// The spans of one block that a rank's rows see.
#[derive(Debug)]
pub struct Step {
    seen: Seen,
    shape: AttentionShape,
    /// One past the last row of q that sees anything.
    rows: usize,
    /// The number of key rows in the block.
    tokens: usize,
    /// Whether it is the first step, which overwrites results.
    is_first: bool,
    /// The number of pairs of a query and a key, for a plan.
    pairs: f64,
}

/// The spans in passes. Within a pass no row and no key occurs twice.
#[derive(Debug)]
enum Seen {
    Cpu(Vec<Vec<Span>>),
    /// The passes, at least one. The first has all keys of the block and, in a first step, all rows.
    Cuda(Vec<SpanTable>),
}

impl Step {
    /// A step from the `passes` over a block with the keys of `tokens` rows.
    ///
    /// # Panics
    /// If a span is not within the block, or has a row that sees no key.
    pub fn new(device: Device, passes: Vec<Vec<Span>>, shape: &AttentionShape, tokens: usize, is_first: bool) -> Self {
        check_heads(shape);
        for span in passes.iter().flatten() {
            let last = (span.past + span.tokens).saturating_sub(1);
            let sees = span.tokens > 0 && span.keys > 0 && shape.visible(last).start < span.keys;
            assert!(sees && span.key_row + span.keys <= tokens, "attention: {span:?} does not fit {tokens} rows of k");
        }
        let pairs = || passes.iter().map(|pass| zigzag::pairs(pass, shape)).sum::<usize>() as f64;
        let pairs = if null::is_active() { pairs() } else { 0.0 };
        let rows = passes.iter().flatten().map(|span| span.row + span.tokens).max().unwrap_or(0);
        let seen = match device {
            Device::Cpu => Seen::Cpu(passes),
            Device::Cuda => {
                let first = SpanTable::of_block(passes.first().map_or(&[], Vec::as_slice), shape, tokens);
                let others = passes.iter().skip(1).map(|pass| SpanTable::new(pass, shape));
                Seen::Cuda(std::iter::once(first).chain(others).collect())
            }
        };
        Self { seen, shape: *shape, rows, tokens, is_first, pairs }
    }

    /// The number of rows of the block.
    pub fn block_rows(&self) -> usize {
        2 * self.tokens
    }

    fn check(&self, q: &Tensor, block: &Tensor) {
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        check("q", q, q.rows().max(self.rows), heads * head_dim);
        check("the block", block, self.block_rows(), kv_heads * head_dim);
    }
}

/// The steps of one rank. The first uses its own block, the next that of the previous rank, and so on. They are made
/// once for all layers of a shape.
#[derive(Debug)]
pub struct Steps {
    pub steps: Vec<Step>,
    /// The number of this rank's rows.
    pub rows: usize,
}

impl Steps {
    /// The steps of rank `rank` of `size` for the packed row of `cu_seqlens`.
    pub fn new(device: Device, cu_seqlens: &[usize], shape: &AttentionShape, rank: usize, size: usize) -> Self {
        let queries = zigzag::pieces(cu_seqlens, rank, size);
        let step = |s: usize| {
            let from = (rank + size - s) % size;
            let passes = zigzag::passes(&queries, &zigzag::pieces(cu_seqlens, from, size), shape);
            Step::new(device, passes, shape, zigzag::tokens(cu_seqlens, from, size), s == 0)
        };
        Self { steps: (0..size).map(step).collect(), rows: zigzag::tokens(cu_seqlens, rank, size) }
    }
}

/// Makes the block of k and v (t, g*e).
pub fn block(k: &Tensor, v: &Tensor) -> Tensor {
    check("v", v, k.rows(), k.width());
    Tensor::stacked(&[k, v])
}

/// Returns the gradients of k and v, as activations, from those of their block.
pub fn unblock(block: &Tensor) -> [Tensor; 2] {
    let (rows, width) = (block.rows() / 2, block.width());
    let half = rows * width;
    [0..half, half..2 * half].map(|range| {
        let mut to = block.like(rows, width);
        match block.device() {
            Device::Cpu => cpu::copy::copy(&block.data()[range], to.data_mut()),
            Device::Cuda => cuda::copy::cast(block.cuda().part(range), to.cuda_mut()),
        }
        to
    })
}

/// Returns a sum over all blocks as an activation.
pub fn rounded(sum: Tensor) -> Tensor {
    match sum.device() {
        Device::Cpu => sum,
        Device::Cuda => {
            let mut to = sum.like(sum.rows(), sum.width());
            cuda::copy::cast(sum.cuda(), to.cuda_mut());
            to
        }
    }
}

/// Merges attention of q (t, h*e) over the keys of a block into (sum (t, h*e), lse (t, h)), which are `statistics`. The
/// first step overwrites them.
pub fn forward(q: &Tensor, block: &Tensor, step: &Step, sum: &mut Tensor, lse: &mut Tensor) {
    step.check(q, block);
    check("the sum", sum, q.rows(), q.width());
    check("lse", lse, q.rows(), step.shape.heads);
    note_pairs(&step.shape, step.pairs, 0.0);
    let _span = trace::operation("ring attention", "tokens pairs", || [q.rows(), step.pairs as usize]);
    match &step.seen {
        Seen::Cpu(passes) => {
            if step.is_first {
                cpu::copy::fill(sum.data_mut(), 0.0);
                cpu::copy::fill(lse.data_mut(), f32::NEG_INFINITY);
            }
            let (k, v) = halves(block.data());
            for pass in passes {
                let (sum, lse) = (sum.data_mut(), lse.data_mut());
                cpu::attention::forward_rows(q.data(), k, v, pass, true, &step.shape, sum, lse);
            }
        }
        Seen::Cuda(tables) => {
            let [k, v] = views(block);
            for (i, table) in tables.iter().enumerate() {
                let merge = !step.is_first || i > 0;
                cuda::attention::forward(q.cuda(), k, v, table, merge, sum.cuda_mut(), lse.cuda_mut());
            }
        }
    }
}

/// The inputs of a rank's backward at every step.
pub struct Backward<'a> {
    q: &'a Tensor,
    o: &'a Tensor,
    lse: &'a Tensor,
    d_o: &'a Tensor,
    /// The sum of d_o o for each row and head, unless it is recomputed at each step.
    delta: Option<Tensor>,
}

impl<'a> Backward<'a> {
    /// `o` and `lse` are the results over all blocks, `o` as an activation.
    pub fn new([q, o, lse, d_o]: [&'a Tensor; 4], shape: &AttentionShape) -> Self {
        check("o", o, q.rows(), q.width());
        check("lse", lse, q.rows(), shape.heads);
        check("d_o", d_o, q.rows(), q.width());
        let delta = (q.device() == Device::Cuda).then(|| delta(o, d_o, lse, shape));
        Self { q, o, lse, d_o, delta }
    }

    /// Adds the contribution of a block's keys to dq (t, h*e), which the first step overwrites. Returns the block's
    /// gradients from this rank's rows. The equations are those of `attention::backward_packed`.
    pub fn step(&self, block: &Tensor, step: &Step, dq: &mut Tensor) -> Tensor {
        step.check(self.q, block);
        check("dq", dq, self.q.rows(), self.q.width());
        note_backward(&step.shape, step.pairs);
        let _span = trace::operation("ring attention backward", "tokens pairs", || [dq.rows(), step.pairs as usize]);
        let mut dblock = block.statistics(block.rows(), block.width());
        match &step.seen {
            Seen::Cpu(passes) => self.on_cpu(block, step, passes, dq, &mut dblock),
            Seen::Cuda(tables) => self.on_gpu(block, step, tables, dq, &mut dblock),
        }
        dblock
    }

    fn on_cpu(&self, block: &Tensor, step: &Step, passes: &[Vec<Span>], dq: &mut Tensor, dblock: &mut Tensor) {
        cpu::copy::fill(dblock.data_mut(), 0.0);
        if step.is_first {
            cpu::copy::fill(dq.data_mut(), 0.0);
        }
        let (k, v) = halves(block.data());
        let (dk, dv) = dblock.data_mut().split_at_mut(k.len());
        let results = [self.o, self.lse, self.d_o].map(Tensor::data);
        for pass in passes {
            let gradients = [dq.data_mut(), &mut *dk, &mut *dv];
            cpu::attention::backward_rows([self.q.data(), k, v], results, pass, true, &step.shape, gradients);
        }
    }

    fn on_gpu(&self, block: &Tensor, step: &Step, tables: &[SpanTable], dq: &mut Tensor, dblock: &mut Tensor) {
        let delta = self.delta.as_ref().expect("it is made for tensors on the GPU");
        let slopes = [self.lse, delta, self.d_o].map(Tensor::cuda);
        let [k, v] = views(block);
        let qkv = [self.q.cuda(), k, v];
        let mut dblock = dblock.cuda_mut();
        let half = dblock.len() / 2;
        let (mut dk, mut dv) = dblock.split_at(half);
        for (i, table) in tables.iter().enumerate() {
            let gradients: [ViewMut; 2] = [dk.reborrow(), dv.reborrow()];
            let add = [!step.is_first || i > 0, i > 0];
            cuda::attention_backward::backward(qkv, slopes, table, add, dq.cuda_mut(), gradients);
        }
    }
}

fn halves(block: &[f32]) -> (&[f32], &[f32]) {
    block.split_at(block.len() / 2)
}

fn views(block: &Tensor) -> [View<'_>; 2] {
    let (all, half) = (block.cuda(), block.rows() / 2 * block.width());
    [all.part(0..half), all.part(half..2 * half)]
}
