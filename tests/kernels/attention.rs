//! Attention against the CPU's over the same bf16 values.

use crate::attention_reference::{Case, ends, gathered, shape};
use crate::{device, in_every_order, numbers, refused, rounded};
use rlhf_hpc::device::cuda::Memory;
use rlhf_hpc::device::cuda::attention::{self, SpanTable};
use rlhf_hpc::dtype::DType;
use rlhf_hpc::ops::attention::{AttentionShape, Span};

/// Lengths around every tile and every step of a tensor core.
const TAILS: &[usize] = &[1, 0, 15, 16, 17, 31, 32, 33, 63, 64, 65, 0, 127, 128, 129, 130];

/// Compares attention and its gradients over some spans with the CPU. A second backward over the same table has the
/// same bits, which are returned.
fn spans_hold(case: &Case, spans: &[Span], what: &str) -> [Vec<f32>; 3] {
    let (o, lse) = case.forward(spans);
    case.assert_forward_near(what, spans, &o, &lse);
    let (o, lse) = case.wanted(spans);
    let (o, d_o) = (rounded(&o), rounded(&numbers(4, o.len())));
    let table = SpanTable::new(spans, &case.shape);
    let [first, second] = [(); 2].map(|()| case.backward(&table, &o, &lse, &d_o));
    case.gradients_hold(what, spans, [&o, &lse, &d_o], &first);
    assert!(first == second, "{what}: a second backward differs");
    first
}

fn compare_with_cpu(lengths: &[usize], shape: AttentionShape) -> [Vec<f32>; 3] {
    let ends = ends(lengths);
    spans_hold(&Case::new(ends[lengths.len()], shape), &Span::whole(&ends), &format!("{lengths:?} {shape:?}"))
}

#[test]
fn attention_and_its_gradients_equal_the_cpus_for_every_tail_head_dim_group_and_window() {
    let (_gpu, _one) = device();
    compare_with_cpu(TAILS, shape(1, 1, 64, None));
    // Groups of 1 to 7 heads.
    for (head_dim, heads, kv_heads) in [(32, 4, 2), (64, 7, 1), (80, 2, 2), (96, 4, 1), (128, 2, 1), (256, 2, 1)] {
        compare_with_cpu(&[130, 17, 70], shape(heads, kv_heads, head_dim, None));
    }
    compare_with_cpu(&[33, 5], shape(8, 2, 64, None));
    compare_with_cpu(&[20], shape(14, 2, 64, Some(7)));
    for window in [1, 2, 16, 33, 64, 65, 100, 1000] {
        compare_with_cpu(&[200, 1, 70], shape(1, 1, 64, Some(window)));
    }
    compare_with_cpu(&[160], shape(1, 1, 256, Some(40)));
}

#[test]
fn attention_with_capped_scores_and_its_gradients_equal_the_cpus_for_every_head_dim() {
    let (_gpu, _one) = device();
    for (head_dim, heads, kv_heads) in [(32, 2, 1), (64, 2, 2), (80, 1, 1), (96, 1, 1), (128, 2, 1), (256, 2, 1)] {
        // One that nearly all scores reach, and one that few reach.
        for (cap, window) in [(0.6, None), (4.0, Some(40))] {
            compare_with_cpu(
                &[70, 17],
                AttentionShape { softcap: Some(cap), ..shape(heads, kv_heads, head_dim, window) },
            );
        }
    }
}

#[test]
fn the_order_of_threads_and_blocks_changes_no_bit() {
    for (lengths, shape) in [
        (&[140, 70][..], AttentionShape { softcap: Some(1.5), ..shape(2, 1, 64, None) }),
        (&[390, 3, 140], shape(2, 1, 64, None)),
        (&[390, 3, 140], shape(2, 2, 32, Some(150))),
        (&[150], shape(1, 1, 256, None)),
    ] {
        let first = std::cell::OnceCell::new();
        in_every_order(|| {
            let got = compare_with_cpu(lengths, shape);
            assert!(*first.get_or_init(|| got.clone()) == got, "{shape:?}: another order, other bits");
        });
    }
}

#[test]
fn gradients_of_continued_rows_equal_the_cpus() {
    let (_gpu, _one) = device();
    for (past, tokens, keys, window) in
        [(139, 61, 200, None), (130, 70, 150, None), (300, 20, 290, Some(170)), (64, 9, 73, None)]
    {
        let whole = Case::new(past + tokens, shape(2, 1, 64, window));
        let rows: Vec<usize> = (past..past + tokens).collect();
        let seen: Vec<usize> = (0..keys).collect();
        let spans = [Span { row: 0, tokens, past, key_row: 0, keys }];
        spans_hold(&whole.part(&rows, &seen), &spans, &format!("{spans:?}"));
    }
}

#[test]
fn rows_without_visible_keys_leave_gradients_finite() {
    let (_gpu, _one) = device();
    let case = Case::new(150, shape(1, 1, 64, None));
    let zeros = vec![0.0; case.q.len()];
    let table = SpanTable::packed(&[0, 150], &case.shape);
    let got = case.backward(&table, &zeros, &[f32::NEG_INFINITY; 150], &rounded(&numbers(4, zeros.len())));
    assert!(got.iter().flatten().all(|x| *x == 0.0), "gradients of rows without keys");
}

#[test]
fn a_sequence_does_not_attend_to_others_in_its_pack() {
    let (_gpu, _one) = device();
    let (ends, case) = (ends(&[33, 140, 129]), Case::new(302, shape(2, 1, 80, None)));
    let ([of_q, of_k, _], d_o) = (case.widths(), rounded(&numbers(4, case.q.len())));
    let passed = |case: &Case, ends: &[usize], d_o: &[f32]| {
        let (o, lse) = case.forward(&Span::whole(ends));
        let [dq, dk, dv] = case.backward(&SpanTable::packed(ends, &case.shape), &o, &lse, d_o);
        [(o, of_q), (lse, 2), (dq, of_q), (dk, of_k), (dv, of_k)]
    };
    let packed = passed(&case, &ends, &d_o);
    for rows in ends.windows(2).map(|w| (w[0]..w[1]).collect::<Vec<_>>()) {
        let alone = passed(&case.part(&rows, &rows), &[0, rows.len()], &gathered(&d_o, &rows, of_q));
        for (i, (alone, (packed, width))) in alone.iter().zip(&packed).enumerate() {
            assert!(alone.0 == gathered(packed, &rows, *width), "{} rows, result {i}", rows.len());
        }
    }
}

#[test]
fn a_chunked_sequence_equals_the_whole_bitwise_and_other_rows_are_unchanged() {
    let (_gpu, _one) = device();
    for (head_dim, window) in [(32, Some(90)), (64, None), (64, Some(50)), (256, Some(70))] {
        let case = Case::new(200, shape(1, 1, head_dim, window));
        let (o, lse) = case.forward(&Span::whole(&[0, 200]));
        for (start, end) in [(0, 1), (1, 61), (61, 199), (199, 200)] {
            let span = Span { row: start, tokens: end - start, past: start, key_row: 0, keys: end };
            let (got, got_lse) = case.forward(&[span]);
            let rows = start * head_dim..end * head_dim;
            assert!(got[rows.clone()] == o[rows.clone()] && got_lse[start..end] == lse[start..end], "{span:?}");
            let untouched = |i: usize, x: &f32| rows.contains(&i) || *x == 0.0;
            assert!(got.iter().enumerate().all(|(i, x)| untouched(i, x)), "{span:?} writes other rows");
        }
    }
}

#[test]
fn inputs_without_a_kernel_are_rejected() {
    let (_gpu, _one) = device();
    refused("head dim 72", || drop(SpanTable::packed(&[0, 8], &shape(1, 1, 72, None))));
    let span = Span { row: 0, tokens: 5, past: 16, key_row: 0, keys: 8 };
    refused("rows that see no key", || drop(SpanTable::new(&[span], &shape(1, 1, 64, Some(10)))));
    let case = Case::new(8, shape(1, 1, 64, None));
    let [q, k, v] = case.views();
    let (mut o, mut lse) = (Memory::zeros(1024), Memory::zeros(32));
    let table = SpanTable::packed(&[0, 8], &case.shape);
    refused("results are merged in f32", || {
        attention::forward(q, k, v, &table, true, o.view_mut(DType::Bf16), lse.view_mut(DType::F32));
    });
}
