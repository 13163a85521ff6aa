//! The tokens of a micro-batch in a job: a number, or `"auto"`, which the plan replaces before the job begins.

use super::mesh::Auto;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The value of `"auto"`: as many as fit.
pub const AUTO: usize = usize::MAX;

pub fn serialize<S: Serializer>(tokens: &usize, to: S) -> Result<S::Ok, S::Error> {
    if *tokens == AUTO { "auto".serialize(to) } else { tokens.serialize(to) }
}

pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<usize, D::Error> {
    Auto::deserialize(from).map(|tokens| if let Auto::Is(tokens) = tokens { tokens } else { AUTO })
}
