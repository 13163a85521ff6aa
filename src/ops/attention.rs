//! Causal grouped-query attention with optional sliding window, over packed sequences and over a paged KV cache; and
//! without a mask over packed sequences (`Packed::unmasked`).
//!
//! o[t] = sum_j softmax_j(scale q[t].k[j]) v[j] over the keys j <= t of the same sequence (and j > t - window).
//! Keys are processed in ascending blocks of `PAGE` tokens, aligned to the start of the sequence, with online softmax
//! (arXiv:2205.14135). So packed training, prefill in any chunking, and decode agree bitwise.

pub use super::attention_shape::{AttentionShape, PAGE, PagedSequence, Span, flops, pairs};
use super::attention_shape::{check, check_heads, delta, note_backward, note_pairs};
use super::ring_attention::Steps;
use super::rope::{self, RopeTable};
use crate::device::cpu::attention::Cached;
use crate::device::cpu::delta::StateRow;
use crate::device::cuda::attention::SpanTable;
use crate::device::cuda::decode;
use crate::device::cuda::kv_cache::{KvPages, SequenceTable};
use crate::device::cuda::states::StateTable;
use crate::device::{Device, cpu, cuda, null};
use crate::dtype::{DType, KvDtype};
use crate::sys::lock::lock;
use crate::sys::trace;
use crate::tensor::{Flat, Indices, Slice, SliceMut, Tensor};
use std::sync::{Arc, Mutex, OnceLock};

/// Lookup tables for GPU kernels, one per shape of a layer, made at the first use of the shape.
#[derive(Debug)]
struct Tables<T>(Mutex<Vec<(AttentionShape, Arc<T>)>>);

impl<T> Default for Tables<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Tables<T> {
    fn get_or_make(&self, shape: &AttentionShape, make: impl FnOnce() -> T) -> Arc<T> {
        let mut tables = lock(&self.0);
        if let Some((_, table)) = tables.iter().find(|(known, _)| known == shape) {
            return table.clone();
        }
        let table = Arc::new(make());
        tables.push((*shape, table.clone()));
        table
    }
}

/// Whole sequences, one after another: `cu_seqlens` = [0, end of sequence 0, ...]. All layers of a forward share one.
#[derive(Debug)]
pub struct Packed<'a> {
    pub cu_seqlens: &'a [usize],
    spans: Vec<Span>,
    tables: Tables<SpanTable>,
    steps: Tables<Steps>,
    states: OnceLock<Arc<StateTable>>,
}

impl<'a> Packed<'a> {
    /// Sequences in which every token sees all tokens, on a CPU: those after it, too.
    pub fn unmasked(cu_seqlens: &'a [usize]) -> Self {
        let mut packed = Self::from(cu_seqlens);
        // As if all queries came after the keys.
        packed.spans.iter_mut().for_each(|span| span.past = span.keys);
        packed
    }

    fn cuda(&self, shape: &AttentionShape) -> Arc<SpanTable> {
        self.tables.get_or_make(shape, || SpanTable::new(&self.spans, shape))
    }

    /// The sequences as layers with states read them on a GPU.
    pub fn states(&self) -> Arc<StateTable> {
        self.states.get_or_init(|| Arc::new(StateTable::whole(&StateRow::whole(self.cu_seqlens)))).clone()
    }

    /// The steps of rank `rank` among the `size` ranks that share the sequences. Each process is one rank.
    pub fn ring(&self, device: Device, shape: &AttentionShape, rank: usize, size: usize) -> Arc<Steps> {
        self.steps.get_or_make(shape, || Steps::new(device, self.cu_seqlens, shape, rank, size))
    }
}

impl<'a> From<&'a [usize]> for Packed<'a> {
    fn from(cu_seqlens: &'a [usize]) -> Self {
        let (tables, steps) = (Tables::default(), Tables::default());
        Self { cu_seqlens, spans: Span::whole(cu_seqlens), tables, steps, states: OnceLock::new() }
    }
}

/// The numbers of a span.
const LABELS: &str = "tokens sequences heads head_dim";

fn sizes(q: &Tensor, sequences: usize, shape: &AttentionShape) -> [usize; 4] {
    [q.rows(), sequences, shape.heads, shape.head_dim]
}

/// q (t, h*e), k and v (t, g*e), already rotated. Writes o (t, h*e) and
/// lse (t, h), the natural log-sum-exp of the scaled scores.
pub fn forward_packed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    packed: &Packed,
    shape: &AttentionShape,
    o: &mut Tensor,
    lse: &mut Tensor,
) {
    check_packed(q, k, v, packed.cu_seqlens, shape);
    check("o", o, q.rows(), q.width());
    check("lse", lse, q.rows(), shape.heads);
    note_pairs(shape, pairs_of(packed, shape), 0.0);
    let _span = trace::operation("attention", LABELS, || sizes(q, packed.cu_seqlens.len() - 1, shape));
    match q.device() {
        Device::Cpu => cpu::attention::forward_rows(
            q.data(),
            k.data(),
            v.data(),
            &packed.spans,
            false,
            shape,
            o.data_mut(),
            lse.data_mut(),
        ),
        Device::Cuda => {
            let (o, lse) = (o.cuda_mut(), lse.cuda_mut());
            cuda::attention::forward(q.cuda(), k.cuda(), v.cuda(), &packed.cuda(shape), false, o, lse);
        }
    }
}

/// Gradients of `forward_packed`; dq, dk, dv are overwritten. With p[t][j] = exp(scale q[t].k[j] - lse[t]) and
/// delta[t] = d_o[t].o[t]: ds[t][j] = scale p[t][j] (d_o[t].v[j] - delta[t]); dq[t] = sum_j ds[t][j] k[j];
/// dk[j] = sum_t ds[t][j] q[t]; dv[j] = sum_t p[t][j] d_o[t], the last two over all heads of the key's group.
pub fn backward_packed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    o: &Tensor,
    lse: &Tensor,
    d_o: &Tensor,
    packed: &Packed,
    shape: &AttentionShape,
    dq: &mut Tensor,
    dk: &mut Tensor,
    dv: &mut Tensor,
) {
    check_packed(q, k, v, packed.cu_seqlens, shape);
    check("o", o, q.rows(), q.width());
    check("lse", lse, q.rows(), shape.heads);
    check("d_o", d_o, q.rows(), q.width());
    check("dq", dq, q.rows(), q.width());
    check("dk", dk, k.rows(), k.width());
    check("dv", dv, k.rows(), k.width());
    note_backward(shape, pairs_of(packed, shape));
    let _span = trace::operation("attention backward", LABELS, || sizes(q, packed.cu_seqlens.len() - 1, shape));
    match q.device() {
        Device::Cpu => cpu::attention::backward_rows(
            [q, k, v].map(Tensor::data),
            [o, lse, d_o].map(Tensor::data),
            &packed.spans,
            false,
            shape,
            [dq, dk, dv].map(Tensor::data_mut),
        ),
        Device::Cuda => {
            let delta = delta(o, d_o, lse, shape);
            let (inputs, slopes) = ([q, k, v].map(Tensor::cuda), [lse, &delta, d_o].map(Tensor::cuda));
            let gradients = [dk.cuda_mut(), dv.cuda_mut()];
            let table = packed.cuda(shape);
            cuda::attention_backward::backward(inputs, slopes, &table, [false; 2], dq.cuda_mut(), gradients);
        }
    }
}

/// Rounds keys or values to the precision of the KV cache for weights of `dtype`, so that training and sampling see the
/// same. Gradients pass as if they were not rounded. On GPUs they are bf16 before.
pub fn round_as_cached(x: &mut Tensor, dtype: DType, shape: &AttentionShape) {
    match (x.device(), shape.kv, dtype) {
        (Device::Cpu, KvDtype::Fp8, _) => cpu::kv_codes::round(x.data_mut(), shape.head_dim),
        (Device::Cpu, KvDtype::Model, DType::Bf16) => cpu::copy::round_to_bf16(x.data_mut()),
        (Device::Cpu, KvDtype::Model, DType::F32) | (Device::Cuda, KvDtype::Model, _) => {}
        (Device::Cuda, KvDtype::Fp8, _) => cuda::kv_cache::round(x.cuda_mut(), shape.head_dim),
    }
}

/// The KV cache of one layer: pages of `PAGE` tokens.
#[derive(Debug)]
pub enum KvLayer {
    /// Keys and values in the dtype of weights. Keys of a page are transposed, [g][e][PAGE]; values are [g][PAGE][e]. If
    /// values are keys, there are no keys. In 8 bits, PAGE powers follow each head, and four bytes are a number of f32.
    Cpu { keys: Flat, values: Flat },
    /// bf16, or the same 8 bits.
    Cuda(KvPages),
}

impl KvLayer {
    /// A zeroed cache for a model with weights of `dtype`.
    pub fn new(device: Device, dtype: DType, pages: usize, shape: &AttentionShape) -> Self {
        match device {
            Device::Cpu => {
                let dtype = if shape.kv == KvDtype::Fp8 { DType::F32 } else { dtype };
                let zeros = |pages: usize| {
                    let mut flat = Flat::weights(device, dtype, pages * page_len(shape));
                    flat.clear();
                    flat
                };
                Self::Cpu { keys: zeros(if shape.values_are_keys { 0 } else { pages }), values: zeros(pages) }
            }
            Device::Cuda => Self::Cuda(KvPages::new(pages, shape)),
        }
    }

    /// The bytes of the keys and values of a token, for weights of `dtype`.
    pub fn token_bytes(device: Device, dtype: DType, shape: &AttentionShape) -> usize {
        let dtype = if device == Device::Cuda { DType::Bf16 } else { dtype };
        shape.cached_bytes(dtype.bytes())
    }

    /// The dtype of keys and values, if they have no fewer bits.
    fn dtype(&self) -> DType {
        match self {
            Self::Cpu { values, .. } => values.all().dtype(),
            Self::Cuda(_) => DType::Bf16,
        }
    }

    pub fn pages(&self, shape: &AttentionShape) -> usize {
        match self {
            Self::Cpu { values, .. } => values.len() / page_len(shape),
            Self::Cuda(pages) => pages.pages(),
        }
    }

    /// The bytes of keys and values.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Cpu { keys, values } => keys.bytes() + values.bytes(),
            Self::Cuda(pages) => pages.bytes(),
        }
    }
}

/// Elements of one page of keys, or of values, on a CPU.
fn page_len(shape: &AttentionShape) -> usize {
    match shape.kv {
        KvDtype::Model => cpu::attention::page_len::<f32>(shape),
        KvDtype::Fp8 => cpu::attention::page_len::<u8>(shape) / size_of::<f32>(),
    }
}

/// Keys, or values, as they are stored on a CPU.
fn cached<'a>(cache: &'a Flat, shape: &AttentionShape) -> Cached<'a> {
    match (cache.all(), shape.kv) {
        (codes, KvDtype::Fp8) => Cached::Codes(bytemuck::cast_slice(codes.f32())),
        (Slice::Bf16(values), KvDtype::Model) => Cached::Bf16(values),
        (values, KvDtype::Model) => Cached::F32(values.f32()),
    }
}

/// The sequences of a paged batch. All layers of a forward share one.
#[derive(Debug)]
pub struct Paged<'a> {
    source: Source<'a>,
    tables: Tables<SequenceTable>,
    states: OnceLock<Arc<StateTable>>,
}

/// The source of the sequences.
#[derive(Debug)]
enum Source<'a> {
    Host(&'a [PagedSequence<'a>]),
    /// One new row per sequence, on a GPU; split for contexts of up to `longest` tokens.
    Gpu {
        tables: &'a decode::DecodeState,
        group: usize,
        rows: usize,
        longest: Option<usize>,
    },
}

impl<'a> Paged<'a> {
    /// The first `rows` sequences of tables that only the GPU reads, with their pages in a cache group. With `longest`,
    /// decoding is split for contexts of up to that many tokens.
    pub fn on_gpu(tables: &'a decode::DecodeState, group: usize, rows: usize, longest: Option<usize>) -> Self {
        let source = Source::Gpu { tables, group, rows, longest };
        Self { source, tables: Tables::default(), states: OnceLock::new() }
    }

    fn cuda(&self, shape: &AttentionShape) -> Arc<SequenceTable> {
        self.tables.get_or_make(shape, || match self.source {
            Source::Host(sequences) => SequenceTable::new(sequences, shape),
            Source::Gpu { tables, group, rows, longest } => tables.sequences(group, rows, longest, shape),
        })
    }

    /// The sequences as layers with states read them on a GPU.
    pub fn states(&self) -> Arc<StateTable> {
        let make = || match self.source {
            Source::Host(sequences) => StateTable::cached(sequences),
            Source::Gpu { tables, group, rows, .. } => tables.states(group, rows),
        };
        self.states.get_or_init(|| Arc::new(make())).clone()
    }

    /// Counts the cost of attention over the sequences for a plan, with `bytes` for the keys and values of a token.
    fn note(&self, shape: &AttentionShape, bytes: usize) {
        let seen = |past: usize| shape.window.map_or(past, |window| past.min(window)) as f64;
        let (pairs, read): (f64, f64) = match self.source {
            Source::Host(sequences) => {
                let of = |s: &PagedSequence| (pairs(s.past, s.tokens, shape.window), seen(s.past + s.tokens));
                sequences.iter().map(of).fold((0.0, 0.0), |sum, of| (sum.0 + of.0, sum.1 + of.1))
            }
            Source::Gpu { tables, .. } => {
                let cached = tables.cached().iter().map(|cached| seen(*cached)).sum();
                (cached, cached)
            }
        };
        note_pairs(shape, pairs, read * bytes as f64);
    }

    /// The sequences, which the CPU reads.
    ///
    /// # Panics
    /// If only the GPU has them.
    pub fn sequences(&self) -> &'a [PagedSequence<'a>] {
        match self.source {
            Source::Host(sequences) => sequences,
            Source::Gpu { .. } => panic!("attention: the CPU needs sequences that are on the GPU"),
        }
    }
}

impl<'a> From<&'a [PagedSequence<'a>]> for Paged<'a> {
    fn from(sequences: &'a [PagedSequence<'a>]) -> Self {
        Self { source: Source::Host(sequences), tables: Tables::default(), states: OnceLock::new() }
    }
}

/// Rotates q (t, h*e) and k (t, g*e) as `rope::forward` does. Appends the rows of k and v (t, g*e) to the cached tokens
/// of their sequences (rows in sequence order). Without v, values are keys. The contents of k are unspecified afterwards.
pub fn kv_append(
    cache: &mut KvLayer,
    [q, k]: [&mut Tensor; 2],
    v: Option<&Tensor>,
    (positions, rope): (&Indices, &RopeTable),
    paged: &Paged,
    shape: &AttentionShape,
) {
    let rows = check_sequences(cache, paged, shape);
    check("q", q, rows, shape.heads * shape.head_dim);
    check("k", k, rows, shape.kv_heads * shape.head_dim);
    assert_eq!(v.is_none(), shape.values_are_keys, "attention: values");
    if let Some(v) = v {
        check("v", v, rows, shape.kv_heads * shape.head_dim);
    }
    match cache {
        KvLayer::Cpu { keys, values } => {
            rope::forward(q, k, positions, rope);
            let (new, sequences) = ([&*k, v.unwrap_or(k)].map(Tensor::data), paged.sequences());
            match (keys.all_mut(), values.all_mut(), shape.kv) {
                (keys, values, KvDtype::Fp8) => {
                    let codes = [keys, values].map(|words| bytemuck::cast_slice_mut::<f32, u8>(words.f32()));
                    cpu::attention::kv_append(codes, new, sequences, shape);
                }
                (SliceMut::Bf16(keys), SliceMut::Bf16(values), KvDtype::Model) => {
                    cpu::attention::kv_append([keys, values], new, sequences, shape);
                }
                (keys, values, KvDtype::Model) => {
                    cpu::attention::kv_append([keys.f32(), values.f32()], new, sequences, shape);
                }
            }
        }
        KvLayer::Cuda(pages) if shape.kv == KvDtype::Fp8 => {
            rope::forward(q, k, positions, rope);
            let v = v.expect("no GPU kernel has values that are keys");
            cuda::kv_cache::append_codes(pages, [k.cuda(), v.cuda()], &paged.cuda(shape));
        }
        KvLayer::Cuda(pages) => {
            let angles = rope.angles_at(positions);
            let at = (positions.cuda(), angles.cuda(shape.head_dim));
            let v = v.expect("no GPU kernel has values that are keys");
            cuda::kv_cache::kv_append(pages, q.cuda_mut(), [k.cuda(), v.cuda()], at, &paged.cuda(shape));
        }
    }
}

/// Attention of new rows q (t, h*e) over the cache, which already contains the new rows' keys and values. Prefill,
/// chunked prefill and decode use one kernel. On a CPU, lse (t, h) may be asked for, as in `forward_packed`.
pub fn forward_paged(
    q: &Tensor,
    cache: &KvLayer,
    paged: &Paged,
    shape: &AttentionShape,
    o: &mut Tensor,
    lse: Option<&mut Tensor>,
) {
    let rows = check_sequences(cache, paged, shape);
    check("q", q, rows, shape.heads * shape.head_dim);
    check("o", o, rows, shape.heads * shape.head_dim);
    if let Some(lse) = &lse {
        check("lse", lse, rows, shape.heads);
    }
    if null::is_active() {
        paged.note(shape, shape.cached_bytes(cache.dtype().bytes()));
    }
    let _span =
        trace::operation("attention over pages", "tokens heads head_dim", || [rows, shape.heads, shape.head_dim]);
    match cache {
        KvLayer::Cpu { keys, values } => {
            let cached = [keys, values].map(|flat| cached(flat, shape));
            let lse = lse.map(Tensor::data_mut);
            cpu::attention::forward_paged(q.data(), cached, paged.sequences(), shape, o.data_mut(), lse);
        }
        KvLayer::Cuda(pages) => {
            assert!(lse.is_none(), "attention: no kernel over pages has lse");
            cuda::paged_attention::forward(q.cuda(), pages, &paged.cuda(shape), o.cuda_mut());
        }
    }
}

/// Copies page `from` to page `to`, for a shared prefix whose last page several sequences will write.
pub fn kv_copy_page(cache: &mut KvLayer, from: u32, to: u32, shape: &AttentionShape) {
    match cache {
        KvLayer::Cpu { keys, values } => {
            let len = page_len(shape);
            let (from, to) = (from as usize * len, to as usize * len);
            for cached in [keys, values].into_iter().filter(|cached| !cached.is_empty()) {
                match cached.all_mut() {
                    SliceMut::Bf16(values) => values.copy_within(from..from + len, to),
                    values => values.f32().copy_within(from..from + len, to),
                }
            }
        }
        KvLayer::Cuda(pages) => cuda::kv_cache::copy_page(pages, from, to),
    }
}

/// The number of pairs of a query and a key, for a plan.
fn pairs_of(packed: &Packed, shape: &AttentionShape) -> f64 {
    if null::is_active() { packed.spans.iter().map(|span| pairs_of_span(span, shape)).sum() } else { 0.0 }
}

/// Those of whole sequences: all of them if no key is masked.
fn pairs_of_span(span: &Span, shape: &AttentionShape) -> f64 {
    if span.past > 0 { (span.tokens * span.keys) as f64 } else { pairs(0, span.tokens, shape.window) }
}

fn check_packed(q: &Tensor, k: &Tensor, v: &Tensor, cu_seqlens: &[usize], shape: &AttentionShape) {
    check_heads(shape);
    let rows = q.rows();
    check("q", q, rows, shape.heads * shape.head_dim);
    check("k", k, rows, shape.kv_heads * shape.head_dim);
    check("v", v, rows, shape.kv_heads * shape.head_dim);
    assert!(
        cu_seqlens.first() == Some(&0) && cu_seqlens.last() == Some(&rows) && cu_seqlens.is_sorted(),
        "attention: cu_seqlens must ascend from 0 to {rows}, got {cu_seqlens:?}"
    );
}

/// Checks the sequences and returns the number of new rows.
fn check_sequences(cache: &KvLayer, paged: &Paged, shape: &AttentionShape) -> usize {
    check_heads(shape);
    let sequences = match paged.source {
        Source::Host(sequences) => sequences,
        // The code that filled the tables has checked them against the cache.
        Source::Gpu { rows, .. } => return rows,
    };
    let pages = cache.pages(shape);
    for sequence in sequences {
        let needed = (sequence.past + sequence.tokens).div_ceil(PAGE);
        assert!(
            sequence.blocks.len() >= needed,
            "attention: {} pages for {} + {} tokens, but {needed} are needed",
            sequence.blocks.len(),
            sequence.past,
            sequence.tokens
        );
        for &page in &sequence.blocks[..needed] {
            assert!((page as usize) < pages, "attention: page {page} of a cache of {pages}");
        }
    }
    sequences.iter().map(|s| s.tokens).sum()
}
