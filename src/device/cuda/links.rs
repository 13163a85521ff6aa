//! How a GPU is tied to others and to its host, as far as its library of management (NVML) and the system say.

use libloading::Library;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::path::Path;

/// Links that a GPU may have.
const LINKS_MAX: c_uint = 18;

type Device = *mut c_void;
type Init = unsafe extern "C" fn() -> c_int;
type ByAddress = unsafe extern "C" fn(*const c_char, *mut Device) -> c_int;
type LinkState = unsafe extern "C" fn(Device, c_uint, *mut c_uint) -> c_int;

/// The link of the GPU at `pci` in words: `12 NVLinks`, else `PCIe 16.0 GT/s x16`, else that nobody knows.
pub fn of(pci: &str) -> String {
    match nvlinks(pci) {
        Some(1) => "1 NVLink".into(),
        Some(links @ 2..) => format!("{links} NVLinks"),
        _ => pcie(Path::new("/sys/bus/pci/devices"), pci).unwrap_or_else(|| "its link is not known".into()),
    }
}

/// How many of its NVLinks are up; none where there is no NVML, or it does not know the GPU.
fn nvlinks(pci: &str) -> Option<usize> {
    let address = CString::new(pci).ok()?;
    // SAFETY: NVML does nothing when it is opened; the types above are those of its header, the string ends in 0, and each
    // call writes one value.
    unsafe {
        let library = Library::new("libnvidia-ml.so.1").ok()?;
        let init = library.get::<Init>(b"nvmlInit_v2").ok()?;
        let by_address = library.get::<ByAddress>(b"nvmlDeviceGetHandleByPciBusId_v2").ok()?;
        let state = library.get::<LinkState>(b"nvmlDeviceGetNvLinkState").ok()?;
        let mut device: Device = std::ptr::null_mut();
        if init() != 0 || by_address(address.as_ptr(), &raw mut device) != 0 {
            return None;
        }
        let is_up = |link: &c_uint| {
            let mut up: c_uint = 0;
            state(device, *link, &raw mut up) == 0 && up == 1
        };
        let links = (0..LINKS_MAX).filter(is_up).count();
        // It may have started threads of its own: it stays open.
        std::mem::forget(library);
        Some(links)
    }
}

/// The fastest that the GPU and its slot can do: an idle one is slower for now.
fn pcie(devices: &Path, pci: &str) -> Option<String> {
    let read = |name: &str| std::fs::read_to_string(devices.join(pci).join(name)).ok();
    let (speed, width) = (read("max_link_speed")?, read("max_link_width")?);
    let speed = speed.trim().trim_end_matches(" PCIe");
    if speed.is_empty() || speed.starts_with("Unknown") {
        return None;
    }
    Some(format!("PCIe {speed} x{}", width.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bus_of_a_gpu_is_read_as_the_system_writes_it() {
        let root = tempfile::tempdir().expect("a directory");
        for (pci, speed) in [("0000:3b:00.0", "16.0 GT/s PCIe\n"), ("0000:af:00.0", "Unknown\n")] {
            let dir = root.path().join(pci);
            std::fs::create_dir(&dir).expect("a directory");
            std::fs::write(dir.join("max_link_speed"), speed).expect("a file");
            std::fs::write(dir.join("max_link_width"), "16\n").expect("a file");
        }
        assert_eq!(pcie(root.path(), "0000:3b:00.0").as_deref(), Some("PCIe 16.0 GT/s x16"));
        assert_eq!([pcie(root.path(), "0000:af:00.0"), pcie(root.path(), "0000:00:00.0")], [None, None]);
    }
}
