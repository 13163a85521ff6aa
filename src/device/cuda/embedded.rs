//! What the binary carries of `cuda/`: all sources, and cubins of them where it was built with a compiler of CUDA.

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

/// A kernel and the source in which it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    pub name: &'static str,
    pub source: &'static str,
}

// SOURCES, KERNELS, CUBINS, COMPILER: who made the cubins, or why there are none, and RESOURCES: what kernels take, where nvcc
// told. Written by build.rs.
include!(concat!(env!("OUT_DIR"), "/embedded.rs"));

/// Sources that hold kernels.
pub fn units() -> impl Iterator<Item = &'static Source> {
    SOURCES.iter().filter(|source| source.is_unit)
}

/// What the sources include: (name, text).
pub fn headers() -> Vec<(&'static str, &'static str)> {
    SOURCES.iter().filter(|source| !source.is_unit).map(|source| (source.name, source.text)).collect()
}

/// Architectures for which there are cubins.
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

/// What each kernel takes, as a table in Markdown; bench/resources.md holds it.
///
/// # Errors
/// Why the binary does not know.
pub fn resources() -> Result<&'static str, String> {
    if RESOURCES.is_empty() { Err(format!("only nvcc tells what kernels take: {COMPILER}")) } else { Ok(RESOURCES) }
}
