//! The embedded parts of `cuda/`: all sources, and their cubins if the binary was built with a CUDA compiler.

/// A file of `cuda/`.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    pub name: &'static str,
    pub text: &'static str,
    /// Whether it holds kernels, rather than what they share.
    pub is_unit: bool,
}

/// The machine code of one source for one kind of GPU.
#[derive(Clone, Copy, Debug)]
pub struct Cubin {
    pub source: &'static str,
    /// `sm_80` or `sm_90a`.
    pub arch: &'static str,
    pub bytes: &'static [u8],
}

/// A kernel and its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    pub name: &'static str,
    pub source: &'static str,
}

// SOURCES, KERNELS, CUBINS, COMPILER (the compiler of the cubins, or the reason why there are none) and RESOURCES
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

/// The architectures with embedded cubins.
pub fn archs() -> Vec<&'static str> {
    let mut archs: Vec<&str> = CUBINS.iter().map(|cubin| cubin.arch).collect();
    archs.sort_unstable();
    archs.dedup();
    archs
}

/// `14 sources, 80 kernels; cubins for sm_80 and sm_90a by nvcc 13.0.88`.
pub fn describe() -> String {
    let sources = format!("{} sources, {} kernels", units().count(), KERNELS.len());
    match archs()[..] {
        [] => format!("{sources}; no cubins: {COMPILER}"),
        ref archs => format!("{sources}; cubins for {} by {COMPILER}", archs.join(" and ")),
    }
}

/// The resources of each kernel, as a Markdown table; bench/resources.md holds it.
///
/// # Errors
/// The reason why the binary does not know them.
pub fn resources() -> Result<&'static str, String> {
    if RESOURCES.is_empty() {
        return Err(format!("only a build with nvcc knows the resources of its kernels: {COMPILER}"));
    }
    Ok(RESOURCES)
}
