//! Matrices in FP8 in the files of a model, as DeepSeek-V3 publishes them (arXiv:2412.19437, section 3.3): codes e4m3
//! (arXiv:2209.05433) in `X.weight`, and in `X.weight_scale_inv` the factor of each block of 128 x 128 values, or one of the
//! whole matrix. A weight is code times factor, in f32. They are read, never written.

use super::config_json::Reader;
use super::decode::stored;
use super::files::{Checkpoint, Stored};
use crate::device::cpu::kv_codes;
use crate::error::{Error, Result};
use safetensors::Dtype;
use std::sync::LazyLock;

/// Rows and columns of a block.
const BLOCK: usize = 128;

/// The ends of the names of factors: those of weights, and those of activations, which are not needed.
const SCALE: &str = "_scale_inv";
const OF_ACTIVATIONS: &str = ".activation_scale";

/// The values of all codes. The largest code is NaN.
static VALUES: LazyLock<[f32; 256]> = LazyLock::new(|| {
    std::array::from_fn(|code| if code % 128 == 127 { f32::NAN } else { kv_codes::value(code as u8) })
});

/// Rejects sizes of blocks that are not read, in the quantization_config of FP8.
///
/// # Errors
/// `Data`.
pub(super) fn check_config(quantization: &Reader) -> Result<()> {
    const KEY: &str = "weight_block_size";
    match quantization.get(KEY) {
        Some(size) if *size != serde_json::json!([BLOCK, BLOCK]) => {
            Err(quantization.wrong(KEY, &format!("must be [{BLOCK}, {BLOCK}] or null (got {size})")))
        }
        _ => Ok(()),
    }
}

/// The matrix in FP8 to which a tensor of factors belongs.
pub(super) fn matrix_of(factors: &str) -> Option<String> {
    let of_activations = || Some(format!("{}.weight", factors.strip_suffix(OF_ACTIVATIONS)?));
    factors.strip_suffix(SCALE).map(str::to_owned).or_else(of_activations)
}

/// A matrix in FP8.
pub(super) struct Fp8<'a> {
    codes: &'a [u8],
    columns: usize,
    /// The factors of blocks, and how many a row of blocks has. One factor: that of all values.
    factors: Vec<f32>,
    across: usize,
}

impl<'a> Fp8<'a> {
    /// The tensor `name`, if it is in FP8.
    ///
    /// # Errors
    /// `Data`, naming the file and tensor: a tensor that is no matrix, and factors that are missing, of another shape or
    /// type, or not finite.
    pub fn open(checkpoint: &'a Checkpoint, name: &str) -> Result<Option<Self>> {
        let Some(Stored { dtype: Dtype::F8_E4M3, shape, bytes, path, .. }) = checkpoint.get(name) else {
            return Ok(None);
        };
        let wrong = |what: String| Error::data(format!("{}: tensor {name}{what}", path.display()));
        let [rows, columns] = shape[..] else {
            return Err(wrong(format!(" of type F8_E4M3 must be a matrix (got {shape:?})"))
                .hint("use files with one tensor for each matrix, or a model that is not quantized"));
        };
        let factors = checkpoint.get(&format!("{name}{SCALE}")).ok_or_else(|| wrong(format!("{SCALE} is missing")))?;
        let blocks = [rows.div_ceil(BLOCK), columns.div_ceil(BLOCK)];
        let is_one = factors.shape.iter().product::<usize>() == 1;
        let is_float = matches!(factors.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16);
        if !is_float || !(is_one || factors.shape[..] == blocks) {
            let (dtype, shape) = (factors.dtype, &factors.shape);
            return Err(wrong(format!(
                "{SCALE} must have one F32, or one for each block: {blocks:?} (got {dtype:?} of {shape:?})"
            )));
        }
        let mut values = vec![0.0; factors.shape.iter().product()];
        stored(factors.dtype, factors.bytes)(0, &mut values);
        if values.iter().any(|x| !x.is_finite()) {
            return Err(wrong(format!("{SCALE} contains NaN or infinite values")));
        }
        Ok(Some(Self { codes: bytes, columns, factors: values, across: blocks[1] }))
    }

    /// Fills `out` with row-major values from element `start` on.
    pub fn read(&self, start: usize, out: &mut [f32]) {
        let (mut at, mut rest) = (start, out);
        while !rest.is_empty() {
            let (row, column) = (at / self.columns, at % self.columns);
            let block_end = (column / BLOCK * BLOCK + BLOCK).min(self.columns);
            let (run, after) = rest.split_at_mut((block_end - column).min(rest.len()));
            let factor = match self.factors[..] {
                [one] => one,
                ref factors => factors[row / BLOCK * self.across + column / BLOCK],
            };
            let codes = &self.codes[at..at + run.len()];
            run.iter_mut().zip(codes).for_each(|(x, code)| *x = VALUES[*code as usize] * factor);
            at += run.len();
            rest = after;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_of_the_format() {
        let value = |code: usize| VALUES[code];
        assert_eq!([0x00, 0x01, 0x08, 0x38, 0x7e].map(value), [0.0, 0.001_953_125, 0.015_625, 1.0, 448.0]);
        assert_eq!([0x81, 0xb8, 0xfe].map(value), [-0.001_953_125, -1.0, -448.0]);
        assert!(value(0x7f).is_nan() && value(0xff).is_nan());
    }
}
