//! Logits, what is read off them and drawn from them, and their gradients.

use super::{Wide, has_room, holds, holds_of};
use crate::{bf16, device, numbers};
use rlhf_hpc::device::cuda::Memory;
use rlhf_hpc::device::cuda::linear_logprob::{self as head, Logits};
use rlhf_hpc::device::cuda::linear_logprob_fused as fused;
use rlhf_hpc::device::cuda::sample::{self, Drawn, Rows};
use rlhf_hpc::dtype::DType::{Bf16, F32};
use rlhf_hpc::ops::sample::{SampleParams, SampleRow};

/// A vocabulary whose rows do not end with whole blocks, and rows of it beyond all bounds.
const V: usize = 20_008;
const ROWS: usize = (1 << 32) / V + 7;

/// Where the target of a row of a small tensor is.
fn place(i: usize) -> usize {
    i * 7919 % V
}

#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn far_logits_have_the_statistics_and_gradients_of_the_same_logits() {
    for dtype in [F32, Bf16] {
        let tensors: [Wide; 5] = [(dtype, V), (F32, 4), (F32, 1), (F32, 1), (Bf16, V)];
        // The gradient has a row of blocks for each 8192 columns.
        let blocks = |row: usize| (0..3).map(|part| part * ROWS + row).collect::<Vec<_>>();
        holds_of("logits", &tensors, ROWS, 1, blocks, |x, rows| {
            let n = rows.len;
            let [logits, stats, dlogprobs, dentropy, dlogits] = x else { unreachable!("five tensors") };
            let places = head::places(&rows.numbers().map(place).collect::<Vec<_>>(), V);
            let logits = Logits { values: logits.view(dtype), rows: n, v: V, stride: V };
            head::stats(logits, 0.7, &places, stats);
            let slopes = [dlogprobs.view(F32), dentropy.view(F32)];
            head::gradient(logits, 0.7, stats, &places, slopes[0], slopes[1], dlogits.view_mut(Bf16), V);
        });
    }
}

#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn far_rows_are_scored_without_logits() {
    const K: usize = 128;
    const WORDS: usize = 200;
    drop(device());
    if !fused::fits() {
        return;
    }
    let tensors: [Wide; 2] = [(Bf16, K), (F32, 4)];
    // The second kernel has a warp a row, four in a block; where a tile of the first one is.
    let blocks = |tile: usize| std::iter::once(tile).chain(32 * tile..32 * tile + 32).collect::<Vec<_>>();
    holds_of("scores", &tensors, (1 << 32) / K + 40, 128, blocks, |x, rows| {
        let n = rows.len;
        let (h, stats) = x.split_at_mut(1);
        let w = Memory::of(&bf16(&numbers(4, WORDS * K)));
        let places: Vec<i32> = rows.numbers().map(|row| (row % WORDS) as i32).collect();
        let mut scratch = Memory::scratch(fused::scratch_bytes(n, WORDS));
        fused::stats(h[0].view(Bf16), w.view(Bf16), K, 1.3, &Memory::of(&places), &mut scratch, &mut stats[0]);
    });
}

/// With edits, whose rows are as many again.
#[test]
#[ignore = "long: tensors beyond 2^31 values"]
fn tokens_are_drawn_from_far_logits() {
    drop(device());
    if !has_room(8 * ROWS * V) {
        return;
    }
    let tensors: [Wide; 4] = [(F32, V), (F32, 1), (F32, 1), (F32, 1)];
    holds("draws", &tensors, ROWS, 1, |x, rows| {
        let n = rows.len;
        let [logits, tokens, logprobs, sample_logprobs] = x else { unreachable!("four tensors") };
        let banned = [[3u32, 77], [5, 12_345]];
        let row = |row: usize| SampleRow {
            params: SampleParams { temperature: 0.8, top_k: 50, top_p: 0.9, ..SampleParams::greedy() },
            uniform: (row * 31 % 97) as f32 / 97.0,
            seen: &[],
            banned: &banned[row % 2],
        };
        let drawn_rows = Rows::of(&rows.numbers().map(row).collect::<Vec<_>>());
        let (ends, mut out) = (Memory::of(&[V as i32]), Drawn::room(n));
        let mut scratch = Memory::scratch(drawn_rows.scratch_bytes(n, V));
        sample::forward(logits.view(F32), V, V, &ends, &drawn_rows, &mut scratch, &mut out);
        for (to, from) in [(tokens, &out.tokens), (logprobs, &out.logprobs), (sample_logprobs, &out.sample_logprobs)] {
            to.view_mut(F32).copy_from(from.view(F32));
        }
    });
}
