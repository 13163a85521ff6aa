//! The kernels of a GPU, by name.

use super::cache;
use super::devices::Properties;
use super::embedded::KERNELS;
use super::fx::Table;
use super::module::{Images, compiled_images, embedded_images};
use super::null_driver;
use super::status::check;
use super::sys::{self, CUfunction, CUfunction_attribute as Attribute, CUmodule, Handle};
use crate::error::{Error, Result};
use std::ffi::{CString, c_int};
use std::ptr;

#[derive(Debug)]
pub struct Kernels {
    functions: Table<&'static str, Function>,
    /// From where they came, in words.
    pub origin: String,
}

/// A kernel on the GPU, and what it allows.
#[derive(Debug)]
struct Function {
    handle: Handle<CUfunction>,
    threads_max: usize,
    shared_bytes_max: usize,
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
        Ok(function.handle.0)
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
    Ok(Function { handle: Handle(handle), threads_max, shared_bytes_max })
}
