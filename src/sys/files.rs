//! Files that survive a crash: they are written under another name, synced and renamed.

use crate::error::{Error, Kind, LfsPointer, Result, format_bytes};
use serde_json::{Map, Value};
use std::ffi::CString;
use std::fs::{self, File};
use std::hash::Hasher;
use std::io::{self, BufWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use twox_hash::XxHash3_64;

/// The first bytes of a git-lfs pointer, which has not been replaced by its content.
const LFS: &[u8] = b"version https://git-lfs.github.com/spec/";
/// The suffix of unfinished files.
const PARTIAL: &str = ".partial";

/// Makes the names in a directory (new files, renames) survive a crash.
pub fn fsync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|d| d.sync_all()).map_err(|e| Error::io("sync", dir, &e))
}

/// Creates a directory and its missing parents. Their names survive a crash.
pub fn create_dir_all(dir: &Path) -> Result<()> {
    fn create(dir: &Path) -> io::Result<()> {
        if dir.is_dir() {
            return Ok(());
        }
        create(parent(dir))?;
        match fs::create_dir(dir) {
            // Another process may have been faster.
            Err(_) if dir.is_dir() => File::open(parent(dir))?.sync_all(),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Err(io::Error::from_raw_os_error(libc::ENOTDIR)),
            Err(e) => Err(e),
            Ok(()) => File::open(parent(dir))?.sync_all(),
        }
    }
    create(dir).map_err(|e| Error::io("create", dir, &e))
}

/// Replaces the file `path` by `bytes`, as `replace_with` does.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    replace_with(path, |out| out.write_all(bytes).map_err(|e| Error::io("write", path, &e)))
}

/// Replaces the file `path` by the output of `fill`. A reader, or a crash, sees either the old file or the whole new
/// one. After an error the old file is unchanged, and no unfinished file is left. Several processes may do this at
/// once: the last one wins.
pub fn replace_with(path: &Path, fill: impl FnOnce(&mut BufWriter<File>) -> Result<()>) -> Result<()> {
    let partial = partial(path);
    let failed = |e| Error::io("write", path, &e);
    let written = File::create(&partial).map_err(failed).and_then(|file| {
        let mut out = BufWriter::new(file);
        fill(&mut out)?;
        let file = out.into_inner().map_err(|e| failed(e.into_error()))?;
        // A network file system reports writes that failed in the background here.
        file.sync_all().map_err(failed)
    });
    let renamed = written.and_then(|()| fs::rename(&partial, path).map_err(failed));
    renamed.inspect_err(|_| drop(fs::remove_file(&partial)))?;
    fsync_dir(parent(path))
}

/// The name of the unfinished file `path`. It is in the same directory, so that a rename is atomic.
pub fn partial(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    parent(path).join(format!(".{name}.{}{PARTIAL}", std::process::id()))
}

/// The paths in a directory, in no particular order.
pub fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    let paths = fs::read_dir(dir).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
    paths.map_err(|e| Error::io("read", dir, &e))
}

/// Removes the unfinished files that killed writers left in `dir`.
pub fn remove_partial(dir: &Path) -> Result<()> {
    for path in entries(dir)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with('.') && name.ends_with(PARTIAL) {
            fs::remove_file(&path).map_err(|e| Error::io("remove", &path, &e))?;
        }
    }
    Ok(())
}

/// Opens a regular file for reading. Other kinds of files could block the program forever: opening a FIFO waits for
/// a writer.
pub fn open(path: &Path) -> io::Result<File> {
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let kind = file.metadata()?.file_type();
    let what = match () {
        () if kind.is_file() => {
            let mut start = [0; LFS.len()];
            // A read at a position does not move the caller's place in the file.
            let is_pointer = file.read_at(&mut start, 0).is_ok_and(|read| start[..read] == *LFS);
            return if is_pointer { Err(io::Error::other(LfsPointer)) } else { Ok(file) };
        }
        () if kind.is_dir() => "a directory",
        () if kind.is_fifo() => "a FIFO",
        () => "a device or socket",
    };
    Err(io::Error::other(format!("it is {what}, not a regular file")))
}

/// Opens a regular file, or a pipe of the shell (`<(zcat rows.gz)`), which has a writer. A named FIFO may never get
/// one.
pub fn open_input(path: &Path) -> io::Result<File> {
    if path.starts_with("/dev/fd") || path.starts_with("/proc") { File::open(path) } else { open(path) }
}

pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

pub fn read_to_string(path: &Path) -> io::Result<String> {
    io::read_to_string(open(path)?)
}

/// The result of `read` for a file, or `None` if the file does not exist.
pub fn if_any<T>(path: &Path, read: impl FnOnce(&Path) -> io::Result<T>) -> Result<Option<T>> {
    match read(path) {
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
        read => read.map(Some).map_err(|e| Error::io("read", path, &e)),
    }
}

/// The JSON object in a file, or `None` if the file does not exist.
pub fn read_object(path: &Path) -> Result<Option<Map<String, Value>>> {
    let Some(text) = if_any(path, read)? else { return Ok(None) };
    serde_json::from_slice(&text)
        .map(Some)
        .map_err(|e| Error::data(format!("{} is not a JSON object: {e}", path.display())))
}

/// A large file for writing. Its pages are written back early, so that little is left at the end and the page
/// cache does not fill up.
#[derive(Debug)]
pub struct LargeFile {
    file: File,
    path: PathBuf,
    written: u64,
    /// The number of bytes whose writeback has begun.
    begun: u64,
}

/// The number of bytes that are written before their writeback begins.
const BEGUN_AT: u64 = 32 << 20;

impl LargeFile {
    pub fn create(path: &Path) -> Result<Self> {
        let file = File::create(path).map_err(|e| Error::io("write", path, &e))?;
        Ok(Self { file, path: path.to_owned(), written: 0, begun: 0 })
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|e| Error::io("write", &self.path, &e))?;
        self.written += bytes.len() as u64;
        if self.written - self.begun >= BEGUN_AT {
            let (at, len) = (self.begun.cast_signed(), (self.written - self.begun).cast_signed());
            // SAFETY: a file that is open. A file system that cannot begin early writes all of it at the end.
            unsafe { libc::sync_file_range(self.file.as_raw_fd(), at, len, libc::SYNC_FILE_RANGE_WRITE) };
            self.begun = self.written;
        }
        Ok(())
    }

    pub fn finish(self) -> Result<()> {
        self.file.sync_all().map_err(|e| Error::io("write", &self.path, &e))
    }
}

/// The number of bytes that are read at a time to hash a file.
const HASHED_AT_ONCE: usize = 4 << 20;

pub fn hex(hash: u64) -> String {
    format!("{hash:016x}")
}

/// XXH3 (64 bits) of `bytes`.
pub fn xxh3(bytes: &[u8]) -> String {
    hex(XxHash3_64::oneshot(bytes))
}

/// The size of a file, and XXH3 (64 bits) of its contents. Reads a few MiB at a time.
pub fn xxh3_of(path: &Path) -> Result<(u64, String)> {
    let io = |e: &io::Error| Error::io("read", path, e);
    let mut file = open(path).map_err(|e| io(&e))?;
    let (mut hash, mut bytes, mut piece) = (XxHash3_64::new(), 0, vec![0; HASHED_AT_ONCE]);
    loop {
        match file.read(&mut piece).map_err(|e| io(&e))? {
            0 => return Ok((bytes, hex(hash.finish()))),
            n => {
                hash.write(&piece[..n]);
                bytes += n as u64;
            }
        }
    }
}

/// The directory that holds `path`; `.` for a bare name.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn statfs(path: &Path) -> io::Result<libc::statfs> {
    let name = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: an all-zero statfs is a value; the name ends with a zero byte.
    let (code, stat) = unsafe {
        let mut stat: libc::statfs = std::mem::zeroed();
        (libc::statfs(name.as_ptr(), &raw mut stat), stat)
    };
    if code == 0 { Ok(stat) } else { Err(io::Error::last_os_error()) }
}

/// The free bytes for an ordinary user on the file system of `path`.
pub fn free_bytes(path: &Path) -> Result<u64> {
    let stat = statfs(path).map_err(|e| Error::io("query the free space of", path, &e))?;
    Ok(stat.f_bavail * stat.f_frsize as u64)
}

/// Whether the file system of `path` is in memory (tmpfs).
pub fn is_in_memory(path: &Path) -> bool {
    statfs(path).is_ok_and(|stat| stat.f_type == libc::TMPFS_MAGIC)
}

/// Returns an error if `bytes` do not fit on the disk.
pub fn check_space(dir: &Path, bytes: u64) -> Result<()> {
    let free = free_bytes(dir)?;
    if bytes <= free {
        return Ok(());
    }
    let message = format!("{} needs {}, but only {} are free", dir.display(), format_bytes(bytes), format_bytes(free));
    Err(Error::new(Kind::Io, message).hint("free some space, or use another directory"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_in_memory_is_distinguished_from_a_disk() {
        assert!(!is_in_memory(Path::new("/proc")) && !is_in_memory(Path::new("/none/such")));
        if std::fs::read_to_string("/proc/mounts").is_ok_and(|text| text.contains(" /dev/shm tmpfs ")) {
            assert!(is_in_memory(Path::new("/dev/shm")));
        }
    }
}
