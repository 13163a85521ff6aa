//! NVRTC, CUDA's compiler library, opened at run time. The build script includes this file, too.

use libloading::Library;
use std::error::Error as _;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::ptr;

/// A source or a header: name, text.
pub type Text<'a> = (&'a str, &'a str);

type Program = *mut c_void;
type Status = c_int;

type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status;
type Describe = unsafe extern "C" fn(Status) -> *const c_char;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> Status;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status;
type Destroy = unsafe extern "C" fn(*mut Program) -> Status;
type Size = unsafe extern "C" fn(Program, *mut usize) -> Status;
type Get = unsafe extern "C" fn(Program, *mut c_char) -> Status;

/// An opened library.
#[derive(Debug)]
pub struct Nvrtc {
    library: Library,
    /// Major and minor.
    pub version: (i32, i32),
}

/// A cubin, the PTX that it was made of, and the compiler's log, which may be empty.
#[derive(Debug)]
pub struct Compiled {
    pub cubin: Vec<u8>,
    pub ptx: Vec<u8>,
    pub log: String,
}

/// The reason why a library or a symbol is missing, from the system's loader.
pub fn reason(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

fn c_string(text: &str) -> Result<CString, String> {
    CString::new(text).map_err(|e| e.to_string())
}

impl Nvrtc {
    /// # Errors
    /// The message of the system's loader, or the missing parts of the library.
    pub fn open(path: &OsStr) -> Result<Self, String> {
        // SAFETY: the initialisers of NVRTC ask nothing of the process that opens it.
        let library = unsafe { Library::new(path) }.map_err(|e| reason(&e))?;
        let mut nvrtc = Self { library, version: (0, 0) };
        let (mut major, mut minor) = (0, 0);
        let version: Version = nvrtc.symbol("nvrtcVersion")?;
        // SAFETY: writes two numbers.
        nvrtc.check("nvrtcVersion", unsafe { version(&raw mut major, &raw mut minor) })?;
        nvrtc.version = (major, minor);
        Ok(nvrtc)
    }

    fn symbol<T: Copy>(&self, name: &str) -> Result<T, String> {
        // SAFETY: the types above are those of nvrtc.h, the same since CUDA 11.1.
        unsafe { self.library.get::<T>(name.as_bytes()) }.map(|symbol| *symbol).map_err(|e| reason(&e))
    }

    fn check(&self, call: &str, status: Status) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        let describe: Describe = self.symbol("nvrtcGetErrorString")?;
        // SAFETY: the library answers any number with a string of its own.
        let words = unsafe { CStr::from_ptr(describe(status)) };
        Err(format!("{call}: {}", words.to_string_lossy()))
    }

    /// A cubin of `source` for `arch`, such as `sm_80`. Headers are found by their names.
    ///
    /// # Errors
    /// The compiler's messages.
    pub fn compile(&self, (name, text): Text, headers: &[Text], arch: &str) -> Result<Compiled, String> {
        let (create, compile): (Create, Compile) =
            (self.symbol("nvrtcCreateProgram")?, self.symbol("nvrtcCompileProgram")?);
        let destroy: Destroy = self.symbol("nvrtcDestroyProgram")?;
        let (name, text) = (c_string(name)?, c_string(text)?);
        let texts = headers.iter().map(|(_, text)| c_string(text)).collect::<Result<Vec<_>, _>>()?;
        let names = headers.iter().map(|(name, _)| c_string(name)).collect::<Result<Vec<_>, _>>()?;
        let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (texts_at, names_at) = (pointers(&texts), pointers(&names));
        let mut program: Program = ptr::null_mut();
        // SAFETY: strings that end in 0, and as many headers as are counted; the library copies them.
        let status = unsafe {
            create(
                &raw mut program,
                text.as_ptr(),
                name.as_ptr(),
                headers.len() as c_int,
                texts_at.as_ptr(),
                names_at.as_ptr(),
            )
        };
        self.check("nvrtcCreateProgram", status)?;
        let options = [c_string(&format!("--gpu-architecture={arch}"))?, c_string("--std=c++17")?];
        let options_at = pointers(&options);
        // SAFETY: a program that was made, and as many options as are counted.
        let status = unsafe { compile(program, options.len() as c_int, options_at.as_ptr()) };
        let made = self.outcome(program, status);
        // SAFETY: the program was made above and is not used again.
        self.check("nvrtcDestroyProgram", unsafe { destroy(&raw mut program) })?;
        made
    }

    fn outcome(&self, program: Program, status: Status) -> Result<Compiled, String> {
        let log = self.bytes(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")?;
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
        self.check("nvrtcCompileProgram", status).map_err(|why| format!("{why}\n{log}"))?;
        let cubin = self.bytes(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")?;
        let ptx = self.bytes(program, "nvrtcGetPTXSize", "nvrtcGetPTX")?;
        Ok(Compiled { cubin, ptx, log })
    }

    fn bytes(&self, program: Program, size_of: &str, get: &str) -> Result<Vec<u8>, String> {
        let (size, copy): (Size, Get) = (self.symbol(size_of)?, self.symbol(get)?);
        let mut bytes = 0;
        // SAFETY: a program that was compiled; writes a number.
        self.check(size_of, unsafe { size(program, &raw mut bytes) })?;
        let mut all = vec![0u8; bytes];
        // SAFETY: room for as many bytes as the library returned.
        self.check(get, unsafe { copy(program, all.as_mut_ptr().cast()) })?;
        Ok(all)
    }
}
