//! A safetensors file other than a model's: numbers and token ids by name.

use super::decode::stored;
use super::files::Checkpoint;
use crate::error::{Error, Result};
use safetensors::Dtype;
use std::path::{Path, PathBuf};

/// An open file. Its tensors are checked when they are read.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    tensors: Checkpoint,
}

impl TensorFile {
    /// Opens a file, and checks that it is complete.
    ///
    /// # Errors
    /// `Data` if it is damaged or no safetensors file; `Io`.
    pub fn open(path: &Path) -> Result<Self> {
        if !path.is_file() {
            return Err(Error::data(format!("{} does not exist", path.display())));
        }
        Ok(Self { path: path.to_path_buf(), tensors: Checkpoint::open_file(path.to_path_buf())? })
    }

    /// The names of all tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.names()
    }

    /// A text that the file's header has under `key`.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.tensors.metadata(key)
    }

    /// The shape and the values of a tensor in f32, bf16 or f16; `None` if there is no such tensor.
    ///
    /// # Errors
    /// `Data` for another type.
    pub fn floats(&self, name: &str) -> Result<Option<(Vec<usize>, Vec<f32>)>> {
        let Some(tensor) = self.tensors.get(name) else { return Ok(None) };
        if !matches!(tensor.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) {
            return Err(self.wrong(name, "F32, BF16 or F16", tensor.dtype));
        }
        let mut values = vec![0.0; tensor.shape.iter().product()];
        stored(tensor.dtype, tensor.bytes)(0, &mut values);
        Ok(Some((tensor.shape.to_vec(), values)))
    }

    /// The token ids of a tensor in I64 or I32; `None` if there is no such tensor.
    ///
    /// # Errors
    /// `Data` for another type, or a negative id.
    pub fn ids(&self, name: &str) -> Result<Option<Vec<u32>>> {
        let Some(tensor) = self.tensors.get(name) else { return Ok(None) };
        let number = |bytes: &[u8]| match bytes.try_into() {
            Ok(bytes) => i64::from_le_bytes(bytes),
            Err(_) => i64::from(i32::from_le_bytes(bytes.try_into().expect("4 bytes"))),
        };
        let bytes = match tensor.dtype {
            Dtype::I64 => 8,
            Dtype::I32 => 4,
            other => return Err(self.wrong(name, "I64 or I32", other)),
        };
        let id = |bytes: &[u8]| {
            let id = number(bytes);
            u32::try_from(id)
                .map_err(|_| Error::data(format!("{}: {name} must have token ids (got {id})", self.path.display())))
        };
        tensor.bytes.chunks_exact(bytes).map(id).collect::<Result<_>>().map(Some)
    }

    fn wrong(&self, name: &str, wanted: &str, got: Dtype) -> Error {
        Error::data(format!("{}: tensor {name} must be {wanted} (got {got:?})", self.path.display()))
    }
}
