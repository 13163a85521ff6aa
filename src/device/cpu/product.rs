//! The small matrix product of attention.

use super::vector::{Kernel, Vector};

/// The contents of C before the sum.
#[derive(Clone, Copy, Debug)]
pub enum Start {
    Zero,
    /// C[i][lane]
    Add,
    /// C[i][lane] * factor[i]
    Scaled(*const f32),
}

/// B's values: f32, or bf16, which are widened exactly.
pub trait Values: Copy {
    /// # Safety
    /// Same as `Vector::load`.
    unsafe fn load<V: Vector>(from: *const Self) -> V;
    /// # Safety
    /// Same as `Vector::load_part`.
    unsafe fn load_part<V: Vector>(from: *const Self, n: usize) -> V;
}

impl Values for f32 {
    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const Self) -> V {
        // SAFETY: promised by the caller.
        unsafe { V::load(from) }
    }

    #[inline(always)]
    unsafe fn load_part<V: Vector>(from: *const Self, n: usize) -> V {
        // SAFETY: promised by the caller.
        unsafe { V::load_part(from, n) }
    }
}

/// The bits of bf16.
impl Values for u16 {
    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const Self) -> V {
        // SAFETY: promised by the caller.
        unsafe { V::load_halves(from).even() }
    }

    #[inline(always)]
    unsafe fn load_part<V: Vector>(from: *const Self, n: usize) -> V {
        // SAFETY: promised by the caller.
        unsafe { V::load_part_halves(from, n).even() }
    }
}

/// C[i][lane] = start + sum_k A[i][k] B[k][lane], one ascending chain of fused multiply-adds per element, for
/// i < rows, lane < lanes. C's rows have room for whole vectors. Lanes past `lanes` get a product with zero, or are not
/// written.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    pub rows: usize,
    pub lanes: usize,
    pub k: usize,
    pub a: *const f32,
    /// Distance of A[i] and A[i+1].
    pub a_stride: usize,
    /// Distance of B[k] and B[k+1].
    pub b_stride: usize,
    pub c: *mut f32,
    pub c_stride: usize,
    pub start: Start,
}

/// `product` over `b`; `KS` is the distance of A[i][k] and A[i][k+1].
///
/// # Safety
/// Same as `Vector`; the pointers are valid for the ranges that the product names, and C overlaps neither A nor B.
#[inline(always)]
pub unsafe fn multiply<V: Vector, const KS: usize, B: Values>(b: *const B, product: Product) {
    // SAFETY: promised by the caller.
    unsafe { V::call(&Over::<KS, B>(b, product), &mut []) }
}

/// B, and the product over it: by value, so that no store to C can change it.
struct Over<const KS: usize, B>(*const B, Product);

impl<const KS: usize, B: Values> Kernel for Over<KS, B> {
    #[inline(always)]
    unsafe fn work<V: Vector>(&self, _: &mut [f32]) {
        // SAFETY: promised to `multiply`.
        unsafe {
            // There are twice as many wide registers.
            if V::LANES == 16 {
                product_by::<V, 8, KS, B>(self.0, &self.1);
            } else {
                product_by::<V, 4, KS, B>(self.0, &self.1);
            }
        }
    }
}

/// The product in tiles of at most `MR` rows and two vectors.
///
/// # Safety
/// Same as `multiply`.
#[inline(always)]
unsafe fn product_by<V: Vector, const MR: usize, const KS: usize, B: Values>(b: *const B, p: &Product) {
    let mut row = 0;
    // SAFETY: rows row .. row + (8, 4, 2, 1) lie below p.rows.
    unsafe {
        while row + MR <= p.rows {
            rows_by::<V, MR, KS, B>(b, p, row);
            row += MR;
        }
        if MR > 4 && row + 4 <= p.rows {
            rows_by::<V, 4, KS, B>(b, p, row);
            row += 4;
        }
        if MR > 2 && row + 2 <= p.rows {
            rows_by::<V, 2, KS, B>(b, p, row);
            row += 2;
        }
        if row < p.rows {
            rows_by::<V, 1, KS, B>(b, p, row);
        }
    }
}

/// # Safety
/// Same as `product_by`, with row + MR <= p.rows.
#[inline(always)]
unsafe fn rows_by<V: Vector, const MR: usize, const KS: usize, B: Values>(b: *const B, p: &Product, row: usize) {
    let mut lane = 0;
    // SAFETY: the first loop's tiles are whole; the last one has the remaining vectors, masked if necessary.
    unsafe {
        while lane + 2 * V::LANES <= p.lanes {
            tile::<V, MR, 2, KS, false, B>(b, p, row, lane);
            lane += 2 * V::LANES;
        }
        match p.lanes - lane {
            0 => {}
            rest if rest > V::LANES => tile::<V, MR, 2, KS, true, B>(b, p, row, lane),
            rest if rest == V::LANES => tile::<V, MR, 1, KS, false, B>(b, p, row, lane),
            _ => tile::<V, MR, 1, KS, true, B>(b, p, row, lane),
        }
    }
}

/// # Safety
/// Same as `product_by`, with row + MR <= p.rows, and lane + NV LANES <= p.lanes unless PART.
#[inline(always)]
unsafe fn tile<V: Vector, const MR: usize, const NV: usize, const KS: usize, const PART: bool, B: Values>(
    b: *const B,
    p: &Product,
    row: usize,
    lane: usize,
) {
    // SAFETY: A[row + i][k], B[k][lane ..] (masked if PART) and C[row + i][lane ..] (whole vectors) are in bounds.
    unsafe {
        let mut sums = [[V::splat(0.0); NV]; MR];
        let c = p.c.add(row * p.c_stride + lane);
        match p.start {
            Start::Zero => {}
            Start::Add => {
                for (i, sums) in sums.iter_mut().enumerate() {
                    for (v, sum) in sums.iter_mut().enumerate() {
                        *sum = V::load(c.add(i * p.c_stride + v * V::LANES));
                    }
                }
            }
            Start::Scaled(factors) => {
                for (i, sums) in sums.iter_mut().enumerate() {
                    let factor = V::splat(*factors.add(row + i));
                    for (v, sum) in sums.iter_mut().enumerate() {
                        *sum = V::load(c.add(i * p.c_stride + v * V::LANES)).mul(factor);
                    }
                }
            }
        }
        let mut a = p.a.add(row * p.a_stride);
        let mut b = b.add(lane);
        let rest = p.lanes - lane;
        for _ in 0..p.k {
            let mut factors = [V::splat(0.0); NV];
            for (v, factor) in factors.iter_mut().enumerate() {
                let at = b.wrapping_add(v * V::LANES);
                *factor = if PART { B::load_part(at, rest.saturating_sub(v * V::LANES)) } else { B::load(at) };
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                let x = V::splat(*a.add(i * p.a_stride));
                for (sum, factor) in sums.iter_mut().zip(factors) {
                    *sum = x.fma(factor, *sum);
                }
            }
            a = a.wrapping_add(KS);
            b = b.wrapping_add(p.b_stride);
        }
        for (i, sums) in sums.iter().enumerate() {
            for (v, sum) in sums.iter().enumerate() {
                sum.store(c.add(i * p.c_stride + v * V::LANES));
            }
        }
    }
}
