//! Memory that a thread keeps from call to call, so that kernels neither allocate nor fault pages in.

use std::cell::RefCell;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([f32; 16]);

thread_local! {
    static LINES: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// Bytes that a thread keeps after it has worked in `len` values.
pub fn bytes(len: usize) -> usize {
    len.div_ceil(16).next_power_of_two() * size_of::<Line>()
}

/// Calls `f` on `len` values of this thread, 64-byte aligned and with arbitrary contents.
///
/// # Panics
/// If `f` requests scratch itself.
pub fn with_scratch<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    LINES.with_borrow_mut(|lines| {
        let needed = len.div_ceil(16);
        if lines.len() < needed {
            lines.clear();
            lines.resize(needed.next_power_of_two(), Line([0.0; 16]));
        }
        f(&mut bytemuck::cast_slice_mut(lines)[..len])
    })
}

/// Values that `Rest::take` splits off for `len`: whole cache lines.
pub fn taken(len: usize) -> usize {
    len.next_multiple_of(16)
}

/// Scratch that has not been given out.
pub struct Rest<'a>(pub &'a mut [f32]);

impl<'a> Rest<'a> {
    /// Splits `taken(len)` values off, and returns the first `len` of them.
    pub fn take_slice(&mut self, len: usize) -> &'a mut [f32] {
        let (part, tail) = std::mem::take(&mut self.0).split_at_mut(taken(len));
        self.0 = tail;
        &mut part[..len]
    }
}
