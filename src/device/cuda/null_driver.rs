//! The driver's functions on a null GPU (`device::null`): memory has addresses and no bytes, kernels and copies do
//! nothing, and reads return zeros.

use crate::device::null;
pub use crate::device::null::is_active;
use cudarc::driver::sys::{CUdevice_attribute as Attribute, CUdeviceptr, CUfunction_attribute as FunctionAttribute};
use std::cell::Cell;
use std::ffi::c_int;

/// The version that it reports: CUDA 12.8.
pub const VERSION: c_int = 12_080;
/// The maximum threads of a block, on every GPU.
const THREADS_MAX: c_int = 1024;
/// The largest read that is filled with zeros: repeated reads into the same memory have at most this many bytes.
pub const ZEROED_MAX: usize = 4 << 20;
/// Addresses begin at multiples of this.
const ALIGN: u64 = 512;

thread_local! {
    /// The next address to return.
    static NEXT: Cell<u64> = const { Cell::new(1 << 40) };
}

pub fn memory_bytes() -> usize {
    null::device().map_or(0, |device| device.memory_bytes as usize)
}

pub fn address(bytes: usize) -> CUdeviceptr {
    let start = NEXT.get();
    NEXT.set((start + bytes as u64).next_multiple_of(ALIGN));
    start
}

/// Writes zeros, except for reads so large that they have memory of their own (`onload`), which already holds zeros.
///
/// # Safety
/// `to` is the start of `bytes` bytes.
pub unsafe fn read(to: *mut u8, bytes: usize) {
    if bytes <= ZEROED_MAX {
        // SAFETY: promised by the caller.
        unsafe { to.write_bytes(0, bytes) };
    }
}

pub fn attribute(attribute: Attribute) -> c_int {
    let Some(gpu) = null::device().and_then(|device| device.gpu) else { return 0 };
    let value = match attribute {
        Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => gpu.capability.0 as usize,
        Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => gpu.capability.1 as usize,
        Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => gpu.multiprocessors,
        Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => gpu.shared_bytes,
        _ => 0,
    };
    value as c_int
}

pub fn function_attribute(attribute: FunctionAttribute) -> c_int {
    if attribute == FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK { THREADS_MAX } else { 0 }
}
