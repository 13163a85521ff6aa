//! Rotary position embedding.

use super::pool::{Shares, pool};
use crate::device::simd::{level, leveled};
use crate::pictures::AXES;

/// The number of elements below which one thread is faster than waking the others.
const SERIAL_MAX: usize = 1 << 14;
/// The number of pairs that are rotated together.
const LANES: usize = 8;

/// Angles of the positions: cos and sin, [position][half].
#[derive(Clone, Copy, Debug)]
pub struct Angles<'a> {
    pub half: usize,
    pub cos: &'a [f32],
    pub sin: &'a [f32],
    /// Whether to rotate by the opposite angle.
    pub back: bool,
}

/// Rotates each head of x (t, width) by the angle of its row's position.
pub fn rotate(x: &mut [f32], width: usize, positions: &[u32], angles: Angles) {
    let level = level();
    let out = Shares::new(x);
    pool().ranges(positions.len(), 1, positions.len() < SERIAL_MAX / width.max(1), &|rows| {
        // SAFETY: these rows belong to this share alone and lie within x, which has a row per position.
        let x = unsafe { out.slice(rows.start * width..rows.end * width) };
        rotate_rows(level, x, width, &positions[rows], angles);
    });
}

/// The same for positions of three numbers each: pair i turns by the number `axes[i]` of its row's position. Pairs after
/// the last axis do not turn.
pub fn rotate_axes(x: &mut [f32], width: usize, (positions, axes): (&[u32], &[u8]), angles: Angles) {
    let (level, half) = (level(), angles.half);
    let (out, rows) = (Shares::new(x), positions.len() / AXES);
    pool().ranges(rows, 1, rows < SERIAL_MAX / width.max(1), &|rows| {
        let (mut cos, mut sin) = (vec![1.0; half], vec![0.0; half]);
        for row in rows {
            for (i, axis) in axes.iter().enumerate() {
                let at = positions[AXES * row + usize::from(*axis)] as usize * half + i;
                (cos[i], sin[i]) = (angles.cos[at], angles.sin[at]);
            }
            // SAFETY: this row belongs to this share alone and lies within x.
            let x = unsafe { out.slice(row * width..(row + 1) * width) };
            rotate_rows(level, x, width, &[0], Angles { cos: &cos, sin: &sin, ..angles });
        }
    });
}

/// Multiplies each row of x (t, width) by the factor of its position.
pub fn scale(x: &mut [f32], width: usize, positions: &[u32], factors: &[f32]) {
    for (row, &position) in x.chunks_exact_mut(width).zip(positions) {
        let factor = factors[position as usize];
        for x in row {
            *x *= factor;
        }
    }
}

leveled! {
    fn rotate_rows(x: &mut [f32], width: usize, positions: &[u32], angles: Angles) {
        let half = angles.half;
        for (row, &position) in x.chunks_exact_mut(width).zip(positions) {
            let at = position as usize * half;
            let (cos, sin) = (&angles.cos[at..at + half], &angles.sin[at..at + half]);
            for head in row.chunks_exact_mut(2 * half) {
                let (first, second) = head.split_at_mut(half);
                if angles.back {
                    rotate_head::<true>(first, second, cos, sin);
                } else {
                    rotate_head::<false>(first, second, cos, sin);
                }
            }
        }
    }
}

#[inline(always)]
fn rotate_head<const BACK: bool>(first: &mut [f32], second: &mut [f32], cos: &[f32], sin: &[f32]) {
    let turn = |a: f32, b: f32, c: f32, s: f32| {
        let s = if BACK { -s } else { s };
        (a * c - b * s, b * c + a * s)
    };
    let (first, first_rest) = first.as_chunks_mut::<LANES>();
    let (second, second_rest) = second.as_chunks_mut::<LANES>();
    let (cos, cos_rest) = cos.as_chunks::<LANES>();
    let (sin, sin_rest) = sin.as_chunks::<LANES>();
    for (((first, second), c), s) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        // Copies, so that the compiler knows that writes do not change later reads.
        let (mut a, mut b) = (*first, *second);
        for i in 0..LANES {
            (a[i], b[i]) = turn(a[i], b[i], c[i], s[i]);
        }
        (*first, *second) = (a, b);
    }
    for (((a, b), c), s) in first_rest.iter_mut().zip(second_rest).zip(cos_rest).zip(sin_rest) {
        (*a, *b) = turn(*a, *b, *c, *s);
    }
}
