//! A GPU played on the CPU: its kernels are the sources of `cuda/`, compiled by the host's compiler into a shared library.

use super::gpu::Arg;
use super::nvrtc::reason;
use crate::error::{Error, Result};
use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Debug)]
pub struct Emulated {
    pub path: PathBuf,
    library: Library,
    launching: Mutex<()>,
    /// What was noted since a capture began.
    captured: Mutex<Option<Vec<Step>>>,
}

/// Work that a graph can hold.
#[derive(Clone, Debug)]
pub enum Step {
    Copy { to: u64, from: u64, bytes: usize },
    Clear { at: u64, bytes: usize },
    Launch { kernel: &'static str, grid: [u32; 3], block: u32, shared_bytes: usize, args: Vec<Arg> },
    Library(Work),
}

/// What a library of CUDA does.
#[derive(Clone)]
pub struct Work(Arc<dyn Fn() -> std::result::Result<(), String> + Send + Sync>);

impl Work {
    pub fn new(work: impl Fn() -> std::result::Result<(), String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(work))
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the work of a library")
    }
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
type Allocate = unsafe extern "C" fn(u64) -> *mut c_void;
type Free = unsafe extern "C" fn(*mut c_void, u64);
type Clear = unsafe extern "C" fn(u64, u64);
type SetOrder = unsafe extern "C" fn(i32);

impl Emulated {
    pub fn open(path: &Path) -> Result<Self> {
        // SAFETY: the library of the emulation runs nothing when it is opened but the registration of its kernels.
        let library = unsafe { Library::new(path) };
        let library = library.map_err(|e| Error::io("open", path, &std::io::Error::other(reason(&e))))?;
        Ok(Self { path: path.to_path_buf(), library, launching: Mutex::new(()), captured: Mutex::new(None) })
    }

    fn symbol<T: Copy>(&self, name: &str) -> T {
        // SAFETY: the types above are those of `the emulation`.
        let symbol = unsafe { self.library.get::<T>(name.as_bytes()) };
        *symbol.unwrap_or_else(|e| panic!("the emulation has no {name}: {e}"))
    }

    pub fn allocate(&self, bytes: usize) -> Option<u64> {
        let allocate: Allocate = self.symbol("emulated_allocate");
        let _one = self.one();
        // SAFETY: no launch is under way.
        let memory = unsafe { allocate(bytes as u64) };
        (!memory.is_null()).then_some(memory as u64)
    }

    pub fn free(&self, address: u64, bytes: usize) {
        let free: Free = self.symbol("emulated_free");
        let _one = self.one();
        // SAFETY: the pool gives back what it got, once.
        unsafe { free(address as *mut c_void, bytes as u64) }
    }

    /// The scheduler knows one call at a time.
    fn one(&self) -> MutexGuard<'_, ()> {
        self.launching.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn upload(to: u64, from: &[u8]) {
        // SAFETY: views hold their bounds.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to as *mut u8, from.len()) }
    }

    pub fn download(to: &mut [u8], from: u64) {
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to.as_mut_ptr(), to.len()) }
    }

    /// Does a step, or notes it where a graph is being captured.
    pub fn start(&self, step: Step) -> std::result::Result<(), String> {
        if let Some(noted) = self.captured().as_mut() {
            noted.push(step);
            return Ok(());
        }
        match step {
            Step::Copy { to, from, bytes } => Self::copy(to, from, bytes),
            Step::Clear { at, bytes } => self.clear(at, bytes),
            Step::Launch { kernel, grid, block, shared_bytes, args } => {
                return self.launch(kernel, grid, block, shared_bytes, &args);
            }
            Step::Library(work) => return (work.0)(),
        }
        Ok(())
    }

    fn captured(&self) -> MutexGuard<'_, Option<Vec<Step>>> {
        self.captured.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn begin_capture(&self) {
        *self.captured() = Some(Vec::new());
    }

    pub fn end_capture(&self) -> Vec<Step> {
        self.captured().take().expect("a capture was begun")
    }

    fn copy(to: u64, from: u64, bytes: usize) {
        // SAFETY: as above.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) }
    }

    fn clear(&self, at: u64, bytes: usize) {
        let clear: Clear = self.symbol("emulated_clear");
        // SAFETY: as above.
        unsafe { clear(at, bytes as u64) }
    }

    pub fn set_order(&self, order: i32) {
        let set: SetOrder = self.symbol("emulated_set_order");
        let _one = self.one();
        // SAFETY: sets a number; no launch is under way.
        unsafe { set(order) }
    }

    fn launch(
        &self,
        kernel: &str,
        grid: [u32; 3],
        block: u32,
        shared_bytes: usize,
        args: &[Arg],
    ) -> std::result::Result<(), String> {
        let _one = self.one();
        let name = CString::new(kernel).map_err(|e| e.to_string())?;
        let (find, launch): (Find, Launch) = (self.symbol("emulated_find"), self.symbol("emulated_launch"));
        // SAFETY: a string that ends in 0.
        let found = unsafe { find(name.as_ptr()) };
        if found.is_null() {
            return Err("there is no such kernel".into());
        }
        self.check(found, args)?;
        let mut words: Vec<u64> = args.iter().map(|arg| arg.word()).collect();
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
