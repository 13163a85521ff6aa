//! Between bf16 and f32, in the layouts of the flat buffer.

use crate::tensor::{Layout, PANEL};

/// bf16 to f32, exactly. In panels two neighbouring k interleave.
pub(super) fn widen(layout: Layout, from: &[u16], to: &mut [f32]) {
    let exact = |x: u16| f32::from_bits(u32::from(x) << 16);
    match layout {
        Layout::Row => to.iter_mut().zip(from).for_each(|(t, &x)| *t = exact(x)),
        Layout::Panel => {
            for (to, from) in to.chunks_exact_mut(2 * PANEL).zip(from.chunks_exact(2 * PANEL)) {
                let (even, odd) = to.split_at_mut(PANEL);
                for ((e, o), pair) in even.iter_mut().zip(odd).zip(from.chunks_exact(2)) {
                    (*e, *o) = (exact(pair[0]), exact(pair[1]));
                }
            }
        }
    }
}

/// f32 to bf16, rounded to nearest even. In panels two neighbouring k interleave.
pub(super) fn narrow(layout: Layout, from: &[f32], to: &mut [u16]) {
    match layout {
        Layout::Row => to.iter_mut().zip(from).for_each(|(t, &x)| *t = round(x)),
        Layout::Panel => {
            for (to, from) in to.chunks_exact_mut(2 * PANEL).zip(from.chunks_exact(2 * PANEL)) {
                let (even, odd) = from.split_at(PANEL);
                for (pair, (&e, &o)) in to.chunks_exact_mut(2).zip(even.iter().zip(odd)) {
                    (pair[0], pair[1]) = (round(e), round(o));
                }
            }
        }
    }
}

/// The nearest bf16, ties to even; NaN stays NaN.
#[inline]
pub(super) fn round(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16) as u16;
    if x.is_nan() { (bits >> 16) as u16 | 0x40 } else { rounded }
}
