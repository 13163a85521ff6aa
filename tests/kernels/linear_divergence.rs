//! Divergences of distributions against the CPU's, in every order of threads; and heads in chunks.

use crate::linear_logprob::Case;
use crate::{bf16, device, in_every_order, numbers, on_gpu, rounded};
use rlhf_hpc::config::method::distill::Divergence;
use rlhf_hpc::device::Device;
use rlhf_hpc::device::cpu::linear_divergence as cpu;
use rlhf_hpc::device::cuda::Memory;
use rlhf_hpc::device::cuda::linear_divergence::Pair;
use rlhf_hpc::device::cuda::linear_logprob::stats_room;
use rlhf_hpc::dtype::DType;
use rlhf_hpc::ops::linear_divergence::{Divergences, Teacher, Teachers, forward, forward_backward};
use rlhf_hpc::ops::linear_logprob::{HeadPart, RowStats};
use rlhf_hpc::tensor::{Layout, Slice, SliceMut, Tensor, Weight, WeightMut};

const ALL: [Divergence; 3] = [Divergence::ForwardKl, Divergence::ReverseKl, Divergence::Jsd];

/// Sums of rows, and what is added to dlogits of 0.01 in every column.
struct Found {
    sums: Vec<[f32; 4]>,
    dlogits: Vec<u16>,
}

fn compared(student: &Case, teacher: &Case, of: Divergence, temperature: f32, scale: f32) -> Found {
    let [of_student, of_teacher] = [student, teacher].map(|case| case.on_gpu(DType::F32, temperature));
    let pair = Pair {
        student: student.logits(&of_student.0, DType::F32),
        teacher: teacher.logits(&of_teacher.0, DType::F32),
        inverse_temperature: 1.0 / temperature,
        of_student: &of_student.2,
        of_teacher: &of_teacher.2,
    };
    let mut sums = stats_room(student.rows);
    pair.sums(of, &mut sums);
    let mut dlogits = on_gpu(DType::Bf16, &vec![0.01; student.rows * student.stride]);
    pair.add(of, &sums, scale, dlogits.view_mut(DType::Bf16), student.stride);
    Found { sums: sums.read(student.rows), dlogits: dlogits.read(student.rows * student.stride) }
}

fn pair(rows: usize, v: usize) -> [Case; 2] {
    let (student, mut teacher) = (Case::new(rows, v), Case::new(rows, v));
    let others = numbers(77, teacher.values.len());
    teacher.values.iter_mut().zip(others).for_each(|(x, other)| *x = 0.7 * *x + 3.0 * other);
    [student, teacher]
}

#[test]
fn sums_and_derivatives_equal_the_cpus() {
    let (_gpu, _one) = device();
    for (rows, v, temperature) in [(3, 1, 1.0), (4, 7, 0.5), (5, 264, 1.0), (3, 1000, 2.0), (2, 9001, 0.8)] {
        let [student, teacher] = pair(rows, v);
        for of in ALL {
            let found = compared(&student, &teacher, of, temperature, 0.3);
            for i in 0..rows {
                let stats = [&student, &teacher].map(|case| [case.stats(i, temperature)]);
                let pair = cpu::Pair {
                    v,
                    student: student.row(i),
                    teacher: teacher.row(i),
                    of_student: &stats[0],
                    of_teacher: &stats[1],
                };
                let want = pair.sums(of);
                let RowStats { sum_exp, dot, .. } = want[0];
                let what = format!("{of:?} of {v} columns at {temperature}, row {i}");
                for (got, want) in found.sums[i].into_iter().zip([0.0, sum_exp, dot, 0.0]) {
                    assert!((got - want).abs() <= 1e-5 * want.abs().max(1.0), "{what}: {got} against {want}");
                }
                let mut slopes = vec![0.0; v];
                pair.add(of, &want, 0.3, &mut slopes);
                for (column, &got) in found.dlogits[i * student.stride..][..student.stride].iter().enumerate() {
                    let got = half::bf16::from_bits(got).to_f32();
                    let want = half::bf16::from_f32(0.01).to_f32() + slopes.get(column).unwrap_or(&0.0);
                    // Rounded to bf16.
                    let within = want.abs() / 256.0 + 2e-6;
                    assert!((got - want).abs() <= within, "{what}, column {column}: {got} against {want}");
                }
            }
        }
    }
}

#[test]
fn sums_and_derivatives_depend_only_on_their_row() {
    let ([student, teacher], first) = (pair(4, 2501), std::cell::OnceCell::new());
    in_every_order(|| {
        let found = ALL.map(|of| compared(&student, &teacher, of, 0.9, 0.5));
        let bits = found.each_ref().map(|found| (found.sums.clone(), found.dlogits.clone()));
        assert!(*first.get_or_init(|| bits.clone()) == bits);
        let alone = |case: &Case| {
            let values = case.values[case.stride..2 * case.stride].to_vec();
            Case { rows: 1, values, v: case.v, stride: case.stride }
        };
        // The targets of a row depend on its index, the sums do not.
        for (of, found) in ALL.into_iter().zip(found) {
            let one = compared(&alone(&student), &alone(&teacher), of, 0.9, 0.5);
            assert!(one.sums[0] == found.sums[1] && one.dlogits == found.dlogits[student.stride..2 * student.stride]);
        }
    });
}

/// Hidden states and W of a head.
struct Side {
    h: Tensor,
    w: Memory,
}

impl Side {
    fn new(seed: u32, t: usize, d: usize, v: usize) -> Self {
        let mut h = Tensor::scratch_on(Device::Cuda, t, d);
        h.cuda_mut().write(&rounded(&numbers(seed, t * d)));
        let mut w = numbers(seed + 1, v * d);
        w.resize(Layout::Row.len(v, d), 0.0);
        Self { h, w: Memory::from_values(&bf16(&w)) }
    }

    fn weight(&self, v: usize) -> Weight<'_> {
        Weight { n: v, k: self.h.width(), layout: Layout::Row, values: Slice::Cuda(self.w.view(DType::Bf16)) }
    }
}

/// Divergences, log-probabilities, dh and dW of the first rows of a student's head, with two teachers of other widths, of
/// which one has the student's soft cap.
fn on_heads(of: Divergence, rows_max: usize, cap: Option<f32>) -> (Divergences, Vec<f32>, Vec<f32>, Vec<f32>) {
    let (t, d, v) = (150, 24, 104);
    let [student, wide, narrow] = [(1, d), (3, 32), (5, 16)].map(|(seed, d)| Side::new(seed, t, d, v));
    let all = [(&wide, cap, 0.75), (&narrow, None, 0.25)].map(|(side, softcap, weight)| Teacher {
        h: &side.h,
        w: side.weight(v),
        softcap,
        weight,
    });
    let teachers = Teachers { all: &all, divergence: of, temperature: 1.5 };
    let targets: Vec<u32> = (0..t).map(|i| (i * 37 % v) as u32).collect();
    let w = student.weight(v);
    let part = HeadPart { rows_max, softcap: cap, ..HeadPart::whole(&w) };
    let (mut logprobs, mut dh) = (vec![0.0; t], Tensor::scratch_on(Device::Cuda, t, d));
    let mut dw = Memory::zeros(4 * Layout::Row.len(v, d));
    let gradient = WeightMut { n: v, k: d, layout: Layout::Row, values: SliceMut::Cuda(dw.view_mut(DType::F32)) };
    let found = forward_backward(
        &student.h,
        w,
        part,
        &targets,
        teachers,
        [0.004, 0.006],
        &mut logprobs,
        &mut dh,
        Some(gradient),
    );
    let mut of_scoring = vec![0.0; t];
    let scored = forward(&student.h, w, part, &targets, teachers, &mut of_scoring);
    assert!(scored == found && of_scoring == logprobs, "scoring has the bits of training");
    (found, logprobs, dh.to_host(), dw.read(v * d))
}

/// Whole jobs compare complete heads with the CPU (`run_layouts.rs`).
#[test]
fn chunks_of_any_size_have_the_same_divergences_and_gradients() {
    let (_gpu, _one) = device();
    for (of, cap) in ALL.into_iter().flat_map(|of| [None, Some(1.5)].map(|cap| (of, cap))) {
        // A shard of a large vocabulary has chunks of 16 rows.
        let [one, chunks] = [104, 4 << 20].map(|rows_max| on_heads(of, rows_max, cap));
        assert!((&chunks.0, &chunks.1, &chunks.2) == (&one.0, &one.1, &one.2), "{of:?}: chunks change a bit");
        let largest = one.3.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let off = chunks.3.iter().zip(&one.3).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(largest > 0.0 && off <= 1e-5 * largest, "{of:?}: dW is off by {off} of {largest}");
    }
}
