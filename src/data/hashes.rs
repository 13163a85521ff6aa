//! Content hashes of a job's inputs. A file is read by one rank, and not read again while its size and times stay the
//! same.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::shard::FileHash;
use crate::comm::{Group, records};
use crate::error::{Error, Result};
use crate::sys::files::write_atomic;

/// The known hashes. Only the first rank has them.
#[derive(Debug, Default)]
pub struct Hashes {
    /// Hashes of earlier starts, by absolute path.
    known: BTreeMap<String, Known>,
    /// Hashes that this start used.
    asked: BTreeMap<String, Known>,
    /// Bytes read for hashes, on all ranks together.
    pub read_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Known {
    stamp: Stamp,
    contents: FileHash,
}

/// A file's size and times, which change with its contents. `ctime` changes even if a copy kept `mtime`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Stamp {
    bytes: u64,
    mtime: i64,
    ctime: i64,
}

impl Stamp {
    fn from_file(path: &Path) -> Option<Self> {
        let file = fs::metadata(path).ok()?;
        let ns = |s: i64, ns: i64| s.saturating_mul(1_000_000_000).saturating_add(ns);
        let (mtime, ctime) = (ns(file.mtime(), file.mtime_nsec()), ns(file.ctime(), file.ctime_nsec()));
        Some(Self { bytes: file.len(), mtime, ctime })
    }
}

/// The hashes that the first rank knows, and the files to read, the largest first.
type Plan = (BTreeMap<PathBuf, FileHash>, Vec<PathBuf>);

impl Hashes {
    pub fn read(cache: &Path) -> Self {
        let text = fs::read(cache).unwrap_or_default();
        Self { known: serde_json::from_slice(&text).unwrap_or_default(), ..Self::default() }
    }

    /// Replaces `cache` by the hashes that this start used, if they changed.
    pub fn save(&self, cache: &Path) -> Result<()> {
        if self.asked == self.known {
            return Ok(());
        }
        let text = serde_json::to_vec_pretty(&self.asked).map_err(|e| Error::fault(format!("hashes: {e}")))?;
        write_atomic(cache, &text)
    }

    /// Size and hash of each of `files`, by path. All ranks of `group` call this with the same files. Each reads a
    /// share of the files without a known hash, with all its threads.
    pub fn hash_files(&mut self, files: &[PathBuf], group: &Group) -> Result<BTreeMap<PathBuf, FileHash>> {
        // The first rank's listing counts, because other hosts may still see older times. Times are read before
        // contents, so the next start reads a file again if it changes meanwhile.
        let files: BTreeSet<&PathBuf> = files.iter().collect();
        let planned = (group.rank() == 0).then(|| self.plan(&files));
        let (stamps, plan) = planned.unzip();
        let (mut found, unread): Plan = records::gather(group, plan.as_slice())?.swap_remove(0);
        let mine: Vec<&PathBuf> = unread.iter().skip(group.rank()).step_by(group.size()).collect();
        let mine =
            mine.par_iter().map(|&path| Ok((path.clone(), FileHash::from_file(path)?))).collect::<Result<Vec<_>>>();
        for (path, file) in records::gather(group, &group.agree(mine)?)? {
            self.read_bytes += file.bytes;
            found.insert(path, file);
        }
        for (path, stamp) in stamps.unwrap_or_default() {
            let contents = found[&path].clone();
            self.asked.insert(absolute(&path), Known { stamp, contents });
        }
        Ok(found)
    }

    fn plan(&self, files: &BTreeSet<&PathBuf>) -> (Vec<(PathBuf, Stamp)>, Plan) {
        let (mut stamps, mut found, mut unread) = (Vec::new(), BTreeMap::new(), Vec::new());
        for &path in files {
            let stamp = Stamp::from_file(path);
            let known = self.asked.get(&absolute(path)).or_else(|| self.known.get(&absolute(path)));
            match known.filter(|known| Some(&known.stamp) == stamp.as_ref()) {
                Some(known) => drop(found.insert(path.clone(), known.contents.clone())),
                None => unread.push((stamp.as_ref().map_or(0, |stamp| stamp.bytes), path.clone())),
            }
            stamps.extend(stamp.map(|stamp| (path.clone(), stamp)));
        }
        unread.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
        (stamps, (found, unread.into_iter().map(|(_, path)| path).collect()))
    }
}

/// The absolute path as text for JSON, even if the start directory's name is not valid Unicode.
fn absolute(path: &Path) -> String {
    std::path::absolute(path).as_deref().unwrap_or(path).to_string_lossy().into_owned()
}
