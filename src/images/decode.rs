//! Decoding of JPEG and PNG files, with limits that are checked before memory is allocated.
//!
//! A JPEG file does not say which pixels it means exactly. Processors see those of libjpeg-turbo, with its exact inverse
//! DCT and smooth interpolation of colors. Of 636 files (4:4:4, 4:2:2, 4:2:0, gray and plain RGB; baseline and
//! progressive; restarts; 1 x 1 to 640 x 480 pixels), `libjpeg-turbo-rs` and `mozjpeg` decode each to the same bits as
//! Pillow. `zune-jpeg` is up to 42 of 255 away, and `jpeg-decoder` 35. The first is written in Rust.

use std::io::Cursor;

use image::codecs::png::PngDecoder;
use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageError, Limits, RgbImage};
use libjpeg_turbo_rs::{DecodeLimits, Decoder as JpegDecoder, JpegError, PixelFormat};

use crate::error::{Error, Result, format_bytes};

/// The maximum number of pixels of an image before it is resized, as in Pillow, where more count as an attack.
pub(super) const PIXELS_MAX: u64 = (1 << 30) / 4 / 3;
/// The maximum size of an image file.
pub const FILE_BYTES_MAX: usize = 64 << 20;
/// The maximum memory of a decoder.
const DECODER_BYTES_MAX: u64 = 1 << 30;

const PNG: &[u8] = b"\x89PNG\r\n\x1a\n";
const JPEG: &[u8] = b"\xff\xd8\xff";

/// An image of 8-bit red, green and blue values, row by row (h w 3).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Pixels {
    pub height: usize,
    pub width: usize,
    pub rgb: Vec<u8>,
}

/// Decodes a JPEG or PNG file and turns it as its EXIF data says. Alpha is dropped. All as `convert("RGB")` of Pillow.
///
/// # Errors
/// `Data` for other formats, animated images, CMYK, 16-bit gray, truncated files, and images that are too large.
pub(super) fn decode(file: &[u8]) -> Result<Pixels> {
    if file.len() > FILE_BYTES_MAX {
        return Err(too_large(&format_bytes(file.len() as u64), &format_bytes(FILE_BYTES_MAX as u64)));
    }
    if file.starts_with(PNG) {
        let wrong = |e: ImageError| damaged(&e);
        let mut limits = Limits::no_limits();
        limits.max_alloc = Some(DECODER_BYTES_MAX);
        if file.get(24) == Some(&16) && file.get(25) == Some(&0) {
            return Err(refused("has 16-bit gray values").hint("convert it to 8 bits per value"));
        }
        check_size(be32(file, 16).unwrap_or(0), be32(file, 20).unwrap_or(0))?;
        let decoder = PngDecoder::with_limits(Cursor::new(file), limits).map_err(wrong)?;
        if decoder.is_apng().map_err(wrong)? {
            return Err(animated("PNG"));
        }
        return png(decoder);
    }
    if file.starts_with(JPEG) {
        check_jpeg(file)?;
        return jpeg(file);
    }
    Err(foreign(file))
}

fn check_size(width: u32, height: u32) -> Result<()> {
    if u64::from(width) * u64::from(height) <= PIXELS_MAX {
        return Ok(());
    }
    Err(too_large(&format!("{width} x {height} pixels"), &format!("{PIXELS_MAX} pixels")))
}

fn jpeg(file: &[u8]) -> Result<Pixels> {
    let wrong = |e: JpegError| match e {
        JpegError::LimitExceeded { .. } | JpegError::AllocationFailed { .. } => needs_memory(),
        JpegError::Unsupported(what) => refused(&format!("cannot be decoded: {what}")),
        other => truncated(&format!(": {other}")),
    };
    let limits = DecodeLimits { max_memory: Some(DECODER_BYTES_MAX), ..DecodeLimits::default() };
    let mut decoder = JpegDecoder::new_with_limits(file, limits).map_err(wrong)?;
    check_size(decoder.header().width.into(), decoder.header().height.into())?;
    decoder.set_output_format(PixelFormat::Rgb);
    // Of files whose last details are missing, as in libjpeg.
    decoder.set_block_smoothing(true);
    let orientation = decoder.exif_orientation().and_then(Orientation::from_exif);
    let image = decoder.decode_image().map_err(wrong)?;
    let image = RgbImage::from_raw(image.width as u32, image.height as u32, image.data);
    let image = image.ok_or_else(|| truncated(": pixels are missing"))?;
    turned(DynamicImage::ImageRgb8(image), orientation)
}

fn png(mut decoder: impl ImageDecoder) -> Result<Pixels> {
    let orientation = decoder.orientation().ok();
    turned(DynamicImage::from_decoder(decoder).map_err(|e| damaged(&e))?, orientation)
}

/// An image in its orientation. An unreadable one counts as none, as in Pillow.
fn turned(mut image: DynamicImage, orientation: Option<Orientation>) -> Result<Pixels> {
    image.apply_orientation(orientation.unwrap_or(Orientation::NoTransforms));
    let (width, height) = (image.width() as usize, image.height() as usize);
    // Pillow keeps the upper 8 bits of 16.
    let upper = |all: Vec<u16>| all.into_iter().map(|value| (value >> 8) as u8).collect::<Vec<_>>();
    let (values, channels) = match image {
        DynamicImage::ImageLuma8(image) => (image.into_raw(), 1),
        DynamicImage::ImageLumaA8(image) => (image.into_raw(), 2),
        DynamicImage::ImageRgb8(image) => (image.into_raw(), 3),
        DynamicImage::ImageRgba8(image) => (image.into_raw(), 4),
        DynamicImage::ImageLumaA16(image) => (upper(image.into_raw()), 2),
        DynamicImage::ImageRgb16(image) => (upper(image.into_raw()), 3),
        DynamicImage::ImageRgba16(image) => (upper(image.into_raw()), 4),
        other => return Err(refused(&format!("has values of the type {:?}", other.color()))),
    };
    let rgb = match channels {
        3 => values,
        4 => values.chunks_exact(4).flat_map(|value| [value[0], value[1], value[2]]).collect(),
        _ => values.chunks_exact(channels).flat_map(|value| [value[0]; 3]).collect(),
    };
    Ok(Pixels { height, width, rgb })
}

/// Rejects CMYK and truncated files, which the decoder would convert and complete.
fn check_jpeg(file: &[u8]) -> Result<()> {
    let mut at = 2;
    loop {
        let Some(&[0xff, marker]) = file.get(at..at + 2) else { return Err(truncated("")) };
        // 0xff fills, and these markers have no segment.
        if marker == 0xff || marker == 0x01 || (0xd0..=0xd7).contains(&marker) {
            at += if marker == 0xff { 1 } else { 2 };
            continue;
        }
        let Some(&[high, low]) = file.get(at + 2..at + 4) else { return Err(truncated("")) };
        let end = at + 2 + usize::from(u16::from_be_bytes([high, low]));
        let is_frame = (0xc0..=0xcf).contains(&marker) && ![0xc4, 0xc8, 0xcc].contains(&marker);
        if is_frame && file.get(at + 9) == Some(&4) {
            return Err(refused("has CMYK values").hint("convert it to RGB"));
        }
        if marker == 0xda {
            // Compressed data has no end marker inside.
            let has_end = file.get(end..).is_some_and(|data| data.windows(2).any(|pair| pair == [0xff, 0xd9]));
            return if has_end { Ok(()) } else { Err(truncated("")) };
        }
        at = end;
    }
}

fn be32(file: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(file.get(at..at + 4)?.try_into().ok()?))
}

fn refused(what: &str) -> Error {
    Error::data(format!("the image {what}"))
}

fn too_large(found: &str, most: &str) -> Error {
    refused(&format!("is too large ({found}; at most {most})")).hint("make it smaller: models see fewer pixels anyway")
}

fn needs_memory() -> Error {
    refused("needs too much memory to be decoded")
}

fn truncated(how: &str) -> Error {
    refused(&format!("is truncated or damaged{how}")).hint("copy the file again")
}

fn damaged(error: &ImageError) -> Error {
    match error {
        ImageError::Limits(_) => needs_memory(),
        ImageError::Unsupported(e) => refused(&format!("cannot be decoded: {e}")),
        // The decoder's text for a missing part depends on where the file ends.
        other => truncated(&format!(": {other}")),
    }
}

fn animated(format: &str) -> Error {
    refused(&format!("is an animated {format}; only still images are read")).hint("save one frame as PNG")
}

/// The error for a file that is neither JPEG nor PNG, by the name of its format.
fn foreign(file: &[u8]) -> Error {
    let is = |at: usize, magic: &[u8]| file.get(at..at + magic.len()) == Some(magic);
    let hint = "convert it to PNG or JPEG";
    let format = match () {
        () if file.is_empty() => return refused("is empty"),
        () if is(0, b"GIF8") => return refused("is a GIF, which may be animated").hint(hint),
        () if is(0, b"RIFF")
            && is(8, b"WEBP")
            && is(12, b"VP8X")
            && file.get(20).is_some_and(|flags| flags & 2 > 0) =>
        {
            return animated("WebP");
        }
        () if is(0, b"RIFF") && is(8, b"WEBP") => "a WebP",
        () if is(0, b"BM") => "a BMP",
        () if is(0, b"II*\0") || is(0, b"MM\0*") => "a TIFF",
        () if is(4, b"ftypavi") => "an AVIF",
        () if is(4, b"ftyphei") || is(4, b"ftypmif") => "a HEIC",
        () if is(4, b"ftyp") => return refused("is a video; videos are not supported"),
        () if is(0, b"%PDF") => "a PDF",
        () if is(0, b"<svg") || is(0, b"<?xml") => "an SVG",
        () => return refused("is neither JPEG nor PNG").hint(hint),
    };
    refused(&format!("is {format}; JPEG and PNG are read")).hint(hint)
}
