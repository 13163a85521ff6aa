//! Rows with several key segments: all kernels split the keys at the same bounds, and have the same bits.

use super::batch::{Batch, shape};
use crate::{device, in_every_order};

/// Keys of a segment in the kernels.
const RUN: usize = 4096;

/// The last `rows` tokens by training and by prefill and, the last alone, by both ways of decoding.
fn agree(batch: &Batch, rows: usize) {
    let len = batch.ends[1];
    batch.assert_training_bits(&[(len - rows, rows)]);
    batch.assert_training_bits(&[(len - 1, 1)]);
}

#[test]
fn rows_with_several_key_segments_have_the_same_bits_from_every_kernel() {
    let _one = device();
    for (head_dim, heads, kv_heads, window, len) in [
        (32, 2, 1, None, 2 * RUN + 9),
        (64, 2, 1, Some(RUN + 700), 2 * RUN + 300),
        (80, 1, 1, None, RUN + 1),
        (96, 2, 2, None, RUN + 9),
        (128, 4, 1, None, RUN + 65),
        (256, 2, 1, Some(RUN - 1), RUN + 100),
    ] {
        // The first of these rows see one segment only.
        agree(&Batch::new(&shape(heads, kv_heads, head_dim, window), &[len]), 12);
    }
}

#[test]
fn key_segments_are_combined_for_each_sequence_separately() {
    let _one = device();
    let lengths = [RUN + 40, 30, RUN];
    let batch = Batch::new(&shape(2, 1, 32, None), &lengths);
    let last: Vec<(usize, usize)> = lengths.iter().map(|len| (len - 1, 1)).collect();
    batch.assert_training_bits(&last);
}

#[test]
fn no_order_of_threads_changes_rows_with_several_key_segments() {
    in_every_order(|| agree(&Batch::new(&shape(9, 1, 32, None), &[RUN + 15]), 17));
}
