//! HDF5 files made in memory: the library never writes to a disk.
//!
//! A checksum of all bytes follows the end of the file that HDF5 knows. Other programs ignore it.

use super::files::xxh3;
use super::map::Map;
use crate::error::{self, Error};
use hdf5::{File, Result};
use hdf5_sys::h5f::H5Fget_file_image;
use std::path::Path;

/// The start of the checksum, which has 16 hexadecimal digits.
const SEAL: &[u8] = b"rlhf-hpc xxh3 64";
const SEAL_BYTES: usize = SEAL.len() + 16;

/// Checks the bytes of a file against its checksum, if it has one: an older file, or one of another program, has none.
pub fn verify(path: &Path) -> error::Result<()> {
    let bytes = Map::open(path)?;
    let (image, seal) = bytes.split_at(bytes.len().saturating_sub(SEAL_BYTES));
    match seal.strip_prefix(SEAL) {
        Some(hash) if hash != xxh3(image).as_bytes() => {
            Err(Error::data(format!("{}: its checksum does not match its contents", path.display())))
        }
        _ => Ok(()),
    }
}

/// The bytes of the HDF5 file that `fill` makes for `path`, with their checksum.
pub fn build_image(path: &Path, fill: impl FnOnce(&File) -> Result<()>) -> Result<Vec<u8>> {
    // HDF5 identifies open files by name, and would read an existing file. This path is inside a file, so no file
    // has it.
    let name = path.join("in memory");
    let file =
        File::with_options().with_fapl(|access| access.core_filebacked(false)).create(&*name.to_string_lossy())?;
    fill(&file)?;
    file.flush()?;
    // SAFETY: the file is open, `len` is that of the buffer, and the lock keeps out all other calls of the library.
    let copy_to = |buffer: *mut u8, len: usize| unsafe {
        let _lock = hdf5_sys::LOCK.lock();
        H5Fget_file_image(file.id(), buffer.cast(), len)
    };
    let failed = |_| hdf5::Error::from("HDF5 returned no image of the file");
    // Without a buffer it returns the length.
    let mut image = vec![0; usize::try_from(copy_to(std::ptr::null_mut(), 0)).map_err(failed)?];
    usize::try_from(copy_to(image.as_mut_ptr(), image.len())).map_err(failed)?;
    file.close()?;
    let hash = xxh3(&image);
    image.extend_from_slice(SEAL);
    image.extend_from_slice(hash.as_bytes());
    Ok(image)
}
