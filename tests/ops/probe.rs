//! Inputs and comparisons for the tests of operations.

use rlhf_hpc::device::cpu::pool::set_threads;
use rlhf_hpc::device::simd::{Level, with_level};
use rlhf_hpc::rng::{Purpose, Rng};
use rlhf_hpc::tensor::{DType, Layout, Slice, Tensor, Weight};

/// Uniform numbers in [-1, 1) from a fixed seed.
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn vec(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.next()).collect()
    }

    pub fn tensor(&mut self, rows: usize, width: usize) -> Tensor {
        let data = self.vec(rows * width);
        Tensor::from_slice(rows, width, &data)
    }
}

/// A matrix in row-major form and in panels, f32 or (values rounded first) bf16.
pub struct Matrix {
    pub n: usize,
    pub k: usize,
    pub rows: Vec<f32>,
    pub panels: Vec<f32>,
    pub halves: Vec<u16>,
}

pub fn bf16(x: f32) -> f32 {
    half::bf16::from_f32(x).to_f32()
}

impl Matrix {
    pub fn new(n: usize, k: usize, numbers: &mut Numbers) -> Self {
        Self::from_rows(n, k, numbers.vec(n * k))
    }

    /// The same with values that bf16 holds exactly.
    pub fn rounded(n: usize, k: usize, numbers: &mut Numbers) -> Self {
        Self::from_rows(n, k, numbers.vec(n * k).into_iter().map(bf16).collect())
    }

    pub fn from_rows(n: usize, k: usize, rows: Vec<f32>) -> Self {
        let mut panels = vec![0.0; Layout::Panel.len(n, k)];
        for r in 0..n {
            for c in 0..k {
                panels[Layout::Panel.index(k, r, c)] = rows[r * k + c];
            }
        }
        let mut halves = vec![0u16; panels.len()];
        for (pair, out) in panels.chunks(64).zip(halves.chunks_mut(64)) {
            for j in 0..32 {
                out[2 * j] = half::bf16::from_f32(pair[j]).to_bits();
                out[2 * j + 1] = half::bf16::from_f32(pair[32 + j]).to_bits();
            }
        }
        Self { n, k, rows, panels, halves }
    }

    pub fn f32(&self) -> Weight<'_> {
        Weight { n: self.n, k: self.k, layout: Layout::Panel, values: Slice::F32(&self.panels) }
    }

    pub fn bf16(&self) -> Weight<'_> {
        Weight { n: self.n, k: self.k, layout: Layout::Panel, values: Slice::Bf16(&self.halves) }
    }

    pub fn weight(&self, dtype: DType) -> Weight<'_> {
        if dtype == DType::Bf16 { self.bf16() } else { self.f32() }
    }
}

/// `len` normal numbers of standard deviation `std`, those of `seed`.
pub fn normals(seed: u64, len: usize, std: f32) -> Vec<f32> {
    let rng = Rng::new(seed, Purpose::Init);
    (0..len).map(|i| std * rng.normal_pair([i as u32 / 2, 0, 0, 0])[i % 2]).collect()
}

pub fn tensor(seed: u64, rows: usize, width: usize, std: f32) -> Tensor {
    Tensor::from_slice(rows, width, &normals(seed, rows * width, std))
}

pub fn same_bits(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    // Bytes are compared by the C library, which is fast where tests are not optimized.
    if bytemuck::cast_slice::<f32, u8>(got) == bytemuck::cast_slice::<f32, u8>(want) {
        return;
    }
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(got.to_bits() == want.to_bits(), "{what}[{i}]: {got} against {want}");
    }
}

/// Checks that the results of `run` have the same bits on any number of threads, at every instruction level.
pub fn same_on_threads_and_levels(what: &str, run: impl Fn() -> Vec<Vec<f32>>) {
    let want = run();
    for level in Level::available() {
        for threads in [1, 2, 3, 5] {
            set_threads(threads);
            for (i, (got, want)) in with_level(level, &run).iter().zip(&want).enumerate() {
                same_bits(&format!("{what}, {level:?}, {threads} threads, result {i}"), got, want);
            }
        }
    }
}

/// Asserts that each value is within `tolerance` times (1 + the largest expected value). NaN fails.
#[track_caller]
pub fn assert_near(what: &str, got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().fold(0f64, |m, x| m.max(x.abs()));
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let near = (f64::from(got) - want).abs() <= tolerance * (1.0 + largest);
        assert!(near, "{what}[{i}]: {got} against {want}");
    }
}

/// `values` in f64.
pub fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// For one chain of `terms` products of numbers in [-1, 1): partial sums grow as the root of the terms, and so does
/// the sum of their roundings, a few times 6e-8 each.
pub fn tolerance(terms: usize) -> f64 {
    1e-7 * terms as f64 + 1e-6
}

/// Asserts that gradients of hidden rows and of a head in panels equal finite differences of `loss(h, w)` in f64.
pub fn are_slopes(h: &Tensor, w: &Matrix, (dh, dw): (&Tensor, &[f32]), loss: impl Fn(&[f64], &[f64]) -> f64) {
    let (h, rows) = (wide(h.data()), wide(&w.rows));
    let slope = |at: usize, of_h: bool| {
        let shifted = |by: f64| {
            let (mut h, mut w) = (h.clone(), rows.clone());
            let x = if of_h { &mut h } else { &mut w };
            x[at] += by;
            loss(&h, &w)
        };
        (shifted(1e-5) - shifted(-1e-5)) / 2e-5
    };
    for at in 0..h.len() {
        assert_near("dh", &dh.data()[at..=at], &[slope(at, true)], 2e-6);
    }
    for at in 0..rows.len() {
        let index = Layout::Panel.index(w.k, at / w.k, at % w.k);
        assert_near("dW", &dw[index..=index], &[slope(at, false)], 2e-6);
    }
}
