//! Attention over blocks of keys, merged, against plain f64 loops.

use rlhf_hpc::device::Device;
use rlhf_hpc::ops::attention::Span;
use rlhf_hpc::ops::ring_attention::{self, Backward, Step};
use rlhf_hpc::ops::zigzag;
use rlhf_hpc::tensor::Tensor;

use super::attention::{Case, shape};
use super::probe::{assert_near, same_on_threads_and_levels};

fn forward(case: &Case, passes: &[Vec<Span>]) -> [Tensor; 2] {
    let mut o = Tensor::scratch(case.q.rows(), case.q.width());
    let mut lse = Tensor::scratch(case.q.rows(), case.shape.heads);
    let block = ring_attention::block(&case.k, &case.v);
    ring_attention::forward(&case.q, &block, &step(case, passes, true), &mut o, &mut lse);
    [o, lse]
}

fn step(case: &Case, passes: &[Vec<Span>], is_first: bool) -> Step {
    Step::new(Device::Cpu, passes.to_vec(), &case.shape, case.k.rows(), is_first)
}

/// dq, dk, dv, of a first step or added to `before`.
fn backward(case: &Case, passes: &[Vec<Span>], [o, lse]: &[Tensor; 2], before: Option<f32>) -> [Tensor; 3] {
    let mut dq = Tensor::scratch(case.q.rows(), case.q.width());
    dq.data_mut().fill(before.unwrap_or(f32::NAN));
    let block = ring_attention::block(&case.k, &case.v);
    let backward = Backward::new([&case.q, o, lse, &case.d_o], &case.shape);
    let dblock = backward.step(&block, &step(case, passes, before.is_none()), &mut dq);
    let [dk, dv] = ring_attention::unblock(&dblock);
    [dq, dk, dv]
}

/// Against f64, where row i of q, at position `at[i]`, sees the key j of position `key_at[j]`, with both in the same
/// sequence.
fn check(case: &Case, what: &str, passes: &[Vec<Span>], at: &[(usize, usize)], key_at: &[(usize, usize)]) {
    let output = forward(case, passes);
    let gradients = backward(case, passes, &output, None);
    let sees = |t: usize, (sequence, key): (usize, usize)| {
        sequence == at[t].0 && key <= at[t].1 && case.shape.window.is_none_or(|w| at[t].1 - key < w)
    };
    let [o, lse, dq, dk, dv] = case.naive(|t| (0..key_at.len()).filter(|&j| sees(t, key_at[j])).collect());
    let what = format!("{what} {:?}", case.shape);
    // Rows without visible keys have lse = -inf. The values of the others are compared.
    let (mut seen, mut got) = (lse.clone(), output[1].data().to_vec());
    for (got, want) in got.iter_mut().zip(&mut seen).filter(|(_, want)| **want == f64::NEG_INFINITY) {
        assert!(*got == f32::NEG_INFINITY, "{what}: a row that sees nothing has lse {got}");
        (*got, *want) = (0.0, 0.0);
    }
    assert_near(&format!("lse {what}"), &got, &seen, 3e-6);
    assert_near(&format!("o {what}"), output[0].data(), &o, 3e-6);
    for (name, got, want) in [("dq", &gradients[0], dq), ("dk", &gradients[1], dk), ("dv", &gradients[2], dv)] {
        assert_near(&format!("{name} {what}"), got.data(), &want, 1e-5);
    }
}

/// The row, or the position with its sequence, of each token of some pieces.
fn places(pieces: &[zigzag::Piece]) -> Vec<(usize, usize)> {
    pieces.iter().flat_map(|p| (p.start..p.start + p.tokens).map(|at| (p.sequence, at))).collect()
}

const ENDS: &[usize] = &[0, 1, 1, 6, 147, 150, 230, 232];

#[test]
fn attention_to_the_keys_of_every_rank_equals_f64_over_their_positions() {
    // Windows within a piece, to its border, across several.
    let windows = [None, Some(1), Some(20), Some(32), Some(50), Some(100)];
    for (size, window) in [1, 2, 3, 4].into_iter().flat_map(|size| windows.map(|window| (size, window))) {
        let shape = [shape(4, 2, 16, window), shape(3, 1, 12, window), shape(2, 2, 40, window)][size % 3];
        for (rank, from) in (0..size).flat_map(|rank| (0..size).map(move |from| (rank, from))) {
            let (queries, keys) = (zigzag::pieces(ENDS, rank, size), zigzag::pieces(ENDS, from, size));
            let (at, key_at) = (places(&queries), places(&keys));
            let case = Case::random(shape, at.len(), key_at.len());
            let passes = zigzag::passes(&queries, &keys, &shape);
            check(&case, &format!("rank {rank} of {size}, keys of {from}"), &passes, &at, &key_at);
        }
    }
}

#[test]
fn neither_the_thread_count_nor_the_instruction_set_changes_a_bit() {
    for shape in [shape(2, 1, 32, None), shape(8, 4, 12, Some(40))] {
        let (queries, keys) = (zigzag::pieces(ENDS, 1, 2), zigzag::pieces(ENDS, 0, 2));
        let case = Case::random(shape, zigzag::tokens(ENDS, 1, 2), zigzag::tokens(ENDS, 0, 2));
        let passes = zigzag::passes(&queries, &keys, &shape);
        same_on_threads_and_levels(&format!("{shape:?}"), || {
            let output = forward(&case, &passes);
            let gradients = backward(&case, &passes, &output, Some(0.25));
            output.iter().chain(&gradients).map(|x| x.data().to_vec()).collect()
        });
    }
}

#[test]
#[should_panic(expected = "Span")]
fn a_span_outside_the_block_is_rejected() {
    let shape = shape(2, 1, 8, None);
    let case = Case::random(shape, 4, 4);
    forward(&case, &[vec![Span { row: 0, tokens: 4, past: 0, key_row: 1, keys: 4 }]]);
}
