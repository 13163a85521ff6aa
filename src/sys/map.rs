//! Read-only memory maps of files that are written once and never changed in place.

use std::fs::File;
use std::ops::{Deref, Range};
use std::path::Path;

use memmap2::{Advice, Mmap};

use crate::error::{Error, Result};

/// The bytes of a file, paged in as they are read. Opening costs the same for any size.
#[derive(Debug)]
pub struct Map {
    // An empty file cannot be mapped on every system, so it has no map.
    inner: Option<Mmap>,
}

impl Map {
    /// Maps `path` for reading.
    ///
    /// # Errors
    /// I/O, if the file cannot be opened or mapped.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| Error::io("read", path, &e))?;
        let bytes = file.metadata().map_err(|e| Error::io("read", path, &e))?.len();
        if bytes == 0 {
            return Ok(Self { inner: None });
        }
        // SAFETY: the files mapped here are shards and weights, which this program replaces by rename and never writes
        // in place, so the bytes behind the map do not change under it. Only `u8` is read through the map, of which
        // every value is valid; a file that someone else truncates ends the process with SIGBUS.
        let inner = unsafe { Mmap::map(&file) }.map_err(|e| Error::io("map", path, &e))?;
        Ok(Self { inner: Some(inner) })
    }

    /// Asks the system to read a range that is needed soon, in the background.
    pub fn will_need(&self, range: Range<usize>) {
        if let Some(inner) = &self.inner {
            // A system that does not read ahead reads later.
            let _ = inner.advise_range(Advice::WillNeed, range.start, range.len());
        }
    }
}

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.inner.as_deref().unwrap_or(&[])
    }
}
