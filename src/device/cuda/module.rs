//! Which machine code a GPU gets: what the binary carries where the driver takes it, else what the site's NVRTC makes.

use super::cache;
use super::embedded::{self, CUBINS};
use super::library;
use super::nvrtc::Nvrtc;
use std::borrow::Cow;
use std::path::Path;

/// Machine code of all sources for one GPU: (source, cubin).
pub type Images = Vec<(&'static str, Cow<'static, [u8]>)>;

/// The architecture of which the binary may carry cubins, for a GPU of this compute capability.
///
/// Cubins run on later minors of their major; those with an `a` on nothing but their own.
pub fn embedded_arch(capability: (u32, u32)) -> Option<&'static str> {
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
pub fn compiled_arch(capability: (u32, u32)) -> Result<String, String> {
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
pub fn embedded_images(capability: (u32, u32)) -> Result<(Images, String), String> {
    let (major, minor) = capability;
    let arch =
        embedded_arch(capability).ok_or(format!("the binary has none for compute capability {major}.{minor}"))?;
    let fitting = CUBINS.iter().filter(|cubin| cubin.arch == arch);
    let images: Images = fitting.map(|cubin| (cubin.source, Cow::Borrowed(cubin.bytes))).collect();
    if images.is_empty() {
        return Err(format!("the binary carries no cubins for {arch}: {}", embedded::COMPILER));
    }
    Ok((images, format!("the binary's cubins for {arch}")))
}

/// What the site's NVRTC makes for this GPU, and that in words; `why` says why it must. `driver` is the newest CUDA that the driver knows:
/// it loads cubins of every minor of its major, and of none after.
///
/// # Errors
/// Where there is no NVRTC that fits, or a source does not compile.
pub fn compiled_images(
    capability: (u32, u32),
    driver: (i32, i32),
    cache: Option<&Path>,
    why: String,
) -> Result<(Images, String), String> {
    let arch = compiled_arch(capability)?;
    let (library, nvrtc) = library::NVRTC.open(|path| {
        let nvrtc = Nvrtc::open(path)?;
        let (major, minor) = nvrtc.version;
        let fits = major <= driver.0;
        fits.then_some((path.clone(), nvrtc))
            .ok_or(format!("is of CUDA {major}.{minor}, the driver of {}.{}", driver.0, driver.1))
    })?;
    let made = cache::cubins(&nvrtc, &arch, cache)?;
    let (compiled, kept, (major, minor)) = (made.compiled, made.list.len() - made.compiled, nvrtc.version);
    let origin = format!(
        "NVRTC {major}.{minor} ({}) for {arch}: {compiled} sources compiled now, {kept} taken from the disk ({why})",
        library.display()
    );
    Ok((made.list.into_iter().map(|(source, cubin)| (source, Cow::Owned(cubin))).collect(), origin))
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
    fn a_gpu_without_fitting_cubins_is_told_why() {
        assert!(embedded_images((12, 0)).expect_err("none").contains("12.0"));
    }
}
