//! The kernels of a GPU, by name, and the choice of their machine code. The first choice is the binary's cubins or, for
//! newer GPUs, its PTX. If the driver does not accept them, the site's NVRTC compiles the kernels.

use super::cache;
use super::devices::Properties;
use super::embedded::{self, COMPILER, KERNELS};
use super::library;
use super::null_driver;
use super::nvrtc::Nvrtc;
use super::sys::{self, CUfunction, CUfunction_attribute as Attribute, CUmodule, Handle, check};
use crate::error::{Error, Result};
use rustc_hash::FxHashMap;
use std::ffi::{CString, c_int};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

/// Shared memory that every kernel may use. More is carved out of the L1 cache. By default the driver guesses how much,
/// which may leave room for fewer blocks than fit; a kernel can ask for a share in percent.
const SHARED_BYTES_BY_DEFAULT: usize = 48 << 10;
const ALL_SHARED: c_int = 100;

#[derive(Debug)]
pub struct Kernels {
    functions: FxHashMap<&'static str, Function>,
    /// The name of their machine code, equal on two GPUs only if the code is.
    pub code: String,
    /// The rest of a description of their origin.
    found: String,
}

/// A kernel on the GPU, and its limits.
#[derive(Debug)]
struct Function {
    handle: Handle<CUfunction>,
    threads_max: usize,
    shared_bytes_max: usize,
    resources: Resources,
    /// Whether the kernel has asked for the largest share of the cache as shared memory.
    has_carveout: AtomicBool,
}

/// The resources of a kernel, as reported by the driver that loaded it.
#[derive(Clone, Copy, Debug)]
pub struct Resources {
    /// Registers of a thread.
    pub registers: usize,
    /// Static shared memory of a block, without the part that a launch asks for.
    pub shared_bytes: usize,
    /// Local memory of a thread, in GPU memory: arrays and spilled registers.
    pub local_bytes: usize,
}

impl Kernels {
    /// Loads the binary's kernels on the current GPU, or cubins of the site's NVRTC if the driver does not accept them.
    pub fn load(gpu: &Properties, driver: (i32, i32)) -> Result<Self> {
        if null_driver::is_active() {
            let found = KERNELS.iter().map(|kernel| Ok((kernel.name, function(ptr::null_mut(), kernel.name, gpu)?)));
            return Ok(Self { functions: found.collect::<Result<_>>()?, code: "no GPU".into(), found: String::new() });
        }
        let embedded = embedded_images(gpu.capability, driver).and_then(|(images, code)| {
            let functions = functions(&images, gpu).map_err(|error| error.message)?;
            Ok(Self { functions, code, found: String::new() })
        });
        embedded.or_else(|why| {
            let (images, [code, found]) = compiled_images(gpu.capability, driver, &why).map_err(|no_nvrtc| {
                let (major, minor) = driver;
                Error::usage(format!(
                    "no kernels for {} with the driver for CUDA {major}.{minor}: {why}; NVRTC cannot compile them: \
                     {no_nvrtc}",
                    gpu.name
                ))
                .hint("build with an nvcc that is no newer than the driver, or set RLHF_NVRTC to the path of an NVRTC")
            })?;
            Ok(Self { functions: functions(&images, gpu)?, code, found })
        })
    }

    /// A description of their origin.
    pub fn origin(&self) -> String {
        format!("{}{}", self.code, self.found)
    }

    /// The resources of each kernel, in the order of the sources.
    pub fn resources(&self) -> impl Iterator<Item = (&'static str, Resources)> {
        KERNELS.iter().filter_map(|kernel| Some((kernel.name, self.functions.get(kernel.name)?.resources)))
    }

    /// The kernel of this name, for blocks of `threads` threads and `shared_bytes` of shared memory.
    ///
    /// # Errors
    /// If there is none, or the kernel or the GPU does not allow such blocks.
    pub fn function(&self, name: &str, threads: usize, shared_bytes: usize) -> Result<CUfunction> {
        let function = self.functions.get(name).ok_or_else(|| Error::fault("there is no such kernel"))?;
        let (threads_max, shared) = (function.threads_max, function.shared_bytes_max);
        if threads > threads_max {
            return Err(Error::fault(format!("its blocks have at most {threads_max} threads on this GPU")));
        }
        if shared_bytes > shared {
            let needed = format!("it needs {shared_bytes} bytes of shared memory per block, this GPU has {shared}");
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
        // SAFETY: a whole cubin, which contains its own length, or PTX that ends in 0; the driver copies it.
        let status = unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) };
        check("cuModuleLoadData", status).map_err(|error| error.within(format!("loading the kernels of {source}")))?;
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
    // More than `SHARED_BYTES_BY_DEFAULT` needs this request.
    function.set(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes_max as c_int)?;
    Ok(function)
}

impl Function {
    fn set(&self, attribute: Attribute, value: c_int) -> Result<()> {
        // SAFETY: a function of a module that is never unloaded.
        check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(self.handle.0, attribute, value) })
    }
}

/// All sources, compiled for one GPU: (source, cubin or PTX).
type Images = Vec<(&'static str, Vec<u8>)>;

/// The architecture of the embedded PTX.
const PTX: &str = "compute_80";

/// The architecture of the embedded cubins or PTX for a GPU of this compute capability; `None` if it is too old.
///
/// Cubins run on later minor versions of their major version. Cubins with an `a` run on their own version only. The
/// driver compiles PTX for any later version.
fn embedded_arch(capability: (u32, u32)) -> Option<&'static str> {
    match capability {
        (8, _) => Some("sm_80"),
        (9, 0) => Some("sm_90a"),
        (9.., _) => Some(PTX),
        _ => None,
    }
}

fn too_old((major, minor): (u32, u32)) -> String {
    format!("the kernels need compute capability 8.0 or later (this GPU has {major}.{minor})")
}

/// The architecture that NVRTC compiles for.
///
/// # Errors
/// If the GPU is too old for the kernels.
fn compiled_arch(capability: (u32, u32)) -> std::result::Result<String, String> {
    match embedded_arch(capability).ok_or_else(|| too_old(capability))? {
        PTX => Ok(format!("sm_{}{}", capability.0, capability.1)),
        arch => Ok(arch.to_owned()),
    }
}

/// The embedded cubins or PTX for this GPU, and the name of their code. `driver` is the driver's CUDA version.
///
/// # Errors
/// The reason why there are none.
fn embedded_images(
    capability: (u32, u32),
    (major, minor): (i32, i32),
) -> std::result::Result<(Images, String), String> {
    let arch = embedded_arch(capability).ok_or_else(|| too_old(capability))?;
    // A copy in its own allocation is aligned as the driver needs; bytes in the binary are not. PTX ends in 0.
    let images: Images = embedded::images(arch).map(|image| (image.source, [image.bytes, &[0]].concat())).collect();
    if images.is_empty() {
        return Err(format!("the binary has no kernels for {arch}: {COMPILER}"));
    }
    let code = match (arch, compiled_arch(capability)?) {
        (PTX, target) => format!("the binary's PTX, compiled by a driver for CUDA {major}.{minor} for {target}"),
        _ => format!("the binary's cubins for {arch}"),
    };
    Ok((images, code))
}

/// Whether the driver or NVRTC has to compile for this GPU, as far as that is known before loading. A driver does not
/// load cubins of a later CUDA major version than its own.
pub fn must_compile(capability: (u32, u32), driver: (i32, i32)) -> bool {
    let has_cubins =
        embedded_arch(capability).is_some_and(|arch| arch != PTX && embedded::images(arch).next().is_some());
    !has_cubins || major_of(COMPILER).is_none_or(|major| major > driver.0)
}

/// The major CUDA version of a compiler: 13 for `nvcc 13.0.88`.
fn major_of(compiler: &str) -> Option<i32> {
    compiler.split_whitespace().next_back()?.split('.').next()?.parse().ok()
}

/// The cubins that the site's NVRTC compiles for this GPU, the name of their code, and how they were found; `why` is the reason for compiling.
/// `driver` is the driver's CUDA version: it loads cubins of every minor version of its major version, and of no later
/// one.
///
/// # Errors
/// If there is no suitable NVRTC, or a source does not compile.
fn compiled_images(
    capability: (u32, u32),
    driver: (i32, i32),
    why: &str,
) -> std::result::Result<(Images, [String; 2]), String> {
    let arch = compiled_arch(capability)?;
    let (library, nvrtc) = library::NVRTC.open(|path| {
        let nvrtc = Nvrtc::open(path)?;
        let (major, minor) = nvrtc.version;
        let fits = major <= driver.0;
        fits.then_some((path.clone(), nvrtc))
            .ok_or(format!("it is for CUDA {major}.{minor}, newer than the driver's {}.{}", driver.0, driver.1))
    })?;
    let made = cache::cubins(&nvrtc, &arch, cache::directory().as_deref())?;
    let (compiled, kept, (major, minor)) = (made.compiled, made.list.len() - made.compiled, nvrtc.version);
    let code = format!("NVRTC {major}.{minor} for {arch}");
    let found =
        format!(" ({}): {compiled} sources compiled now, {kept} read from the cache ({why})", library.display());
    Ok((made.list, [code, found]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cubins_are_for_8_x_and_9_0_and_ptx_is_for_all_newer_gpus() {
        assert_eq!([(8, 0), (8, 6), (8, 9)].map(embedded_arch), [Some("sm_80"); 3]);
        assert_eq!([(9, 0), (7, 5)].map(embedded_arch), [Some("sm_90a"), None]);
        assert_eq!([(9, 1), (10, 0), (10, 3), (12, 0), (12, 1)].map(embedded_arch), [Some("compute_80"); 5]);
        assert_eq!(compiled_arch((12, 1)), Ok("sm_121".into()));
        assert_eq!(compiled_arch((9, 0)), Ok("sm_90a".into()));
        assert!(compiled_arch((7, 5)).expect_err("too old").contains("7.5"));
    }

    #[test]
    fn kernels_are_embedded_for_every_gpu_from_8_0_on_or_a_build_without_a_compiler_needs_nvrtc() {
        for (capability, what) in [((8, 6), "cubins"), ((9, 0), "cubins"), ((10, 0), "PTX"), ((12, 0), "PTX")] {
            match embedded_images(capability, (13, 0)) {
                Ok((images, code)) => assert!(images.len() == embedded::units().count() && code.contains(what)),
                Err(why) => assert!(embedded::CUBINS.is_empty() && why.contains(COMPILER), "{why}"),
            }
        }
        assert!(embedded_images((7, 5), (13, 0)).expect_err("too old").contains("7.5"));
    }

    #[test]
    fn the_gpu_the_compiler_and_the_driver_decide_if_kernels_are_compiled_at_a_start() {
        assert_eq!(["nvcc 13.0.88", "NVRTC 12.2", "no nvcc"].map(major_of), [Some(13), Some(12), None]);
        assert!(must_compile((12, 0), (99, 0)) && must_compile((8, 0), (1, 0)));
        assert!(must_compile((8, 0), (99, 0)) == embedded::CUBINS.is_empty());
    }
}
