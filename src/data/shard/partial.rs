//! Files of a shard that is being written.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use super::file_of;
use crate::error::{Error, Result};
use crate::sys::files;
use tempfile::TempPath;

/// A file next to its final name, removed unless it is renamed.
#[derive(Debug)]
pub struct PartialFile {
    pub path: TempPath,
    file: BufWriter<File>,
}

impl PartialFile {
    pub fn create(prefix: &Path, suffix: &str) -> Result<Self> {
        let path = &files::partial(&file_of(prefix, suffix));
        let file = File::create(path).and_then(|file| Ok((TempPath::try_from_path(path)?, file)));
        let (path, file) = file.map_err(|e| Error::io("write", path, &e))?;
        Ok(Self { path, file: BufWriter::with_capacity(1 << 20, file) })
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|e| Error::io("write", &self.path, &e))
    }

    pub fn finish(&mut self) -> Result<()> {
        let written = self.file.flush().and_then(|()| self.file.get_ref().sync_all());
        written.map_err(|e| Error::io("write", &self.path, &e))
    }

    pub fn append(&mut self, other: &mut Self) -> Result<()> {
        other.file.flush().map_err(|e| Error::io("write", &other.path, &e))?;
        let mut from = File::open(&other.path).map_err(|e| Error::io("read", &other.path, &e))?;
        io::copy(&mut from, &mut self.file).map(drop).map_err(|e| Error::io("write", &self.path, &e))
    }

    pub fn rename(self, to: &Path) -> Result<()> {
        self.path.persist(to).map_err(|e| Error::io("write", to, &e.error))
    }
}
