//! `adapters.json`: how large each adapter is relative to its matrix, at the last step that measured it.

use super::keys::{self, Metrics};
use crate::config::mesh::RoleName;
use crate::error::{Error, Result};
use crate::sys::files;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// ||s B A||_F / ||W||_F of the adapters of a job.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AdapterRatios {
    pub step: u64,
    pub roles: Vec<RoleRatios>,
}

/// The adapters of one model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RoleRatios {
    pub role: String,
    pub matrices: Vec<MatrixRatio>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MatrixRatio {
    pub name: String,
    pub ratio: f64,
}

impl RoleRatios {
    /// The matrices, the one with the largest ratio first.
    pub fn by_ratio(&self) -> Vec<&MatrixRatio> {
        let mut all: Vec<&MatrixRatio> = self.matrices.iter().collect();
        all.sort_by(|a, b| b.ratio.total_cmp(&a.ratio));
        all
    }

    /// The keys of the model with their values.
    fn metrics(&self) -> [(String, f64); 2] {
        let [mean, most] = if self.role == RoleName::Critic.name() {
            [keys::ADAPTER_NORM_RATIO_CRITIC_MEAN, keys::ADAPTER_NORM_RATIO_CRITIC_MAX]
        } else {
            [keys::ADAPTER_NORM_RATIO_MEAN, keys::ADAPTER_NORM_RATIO_MAX]
        };
        let ratios = || self.matrices.iter().map(|matrix| matrix.ratio);
        let values = [(mean, ratios().sum::<f64>() / self.matrices.len() as f64), (most, ratios().fold(0.0, f64::max))];
        values.map(|(key, value)| (key.to_string(), value))
    }
}

impl AdapterRatios {
    fn path(run_dir: &Path) -> PathBuf {
        run_dir.join("adapters.json")
    }

    /// The ratios of a run, if it has adapters.
    pub fn read(run_dir: &Path) -> Result<Option<Self>> {
        let path = Self::path(run_dir);
        let malformed = |e: serde_json::Error| Error::data(format!("{}: {e}", path.display()));
        let bytes = files::if_any(&path, files::read)?;
        bytes.map(|bytes| serde_json::from_slice(&bytes).map_err(malformed)).transpose()
    }

    pub fn write(&self, run_dir: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).map_err(|e| Error::fault(format!("adapters: {e}")))?;
        files::write_atomic(&Self::path(run_dir), format!("{text}\n").as_bytes())
    }

    /// Mean and maximum over the adapters of each model.
    pub fn metrics(&self) -> Metrics {
        self.roles.iter().flat_map(RoleRatios::metrics).collect()
    }
}
