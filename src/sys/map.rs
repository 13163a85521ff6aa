//! Read-only memory maps of files that are written once and never changed in place.

use std::fs::File;
use std::ops::{Deref, Range};
use std::path::Path;

use memmap2::{Advice, Mmap, UncheckedAdvice};

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

    /// Gives back the memory of what was read so far; what is read again comes from the file, or the system's cache of it.
    pub fn release(&self) {
        if let Some(inner) = &self.inner {
            // SAFETY: the map is of a file and only read, so pages that are dropped come back with the same bytes.
            let _ = unsafe { inner.unchecked_advise(UncheckedAdvice::DontNeed) };
        }
    }
}

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.inner.as_deref().unwrap_or(&[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Resident KiB of the mapping that begins at `address`.
    fn resident_kib(address: usize) -> u64 {
        let text = std::fs::read_to_string("/proc/self/smaps").expect("Linux has it");
        let mut lines = text.lines().skip_while(|line| !line.starts_with(&format!("{address:x}-")));
        let line = lines.find_map(|line| line.strip_prefix("Rss:")).expect("it is mapped");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }

    #[test]
    fn what_was_read_gives_its_memory_back_and_reads_the_same_again() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("file");
        let bytes: Vec<u8> = (0..4 << 20).map(|i: u32| (i.wrapping_mul(i) >> 7) as u8).collect();
        std::fs::write(&path, &bytes).expect("writes");
        let map = Map::open(&path).expect("maps");
        assert!(map[..] == bytes[..]);
        let address = map.as_ptr() as usize;
        assert!(resident_kib(address) >= 4096);
        map.release();
        assert_eq!(resident_kib(address), 0);
        assert!(map[..] == bytes[..]);
    }
}
