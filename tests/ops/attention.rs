//! Attention against plain f64 loops, and its bitwise promises.

use rlhf_hpc::device::Device;
use rlhf_hpc::device::cpu::pool;
use rlhf_hpc::device::simd::{Level, with_level};
use rlhf_hpc::ops::attention::{
    AttentionShape, KvLayer, PAGE, PagedSequence, backward_packed, forward_packed, forward_paged, kv_append,
    kv_copy_page,
};
use rlhf_hpc::tensor::Tensor;

use super::numbers::{assert_near, normals, same_bits};

const RAGGED: &[usize] = &[1, 31, 32, 33, 64, 65, 7, 130];

fn shape(heads: usize, kv_heads: usize, head_dim: usize, window: Option<usize>) -> AttentionShape {
    AttentionShape { heads, kv_heads, head_dim, window, scale: 1.0 / (head_dim as f32).sqrt() }
}

/// Heads, groups, head dims and windows that occur, and some that hardly do.
fn shapes() -> Vec<AttentionShape> {
    vec![
        shape(8, 4, 8, None),
        shape(4, 4, 12, Some(5)),
        shape(3, 1, 24, None),
        shape(8, 4, 32, Some(32)),
        shape(14, 2, 64, None),
        shape(2, 2, 80, Some(33)),
        shape(4, 2, 96, Some(70)),
        shape(2, 1, 128, Some(1)),
        shape(1, 1, 256, None),
        shape(5, 1, 6, Some(64)),
    ]
}

fn cumulated(lengths: &[usize]) -> Vec<usize> {
    let mut ends = vec![0];
    for length in lengths {
        ends.push(ends[ends.len() - 1] + length);
    }
    ends
}

struct Case {
    shape: AttentionShape,
    ends: Vec<usize>,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_o: Tensor,
}

struct Output {
    o: Tensor,
    lse: Tensor,
}

struct Gradients {
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
}

impl Case {
    fn new(shape: AttentionShape, lengths: &[usize]) -> Self {
        let ends = cumulated(lengths);
        let t = ends[lengths.len()];
        let (wide, narrow) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        Self {
            shape,
            ends,
            q: Tensor::from_slice(t, wide, &normals(1, t * wide, 1.5)),
            k: Tensor::from_slice(t, narrow, &normals(2, t * narrow, 1.5)),
            v: Tensor::from_slice(t, narrow, &normals(3, t * narrow, 1.0)),
            d_o: Tensor::from_slice(t, wide, &normals(4, t * wide, 1.0)),
        }
    }

    fn forward(&self) -> Output {
        let mut o = Tensor::scratch(self.q.rows(), self.q.width());
        let mut lse = Tensor::scratch(self.q.rows(), self.shape.heads);
        o.data_mut().fill(f32::NAN);
        lse.data_mut().fill(f32::NAN);
        forward_packed(&self.q, &self.k, &self.v, &self.ends[..].into(), &self.shape, &mut o, &mut lse);
        Output { o, lse }
    }

    fn backward(&self, output: &Output) -> Gradients {
        let like = |x: &Tensor| Tensor::from_slice(x.rows(), x.width(), &vec![f32::NAN; x.data().len()]);
        let (mut dq, mut dk, mut dv) = (like(&self.q), like(&self.k), like(&self.v));
        let Output { o, lse } = output;
        backward_packed(
            &self.q,
            &self.k,
            &self.v,
            o,
            lse,
            &self.d_o,
            &self.ends[..].into(),
            &self.shape,
            &mut dq,
            &mut dk,
            &mut dv,
        );
        Gradients { dq, dk, dv }
    }

    /// o, lse, dq, dk, dv in f64.
    fn naive(&self) -> [Vec<f64>; 5] {
        let AttentionShape { heads: h, kv_heads: g, head_dim: e, scale, .. } = self.shape;
        let [q, k, v, d_o] = [&self.q, &self.k, &self.v, &self.d_o]
            .map(|x| x.data().iter().map(|&x| f64::from(x)).collect::<Vec<f64>>());
        let zeros = |x: &Vec<f64>| vec![0.0; x.len()];
        let (mut o, mut lse) = (zeros(&q), vec![0.0; self.q.rows() * h]);
        let (mut dq, mut dk, mut dv) = (zeros(&q), zeros(&k), zeros(&v));
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        for ends in self.ends.windows(2) {
            for (t, head) in (ends[0]..ends[1]).flat_map(|t| (0..h).map(move |head| (t, head))) {
                let row = (t * h + head) * e;
                let row = row..row + e;
                let visible: Vec<usize> =
                    (ends[0]..=t).filter(|j| self.shape.window.is_none_or(|w| t - j < w)).collect();
                let key = |j: usize| (j * g + head / (h / g)) * e..(j * g + head / (h / g) + 1) * e;
                let scores: Vec<f64> =
                    visible.iter().map(|&j| f64::from(scale) * dot(&q[row.clone()], &k[key(j)])).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                lse[t * h + head] = max + total.ln();
                let p: Vec<f64> = scores.iter().map(|s| (s - max).exp() / total).collect();
                for (&j, p) in visible.iter().zip(&p) {
                    (0..e).for_each(|i| o[row.start + i] += p * v[key(j).start + i]);
                }
                let delta = dot(&o[row.clone()], &d_o[row.clone()]);
                for (&j, p) in visible.iter().zip(&p) {
                    let ds = f64::from(scale) * p * (dot(&d_o[row.clone()], &v[key(j)]) - delta);
                    for i in 0..e {
                        dq[row.start + i] += ds * k[key(j).start + i];
                        dk[key(j).start + i] += ds * q[row.start + i];
                        dv[key(j).start + i] += p * d_o[row.start + i];
                    }
                }
            }
        }
        [o, lse, dq, dk, dv]
    }
}

#[test]
fn packed_attention_equals_the_plain_sum_and_its_gradients() {
    for shape in shapes() {
        let case = Case::new(shape, RAGGED);
        let output = case.forward();
        let gradients = case.backward(&output);
        let [o, lse, dq, dk, dv] = case.naive();
        assert_near(&format!("o {shape:?}"), output.o.data(), &o, 2e-6);
        assert_near(&format!("lse {shape:?}"), output.lse.data(), &lse, 2e-6);
        assert_near(&format!("dq {shape:?}"), gradients.dq.data(), &dq, 1e-5);
        assert_near(&format!("dk {shape:?}"), gradients.dk.data(), &dk, 1e-5);
        assert_near(&format!("dv {shape:?}"), gradients.dv.data(), &dv, 1e-5);
    }
}

/// A cache with pages in a scrambled physical order; values never written are NaN.
struct Paged {
    cache: KvLayer,
    tables: Vec<Vec<u32>>,
}

impl Paged {
    fn new(case: &Case) -> Self {
        let lengths = case.ends.windows(2).map(|ends| ends[1] - ends[0]);
        let counts: Vec<usize> = lengths.map(|length| length.div_ceil(PAGE)).collect();
        let pages = counts.iter().sum::<usize>() + 3;
        let mut cache = KvLayer::new(Device::Cpu, pages, &case.shape);
        if let KvLayer::Cpu { keys, values } = &mut cache {
            keys.fill(f32::NAN);
            values.fill(f32::NAN);
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
        let (q, k, v) = (pick(&case.q), pick(&case.k), pick(&case.v));
        let sequences: Vec<PagedSequence> = parts
            .iter()
            .zip(&self.tables)
            .map(|(part, blocks)| PagedSequence { past: part.start, tokens: part.len(), blocks })
            .collect();
        kv_append(&mut self.cache, &k, &v, &sequences[..].into(), &case.shape);
        let mut out = Tensor::scratch(rows.len(), q.width());
        forward_paged(&q, &self.cache, &sequences[..].into(), &case.shape, &mut out);
        for (i, &row) in rows.iter().enumerate() {
            o.row_mut(row).copy_from_slice(out.row(i));
        }
    }
}

/// All sequences in chunks of `chunk` tokens, together.
fn chunked(case: &Case, chunk: usize) -> Tensor {
    let mut paged = Paged::new(case);
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
        let case = Case::new(shape, RAGGED);
        let packed = case.forward().o;
        for chunk in [1, 5, 32, 33, 50, 1000] {
            same_bits(&format!("{shape:?}, chunks of {chunk}"), chunked(&case, chunk).data(), packed.data());
        }
    }
}

#[test]
fn mixed_prefill_and_decode_in_one_call_change_nothing() {
    let case = Case::new(shape(8, 4, 32, Some(40)), RAGGED);
    let packed = case.forward().o;
    let mut paged = Paged::new(&case);
    let mut o = Tensor::zeros(case.q.rows(), case.q.width());
    let mut done = vec![0; RAGGED.len()];
    for step in 0.. {
        // Sequence i advances by 1 token, by many, or not at all.
        let parts: Vec<_> = RAGGED
            .iter()
            .enumerate()
            .map(|(i, &length)| done[i]..(done[i] + [1, 17, 0, 40][(step + i) % 4]).min(length))
            .collect();
        paged.feed(&case, &parts, &mut o);
        parts.iter().zip(&mut done).for_each(|(part, done)| *done = part.end);
        if done == RAGGED {
            break;
        }
    }
    same_bits("mixed", o.data(), packed.data());
}

#[test]
fn a_sequence_does_not_feel_its_companions() {
    for shape in shapes() {
        let case = Case::new(shape, RAGGED);
        let output = case.forward();
        let gradients = case.backward(&output);
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
            let output_alone = alone.forward();
            let gradients_alone = alone.backward(&output_alone);
            same_bits("o", output_alone.o.data(), cut(&output.o).data());
            same_bits("lse", output_alone.lse.data(), cut(&output.lse).data());
            same_bits("dq", gradients_alone.dq.data(), cut(&gradients.dq).data());
            same_bits("dk", gradients_alone.dk.data(), cut(&gradients.dk).data());
            same_bits("dv", gradients_alone.dv.data(), cut(&gradients.dv).data());
        }
    }
}

#[test]
fn the_number_of_threads_changes_nothing() {
    // Many sequences, which threads share out whole; and few, which they must cut.
    let cases = [
        (shape(8, 4, 24, None), RAGGED),
        (shape(2, 1, 32, None), &[210][..]),
        (shape(3, 1, 8, Some(50)), &[300, 20][..]),
        (shape(4, 2, 16, None), &[1][..]),
    ];
    for (shape, lengths) in cases {
        let case = Case::new(shape, lengths);
        let results = [1, 2, 3, 5, 8].map(|threads| {
            pool::set_threads(threads);
            let output = case.forward();
            let gradients = case.backward(&output);
            [output.o, output.lse, gradients.dq, gradients.dk, gradients.dv, chunked(&case, 20)]
        });
        for result in &results[1..] {
            for (got, want) in result.iter().zip(&results[0]) {
                same_bits("threads", got.data(), want.data());
            }
        }
    }
}

#[test]
fn every_instruction_level_gives_the_same_bits() {
    for shape in [shape(8, 4, 32, None), shape(3, 1, 12, Some(40)), shape(2, 2, 80, None)] {
        let case = Case::new(shape, &[1, 33, 70]);
        let run = || {
            let output = case.forward();
            let gradients = case.backward(&output);
            [output.o, output.lse, gradients.dq, gradients.dk, gradients.dv, chunked(&case, 20)]
        };
        let best = run();
        for level in Level::available() {
            for (got, want) in with_level(level, run).iter().zip(&best) {
                same_bits(&format!("{level:?}"), got.data(), want.data());
            }
        }
    }
}

#[test]
fn a_copied_page_serves_a_second_sequence() {
    let case = Case::new(shape(4, 2, 32, None), &[40, 40]);
    let shape = case.shape;
    let (k, v) =
        (Tensor::from_slice(40, 64, &case.k.data()[..40 * 64]), Tensor::from_slice(40, 64, &case.v.data()[..40 * 64]));
    let q = Tensor::from_slice(1, 128, &case.q.data()[..128]);
    let mut cache = KvLayer::new(Device::Cpu, 5, &shape);
    kv_append(&mut cache, &k, &v, &[PagedSequence { past: 0, tokens: 40, blocks: &[3, 1] }][..].into(), &shape);
    kv_copy_page(&mut cache, 1, 4, &shape);
    let attend = |cache: &KvLayer, blocks: &[u32]| {
        let mut o = Tensor::scratch(1, 128);
        forward_paged(&q, cache, &[PagedSequence { past: 39, tokens: 1, blocks }][..].into(), &shape, &mut o);
        o
    };
    let before = attend(&cache, &[3, 1]);
    same_bits("copy", attend(&cache, &[3, 4]).data(), before.data());
    // Writing to the copy leaves the first page alone.
    let (one_k, one_v) = (Tensor::from_slice(1, 64, &[9.0; 64]), Tensor::from_slice(1, 64, &[9.0; 64]));
    kv_append(&mut cache, &one_k, &one_v, &[PagedSequence { past: 39, tokens: 1, blocks: &[3, 4] }][..].into(), &shape);
    same_bits("original", attend(&cache, &[3, 1]).data(), before.data());
    assert_ne!(attend(&cache, &[3, 4]).data(), before.data());
}

#[test]
#[should_panic(expected = "page 9 of a cache of 2")]
fn a_page_outside_the_cache_is_refused() {
    let shape = shape(2, 1, 8, None);
    let cache = KvLayer::new(Device::Cpu, 2, &shape);
    let (q, mut o) = (Tensor::zeros(1, 16), Tensor::zeros(1, 16));
    forward_paged(&q, &cache, &[PagedSequence { past: 0, tokens: 1, blocks: &[9] }][..].into(), &shape, &mut o);
}
