//! Cubins that were compiled at run time, kept on disk for the next start.

use super::embedded::{self, Source};
use super::nvrtc::{Compiled, Nvrtc};
use sha2::{Digest, Sha256};
use std::env;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Bytes before the cubin in its file: its hash.
const HASH: usize = 32;

/// `$XDG_CACHE_HOME/rlhf-hpc`, or else `~/.cache/rlhf-hpc`. If that cannot be written, as a home may be on compute
/// nodes, the user's own directory for temporary files.
pub fn directory() -> Option<PathBuf> {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
    base.map(|base| base.join("rlhf-hpc")).filter(|dir| is_writable(dir)).or_else(|| own(&env::temp_dir()))
}

fn is_writable(dir: &Path) -> bool {
    let probe = dir.join(format!("{}.partial", std::process::id()));
    fs::create_dir_all(dir).and_then(|()| fs::write(&probe, "")).and_then(|()| fs::remove_file(&probe)).is_ok()
}

/// A directory in `shared` that belongs to this user alone: machine code that another user left there must not run.
fn own(shared: &Path) -> Option<PathBuf> {
    let user = fs::metadata("/proc/self").ok()?.uid();
    let dir = shared.join(format!("rlhf-hpc-{user}"));
    let _ = fs::DirBuilder::new().mode(0o700).create(&dir);
    let found = fs::symlink_metadata(&dir).ok()?;
    (found.is_dir() && found.uid() == user && found.mode() & 0o777 == 0o700).then_some(dir)
}

/// Cubins of all sources for one architecture.
#[derive(Debug)]
pub struct Cubins {
    /// (source, cubin), in the order of the sources.
    pub list: Vec<(&'static str, Vec<u8>)>,
    /// The number of cubins that were compiled now; the others came from the disk.
    pub compiled: usize,
    /// The compiler's log for those.
    pub log: String,
}

/// Reads the cubins in `dir`, compiles the rest and writes them there. If ranks start together, one compiles and the
/// others read. If the directory cannot be written, the next start has to compile again.
///
/// # Errors
/// The compiler's message for a source.
pub fn cubins(nvrtc: &Nvrtc, arch: &str, dir: Option<&Path>) -> Result<Cubins, String> {
    let headers = embedded::headers();
    // Until the end; a file system that has no locks lets all compile.
    let _lock = dir.and_then(|dir| lock(dir).ok());
    let one = |unit: &'static Source| {
        let file = dir.map(|dir| dir.join(file_name(unit, &headers, arch, nvrtc.version)));
        if let Some(cubin) = file.as_deref().and_then(read) {
            return Ok((unit.name, cubin, None));
        }
        let Compiled { cubin, log, .. } = nvrtc
            .compile((unit.name, unit.text), &headers, arch)
            .map_err(|why| format!("{} does not compile for {arch}: {why}", unit.name))?;
        if let Some(file) = file {
            let _ = write(&file, &cubin);
        }
        Ok((unit.name, cubin, Some(log)))
    };
    let made: Result<Vec<_>, String> = std::thread::scope(|scope| {
        let running: Vec<_> = embedded::units().map(|unit| scope.spawn(move || one(unit))).collect();
        running.into_iter().map(|thread| thread.join().expect("failures are returned as errors")).collect()
    });
    let mut cubins = Cubins { list: Vec::new(), compiled: 0, log: String::new() };
    for (source, cubin, log) in made? {
        cubins.list.push((source, cubin));
        cubins.compiled += usize::from(log.is_some());
        cubins.log += &log.unwrap_or_default();
    }
    Ok(cubins)
}

/// Waits until no other process is filling the directory.
fn lock(dir: &Path) -> io::Result<File> {
    fs::create_dir_all(dir)?;
    let file = File::create(dir.join("lock"))?;
    file.lock().map(|()| file)
}

/// Names everything that decides the cubin.
fn file_name(unit: &Source, headers: &[(&str, &str)], arch: &str, (major, minor): (i32, i32)) -> String {
    let mut hash = Sha256::new();
    for text in headers.iter().flat_map(|(name, text)| [*name, *text]).chain([unit.name, unit.text]) {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    }
    let key = hash.finalize();
    let key = u64::from_le_bytes(key[..8].try_into().expect("eight bytes"));
    format!("{}.{arch}.nvrtc-{major}.{minor}.{key:016x}.cubin", unit.name)
}

/// The cubin in a file; `None` if there is no such file or it is damaged.
fn read(file: &Path) -> Option<Vec<u8>> {
    let mut bytes = fs::read(file).ok()?;
    let cubin = bytes.split_off(HASH.min(bytes.len()));
    (Sha256::digest(&cubin)[..] == bytes[..]).then_some(cubin)
}

/// Writes a file atomically: readers see no file or all of it, and ranks that write the same file at once replace each
/// other's.
fn write(file: &Path, cubin: &[u8]) -> io::Result<()> {
    fs::create_dir_all(file.parent().unwrap_or(Path::new(".")))?;
    let aside = file.with_extension(format!("{}.partial", std::process::id()));
    let written = fs::write(&aside, [&Sha256::digest(cubin)[..], cubin].concat());
    written.and_then(|()| fs::rename(&aside, file)).inspect_err(|_| drop(fs::remove_file(&aside)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_directory_that_others_may_write_is_not_trusted() {
        let shared = tempfile::tempdir().expect("a directory");
        let dir = own(shared.path()).expect("it is made");
        assert_eq!(own(shared.path()).as_ref(), Some(&dir), "it is found again");
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).expect("other rights");
        assert_eq!(own(shared.path()), None);
        fs::remove_dir(&dir).expect("it is empty");
        std::os::unix::fs::symlink(shared.path(), &dir).expect("a link");
        assert_eq!(own(shared.path()), None, "a link leads elsewhere");
    }
}
