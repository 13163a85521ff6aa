//! The gated delta rule, its convolution and its gates, compared with the CPU's over the same values. tests/ops compares
//! those with f64. A sequence in parts has the bits of the whole one.

use crate::models::{norm, relative_gap};
use crate::{device, in_every_order, numbers, rounded};
use rlhf_hpc::device::Device;
use rlhf_hpc::dtype::DType;
use rlhf_hpc::ops::attention::PagedSequence;
use rlhf_hpc::ops::delta::{self, DeltaShape, StateLayer, States};
use rlhf_hpc::tensor::{Flat, Slice, Tensor};
use std::cell::OnceCell;

/// Every key dim; heads that share keys; columns that fill a part of a block of threads, or several.
const SHAPES: [DeltaShape; 3] = [
    DeltaShape { key_heads: 2, value_heads: 4, key_dim: 32, value_dim: 8 },
    DeltaShape { key_heads: 1, value_heads: 1, key_dim: 64, value_dim: 40 },
    DeltaShape { key_heads: 1, value_heads: 2, key_dim: 128, value_dim: 128 },
];
/// Ends of rows: no token, one, and several chunks and runs of kept states.
const ENDS: [usize; 5] = [0, 1, 1, 20, 61];
const TAPS: usize = 4;

fn written(device: Device, dtype: DType, rows: usize, values: &[f32]) -> Tensor {
    let values = if dtype == DType::Bf16 { rounded(values) } else { values.to_vec() };
    Tensor::from_slice(rows, values.len() / rows, &values).on(device, dtype)
}

/// q, k, v, decay in (0, 1) and rate in (0, 1), for `rows` rows.
fn inputs(device: Device, shape: &DeltaShape, rows: usize) -> [Tensor; 5] {
    let (keys, values) = (shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim);
    let length = 1.7 / (shape.key_dim as f32).sqrt();
    let of = |seed: u32, width: usize, [scale, offset]: [f32; 2], dtype: DType| {
        let values: Vec<f32> = numbers(seed, rows * width).into_iter().map(|x| x * scale + offset).collect();
        written(device, dtype, rows, &values)
    };
    [
        of(1, keys, [length, 0.0], DType::Bf16),
        of(2, keys, [length, 0.0], DType::Bf16),
        of(3, values, [1.0, 0.0], DType::Bf16),
        of(4, shape.value_heads, [0.4, 0.55], DType::F32),
        of(5, shape.value_heads, [0.4, 0.5], DType::F32),
    ]
}

/// Compares results on the GPU, which are returned, with those on the CPU by their norms: each result has a name and the
/// largest gap.
fn compare<const N: usize>(what: &str, bounds: [(&str, f64); N], run: impl Fn(Device) -> [Tensor; N]) -> [Vec<f32>; N] {
    let [got, want] = [Device::Cuda, Device::Cpu].map(|device| run(device).map(|x| x.to_host()));
    for ((name, bound), (got, want)) in bounds.into_iter().zip(got.iter().zip(&want)) {
        let gap = relative_gap(got, want);
        // NaN fails.
        assert!(gap <= bound && norm(want.iter().copied()) > 0.0, "{what}: {name} is {gap} off");
    }
    got
}

/// A rounding to bf16 is off by up to 2^-8.
const BF16: f64 = 1.0 / 256.0;
const F32: f64 = 2e-6;

#[test]
fn the_delta_rule_and_its_gradients_equal_the_cpus_with_equal_bits_in_every_order() {
    for shape in SHAPES {
        let first = OnceCell::new();
        in_every_order(|| {
            let names = [("o", BF16), ("dq", BF16), ("dk", BF16), ("dv", BF16), ("d decay", 1e-5), ("d rate", 1e-5)];
            let got = compare(&format!("{shape:?}"), names, |device| {
                let x = inputs(device, &shape, ENDS[4]);
                let mut states = States::whole(&ENDS);
                let o = delta::forward(x.each_ref(), &shape, &mut states, 0);
                let d_o = written(device, DType::Bf16, ENDS[4], &numbers(9, ENDS[4] * o.width()));
                let [dq, dk, dv, d_decay, d_rate] = delta::backward(x.each_ref(), &shape, &states, &d_o);
                [o, dq, dk, dv, d_decay, d_rate]
            });
            assert!(*first.get_or_init(|| got.clone()) == got, "{shape:?}: another order, other bits");
        });
    }
}

/// The rows start .. end of x.
fn part(x: &Tensor, start: usize, end: usize, dtype: DType) -> Tensor {
    let (host, width) = (x.to_host(), x.width());
    written(Device::Cuda, dtype, end - start, &host[start * width..end * width])
}

#[test]
fn a_sequence_in_parts_has_the_bits_of_the_whole_one_and_a_copied_page_continues_it() {
    let (_gpu, _one) = device();
    for shape in SHAPES {
        let (t, width) = (40, shape.value_heads * shape.value_dim);
        let x = inputs(Device::Cuda, &shape, t);
        let taps = written(Device::Cuda, DType::Bf16, 1, &numbers(7, width * TAPS));
        let kept = (TAPS - 1) * width;
        let both = |x: &[Tensor; 5], states: &mut States| {
            let mut y = x[2].as_wide(x[2].rows());
            delta::conv_forward(&x[2], taps.slice(), states, 0, &mut y);
            [y, delta::forward(x.each_ref(), &shape, states, kept)].map(|x| x.to_host())
        };
        let whole = both(&x, &mut States::whole(&[0, t]));
        for cuts in [vec![1, 2, 3, 17], vec![33, 34], (1..t).step_by(5).collect()] {
            let mut cache = StateLayer::new(Device::Cuda, 4, kept + shape.state_len());
            let (mut start, mut page) = (0, [2]);
            for (i, end) in cuts.into_iter().chain([t]).enumerate() {
                let dtypes = [DType::Bf16, DType::Bf16, DType::Bf16, DType::F32, DType::F32];
                let of = [0, 1, 2, 3, 4].map(|i| part(&x[i], start, end, dtypes[i]));
                if i == 1 {
                    cache.copy_page(2, 1);
                    page = [1];
                }
                let sequence = [PagedSequence { past: start, tokens: end - start, blocks: &page }];
                let got = both(&of, &mut States::cached(&mut cache, &sequence[..].into()));
                for (got, whole) in got.iter().zip(&whole) {
                    assert_eq!(got[..], whole[start * width..end * width], "{shape:?}: tokens {start} to {end}");
                }
                start = end;
            }
        }
    }
}

#[test]
fn convolutions_and_their_gradients_equal_the_cpus() {
    in_every_order(|| {
        for (channels, taps) in [(8, 1), (264, 4), (40, 3)] {
            let t = ENDS[4];
            let what = format!("{channels} channels, {taps} taps");
            compare(&what, [("y", BF16), ("dx", 2.0 * BF16), ("dw", 2.0 * BF16)], |device| {
                let [x, dy] = [1, 2].map(|seed| written(device, DType::Bf16, t, &numbers(seed, t * channels)));
                let w = written(device, DType::Bf16, 1, &numbers(3, channels * taps));
                let (mut states, mut y) = (States::whole(&ENDS), x.as_wide(t));
                delta::conv_forward(&x, w.slice(), &mut states, 0, &mut y);
                let mut dw = written(device, DType::F32, 1, &numbers(4, channels * taps));
                let dx = delta::conv_backward(&x, w.slice(), &states, dy, dw.slice_mut());
                [y, dx, dw]
            });
        }
    });
}

#[test]
fn gates_and_their_gradients_equal_the_cpus() {
    in_every_order(|| {
        for (t, heads) in [(1, 1), (70, 8), (40, 48)] {
            let bounds = [("decay", F32), ("rate", F32), ("dx", BF16), ("dy", BF16), ("dA", 1e-5), ("dd", 1e-5)];
            compare(&format!("{t} tokens, {heads} heads"), bounds, |device| {
                let wide =
                    |seed: u32, by: f32| -> Vec<f32> { numbers(seed, t * heads).into_iter().map(|x| by * x).collect() };
                let [x, y] = [(1, 30.0), (2, 4.0)].map(|(seed, by)| written(device, DType::Bf16, t, &wide(seed, by)));
                let [log_a, bias] = [3, 4].map(|seed| written(device, DType::Bf16, 1, &numbers(seed, heads)));
                let parameters = [log_a.slice(), bias.slice()];
                let [decay, rate] = delta::gates([&x, &y], parameters);
                let slopes = [5, 6].map(|seed| written(device, DType::F32, t, &numbers(seed, t * heads)));
                let mut sums = [(); 2].map(|()| Flat::zeros(device, heads));
                let of_parameters = sums.each_mut().map(Flat::all_mut);
                let [dx, dy] = delta::gates_backward([&x, &y], parameters, slopes, of_parameters);
                let [of_a, of_bias] = sums.map(|sum| {
                    let host = match sum.all() {
                        Slice::Cuda(view) => view.to_f32(),
                        values => values.f32().to_vec(),
                    };
                    Tensor::from_slice(1, heads, &host)
                });
                [decay, rate, dx, dy, of_a, of_bias]
            });
        }
    });
}
