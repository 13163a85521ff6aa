//! The commit, in this order: shards in a partial directory, sync, agreement of all ranks, manifest, sync, rename,
//! sync, `latest`. Only then are old checkpoints removed.

use super::manifest::{self, Entry, Manifest, check_name};
use super::payload::Payload;
use crate::comm::{Group, records};
use crate::error::{Error, Kind, Result};
use crate::sys::files::{check_space, create_dir_all, entries, fsync_dir, parent, write_atomic};
use crate::sys::trace::{self, Category};
use std::collections::HashSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

const LATEST: &str = "latest";
pub(super) const BEST: &str = "best";

/// The checkpoints to keep.
#[derive(Clone, Copy, Debug, Default)]
pub struct Keep {
    /// The number of newest checkpoints; 0: all.
    pub last: usize,
    /// The step whose evaluation was the best so far.
    pub best: Option<u64>,
}

/// Commits `root/step-N` of `manifest`, which is rank 0's. Every rank of `group` calls this with its own files, which
/// have their own names (for example `actor.m.rank-0003.bin`). `root` is the same directory for all ranks. An older
/// checkpoint of the same step is replaced. If it is the best one, it is set aside as `step-N.best`, because the new
/// one may contain a part of the next step. Afterwards only the checkpoints of `keep` stay.
///
/// # Errors
/// The same on all ranks. It names the rank where it occurred: `Io` for a full disk or a directory that cannot be
/// written. Then every earlier checkpoint is unchanged, and nothing of this one stays.
pub fn save(
    root: &Path,
    group: &Group,
    files: &[(String, Payload)],
    mut manifest: Manifest,
    keep: Keep,
) -> Result<PathBuf> {
    let step = manifest.step;
    let (partial, last) = (root.join(format!(".step-{step}.partial")), root.join(format!("step-{step}")));
    let committed = write_shards(root, &partial, group, files).and_then(|files| {
        (manifest.ranks, manifest.files) = (group.size(), files);
        group.agree(if group.rank() == 0 { commit(root, &partial, &last, &manifest, keep.best) } else { Ok(()) })
    });
    if group.rank() == 0 {
        if committed.is_err() {
            let _ = fs::remove_dir_all(&partial);
        } else {
            prune(root, step, keep);
        }
    }
    committed.map(|()| last)
}

/// Writes each rank's files into the partial directory. Returns the entries of all of them, in rank order.
fn write_shards(root: &Path, partial: &Path, group: &Group, files: &[(String, Payload)]) -> Result<Vec<Entry>> {
    let mut bytes = [files.iter().map(|(_, p)| p.size()).sum::<u64>() as f64];
    group.all_reduce_sum_f64(&mut bytes);
    let begun = if group.rank() == 0 { begin(root, partial, bytes[0] as u64) } else { Ok(()) };
    group.agree(begun)?;
    let entries = group.agree(write_own(partial, files))?;
    let all = records::gather(group, &entries)?;
    let mut seen = HashSet::new();
    match all.iter().map(|entry| &entry.name).find(|name| !seen.insert(*name)) {
        Some(name) => Err(Error::fault(format!("two files of this checkpoint are named {name}"))),
        None => Ok(all),
    }
}

fn begin(root: &Path, partial: &Path, bytes: u64) -> Result<()> {
    create_dir_all(root)?;
    check_space(root, bytes)?;
    if partial.exists() {
        fs::remove_dir_all(partial).map_err(|e| Error::io("remove", partial, &e))?;
    }
    fs::create_dir(partial).map_err(|e| Error::io("make", partial, &e))
}

fn write_own(partial: &Path, files: &[(String, Payload)]) -> Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for (name, payload) in files {
        let _span = trace::named(Category::Io, || format!("write {name}"), "bytes", [payload.size() as usize]);
        check_name(name)?;
        create_dir_all(parent(&partial.join(name)))?;
        entries.push(payload.write(partial, name)?);
    }
    let folders: HashSet<PathBuf> = files.iter().map(|(name, _)| parent(&partial.join(name)).to_owned()).collect();
    folders.iter().try_for_each(|folder| fsync_dir(folder))?;
    Ok(entries)
}

/// Rank 0's part: from the manifest to `latest` and `best`.
fn commit(root: &Path, partial: &Path, last: &Path, manifest: &Manifest, best: Option<u64>) -> Result<()> {
    for entry in &manifest.files {
        let path = partial.join(&entry.name);
        let size = fs::metadata(&path).map_err(|e| Error::io("read the size of", &path, &e))?.len();
        if size != entry.bytes {
            return Err(Error::new(Kind::Io, format!("{} has {size} of {} bytes", path.display(), entry.bytes))
                .hint("put job.dir on a file system that all hosts share"));
        }
    }
    write_atomic(&partial.join(manifest::NAME), &manifest.to_bytes())?;
    if last.exists() {
        let is_best = best == Some(manifest.step) && fs::read_link(root.join(BEST)).is_ok_and(|to| last.ends_with(to));
        replace(partial, last, is_best)?;
    } else {
        fs::rename(partial, last).map_err(|e| Error::io("rename", partial, &e))?;
    }
    fsync_dir(root)?;
    point(root, LATEST, last)?;
    best.map_or(Ok(()), |step| point(root, BEST, &best_of(root, step)))
}

/// Replaces an old directory of the same step. Until the new one is in place, the old one has a name from which `clean`
/// restores it. If it `is_best`, it is kept afterwards, too.
fn replace(partial: &Path, last: &Path, is_best: bool) -> Result<()> {
    let old = if is_best { aside(last) } else { partial.with_extension("old") };
    fs::rename(last, &old).map_err(|e| Error::io("rename", last, &e))?;
    fs::rename(partial, last).map_err(|e| Error::io("rename", partial, &e))?;
    if is_best {
        return Ok(());
    }
    // The new name reaches the disk before anything old is removed.
    fsync_dir(parent(last))?;
    fs::remove_dir_all(&old).map_err(|e| Error::io("remove", &old, &e))
}

/// The path of the best checkpoint after another checkpoint of its step has replaced it.
fn aside(last: &Path) -> PathBuf {
    last.with_extension(BEST)
}

/// The directory of the checkpoint saved after the best evaluation, which was at `step`.
pub fn best_of(root: &Path, step: u64) -> PathBuf {
    let dir = root.join(format!("step-{step}"));
    if aside(&dir).exists() { aside(&dir) } else { dir }
}

/// Sets a link. `latest` and `best` are for users and scripts. Resuming reads the manifests.
fn point(root: &Path, link: &str, to: &Path) -> Result<()> {
    let (link, aside) = (root.join(link), root.join(format!(".{link}.partial")));
    let name = to.file_name().expect("step-N");
    if fs::read_link(&link).is_ok_and(|to| to == name) {
        return Ok(());
    }
    let _ = fs::remove_file(&aside);
    std::os::unix::fs::symlink(name, &aside)
        .and_then(|()| fs::rename(&aside, &link))
        .map_err(|e| Error::io("move", &link, &e))?;
    fsync_dir(root)
}

/// Completes the commit of a killed run: `latest` and `best` point to the checkpoint in `newest`, which verifies, and
/// to the best one. Only the checkpoints of `keep` stay. Newer ones, which do not verify, are replaced later.
pub fn repair(root: &Path, newest: &Path, step: u64, keep: Keep) -> Result<()> {
    point(root, LATEST, newest)?;
    let best = root.join(BEST);
    match keep.best {
        Some(step) => point(root, BEST, &best_of(root, step))?,
        None if best.is_symlink() => fs::remove_file(&best).map_err(|e| Error::io("remove", &best, &e))?,
        None => {}
    }
    prune(root, step, keep);
    Ok(())
}

/// Removes the checkpoints up to `step` that are not in `keep`, but never the one of `step`. Each is renamed first, so
/// that a half-removed one is never used as a checkpoint. A failed removal costs space, not the run.
fn prune(root: &Path, step: u64, keep: Keep) {
    let best = keep.best.map(|best| best_of(root, best));
    let older = steps(root).into_iter().rev().filter(|&s| s < step).skip(keep.last.saturating_sub(1));
    let older = older.filter(|_| keep.last > 0).map(|step| root.join(format!("step-{step}")));
    let set_aside =
        entries(root).unwrap_or_default().into_iter().filter(|dir| dir.extension().is_some_and(|e| e == BEST));
    let rename = |dir: PathBuf| {
        let going = root.join(format!(".{}.removing", dir.file_name().unwrap_or_default().display()));
        fs::rename(&dir, &going).ok().map(|()| going)
    };
    let kept = |dir: &PathBuf| best.as_ref() == Some(dir);
    let going: Vec<PathBuf> = older.chain(set_aside).filter(|dir| !kept(dir)).filter_map(rename).collect();
    // The new names reach the disk before anything is removed.
    if !going.is_empty() && fsync_dir(root).is_ok() {
        for going in &going {
            drop(fs::remove_dir_all(going));
        }
    }
}

/// The steps with a committed directory, ascending.
pub(super) fn steps(root: &Path) -> Vec<u64> {
    let Ok(entries) = fs::read_dir(root) else { return Vec::new() };
    let mut steps: Vec<u64> =
        entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.strip_prefix("step-")?.parse().ok()).collect();
    steps.sort_unstable();
    steps
}

/// Removes half-written and half-removed directories of a killed run, and restores an old directory whose replacement
/// is missing. Only the run that owns the directory may call this.
pub(super) fn clean(root: &Path) -> Result<()> {
    let Ok(entries) = fs::read_dir(root) else { return Ok(()) };
    for entry in entries.filter_map(std::result::Result::ok) {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        let old = name.strip_prefix('.').and_then(|n| n.strip_suffix(".old")).map(|n| root.join(n));
        // A best checkpoint that was set aside, while its replacement is missing.
        let replaced = name.strip_prefix('.').and_then(|n| n.strip_suffix(".partial")).map(|n| root.join(n));
        if let Some(last) = replaced.filter(|last| !last.exists() && !path.with_extension("old").exists())
            && aside(&last).exists()
        {
            fs::rename(aside(&last), &last).map_err(|e| Error::io("restore", &last, &e))?;
        }
        let removed = match old {
            Some(last) if !last.exists() => fs::rename(&path, &last),
            Some(_) => File::open(root).and_then(|root| root.sync_all()).and_then(|()| fs::remove_dir_all(&path)),
            None if name == ".latest.partial" || name == ".best.partial" => fs::remove_file(&path),
            None if name.starts_with(".step-") && (name.ends_with(".partial") || name.ends_with(".removing")) => {
                fs::remove_dir_all(&path)
            }
            None => Ok(()),
        };
        removed.map_err(|e| Error::io("clean up", &path, &e))?;
    }
    Ok(())
}
