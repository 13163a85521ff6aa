//! What this machine can do at best, measured with the pool's threads: the denominators of the benchmarks.

use super::pool::{Shares, pool};
use crate::device::simd::{Isa, level};
use std::hint::black_box;
use std::time::Instant;

/// Chains of one measuring loop: enough to hide the latency of the instruction, few enough for the registers.
const CHAINS_512: usize = 16;
const CHAINS_DOT: usize = 24;
const CHAINS_256: usize = 12;

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

macro_rules! chains {
    ($name:ident, $features:literal, $chains:ident, $lanes:literal, $zero:ident, |$acc:ident| $step:expr) => {
        /// The multiply-adds done.
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = $features)]
        fn $name(rounds: usize) -> f64 {
            use std::arch::x86_64::*;
            let mut acc = [black_box($zero()); $chains];
            for _ in 0..rounds {
                for $acc in &mut acc {
                    *$acc = $step;
                }
            }
            black_box(acc);
            (rounds * $chains * $lanes) as f64
        }
    };
}

chains!(fma_512, "avx512f", CHAINS_512, 16, _mm512_setzero_ps, |acc| _mm512_fmadd_ps(
    _mm512_set1_ps(0.5),
    _mm512_set1_ps(0.25),
    *acc
));
chains!(fma_256, "avx2,fma", CHAINS_256, 8, _mm256_setzero_ps, |acc| _mm256_fmadd_ps(
    _mm256_set1_ps(0.5),
    _mm256_set1_ps(0.25),
    *acc
));
chains!(dot_512, "avx512f,avx512bf16", CHAINS_DOT, 32, _mm512_setzero_ps, |acc| {
    // SAFETY: both are 64 bytes of plain bits.
    let half = unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(0x3f00_3f00)) };
    _mm512_dpbf16_ps(*acc, half, half)
});

fn fma_scalar(rounds: usize) -> f64 {
    let mut acc = [0.0f32; CHAINS_256];
    for _ in 0..rounds {
        for acc in &mut acc {
            *acc = black_box(0.5f32).mul_add(0.25, *acc);
        }
    }
    black_box(acc);
    (rounds * CHAINS_256) as f64
}

/// f32 multiply-adds at the level in use, all threads, in GFLOP/s; `rounds` of a dozen or two of vectors each (a million
/// take about 2 ms).
pub fn fma_gflops(rounds: usize) -> f64 {
    let level = level();
    2e-9 * rate(&|_| match level.isa() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level says that the processor has these instructions.
        Isa::Avx512 => unsafe { fma_512(rounds) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2 => unsafe { fma_256(rounds) },
        _ => fma_scalar(rounds),
    })
}

/// bf16 products by `vdpbf16ps`, all threads, in GFLOP/s; `None` where the level has none.
pub fn bf16_gflops(rounds: usize) -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    if level().bf16_dot() {
        // SAFETY: the level says that the processor has AVX512-BF16.
        return Some(2e-9 * rate(&|_| unsafe { dot_512(rounds) }));
    }
    let _ = rounds;
    None
}

/// Reads `data` once with all threads, each a contiguous part; in GB/s. Larger than the caches, it is the memory.
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
