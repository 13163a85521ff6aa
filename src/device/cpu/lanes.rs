//! Sums that run in lanes, which the compiler vectorizes inside `leveled!`.

use std::ops::AddAssign;

/// The sum of all lanes: the upper half is added to the lower half until one is left.
#[inline(always)]
pub fn fold<T: Copy + AddAssign, const N: usize>(mut lanes: [T; N]) -> T {
    let mut half = N / 2;
    while half > 0 {
        for i in 0..half {
            let upper = lanes[i + half];
            lanes[i] += upper;
        }
        half /= 2;
    }
    lanes[0]
}

/// `add` over x, in lanes i % N, each ascending, then folded.
#[inline(always)]
pub fn sum<T: Copy + Default + AddAssign, const N: usize>(x: &[f32], add: impl Fn(T, f32) -> T) -> T {
    let mut lanes = [T::default(); N];
    let (blocks, tail) = x.as_chunks::<N>();
    for block in blocks {
        for j in 0..N {
            lanes[j] = add(lanes[j], block[j]);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(tail) {
        *lane = add(*lane, x);
    }
    fold(lanes)
}

/// The largest of x. NaN is skipped.
#[inline(always)]
pub fn max<const N: usize>(x: &[f32]) -> f32 {
    let (blocks, tail) = x.as_chunks::<N>();
    let mut lanes = [f32::NEG_INFINITY; N];
    for block in blocks {
        for j in 0..N {
            lanes[j] = if block[j] > lanes[j] { block[j] } else { lanes[j] };
        }
    }
    lanes.iter().chain(tail).fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a })
}

/// sum_i x[i] w[i], in lanes i % N, each one ascending chain of fused multiply-adds.
#[inline(always)]
pub fn dot<const N: usize>(x: &[f32], w: &[f32]) -> f32 {
    let mut lanes = [0.0f32; N];
    let ((xs, x_tail), (ws, w_tail)) = (x.as_chunks::<N>(), w.as_chunks::<N>());
    for (x, w) in xs.iter().zip(ws) {
        for j in 0..N {
            lanes[j] = x[j].mul_add(w[j], lanes[j]);
        }
    }
    for ((lane, &x), &w) in lanes.iter_mut().zip(x_tail).zip(w_tail) {
        *lane = x.mul_add(w, *lane);
    }
    fold(lanes)
}
