use crate::{bf16, device, in_every_order, numbers, rounded};
use rlhf_hpc::device::cuda::Memory;
use rlhf_hpc::device::cuda::linear_logprob::{self, Logits};
use rlhf_hpc::device::cuda::linear_logprob_fused as fused;
use rlhf_hpc::device::cuda::matmul::{self, Matrix, MatrixMut};
use rlhf_hpc::dtype::DType;

/// Hidden rows and a head, as f32 of bf16.
fn inputs(rows: usize, v: usize, k: usize) -> (Vec<f32>, Vec<f32>) {
    let w: Vec<f32> = numbers(2, v * k).iter().map(|x| x * 3.0).collect();
    (rounded(&numbers(1, rows * k)), rounded(&w))
}

fn places(rows: usize, v: usize) -> Vec<usize> {
    (0..rows).map(|i| if i % 5 == 4 { usize::MAX } else { (i * 1237 + v / 2) % v }).collect()
}

fn stats(h: &[f32], w: &[f32], k: usize, inverse_temperature: f32, places: &[usize]) -> Vec<[u32; 4]> {
    let (rows, v) = (h.len() / k, w.len() / k);
    let (h, w, places) = (Memory::of(&bf16(h)), Memory::of(&bf16(w)), linear_logprob::places(places, v));
    let mut scratch = Memory::scratch(fused::scratch_bytes(rows, v));
    let mut stats = linear_logprob::stats_room(rows);
    let (h, w) = (h.view(DType::Bf16), w.view(DType::Bf16));
    fused::stats(h, w, k, inverse_temperature, &places, &mut scratch, &mut stats);
    stats.read(rows)
}

/// The statistics of stored logits, those of the exact product.
fn of_stored(h: &[f32], w: &[f32], k: usize, inverse_temperature: f32, places: &[usize]) -> Vec<[u32; 4]> {
    let (rows, v) = (h.len() / k, w.len() / k);
    let (h, w, places) = (Memory::of(&bf16(h)), Memory::of(&bf16(w)), linear_logprob::places(places, v));
    let stride = v.next_multiple_of(8);
    let mut logits = Memory::scratch(4 * rows * stride);
    let (h, w) = (Matrix::new(h.view(DType::Bf16), rows, k), Matrix::new(w.view(DType::Bf16), v, k));
    let y = MatrixMut { values: logits.view_mut(DType::F32), rows, width: v, stride };
    matmul::forward(h, w, None, y, false);
    let mut stats = linear_logprob::stats_room(rows);
    let logits = Logits { values: logits.view(DType::F32), rows, v, stride };
    linear_logprob::stats(logits, inverse_temperature, &places, &mut stats);
    stats.read(rows)
}

#[test]
fn statistics_are_bitwise_those_of_stored_logits() {
    let (_gpu, _one) = device();
    for (rows, v, k) in [(1, 1, 8), (3, 7, 16), (130, 33, 40), (5, 264, 72), (2, 2177, 24)] {
        let ((h, w), places) = (inputs(rows, v, k), places(rows, v));
        let (got, want) = (stats(&h, &w, k, 1.0 / 0.7, &places), of_stored(&h, &w, k, 1.0 / 0.7, &places));
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!(got, want, "row {i} of {rows}, {v} columns, k {k}");
        }
    }
}

#[test]
fn statistics_are_those_of_f64() {
    let (_gpu, _one) = device();
    let (rows, v, k) = (4, 500, 64);
    let ((h, w), places) = (inputs(rows, v, k), vec![11; 4]);
    for (i, got) in stats(&h, &w, k, 1.0, &places).into_iter().enumerate() {
        let [max, sum_exp, dot, target] = got.map(|bits| f64::from(f32::from_bits(bits)));
        let z: Vec<f64> = w
            .chunks_exact(k)
            .map(|w| w.iter().zip(&h[i * k..]).map(|(w, h)| f64::from(*w) * f64::from(*h)).sum())
            .collect();
        let lse = z.iter().map(|z| (z - max).exp()).sum::<f64>().ln() + max;
        let entropy = lse - z.iter().map(|z| (z - lse).exp() * z).sum::<f64>();
        // Sums of 64 products of up to 3 in f32, of a magnitude of up to 40.
        assert!((max + sum_exp.ln() - lse).abs() < 2e-5, "row {i}");
        assert!((sum_exp.ln() - dot / sum_exp - entropy).abs() < 2e-5, "row {i}");
        assert!((target - z[11]).abs() < 2e-5, "row {i}");
    }
}

#[test]
fn statistics_do_not_depend_on_the_order_of_threads_or_on_other_rows() {
    let (rows, v, k) = (131, 300, 48);
    let ((h, w), places) = (inputs(rows, v, k), places(rows, v));
    let all = {
        let (_gpu, _one) = device();
        stats(&h, &w, k, 0.9, &places)
    };
    in_every_order(|| {
        assert_eq!(stats(&h, &w, k, 0.9, &places), all);
        assert_eq!(stats(&h[129 * k..130 * k], &w, k, 0.9, &places[129..130]), all[129..130]);
    });
}
