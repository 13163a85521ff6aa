//! Points in which the advantages of other systems differ from those of a job.

use serde::{Deserialize, Serialize};

/// Points in which other systems differ from the defaults here. A job has the defaults; `replay --batch` sets them as the
/// batch of another system says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Details {
    /// Added to the standard deviation of a group before the division by it.
    pub group_epsilon: f64,
    pub group_std: GroupStd,
    pub whitening: Whitening,
}

impl Default for Details {
    fn default() -> Self {
        Self { group_epsilon: 1e-9, group_std: GroupStd::Sample, whitening: Whitening::ByEstimator }
    }
}

/// The standard deviation that divides the scores of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupStd {
    /// Unbiased, of the group.
    Sample,
    /// That of the population, which is the group.
    Population,
    /// Unbiased, of the scores of all groups.
    Batch,
}

/// The whitening of advantages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Whitening {
    /// With the population deviation if the estimator has it.
    ByEstimator,
    None,
    Population,
    /// With the unbiased deviation.
    Sample,
}
