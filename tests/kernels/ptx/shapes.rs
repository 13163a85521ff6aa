//! Typical shapes of every kernel, for counts of what they do (`bench/kernels-counts.sh`): a model of width 896, as the
//! smallest of Qwen2.5. What the kernels give is looked at elsewhere.

use super::{facts, library};
use crate::attention_reference::{Case, ends, shape, whole};
use crate::paged_attention::batch::{self, Batch};
use crate::{bf16, device, numbers};
use rlhf_hpc::device::cuda::adamw::{self, Decays, Update};
use rlhf_hpc::device::cuda::kv_cache::Decode;
use rlhf_hpc::device::cuda::linear_logprob::{self, Logits};
use rlhf_hpc::device::cuda::linear_logprob_fused as fused;
use rlhf_hpc::device::cuda::matmul::{self, Family, Matrix, MatrixMut, Size};
use rlhf_hpc::device::cuda::rope::{self, Table};
use rlhf_hpc::device::cuda::sample::{self, Drawn, Rows};
use rlhf_hpc::device::cuda::{Memory, RowLists, embedding, residual, rmsnorm, swiglu, value_head};
use rlhf_hpc::dtype::DType::{Bf16, F32};
use rlhf_hpc::ops::sample::{SampleParams, SampleRow};
use std::fs;
use std::path::{Path, PathBuf};

const WIDTH: usize = 896;
const WIDE: usize = 4864;
const TOKENS: usize = 1024;
const VOCABULARY: usize = 32000;

/// What a launch counts: instructions by class, passes over banks, sectors.
#[test]
fn typical_shapes_are_counted() {
    let Some(library) = library("sm_80", &[], &[]) else { return };
    let dir = tempfile::tempdir().expect("a directory");
    let counts = std::env::var_os("PTX_COUNTS").map_or(dir.path().join("counts"), PathBuf::from);
    let most = Path::new("4");
    facts(&library, &["--ignored", "ptx::shapes::"], 1, &[("PTX_COUNTS", &counts), ("PTX_BLOCKS", most)]);
    let text = fs::read_to_string(&counts).expect("what was counted");
    let line = text.lines().find(|line| line.contains(" matmul_forward_128 ")).expect("a product was counted");
    let count = |name: &str| {
        let number = line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        number.unwrap_or_else(|| panic!("no {name} in {line}")).parse::<f64>().expect("a number")
    };
    // Four blocks of 128 x 128 sums over 896 products, 16 x 8 x 16 at a time.
    assert_eq!(count("mma"), 4.0 * (128.0 / 16.0) * (128.0 / 8.0) * (896.0 / 16.0));
    assert!(count("wavefronts") < 1.1 * count("wavefronts_least"), "{line}");
    assert!(count("sectors") * 32.0 < 1.1 * count("bytes"), "{line}");
}

fn halves(seed: u32, len: usize) -> Memory {
    Memory::of(&bf16(&numbers(seed, len)))
}

fn singles(seed: u32, len: usize) -> Memory {
    Memory::of(&numbers(seed, len))
}

#[test]
#[ignore = "typical_shapes_are_counted starts it on kernels of PTX"]
fn of_typical_sizes() {
    let (_gpu, _one) = device();
    products();
    attention();
    pages();
    rows();
    heads();
    draws();
}

fn products() {
    let (w, families) = (
        halves(2, WIDE * WIDTH),
        [(16, Family::Rows16), (32, Family::Rows32), (64, Family::Rows64), (TOKENS, Family::Rows128)],
    );
    for (rows, family) in families {
        let x = halves(1, rows * WIDTH);
        for dtype in [Bf16, F32] {
            let mut y = Memory::zeros(rows * WIDE * dtype.bytes());
            let [x, w] = [Matrix::new(x.view(Bf16), rows, WIDTH), Matrix::new(w.view(Bf16), WIDE, WIDTH)];
            matmul::forward_by(family, x, w, None, MatrixMut::new(y.view_mut(dtype), rows, WIDE), false);
        }
    }
    let (x, dy) = (halves(3, TOKENS * WIDTH), halves(4, TOKENS * WIDE));
    for size in Size::ALL {
        let [dy, w] = [Matrix::new(dy.view(Bf16), TOKENS, WIDE), Matrix::new(w.view(Bf16), WIDE, WIDTH)];
        let (mut dx, mut dw) = (Memory::zeros(2 * TOKENS * WIDTH), Memory::zeros(4 * WIDE * WIDTH));
        matmul::backward_input_by(size, dy, w, MatrixMut::new(dx.view_mut(Bf16), TOKENS, WIDTH), false);
        let x = Matrix::new(x.view(Bf16), TOKENS, WIDTH);
        matmul::backward_weight_by(size, dy, x, MatrixMut::new(dw.view_mut(F32), WIDE, WIDTH));
    }
    let mut db = Memory::zeros(4 * WIDE);
    matmul::backward_bias(Matrix::new(dy.view(Bf16), TOKENS, WIDE), db.view_mut(F32));
}

fn attention() {
    for (heads, kv_heads, head_dim) in [(14, 2, 64), (8, 2, 80), (8, 2, 96), (8, 2, 128), (4, 1, 256)] {
        let case = Case::new(TOKENS, shape(heads, kv_heads, head_dim, None));
        let spans = whole(&ends(&[TOKENS]));
        let (o, lse) = case.forward(&spans, Bf16);
        if head_dim <= 128 {
            case.backward(&spans, &o, &lse.iter().map(|_| 3.0).collect::<Vec<f32>>(), &numbers(4, o.len()));
        }
    }
}

fn pages() {
    for (heads, kv_heads, head_dim) in [(14, 2, 64), (8, 2, 128)] {
        let batch = Batch::new(&batch::shape(heads, kv_heads, head_dim, None), &[1000, 700, 500, 900], 1);
        let (steps, chunks) =
            (batch.lengths.iter().map(|len| (len - 1, 1)), batch.lengths.iter().map(|len| (len - 64, 64)));
        batch.decoded(Decode::Whole).run(&steps.clone().collect::<Vec<_>>());
        batch.decoded(Decode::Split).run(&steps.collect::<Vec<_>>());
        batch.run(&chunks.collect::<Vec<_>>());
    }
}

fn rows() {
    let (x, w, dy, len) = (halves(1, TOKENS * WIDTH), halves(2, WIDTH), halves(3, TOKENS * WIDTH), TOKENS * WIDTH);
    let (mut y, mut rstd, mut sum) = (Memory::zeros(2 * len), singles(4, TOKENS), halves(5, len));
    rmsnorm::forward(x.view(Bf16), w.view(Bf16), 1e-6, y.view_mut(Bf16), rstd.view_mut(F32));
    let (mut dx, mut dw, rstd) = (Memory::zeros(2 * len), Memory::zeros(4 * WIDTH), singles(4, TOKENS));
    rmsnorm::backward(x.view(Bf16), w.view(Bf16), rstd.view(F32), dy.view(Bf16), dx.view_mut(Bf16), dw.view_mut(F32));
    residual::add(x.view(Bf16), sum.view_mut(Bf16));
    let (gate, up, slope) = (halves(6, TOKENS * WIDE), halves(7, TOKENS * WIDE), halves(8, TOKENS * WIDE));
    let [mut one, mut two] = [(); 2].map(|()| Memory::zeros(2 * TOKENS * WIDE));
    swiglu::forward(gate.view(Bf16), up.view(Bf16), one.view_mut(Bf16));
    swiglu::backward(gate.view(Bf16), up.view(Bf16), slope.view(Bf16), one.view_mut(Bf16), two.view_mut(Bf16));
    let angles = numbers(9, TOKENS * 32);
    let (table, positions) = (Table::new(64, &angles, &angles), Memory::of(&(0..TOKENS as u32).collect::<Vec<_>>()));
    let (mut q, mut k) = (halves(10, TOKENS * 14 * 64), halves(11, TOKENS * 2 * 64));
    rope::forward(q.view_mut(Bf16), Some(k.view_mut(Bf16)), TOKENS, &positions, &table);
    let tokens: Vec<u32> = (0..TOKENS as u32).map(|i| i * 37 % 1000).collect();
    let (table, mut dw) = (halves(12, 1000 * WIDTH), Memory::zeros(4 * 1000 * WIDTH));
    embedding::forward(&Memory::of(&tokens), 0, table.view(Bf16), WIDTH, y.view_mut(Bf16));
    embedding::backward(&RowLists::of(&tokens), 0, dy.view(Bf16), WIDTH, dw.view_mut(F32));
    let len = 1 << 20;
    let [mut p, g, mut m, mut v] =
        [13, 14, 15, 16].map(|seed| Memory::of(&numbers(seed, len).iter().map(|x| x * x).collect::<Vec<f32>>()));
    let update = Update { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, bias1: 0.1, bias2: 0.05, grad_scale: 1.0 };
    let mut to = Memory::zeros(2 * len);
    let [p, m, v] = [&mut p, &mut m, &mut v].map(|x| x.view_mut(F32));
    adamw::step(p, g.view(F32), m, v, to.view_mut(Bf16), &Decays::of(&[(len, 0.1)]), &update);
}

fn heads() {
    let (rows, v) = (128, VOCABULARY);
    let places: Vec<usize> = (0..rows).map(|i| i * 131 % v).collect();
    let places = linear_logprob::places(&places, v);
    for dtype in [F32, Bf16] {
        let logits = if dtype == F32 { singles(1, rows * v) } else { halves(1, rows * v) };
        let logits = || Logits { values: logits.view(dtype), rows, v, stride: v };
        let mut stats = Memory::of(&vec![1.0f32; rows * 4]);
        linear_logprob::stats(logits(), 1.0, &places, &mut stats);
        let (slopes, stats) = (singles(2, rows), Memory::of(&vec![1.0f32; rows * 4]));
        let mut dlogits = Memory::zeros(2 * rows * v);
        let [one, two] = [slopes.view(F32), slopes.view(F32)];
        linear_logprob::gradient(logits(), 1.0, &stats, &places, one, two, dlogits.view_mut(Bf16), v);
    }
    let (h, w) = (halves(3, rows * WIDTH), halves(4, 4096 * WIDTH));
    let (mut scratch, mut stats) = (Memory::zeros(fused::scratch_bytes(rows, 4096)), linear_logprob::stats_room(rows));
    let places = linear_logprob::places(&vec![7; rows], 4096);
    fused::stats(h.view(Bf16), w.view(Bf16), WIDTH, 1.0, &places, &mut scratch, &mut stats);
    let (h, w, slopes) = (halves(5, TOKENS * WIDTH), halves(6, WIDTH), singles(7, TOKENS));
    let (mut values, mut dh, mut dw) =
        (Memory::zeros(4 * TOKENS), Memory::zeros(2 * TOKENS * WIDTH), Memory::zeros(4 * WIDTH));
    value_head::forward(h.view(Bf16), w.view(Bf16), values.view_mut(F32));
    let views = (dh.view_mut(Bf16), dw.view_mut(F32));
    value_head::backward(h.view(Bf16), w.view(Bf16), slopes.view(F32), views.0, views.1);
}

fn draws() {
    let (count, v) = (32, VOCABULARY);
    let params = SampleParams { temperature: 0.8, top_k: 50, top_p: 0.9, min_p: 0.0, repetition_penalty: 1.0 };
    let row = |i: usize| SampleRow { params, uniform: i as f32 / 40.0, seen: &[], banned: &[] };
    let tables = Rows::of(&(0..count).map(row).collect::<Vec<_>>());
    let (mut scratch, mut out) = (Memory::zeros(tables.scratch_bytes(count, v)), Drawn::room(count));
    let logits = singles(1, count * v);
    sample::forward(logits.view(F32), v, v, &Memory::of(&[v as i32]), &tables, &mut scratch, &mut out);
}
