//! The driver's functions, with the declarations of `cuda.h` except for their status, which is a number here. A driver
//! that is newer than the bindings returns codes that their enum lacks, and such an enum value would be undefined.

use super::library::is_absent;
use super::null_driver as null;
use super::nvrtc::reason;
// What is declared below hides the bindings' functions of these names, and their `CUresult`.
use crate::error::Error;
pub use cudarc::driver::sys::*;
use libloading::Library;
use std::env;
use std::ffi::{CStr, OsString, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::fmt;
use std::ptr;
use std::sync::OnceLock;

/// A status of the driver, known to the bindings or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct CUresult(pub u32);

/// A handle of a CUDA library.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Handle<T>(pub T);

// SAFETY: the libraries' handles may be used from every thread; those of NCCL one call after another (`Communicator`).
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

macro_rules! statuses {
    ($($name:ident)*) => {
        impl CUresult {
            $(pub const $name: Self = Self(cudarc::driver::sys::CUresult::$name as u32);)*
        }
    };
}

statuses! {
    CUDA_SUCCESS CUDA_ERROR_OUT_OF_MEMORY CUDA_ERROR_STUB_LIBRARY CUDA_ERROR_DEVICE_UNAVAILABLE CUDA_ERROR_NO_DEVICE
    CUDA_ERROR_ECC_UNCORRECTABLE CUDA_ERROR_NOT_READY CUDA_ERROR_ILLEGAL_ADDRESS CUDA_ERROR_LAUNCH_TIMEOUT CUDA_ERROR_ASSERT
    CUDA_ERROR_HARDWARE_STACK_ERROR CUDA_ERROR_ILLEGAL_INSTRUCTION CUDA_ERROR_MISALIGNED_ADDRESS CUDA_ERROR_INVALID_ADDRESS_SPACE
    CUDA_ERROR_INVALID_PC CUDA_ERROR_LAUNCH_FAILED CUDA_ERROR_SYSTEM_NOT_READY CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
    CUDA_ERROR_UNKNOWN
}

/// The reason why no GPU can be used, as the text after `cuda none: `.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoGpu {
    /// The machine has no driver, or the driver shows no GPU to this process.
    Unseen(String),
    /// There is a driver, and it cannot be used.
    Broken(String),
}

impl fmt::Display for NoGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Unseen(why) | Self::Broken(why)) = self;
        why.fmt(f)
    }
}

/// The driver's file names. The second is also the name of the stub that CUDA ships for linking.
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];
/// The variable that names its file, as for the other libraries.
const VARIABLE: &str = "RLHF_CUDA_LIB";

/// The driver, or the reason why it cannot be used.
static OPENED: OnceLock<Result<Functions, NoGpu>> = OnceLock::new();

/// Opens the driver once per process. A driver that lacks a function is rejected before any call.
///
/// # Errors
/// The reason why there is none.
pub fn open() -> Result<(), NoGpu> {
    if null::is_active() {
        return Ok(());
    }
    OPENED.get_or_init(Functions::first).as_ref().map(|_| ()).map_err(Clone::clone)
}

/// Whether `open` has found a driver.
pub fn is_open() -> bool {
    matches!(OPENED.get(), Some(Ok(_)))
}

impl Functions {
    /// Opens only the file that the variable names, or else the first name that the system's loader finds.
    fn first() -> Result<Self, NoGpu> {
        let named = env::var_os(VARIABLE).filter(|path| !path.is_empty());
        let names = named.map_or_else(|| NAMES.iter().map(OsString::from).collect(), |path| vec![path]);
        for name in &names {
            // SAFETY: the driver's initialisers ask nothing of the process that opens it.
            match unsafe { Library::new(name) } {
                Ok(library) => return Self::load(library).map_err(NoGpu::Broken),
                Err(error) if is_absent(&reason(&error), name.as_ref()) => {}
                Err(error) => {
                    let why = format!("{} is not a driver for this machine: {}", name.display(), reason(&error));
                    return Err(NoGpu::Broken(why));
                }
            }
        }
        Err(NoGpu::Unseen(format!("{} is not on this machine", names[0].display())))
    }
}

/// The status of a call on a null GPU, after it has written its results.
macro_rules! success {
    () => {
        CUresult::CUDA_SUCCESS
    };
    ($answer:expr) => {{
        // SAFETY: the caller's pointers, as for the driver.
        #[allow(unused_unsafe, reason = "some answers touch no memory")]
        unsafe {
            $answer;
        }
        CUresult::CUDA_SUCCESS
    }};
}

/// `f(...)`, or `f(...) => its effect on a null GPU` if it has one.
macro_rules! functions {
    ($($name:ident($($argument:ident: $kind:ty),*) $(=> $answer:expr)?;)*) => {
        #[allow(non_snake_case)]
        struct Functions {
            $($name: unsafe extern "C" fn($($kind),*) -> CUresult,)*
            _library: Library,
        }

        impl Functions {
            fn load(library: Library) -> Result<Self, String> {
                let symbols = [$(concat!(stringify!($name), "\0")),*];
                // SAFETY: no function is called.
                let is_there = |symbol: &str| unsafe { library.get::<unsafe extern "C" fn()>(symbol.as_bytes()) }.is_ok();
                let lacks: Vec<&str> = symbols.into_iter().filter(|symbol| !is_there(symbol)).collect();
                if !lacks.is_empty() {
                    let lacks = lacks.join(", ").replace('\0', "");
                    return Err(format!("the driver must be version 470 (CUDA 11.4) or newer; it lacks {lacks}"));
                }
                // SAFETY: the driver's own declarations, the status apart, which is an int of C.
                unsafe {
                    Ok(Self {
                        $($name: *library
                            .get(concat!(stringify!($name), "\0").as_bytes())
                            .map_err(|error| reason(&error))?,)*
                        _library: library,
                    })
                }
            }
        }

        $(
            /// # Safety
            /// The requirements of the driver's documentation.
            ///
            /// # Panics
            /// If `open` has found no driver.
            #[allow(non_snake_case)]
            pub unsafe fn $name($($argument: $kind),*) -> CUresult {
                if null::is_active() {
                    return success!($($answer)?);
                }
                let functions = OPENED.get().and_then(|opened| opened.as_ref().ok()).expect("`open` is called first");
                // SAFETY: promised by the caller.
                unsafe { (functions.$name)($($argument),*) }
            }
        )*
    };
}

functions! {
    cuInit(flags: c_uint);
    cuDriverGetVersion(version: *mut c_int) => version.write(null::VERSION);
    cuGetErrorName(status: CUresult, name: *mut *const c_char);
    cuGetErrorString(status: CUresult, words: *mut *const c_char);
    cuDeviceGetCount(count: *mut c_int) => count.write(1);
    cuDeviceGet(device: *mut CUdevice, index: c_int);
    cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice);
    cuDeviceGetPCIBusId(pci: *mut c_char, len: c_int, device: CUdevice);
    cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
    cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) => bytes.write(null::memory_bytes());
    cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice) => value.write(null::attribute(attribute));
    cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    cuCtxSetCurrent(context: CUcontext);
    cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int);
    cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    cuFuncGetAttribute(value: *mut c_int, attribute: CUfunction_attribute, function: CUfunction) => value.write(null::function_attribute(attribute));
    cuFuncSetAttribute(function: CUfunction, attribute: CUfunction_attribute, value: c_int);
    cuLaunchKernel(function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared_bytes: c_uint, stream: CUstream, arguments: *mut *mut c_void, extra: *mut *mut c_void);
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) => free.write(null::memory_bytes());
    cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize) => address.write(null::address(bytes));
    cuMemFree_v2(address: CUdeviceptr);
    cuMemHostRegister_v2(at: *mut c_void, bytes: usize, flags: c_uint);
    cuMemHostUnregister(at: *mut c_void);
    cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream) => null::read(to.cast(), bytes);
    cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemsetD8Async(to: CUdeviceptr, value: c_uchar, bytes: usize, stream: CUstream);
    cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, priority: c_int);
    cuStreamSynchronize(stream: CUstream);
    cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    cuEventCreate(event: *mut CUevent, flags: c_uint);
    cuEventDestroy_v2(event: CUevent);
    cuEventQuery(event: CUevent);
    cuEventElapsedTime(milliseconds: *mut f32, from: CUevent, to: CUevent);
    cuEventRecord(event: CUevent, stream: CUstream);
    cuEventSynchronize(event: CUevent);
    cuStreamBeginCapture_v2(stream: CUstream, mode: CUstreamCaptureMode);
    cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
    cuGraphInstantiateWithFlags(made: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong);
    cuGraphDestroy(graph: CUgraph);
    cuGraphExecDestroy(graph: CUgraphExec);
    cuGraphUpload(graph: CUgraphExec, stream: CUstream);
    cuGraphLaunch(graph: CUgraphExec, stream: CUstream);
}

/// Returns an error that names the call if it failed, with a hint if there is one.
pub fn check(call: &str, status: CUresult) -> crate::error::Result<()> {
    if status == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let error = Error::fault(format!("{call}: {}", describe(status)));
    Err(match status.hint() {
        Some(hint) => error.hint(hint),
        None => error,
    })
}

impl CUresult {
    /// The hint for a status, according to the causes in the driver's documentation (`CUresult`).
    fn hint(self) -> Option<&'static str> {
        match self {
            Self::CUDA_ERROR_ILLEGAL_ADDRESS
            | Self::CUDA_ERROR_LAUNCH_FAILED
            | Self::CUDA_ERROR_ASSERT
            | Self::CUDA_ERROR_HARDWARE_STACK_ERROR
            | Self::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | Self::CUDA_ERROR_MISALIGNED_ADDRESS
            | Self::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | Self::CUDA_ERROR_INVALID_PC => Some(
                "set CUDA_LAUNCH_BLOCKING=1 in the environment and rollout.graphs = false to find the call that \
                 failed, which was started earlier; lines with Xid in the node's kernel log (dmesg) indicate a \
                 hardware fault",
            ),
            Self::CUDA_ERROR_ECC_UNCORRECTABLE => Some(
                "take this GPU out of service, as its memory is damaged (nvidia-smi -q -d ECC); run the same command \
                 again on another node to resume from the latest checkpoint",
            ),
            Self::CUDA_ERROR_OUT_OF_MEMORY => Some(
                "leave more GPU memory free outside the arena: end other processes on the GPU (nvidia-smi names them), \
                 or lower mesh.arena_bytes_max",
            ),
            Self::CUDA_ERROR_DEVICE_UNAVAILABLE => {
                Some("check if another process uses the GPU exclusively: nvidia-smi shows processes and compute mode")
            }
            Self::CUDA_ERROR_SYSTEM_NOT_READY => {
                Some("check the fabric manager, which GPUs on an NVSwitch need: systemctl status nvidia-fabricmanager")
            }
            Self::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
                Some("restart the node: libcuda.so and the node's kernel module belong to different drivers")
            }
            Self::CUDA_ERROR_UNKNOWN | Self::CUDA_ERROR_LAUNCH_TIMEOUT => {
                Some("look for the cause in nvidia-smi and in lines with Xid in the node's kernel log (dmesg)")
            }
            _ => None,
        }
    }
}

/// The driver's name and message for a status: `CUDA_ERROR_INVALID_VALUE (invalid argument)`; its number if it has no
/// name.
pub fn describe(status: CUresult) -> String {
    let text = |ask: unsafe fn(CUresult, *mut *const c_char) -> CUresult| {
        let mut at: *const c_char = ptr::null();
        // SAFETY: writes a pointer to a string of the driver, or none for a status that it does not know.
        unsafe {
            let known = ask(status, &raw mut at) == CUresult::CUDA_SUCCESS && !at.is_null();
            known.then(|| CStr::from_ptr(at).to_string_lossy().into_owned())
        }
    };
    let name = text(cuGetErrorName).unwrap_or_else(|| format!("status {}", status.0));
    match text(cuGetErrorString) {
        Some(meaning) => format!("{name} ({meaning})"),
        None => name,
    }
}
