//! The embedded parts of `cuda/`: all sources, and their cubins and PTX if the binary was built with a CUDA compiler.

/// A file of `cuda/`.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    pub name: &'static str,
    pub text: &'static str,
    /// Whether it has kernels; otherwise it is a header.
    pub is_unit: bool,
}

/// One source, compiled for one architecture.
#[derive(Clone, Copy, Debug)]
pub struct Image {
    pub source: &'static str,
    /// `sm_80` or `sm_90a` of a cubin, `compute_80` of PTX.
    pub arch: &'static str,
    pub bytes: &'static [u8],
}

/// A kernel and its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    pub name: &'static str,
    pub source: &'static str,
}

// SOURCES, KERNELS, CUBINS, PTX, COMPILER (of the cubins and the PTX, or the reason why there are none) and RESOURCES
// (resources of the kernels, if nvcc reported them). Written by build.rs.
include!(concat!(env!("OUT_DIR"), "/embedded.rs"));

/// Sources that hold kernels.
pub fn units() -> impl Iterator<Item = &'static Source> {
    SOURCES.iter().filter(|source| source.is_unit)
}

/// The headers that the sources include: (name, text).
pub fn headers() -> Vec<(&'static str, &'static str)> {
    SOURCES.iter().filter(|source| !source.is_unit).map(|source| (source.name, source.text)).collect()
}

/// The cubins and the PTX of an architecture; none if no compiler made them.
pub fn images(arch: &str) -> impl Iterator<Item = &'static Image> {
    CUBINS.iter().chain(PTX).filter(move |image| image.arch == arch)
}

/// Describes the parts: `14 sources, 80 kernels; cubins for sm_80 and sm_90a, PTX for compute_80, by nvcc 13.0.88`.
pub fn describe() -> String {
    let sources = format!("{} sources, {} kernels", units().count(), KERNELS.len());
    if CUBINS.is_empty() {
        return format!("{sources}; no cubins: {COMPILER}");
    }
    format!("{sources}; cubins for sm_80 and sm_90a, PTX for compute_80, by {COMPILER}")
}

/// The resources of each kernel, as a Markdown table.
///
/// # Errors
/// The reason why the binary does not know them.
pub fn resources() -> Result<&'static str, String> {
    if RESOURCES.is_empty() {
        return Err(format!("only a build with nvcc knows the resources of its kernels: {COMPILER}"));
    }
    Ok(RESOURCES)
}
