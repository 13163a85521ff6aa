//! Keys and values in a cache on the CPU: their types, and blocks of them.

use super::attention_tile::PAGE;
use super::kv_codes::{self, factor, inverse, power, value};
use super::product::{Product, multiply};
use super::vector::{Vector, prefetch_far};
use crate::dtype::round_bf16;

/// A type of cached values. A head of a page is PAGE vectors, and a power for each of them in 8 bits.
pub trait CachedValue: Copy + Send + Sync {
    /// The number of powers of a head of a page.
    const POWERS: usize;

    /// The power of a vector.
    fn power(vector: &[f32]) -> u8;

    /// x, in a vector with a power.
    fn of(x: f32, power: u8) -> Self;

    /// A stored power.
    fn of_power(power: u8) -> Self;
}

impl CachedValue for f32 {
    const POWERS: usize = 0;

    fn power(_: &[f32]) -> u8 {
        0
    }

    fn of(x: f32, _: u8) -> Self {
        x
    }

    fn of_power(_: u8) -> Self {
        unreachable!("f32 has no powers")
    }
}

/// The bits of bf16.
impl CachedValue for u16 {
    const POWERS: usize = 0;

    fn power(_: &[f32]) -> u8 {
        0
    }

    fn of(x: f32, _: u8) -> Self {
        round_bf16(x)
    }

    fn of_power(_: u8) -> Self {
        unreachable!("bf16 has no powers")
    }
}

/// `kv_codes`.
impl CachedValue for u8 {
    const POWERS: usize = PAGE;

    fn power(vector: &[f32]) -> u8 {
        power(vector)
    }

    fn of(x: f32, power: u8) -> Self {
        kv_codes::code(x, inverse(power))
    }

    fn of_power(power: u8) -> Self {
        power
    }
}

/// The length of a head of a page, for vectors of `e` values.
pub(super) fn head_len<T: CachedValue>(e: usize) -> usize {
    PAGE * e + T::POWERS
}

/// The keys, or the values, of a cache.
#[derive(Clone, Copy, Debug)]
pub enum Cached<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u16]),
    Codes(&'a [u8]),
}

/// The order of a block: the tokens of a dim side by side, or the dims of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// [e][PAGE]
    Keys,
    /// [PAGE][e]
    Values,
}

/// The keys of a block, transposed, or its values.
#[derive(Clone, Copy)]
pub(super) enum Block {
    F32(*const f32),
    Bf16(*const u16),
}

impl Cached<'_> {
    /// Head `at`, counted over all pages, of vectors of `e` values. Codes are decoded to `room`.
    ///
    /// # Safety
    /// Same as `Vector`. The result may be read while the cache and `room` live.
    #[inline(always)]
    pub(super) unsafe fn block<V: Vector>(self, at: usize, e: usize, side: Side, room: &mut [f32]) -> Block {
        match self {
            Self::F32(values) => Block::F32(values[at * PAGE * e..(at + 1) * PAGE * e].as_ptr()),
            Self::Bf16(values) => Block::Bf16(values[at * PAGE * e..(at + 1) * PAGE * e].as_ptr()),
            Self::Codes(codes) => {
                let len = head_len::<u8>(e);
                // SAFETY: promised by the caller.
                unsafe { decode::<V>(&codes[at * len..(at + 1) * len], e, side, &mut room[..PAGE * e]) };
                Block::F32(room.as_ptr())
            }
        }
    }

    /// The same values [PAGE][e] in f32, in `room` if they are not.
    ///
    /// # Safety
    /// Same as `block`.
    #[inline(always)]
    pub(super) unsafe fn widened<V: Vector>(self, at: usize, e: usize, room: &mut [f32]) -> *const f32 {
        // SAFETY: promised by the caller.
        match unsafe { self.block::<V>(at, e, Side::Values, room) } {
            Block::F32(rows) => rows,
            Block::Bf16(bits) => {
                for (i, x) in room[..PAGE * e].iter_mut().enumerate() {
                    // SAFETY: the page has as many values.
                    *x = f32::from_bits(u32::from(unsafe { *bits.add(i) }) << 16);
                }
                room.as_ptr()
            }
        }
    }

    /// Prefetches head `at` into the second-level cache, so that many cache lines are in flight at once.
    ///
    /// # Safety
    /// Same as `Vector`.
    #[inline(always)]
    pub(super) unsafe fn prefetch<V: Vector>(self, at: usize, e: usize) {
        // SAFETY: instructions as promised; a prefetch touches no memory.
        unsafe {
            match self {
                Self::F32(all) => prefetch_far::<V>(all.as_ptr().wrapping_add(at * PAGE * e), PAGE * e),
                Self::Bf16(all) => prefetch_far::<V>(all.as_ptr().wrapping_add(at * PAGE * e).cast(), PAGE * e / 2),
                Self::Codes(all) => {
                    let len = head_len::<u8>(e);
                    prefetch_far::<V>(all.as_ptr().wrapping_add(at * len).cast(), len / 4);
                }
            }
        }
    }
}

/// The values of a head of a page.
///
/// # Safety
/// Same as `Vector`.
#[inline(always)]
unsafe fn decode<V: Vector>(head: &[u8], e: usize, side: Side, to: &mut [f32]) {
    assert!(to.len() == PAGE * e && head.len() == head_len::<u8>(e), "a head of a page");
    let (codes, powers) = head.split_at(PAGE * e);
    let mut factors = [0.0; PAGE];
    factors.iter_mut().zip(powers).for_each(|(to, power)| *to = factor(*power));
    let (codes, to) = (codes.as_ptr(), to.as_mut_ptr());
    // SAFETY: instructions as promised; both have PAGE * e values, of which vectors cover whole ones.
    unsafe {
        match side {
            Side::Keys => {
                for lane in (0..PAGE).step_by(V::LANES) {
                    let factors = V::load(factors.as_ptr().add(lane));
                    for at in (lane..PAGE * e).step_by(PAGE) {
                        V::load_codes(codes.add(at)).mul(factors).store(to.add(at));
                    }
                }
            }
            Side::Values => {
                for (j, factor) in factors.iter().enumerate() {
                    let (start, whole) = (j * e, j * e + e / V::LANES * V::LANES);
                    for at in (start..whole).step_by(V::LANES) {
                        V::load_codes(codes.add(at)).mul(V::splat(*factor)).store(to.add(at));
                    }
                    for at in whole..start + e {
                        *to.add(at) = value(*codes.add(at)) * factor;
                    }
                }
            }
        }
    }
}

impl Block {
    /// `multiply` over this.
    ///
    /// # Safety
    /// Same as `multiply`.
    #[inline(always)]
    pub unsafe fn product<V: Vector>(self, product: Product) {
        // SAFETY: promised by the caller.
        unsafe {
            match self {
                Self::F32(b) => multiply::<V, 1, _>(b, product),
                Self::Bf16(b) => multiply::<V, 1, _>(b, product),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::vector::{Kernel, run};
    use crate::device::simd::Level;

    /// Decodes a page with every code in every lane, into the scratch.
    struct All(usize, Side);

    fn page(e: usize) -> Vec<u8> {
        let codes = (0..PAGE * e).map(|i| (i * 37 + i / 256) as u8);
        codes.chain((0..PAGE).map(|j| if j == 3 { 255 } else { 27 + 7 * j as u8 })).collect()
    }

    impl Kernel for All {
        unsafe fn work<V: Vector>(&self, to: &mut [f32]) {
            let Self(e, side) = *self;
            // SAFETY: promised by the caller.
            unsafe { decode::<V>(&page(e), e, side, &mut to[..PAGE * e]) };
            for (i, (x, code)) in to.iter().zip(&page(e)[..PAGE * e]).enumerate() {
                let token = if side == Side::Keys { i % PAGE } else { i / e };
                let wanted = value(*code) * factor(page(e)[PAGE * e + token]);
                assert!(x.to_bits() == wanted.to_bits() || x.is_nan() && wanted.is_nan(), "{i}: {x}, not {wanted}");
            }
        }
    }

    #[test]
    fn vectors_of_all_levels_decode_as_one_number_at_a_time() {
        for level in Level::available() {
            for (e, side) in [6, 8, 12, 64, 80].into_iter().flat_map(|e| [(e, Side::Keys), (e, Side::Values)]) {
                run(level, PAGE * e, &All(e, side));
            }
        }
    }
}
