//! Tokens of a micro-batch in a job: a number, or `"auto"`, which the plan replaces before the job begins.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// `"auto"`: as many as fit.
pub const AUTO: usize = usize::MAX;

pub fn serialize<S: Serializer>(tokens: &usize, to: S) -> Result<S::Ok, S::Error> {
    if *tokens == AUTO { "auto".serialize(to) } else { tokens.serialize(to) }
}

pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<usize, D::Error> {
    match toml::Value::deserialize(from)? {
        toml::Value::String(word) if word == "auto" => Ok(AUTO),
        toml::Value::Integer(tokens @ 0..) => Ok(tokens as usize),
        other => Err(D::Error::custom(format!("invalid value: {other}, expected \"auto\" or a whole number"))),
    }
}
