//! Memory for tensors: 64-byte aligned buffers that go back to a free list when dropped, so steady-state steps
//! neither allocate from the system nor fault pages in.

use crate::device::cpu::copy;
use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Mutex;

const ALIGN: usize = 64;
const HUGE: usize = 2 << 20;

struct Arena {
    free: HashMap<usize, Vec<NonNull<f32>>>,
    in_use: usize,
    peak: usize,
    held: usize,
}

// SAFETY: the pointers in the free list are owned by the arena alone; nobody reads through them.
unsafe impl Send for Arena {}

static ARENA: Mutex<Option<Arena>> = Mutex::new(None);

fn with_arena<R>(f: impl FnOnce(&mut Arena) -> R) -> R {
    let mut guard = ARENA.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    f(guard.get_or_insert_with(|| Arena { free: HashMap::new(), in_use: 0, peak: 0, held: 0 }))
}

/// Bytes of live buffers, their peak since start, and bytes held from the system (live and free).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    pub in_use: usize,
    pub peak: usize,
    pub held: usize,
}

pub fn usage() -> Usage {
    with_arena(|a| Usage { in_use: a.in_use, peak: a.peak, held: a.held })
}

/// Gives every free buffer back to the system.
pub fn trim() {
    with_arena(|a| {
        for (bytes, list) in a.free.drain() {
            for ptr in list {
                a.held -= bytes;
                // SAFETY: allocated below with the same layout, and no longer referenced by anyone.
                unsafe { std::alloc::dealloc(ptr.as_ptr().cast(), layout(bytes)) };
            }
        }
    });
}

fn layout(bytes: usize) -> Layout {
    let align = if bytes >= HUGE { HUGE } else { ALIGN };
    Layout::from_size_align(bytes, align).expect("a buffer size fits the address space")
}

/// Rounds up so that buffers of similar size share a list: eighths of a power of two, at most 12.5 % waste.
fn size_class(bytes: usize) -> usize {
    let step = (bytes.max(512).next_power_of_two() / 16).max(ALIGN);
    bytes.max(ALIGN).next_multiple_of(step)
}

/// An owned, 64-byte aligned run of f32; 2 MiB aligned and huge-page advised from 2 MiB up.
pub struct Buffer {
    ptr: NonNull<f32>,
    len: usize,
    bytes: usize,
}

// SAFETY: a Buffer owns its memory exclusively, as a Box<[f32]> does.
unsafe impl Send for Buffer {}
// SAFETY: shared access is read-only, as for a Box<[f32]>.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// A buffer whose contents are unspecified (whatever its last user left). In debug builds it is filled with NaN.
    pub fn scratch(len: usize) -> Self {
        let bytes = size_class(len * size_of::<f32>());
        let ptr = with_arena(|a| {
            a.in_use += bytes;
            a.peak = a.peak.max(a.in_use);
            if let Some(ptr) = a.free.get_mut(&bytes).and_then(Vec::pop) {
                return ptr;
            }
            a.held += bytes;
            let layout = layout(bytes);
            // SAFETY: the layout's size is not zero. Zeroed memory makes every f32 read of a recycled buffer defined.
            let raw = unsafe { alloc_zeroed(layout) };
            if bytes >= HUGE {
                // SAFETY: the range is ours; the advice changes no contents and its failure is harmless.
                unsafe { libc::madvise(raw.cast(), bytes, libc::MADV_HUGEPAGE) };
            }
            // The layout aligns to 64 bytes.
            #[expect(clippy::cast_ptr_alignment)]
            NonNull::new(raw.cast::<f32>()).unwrap_or_else(|| handle_alloc_error(layout))
        });
        let mut buffer = Self { ptr, len, bytes };
        if cfg!(debug_assertions) {
            buffer.fill(f32::NAN);
        }
        buffer
    }

    pub fn zeros(len: usize) -> Self {
        let mut buffer = Self::scratch(len);
        copy::fill(&mut buffer, 0.0);
        buffer
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        with_arena(|a| {
            a.in_use -= self.bytes;
            a.free.entry(self.bytes).or_default().push(self.ptr);
        });
    }
}

impl Deref for Buffer {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        // SAFETY: ptr is valid for len floats, initialised (zeroed at allocation), and owned by self.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as in deref, and self is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl Clone for Buffer {
    fn clone(&self) -> Self {
        let mut twin = Self::scratch(self.len);
        copy::copy(self, &mut twin);
        twin
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} f32)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_buffer_is_used_again_for_a_request_of_similar_size() {
        let first = Buffer::scratch(1_000_003);
        let address = first.as_ptr();
        drop(first);
        let second = Buffer::scratch(1_000_001);
        assert_eq!(second.as_ptr(), address);
        assert_eq!(address as usize % ALIGN, 0);
    }
}
