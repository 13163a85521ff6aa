//! Replacing a file so that a kill at any moment leaves either the old or the new one.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// What every unfinished file ends with. Leftovers are removed when a run directory is opened.
const SUFFIX: &str = ".partial";

/// Where the new content of `path` is built: the same directory, so that the rename is atomic.
fn aside_of(path: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(SUFFIX);
    path.with_file_name(name)
}

/// Writes `content` aside, syncs it, renames it to `path` and syncs the directory.
pub fn replace(path: &Path, content: &[u8]) -> Result<()> {
    replace_with(path, |out| out.write_all(content).map_err(|e| Error::io("write", path, &e)))
}

/// The same of what `fill` writes.
///
/// # Errors
/// That of `fill`, or `Io`, naming the path; the old file is then untouched, and nothing is left beside it.
pub fn replace_with(path: &Path, fill: impl FnOnce(&mut BufWriter<File>) -> Result<()>) -> Result<()> {
    let aside = aside_of(path);
    let failed = |e| Error::io("write", path, &e);
    let written = File::create(&aside).map_err(failed).and_then(|file| {
        let mut out = BufWriter::new(file);
        fill(&mut out)?;
        let file = out.into_inner().map_err(|e| failed(e.into_error()))?;
        // Of the open file: a file system across the network tells here of writes that failed behind our back.
        file.sync_all().map_err(failed)
    });
    written
        .and_then(|()| fs::rename(&aside, path).map_err(failed))
        .inspect_err(|_| drop(fs::remove_file(&aside)))
        .and_then(|()| sync_directory(path).map_err(failed))
}

fn sync_directory(path: &Path) -> std::io::Result<()> {
    match path.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => File::open(directory)?.sync_all(),
        _ => File::open(".")?.sync_all(),
    }
}

/// Removes what killed writers left in `directory`.
pub fn remove_leftovers(directory: &Path) -> Result<()> {
    let entries = fs::read_dir(directory).map_err(|e| Error::io("read", directory, &e))?;
    for entry in entries {
        let path = entry.map_err(|e| Error::io("read", directory, &e))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with('.') && name.ends_with(SUFFIX) {
            fs::remove_file(&path).map_err(|e| Error::io("remove", &path, &e))?;
        }
    }
    Ok(())
}
