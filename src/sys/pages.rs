//! Memory directly from the system, in whole pages: anonymous, or of an unnamed file.

use crate::error::{Error, Kind, Result, format_bytes};
use crate::sys::files;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::OnceLock;

/// Runs of at least this many bytes start at a multiple of it and request huge pages.
pub const HUGE: usize = 2 << 20;

pub fn page_size() -> usize {
    static SIZE: OnceLock<usize> = OnceLock::new();
    // SAFETY: reads a number.
    *SIZE.get_or_init(|| usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096))
}

/// An owned run of readable and writable pages, zero at first. The system backs a page when it is first touched.
/// Dropping this returns the pages.
#[derive(Debug)]
pub struct Pages {
    start: NonNull<u8>,
    bytes: usize,
    file: Option<File>,
    /// The number of bytes from the start that were ever requested. The system backs them once they are written.
    pub touched: usize,
}

// SAFETY: it owns its pages exclusively, as a Box does.
unsafe impl Send for Pages {}
// SAFETY: nothing reads or writes through a shared reference.
unsafe impl Sync for Pages {}

impl Pages {
    /// Anonymous pages; `None` if the system has no more memory.
    pub fn anonymous(bytes: usize) -> Option<Self> {
        check(bytes);
        if bytes < HUGE {
            return map(bytes, None).map(|start| Self { start, bytes, file: None, touched: 0 });
        }
        let wide = Self { start: map(bytes + HUGE, None)?, bytes: bytes + HUGE, file: None, touched: 0 };
        let before = wide.start.as_ptr().align_offset(HUGE);
        let rest = if before > 0 { wide.split(before).1 } else { wide };
        let own = if rest.bytes > bytes { rest.split(bytes).0 } else { rest };
        // SAFETY: the range is ours; the advice changes no contents and its failure is harmless.
        unsafe { libc::madvise(own.start.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
        Some(own)
    }

    /// Pages that are never written, so the system need not have the memory; `None` if the address space is full.
    pub fn untouched(bytes: usize) -> Option<Self> {
        check(bytes);
        let start = map_as(bytes, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1)?;
        Some(Self { start, bytes, file: None, touched: 0 })
    }

    /// Pages of a file in `dir`, which is created if missing. The file has no name: it disappears when this is
    /// dropped or the process ends. Its disk space is reserved at once.
    pub fn of_file(bytes: usize, dir: &Path) -> Result<Self> {
        check(bytes);
        fs::create_dir_all(dir).map_err(|e| Error::io("create", dir, &e))?;
        let file = tempfile::tempfile_in(dir).map_err(|e| Error::io("create a file in", dir, &e))?;
        // SAFETY: the file is open for writing.
        match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes as libc::off_t) } {
            0 => {}
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => {
                let only = |free| format!("only {} are", format_bytes(free));
                let free = files::free_bytes(dir).map_or_else(|_| "too little is".to_string(), only);
                let needed = format_bytes(bytes as u64);
                let message = format!("{} needs {needed} for offloaded tensors, but {free} free", dir.display());
                return Err(Error::new(Kind::Io, message)
                    .hint("free some space, set another job.dir, or remove an entry from mesh.offload"));
            }
            code => return Err(Error::io("reserve disk space in", dir, &io::Error::from_raw_os_error(code))),
        }
        match map(bytes, Some(&file)) {
            Some(start) => Ok(Self { start, bytes, file: Some(file), touched: 0 }),
            None => Err(Error::io("map a file in", dir, &io::Error::last_os_error())),
        }
    }

    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Splits the run into the first `at` bytes and the rest.
    pub fn split(self, at: usize) -> (Self, Self) {
        check(at);
        assert!(at < self.bytes && self.file.is_none(), "cannot split a run of {} bytes at {at}", self.bytes);
        let whole = std::mem::ManuallyDrop::new(self);
        // SAFETY: `at` is within the run.
        let middle = unsafe { whole.start.add(at) };
        let touched = whole.touched.min(at);
        let tail = Self { start: middle, bytes: whole.bytes - at, file: None, touched: whole.touched - touched };
        (Self { start: whole.start, bytes: at, file: None, touched }, tail)
    }

    #[must_use]
    pub fn join(self, tail: Self) -> Self {
        let [head, tail] = [self, tail].map(std::mem::ManuallyDrop::new);
        // One past the end of a run is a valid address to compare.
        let end = head.start.as_ptr().wrapping_add(head.bytes);
        assert!(end == tail.start.as_ptr() && head.file.is_none(), "the two runs must be adjacent");
        let (bytes, touched) = (head.bytes + tail.bytes, head.touched + tail.touched);
        Self { start: head.start, bytes, file: None, touched }
    }

    /// Excludes the pages from processes that are started later. Otherwise a device that accesses the pages directly
    /// would, after the next write here, see the pages of such a process.
    pub fn keep_from_children(&self) {
        // SAFETY: advice about our own pages, which changes no contents.
        unsafe { libc::madvise(self.start.as_ptr().cast(), self.bytes, libc::MADV_DONTFORK) };
    }

    /// Evicts the pages of a file from this process. Starts to write changed pages to the disk, after which the system
    /// may reuse their memory. An access brings the contents back. Does nothing for anonymous pages.
    pub fn evict(&self) {
        let Some(file) = &self.file else { return };
        // SAFETY: the run is a shared map of the file, so that dropping its pages keeps their contents, also for
        // concurrent readers.
        unsafe { libc::madvise(self.start.as_ptr().cast(), self.bytes, libc::MADV_DONTNEED) };
        // SAFETY: begins to write dirty pages of our own file; it changes no contents.
        unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
    }

    /// Brings the pages of a file back, for writing or only for reading. If the system supports it (from Linux 5.14
    /// on), all pages are back when this returns.
    pub fn prefetch(&self, written: bool) {
        if self.file.is_none() {
            return;
        }
        let all = if written { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
        for advice in [libc::MADV_WILLNEED, all] {
            // SAFETY: advice about our own pages, which changes no contents; its failure is harmless.
            unsafe { libc::madvise(self.start.as_ptr().cast(), self.bytes, advice) };
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the run is ours and has no references any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

fn check(bytes: usize) {
    assert!(bytes > 0 && bytes.is_multiple_of(page_size()), "{bytes} bytes are not a whole number of pages");
}

fn map(bytes: usize, file: Option<&File>) -> Option<NonNull<u8>> {
    let sharing = if file.is_some() { libc::MAP_SHARED } else { libc::MAP_PRIVATE | libc::MAP_ANONYMOUS };
    map_as(bytes, sharing, file.map_or(-1, AsRawFd::as_raw_fd))
}

fn map_as(bytes: usize, sharing: i32, descriptor: i32) -> Option<NonNull<u8>> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new map at an address of the system's choice touches nothing that exists.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, sharing, descriptor, 0) };
    if start == libc::MAP_FAILED { None } else { NonNull::new(start.cast()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(pages: &mut Pages) -> &mut [u8] {
        // SAFETY: the pages are ours, mapped and zero at first.
        unsafe { std::slice::from_raw_parts_mut(pages.start.as_ptr(), pages.bytes) }
    }

    #[test]
    fn pages_are_zero_and_large_runs_are_aligned_to_huge_pages() {
        let mut pages = Pages::anonymous(HUGE + page_size()).expect("some memory");
        assert_eq!(pages.start.as_ptr() as usize % HUGE, 0);
        assert!(bytes_of(&mut pages).iter().all(|&b| b == 0));
    }

    #[test]
    fn split_pages_can_be_joined_again_with_their_contents() {
        let page = page_size();
        let mut pages = Pages::anonymous(3 * page).expect("some memory");
        bytes_of(&mut pages)[page] = 7;
        let (head, tail) = pages.split(page);
        assert_eq!((head.bytes(), tail.bytes()), (page, 2 * page));
        let mut pages = head.join(tail);
        assert_eq!((pages.bytes(), bytes_of(&mut pages)[page]), (3 * page, 7));
        let (mut head, tail) = pages.split(2 * page);
        drop(tail);
        assert_eq!(bytes_of(&mut head)[page], 7);
    }

    #[test]
    fn a_full_disk_is_an_error_and_not_a_signal() {
        let dir = tempfile::tempdir().expect("a directory");
        let error = Pages::of_file(1 << 50, dir.path()).expect_err("no disk has that");
        assert_eq!(error.kind, Kind::Io);
        assert!(error.message.contains("needs 1024.0 TiB for offloaded tensors"), "{error}");
    }
}
