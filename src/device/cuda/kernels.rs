//! The kernels of a GPU, by name; and which machine code it gets for them: what the binary carries where the driver takes it, else
//! what the site's NVRTC makes.

use super::cache;
use super::devices::Properties;
use super::embedded::{self, COMPILER, CUBINS, KERNELS};
use super::library;
use super::null_driver;
use super::nvrtc::Nvrtc;
use super::sys::{self, CUfunction, CUfunction_attribute as Attribute, CUmodule, Handle, check};
use crate::error::{Error, Result};
use rustc_hash::FxHashMap;
use std::ffi::{CString, c_int};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

/// Shared memory that every kernel may take. More of it is carved out of the L1 cache: as the driver guesses, which may leave room
/// for fewer blocks than fit, or as a kernel asks, in percent.
const SHARED_BYTES_BY_DEFAULT: usize = 48 << 10;
const ALL_SHARED: c_int = 100;

#[derive(Debug)]
pub struct Kernels {
    functions: FxHashMap<&'static str, Function>,
    /// From where they came, in words.
    pub origin: String,
}

/// A kernel on the GPU, and what it allows.
#[derive(Debug)]
struct Function {
    handle: Handle<CUfunction>,
    threads_max: usize,
    shared_bytes_max: usize,
    resources: Resources,
    /// Whether a multiprocessor keeps as much of its cache as it may for its shared memory.
    has_carveout: AtomicBool,
}

/// What a kernel takes, as the driver says that loaded it.
#[derive(Clone, Copy, Debug)]
pub struct Resources {
    /// Of a thread.
    pub registers: usize,
    /// Of a block, beside what a launch asks for.
    pub shared_bytes: usize,
    /// Of a thread, in the GPU's memory: arrays and spilled registers.
    pub local_bytes: usize,
}

impl Kernels {
    /// Gives the current GPU the cubins that the binary carries, or, where it does not take them, those of the site's NVRTC.
    pub fn load(gpu: &Properties, driver: (i32, i32)) -> Result<Self> {
        if null_driver::is_active() {
            let found = KERNELS.iter().map(|kernel| Ok((kernel.name, function(ptr::null_mut(), kernel.name, gpu)?)));
            return Ok(Self { functions: found.collect::<Result<_>>()?, origin: "no GPU".into() });
        }
        let embedded = embedded_images(gpu.capability).and_then(|(images, origin)| {
            let functions = functions(&images, gpu).map_err(|error| error.message)?;
            Ok(Self { functions, origin })
        });
        embedded.or_else(|why| {
            let (images, origin) = compiled_images(gpu.capability, driver, &why).map_err(|no_nvrtc| {
                let (major, minor) = driver;
                Error::usage(format!(
                    "no kernels for {}, driver of CUDA {major}.{minor}: {why}; nor by NVRTC: {no_nvrtc}",
                    gpu.name
                ))
                .hint("build with an nvcc that is not newer than the driver, or name an NVRTC with RLHF_NVRTC")
            })?;
            Ok(Self { functions: functions(&images, gpu)?, origin })
        })
    }

    /// What each kernel takes, in the order of the sources.
    pub fn resources(&self) -> impl Iterator<Item = (&'static str, Resources)> {
        KERNELS.iter().filter_map(|kernel| Some((kernel.name, self.functions.get(kernel.name)?.resources)))
    }

    /// The kernel of this name, for blocks of `threads` with as much shared memory.
    ///
    /// # Errors
    /// Where there is none, or what it or the GPU does not allow.
    pub fn function(&self, name: &str, threads: usize, shared_bytes: usize) -> Result<CUfunction> {
        let function = self.functions.get(name).ok_or_else(|| Error::fault("there is no such kernel"))?;
        let (threads_max, shared) = (function.threads_max, function.shared_bytes_max);
        if threads > threads_max {
            return Err(Error::fault(format!("its blocks have at most {threads_max} threads on this GPU")));
        }
        if shared_bytes > shared {
            let needed = format!("it needs {shared_bytes} bytes of shared memory a block, this GPU has {shared}");
            return Err(Error::fault(needed));
        }
        if shared_bytes > SHARED_BYTES_BY_DEFAULT && !function.has_carveout.swap(true, Ordering::Relaxed) {
            function.set(Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, ALL_SHARED)?;
        }
        Ok(function.handle.0)
    }
}

fn functions(images: &Images, gpu: &Properties) -> Result<FxHashMap<&'static str, Function>> {
    let mut found = FxHashMap::default();
    for (source, image) in images {
        let mut module: CUmodule = ptr::null_mut();
        // SAFETY: the bytes of a whole cubin, which tells its own length; the driver copies it.
        let status = unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) };
        check("cuModuleLoadData", status).map_err(|error| error.within(format!("the cubin of {source}")))?;
        for kernel in KERNELS.iter().filter(|kernel| kernel.source == *source) {
            let function = function(module, kernel.name, gpu);
            found.insert(kernel.name, function.map_err(|error| error.within(format!("{source}: {}", kernel.name)))?);
        }
    }
    Ok(found)
}

fn function(module: CUmodule, name: &str, gpu: &Properties) -> Result<Function> {
    let text = CString::new(name).map_err(|e| Error::fault(e.to_string()))?;
    let mut handle: CUfunction = ptr::null_mut();
    // SAFETY: a module that is never unloaded, and a string that ends in 0.
    check("cuModuleGetFunction", unsafe { sys::cuModuleGetFunction(&raw mut handle, module, text.as_ptr()) })?;
    let attribute = |attribute: Attribute| -> Result<usize> {
        let mut value: c_int = 0;
        // SAFETY: writes a number.
        check("cuFuncGetAttribute", unsafe { sys::cuFuncGetAttribute(&raw mut value, attribute, handle) })?;
        Ok(usize::try_from(value).unwrap_or(0))
    };
    let resources = Resources {
        registers: attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
        shared_bytes: attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
        local_bytes: attribute(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
    };
    let shared_bytes_max = gpu.shared_bytes_max.saturating_sub(resources.shared_bytes);
    let threads_max = attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?;
    let has_carveout = AtomicBool::default();
    let function = Function { handle: Handle(handle), threads_max, shared_bytes_max, resources, has_carveout };
    // Beyond `SHARED_BYTES_BY_DEFAULT` a kernel must say that it wants them.
    function.set(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes_max as c_int)?;
    Ok(function)
}

impl Function {
    fn set(&self, attribute: Attribute, value: c_int) -> Result<()> {
        // SAFETY: a function of a module that is never unloaded.
        check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(self.handle.0, attribute, value) })
    }
}

/// Machine code of all sources for one GPU: (source, cubin).
type Images = Vec<(&'static str, Vec<u8>)>;

/// The architecture of which the binary may carry cubins, for a GPU of this compute capability.
///
/// Cubins run on later minors of their major; those with an `a` on nothing but their own.
fn embedded_arch(capability: (u32, u32)) -> Option<&'static str> {
    match capability {
        (9, 0) => Some("sm_90a"),
        (8, _) => Some("sm_80"),
        _ => None,
    }
}

/// The architecture that NVRTC compiles for.
///
/// # Errors
/// Where the GPU is older than the kernels.
fn compiled_arch(capability: (u32, u32)) -> std::result::Result<String, String> {
    match (embedded_arch(capability), capability) {
        (Some(arch), _) => Ok(arch.to_owned()),
        (None, (9.., minor)) => Ok(format!("sm_{}{minor}", capability.0)),
        (None, (major, minor)) => {
            Err(format!("its compute capability is {major}.{minor}, and the kernels need 8.0 or a later one"))
        }
    }
}

/// What the binary carries for this GPU, and that in words.
///
/// # Errors
/// Why it carries nothing.
fn embedded_images(capability: (u32, u32)) -> std::result::Result<(Images, String), String> {
    let (major, minor) = capability;
    let arch =
        embedded_arch(capability).ok_or(format!("the binary has none for compute capability {major}.{minor}"))?;
    let fitting = CUBINS.iter().filter(|cubin| cubin.arch == arch);
    // Memory of its own is aligned for whatever the driver reads; bytes in the binary are not.
    let images: Images = fitting.map(|cubin| (cubin.source, cubin.bytes.to_vec())).collect();
    if images.is_empty() {
        return Err(format!("the binary carries no cubins for {arch}: {COMPILER}"));
    }
    Ok((images, format!("the binary's cubins for {arch}")))
}

/// Whether NVRTC has to compile for this GPU, as far as that is known before a driver is asked to load: it takes no cubins of a later
/// CUDA than its own.
pub fn must_compile(capability: (u32, u32), driver: (i32, i32)) -> bool {
    let is_carried = embedded_arch(capability).is_some_and(|arch| embedded::archs().contains(&arch));
    !is_carried || major_of(COMPILER).is_none_or(|major| major > driver.0)
}

/// `nvcc 13.0.88` is of CUDA 13.
fn major_of(compiler: &str) -> Option<i32> {
    compiler.split_whitespace().next_back()?.split('.').next()?.parse().ok()
}

/// What the site's NVRTC makes for this GPU, and that in words; `why` says why it must. `driver` is the newest CUDA that the driver knows:
/// it loads cubins of every minor of its major, and of none after.
///
/// # Errors
/// Where there is no NVRTC that fits, or a source does not compile.
fn compiled_images(
    capability: (u32, u32),
    driver: (i32, i32),
    why: &str,
) -> std::result::Result<(Images, String), String> {
    let arch = compiled_arch(capability)?;
    let (library, nvrtc) = library::NVRTC.open(|path| {
        let nvrtc = Nvrtc::open(path)?;
        let (major, minor) = nvrtc.version;
        let fits = major <= driver.0;
        fits.then_some((path.clone(), nvrtc))
            .ok_or(format!("is of CUDA {major}.{minor}, the driver of {}.{}", driver.0, driver.1))
    })?;
    let made = cache::cubins(&nvrtc, &arch, cache::directory().as_deref())?;
    let (compiled, kept, (major, minor)) = (made.compiled, made.list.len() - made.compiled, nvrtc.version);
    let origin = format!(
        "NVRTC {major}.{minor} ({}) for {arch}: {compiled} sources compiled now, {kept} taken from the disk ({why})",
        library.display()
    );
    Ok((made.list, origin))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cubins_fit_their_major_and_those_of_hopper_their_own_gpu_alone() {
        assert_eq!([(8, 0), (8, 6), (8, 9)].map(embedded_arch), [Some("sm_80"); 3]);
        assert_eq!([(9, 0), (10, 0), (7, 5)].map(embedded_arch), [Some("sm_90a"), None, None]);
        assert_eq!(compiled_arch((12, 1)), Ok("sm_121".into()));
        assert_eq!(compiled_arch((9, 0)), Ok("sm_90a".into()));
        assert!(compiled_arch((7, 5)).expect_err("too old").contains("7.5"));
    }

    #[test]
    fn what_a_driver_will_not_take_is_known_by_the_compilers_version() {
        assert_eq!(["nvcc 13.0.88", "NVRTC 12.2", "no nvcc"].map(major_of), [Some(13), Some(12), None]);
        assert!(must_compile((12, 0), (99, 0)) && must_compile((8, 0), (1, 0)));
        assert!(must_compile((8, 0), (99, 0)) == embedded::archs().is_empty());
    }

    #[test]
    fn a_gpu_without_fitting_cubins_is_told_why() {
        assert!(embedded_images((12, 0)).expect_err("none").contains("12.0"));
    }
}
