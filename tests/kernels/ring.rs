//! Attention over blocks that travel around a ring: all steps of all ranks, run in one process, against the CPU's
//! over whole sequences.

use crate::attention_reference::{Case, Passed, ends, gathered, shape};
use crate::{device, in_every_order, numbers, rounded};
use rlhf_hpc::device::Device;
use rlhf_hpc::ops::attention::{AttentionShape, Span};
use rlhf_hpc::ops::ring_attention::{self, Backward, Steps};
use rlhf_hpc::ops::{residual, zigzag};
use rlhf_hpc::tensor::{DType, Tensor};

fn on_gpu(values: &[f32], width: usize) -> Tensor {
    Tensor::from_slice(values.len() / width, width, values).on(Device::Cuda, DType::Bf16)
}

/// What the ranks of a ring hold, in the order of the whole row.
fn joined(parts: &[Tensor], rows: &[Vec<usize>]) -> Vec<f32> {
    let width = parts[0].width();
    let mut all = vec![0.0; rows.iter().map(Vec::len).sum::<usize>() * width];
    for (part, rows) in parts.iter().zip(rows) {
        let values = part.to_host();
        assert_eq!(values.len(), rows.len() * width);
        for (value, row) in values.chunks(width).zip(rows) {
            all[row * width..][..width].copy_from_slice(value);
        }
    }
    all
}

/// What `size` ranks make of the row: as `model::ring`, the ranks one after the other.
fn around(case: &Case, ends: &[usize], size: usize, d_o: &[f32]) -> Passed {
    let (shape, ranks) = (&case.shape, 0..size);
    let [of_q, of_k, _] = case.widths();
    let rows: Vec<Vec<usize>> = ranks.clone().map(|rank| zigzag::rows(ends, rank, size)).collect();
    let parts = |x: &[f32], width| rows.iter().map(|own| on_gpu(&gathered(x, own, width), width)).collect::<Vec<_>>();
    let (q, d_o) = (parts(&case.q, of_q), parts(d_o, of_q));
    let blocks: Vec<Tensor> =
        parts(&case.k, of_k).iter().zip(&parts(&case.v, of_k)).map(|(k, v)| ring_attention::block(k, v)).collect();
    let of: Vec<Steps> = ranks.map(|rank| Steps::new(Device::Cuda, ends, shape, rank, size)).collect();
    let mut sums: Vec<[Tensor; 2]> =
        q.iter().map(|q| [q.statistics(q.rows(), of_q), q.statistics(q.rows(), shape.heads)]).collect();
    let owner = |rank: usize, s: usize| (rank + size - s) % size;
    for (rank, [sum, lse]) in sums.iter_mut().enumerate() {
        for (s, step) in of[rank].steps.iter().enumerate() {
            ring_attention::forward(&q[rank], &blocks[owner(rank, s)], step, sum, lse);
        }
    }
    let (sums, lses): (Vec<Tensor>, Vec<Tensor>) = sums.into_iter().map(|[sum, lse]| (sum, lse)).unzip();
    let os: Vec<Tensor> = sums.into_iter().map(ring_attention::rounded).collect();
    let mut dqs: Vec<Tensor> = q.iter().map(|q| q.statistics(q.rows(), of_q)).collect();
    let mut dblocks: Vec<Option<Tensor>> = blocks.iter().map(|_| None).collect();
    for s in 0..size {
        for (rank, dq) in dqs.iter_mut().enumerate() {
            let (from, step) = (owner(rank, s), &of[rank].steps[s]);
            let backward = Backward::new([&q[rank], &os[rank], &lses[rank], &d_o[rank]], shape);
            let mut dblock = backward.step(&blocks[from], step, dq);
            if let Some(before) = dblocks[from].take() {
                residual::accumulate(before.slice(), dblock.slice_mut());
            }
            dblocks[from] = Some(dblock);
        }
    }
    let dqs: Vec<Tensor> = dqs.into_iter().map(ring_attention::rounded).collect();
    let (dks, dvs): (Vec<Tensor>, Vec<Tensor>) =
        dblocks.into_iter().flatten().map(|block| ring_attention::unblock(&block)).map(|[k, v]| (k, v)).unzip();
    let gradients = [dqs, dks, dvs].map(|parts| joined(&parts, &rows));
    Passed { o: joined(&os, &rows), lse: joined(&lses, &rows), gradients }
}

fn ring_holds(lengths: &[usize], size: usize, shape: AttentionShape) {
    let ends = ends(lengths);
    let case = Case::new(ends[lengths.len()], shape);
    let d_o = rounded(&numbers(4, case.q.len()));
    let what = format!("{size} ranks, {lengths:?} {shape:?}");
    let got = around(&case, &ends, size, &d_o);
    let spans = Span::whole(&ends);
    case.holds(&what, &spans, &got.o, &got.lse);
    case.gradients_hold(&what, &spans, [&got.o, &got.lse, &d_o], &got.gradients);
}

#[test]
fn blocks_of_a_ring_make_the_whole() {
    in_every_order(|| ring_holds(&[140, 3], 2, shape(2, 1, 64, Some(100))));
    let (_gpu, _one) = device();
    for (size, window) in [(2, None), (3, Some(40)), (4, None)] {
        ring_holds(&[130, 0, 1, 7, 270], size, shape(2, 1, 64, window));
    }
    ring_holds(&[150], 2, shape(1, 1, 128, None));
    ring_holds(&[77, 90], 3, shape(6, 2, 80, Some(60)));
    // Windows that reach across both pieces of a rank.
    for (size, window) in [(2, 1), (2, 100), (3, 130), (4, 170)] {
        ring_holds(&[200, 64], size, shape(2, 1, 64, Some(window)));
    }
    // Sequences shorter than the ring leave ranks without rows.
    for size in [2, 4] {
        ring_holds(&[1], size, shape(2, 1, 64, None));
        ring_holds(&[1, 2, 3, 0, 5], size, shape(2, 2, 64, None));
        ring_holds(&[1, 2, 6, 7], size, shape(2, 1, 64, Some(2)));
    }
}

/// Log-probabilities of scoring are those of training, however either packs its rows.
#[test]
fn a_sequence_does_not_see_what_shares_its_ring() {
    let (_gpu, _one) = device();
    let ends = ends(&[33, 140, 1, 70]);
    for (size, window) in [(2, None), (3, Some(50))] {
        let case = Case::new(ends[4], shape(2, 1, 64, window));
        case.is_apart(&ends, |case, ends, d_o| around(case, ends, size, d_o));
    }
}
