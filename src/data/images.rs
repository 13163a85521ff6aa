//! The images of rows, in their columns and in messages.

use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use crate::error::{Error, Result};
use crate::experience::Image;
use crate::text::Tokenizer;
use crate::text::images::{self, SOURCES, is_image, of_sources, parts};

/// The columns of images: a list, or one image.
const COLUMNS: [&str; 2] = ["images", "image"];

/// The images of a row among its `tokens`, which already have as many as each image needs. Paths start from `folder`.
///
/// # Errors
/// Those of the rows of a job, and if the tokens have other places for images.
pub fn of_tokens(
    row: &Map<String, Value>,
    tokens: &[u32],
    tokenizer: Option<&Tokenizer>,
    folder: &Path,
) -> Result<Vec<Image>> {
    let is_given = has_images(row);
    let images = match tokenizer.map(Tokenizer::images) {
        Some(Ok(images)) => images,
        Some(Err(e)) if is_given => return Err(e),
        None if is_given => return Err(Error::data("a row with images needs the model's tokenizer")),
        _ => return Ok(Vec::new()),
    };
    let messages = ["messages", "prompt"].iter().find_map(|key| row.get(*key)?.as_array());
    let sources = match (messages, tokenizer) {
        (Some(messages), Some(tokenizer)) => lift(&mut messages.clone(), row, tokenizer)?,
        _ => of_columns(row)?,
    };
    of_sources(&sources, images, folder, |counts| images.places(tokens, counts))
}

/// Takes the images out of the messages of a row's conversation, and returns them in order. See `images::lift`.
pub(super) fn lift(messages: &mut [Value], row: &Map<String, Value>, tokenizer: &Tokenizer) -> Result<Vec<Value>> {
    images::lift(messages, of_columns(row)?, tokenizer)
}

/// The images in the columns of a row.
pub(super) fn of_columns(row: &Map<String, Value>) -> Result<Vec<Value>> {
    let of = |key: &str| match row.get(key) {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(all)) => all.clone(),
        Some(one) => vec![one.clone()],
    };
    match COLUMNS.map(of) {
        [images, image] if images.is_empty() => Ok(image),
        [images, image] if image.is_empty() => Ok(images),
        _ => Err(Error::data("the row has images in both \"images\" and \"image\"")),
    }
}

/// Whether a row has images, in a column or in messages.
pub fn has_images(row: &Map<String, Value>) -> bool {
    let is_empty = |value: &Value| value.is_null() || value.as_array().is_some_and(Vec::is_empty);
    let has_parts = |value: &Value| value.as_array().into_iter().flatten().any(|item| parts(item).any(is_image));
    COLUMNS.iter().any(|key| row.get(*key).is_some_and(|value| !is_empty(value))) || row.values().any(has_parts)
}

/// The fields of a row without images, which a shard keeps in a file of their own.
pub(super) fn without_images(mut row: Map<String, Value>) -> Map<String, Value> {
    row.retain(|key, _| !COLUMNS.contains(&key.as_str()));
    let messages = row.values_mut().filter_map(Value::as_array_mut).flatten();
    let parts = messages.filter_map(|message| message.get_mut("content")?.as_array_mut()).flatten();
    for part in parts.filter(|part| is_image(part)) {
        *part = json!({"type": "image"});
    }
    row
}

/// Makes the paths of a row's images independent of the folder of its file.
pub(super) fn anchor(row: &mut Map<String, Value>, folder: &Path) {
    for key in COLUMNS {
        row.get_mut(key).into_iter().for_each(|image| anchor_image(image, folder));
    }
    let messages = row.values_mut().filter_map(Value::as_array_mut).flatten();
    let parts = messages.filter_map(|message| message.get_mut("content")?.as_array_mut()).flatten();
    for part in parts.filter(|part| is_image(part)) {
        for key in &SOURCES[..4] {
            part.get_mut(*key).into_iter().for_each(|image| anchor_image(image, folder));
        }
    }
}

fn anchor_image(image: &mut Value, folder: &Path) {
    match image {
        Value::String(text) if !text.starts_with("data:") && !text.contains("://") => {
            *text = folder.join(&*text).display().to_string();
        }
        Value::Array(all) => all.iter_mut().for_each(|image| anchor_image(image, folder)),
        Value::Object(fields) => {
            for key in ["path", "url"] {
                fields.get_mut(key).into_iter().for_each(|image| anchor_image(image, folder));
            }
        }
        _ => {}
    }
}

/// The tokens of a prompt, followed by the hashes of its images: prompts that differ only in images differ.
pub(super) fn identity(prompt: &[u32], images: &[Image]) -> Vec<u32> {
    let own = images.iter().filter(|image| image.at < prompt.len());
    let hashes = own.flat_map(|image| [image.hash as u32, (image.hash >> 32) as u32]);
    prompt.iter().copied().chain(hashes).collect()
}

/// Bytes of a column, as a row of JSON holds them.
pub(super) fn base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}
