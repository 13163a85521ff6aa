//! What the driver answers.

use crate::error::{Error, Result};
use cudarc::driver::sys::{self, CUresult};
use std::ffi::{CStr, c_char};
use std::ptr;

/// An error that names the call where it did not succeed.
pub fn check(call: &str, status: CUresult) -> Result<()> {
    if status == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(Error::fault(format!("{call}: {}", words(status))))
}

/// The driver's name and words for a status: `CUDA_ERROR_INVALID_VALUE (invalid argument)`; its number where it has no name.
pub fn words(status: CUresult) -> String {
    let text = |ask: unsafe fn(CUresult, *mut *const c_char) -> CUresult| {
        let mut at: *const c_char = ptr::null();
        // SAFETY: writes a pointer to a string of the driver, or none for a status that it does not know.
        unsafe {
            let known = ask(status, &raw mut at) == CUresult::CUDA_SUCCESS && !at.is_null();
            known.then(|| CStr::from_ptr(at).to_string_lossy().into_owned())
        }
    };
    let name = text(sys::cuGetErrorName).unwrap_or_else(|| format!("status {}", status as u32));
    match text(sys::cuGetErrorString) {
        Some(meaning) => format!("{name} ({meaning})"),
        None => name,
    }
}
