//! What operations check and count before they start a kernel.

use super::gpu::Arg;

/// Threads of a block in kernels whose threads do not know each other.
pub(super) const THREADS: usize = 256;
const WARP: usize = 32;

/// The grid of threads of eight values each.
pub(super) fn grid_of_eights(values: usize) -> [usize; 3] {
    [values.div_ceil(8 * THREADS), 1, 1]
}

/// A count that a kernel takes in 32 bits.
///
/// # Panics
/// If it has more.
pub(super) fn count(op: &str, n: usize) -> Arg {
    Arg::U32(u32::try_from(n).unwrap_or_else(|_| panic!("{op}: {n} is more than a kernel counts")))
}

/// # Panics
/// If rows of `width` values cannot be read in sixteen bytes.
pub(super) fn check_width(op: &str, width: usize) {
    assert!(width > 0 && width.is_multiple_of(8), "{op}: rows of {width} values, needs a multiple of 8");
}

/// # Panics
/// If `name` has another number of values than rows * width.
pub(super) fn check(op: &str, name: &str, len: usize, rows: usize, width: usize) {
    assert!(len == rows * width, "{op}: {name} has {len} values, needs {rows} x {width}");
}

/// # Panics
/// If one of the addresses is no multiple of 16.
pub(super) fn check_aligned(op: &str, args: &[Arg]) {
    assert!(args.iter().all(|arg| is_aligned(*arg)), "{op}: {args:?} do not all begin at a multiple of 16 bytes");
}

pub(super) fn is_aligned(arg: Arg) -> bool {
    matches!(arg, Arg::Address(at) if at.is_multiple_of(16))
}

/// The block, in whole warps up to `max` threads, for `threads` of them.
pub(super) fn block(threads: usize, max: usize) -> usize {
    threads.next_multiple_of(WARP).clamp(WARP, max)
}
