//! The checks and counts of operations before they start a kernel.

use super::gpu::Arg;

/// Threads of a block in kernels whose threads are independent.
pub(super) const THREADS: usize = 256;
const WARP: usize = 32;

/// The grid of threads of eight values each.
pub(super) fn grid_of_eights(values: usize) -> [usize; 3] {
    [values.div_ceil(8 * THREADS), 1, 1]
}

/// The grid of `threads` threads, which the kernel counts in 32 bits.
pub(super) fn grid_of(op: &str, threads: usize) -> [usize; 3] {
    [to_u32(op, threads).div_ceil(THREADS as u32) as usize, 1, 1]
}

/// A number that a kernel takes in 32 bits, in an argument or in a table.
pub(super) fn to_u32(op: &str, n: usize) -> u32 {
    u32::try_from(n).unwrap_or_else(|_| panic!("{op}: {n} does not fit the 32 bits of a kernel"))
}

/// A count as an argument.
pub(super) fn count(op: &str, n: usize) -> Arg {
    Arg::U32(to_u32(op, n))
}

/// The same for a number that a kernel reads as an int.
pub(super) fn to_i32(op: &str, n: usize) -> i32 {
    i32::try_from(n).unwrap_or_else(|_| panic!("{op}: {n} does not fit the 31 bits of a kernel"))
}

/// A dim as an argument.
pub(super) fn dim(op: &str, n: usize) -> Arg {
    Arg::I32(to_i32(op, n))
}

/// # Panics
/// If rows of `width` values cannot be read in sixteen bytes.
pub(super) fn check_width(op: &str, width: usize) {
    assert!(width > 0 && width.is_multiple_of(8), "{op}: the row width must be a multiple of 8 (got {width})");
}

/// # Panics
/// If one of the addresses is not a multiple of 16.
pub(super) fn check_aligned(op: &str, args: &[Arg]) {
    assert!(args.iter().all(|arg| is_aligned(*arg)), "{op}: all of {args:?} must be aligned to 16 bytes");
}

pub(super) fn is_aligned(arg: Arg) -> bool {
    matches!(arg, Arg::Address(at) if at.is_multiple_of(16))
}

/// The block, in whole warps up to `max` threads, for `threads` of them.
pub(super) fn block(threads: usize, max: usize) -> usize {
    threads.next_multiple_of(WARP).clamp(WARP, max)
}

/// Head dims with kernels for forward, backward and paged keys.
pub const HEAD_DIMS: [usize; 6] = [32, 64, 80, 96, 128, 256];

/// The kernel for a head dim, whose name ends with it.
macro_rules! kernel_of {
    ($name:literal, $head_dim:expr) => {
        match $head_dim {
            32 => concat!($name, 32),
            64 => concat!($name, 64),
            80 => concat!($name, 80),
            96 => concat!($name, 96),
            128 => concat!($name, 128),
            256 => concat!($name, 256),
            other => panic!("{}: head dim {other} is not one of {:?}", $name, $crate::device::cuda::shape::HEAD_DIMS),
        }
    };
}
pub(super) use kernel_of;
