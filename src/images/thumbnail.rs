//! Small images for records of samples.

use libjpeg_turbo_rs::{PixelFormat, Subsampling, compress};

use super::decode::decode;
use super::resize::resize;
use crate::error::{Error, Result};

/// The longer side of a small image, in pixels, at least.
const SIDE: usize = 160;
const QUALITY: u8 = 80;

/// A JPEG or PNG file as a small JPEG file.
///
/// # Errors
/// `Data`, if it cannot be decoded.
pub fn thumbnail(file: &[u8]) -> Result<Vec<u8>> {
    let image = decode(file)?;
    let long = image.height.max(image.width).max(SIDE);
    let [height, width] = [image.height, image.width].map(|side| (side * SIDE / long).max(1));
    let small = resize(image, height, width);
    compress(&small.rgb, width, height, PixelFormat::Rgb, QUALITY, Subsampling::S420)
        .map_err(|e| Error::fault(format!("cannot encode a small image: {e}")))
}
