//! What the driver answers.

use super::sys::{self, CUresult};
use crate::error::{Error, Result};
use std::ffi::{CStr, c_char};
use std::ptr;

/// An error that names the call where it did not succeed, and what to do where there is something.
pub fn check(call: &str, status: CUresult) -> Result<()> {
    if status == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let error = Error::fault(format!("{call}: {}", describe(status)));
    Err(match hint(status) {
        Some(hint) => error.hint(hint),
        None => error,
    })
}

/// What a user can do about a status, as the driver's documentation (`CUresult`) has its causes.
fn hint(status: CUresult) -> Option<&'static str> {
    use CUresult as Of;
    match status {
        Of::CUDA_ERROR_ILLEGAL_ADDRESS
        | Of::CUDA_ERROR_LAUNCH_FAILED
        | Of::CUDA_ERROR_ASSERT
        | Of::CUDA_ERROR_HARDWARE_STACK_ERROR
        | Of::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | Of::CUDA_ERROR_MISALIGNED_ADDRESS
        | Of::CUDA_ERROR_INVALID_ADDRESS_SPACE
        | Of::CUDA_ERROR_INVALID_PC => Some(
            "the GPU failed in work that was started before: with CUDA_LAUNCH_BLOCKING=1 in the environment and \
             rollout.graphs = false the call that fails is the culprit; lines with Xid in the log of the node's kernel \
             (dmesg) tell a fault of the machine",
        ),
        Of::CUDA_ERROR_ECC_UNCORRECTABLE => Some(
            "the GPU's memory is damaged (nvidia-smi -q -d ECC): have it taken out of service; the same line on another \
             node goes on from the last checkpoint",
        ),
        Of::CUDA_ERROR_OUT_OF_MEMORY => Some(
            "the GPU has too little memory left beside this run's: end other processes on it (nvidia-smi names them), or \
             lower mesh.arena_bytes_max",
        ),
        Of::CUDA_ERROR_DEVICE_UNAVAILABLE => {
            Some("another process may have the GPU for itself: nvidia-smi names processes and the compute mode")
        }
        Of::CUDA_ERROR_SYSTEM_NOT_READY => {
            Some("GPUs behind an NVSwitch need the fabric manager: systemctl status nvidia-fabricmanager")
        }
        Of::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
            Some("libcuda.so and the node's kernel module are of different drivers: the node has to be restarted")
        }
        Of::CUDA_ERROR_UNKNOWN | Of::CUDA_ERROR_LAUNCH_TIMEOUT => {
            Some("nvidia-smi, and lines with Xid in the log of the node's kernel (dmesg), may tell why")
        }
        _ => None,
    }
}

/// The driver's name and message for a status: `CUDA_ERROR_INVALID_VALUE (invalid argument)`; its number where it has no name.
pub fn describe(status: CUresult) -> String {
    let text = |ask: unsafe fn(CUresult, *mut *const c_char) -> CUresult| {
        let mut at: *const c_char = ptr::null();
        // SAFETY: writes a pointer to a string of the driver, or none for a status that it does not know.
        unsafe {
            let known = ask(status, &raw mut at) == CUresult::CUDA_SUCCESS && !at.is_null();
            known.then(|| CStr::from_ptr(at).to_string_lossy().into_owned())
        }
    };
    let name = text(sys::cuGetErrorName).unwrap_or_else(|| format!("status {}", status.0));
    match text(sys::cuGetErrorString) {
        Some(meaning) => format!("{name} ({meaning})"),
        None => name,
    }
}
