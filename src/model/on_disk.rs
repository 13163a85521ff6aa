//! What the safetensors files of a model directory contain.

use super::arch::Arch;
use super::files::{Checkpoint, weight_files};
use crate::error::Result;
use std::collections::BTreeMap;
use std::path::Path;

/// A number of tensors, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tensors {
    pub count: usize,
    pub bytes: u64,
}

impl Tensors {
    fn add(&mut self, bytes: usize) {
        self.count += 1;
        self.bytes += bytes as u64;
    }
}

/// The tensors in the files of a model directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OnDisk {
    pub files: usize,
    /// Those of the language model by their type, such as `BF16`.
    pub by_type: BTreeMap<String, Tensors>,
    /// Those outside the language model.
    pub others: Tensors,
}

impl OnDisk {
    /// Reads the headers of the files in `dir`. `None` if there are no files.
    ///
    /// # Errors
    /// `Data` or `Io` if a file is damaged.
    pub fn read(dir: &Path, arch: &Arch) -> Result<Option<Self>> {
        let files = weight_files(dir).iter().filter(|name| name.ends_with(".safetensors")).count();
        if files == 0 {
            return Ok(None);
        }
        let checkpoint = Checkpoint::open(dir)?;
        let mut found = Self { files, by_type: BTreeMap::new(), others: Tensors::default() };
        for name in checkpoint.names() {
            let tensor = checkpoint.get(name).expect("it has the name");
            let of = if arch.is_other(name) {
                &mut found.others
            } else {
                found.by_type.entry(format!("{:?}", tensor.dtype)).or_default()
            };
            of.add(tensor.bytes.len());
        }
        Ok(Some(found))
    }
}
