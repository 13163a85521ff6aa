//! Divergences of distributions against the CPU's, in every order of threads; and whole heads on the GPU.

use crate::linear_logprob::Case;
use crate::{bf16, device, in_every_order, numbers, on_gpu, rounded};
use rlhf_hpc::config::distill::Divergence;
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
fn sums_and_slopes_are_those_of_the_cpu() {
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
fn sums_and_slopes_depend_on_their_row_alone() {
    let ([student, teacher], first) = (pair(4, 2501), std::cell::OnceCell::new());
    in_every_order(|| {
        let found = ALL.map(|of| compared(&student, &teacher, of, 0.9, 0.5));
        let bits = found.each_ref().map(|found| (found.sums.clone(), found.dlogits.clone()));
        assert!(*first.get_or_init(|| bits.clone()) == bits);
        let alone = |case: &Case| {
            let values = case.values[case.stride..2 * case.stride].to_vec();
            Case { rows: 1, values, v: case.v, stride: case.stride }
        };
        // Targets of a row depend on its place, sums do not.
        for (of, found) in ALL.into_iter().zip(found) {
            let one = compared(&alone(&student), &alone(&teacher), of, 0.9, 0.5);
            assert!(one.sums[0] == found.sums[1] && one.dlogits == found.dlogits[student.stride..2 * student.stride]);
        }
    });
}

/// A head of a device: hidden states and W of values that bf16 holds.
struct Side {
    h: Tensor,
    w: Vec<f32>,
    on_gpu: Memory,
}

impl Side {
    fn new(device: Device, seed: u32, t: usize, d: usize, v: usize) -> Self {
        let (h, w) = (rounded(&numbers(seed, t * d)), rounded(&numbers(seed + 1, v * d)));
        let layout = if device == Device::Cuda { Layout::Row } else { Layout::Panel };
        let mut values = vec![0.0; layout.len(v, d)];
        (0..v * d).for_each(|i| values[layout.index(d, i / d, i % d)] = w[i]);
        let mut tensor = Tensor::scratch_on(device, t, d);
        let on_gpu = match device {
            Device::Cuda => {
                tensor.cuda_mut().write(&h);
                Memory::of(&bf16(&values))
            }
            Device::Cpu => {
                tensor.data_mut().copy_from_slice(&h);
                Memory::none()
            }
        };
        Self { h: tensor, w: values, on_gpu }
    }

    fn weight(&self, v: usize) -> Weight<'_> {
        let k = self.h.width();
        match self.h.device() {
            Device::Cuda => Weight { n: v, k, layout: Layout::Row, values: Slice::Cuda(self.on_gpu.view(DType::Bf16)) },
            Device::Cpu => Weight { n: v, k, layout: Layout::Panel, values: Slice::F32(&self.w) },
        }
    }
}

/// Divergences, log-probabilities, dh and dW of the first rows of a student's head on a device, with two teachers of other widths.
fn on(device: Device, of: Divergence, rows_max: usize) -> (Divergences, Vec<f32>, Vec<f32>, Vec<f32>) {
    let (t, d, v) = (150, 24, 104);
    let student = Side::new(device, 1, t, d, v);
    let sides = [Side::new(device, 3, t, 32, v), Side::new(device, 5, t, 16, v)];
    let all = [0, 1].map(|i| Teacher { h: &sides[i].h, w: sides[i].weight(v), weight: [0.75, 0.25][i] });
    let teachers = Teachers { all: &all, divergence: of, temperature: 1.5 };
    let targets: Vec<u32> = (0..t).map(|i| (i * 37 % v) as u32).collect();
    let w = student.weight(v);
    let part = HeadPart { rows_max, ..HeadPart::whole(&w) };
    let (mut logprobs, mut dh) = (vec![0.0; t], Tensor::scratch_on(device, t, d));
    let layout = if device == Device::Cuda { Layout::Row } else { Layout::Panel };
    let (mut on_host, mut on_gpu) = (vec![0.0f32; layout.len(v, d)], Memory::none());
    let values = match device {
        Device::Cpu => SliceMut::F32(&mut on_host),
        Device::Cuda => {
            on_gpu = Memory::zeros(4 * v * d);
            SliceMut::Cuda(on_gpu.view_mut(DType::F32))
        }
    };
    let gradient = WeightMut { n: v, k: d, layout, values };
    let found =
        forward_backward(&student.h, w, part, &targets, teachers, [0.004, 0.006], &mut logprobs, &mut dh, gradient);
    let mut of_scoring = vec![0.0; t];
    let scored = forward(&student.h, w, part, &targets, teachers, &mut of_scoring);
    assert!(scored == found && of_scoring == logprobs, "scoring has the bits of training");
    let dw: Vec<f32> = if device == Device::Cuda { on_gpu.read(v * d) } else { on_host };
    let dw = (0..v * d).map(|i| dw[layout.index(d, i / d, i % d)]).collect();
    (found, logprobs, dh.to_host(), dw)
}

#[test]
fn heads_of_student_and_teachers_have_the_numbers_of_the_cpu_in_chunks_of_any_size() {
    let (_gpu, _one) = device();
    for of in ALL {
        let [got, want] = [Device::Cuda, Device::Cpu].map(|device| on(device, of, 104));
        let near = |what: &str, got: &[f32], want: &[f32], within: f32| {
            let largest = want.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            let off = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(got.len() == want.len() && off <= within * largest, "{of:?}: {what} is off by {off} of {largest}");
        };
        near("divergence", &got.0.values, &want.0.values, 1e-5);
        near("loss", &got.0.losses, &want.0.losses, 1e-5);
        near("logprobs", &got.1, &want.1, 1e-5);
        // Gradients of logits are rounded to bf16, after each teacher; dh once more.
        near("dh", &got.2, &want.2, 2e-2);
        near("dW", &got.3, &want.3, 1e-2);
        // A part that claims to be one of a wide vocabulary has chunks of 16 rows.
        let chunks = on(Device::Cuda, of, 4 << 20);
        assert!((chunks.0, chunks.1, chunks.2) == (got.0, got.1, got.2), "{of:?}: chunks change no bit");
        near("dW of chunks", &chunks.3, &got.3, 1e-5);
    }
}
