//! The file of a batch: safetensors with the tensors of another system, and its settings as metadata.

use crate::config;
use crate::error::{Error, Result};
use crate::sys::map::Map;
use safetensors::tensor::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::path::Path;

/// The key of the metadata whose value is the version of the format.
const FORMAT: &str = "rlhf_hpc_batch";
const VERSION: &str = "1";

/// The names of all tensors that a batch may have.
const TENSORS: &[&str] = &[
    "input_ids",
    "attention_mask",
    "response_mask",
    "group",
    "microbatch",
    "scores",
    "logprobs",
    "old_logprobs",
    "ref_logprobs",
    "sample_logprobs",
    "entropy",
    "values",
    "new_values",
    "kl",
    "rewards",
    "returns",
    "advantages",
    "policy_loss",
    "kl_loss",
    "entropy_loss",
    "loss",
    "grad_norm",
    "value_loss",
    "critic_grad_norm",
];

/// The numbers of a tensor, row by row.
pub struct Tensor {
    pub shape: Vec<usize>,
    pub values: Vec<f64>,
}

/// A file that was read. Tensors and settings are taken out one by one.
pub struct File {
    pub settings: BTreeMap<String, String>,
    tensors: BTreeMap<String, Tensor>,
}

impl File {
    /// # Errors
    /// `Data` if it is not a batch, or if it has a tensor that no batch has.
    pub fn read(path: &Path) -> Result<Self> {
        let map = Map::open(path)?;
        let wrong = |what: String| Error::data(format!("{}: {what}", path.display()));
        let malformed = |e: safetensors::SafeTensorError| wrong(format!("it is not a safetensors file ({e})"));
        let (_, header) = SafeTensors::read_metadata(&map).map_err(malformed)?;
        let mut settings: BTreeMap<String, String> =
            header.metadata().clone().unwrap_or_default().into_iter().collect();
        match settings.remove(FORMAT).as_deref() {
            Some(VERSION) => {}
            Some(other) => return Err(wrong(format!("its format is {FORMAT} = {other:?}, but only 1 is known"))),
            None => {
                return Err(wrong(format!("it is not a batch: its metadata have no {FORMAT}"))
                    .hint("write it with jobs/tools/dump_batch_openrlhf.py, dump_batch_trl.py or dump_batch_verl.py"));
            }
        }
        let mut tensors = BTreeMap::new();
        for (name, view) in SafeTensors::deserialize(&map).map_err(malformed)?.tensors() {
            if !TENSORS.contains(&name.as_str()) {
                let near =
                    config::nearest(&name, TENSORS).map_or(String::new(), |near| format!("did you mean {near}? "));
                return Err(wrong(format!("a batch has no tensor {name}"))
                    .hint(near + "`rlhf-hpc help equality` lists the tensors"));
            }
            let values = decode(view.dtype(), view.data()).ok_or_else(|| {
                wrong(format!("tensor {name} has dtype {:?}", view.dtype())).hint("store it as F32 or I64")
            })?;
            tensors.insert(name, Tensor { shape: view.shape().to_vec(), values });
        }
        Ok(Self { settings, tensors })
    }

    /// The values of a tensor with this shape, if the file has it.
    ///
    /// # Errors
    /// `Data` if it has another shape.
    pub fn take(&mut self, name: &str, shape: &[usize]) -> Result<Option<Vec<f64>>> {
        let Some(found) = self.tensors.remove(name) else { return Ok(None) };
        if found.shape != shape {
            return Err(Error::data(format!("tensor {name} must have shape {shape:?} (got {:?})", found.shape)));
        }
        Ok(Some(found.values))
    }

    /// A number: a tensor without dimensions or with one element.
    pub fn scalar(&mut self, name: &str) -> Result<Option<f64>> {
        let one = self.shape(name).is_some_and(|shape| shape == [1]);
        Ok(self.take(name, if one { &[1] } else { &[] })?.map(|values| values[0]))
    }

    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|tensor| &tensor.shape[..])
    }
}

/// The numbers of a tensor; none if its type is not one that a hook writes.
fn decode(dtype: Dtype, bytes: &[u8]) -> Option<Vec<f64>> {
    fn each<const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        bytes.as_chunks::<N>().0.iter().map(|one| number(*one)).collect()
    }
    Some(match dtype {
        Dtype::F64 => each(bytes, f64::from_le_bytes),
        Dtype::F32 => each(bytes, |one| f64::from(f32::from_le_bytes(one))),
        Dtype::BF16 => each(bytes, |one| f64::from(f32::from_bits(u32::from(u16::from_le_bytes(one)) << 16))),
        Dtype::I64 => each(bytes, |one| i64::from_le_bytes(one) as f64),
        Dtype::I32 => each(bytes, |one| f64::from(i32::from_le_bytes(one))),
        Dtype::U8 | Dtype::BOOL => each(bytes, |[one]| f64::from(one)),
        _ => return None,
    })
}
