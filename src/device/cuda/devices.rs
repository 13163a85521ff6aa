//! The GPUs that the driver shows, without starting work on any.

pub use super::sys::NoGpu;
use super::sys::{self, CUcomputemode, CUdevice, CUdevice_attribute as Attribute, CUresult, CUuuid, check};
use crate::error::{Error, Result};
use std::ffi::{CStr, c_char, c_int};
use std::path::Path;

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties {
    /// Its number among the GPUs that this process sees.
    pub index: usize,
    pub name: String,
    pub memory_bytes: usize,
    pub multiprocessors: usize,
    /// Compute capability: major and minor.
    pub capability: (u32, u32),
    /// The shared memory that one block may ask for.
    pub shared_bytes_max: usize,
    /// The PCI address: `0000:3b:00.0`. MIG instances of a GPU have the same one.
    pub pci: String,
    /// The UUID of the GPU, or of the MIG instance, without the prefix that nvidia-smi -L writes:
    /// `5c1b2b9c-90b4-8a3e-7f5d-4c2c17f0e6aa`.
    pub uuid: String,
    /// Its NUMA node, if the system knows it.
    pub numa: Option<usize>,
}

impl Properties {
    /// The number in this process, and the PCI address: `GPU 0 at 0000:3b:00.0`.
    pub fn address(&self) -> String {
        format!("GPU {} at {}", self.index, self.pci)
    }

    /// Whether kernels of its architecture multiply by wgmma (sm_90a; later chips have other instructions).
    pub fn has_wgmma(&self) -> bool {
        self.capability == (9, 0)
    }
}

/// The newest CUDA version of the driver, major and minor, and its GPUs; or the reason why there is none.
pub type Found = std::result::Result<((i32, i32), Vec<Properties>), NoGpu>;

/// Opens the driver.
pub fn devices() -> Found {
    sys::open()?;
    match begin().and_then(|any| Ok((version()?, if any { seen()? } else { Vec::new() }))) {
        Ok((_, none)) if none.is_empty() => {
            let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
            let why = why_none(Path::new("/"), visible.as_deref());
            Err(NoGpu::Unseen(format!("the driver shows no GPU: {why}")))
        }
        Ok(found) => Ok(found),
        Err(Error { message, hint, .. }) => {
            let hint = hint.map_or(String::new(), |hint| format!(" ({hint})"));
            Err(NoGpu::Broken(format!("the driver does not start: {message}{hint}")))
        }
    }
}

/// The newest CUDA version of the driver, major and minor; `None` if no driver was opened.
pub fn newest_cuda() -> Option<(i32, i32)> {
    sys::is_open().then(version)?.ok()
}

fn version() -> Result<(i32, i32)> {
    let mut version = 0;
    // SAFETY: the driver is there, whether started or not; writes a number.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
    Ok((version / 1000, version % 1000 / 10))
}

/// Starts the driver. Returns whether it has a GPU: a driver without one does not start.
fn begin() -> Result<bool> {
    // SAFETY: the library is there.
    match unsafe { sys::cuInit(0) } {
        CUresult::CUDA_ERROR_STUB_LIBRARY => Err(Error::usage(
            "the libcuda.so that was found first is the stub that CUDA ships for linking: remove directories named \
             stubs from LD_LIBRARY_PATH",
        )),
        CUresult::CUDA_ERROR_NO_DEVICE => Ok(false),
        status => check("cuInit", status).map(|()| true),
    }
}

fn seen() -> Result<Vec<Properties>> {
    let mut count = 0;
    // SAFETY: the driver was started; writes a number.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
    (0..count).map(properties).collect()
}

/// The reason why a driver shows no GPU, according to the system's files below `root` and CUDA_VISIBLE_DEVICES. The
/// driver has one status for all reasons, a missing kernel module among them.
fn why_none(root: &Path, visible: Option<&str>) -> String {
    let devices = || std::fs::read_dir(root.join("dev")).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let is_gpu = |name: &str| name.strip_prefix("nvidia").is_some_and(|n| n.parse::<usize>().is_ok());
    if !root.join("proc/driver/nvidia/version").exists() {
        "its kernel module is not loaded (there is no /proc/driver/nvidia); check that this node has GPUs".into()
    } else if let Some(visible) = visible {
        format!("CUDA_VISIBLE_DEVICES={visible} may hide them")
    } else if !devices().any(|name| name.to_str().is_some_and(is_gpu)) {
        "there is no /dev/nvidia0; if this is a container, start it with --nv or --gpus all".into()
    } else {
        "the job may have been given none; list them with nvidia-smi -L, request them from Slurm with --gres=gpu".into()
    }
}

/// The driver's handle of its GPU number `index`.
pub(super) fn handle(index: c_int) -> Result<CUdevice> {
    let mut device: CUdevice = 0;
    // SAFETY: the driver was started; writes a number.
    check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, index) })?;
    Ok(device)
}

fn properties(index: c_int) -> Result<Properties> {
    let device = handle(index)?;
    let (mut name, mut pci) = ([0 as c_char; 256], [0 as c_char; 32]);
    let (mut uuid, mut memory_bytes) = (CUuuid { bytes: [0; 16] }, 0);
    // SAFETY: the strings are written within their lengths and end in 0.
    let (name, pci) = unsafe {
        check("cuDeviceGetName", sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, device))?;
        check("cuDeviceGetPCIBusId", sys::cuDeviceGetPCIBusId(pci.as_mut_ptr(), pci.len() as c_int, device))?;
        check("cuDeviceGetUuid", sys::cuDeviceGetUuid_v2(&raw mut uuid, device))?;
        check("cuDeviceTotalMem", sys::cuDeviceTotalMem_v2(&raw mut memory_bytes, device))?;
        [name.as_ptr(), pci.as_ptr()].map(|at| CStr::from_ptr(at).to_string_lossy().into_owned()).into()
    };
    let number = |attribute| number(device, attribute);
    let pci = sysfs_name(&pci);
    Ok(Properties {
        index: index as usize,
        name,
        memory_bytes,
        multiprocessors: number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        capability: (
            number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32,
            number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32,
        ),
        shared_bytes_max: number(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        numa: numa_node(Path::new("/sys/bus/pci/devices"), &pci),
        pci,
        uuid: uuid_text(uuid.bytes.map(|byte| byte as u8)),
    })
}

/// A UUID in the form of RFC 9562: groups of 8, 4, 4, 4 and 12 digits.
fn uuid_text(bytes: [u8; 16]) -> String {
    let digits = format!("{:032x}", u128::from_be_bytes(bytes));
    [0..8, 8..12, 12..16, 16..20, 20..32].map(|group| &digits[group]).join("-")
}

fn number(device: CUdevice, attribute: Attribute) -> Result<usize> {
    let mut value = 0;
    // SAFETY: writes a number.
    check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) })?;
    Ok(usize::try_from(value).unwrap_or(0))
}

/// Whether a GPU is for one process at a time.
pub(super) fn is_exclusive(device: CUdevice) -> bool {
    let exclusive = CUcomputemode::CU_COMPUTEMODE_EXCLUSIVE_PROCESS as usize;
    number(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE).is_ok_and(|mode| mode == exclusive)
}

/// A PCI address in the form of the system's directories: lowercase, a domain of four digits.
fn sysfs_name(pci: &str) -> String {
    let lower = pci.to_lowercase();
    match lower.split_once(':') {
        Some((domain, rest)) if domain.len() > 4 && domain.starts_with("0000") => {
            format!("{}:{rest}", &domain[domain.len() - 4..])
        }
        _ => lower,
    }
}

/// The NUMA node of a GPU. The system writes -1 if it does not know.
fn numa_node(devices: &Path, pci: &str) -> Option<usize> {
    std::fs::read_to_string(devices.join(pci).join("numa_node")).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pci_address_has_the_spelling_of_the_system() {
        assert_eq!(sysfs_name("00000000:3B:00.0"), "0000:3b:00.0");
        assert_eq!(sysfs_name("0000:AF:00.0"), "0000:af:00.0");
        assert_eq!(sysfs_name("00010000:01:00.0"), "00010000:01:00.0");
    }

    #[test]
    fn a_uuid_has_the_spelling_of_nvidia_smi() {
        let bytes = std::array::from_fn(|i| (0x11 * i) as u8);
        assert_eq!(uuid_text(bytes), "00112233-4455-6677-8899-aabbccddeeff");
    }

    #[test]
    fn the_reason_why_a_driver_shows_no_gpu_is_read_from_the_system() {
        let root = tempfile::tempdir().expect("a directory");
        let make = |file: &str| {
            let file = root.path().join(file);
            std::fs::create_dir_all(file.parent().expect("a directory")).expect("a directory");
            std::fs::write(file, "").expect("a file");
        };
        let why = |visible| why_none(root.path(), visible);
        make("dev/nvidiactl");
        assert!(why(Some("0")).starts_with("its kernel module is not loaded"), "{}", why(Some("0")));
        make("proc/driver/nvidia/version");
        assert!(why(Some("-1")).starts_with("CUDA_VISIBLE_DEVICES=-1 "), "{}", why(Some("-1")));
        assert!(why(None).starts_with("there is no /dev/nvidia0"), "{}", why(None));
        make("dev/nvidia3");
        assert!(why(None).contains("nvidia-smi -L"), "{}", why(None));
    }

    #[test]
    fn the_numa_node_of_a_gpu_is_read_and_minus_one_means_none() {
        let root = tempfile::tempdir().expect("a directory");
        for (pci, text) in [("0000:3b:00.0", "1\n"), ("0000:af:00.0", "-1\n")] {
            std::fs::create_dir(root.path().join(pci)).expect("a directory");
            std::fs::write(root.path().join(pci).join("numa_node"), text).expect("a file");
        }
        let node = |pci| numa_node(root.path(), pci);
        assert_eq!([node("0000:3b:00.0"), node("0000:af:00.0"), node("0000:00:00.0")], [Some(1), None, None]);
    }
}
