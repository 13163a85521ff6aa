//! Rotary position embedding.

use super::pool::{Shares, pool};

/// Elements below which one thread is faster than waking the others.
const SERIAL_MAX: usize = 1 << 14;

/// Rotates each head of x (t, width) by the angle of its row's position; by the opposite angle where `back`.
/// cos and sin are [position][e/2] and hold every position of `positions`.
pub fn rotate(x: &mut [f32], width: usize, positions: &[u32], cos: &[f32], sin: &[f32], half: usize, back: bool) {
    let serial_max = SERIAL_MAX / width.max(1);
    let out = Shares::new(x);
    pool().ranges(positions.len(), 1, serial_max, &|rows| {
        for t in rows {
            let at = positions[t] as usize * half;
            let (cos, sin) = (&cos[at..at + half], &sin[at..at + half]);
            // SAFETY: row t belongs to this share alone and lies within x, which has a row per position.
            let row = unsafe { out.slice(t * width..(t + 1) * width) };
            for head in row.chunks_exact_mut(2 * half) {
                let (first, second) = head.split_at_mut(half);
                if back {
                    rotate_head(first, second, cos, sin, |s| -s);
                } else {
                    rotate_head(first, second, cos, sin, |s| s);
                }
            }
        }
    });
}

#[inline(always)]
fn rotate_head(first: &mut [f32], second: &mut [f32], cos: &[f32], sin: &[f32], turn: impl Fn(f32) -> f32) {
    for (((a, b), c), s) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        let s = turn(*s);
        (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
    }
}
