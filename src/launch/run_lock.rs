//! The lock of a run directory, which allows one run at a time.

use crate::error::{Error, Result};
use crate::sys::{self, files};
use std::fs::{File, TryLockError};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Known hashes of inputs, in the run directory.
pub const INPUTS: &str = "inputs.json";
/// Shards of JSONL, in the run directory.
pub const PREPARED: &str = "data";

const LOCK: &str = "run.lock";

/// The time that a run waits for the lock, because the ranks of a killed run may need a moment to end.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
const LOCK_RETRY: Duration = Duration::from_millis(50);

/// The output directory of a start: `job.dir`. A dry run does not change that. It has its own directory in the nearest
/// existing parent, which is the same on every host. This shows whether the job may write there.
pub fn working_dir(job_dir: &Path, dry_run: bool) -> PathBuf {
    if !dry_run {
        return job_dir.to_path_buf();
    }
    let above = job_dir.ancestors().skip(1).find(|dir| dir.is_dir()).unwrap_or(Path::new("."));
    let name = job_dir.file_name().unwrap_or_default().to_string_lossy();
    above.join(format!(".{name}.dry-run"))
}

fn link(from: &Path, to: &Path) -> Result<()> {
    let _ = std::fs::remove_file(to);
    let from = std::path::absolute(from).map_err(|e| Error::io("resolve", from, &e))?;
    std::os::unix::fs::symlink(from, to).map_err(|e| Error::io("create", to, &e))
}

/// Links the shards of earlier starts into another directory, so that it can reuse them.
pub(super) fn link_shards(job_dir: &Path, dir: &Path) -> Result<()> {
    let rows = dir.join(PREPARED);
    files::create_dir_all(&rows)?;
    for entry in std::fs::read_dir(job_dir.join(PREPARED)).into_iter().flatten().flatten() {
        link(&entry.path(), &rows.join(entry.file_name()))?;
    }
    Ok(())
}

/// Links the shards and the hashes of earlier starts into a dry run's directory.
pub(super) fn link_prepared(job_dir: &Path, dir: &Path) -> Result<()> {
    link_shards(job_dir, dir)?;
    // The log is linked, too. Opening it changes nothing, and shows whether it is damaged.
    for name in [INPUTS, "metrics.jsonl"] {
        let from = job_dir.join(name);
        if from.exists() {
            link(&from, &dir.join(name))?;
        }
    }
    Ok(())
}

/// Removes the files of a killed dry run from its directory. Links are removed, not followed.
fn clear(dir: &Path) -> Result<()> {
    for path in files::entries(dir)?.into_iter().filter(|path| !path.ends_with(LOCK)) {
        let is_dir = path.is_dir() && !path.is_symlink();
        let removed = if is_dir { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
        removed.map_err(|e| Error::io("remove", &path, &e))?;
    }
    Ok(())
}

/// Locks the directory, because two runs in it would remove each other's files. None if the file system has no locks.
pub fn lock(dir: &Path, dry_run: bool) -> Result<Option<File>> {
    if dry_run && dir.is_symlink() {
        return Err(Error::usage(format!("{} must be a directory of dry runs (got a symbolic link)", dir.display()))
            .hint("remove it, or set another job.dir"));
    }
    files::create_dir_all(dir).map_err(|e| e.hint("set job.dir to a place where this user may write"))?;
    let path = dir.join(LOCK);
    // A link would lock, and change, a file elsewhere.
    let options =
        File::options().read(true).write(true).create(true).truncate(false).custom_flags(libc::O_NOFOLLOW).open(&path);
    let mut file = options.map_err(|e| match e.raw_os_error() {
        Some(libc::ELOOP) => {
            Error::usage(format!("{} must be a file of this run (got a symbolic link)", path.display()))
                .hint("remove it, or set another job.dir")
        }
        _ => Error::io("open", &path, &e),
    })?;
    let start = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => break,
            Err(TryLockError::WouldBlock) if start.elapsed() < LOCK_TIMEOUT => std::thread::sleep(LOCK_RETRY),
            Err(TryLockError::WouldBlock) => {
                let owner = std::fs::read_to_string(&path).unwrap_or_default();
                return Err(Error::usage(format!("{} is in use by another run ({})", dir.display(), owner.trim()))
                    .hint("wait for it to end, or set another job.dir"));
            }
            Err(TryLockError::Error(_)) if dry_run => return clear(dir).map(|()| None),
            Err(TryLockError::Error(_)) => return Ok(None),
        }
    }
    // The text of the lock is for users only.
    let owner = format!("process {} on {}\n", std::process::id(), sys::host::name());
    let _ = file.set_len(0).and_then(|()| file.write_all(owner.as_bytes()));
    if dry_run {
        clear(dir)?;
    }
    Ok(Some(file))
}
