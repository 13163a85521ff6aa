//! NCCL, opened at run time.

use crate::device::cuda::library::{NCCL, functions};
use crate::device::cuda::nvrtc::reason;
use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use libloading::Library;
use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::Path;
use std::ptr;

/// The oldest supported release: the first with bf16. Graphs can also contain its calls (since 2.9.6).
const OLDEST: [i32; 3] = [2, 10, 0];

/// A number instead of the bindings' enum: a release may return values that the enum lacks.
pub(super) type Status = c_int;
pub(super) type Queue = *mut c_void;

functions! {
    version: b"ncclGetVersion\0" (*mut c_int) -> Status;
    words: b"ncclGetErrorString\0" (Status) -> *const c_char;
    unique: b"ncclGetUniqueId\0" (*mut ncclUniqueId) -> Status;
    join: b"ncclCommInitRank\0" (*mut ncclComm_t, c_int, ncclUniqueId, c_int) -> Status;
    leave: b"ncclCommAbort\0" (ncclComm_t) -> Status;
    begin: b"ncclGroupStart\0" () -> Status;
    end: b"ncclGroupEnd\0" () -> Status;
    fault: b"ncclCommGetAsyncError\0" (ncclComm_t, *mut Status) -> Status;
    reduce_scatter: b"ncclReduceScatter\0"
        (*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, Queue) -> Status;
    all_gather: b"ncclAllGather\0" (*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, Queue) -> Status;
    broadcast: b"ncclBroadcast\0"
        (*const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, Queue) -> Status;
    send: b"ncclSend\0" (*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, Queue) -> Status;
    receive: b"ncclRecv\0" (*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, Queue) -> Status;
}

/// An opened library.
pub struct Nccl {
    pub(super) functions: Functions,
    pub path: OsString,
    /// Major, minor and patch.
    pub version: [i32; 3],
    /// ncclGetLastError, since 2.13: what NCCL_DEBUG=WARN would have shown.
    last: Option<LastError>,
    /// Never closed, because its threads may still wait in its code for absent ranks.
    _library: ManuallyDrop<Library>,
}

type LastError = unsafe extern "C" fn(ncclComm_t) -> *const c_char;

impl Nccl {
    /// Opens the library.
    ///
    /// # Errors
    /// The reason if there is none.
    pub fn open() -> std::result::Result<Self, String> {
        NCCL.open(|path| Self::at(path.as_ref()))
    }

    /// The library at `path`.
    ///
    /// # Errors
    /// The reason if it cannot be used.
    pub fn at(path: &Path) -> std::result::Result<Self, String> {
        // SAFETY: the initialisers of NCCL ask nothing of the process that opens it.
        let library = unsafe { Library::new(path) }.map_err(|e| reason(&e))?;
        let functions = Functions::load(&library)?;
        // SAFETY: the type is that of nccl.h in all versions that have it.
        let last = unsafe { library.get::<LastError>(b"ncclGetLastError\0") }.ok().map(|symbol| *symbol);
        let (mut code, library) = (0, ManuallyDrop::new(library));
        // SAFETY: writes a number.
        let status = unsafe { (functions.version)(&raw mut code) };
        let mut nccl = Self { functions, path: path.as_os_str().to_owned(), version: [0; 3], last, _library: library };
        nccl.check("ncclGetVersion", status)?;
        nccl.version = version(code);
        if nccl.version < OLDEST {
            let (version, oldest) = (nccl.version_name(), version_text(OLDEST));
            return Err(format!("NCCL {version} does not support bf16: version {oldest} or newer is needed"));
        }
        Ok(nccl)
    }

    /// The version as text: `2.21.5`.
    pub fn version_name(&self) -> String {
        version_text(self.version)
    }

    pub(super) fn check(&self, call: &str, status: Status) -> std::result::Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the library answers any number with a string of its own.
        let words = unsafe { CStr::from_ptr((self.functions.words)(status)) }.to_string_lossy();
        let last = self.last.map(|last| {
            // SAFETY: the library ignores the communicator, and returns a string that it keeps: the last one of any
            // thread.
            let text = unsafe { CStr::from_ptr(last(ptr::null_mut())) };
            // The text may end with a line break.
            text.to_string_lossy().trim().to_owned()
        });
        Err(failure_message(call, &words, &last.unwrap_or_default()))
    }
}

/// The message for a failed call: the cause, the library's text for the status, and a remedy if one is known. The text
/// names NCCL_DEBUG in releases since 2.18.
fn failure_message(call: &str, words: &str, last: &str) -> String {
    let cause = if last.is_empty() { String::new() } else { format!("{last}, ") };
    let help = if last.contains("driver version is insufficient") {
        " (this NCCL is built for a newer CUDA than the driver's: set RLHF_NCCL_LIB to another one)"
    } else if last.contains("no socket interface found") {
        " (no network interface is up, or none matches NCCL_SOCKET_IFNAME)"
    } else if words.contains("NCCL_DEBUG") {
        ""
    } else {
        " (set NCCL_DEBUG=WARN for details)"
    };
    format!("{call}: {cause}{words}{help}")
}

fn version_text(version: [i32; 3]) -> String {
    version.map(|n| n.to_string()).join(".")
}

/// Decodes a version: 21903 is 2.19.3, and 2804 is 2.8.4, a form that was used until 2.8.
fn version(code: i32) -> [i32; 3] {
    let minor = if code < 10_000 { 1000 } else { 10_000 };
    [code / minor, code % minor / 100, code % 100]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The texts are those of NCCL 2.28.9 and 2.16.5.
    #[test]
    fn an_error_of_the_library_is_reported_with_a_hint() {
        let words = "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
        let last = "Cuda failure 'CUDA driver version is insufficient for CUDA runtime version'";
        let message = failure_message("ncclCommInitRank", words, last);
        assert!(message.starts_with(&format!("ncclCommInitRank: {last}, {words} (")), "{message}");
        assert!(message.contains("RLHF_NCCL_LIB") && !message.contains("WARN"), "{message}");
        let message = failure_message("ncclGetUniqueId", "invalid usage", "Bootstrap : no socket interface found");
        assert!(message.contains("NCCL_SOCKET_IFNAME"), "{message}");
        let message = failure_message("ncclSend", "internal error", "");
        assert_eq!(message, "ncclSend: internal error (set NCCL_DEBUG=WARN for details)");
        assert_eq!(failure_message("ncclSend", words, ""), format!("ncclSend: {words}"));
    }

    #[test]
    fn a_version_is_read_in_both_of_its_spellings() {
        assert_eq!([22304, 21903, 2804].map(version), [[2, 23, 4], [2, 19, 3], [2, 8, 4]]);
    }
}
