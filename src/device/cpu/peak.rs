//! The peak rates of this machine, measured with the pool's threads: the denominators of the benchmarks.

use super::pool::{Shares, pool};
use super::vector::{Kernel, Vector, run_in};
use crate::device::simd::level;
use std::hint::black_box;
use std::time::Instant;

/// The number of chains in a measuring loop: enough to hide the instruction's latency, few enough for the registers.
const CHAINS: usize = 12;
const CHAINS_DOT: usize = 24;

/// Runs `work(id)` (which returns an amount) on every thread and adds the rates, in amounts per second.
fn rate(work: &(dyn Fn(usize) -> f64 + Sync)) -> f64 {
    let pool = pool();
    let mut rates = vec![0.0; pool.threads()];
    let out = Shares::new(&mut rates);
    pool.run(&|id| {
        let start = Instant::now();
        let amount = work(id);
        // SAFETY: each share writes its own element.
        let rate = unsafe { out.slice(id..id + 1) };
        rate[0] = amount / start.elapsed().as_secs_f64();
    });
    rates.iter().sum()
}

/// Multiply-adds: `rounds` of each chain.
struct Chains {
    rounds: usize,
}

impl Kernel for Chains {
    #[inline(always)]
    unsafe fn work<V: Vector>(&self, done: &mut [f32]) {
        // SAFETY: instructions as promised.
        unsafe {
            let mut acc = [black_box(V::splat(0.0)); CHAINS];
            for _ in 0..self.rounds {
                for acc in &mut acc {
                    *acc = V::splat(0.5).fma(V::splat(0.25), *acc);
                }
            }
            black_box(acc);
        }
        done[0] = (CHAINS * V::LANES) as f32;
    }
}

/// The multiply-adds done.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
fn dot_512(rounds: usize) -> f64 {
    use std::arch::x86_64::{__m512bh, __m512i, _mm512_dpbf16_ps, _mm512_set1_epi32, _mm512_setzero_ps};
    // SAFETY: both are 64 bytes of plain bits.
    let half = unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(0x3f00_3f00)) };
    let mut acc = [black_box(_mm512_setzero_ps()); CHAINS_DOT];
    for _ in 0..rounds {
        for acc in &mut acc {
            *acc = _mm512_dpbf16_ps(*acc, half, half);
        }
    }
    black_box(acc);
    (rounds * CHAINS_DOT * 32) as f64
}

/// f32 multiply-adds at the level in use, all threads, in GFLOP/s; `rounds` of a dozen or two of vectors each (a
/// million take about 2 ms).
pub fn fma_gflops(rounds: usize) -> f64 {
    let level = level();
    2e-9 * rate(&|_| {
        let mut of_round = [0.0];
        run_in(level, &Chains { rounds }, &mut of_round);
        rounds as f64 * f64::from(of_round[0])
    })
}

/// The rate of bf16 products by `vdpbf16ps` on all threads, in GFLOP/s; `None` if the level has no such instruction.
pub fn bf16_gflops(rounds: usize) -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    if level().bf16_dot() {
        // SAFETY: the level says that the processor has AVX512-BF16.
        return Some(2e-9 * rate(&|_| unsafe { dot_512(rounds) }));
    }
    let _ = rounds;
    None
}

/// Reads `data` once with all threads, each a contiguous part, and returns GB/s. With data larger than the caches, this
/// is the rate of the memory.
pub fn read_gbs(data: &[f32]) -> f64 {
    let threads = pool().threads();
    let level = level();
    let part = data.len() / threads;
    1e-9 * rate(&|id| {
        let part = &data[id % threads * part..(id % threads + 1) * part];
        black_box(sum_of_lanes(level, part));
        size_of_val(part) as f64
    })
}

crate::device::simd::leveled! {
    fn sum_of_lanes(data: &[f32]) -> f32 {
        let mut lanes = [0.0f32; 128];
        for block in data.as_chunks::<128>().0 {
            for j in 0..128 {
                lanes[j] += block[j];
            }
        }
        lanes.iter().sum()
    }
}
