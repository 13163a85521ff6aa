use crate::{bf16, in_every_order, numbers, rounded};
use rlhf_hpc::device::cuda::Memory;
use rlhf_hpc::device::cuda::linear_logprob;
use rlhf_hpc::device::cuda::linear_logprob_fused as fused;
use rlhf_hpc::device::cuda::matmul::{self, Addend, Matrix, MatrixMut, Way};
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
    let (h, w, places) =
        (Memory::from_values(&bf16(h)), Memory::from_values(&bf16(w)), linear_logprob::places(places, v));
    let mut scratch = Memory::scratch(fused::scratch_bytes(rows, v));
    let mut stats = linear_logprob::stats_room(rows);
    let (h, w) = (h.view(DType::Bf16), w.view(DType::Bf16));
    fused::stats(h, w, k, inverse_temperature, &places, &mut scratch, &mut stats);
    stats.read(rows)
}

/// The statistics of stored logits of the exact GEMM.
fn of_stored(h: &[f32], w: &[f32], k: usize, inverse_temperature: f32, places: &[usize]) -> Vec<[u32; 4]> {
    let (rows, v) = (h.len() / k, w.len() / k);
    let (h, w, places) =
        (Memory::from_values(&bf16(h)), Memory::from_values(&bf16(w)), linear_logprob::places(places, v));
    let stride = v.next_multiple_of(8);
    let mut logits = Memory::scratch(4 * rows * stride);
    let (h, w) = (Matrix::new(h.view(DType::Bf16), rows, k), Matrix::new(w.view(DType::Bf16), v, k));
    let y = MatrixMut { values: logits.view_mut(DType::F32), rows, width: v, stride };
    matmul::forward(Way::Chosen, h, w, None, Addend::Nothing, y);
    let mut stats = linear_logprob::stats_room(rows);
    let logits = Matrix { values: logits.view(DType::F32), rows, width: v, stride };
    linear_logprob::stats(logits, inverse_temperature, &places, &mut stats);
    stats.read(rows)
}

#[test]
fn statistics_are_bitwise_those_of_stored_logits_in_every_order_alone_and_among_other_rows() {
    in_every_order(|| {
        for (rows, v, k) in [(131, 33, 40), (1, 1, 8), (3, 7, 16), (5, 264, 72), (2, 2177, 24)] {
            let ((h, w), places) = (inputs(rows, v, k), places(rows, v));
            let got = stats(&h, &w, k, 1.0 / 0.7, &places);
            for (i, (got, want)) in got.iter().zip(of_stored(&h, &w, k, 1.0 / 0.7, &places)).enumerate() {
                assert_eq!(*got, want, "row {i} of {rows}, {v} columns, k {k}");
            }
            let last = rows - 1;
            assert_eq!(stats(&h[last * k..], &w, k, 1.0 / 0.7, &places[last..]), got[last..]);
        }
    });
}
