//! A GPU played on the CPU: its kernels are the sources of `cuda/`, compiled by the host's compiler into a shared library.

use super::gpu::Arg;
use crate::error::{Error, Result};
use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::sync::Mutex;

/// Alignment that CUDA promises, and that kernels may rely on.
const ALIGN: usize = 256;
/// What fresh memory holds: NaN in every dtype.
const POISON: u8 = 0xff;

#[derive(Debug)]
pub struct Emulated {
    library: Library,
    /// The scheduler knows one launch at a time.
    launching: Mutex<()>,
}

/// As `emulated::Parameter` in `emulate.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
struct Parameter {
    kind: u32,
    bytes: u32,
}

type Find = unsafe extern "C" fn(*const c_char) -> *const c_void;
type Parameters = unsafe extern "C" fn(*const c_void) -> u32;
type ParameterAt = unsafe extern "C" fn(*const c_void, u32) -> Parameter;
type Launch = unsafe extern "C" fn(*const c_void, *const u32, u32, u64, *mut *mut c_void) -> *const c_char;
type SetOrder = unsafe extern "C" fn(i32);

impl Emulated {
    pub fn open(path: &Path) -> Result<Self> {
        // SAFETY: the library of the emulation runs nothing when it is opened but the registration of its kernels.
        let library = unsafe { Library::new(path) };
        let library = library.map_err(|e| Error::io("open", path, &std::io::Error::other(e)))?;
        Ok(Self { library, launching: Mutex::new(()) })
    }

    fn symbol<T: Copy>(&self, name: &str) -> T {
        // SAFETY: the types above are those of `emulate.cpp`.
        let symbol = unsafe { self.library.get::<T>(name.as_bytes()) };
        *symbol.unwrap_or_else(|e| panic!("the emulation has no {name}: {e}"))
    }

    fn layout(bytes: usize) -> std::alloc::Layout {
        std::alloc::Layout::from_size_align(bytes.max(1), ALIGN).expect("a size that memory can have")
    }

    #[expect(clippy::unnecessary_wraps, reason = "a GPU may have no memory left")]
    pub fn allocate(&self, bytes: usize) -> Result<u64> {
        let layout = Self::layout(bytes);
        // SAFETY: the layout has a size above 0, and the memory is written as a whole before use.
        unsafe {
            let memory = std::alloc::alloc(layout);
            if memory.is_null() {
                std::alloc::handle_alloc_error(layout);
            }
            memory.write_bytes(POISON, layout.size());
            Ok(memory as u64)
        }
    }

    pub fn free(&self, address: u64, bytes: usize) {
        // SAFETY: `Memory` gives back what it got, with the same size, once.
        unsafe { std::alloc::dealloc(address as *mut u8, Self::layout(bytes)) }
    }

    pub fn upload(&self, to: u64, from: &[u8]) {
        // SAFETY: views hold their bounds.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to as *mut u8, from.len()) }
    }

    pub fn download(&self, to: &mut [u8], from: u64) {
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to.as_mut_ptr(), to.len()) }
    }

    pub fn copy(&self, to: u64, from: u64, bytes: usize) {
        // SAFETY: as above.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) }
    }

    pub fn clear(&self, at: u64, bytes: usize) {
        // SAFETY: as above.
        unsafe { std::ptr::write_bytes(at as *mut u8, 0, bytes) }
    }

    pub fn set_order(&self, order: i32) {
        let set: SetOrder = self.symbol("emulated_set_order");
        // SAFETY: sets a number; no launch is under way.
        let _one = self.launching.lock();
        unsafe { set(order) }
    }

    pub fn launch(
        &self,
        kernel: &str,
        grid: [u32; 3],
        block: u32,
        shared_bytes: usize,
        args: &[Arg],
    ) -> std::result::Result<(), String> {
        let _one = self.launching.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let name = CString::new(kernel).map_err(|e| e.to_string())?;
        let (find, launch): (Find, Launch) = (self.symbol("emulated_find"), self.symbol("emulated_launch"));
        // SAFETY: a string that ends in 0.
        let found = unsafe { find(name.as_ptr()) };
        if found.is_null() {
            return Err("there is no such kernel".into());
        }
        self.check(found, args)?;
        let mut words: Vec<u64> = args.iter().map(|arg| word(*arg)).collect();
        let mut places: Vec<*mut c_void> = words.iter_mut().map(|word| std::ptr::from_mut(word).cast()).collect();
        // SAFETY: a place for each parameter, each of eight bytes, of which little-endian machines read the first ones.
        let message = unsafe { launch(found, grid.as_ptr(), block, shared_bytes as u64, places.as_mut_ptr()) };
        if message.is_null() {
            return Ok(());
        }
        // SAFETY: a string of the library that lives until the next launch.
        Err(unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned())
    }

    /// What a driver cannot check: that the arguments are those of the kernel's parameter list.
    fn check(&self, kernel: *const c_void, args: &[Arg]) -> std::result::Result<(), String> {
        let (count, at): (Parameters, ParameterAt) =
            (self.symbol("emulated_parameters"), self.symbol("emulated_parameter"));
        // SAFETY: a kernel that was found, and a parameter below their number.
        let wanted: Vec<Parameter> = unsafe { (0..count(kernel)).map(|i| at(kernel, i)).collect() };
        let given: Vec<Parameter> = args.iter().map(|arg| kind(*arg)).collect();
        if wanted == given { Ok(()) } else { Err(format!("its parameters are {wanted:?}")) }
    }
}

fn kind(arg: Arg) -> Parameter {
    let (kind, bytes) = match arg {
        Arg::Address(_) => (0, 8),
        Arg::I32(_) | Arg::U32(_) => (1, 4),
        Arg::U64(_) => (1, 8),
        Arg::F32(_) => (2, 4),
    };
    Parameter { kind, bytes }
}

/// The bits of an argument, in the lower bytes.
fn word(arg: Arg) -> u64 {
    match arg {
        Arg::Address(x) | Arg::U64(x) => x,
        Arg::I32(x) => u64::from(x as u32),
        Arg::U32(x) => u64::from(x),
        Arg::F32(x) => u64::from(x.to_bits()),
    }
}
