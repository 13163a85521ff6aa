use crate::linear_logprob::of_parts;
use crate::{device, in_every_order, numbers};
use rlhf_hpc::device::cpu;
use rlhf_hpc::device::cuda::linear_logprob;
use rlhf_hpc::device::cuda::matmul::Matrix;
use rlhf_hpc::device::cuda::sample::{self, Rows};
use rlhf_hpc::device::cuda::{Memory, View};
use rlhf_hpc::dtype::DType;
use rlhf_hpc::ops::sample::{SampleParams, SampleRow, Sampled};

/// The distance from a boundary within which a uniform may sample the other side.
const BORDER: f32 = 1e-5;

/// Samples on the GPU from rows of `v` logits that are `stride` apart.
fn on_gpu(logits: View, stride: usize, v: usize, ends: &[i32], rows: &[SampleRow]) -> Vec<Sampled> {
    let drawn = sample::forward(logits, [stride, v], &Memory::from_values(ends), &Rows::from_rows(rows));
    sample::unpacked(&drawn.read::<f32>(sample::SAMPLED * rows.len())).collect()
}

fn draw(logits: &[f32], v: usize, rows: &[SampleRow]) -> Vec<Sampled> {
    on_gpu(Memory::from_values(logits).view(DType::F32), v, v, &[v as i32], rows)
}

fn on_cpu(logits: &[f32], v: usize, rows: &[SampleRow]) -> Vec<Sampled> {
    let mut out = vec![Sampled::default(); rows.len()];
    cpu::sample::forward(logits, &[v], rows, &mut out);
    out
}

/// Checks that the GPU samples the tokens of the CPU, whose filters and samples have tests of their own against f64. If
/// a row differs, the CPU samples the same token from a uniform that is off by less than `BORDER`.
fn check(logits: &[f32], v: usize, rows: &[SampleRow]) {
    let (got, want) = (draw(logits, v, rows), on_cpu(logits, v, rows));
    let mut parted = 0;
    for (i, row) in rows.iter().enumerate() {
        let (got, want, logits) = (got[i], want[i], &logits[i * v..][..v]);
        let what = format!("{v} tokens, row {i}, {:?}, uniform {}: {got:?} against {want:?}", row.params, row.uniform);
        if got.token == want.token {
            assert!((got.logprob - want.logprob).abs() <= 4e-6 * want.logprob.abs().max(1.0), "{what}");
            let off = (got.sample_logprob - want.sample_logprob).abs();
            assert!(off <= 4e-6 * want.sample_logprob.abs().max(1.0), "{what}");
            continue;
        }
        parted += 1;
        let beside =
            [-BORDER, BORDER].map(|off| SampleRow { uniform: (row.uniform + off).clamp(0.0, 0.999_999), ..*row });
        assert!(beside.iter().any(|row| on_cpu(logits, v, &[*row])[0].token == got.token), "{what}");
    }
    // The exponentials and their order are the same, so less than one row in a hundred is at a boundary.
    assert!(parted <= rows.len() / 100, "{parted} of {} rows sampled another token than on the CPU", rows.len());
}

/// Parameters that differ from row to row.
fn params(i: usize) -> SampleParams {
    SampleParams {
        temperature: [0.3, 0.7, 1.0, 2.0, 0.0][i % 5],
        top_k: [0, 1, 5, 40, 600][i / 2 % 5],
        top_p: [1.0, 0.9, 0.5, 0.05][i / 3 % 4],
        min_p: [0.0, 0.02, 0.3][i / 5 % 3],
        repetition_penalty: [1.0, 1.3][i / 7 % 2],
    }
}

/// Seen and banned tokens of each row; some occur twice.
fn lists(rows: usize, v: usize) -> Vec<[Vec<u32>; 2]> {
    (0..rows)
        .map(|i| {
            let seen = (0..12).map(|j| ((i * 5 + j * j) % v) as u32).collect();
            let banned = if i % 4 == 1 && v > 3 { vec![(i % v) as u32, ((i + 2) % v) as u32] } else { Vec::new() };
            [seen, banned]
        })
        .collect()
}

fn rows<'a>(
    lists: &'a [[Vec<u32>; 2]],
    uniforms: &[f32],
    params: impl Fn(usize) -> SampleParams,
) -> Vec<SampleRow<'a>> {
    let row = |(i, [seen, banned]): (usize, &'a [Vec<u32>; 2])| SampleRow {
        params: params(i),
        uniform: uniforms[i].abs().min(0.999_999),
        seen,
        banned,
        bias: &[],
    };
    lists.iter().enumerate().map(row).collect()
}

/// Logits of up to `spread` either way.
fn logits(seed: u32, len: usize, spread: f32) -> Vec<f32> {
    numbers(seed, len).into_iter().map(|x| x * spread).collect()
}

#[test]
fn sampled_tokens_equal_the_cpus() {
    let (_gpu, _one) = device();
    for (v, count) in [(1, 10), (7, 30), (31, 30), (33, 30), (264, 60), (1000, 40), (2500, 24)] {
        let lists = lists(count, v);
        let rows = rows(&lists, &numbers(v as u32 + 9, count), params);
        for spread in [2.0, 12.0] {
            check(&logits(v as u32, count * v, spread), v, &rows);
        }
    }
    let (v, count) = (50257, 4);
    let lists = lists(count, v);
    let filtered = |i| SampleParams { temperature: 0.8, top_k: [0, 50, 0, 3000][i], top_p: 0.9, ..params(0) };
    check(&logits(5, count * v, 7.0), v, &rows(&lists, &numbers(77, count), filtered));
}

#[test]
fn filters_keep_the_lowest_tokens_of_equal_probabilities() {
    let (_gpu, _one) = device();
    let (v, count) = (3000, 24);
    let lists = lists(count, v);
    for values in [1.0f32, 3.0, 40.0] {
        // Few distinct values, so that many tokens have equal logits.
        let logits: Vec<f32> = numbers(8, count * v).iter().map(|x| (x * values / 2.0).round() * 0.75).collect();
        let with = |i| SampleParams { temperature: 1.0, top_k: [0, 700, 10][i % 3], ..params(5 * i + 3) };
        let rows = rows(&lists, &numbers(3, count), with);
        let (got, want) = (draw(&logits, v, &rows), on_cpu(&logits, v, &rows));
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!(got.token, want.token, "row {i} of {values} values, {:?}", rows[i]);
        }
    }
}

#[test]
fn greedy_selects_the_first_of_equal_maxima() {
    let (_gpu, _one) = device();
    let (v, mut logits) = (1500, vec![0.25; 3 * 1500]);
    logits[700] = 2.0;
    logits[1400] = 2.0;
    logits[3000..].fill(f32::NAN);
    let lists: [Vec<u32>; 2] = [vec![], vec![700]];
    let row = |banned| SampleRow { params: SampleParams::greedy(), uniform: 0.9, seen: &[], banned, bias: &[] };
    let got = draw(&logits, v, &[row(&lists[0]), row(&lists[0]), row(&lists[0])]);
    assert_eq!([got[0].token, got[1].token, got[2].token], [700, 0, 0]);
    assert_eq!(got[0].sample_logprob, 0.0);
    assert!(got[2].logprob.is_nan());
    assert_eq!(draw(&logits[..v], v, &[row(&lists[1])])[0].token, 1400);
}

#[test]
fn the_recorded_logprob_equals_the_scorers_bitwise() {
    let (_gpu, _one) = device();
    let (v, count, stride) = (5001, 8, 5008);
    let lists = lists(count, v);
    let rows = rows(&lists, &numbers(1, count), |i| SampleParams { temperature: 0.7, ..params(i) });
    let memory = Memory::from_values(&logits(2, count * stride, 8.0));
    // Shards of several spans of 2048: the sums of a span reuse the memory of the previous shard's.
    for ends in [&[5001][..], &[1999, 4096, 5001], &[2100, 4300, 5001]] {
        let on_host: Vec<i32> = ends.iter().map(|end| *end as i32).collect();
        let drawn = on_gpu(memory.view(DType::F32), stride, v, &on_host, &rows);
        let tokens: Vec<usize> = drawn.iter().map(|drawn| drawn.token as usize).collect();
        let logits = Matrix { values: memory.view(DType::F32), rows: count, width: v, stride };
        let (stats, _) = of_parts(logits, ends, 1.0 / 0.7, &tokens);
        let mut logprobs = Memory::scratch(4 * count);
        linear_logprob::read(&stats, 1.0 / 0.7, logprobs.view_mut(DType::F32), None);
        let sampled: Vec<u32> = drawn.iter().map(|drawn| drawn.logprob.to_bits()).collect();
        assert_eq!(sampled, logprobs.read::<u32>(count), "{} parts", ends.len());
    }
}

#[test]
fn a_sample_depends_neither_on_the_order_of_threads_nor_on_other_rows() {
    let (v, count) = (1300, 10);
    let lists = lists(count, v);
    let rows = rows(&lists, &numbers(4, count), params);
    let logits = logits(6, count * v, 3.0);
    let all = {
        let (_gpu, _one) = device();
        draw(&logits, v, &rows)
    };
    in_every_order(|| {
        assert_eq!(draw(&logits, v, &rows), all);
        assert_eq!(draw(&logits[4 * v..][..v], v, &rows[4..5]), all[4..5]);
    });
}
