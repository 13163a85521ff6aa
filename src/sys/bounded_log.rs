//! A log of bounded size: it keeps the beginning and the end.

use super::lock::lock;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// The bytes that are kept of the beginning, and at least of the end.
const KEPT: u64 = 1 << 20;
const GAP: &[u8] = b"\n[some output is left out here]\n";

/// The largest size of a log: the end grows to twice its size before it is cut.
pub const BYTES_MAX: u64 = 3 * KEPT + GAP.len() as u64;

/// A log that several writers of this process share.
#[derive(Clone, Debug)]
pub struct BoundedLog(Arc<Mutex<File>>);

impl BoundedLog {
    /// Opens the log at `path`, after what it contains already.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        Ok(Self(Arc::new(Mutex::new(file))))
    }

    pub fn append(&self, bytes: &[u8]) -> io::Result<()> {
        let mut file = lock(&self.0);
        for piece in bytes.chunks(KEPT as usize) {
            let end = file.seek(SeekFrom::End(0))?;
            if end + piece.len() as u64 > BYTES_MAX {
                cut(&file, end)?;
                file.seek(SeekFrom::End(0))?;
            }
            file.write_all(piece)?;
        }
        Ok(())
    }
}

/// Keeps the beginning of a log of `end` bytes, and its last bytes after the gap.
fn cut(file: &File, end: u64) -> io::Result<()> {
    let mut last = vec![0; KEPT as usize];
    file.read_exact_at(&mut last, end - KEPT)?;
    file.write_all_at(GAP, KEPT)?;
    file.write_all_at(&last, KEPT + GAP.len() as u64)?;
    file.set_len(2 * KEPT + GAP.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_keeps_its_first_and_its_last_lines_and_stays_small() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let line = |i: usize| format!("line {i:>94}\n");
        for start in [0, 200_000] {
            let log = BoundedLog::open(&path).unwrap();
            for i in start..start + 200_000 {
                log.append(line(i).as_bytes()).unwrap();
                assert!(i % 1000 != 0 || path.metadata().unwrap().len() <= BYTES_MAX);
            }
        }
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.len() as u64 <= BYTES_MAX && text.matches("left out here").count() == 1);
        assert!(text.starts_with(&line(0)) && text.contains(&line(10_000)) && !text.contains(&line(200_000)));
        assert!(text.contains(&line(390_000)) && text.ends_with(&line(399_999)));
        BoundedLog::open(&path).unwrap().append(&vec![b'x'; 10 << 20]).unwrap();
        assert!(path.metadata().unwrap().len() <= BYTES_MAX);
    }
}
