//! Images: from JPEG and PNG files to the patches that a vision tower reads, and to the tokens of a text.

mod decode;
mod processor;
mod resize;
mod thumbnail;

pub use decode::FILE_BYTES_MAX;
pub use processor::Processor;
pub use thumbnail::thumbnail;

use crate::error::{Error, Result};
use crate::experience::{Image, Patches};
use crate::sys::files;
use serde_json::{Map, Value};
use std::path::Path;

/// Keys of config.json that name the tokens around and for images and videos. A model never samples them, because
/// the image would be missing.
const TOKEN_KEYS: [&str; 5] =
    ["image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id"];

/// The images of a model: its processor, and its tokens for them.
#[derive(Clone, Debug, PartialEq)]
pub struct Images {
    pub processor: Processor,
    /// The token of which a chat template prints one for each image.
    pub token: u32,
    /// The tokens that a model with a vision tower must not sample, in ascending order.
    pub never_sampled: Vec<u32>,
}

impl Images {
    /// The images of a model directory. `None`, if the model does not see any: it has no processor, or its config.json
    /// names no token for images.
    ///
    /// # Errors
    /// `Data`, if its processor is another one, or if it does not fit the model.
    pub fn find(dir: &Path) -> Result<Option<Self>> {
        let config = files::read_object(&dir.join("config.json"))?.unwrap_or_default();
        let id = |key: &str| config.get(key).and_then(Value::as_u64).map(|id| id as u32);
        let Some(token) = id(TOKEN_KEYS[0]) else { return Ok(None) };
        let Some(processor) = Processor::find(dir)? else { return Ok(None) };
        let empty = Map::new();
        let vision = config.get("vision_config").and_then(Value::as_object).unwrap_or(&empty);
        processor.check(vision).map_err(|e| e.within(dir.display()))?;
        let mut never_sampled: Vec<u32> = TOKEN_KEYS.iter().filter_map(|key| id(key)).collect();
        never_sampled.sort_unstable();
        never_sampled.dedup();
        Ok(Some(Self { processor, token, never_sampled }))
    }

    /// A hash of everything that changes the patches and tokens of an image.
    pub fn recipe(&self) -> String {
        files::xxh3(format!("{self:?}").as_bytes())
    }

    /// The number of tokens of an image.
    pub fn tokens(&self, patches: &Patches) -> usize {
        self.processor.image_tokens(patches.grid)
    }

    /// The patches of an image among tokens.
    ///
    /// # Errors
    /// `Data`, if it has other patches than when its tokens were made.
    pub fn patches(&self, image: &Image) -> Result<Patches> {
        let patches = self.processor.patches(image.file.bytes())?;
        if (patches.grid, patches.hash) == (image.grid, image.hash) {
            return Ok(patches);
        }
        Err(Error::data("an image has other pixels than when its tokens were made")
            .hint("shard the rows again: the image processor has changed"))
    }

    /// Repeats the token of each image in `sequences`, which follow each other, as often as `counts` says. Returns the
    /// first token of each image, counted over all sequences.
    ///
    /// # Errors
    /// `Data`, if there are more or fewer tokens than images.
    pub fn expand(&self, sequences: &mut [Vec<u32>], counts: &[usize]) -> Result<Vec<usize>> {
        let found = sequences.iter().flatten().filter(|token| **token == self.token).count();
        if found != counts.len() {
            return Err(Error::data(format!(
                "the text has {} for {}",
                plural(found, "place"),
                plural(counts.len(), "image")
            ))
            .hint(
                "messages have a part {\"type\": \"image\"} for each image; a plain text has the model's own token",
            ));
        }
        let (mut places, mut before, mut counts) = (Vec::new(), 0, counts.iter());
        for sequence in sequences {
            if sequence.contains(&self.token) {
                let mut expanded = Vec::with_capacity(sequence.len());
                for &token in &*sequence {
                    let count = if token == self.token {
                        places.push(before + expanded.len());
                        *counts.next().expect("they were counted")
                    } else {
                        1
                    };
                    expanded.resize(expanded.len() + count, token);
                }
                *sequence = expanded;
            }
            before += sequence.len();
        }
        Ok(places)
    }

    /// The first tokens of images with `counts` tokens each among `tokens`.
    ///
    /// # Errors
    /// `Data`, if there are more or fewer tokens of images.
    pub fn places(&self, tokens: &[u32], counts: &[usize]) -> Result<Vec<usize>> {
        let is_image = |token: &u32| *token == self.token;
        let (found, all) = (tokens.iter().filter(|token| is_image(token)).count(), counts.iter().sum::<usize>());
        let mut end = 0;
        let place = |count: &usize| {
            let at = end + tokens[end..].iter().position(is_image)?;
            end = at + count;
            tokens.get(at..end)?.iter().all(is_image).then_some(at)
        };
        let places: Option<Vec<usize>> = counts.iter().map(place).collect();
        places.filter(|_| found == all).ok_or_else(|| {
            let images = plural(counts.len(), "image");
            Error::data(format!(
                "the row has {images} of {all} tokens in all, but {found} of its tokens are those of images"
            ))
            .hint("give the images that the tokens were made with")
        })
    }
}

/// `1 image`, `2 images`.
pub fn plural(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}
