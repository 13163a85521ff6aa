//! HDF5 files made in memory: the library never writes to a disk.

use hdf5::{File, Result};
use hdf5_sys::h5f::H5Fget_file_image;
use std::path::Path;

/// The bytes of the HDF5 file that `fill` makes for `path`.
pub fn of(path: &Path, fill: impl FnOnce(&File) -> Result<()>) -> Result<Vec<u8>> {
    // HDF5 identifies open files by name, and would read an existing file: this name lies within a file.
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
    Ok(image)
}
