//! Matrices of experts in MXFP4 (OCP Microscaling Formats 1.0), as in the files of gpt-oss. They are read, and never
//! written.
//!
//! | tensor | contents |
//! |---|---|
//! | X_blocks | U8 (experts, rows, groups, 16): the codes of 32 values of a row, two in a byte, the lower half first |
//! | X_scales | U8 (experts, rows, groups): the exponent of a group |
//!
//! A value is `TABLE[code] 2^(scale - 127)`, which bf16 holds exactly. Its row is an output of the matrix.

use super::bitsandbytes::QUANTIZATION;
use super::expert_files::ExpertForm;
use super::families::Family;
use super::file_rows::FileRows;
use super::files::{Checkpoint, Stored};
use crate::error::{Error, Result};
use safetensors::Dtype;
use serde_json::{Map, Value};
use std::path::Path;

/// The values of a group, and their bytes.
const GROUP: usize = 32;
const BYTES: usize = GROUP / 2;
const BLOCKS: &str = "_blocks";
const SCALES: &str = "_scales";
/// The values of the codes.
const TABLE: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Whether config.json says that experts are in MXFP4, in a family whose files may have them so.
pub(super) fn is_set(config: &Map<String, Value>, family: &Family) -> bool {
    let method = config.get(QUANTIZATION).and_then(|of| of.get("quant_method"));
    family.files.experts == ExpertForm::Columns && method.is_some_and(|method| method == "mxfp4")
}

/// The parameter to which a tensor of this name belongs.
pub(super) fn matrix_of(name: &str) -> Option<&str> {
    name.strip_suffix(BLOCKS).or_else(|| name.strip_suffix(SCALES))
}

/// The matrices of all experts in one tensor.
pub(super) struct Mxfp4<'a> {
    path: &'a Path,
    blocks: &'a [u8],
    scales: &'a [u8],
}

impl<'a> Mxfp4<'a> {
    /// The tensor `name`, if the files have it in this form.
    pub(super) fn find(checkpoint: &'a Checkpoint, name: &str) -> Option<Self> {
        let [blocks, scales] = [BLOCKS, SCALES].map(|part| checkpoint.get(&format!("{name}{part}")));
        let (blocks, scales) = (blocks?, scales?);
        Some(Self { path: blocks.path, blocks: blocks.bytes, scales: scales.bytes })
    }

    /// Whether the files have the tensor of a parameter in this form. `file` is its place, and `width` the length of a row.
    ///
    /// # Errors
    /// `Data`, naming the file and tensor: a missing part, another type, or other sizes.
    pub(super) fn check(checkpoint: &Checkpoint, file: &FileRows, width: usize) -> Result<bool> {
        let (name, Some(experts)) = (&file.tensor, file.matrices.filter(|_| file.is_transposed)) else {
            return Ok(false);
        };
        let [blocks, scales] = [BLOCKS, SCALES].map(|part| format!("{name}{part}"));
        let (found, rows) = ([&blocks, &scales].map(|name| checkpoint.get(name)), file.matrix_rows());
        let (blocks, scales) = match found {
            [None, None] => return Ok(false),
            [Some(found), None] => return Err(damaged(&found, &blocks, &format!("needs {scales}, which is missing"))),
            [None, Some(found)] => return Err(damaged(&found, &scales, &format!("needs {blocks}, which is missing"))),
            [Some(found), Some(other)] => ((found, blocks), (other, scales)),
        };
        if !width.is_multiple_of(GROUP) {
            let what = format!("has rows of {width} values in config.json, which must be a multiple of {GROUP}");
            return Err(damaged(&blocks.0, &blocks.1, &what));
        }
        let groups = width / GROUP;
        for ((found, name), shape) in
            [(blocks, &[experts, rows, groups, BYTES][..]), (scales, &[experts, rows, groups])]
        {
            if (found.dtype, found.shape) != (Dtype::U8, shape) {
                let what = format!("must be U8 of shape {shape:?} (got {:?} of shape {:?})", found.dtype, found.shape);
                return Err(damaged(&found, &name, &what));
            }
        }
        Ok(true)
    }

    /// The file with the codes.
    pub(super) fn path(&self) -> &'a Path {
        self.path
    }

    /// Fills `out` with values from `start` on: row by row, matrix by matrix. A scale of 255 means NaN.
    pub(super) fn read(&self, start: usize, out: &mut [f32]) {
        for (i, x) in (start..).zip(out) {
            let byte = self.blocks[i / 2];
            *x = TABLE[usize::from(if i % 2 == 0 { byte & 15 } else { byte >> 4 })] * power(self.scales[i / GROUP]);
        }
    }
}

/// 2^(scale - 127)
fn power(scale: u8) -> f32 {
    match scale {
        // The only one below the normal numbers.
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        scale => f32::from_bits(u32::from(scale) << 23),
    }
}

fn damaged(stored: &Stored, name: &str, what: &str) -> Error {
    Error::data(format!("{}: tensor {name} {what}", stored.path.display()))
        .hint("copy or download the model again, with the config.json that belongs to these weights")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_read_from_the_lower_half_of_a_byte_on_and_scaled_by_their_group() {
        let mut blocks = vec![0; 2 * BYTES];
        (blocks[0], blocks[15], blocks[16]) = (0x71, 0xf0, 0x93);
        let found = Mxfp4 { path: Path::new("x"), blocks: &blocks, scales: &[127, 129] };
        let mut all = [f32::NAN; 2 * GROUP];
        found.read(0, &mut all);
        assert_eq!((all[0], all[1], all[30], all[31]), (0.5, 6.0, 0.0, -6.0));
        assert_eq!((all[32], all[33]), (6.0, -2.0));
        let mut part = [0.0; 3];
        found.read(31, &mut part);
        assert_eq!(part, all[31..34]);
        assert_eq!((power(0), power(1), power(254)), (2.0f32.powi(-127), f32::MIN_POSITIVE, 2.0f32.powi(127)));
        assert!(power(255).is_nan());
        assert_eq!(TABLE[9] * power(0) * 2.0f32.powi(126), -0.25, "smaller numbers are kept, too");
    }
}
