use crate::{device, in_every_order, numbers, rounded};
use rlhf_hpc::device::cpu;
use rlhf_hpc::device::cuda::Memory;
use rlhf_hpc::device::cuda::linear_logprob;
use rlhf_hpc::device::cuda::matmul::Matrix;
use rlhf_hpc::device::simd::level;
use rlhf_hpc::dtype::DType;
use rlhf_hpc::ops::linear_logprob::RowStats;

/// Rows of logits `stride` apart, with NaN past column v.
pub struct Case {
    pub rows: usize,
    pub v: usize,
    pub stride: usize,
    pub values: Vec<f32>,
}

impl Case {
    /// Logits from -9 to 9; every third row has one outlier.
    pub fn new(rows: usize, v: usize) -> Self {
        let stride = v.next_multiple_of(8);
        let mut values = numbers((rows * 7 + v) as u32, rows * stride);
        for (i, row) in values.chunks_exact_mut(stride).enumerate() {
            for x in &mut *row {
                *x *= 9.0;
            }
            if i % 3 == 0 {
                row[(i * 31 + 5) % v] = 21.5;
            }
            row[v..].fill(f32::NAN);
        }
        Self { rows, v, stride, values }
    }

    fn rounded(mut self) -> Self {
        self.values = rounded(&self.values);
        self
    }

    pub fn row(&self, i: usize) -> &[f32] {
        &self.values[i * self.stride..][..self.v]
    }

    /// The CPU's statistics, which tests/ops compares with f64.
    pub fn stats(&self, i: usize, temperature: f32) -> RowStats {
        cpu::softmax::row_stats(level(), self.row(i), 1.0 / temperature)
    }

    pub fn logits<'a>(&self, memory: &'a Memory, dtype: DType) -> Matrix<'a> {
        Matrix { values: memory.view(dtype), rows: self.rows, width: self.v, stride: self.stride }
    }

    /// The case, its places and its statistics on the GPU.
    pub fn on_gpu(&self, dtype: DType, temperature: f32) -> (Memory, Memory, Memory) {
        let (memory, places) = (crate::on_gpu(dtype, &self.values), linear_logprob::places(&self.places(), self.v));
        let mut stats = linear_logprob::stats_room(self.rows);
        linear_logprob::stats(self.logits(&memory, dtype), 1.0 / temperature, &places, &mut stats);
        (memory, places, stats)
    }

    fn places(&self) -> Vec<usize> {
        (0..self.rows).map(|i| if i % 3 == 0 { (i * 31 + 5) % self.v } else { (i * 13 + 1) % self.v }).collect()
    }
}

fn near(got: f32, want: f64, within: f64, what: &str) {
    let off = (f64::from(got) - want).abs();
    assert!(off <= within * want.abs().max(1.0), "{what}: {got} against {want}");
}

/// Statistics of rows and their targets' logits, on the host.
fn read_back(stats: &Memory, rows: usize, inverse_temperature: f32) -> (Vec<RowStats>, Vec<f32>) {
    let numbers = stats.read::<[f32; 4]>(rows).into_iter();
    numbers.map(|[max, sum_exp, dot, target]| (RowStats { inverse_temperature, max, sum_exp, dot }, target)).unzip()
}

/// (logprobs, entropies)
fn read(stats: &Memory, rows: usize, temperature: f32) -> [Vec<f32>; 2] {
    let mut out = [(); 2].map(|()| Memory::scratch(4 * rows));
    let [a, b] = out.each_mut().map(|memory| memory.view_mut(DType::F32));
    linear_logprob::read(stats, 1.0 / temperature, a, Some(b));
    out.map(|memory| memory.read(rows))
}

/// A column's power of 2 and that of the maximum, by which it is multiplied: a GPU's `ex2.approx` is taken to be off by
/// up to 2^-22 of either (PTX ISA 9.7.3; to be held against its text), and the product is rounded.
const POWERS: f64 = 2.25 / (1 << 22) as f64;

fn check(case: &Case, dtype: DType, temperature: f32) {
    let (_, _, stats) = case.on_gpu(dtype, temperature);
    let [logprobs, entropy] = read(&stats, case.rows, temperature);
    let (on_host, targets) = read_back(&stats, case.rows, 1.0 / temperature);
    for (i, place) in case.places().into_iter().enumerate() {
        let what = format!("{} columns at {temperature}, row {i}", case.v);
        let (of_cpu, logit) = (case.stats(i, temperature), case.row(i)[place]);
        // z is rounded once: half a unit in the last place of up to 72 is 4e-6.
        near(logprobs[i], of_cpu.logprob(logit).into(), 4e-6, &what);
        near(entropy[i], of_cpu.entropy().into(), 4e-6, &what);
        assert_eq!((on_host[i].max, targets[i]), (of_cpu.max, logit), "{what}");
        // Each adds up to 50,257 columns in f32.
        near(on_host[i].sum_exp, f64::from(of_cpu.sum_exp), 3e-6 + POWERS, &what);
        near(on_host[i].dot, f64::from(of_cpu.dot), 1e-5 + POWERS, &what);
    }
}

const VOCABULARIES: [usize; 9] = [1, 7, 31, 32, 33, 264, 1000, 2049, 4500];

#[test]
fn a_target_is_the_likeliest_if_no_column_exceeds_it() {
    let (_gpu, _one) = device();
    for (rows, v) in [(1, 1), (9, 7), (130, 300), (3, 2100)] {
        let mut case = Case::new(rows, v);
        // A tied target also counts as the likeliest.
        if v > 20 {
            case.values[0] = 21.5;
        }
        let (_, _, stats) = case.on_gpu(DType::F32, 0.9);
        let mut found = Memory::from_values(&vec![f32::NAN; rows]);
        linear_logprob::top(&stats, 1.0 / 0.9, found.view_mut(DType::F32));
        for (i, (found, place)) in found.read::<f32>(rows).into_iter().zip(case.places()).enumerate() {
            let row = case.row(i);
            let want = row.iter().all(|x| *x <= row[place]);
            assert_eq!(found, f32::from(u8::from(want)), "row {i} of {v} columns");
            assert!(want || i % 3 > 0);
        }
    }
}

#[test]
fn statistics_equal_the_cpus() {
    let (_gpu, _one) = device();
    for v in VOCABULARIES {
        for temperature in [0.3, 1.0, 2.0] {
            check(&Case::new(5, v), DType::F32, temperature);
            check(&Case::new(5, v).rounded(), DType::Bf16, temperature);
        }
    }
    check(&Case::new(2, 32001), DType::F32, 0.7);
    check(&Case::new(1, 50257), DType::F32, 1.0);
    check(&Case::new(1, 50257).rounded(), DType::Bf16, 1.0);
}

#[test]
fn statistics_do_not_depend_on_the_order_of_threads_or_on_other_rows() {
    let (case, first) = (Case::new(9, 3001), std::cell::OnceCell::new());
    in_every_order(|| {
        let (memory, places, stats) = case.on_gpu(DType::F32, 0.8);
        let all = stats.read::<u32>(4 * case.rows);
        assert_eq!(*first.get_or_init(|| all.clone()), all);
        // A row alone, and one that is not aligned, and with one warp instead of two.
        let row = memory.view(DType::F32).part(4 * case.stride..5 * case.stride);
        let mut shifted = Memory::zeros(4 * (case.stride + 1));
        shifted.view_mut(DType::F32).part(1..1 + case.stride).copy_from(row);
        let place = Memory::from_values(&places.read::<i32>(5)[4..]);
        for values in [row, shifted.view(DType::F32).part(1..1 + case.stride)] {
            let mut alone = linear_logprob::stats_room(1);
            let logits = Matrix { values, rows: 1, width: case.v, stride: case.stride };
            linear_logprob::stats(logits, 1.0 / 0.8, &place, &mut alone);
            assert_eq!(alone.read::<u32>(4), all[16..20]);
        }
    });
}

#[test]
fn non_finite_logits_give_non_finite_statistics() {
    let (_gpu, _one) = device();
    let mut case = Case::new(4, 300);
    let stride = case.stride;
    let places = case.places();
    case.values[77] = f32::NAN;
    case.values[stride + 77] = f32::INFINITY;
    case.values[2 * stride..][..300].fill(f32::NEG_INFINITY);
    // A logit of minus infinity is a token with probability 0.
    for (i, x) in case.values[3 * stride..][..300].iter_mut().enumerate() {
        *x = if i == places[3] { 1.5 } else { f32::NEG_INFINITY };
    }
    let (_, _, stats) = case.on_gpu(DType::F32, 1.0);
    let [logprobs, entropy] = read(&stats, 4, 1.0);
    assert!(logprobs[..3].iter().all(|x| x.is_nan()), "{logprobs:?}");
    // 2^x times 2^-x is 1 up to the GPU's error, which is its logarithm.
    near(logprobs[3], 0.0, POWERS, "the only token");
    near(entropy[3], 0.0, POWERS, "no choice");
}

/// Statistics of logits of which the parts that end there are of several ranks, and of each of these.
pub fn of_parts(logits: Matrix, ends: &[usize], inverse_temperature: f32, places: &[usize]) -> (Memory, Vec<Memory>) {
    let (rows, stride) = (logits.rows, logits.stride);
    let part = |i: usize| {
        let (start, end) = (if i == 0 { 0 } else { ends[i - 1] }, ends[i]);
        let places: Vec<usize> = places.iter().map(|place| place.wrapping_sub(start)).collect();
        let mut stats = linear_logprob::stats_room(rows);
        let values = logits.values.part(start..rows * stride);
        let (logits, places) =
            (Matrix { values, rows, width: end - start, stride }, linear_logprob::places(&places, end - start));
        linear_logprob::stats(logits, inverse_temperature, &places, &mut stats);
        stats
    };
    let parts: Vec<Memory> = (0..ends.len()).map(part).collect();
    let all: Vec<[f32; 4]> = parts.iter().flat_map(|part| part.read(rows)).collect();
    let mut stats = linear_logprob::stats_room(rows);
    linear_logprob::combine(&Memory::from_values(&all), ends.len(), rows, &mut stats);
    (stats, parts)
}

#[test]
fn vocabulary_shards_are_combined_as_on_the_cpu() {
    in_every_order(|| {
        let (case, temperature) = (Case::new(6, 2500), 0.7);
        let whole = crate::on_gpu(DType::F32, &case.values);
        let (stats, of_parts) =
            of_parts(case.logits(&whole, DType::F32), &[900, 901, 2500], 1.0 / temperature, &case.places());
        let of_parts: Vec<_> = of_parts.iter().map(|part| read_back(part, case.rows, 1.0 / temperature)).collect();
        let (together, targets) = read_back(&stats, case.rows, 1.0 / temperature);
        let [logprobs, entropy] = read(&stats, case.rows, temperature);
        for (i, place) in case.places().into_iter().enumerate() {
            let of_row: Vec<RowStats> = of_parts.iter().map(|(rows, _)| rows[i]).collect();
            assert_eq!(together[i], RowStats::combined(&of_row), "row {i}");
            assert_eq!(targets[i], case.row(i)[place], "row {i}");
            let whole = case.stats(i, temperature);
            near(logprobs[i], whole.logprob(case.row(i)[place]).into(), 4e-6, "logprob");
            near(entropy[i], whole.entropy().into(), 4e-6, "entropy");
        }
    });
}

/// The gradient as bf16 bits.
fn gradient(case: &Case, dtype: DType, temperature: f32, dstride: usize, d: &[Vec<f32>; 2]) -> Vec<u16> {
    let (memory, places, stats) = case.on_gpu(dtype, temperature);
    let [dlogprobs, dentropy] = d.each_ref().map(|d| Memory::from_values(d));
    let mut out = Memory::scratch(2 * case.rows * dstride);
    linear_logprob::gradient(
        case.logits(&memory, dtype),
        1.0 / temperature,
        &stats,
        &places,
        dlogprobs.view(DType::F32),
        dentropy.view(DType::F32),
        out.view_mut(DType::Bf16),
        dstride,
    );
    out.read(case.rows * dstride)
}

fn check_gradient(case: &Case, dtype: DType, temperature: f32, dstride: usize) {
    let d = [1, 2].map(|seed| numbers(seed, case.rows));
    let got = gradient(case, dtype, temperature, dstride, &d);
    for (i, place) in case.places().into_iter().enumerate() {
        let row = &got[i * dstride..][..dstride];
        let (stats, mut want) = (case.stats(i, temperature), case.row(i).to_vec());
        cpu::softmax::row_backward(level(), &mut want, &stats, place, d[0][i], d[1][i]);
        for (column, &got) in row.iter().enumerate() {
            let Some((&want, &logit)) = want.get(column).zip(case.row(i).get(column)) else {
                assert_eq!(got, 0, "column {column} of {}", case.v);
                continue;
            };
            let (hot, s) = (f32::from(u8::from(column == place)), stats.logprob(logit).exp());
            let got = half::bf16::from_bits(got).to_f32();
            // Half a unit in the last place of bf16; f32 cancels to 1e-6 of its terms before that.
            let terms = (hot + s * (1.0 + stats.entropy())) * 2.0 / temperature;
            let within = want.abs() / 256.0 + 1e-6 * terms + 1e-30;
            assert!((got - want).abs() <= within, "row {i} column {column} of {}: {got} against {want}", case.v);
        }
    }
}

#[test]
fn gradients_equal_the_cpus() {
    let (_gpu, _one) = device();
    for v in VOCABULARIES {
        for temperature in [0.3, 1.0, 2.0] {
            check_gradient(&Case::new(4, v), DType::F32, temperature, v.next_multiple_of(8) + 8);
        }
        check_gradient(&Case::new(4, v).rounded(), DType::Bf16, 0.9, v.next_multiple_of(64));
    }
    check_gradient(&Case::new(1, 50257), DType::F32, 1.0, 50264);
}

#[test]
fn gradients_are_the_same_in_every_order_and_alone() {
    in_every_order(|| {
        let case = Case::new(3, 1003).rounded();
        let d = [3, 4].map(|seed| numbers(seed, case.rows));
        let apart = gradient(&case, DType::Bf16, 0.9, case.stride, &d);
        let alone = Case { rows: 1, values: case.values[..case.stride].to_vec(), ..case };
        assert_eq!(gradient(&alone, DType::Bf16, 0.9, case.stride, &d.map(|d| d[..1].to_vec())), apart[..case.stride]);
    });
}
