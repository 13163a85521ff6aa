//! The kernels of a GPU, by name.

use super::cache;
use super::devices::Properties;
use super::embedded::KERNELS;
use super::fx::Table;
use super::module::{Images, Origin, compiled_images, embedded_images};
use super::null_driver;
use super::status::check;
use super::sys::{self, CUfunction, CUfunction_attribute as Attribute, CUmodule};
use crate::error::{Error, Result};
use std::ffi::{CString, c_int};
use std::ptr;

#[derive(Debug)]
pub struct Kernels {
    functions: Table<&'static str, Function>,
    pub origin: Origin,
}

/// A kernel on the GPU, and what it allows.
#[derive(Debug)]
pub struct Function {
    handle: CUfunction,
    threads_max: usize,
    shared_bytes_max: usize,
}

// SAFETY: the driver's handles may be used from every thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    pub fn handle(&self) -> CUfunction {
        self.handle
    }

    /// # Errors
    /// What the kernel or the GPU does not allow.
    pub fn check(&self, block: u32, shared_bytes: usize) -> std::result::Result<(), String> {
        let (threads, shared) = (self.threads_max, self.shared_bytes_max);
        if block as usize > threads {
            return Err(format!("its blocks have at most {threads} threads on this GPU"));
        }
        if shared_bytes > shared {
            return Err(format!("it needs {shared_bytes} bytes of shared memory a block, this GPU has {shared}"));
        }
        Ok(())
    }
}

impl Kernels {
    /// Gives the current GPU the cubins that the binary carries, or, where it does not take them, those of the site's NVRTC.
    pub fn load(gpu: &Properties, driver: (i32, i32)) -> Result<Self> {
        if null_driver::is_active() {
            let found = KERNELS.iter().map(|kernel| Ok((kernel.name, function(ptr::null_mut(), kernel.name, gpu)?)));
            return Ok(Self { functions: found.collect::<Result<_>>()?, origin: Origin::Embedded { arch: "no GPU" } });
        }
        let embedded = embedded_images(gpu.capability).and_then(|(images, origin)| {
            let functions = functions(&images, gpu).map_err(|error| error.message)?;
            Ok(Self { functions, origin })
        });
        embedded.or_else(|why| {
            let cache = cache::directory();
            let made = compiled_images(gpu.capability, driver, cache.as_deref(), why.clone());
            let (images, origin) = made.map_err(|no_nvrtc| {
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

    /// # Errors
    /// Where there is no such kernel.
    pub fn function(&self, name: &str) -> std::result::Result<&Function, String> {
        self.functions.get(name).ok_or_else(|| "there is no such kernel".into())
    }
}

fn functions(images: &Images, gpu: &Properties) -> Result<Table<&'static str, Function>> {
    let mut found = Table::with_capacity_and_hasher(KERNELS.len(), <_>::default());
    for (source, image) in images {
        let mut module: CUmodule = ptr::null_mut();
        // Memory of its own is aligned for whatever the driver reads; bytes in the binary are not.
        let image = image.to_vec();
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
    let fixed = attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
    let shared_bytes_max = gpu.shared_bytes_max.saturating_sub(fixed);
    let most = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // Beyond 48 KiB a kernel must say that it wants them.
    // SAFETY: a function of that module.
    let status = unsafe { sys::cuFuncSetAttribute(handle, most, shared_bytes_max as c_int) };
    check("cuFuncSetAttribute", status)?;
    let threads_max = attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?;
    Ok(Function { handle, threads_max, shared_bytes_max })
}
