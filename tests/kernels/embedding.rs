use crate::{bf16, in_every_order, numbers, rounded};
use rlhf_hpc::device::cuda::{Memory, ScatterLists, embedding};
use rlhf_hpc::dtype::DType;

/// Rows of W, and tokens: some come often, some never.
const V: usize = 37;

fn tokens(t: usize) -> Vec<u32> {
    (0..t as u32).map(|i| if i % 3 == 0 { 5 } else { i * 11 % V as u32 }).collect()
}

fn check_forward(t: usize, d: usize, first: usize, n: usize) {
    let (w, tokens) = (bf16(&numbers(1, V * d)), tokens(t));
    let mut y = Memory::scratch(2 * t * d);
    let part = Memory::of(&w[first * d..(first + n) * d]);
    embedding::forward(&Memory::of(&tokens), first, part.view(DType::Bf16), d, y.view_mut(DType::Bf16));
    let want: Vec<u16> = (0..t * d)
        .map(|i| {
            let token = tokens[i / d] as usize;
            if (first..first + n).contains(&token) { w[token * d + i % d] } else { 0 }
        })
        .collect();
    assert_eq!(y.read::<u16>(t * d), want, "{t} tokens of width {d}, rows {first} to {}", first + n);
}

/// Sums in f32, one row after another: the order is part of the promise.
fn check_backward(t: usize, d: usize, first: usize, n: usize) {
    let (tokens, dy, before) = (tokens(t), numbers(2, t * d), numbers(3, n * d));
    let mut dw = Memory::of(&before);
    let on_gpu = Memory::of(&bf16(&dy));
    embedding::backward(&ScatterLists::of(&tokens), first, on_gpu.view(DType::Bf16), d, dw.view_mut(DType::F32));
    let (dy, mut want) = (rounded(&dy), before);
    for (i, dy) in dy.iter().enumerate() {
        let token = tokens[i / d] as usize;
        if (first..first + n).contains(&token) {
            want[(token - first) * d + i % d] += dy;
        }
    }
    assert_eq!(dw.read::<f32>(n * d), want, "{t} tokens of width {d}, rows {first} to {}", first + n);
}

#[test]
fn rows_of_tokens_are_copied_those_of_other_ranks_are_zero_and_gradients_are_summed_in_the_order_of_rows() {
    in_every_order(|| {
        for (d, t) in [(8, 300), (24, 3), (64, 0), (96, 20), (1000, 1), (1000, 40), (4096, 9)] {
            for (first, n) in [(0, V), (5, 20)] {
                check_forward(t, d, first, n);
                check_backward(t, d, first, n);
            }
        }
    });
}
