//! Inputs and comparisons for the tests of this target.

use rlhf_hpc::tensor::{Layout, Slice, Tensor, Weight};

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
}

pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// |a - b| <= tolerance * (1 + |b|) everywhere.
#[track_caller]
pub fn close(got: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (&a, &b)) in got.iter().zip(expected).enumerate() {
        let off = (f64::from(a) - b).abs();
        assert!(off <= tolerance * (1.0 + b.abs()), "{what}: value {i} is {a}, expected {b}, off by {off:e}");
    }
}

/// For one chain of `terms` products of numbers in [-1, 1): partial sums grow as the root of the terms, and so does
/// the sum of their roundings, a few times 6e-8 each.
pub fn tolerance(terms: usize) -> f64 {
    1e-7 * terms as f64 + 1e-6
}
