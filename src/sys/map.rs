//! Read-only memory-mapped files. They are written once and never changed in place.

use std::ffi::{CString, c_char};
use std::ops::{Deref, Range};
use std::path::Path;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use memmap2::{Advice, Mmap, UncheckedAdvice};

use super::faults::{self, Cause};
use super::files;
use super::terminal::visible;
use crate::error::{Error, Kind, Result};

/// The bytes of a file, paged in as they are read. Opening costs the same for any size.
///
/// A read ends the process with exit code 74 and the file's name if the file was truncated, or if the disk fails.
#[derive(Debug)]
pub struct Map {
    // An empty file cannot be mapped on every system, so it has no map.
    // Fields are dropped in order: the name before its map.
    inner: Option<(Named, Mmap)>,
}

impl Map {
    pub fn open(path: &Path) -> Result<Self> {
        let file = files::open(path).map_err(|e| Error::io("read", path, &e))?;
        let bytes = file.metadata().map_err(|e| Error::io("read", path, &e))?.len();
        if bytes == 0 {
            return Ok(Self { inner: None });
        }
        // SAFETY: the files mapped here are shards, weights and committed checkpoints. This program replaces them by
        // rename and never writes in place, so the mapped bytes do not change. Only `u8` is read through the map, of
        // which every value is valid. A file that someone else truncates ends the process.
        let inner = unsafe { Mmap::map(&file) }.map_err(|e| Error::io("map", path, &e))?;
        let named = Named::new(inner.as_ptr_range(), path);
        Ok(Self { inner: Some((named, inner)) })
    }

    /// Makes the system read a range ahead in the background.
    pub fn will_need(&self, range: Range<usize>) {
        if let Some((_, inner)) = &self.inner {
            // A failure only means that the system reads later.
            let _ = inner.advise_range(Advice::WillNeed, range.start, range.len());
        }
    }

    /// Releases the memory of the bytes read so far. Reading them again uses the file or the page cache.
    pub fn release(&self) {
        if let Some((_, inner)) = &self.inner {
            // SAFETY: the map is of a file and only read, so dropped pages are read again with the same bytes.
            let _ = unsafe { inner.unchecked_advise(UncheckedAdvice::DontNeed) };
        }
    }
}

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.inner.as_ref().map_or(&[], |(_, inner)| inner)
    }
}

impl AsRef<[u8]> for Map {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

/// A mapped file and its name, for the fault handler. A free slot has no end.
struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    path: AtomicPtr<c_char>,
}

/// The largest number of maps whose faults name the file.
const SLOTS: usize = 1024;
static MAPPED: [Slot; SLOTS] =
    [const { Slot { start: AtomicUsize::new(0), end: AtomicUsize::new(0), path: AtomicPtr::new(null_mut()) } }; SLOTS];

/// A map's slot in `MAPPED`, freed when this is dropped.
#[derive(Debug)]
struct Named(Option<usize>);

impl Named {
    fn new(range: Range<*const u8>, path: &Path) -> Self {
        faults::install(Cause::FileShrank, end_where_file_shrank);
        let Ok(path) = CString::new(visible(&path.to_string_lossy()).as_bytes()) else { return Self(None) };
        let start = range.start as usize;
        let free = |slot: &Slot| slot.start.compare_exchange(0, start, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        let found = MAPPED.iter().position(free);
        if let Some(i) = found {
            MAPPED[i].path.store(path.into_raw(), Ordering::SeqCst);
            MAPPED[i].end.store(range.end as usize, Ordering::SeqCst);
        }
        Self(found)
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        let Some(slot) = self.0.map(|i| &MAPPED[i]) else { return };
        slot.end.store(0, Ordering::SeqCst);
        let path = slot.path.swap(null_mut(), Ordering::SeqCst);
        // SAFETY: the name came from `into_raw`, and only this owner of the slot frees it.
        drop(unsafe { CString::from_raw(path) });
        slot.start.store(0, Ordering::SeqCst);
    }
}

/// Ends the process with a message if the fault is in a mapped file. It runs in the fault handler, so it allocates
/// nothing and takes no lock.
fn end_where_file_shrank(address: usize) {
    let holds = |slot: &&Slot| {
        let end = slot.end.load(Ordering::SeqCst);
        // The last page of a file reaches beyond its end.
        (slot.start.load(Ordering::SeqCst)..end.next_multiple_of(4096)).contains(&address)
    };
    let Some(slot) = MAPPED.iter().find(holds) else { return };
    let path = slot.path.load(Ordering::SeqCst);
    if path.is_null() {
        return;
    }
    // SAFETY: the name ends with a zero byte and lives as long as the map, which the failed access holds; a handler may
    // make these calls.
    unsafe {
        let print = |text: *const c_char| libc::write(2, text.cast(), libc::strlen(text));
        print(c"error: ".as_ptr());
        print(path);
        print(c" was truncated or became unreadable while it was mapped\n".as_ptr());
        libc::_exit(Error::new(Kind::Io, String::new()).exit_code());
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
    fn a_mapped_file_releases_its_memory_and_reads_the_same_again() {
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
