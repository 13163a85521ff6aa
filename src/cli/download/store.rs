//! A repository in the cache: files in `blobs` by the hash of their contents, links to them in `snapshots/COMMIT`, and
//! the commit of each branch in `refs`.

use super::server::{Failure, Hash, RemoteFile, Server, pauses};
use crate::error::{Error, Result};
use crate::hub::{self, Repository};
use crate::sys::files;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// The suffix of unfinished blobs.
const PARTIAL: &str = ".incomplete";

pub struct Store<'a> {
    repository: &'a Repository,
    commit: &'a str,
    folder: PathBuf,
    locks: PathBuf,
    pub snapshot: PathBuf,
}

impl<'a> Store<'a> {
    pub fn open(cache: &Path, repository: &'a Repository, commit: &'a str) -> Result<Self> {
        let folder = repository.folder(cache);
        let locks = cache.join(".locks").join(folder.file_name().unwrap_or_default());
        let snapshot = folder.join("snapshots").join(commit);
        for dir in [&folder.join("blobs"), &folder.join("refs"), &snapshot, &locks] {
            files::create_dir_all(dir)?;
        }
        Ok(Self { repository, commit, folder, locks, snapshot })
    }

    /// Downloads the missing files, and then sets the branch. Returns the downloaded bytes.
    pub fn fill(&self, server: &Server, all: &[RemoteFile]) -> Result<u64> {
        let missing: Vec<&RemoteFile> = all.iter().filter(|file| !self.has(file)).collect();
        let partial = |file: &RemoteFile| self.partial(file).metadata().map_or(0, |found| found.len());
        let needed = missing.iter().map(|file| file.bytes.saturating_sub(partial(file))).sum();
        files::check_space(&self.folder, needed)?;
        let bar = bar(needed);
        let mut fetched = 0;
        for file in all {
            bar.set_message(file.path.clone());
            fetched += self.blob(server, file, &bar)?;
            self.link(file)?;
        }
        bar.finish_and_clear();
        self.set_branch()?;
        Ok(fetched)
    }

    fn blob_path(&self, file: &RemoteFile) -> PathBuf {
        self.folder.join("blobs").join(file.hash.name())
    }

    fn partial(&self, file: &RemoteFile) -> PathBuf {
        self.folder.join("blobs").join(format!("{}{PARTIAL}", file.hash.name()))
    }

    fn has(&self, file: &RemoteFile) -> bool {
        self.blob_path(file).metadata().is_ok_and(|found| found.len() == file.bytes)
    }

    /// Downloads the contents of a file, unless the cache has them. Returns the downloaded bytes.
    fn blob(&self, server: &Server, file: &RemoteFile, bar: &ProgressBar) -> Result<u64> {
        let lock = self.locks.join(format!("{}.lock", file.hash.name()));
        let held = File::create(&lock).and_then(|file| file.lock().map(|()| file));
        // Until the end of this function: another process may download the same file.
        let _held = held.map_err(|e| Error::io("lock", &lock, &e))?;
        if self.has(file) {
            return Ok(0);
        }
        let partial = self.partial(file);
        let failed = |e: io::Error| Error::io("write", &partial, &e);
        let mut out = OpenOptions::new().create(true).append(true).open(&partial).map_err(failed)?;
        let (mut failures, mut fetched) = (0, 0);
        loop {
            let from = out.metadata().map_err(failed)?.len();
            if from >= file.bytes {
                break;
            }
            let emptied = out.try_clone().map_err(failed)?;
            let mut progress = |bytes| {
                fetched += bytes;
                bar.inc(bytes);
            };
            let done = server.append(
                self.repository,
                (self.commit, file),
                from,
                &mut out,
                || emptied.set_len(0),
                &mut progress,
            );
            let has = out.metadata().map_err(failed)?.len();
            failures = if has > from { 0 } else { failures + 1 };
            match done {
                Err(Failure { error, again }) if !again || !pauses(failures) => return Err(error),
                Ok(()) if has < file.bytes && !pauses(failures) => {
                    let rule = format!("the server ended {} after {has} of {} bytes", file.path, file.bytes);
                    return Err(Error::service(rule).hint("run the command again to resume"));
                }
                _ => {}
            }
        }
        out.sync_all().map_err(failed)?;
        check(&partial, file)?;
        fs::rename(&partial, self.blob_path(file)).map_err(failed)?;
        Ok(fetched)
    }

    /// Links the file in the snapshot to its blob.
    fn link(&self, file: &RemoteFile) -> Result<()> {
        let link = self.snapshot.join(&file.path);
        let up = "../".repeat(file.path.split('/').count() + 1);
        let target = PathBuf::from(format!("{up}blobs/{}", file.hash.name()));
        if fs::read_link(&link).is_ok_and(|found| found == target) {
            return Ok(());
        }
        files::create_dir_all(files::parent(&link))?;
        let new = files::partial(&link);
        let _ = fs::remove_file(&new);
        let made = symlink(&target, &new).and_then(|()| fs::rename(&new, &link));
        made.map_err(|e| Error::io("link", &link, &e))
    }

    /// Records the commit of the branch or tag. A reader thus finds only complete snapshots by its name.
    fn set_branch(&self) -> Result<()> {
        let revision = self.repository.revision();
        if hub::is_commit(revision) {
            return Ok(());
        }
        let path = self.folder.join("refs").join(revision);
        files::create_dir_all(files::parent(&path))?;
        files::write_atomic(&path, self.commit.as_bytes())
    }
}

/// Compares the contents of a downloaded file with its hash, and removes it if they differ.
fn check(partial: &Path, file: &RemoteFile) -> Result<()> {
    let found = match &file.hash {
        Hash::Sha256(_) => digest(Sha256::new(), partial),
        Hash::Git(_) => digest(Sha1::new().chain_update(format!("blob {}\0", file.bytes)), partial),
    };
    let found = found.map_err(|e| Error::io("read", partial, &e))?;
    if found == file.hash.name() {
        return Ok(());
    }
    let _ = fs::remove_file(partial);
    let rule = format!("{} must have the hash {} (got {found})", file.path, file.hash.name());
    Err(Error::service(rule).hint("run the command again to download the file again"))
}

/// The hexadecimal digits of the hash of a file that begins with the state `hash`.
fn digest<D: Digest>(mut hash: D, path: &Path) -> io::Result<String> {
    let (mut file, mut buffer) = (File::open(path)?, vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hash.finalize().iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"))),
            n => hash.update(&buffer[..n]),
        }
    }
}

/// A bar of bytes on a terminal.
fn bar(bytes: u64) -> ProgressBar {
    let style =
        ProgressStyle::with_template("download: {bar:28} {bytes}/{total_bytes}  {bytes_per_sec}, {eta} left  {msg}");
    ProgressBar::with_draw_target(Some(bytes), ProgressDrawTarget::stderr())
        .with_style(style.expect("the template parses").progress_chars("━╸─"))
        .with_finish(ProgressFinish::AndClear)
}
