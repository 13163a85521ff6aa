//! Between bf16 and f32, in the layouts of the flat buffer.

use crate::dtype::round_bf16;
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
        Layout::Row => to.iter_mut().zip(from).for_each(|(t, &x)| *t = round_bf16(x)),
        Layout::Panel => {
            for (to, from) in to.chunks_exact_mut(2 * PANEL).zip(from.chunks_exact(2 * PANEL)) {
                let (even, odd) = from.split_at(PANEL);
                for (pair, (&e, &o)) in to.chunks_exact_mut(2).zip(even.iter().zip(odd)) {
                    (pair[0], pair[1]) = (round_bf16(e), round_bf16(o));
                }
            }
        }
    }
}
