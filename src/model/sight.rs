//! The vision tower of an architecture: whether it has one, and whether the parameter table has it.

use super::arch::Arch;
use super::params::ParamTable;
use super::part::TensorPart;
use super::tower::Tower;
use super::vision_spec::{Sight, VisionSpec};
use super::wrapper::Wrapper;
use crate::device::Device;
use crate::error::{Error, Result};
use std::sync::Arc;

impl Arch {
    /// Rejects rows with images for a model that cannot read them, or on a GPU.
    ///
    /// # Errors
    /// The errors of `need_sight`; `Usage` on a GPU.
    pub fn check_images(&self, is_on_gpu: bool) -> Result<()> {
        if is_on_gpu {
            return Err(Error::usage("images are not supported on GPUs").hint("set job.device = \"cpu\""));
        }
        self.need_sight().map(drop)
    }

    /// The tower that images need.
    ///
    /// # Errors
    /// `Data` if the model has none that is known, or its config.json is wrong.
    pub fn need_sight(&self) -> Result<&Sight> {
        if let Some(sight) = &self.sight {
            return Ok(sight);
        }
        if let Some(wrapper) = &self.wrapper {
            VisionSpec::read(wrapper, self.width, self.blocks.len())?;
        }
        let kind = self.wrapper.as_ref().map_or(self.family.name, Wrapper::name);
        Err(Error::data(format!("model_type \"{kind}\" cannot read images here"))
            .hint("use a model of Qwen2.5-VL, Qwen3-VL or Qwen3.5"))
    }

    /// The number of parameters of its tower, if it has one that is known.
    pub fn tower_parameters(&self) -> Option<usize> {
        let spec = &self.sight.as_ref()?.spec;
        let mut table = ParamTable::empty(Device::Cpu, self.head, TensorPart::whole(), spec.init_std);
        Tower::declare(&mut table, spec);
        Some(table.parameters())
    }

    /// The architecture with its tower in the parameter table, so that it can train.
    ///
    /// # Errors
    /// The errors of `need_sight`.
    pub fn with_tower(self) -> Result<Self> {
        let spec = self.need_sight()?.spec.clone();
        Ok(self.with_tower_in_table(&spec))
    }

    /// The same with a tower that is known.
    pub(super) fn with_tower_in_table(self, spec: &Arc<VisionSpec>) -> Self {
        Self { sight: Some(Sight { spec: spec.clone(), trains: true, is_used: true }), ..self }
    }

    /// Whether exports keep the tower.
    pub fn uses_tower(&self) -> bool {
        self.sight.as_ref().is_some_and(|sight| sight.is_used)
    }

    /// Lets exports keep the tower, because rows have images.
    pub fn use_tower(&mut self) {
        if let Some(sight) = &mut self.sight {
            sight.is_used = true;
        }
    }
}
