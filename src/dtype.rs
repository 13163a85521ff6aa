//! Element types of tensors.

use argh::FromArgValue;
use serde::{Deserialize, Serialize};

/// The dtype of weights, and of cached keys and values. Activations and gradients are f32 on the CPU, and bf16 on GPUs
/// except for sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromArgValue, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    #[default]
    F32,
    Bf16,
}

/// The dtype of cached keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    /// That of weights.
    #[default]
    #[serde(alias = "auto")]
    Model,
    /// 8 bits, with a power of two for each token and head (`device::cpu::kv_codes`).
    Fp8,
}

/// The bits of the nearest bf16, ties to even; NaN stays NaN.
#[inline]
pub fn round_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16) as u16;
    if x.is_nan() { (bits >> 16) as u16 | 0x40 } else { rounded }
}

impl DType {
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}
