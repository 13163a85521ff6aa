//! The corrections of routers: numbers in f32, one for each expert, by which DeepSeek-V3 and its relatives choose experts
//! (`ops::experts::SigmoidRule`). They have no gradient, and no dtype of weights would hold them exactly, so they are no
//! parameters: the architecture has them, and checkpoints and exports keep them as they are.

use super::decode::stored;
use super::files::{Checkpoint, weight_files};
use crate::error::{Error, Result};
use safetensors::{Dtype, tensor::TensorView};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// The file with them in a checkpoint.
pub const FILE: &str = "router_corrections.safetensors";

/// The end of a tensor's name.
const END: &str = ".mlp.gate.e_score_correction_bias";

/// The corrections of each layer that has some, by the name of their tensor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Corrections(BTreeMap<String, Arc<[f32]>>);

/// The name of a layer's tensor.
pub(super) fn name(layer: usize) -> String {
    format!("model.layers.{layer}{END}")
}

/// Whether a tensor has corrections.
pub(super) fn is_correction(name: &str) -> bool {
    name.ends_with(END)
}

impl Corrections {
    /// Reads those of `layers`, each with its number of experts, from the files of a model or a checkpoint. Without such
    /// files there are none.
    ///
    /// # Errors
    /// `Data` if a layer has none in the files, or other numbers than its experts need; `Io`.
    pub(super) fn read(dir: &Path, layers: &[(usize, usize)]) -> Result<Self> {
        let (saved, mut all) = (dir.join(FILE), BTreeMap::new());
        let files = match () {
            () if layers.is_empty() => return Ok(Self::default()),
            () if saved.exists() => Checkpoint::open_file(saved)?,
            () if weight_files(dir).is_empty() => return Ok(Self::default()),
            () => Checkpoint::open(dir)?,
        };
        for &(layer, experts) in layers {
            let name = name(layer);
            let tensor = files.get(&name).ok_or_else(|| {
                Error::data(format!("{}: tensor {name} is missing", dir.display()))
                    .hint("use all files of the model: its routers choose experts with these numbers")
            })?;
            if !matches!(tensor.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) || tensor.shape[..] != [experts] {
                return Err(Error::data(format!(
                    "{}: tensor {name} must have {experts} numbers of type F32, BF16 or F16 (got {:?} of {:?})",
                    dir.display(),
                    tensor.shape,
                    tensor.dtype
                )));
            }
            let mut values = vec![0.0; experts];
            stored(tensor.dtype, tensor.bytes)(0, &mut values);
            if values.iter().any(|x| !x.is_finite()) {
                return Err(Error::data(format!("{}: tensor {name} contains NaN or infinite values", dir.display())));
            }
            all.insert(name, values.into());
        }
        Ok(Self(all))
    }

    /// Those of a layer with `experts` experts: zeros if there are none.
    pub(super) fn of(&self, layer: usize, experts: usize) -> Arc<[f32]> {
        self.0.get(&name(layer)).cloned().unwrap_or_else(|| vec![0.0; experts].into())
    }

    /// The same with zeros for each of `layers` that has none.
    #[must_use]
    pub(super) fn with_zeros(mut self, layers: &[(usize, usize)]) -> Self {
        for &(layer, experts) in layers {
            self.0.entry(name(layer)).or_insert_with(|| vec![0.0; experts].into());
        }
        self
    }

    /// Each tensor's name and values, in the order of names.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (&str, &[f32])> {
        self.0.iter().map(|(name, values)| (&**name, &**values))
    }

    /// The contents of `FILE`; nothing if there are no corrections.
    ///
    /// # Errors
    /// `Fault` if they cannot be written as safetensors.
    pub fn to_file(&self) -> Result<Option<Vec<u8>>> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let view = |values| TensorView::new(Dtype::F32, vec![<[f32]>::len(values)], bytemuck::cast_slice(values));
        let views: Vec<_> = self
            .tensors()
            .map(|(name, values)| Ok((name, view(values)?)))
            .collect::<std::result::Result<_, safetensors::SafeTensorError>>()
            .map_err(|e| Error::fault(format!("corrections of routers: {e}")))?;
        let bytes = safetensors::serialize(views, None);
        bytes.map(Some).map_err(|e| Error::fault(format!("corrections of routers: {e}")))
    }
}
