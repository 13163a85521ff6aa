//! A rank's attention over blocks that are passed around a ring, compared with the CPU's over the same blocks.
//! tests/ops compares that with f64.

use crate::attention_reference::{Case, ends, gathered, shape};
use crate::{device, in_every_order, numbers, rounded};
use rlhf_hpc::device::Device;
use rlhf_hpc::ops::attention::AttentionShape;
use rlhf_hpc::ops::ring_attention::{self, Backward, Steps};
use rlhf_hpc::ops::zigzag;
use rlhf_hpc::tensor::{DType, Tensor};

/// o, lse, dq and the gradients of all blocks, as rank `rank` of `size` has them. Backward begins at `saved` o and lse,
/// if there are any.
fn passed(
    device: Device,
    case: &Case,
    ends: &[usize],
    [rank, size]: [usize; 2],
    saved: Option<[&[f32]; 2]>,
) -> [Vec<f32>; 4] {
    let (shape, [of_q, of_k, _]) = (&case.shape, case.widths());
    let part = |x: &[f32], rank: usize, width: usize| {
        let rows = zigzag::rows(ends, rank, size);
        Tensor::from_slice(rows.len(), width, &gathered(x, &rows, width)).on(device, DType::Bf16)
    };
    let d_o = rounded(&numbers(4, case.q.len()));
    let [q, d_o] = [&case.q, &d_o].map(|x| part(x, rank, of_q));
    // In the order of arrival.
    let owners = (0..size).map(|s| (rank + size - s) % size);
    let block = |owner| ring_attention::block(&part(&case.k, owner, of_k), &part(&case.v, owner, of_k));
    let (blocks, steps) = (owners.map(block).collect::<Vec<_>>(), Steps::new(device, ends, shape, rank, size).steps);
    let [mut sum, mut lse] = [of_q, shape.heads].map(|width| q.statistics(q.rows(), width));
    for (block, step) in blocks.iter().zip(&steps) {
        ring_attention::forward(&q, block, step, &mut sum, &mut lse);
    }
    let results = [ring_attention::rounded(sum), lse];
    let found = results.each_ref().map(Tensor::to_host);
    let saved = saved.map(|saved| {
        let of = |i: usize, width| Tensor::from_slice(q.rows(), width, saved[i]);
        [of(0, of_q), of(1, shape.heads)]
    });
    let [o, lse] = saved.unwrap_or(results);
    let backward = Backward::new([&q, &o, &lse, &d_o], shape);
    let mut dq = q.statistics(q.rows(), of_q);
    let dblocks = blocks.iter().zip(&steps).flat_map(|(block, step)| backward.step(block, step, &mut dq).to_host());
    let dblocks = dblocks.collect();
    let [o, lse] = found;
    [o, lse, ring_attention::rounded(dq).to_host(), dblocks]
}

fn ring_holds(lengths: &[usize], size: usize, shape: AttentionShape) {
    let ends = ends(lengths);
    let case = Case::new(ends[lengths.len()], shape);
    for rank in 0..size {
        let what = format!("rank {rank} of {size}, {lengths:?} {shape:?}");
        let [o, lse, dq, dblocks] = passed(Device::Cuda, &case, &ends, [rank, size], None);
        let want = passed(Device::Cpu, &case, &ends, [rank, size], Some([&o, &lse]));
        case.results_are_near(&what, [&o, &lse], [&want[0], &want[1]]);
        case.gradients_are_near(&what, &[("dq", &dq, &want[2]), ("the gradients of blocks", &dblocks, &want[3])]);
    }
}

#[test]
fn blocks_of_a_ring_add_up_to_attention_over_the_whole() {
    in_every_order(|| ring_holds(&[140, 3], 2, shape(2, 1, 64, Some(100))));
    let (_gpu, _one) = device();
    for (size, window) in [(2, None), (3, Some(40)), (4, None)] {
        ring_holds(&[130, 0, 1, 7, 270], size, shape(2, 1, 64, window));
    }
    ring_holds(&[150], 2, shape(1, 1, 128, None));
    ring_holds(&[130, 60], 2, AttentionShape { softcap: Some(1.5), ..shape(2, 1, 64, Some(100)) });
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
