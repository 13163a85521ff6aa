//! One tile of a product: up to 8 rows times one panel of 32 lanes (or up to 4 rows times two panels).
//!
//! c[i][j] = chain over s ascending of acc = fma(a[i][s], b[s][j], acc), from 0 or from c. Neither the tile's shape nor
//! the instruction level enters the arithmetic, and a chain may be cut anywhere: c holds the f32 accumulator exactly.
//!
//! A step is one 32-bit word of `a` and of each lane of `b`: an f32, or a pair of bf16 (even index in the low half). A
//! pair is two fused multiply-adds, odd first, then even, as `vdpbf16ps` does; that instruction also flushes
//! denormals, the others do not, and in this alone the levels may differ.

pub use super::tile::{Arithmetic, LANES, Prefetch, ROWS, ROWS_PAIR, Tile};
use crate::device::simd::{Isa, Level, leveled};

/// Computes one tile.
///
/// # Safety
/// All words and values that the tile's fields describe are in bounds, c for writing and by this thread alone.
pub unsafe fn run(level: Level, arithmetic: Arithmetic, tile: &Tile) {
    #[cfg(target_arch = "x86_64")]
    {
        use super::microkernel_x86 as x86;
        match level.isa() {
            // SAFETY: bounds are promised by the caller, the instructions by the level.
            Isa::Avx512 => return unsafe { x86::avx512(level, arithmetic, tile) },
            // SAFETY: as above.
            Isa::Avx2 => return unsafe { x86::avx2(arithmetic, tile) },
            Isa::Scalar => {}
        }
    }
    // SAFETY: promised by the caller.
    unsafe { scalar(arithmetic, tile) }
}

/// The chain of 32 lanes, as plain Rust.
unsafe fn scalar(arithmetic: Arithmetic, t: &Tile) {
    let (row_step, step) = if t.packed { (1, ROWS) } else { (t.a_row, 1) };
    for i in 0..t.rows {
        for panel in 0..t.columns.div_ceil(LANES) {
            let columns = (t.columns - panel * LANES).min(LANES);
            let mut acc = [0.0f32; LANES];
            // SAFETY: within the bounds promised to `run`.
            let c = unsafe { std::slice::from_raw_parts_mut(t.c.add(i * t.c_row + panel * LANES), columns) };
            if !t.fresh {
                acc[..columns].copy_from_slice(c);
            }
            for s in 0..t.steps {
                // SAFETY: as above; bf16 weights may be aligned to two bytes only.
                let (a, b) = unsafe {
                    let b = t.b.add(panel * t.b_panel + s * LANES).cast::<[u32; LANES]>();
                    (t.a.add(i * row_step + s * step).read(), b.read_unaligned())
                };
                match arithmetic {
                    Arithmetic::F32 => {
                        for j in 0..LANES {
                            acc[j] = f32::from_bits(a).mul_add(f32::from_bits(b[j]), acc[j]);
                        }
                    }
                    Arithmetic::Bf16 => {
                        for j in 0..LANES {
                            let odd = f32::from_bits(a & 0xffff_0000);
                            let even = f32::from_bits(a << 16);
                            acc[j] = odd.mul_add(f32::from_bits(b[j] & 0xffff_0000), acc[j]);
                            acc[j] = even.mul_add(f32::from_bits(b[j] << 16), acc[j]);
                        }
                    }
                }
            }
            c.copy_from_slice(&acc[..columns]);
        }
    }
}

leveled! {
    /// The end of a row of a tile: value = chain + bias; y = value or y + value.
    pub fn finish_row(chain: &[f32], bias: Option<&[f32]>, y: &mut [f32], add: bool) {
        for (j, (y, &chain)) in y.iter_mut().zip(chain).enumerate() {
            let value = chain + bias.map_or(0.0, |b| b[j]);
            *y = if add { *y + value } else { value };
        }
    }
}
