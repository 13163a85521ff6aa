//! Attention against plain f64 loops, and its bitwise properties.

use rlhf_hpc::device::Device;
use rlhf_hpc::dtype::KvDtype;
use rlhf_hpc::ops::attention::{
    AttentionShape, KvLayer, PAGE, PagedSequence, backward_packed, forward_packed, forward_paged, kv_append,
    kv_copy_page, round_as_cached,
};
use rlhf_hpc::ops::rope::RopeTable;
use rlhf_hpc::tensor::{DType, Tensor};

use super::probe::{assert_near, same_bits, same_on_threads_and_levels, tensor, wide};

const RAGGED: &[usize] = &[1, 31, 32, 33, 64, 65, 7, 130];

pub fn shape(heads: usize, kv_heads: usize, head_dim: usize, window: Option<usize>) -> AttentionShape {
    AttentionShape {
        heads,
        kv_heads,
        head_dim,
        window,
        scale: 1.0 / (head_dim as f32).sqrt(),
        softcap: None,
        values_are_keys: false,
        kv: KvDtype::Model,
    }
}

/// Usual and unusual numbers of heads, groups, head dims and windows.
fn shapes() -> Vec<AttentionShape> {
    vec![
        shape(8, 4, 8, None),
        shape(4, 4, 12, Some(5)),
        shape(3, 1, 24, None),
        shape(4, 2, 32, Some(32)),
        shape(7, 1, 64, None),
        shape(2, 2, 80, Some(33)),
        shape(2, 1, 96, Some(70)),
        shape(2, 1, 128, Some(1)),
        shape(1, 1, 256, None),
        shape(5, 1, 6, Some(64)),
        AttentionShape { softcap: Some(1.5), ..shape(4, 2, 16, Some(40)) },
    ]
}

fn cumulated(lengths: &[usize]) -> Vec<usize> {
    let mut ends = vec![0];
    for length in lengths {
        ends.push(ends[ends.len() - 1] + length);
    }
    ends
}

/// Random queries of sequences that end at `ends`, keys and values, and the gradient of o.
pub struct Case {
    pub shape: AttentionShape,
    ends: Vec<usize>,
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub d_o: Tensor,
}

impl Case {
    fn new(shape: AttentionShape, lengths: &[usize]) -> Self {
        let ends = cumulated(lengths);
        let tokens = ends[lengths.len()];
        Self { ends, ..Self::random(shape, tokens, tokens) }
    }

    /// A case with this many rows and keys.
    pub fn random(shape: AttentionShape, rows: usize, keys: usize) -> Self {
        let (wide, narrow) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let (q, d_o) = (tensor(1, rows, wide, 1.5), tensor(4, rows, wide, 1.0));
        Self { shape, ends: Vec::new(), q, k: tensor(2, keys, narrow, 1.5), v: tensor(3, keys, narrow, 1.0), d_o }
    }

    /// o and lse.
    fn forward(&self) -> [Tensor; 2] {
        let [mut o, mut lse] = [self.q.width(), self.shape.heads].map(|width| unwritten(self.q.rows(), width));
        forward_packed(&self.q, &self.k, &self.v, &self.ends[..].into(), &self.shape, &mut o, &mut lse);
        [o, lse]
    }

    /// o, lse, dq, dk, dv.
    fn both_passes(&self) -> [Tensor; 5] {
        let Self { shape, ends, q, k, v, d_o } = self;
        let [o, lse] = self.forward();
        let [mut dq, mut dk, mut dv] = [q, k, v].map(|x| unwritten(x.rows(), x.width()));
        backward_packed(q, k, v, &o, &lse, d_o, &ends[..].into(), shape, &mut dq, &mut dk, &mut dv);
        [o, lse, dq, dk, dv]
    }

    /// o, lse, dq, dk, dv in f64, where row t of q sees the keys `sees(t)`. One that sees none has o = 0 and lse =
    /// -inf.
    pub fn naive(&self, sees: impl Fn(usize) -> Vec<usize>) -> [Vec<f64>; 5] {
        let AttentionShape { heads: h, kv_heads: g, head_dim: e, scale, softcap, .. } = self.shape;
        let rows = self.q.rows();
        let [q, k, v, d_o] = [&self.q, &self.k, &self.v, &self.d_o].map(|x| wide(x.data()));
        let zeros = |x: &Vec<f64>| vec![0.0; x.len()];
        let (mut o, mut lse) = (zeros(&q), vec![f64::NEG_INFINITY; rows * h]);
        let (mut dq, mut dk, mut dv) = (zeros(&q), zeros(&k), zeros(&v));
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        for (t, head) in (0..rows).flat_map(|t| (0..h).map(move |head| (t, head))) {
            let visible = sees(t);
            if visible.is_empty() {
                continue;
            }
            let row = (t * h + head) * e;
            let row = row..row + e;
            let key = |j: usize| (j * g + head / (h / g)) * e..(j * g + head / (h / g) + 1) * e;
            let scaled = |j| f64::from(scale) * dot(&q[row.clone()], &k[key(j)]);
            // The score, and its slope in the scaled score.
            let capped = |score: f64| match softcap.map(f64::from) {
                Some(cap) => (cap * (score / cap).tanh(), 1.0 - (score / cap).tanh().powi(2)),
                None => (score, 1.0),
            };
            let (scores, slopes): (Vec<f64>, Vec<f64>) = visible.iter().map(|&j| capped(scaled(j))).unzip();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            lse[t * h + head] = max + total.ln();
            let p: Vec<f64> = scores.iter().map(|s| (s - max).exp() / total).collect();
            for (&j, p) in visible.iter().zip(&p) {
                (0..e).for_each(|i| o[row.start + i] += p * v[key(j).start + i]);
            }
            let delta = dot(&o[row.clone()], &d_o[row.clone()]);
            for ((&j, p), slope) in visible.iter().zip(&p).zip(&slopes) {
                let ds = slope * f64::from(scale) * p * (dot(&d_o[row.clone()], &v[key(j)]) - delta);
                for i in 0..e {
                    dq[row.start + i] += ds * k[key(j).start + i];
                    dk[key(j).start + i] += ds * q[row.start + i];
                    dv[key(j).start + i] += p * d_o[row.start + i];
                }
            }
        }
        [o, lse, dq, dk, dv]
    }

    /// The results of both passes and of the paged cache.
    fn all(&self) -> Vec<Vec<f32>> {
        let paged = [DType::F32, DType::Bf16].map(|dtype| chunked(self, 20, dtype));
        self.both_passes().iter().chain(&paged).map(|x| x.data().to_vec()).collect()
    }
}

/// An output of NaN, which must be overwritten everywhere.
fn unwritten(rows: usize, width: usize) -> Tensor {
    Tensor::from_slice(rows, width, &vec![f32::NAN; rows * width])
}

#[test]
fn packed_attention_equals_the_plain_sum_and_its_gradients() {
    for shape in shapes() {
        let case = Case::new(shape, RAGGED);
        let start = |t: usize| *case.ends.iter().rfind(|end| **end <= t).expect("ends begin with 0");
        let sees = |t: usize| (start(t)..=t).filter(|j| shape.window.is_none_or(|w| t - j < w)).collect();
        for (i, (got, want)) in case.all().iter().zip(case.naive(sees)).enumerate() {
            let what = ["o", "lse", "dq", "dk", "dv"][i];
            assert_near(&format!("{what} {shape:?}"), got, &want, if i < 2 { 2e-6 } else { 1e-5 });
        }
    }
}

/// A cache with pages in a scrambled physical order; values never written are NaN.
struct Paged {
    cache: KvLayer,
    tables: Vec<Vec<u32>>,
}

impl Paged {
    fn new(case: &Case, dtype: DType) -> Self {
        let lengths = case.ends.windows(2).map(|ends| ends[1] - ends[0]);
        let counts: Vec<usize> = lengths.map(|length| length.div_ceil(PAGE)).collect();
        let pages = counts.iter().sum::<usize>() + 3;
        let mut cache = KvLayer::new(Device::Cpu, dtype, pages, &case.shape);
        if let KvLayer::Cpu { keys, values } = &mut cache {
            for cached in [keys, values] {
                cached.buffer_mut().expect("a cache of the CPU").fill(f32::from_bits(u32::MAX));
            }
        }
        // 7 and the page count are coprime unless 7 divides it.
        let step = if pages.is_multiple_of(7) { 5 } else { 7 };
        let mut next = 0;
        let tables = counts.iter().map(|&count| {
            (0..count)
                .map(|_| {
                    next += step;
                    (next % pages) as u32
                })
                .collect()
        });
        Self { tables: tables.collect(), cache }
    }

    /// Feeds rows `parts[i]` of sequence i, all in one call, and writes their rows of o.
    fn feed(&mut self, case: &Case, parts: &[std::ops::Range<usize>], o: &mut Tensor) {
        let rows: Vec<usize> =
            parts.iter().zip(&case.ends).flat_map(|(part, start)| part.clone().map(move |at| start + at)).collect();
        let pick = |x: &Tensor| {
            let data: Vec<f32> = rows.iter().flat_map(|&row| x.row(row).to_vec()).collect();
            Tensor::from_slice(rows.len(), x.width(), &data)
        };
        let (mut q, mut k, v) = (pick(&case.q), pick(&case.k), pick(&case.v));
        let sequences: Vec<PagedSequence> = parts
            .iter()
            .zip(&self.tables)
            .map(|(part, blocks)| PagedSequence { past: part.start, tokens: part.len(), blocks })
            .collect();
        // Angles of 0: the rows are already rotated.
        let (positions, none) = (vec![0; rows.len()], RopeTable::whole(&vec![0.0; case.shape.head_dim / 2], 1.0, 1));
        let at = (&positions[..].into(), &none);
        kv_append(&mut self.cache, [&mut q, &mut k], Some(&v), at, &sequences[..].into(), &case.shape);
        let mut out = Tensor::scratch(rows.len(), q.width());
        forward_paged(&q, &self.cache, &sequences[..].into(), &case.shape, &mut out, None);
        for (i, &row) in rows.iter().enumerate() {
            o.row_mut(row).copy_from_slice(out.row(i));
        }
    }
}

/// All sequences in chunks of `chunk` tokens, together, from a cache of `dtype`.
fn chunked(case: &Case, chunk: usize, dtype: DType) -> Tensor {
    let mut paged = Paged::new(case, dtype);
    let mut o = Tensor::zeros(case.q.rows(), case.q.width());
    let lengths: Vec<usize> = case.ends.windows(2).map(|ends| ends[1] - ends[0]).collect();
    let longest = lengths.iter().copied().max().unwrap_or(0);
    for at in (0..longest).step_by(chunk) {
        let parts: Vec<_> = lengths.iter().map(|&length| at.min(length)..(at + chunk).min(length)).collect();
        paged.feed(case, &parts, &mut o);
    }
    o
}

#[test]
fn packed_training_prefill_in_any_chunks_and_decode_agree_bitwise() {
    for shape in shapes() {
        for (dtype, kv) in [(DType::F32, KvDtype::Model), (DType::Bf16, KvDtype::Model), (DType::Bf16, KvDtype::Fp8)] {
            let shape = AttentionShape { kv, ..shape };
            let case = Case::new(shape, RAGGED);
            let mut trained = Case::new(shape, RAGGED);
            round_as_cached(&mut trained.k, dtype, &shape);
            round_as_cached(&mut trained.v, dtype, &shape);
            assert_eq!(trained.k.data() == case.k.data(), dtype == DType::F32);
            let [packed, _] = trained.forward();
            for chunk in [1, 5, 32, 33, 50, 1000] {
                let paged = chunked(&case, chunk, dtype);
                same_bits(&format!("{shape:?}, {dtype:?}, chunks of {chunk}"), paged.data(), packed.data());
            }
        }
    }
}

#[test]
fn a_copied_page_of_codes_has_their_powers_and_half_of_the_bytes_of_bf16() {
    let shape = AttentionShape { kv: KvDtype::Fp8, ..shape(2, 2, 64, None) };
    let case = Case::new(shape, &[40]);
    let mut paged = Paged::new(&case, DType::F32);
    let mut o = Tensor::zeros(case.q.rows(), case.q.width());
    let mut feed =
        |paged: &mut Paged, rows: std::ops::Range<usize>| paged.feed(&case, std::slice::from_ref(&rows), &mut o);
    feed(&mut paged, 0..39);
    let (page, free) = (paged.tables[0][1], (0..5).find(|page| !paged.tables[0].contains(page)).expect("a free page"));
    kv_copy_page(&mut paged.cache, page, free, &shape);
    paged.tables[0][1] = free;
    feed(&mut paged, 39..40);
    same_bits("after the copy", o.data(), chunked(&case, 7, DType::F32).data());
    // A power for 64 codes, twice for keys and values of two heads.
    assert_eq!(KvLayer::token_bytes(Device::Cpu, DType::F32, &shape), 4 * 65);
    assert_eq!(paged.cache.bytes(), 5 * PAGE * 4 * 65);
}

#[test]
fn a_sequence_does_not_depend_on_the_others_in_its_batch() {
    for shape in shapes() {
        let case = Case::new(shape, RAGGED);
        let all = case.both_passes();
        for ends in case.ends.windows(2) {
            let cut = |x: &Tensor| {
                let data = &x.data()[ends[0] * x.width()..ends[1] * x.width()];
                Tensor::from_slice(ends[1] - ends[0], x.width(), data)
            };
            let alone = Case {
                shape,
                ends: vec![0, ends[1] - ends[0]],
                q: cut(&case.q),
                k: cut(&case.k),
                v: cut(&case.v),
                d_o: cut(&case.d_o),
            };
            for (alone, all) in alone.both_passes().iter().zip(&all) {
                same_bits("alone", alone.data(), cut(all).data());
            }
        }
    }
}

#[test]
fn neither_the_thread_count_nor_the_instruction_set_changes_a_bit() {
    // Many sequences, which threads divide between them, and few, which they must split.
    for (shape, lengths) in [
        (shape(8, 4, 24, None), RAGGED),
        (shape(2, 1, 32, None), &[210][..]),
        (shape(3, 1, 8, Some(50)), &[300, 20][..]),
        (shape(4, 2, 16, None), &[1][..]),
        (shape(2, 2, 80, None), &[1, 33, 70][..]),
        (AttentionShape { kv: KvDtype::Fp8, ..shape(4, 2, 24, None) }, RAGGED),
    ] {
        let case = Case::new(shape, lengths);
        same_on_threads_and_levels(&format!("{shape:?}"), || case.all());
    }
}

#[test]
#[should_panic(expected = "page 9 of a cache of 2")]
fn a_page_outside_the_cache_is_rejected() {
    let shape = shape(2, 1, 8, None);
    let cache = KvLayer::new(Device::Cpu, DType::F32, 2, &shape);
    let (q, mut o) = (Tensor::zeros(1, 16), Tensor::zeros(1, 16));
    forward_paged(&q, &cache, &[PagedSequence { past: 0, tokens: 1, blocks: &[9] }][..].into(), &shape, &mut o, None);
}
