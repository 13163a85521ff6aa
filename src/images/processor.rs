//! The settings of a model's image processor, and what they make of an image: patches for its vision tower.

use std::hash::Hasher;
use std::path::Path;

use serde_json::{Map, Value};
use twox_hash::XxHash3_64;

use super::decode::{PIXELS_MAX, Pixels, decode};
use super::resize::resize;
use crate::error::{Error, Result};
use crate::experience::Patches;
use crate::sys::files;

const OWN_FILE: &str = "preprocessor_config.json";
const SHARED_FILE: &str = "processor_config.json";
/// The largest ratio of an image's sides.
const RATIO_MAX: usize = 200;
/// The largest sizes of patches, in pixels, of blocks and of frames.
const SIZE_MAX: usize = 1024;
/// The classes whose arithmetic this is. They differ only in their libraries.
const CLASSES: [&str; 3] = ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil"];
/// Settings that must have one value.
const FIXED: [(&str, u64); 5] =
    [("do_convert_rgb", 1), ("do_normalize", 1), ("do_rescale", 1), ("do_resize", 1), ("resample", 3)];
/// Settings that must be off.
const OFF: [&str; 2] = ["do_center_crop", "do_pad"];
/// Settings without an effect on values: names, types of results, and sizes of steps that are off.
const WITHOUT_EFFECT: [&str; 11] = [
    "processor_class",
    "feature_extractor_type",
    "auto_map",
    "crop_size",
    "pad_size",
    "data_format",
    "input_data_format",
    "default_to_square",
    "device",
    "disable_grouping",
    "return_tensors",
];

/// The image processor of a model: Qwen2-VL's, which Qwen2.5-VL, Qwen3-VL and Qwen3.5 also use.
#[derive(Clone, Debug, PartialEq)]
pub struct Processor {
    /// The height and width of a patch, in pixels.
    pub patch: usize,
    /// Blocks of merge x merge patches become one token.
    pub merge: usize,
    /// The frames of a patch. A still image fills all.
    pub frames: usize,
    pixels_min: usize,
    pixels_max: usize,
    scale: f64,
    mean: [f64; 3],
    std: [f64; 3],
}

impl Default for Processor {
    /// The settings of the class.
    fn default() -> Self {
        Self {
            patch: 14,
            merge: 2,
            frames: 2,
            pixels_min: 56 * 56,
            pixels_max: 28 * 28 * 1280,
            scale: 1.0 / 255.0,
            mean: [0.48145466, 0.4578275, 0.40821073],
            std: [0.26862954, 0.26130258, 0.27577711],
        }
    }
}

impl Processor {
    /// The processor of a model directory, or `None` if it has no settings of one: `image_processor` of
    /// processor_config.json, otherwise preprocessor_config.json, as in `transformers`.
    ///
    /// # Errors
    /// `Data`, if a setting is wrong, or is one that this arithmetic does not have.
    pub fn find(dir: &Path) -> Result<Option<Self>> {
        let shared = files::read_object(&dir.join(SHARED_FILE))?;
        let nested = shared.as_ref().and_then(|shared| shared.get("image_processor"));
        if let Some(Value::Object(settings)) = nested {
            let path = dir.join(SHARED_FILE);
            return Self::from_settings(settings).map(Some).map_err(|e| e.within(path.display()));
        }
        let own = files::read_object(&dir.join(OWN_FILE))?;
        let own =
            own.map(|settings| Self::from_settings(&settings).map_err(|e| e.within(dir.join(OWN_FILE).display())));
        own.transpose()
    }

    fn from_settings(settings: &Map<String, Value>) -> Result<Self> {
        let mut found = Self::default();
        for (key, value) in settings.iter().filter(|(_, value)| !value.is_null()) {
            let wrong = |rule: &str| Error::data(format!("{key} must be {rule} (got {value})"));
            let count = |value: &Value| value.as_u64().filter(|n| *n > 0).map(|n| n as usize);
            let number = || count(value).ok_or_else(|| wrong("a positive number"));
            let small = || count(value).filter(|n| *n <= SIZE_MAX).ok_or_else(|| wrong("a number from 1 to 1024"));
            match key.as_str() {
                "patch_size" => found.patch = small()?,
                "merge_size" => found.merge = small()?,
                "temporal_patch_size" => found.frames = small()?,
                "rescale_factor" => found.scale = value.as_f64().ok_or_else(|| wrong("a number"))?,
                "image_mean" => found.mean = of_channels(value).ok_or_else(|| wrong("three numbers"))?,
                "image_std" => found.std = of_channels(value).ok_or_else(|| wrong("three numbers"))?,
                "min_pixels" | "max_pixels" => drop(number()?),
                "size" => {
                    let edges = ["shortest_edge", "longest_edge"].map(|key| value.get(key).and_then(count));
                    let ([Some(least), Some(most)], Some(2)) = (edges, value.as_object().map(Map::len)) else {
                        return Err(wrong("an object with shortest_edge and longest_edge"));
                    };
                    (found.pixels_min, found.pixels_max) = (least, most);
                }
                "image_processor_type" if value.as_str().is_some_and(|class| CLASSES.contains(&class)) => {}
                "image_processor_type" => return Err(wrong(&format!("one of {}", CLASSES.join(", ")))),
                key if OFF.contains(&key) => {
                    if value != &Value::Bool(false) {
                        return Err(wrong("false"));
                    }
                }
                key if WITHOUT_EFFECT.contains(&key) => {}
                key => match FIXED.iter().find(|(fixed, _)| *fixed == key) {
                    Some((_, 1)) if value == &Value::Bool(true) => {}
                    Some((_, n)) if value.as_u64() == Some(*n) => {}
                    Some((_, 1)) => return Err(wrong("true")),
                    Some((_, n)) => return Err(wrong(&n.to_string())),
                    None => {
                        return Err(Error::data(format!(
                            "{key} (= {value}) is not a setting of {}, which is computed here",
                            CLASSES[0]
                        )));
                    }
                },
            }
        }
        found.limited(settings)
    }

    /// Applies `min_pixels` and `max_pixels`, the older names, which count more than `size`.
    fn limited(mut self, settings: &Map<String, Value>) -> Result<Self> {
        let pixels = |key: &str| settings.get(key).and_then(Value::as_u64).map(|n| n as usize);
        self.pixels_min = pixels("min_pixels").unwrap_or(self.pixels_min);
        self.pixels_max = pixels("max_pixels").unwrap_or(self.pixels_max);
        let Self { pixels_min, pixels_max, patch, merge, .. } = self;
        if pixels_min > pixels_max {
            return Err(Error::data(format!(
                "the least pixels ({pixels_min}) must not exceed the most ({pixels_max})"
            )));
        }
        let token = (patch * merge).pow(2);
        if token > pixels_max || pixels_min as u64 > PIXELS_MAX {
            return Err(Error::data(format!(
                "an image of {pixels_min} to {pixels_max} pixels must have at least the {token} of a token, and at most \
                 {PIXELS_MAX}"
            )));
        }
        Ok(self)
    }

    /// Compares the settings with the sizes of the model's tower: `vision_config` of its config.json.
    pub fn check(&self, vision: &Map<String, Value>) -> Result<()> {
        let own =
            [("patch_size", self.patch), ("spatial_merge_size", self.merge), ("temporal_patch_size", self.frames)];
        for (key, ours) in own {
            let theirs = vision.get(key).and_then(Value::as_u64);
            if theirs.is_some_and(|theirs| theirs != ours as u64) {
                return Err(Error::data(format!(
                    "{key} of vision_config in config.json is {}, but the image processor has {ours}",
                    theirs.unwrap_or(0)
                )));
            }
        }
        Ok(())
    }

    /// The height and width that an image of `height` x `width` pixels is resized to: multiples of merge x patch, with
    /// almost the same ratio, and the least change for which the number of pixels is within the limits.
    ///
    /// # Errors
    /// `Data`, if one side is more than 200 times the other.
    pub fn size(&self, height: usize, width: usize) -> Result<(usize, usize)> {
        let (long, short) = (height.max(width), height.min(width));
        if short == 0 || long > RATIO_MAX * short {
            return Err(Error::data(format!(
                "one side of the image may be at most {RATIO_MAX} times the other (got {height} x {width} pixels)"
            )));
        }
        let unit = self.patch * self.merge;
        let multiple = |n: f64| n as usize * unit;
        let nearest = |side: usize| multiple((side as f64 / unit as f64).round_ties_even());
        let resized = (nearest(height), nearest(width));
        let pixels = resized.0 * resized.1;
        let all = height as f64 * width as f64;
        if pixels > self.pixels_max {
            let beta = (all / self.pixels_max as f64).sqrt();
            let floor = |side: usize| multiple((side as f64 / beta / unit as f64).floor()).max(unit);
            return Ok((floor(height), floor(width)));
        }
        if pixels < self.pixels_min {
            let beta = (self.pixels_min as f64 / all).sqrt();
            let ceil = |side: usize| multiple((side as f64 * beta / unit as f64).ceil());
            return Ok((ceil(height), ceil(width)));
        }
        Ok(resized)
    }

    /// The patches of an image in a JPEG or PNG file.
    ///
    /// # Errors
    /// `Data`, if the file cannot be decoded, or if the image is too large or too narrow.
    pub fn patches(&self, file: &[u8]) -> Result<Patches> {
        let image = self.resized(file)?;
        Ok(Patches { values: self.cut(&image), ..self.measured(&image) })
    }

    /// The same without values. Errors are those of `patches`.
    pub fn measure(&self, file: &[u8]) -> Result<Patches> {
        Ok(self.measured(&self.resized(file)?))
    }

    fn resized(&self, file: &[u8]) -> Result<Pixels> {
        let image = decode(file)?;
        let (height, width) = self.size(image.height, image.width)?;
        Ok(resize(image, height, width))
    }

    fn measured(&self, image: &Pixels) -> Patches {
        let grid = [1, image.height / self.patch, image.width / self.patch];
        Patches { grid, values: Vec::new(), hash: self.hash(image) }
    }

    /// The number of tokens that a model sees of an image with this grid of patches.
    pub fn image_tokens(&self, grid: [usize; 3]) -> usize {
        grid.iter().product::<usize>() / (self.merge * self.merge)
    }

    /// Normalizes pixels, (x scale - mean) / std, and cuts them into patches.
    fn cut(&self, image: &Pixels) -> Vec<f32> {
        let Self { patch, merge, frames, scale, mean, std, .. } = *self;
        let (rows, columns) = (image.height / patch, image.width / patch);
        let normal = |c: usize| (0..256).map(move |x| ((f64::from(x) * scale - mean[c]) / std[c]) as f32);
        let normal: [Vec<f32>; 3] = std::array::from_fn(|c| normal(c).collect());
        let mut values = Vec::with_capacity(image.rgb.len() * frames);
        let blocks = |patches: usize| (0..patches).step_by(merge);
        for (block_y, block_x) in blocks(rows).flat_map(|y| blocks(columns).map(move |x| (y, x))) {
            for (y, x) in (0..merge).flat_map(|y| (0..merge).map(move |x| (block_y + y, block_x + x))) {
                for (c, normal) in normal.iter().enumerate() {
                    for row in (0..frames).flat_map(|_| y * patch..(y + 1) * patch) {
                        let first = (row * image.width + x * patch) * 3;
                        let pixels = image.rgb[first..first + patch * 3].chunks_exact(3);
                        values.extend(pixels.map(|pixel| normal[usize::from(pixel[c])]));
                    }
                }
            }
        }
        values
    }

    fn hash(&self, image: &Pixels) -> u64 {
        let mut hasher = XxHash3_64::new();
        let sizes = [self.patch, self.merge, self.frames, image.height, image.width];
        for n in sizes {
            hasher.write(&(n as u64).to_le_bytes());
        }
        for x in [self.scale].into_iter().chain(self.mean).chain(self.std) {
            hasher.write(&x.to_le_bytes());
        }
        hasher.write(&image.rgb);
        hasher.finish()
    }
}

fn of_channels(value: &Value) -> Option<[f64; 3]> {
    let numbers: Option<Vec<f64>> = value.as_array()?.iter().map(Value::as_f64).collect();
    numbers?.try_into().ok()
}
