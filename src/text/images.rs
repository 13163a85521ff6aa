//! Images in the messages of a conversation: their places, the files that they are, and their tokens.

use super::{Tokenizer, kind_of};
use crate::comm::abort;
use crate::error::{Error, Kind, Result, format_bytes};
use crate::experience::Image;
use crate::images::{FILE_BYTES_MAX, Images, plural};
use crate::sys::files;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};
use std::fmt::Display;
use std::path::Path;

/// The keys of a part that hold its image.
pub const SOURCES: [&str; 5] = ["image", "image_url", "url", "path", "base64"];

/// No path is longer on Linux.
const PATH_BYTES_MAX: usize = 4096;
/// Parts of messages that no model reads.
const UNREAD_PARTS: [&str; 2] = ["video", "audio"];
/// The place of an image in a text, as in LLaVA and verl.
const MARK: &str = "<image>";

/// Sequences of tokens, such as a prompt and its answer, and their images in the order of their places, as they are given.
#[derive(Debug, Default)]
pub struct Sequences {
    pub tokens: Vec<Vec<u32>>,
    pub images: Vec<Value>,
}

impl From<Vec<Vec<u32>>> for Sequences {
    fn from(tokens: Vec<Vec<u32>>) -> Self {
        Self { tokens, images: Vec::new() }
    }
}

/// Sequences with the tokens of their images, and the images.
#[derive(Debug, Default)]
pub struct Placed {
    pub tokens: Vec<Vec<u32>>,
    /// `Image::at` counts over all sequences.
    pub images: Vec<Image>,
}

impl Sequences {
    /// Reads the images, and gives each its tokens. Paths start from `folder`.
    ///
    /// # Errors
    /// `Data`, if an image cannot be read, or if the tokens have another number of places.
    pub fn place(self, tokenizer: &Tokenizer, folder: &Path) -> Result<Placed> {
        let Self { mut tokens, images: sources } = self;
        let images = match tokenizer.images() {
            Ok(images) => images,
            Err(e) if !sources.is_empty() => return Err(e),
            Err(_) => return Ok(Placed { tokens, images: Vec::new() }),
        };
        let found = of_sources(&sources, images, folder, |counts| images.expand(&mut tokens, counts))?;
        Ok(Placed { tokens, images: found })
    }
}

/// The images of sources, at the first tokens that `place` returns for their numbers of tokens.
///
/// # Errors
/// `Data`, if an image cannot be read; the errors of `place`.
pub fn of_sources(
    sources: &[Value],
    images: &Images,
    folder: &Path,
    place: impl FnOnce(&[usize]) -> Result<Vec<usize>>,
) -> Result<Vec<Image>> {
    let each = sources.iter().enumerate().map(|(i, source)| {
        let image = of_source(source, images, folder);
        image.map_err(|e| if sources.len() > 1 { e.within(format!("image {}", i + 1)) } else { e })
    });
    let mut found = each.collect::<Result<Vec<Image>>>()?;
    let counts: Vec<usize> = found.iter().map(|image| image.tokens).collect();
    for (image, at) in found.iter_mut().zip(place(&counts)?) {
        image.at = at;
    }
    Ok(found)
}

/// An image without its place.
fn of_source(source: &Value, images: &Images, folder: &Path) -> Result<Image> {
    let file = read(source, folder)?;
    // A decoder may panic on damaged bytes.
    let measured = abort::caught(|| images.processor.measure(&file));
    let measured = measured.map_err(|e| if e.kind == Kind::Fault { Error::data(e.message) } else { e });
    let name = |value: &Value| value.as_str().filter(|text| !text.starts_with("data:")).map(str::to_owned);
    let name = name(source).or_else(|| name(source.get("path")?));
    let patches = measured.map_err(|e| name.map_or_else(|| e.clone(), |name| e.clone().within(name)))?;
    Ok(Image { at: 0, tokens: images.tokens(&patches), grid: patches.grid, hash: patches.hash, file: file.into() })
}

/// The tokens of a conversation that the assistant answers, and the images among them. Paths start from `folder`.
///
/// # Errors
/// Those of the rows of a job.
pub fn encode_chat(
    tokenizer: &Tokenizer,
    messages: &[Value],
    more: &Map<String, Value>,
    folder: &Path,
) -> Result<(Vec<u32>, Vec<Image>)> {
    let mut messages = messages.to_vec();
    let images = lift(&mut messages, Vec::new(), tokenizer)?;
    let tokens = vec![tokenizer.encode_chat(&Value::Array(messages), more, true)?];
    let placed = Sequences { tokens, images }.place(tokenizer, folder)?;
    Ok((placed.tokens.concat(), placed.images))
}

/// Takes the images out of the messages of a conversation, and returns them in order. A part without an image of its
/// own takes the next one of `column`. If there is no such part, each `<image>` in a text is a place, as in
/// verl. If there is none either, the first user message begins with the images, as in TRL.
///
/// # Errors
/// `Data`, if the model sees no images, or if there are more or fewer images than places.
pub fn lift(messages: &mut [Value], column: Vec<Value>, tokenizer: &Tokenizer) -> Result<Vec<Value>> {
    let is_given = !column.is_empty() || messages.iter().any(|message| parts(message).any(is_image));
    if !is_given {
        return Ok(Vec::new());
    }
    tokenizer.images()?;
    if !messages.iter().any(|message| parts(message).any(is_image)) {
        let mut marked = 0;
        for message in &mut *messages {
            marked += split_marks(message);
        }
        let user = messages.iter_mut().find(|message| message["role"] == "user");
        if let Some(user) = user.filter(|_| marked == 0) {
            let text = std::mem::take(&mut user["content"]);
            let text = if text.is_string() { vec![json!({"type": "text", "text": text})] } else { list(text) };
            let images = column.iter().map(|_| json!({"type": "image"}));
            user["content"] = images.chain(text).collect();
        }
    }
    let (count, mut column, mut found, mut missing) = (column.len(), column.into_iter(), Vec::new(), 0);
    let all = messages.iter_mut().filter_map(|message| message.get_mut("content")?.as_array_mut());
    for part in all.flatten().filter(|part| is_image(part)) {
        match source(part)?.or_else(|| column.next()) {
            Some(image) => found.push(image),
            None => missing += 1,
        }
        *part = json!({"type": "image"});
    }
    let places = count - column.len() + missing;
    if places != count {
        let (images, places) = (plural(count, "image"), plural(places, "place"));
        return Err(Error::data(format!("the messages have {places} for {images}")));
    }
    Ok(found)
}

fn list(value: Value) -> Vec<Value> {
    if let Value::Array(items) = value { items } else { Vec::new() }
}

/// Rejects a message with a part that no model reads. `what` names the message.
///
/// # Errors
/// `Data`, if it has video or audio.
pub fn check_parts(message: &Map<String, Value>, what: impl Display) -> Result<()> {
    let parts = message.get("content").and_then(Value::as_array).into_iter().flatten();
    for (part, unread) in parts.flat_map(|part| UNREAD_PARTS.map(|unread| (part, unread))) {
        if part["type"].as_str().is_some_and(|kind| kind.contains(unread)) || !part[unread].is_null() {
            return Err(Error::data(format!("{what} has a part with {unread}; models read text and images only")));
        }
    }
    Ok(())
}

/// The parts of a message.
pub fn parts(message: &Value) -> impl Iterator<Item = &Value> {
    message.get("content").and_then(Value::as_array).into_iter().flatten()
}

/// Whether a part of a message is an image. Templates also know one by its key.
pub fn is_image(part: &Value) -> bool {
    match part.get("type").and_then(Value::as_str) {
        Some(kind) => kind.contains("image"),
        None => SOURCES[..2].iter().any(|key| part.get(key).is_some()),
    }
}

/// The image that a part has itself.
fn source(part: &Value) -> Result<Option<Value>> {
    let mut found = None;
    for (key, value) in part.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null()) {
        let image = match key.as_str() {
            "type" => continue,
            // OpenAI's form.
            "image_url" if value.is_object() => match value.as_object().map(|url| (url.get("url"), url.len())) {
                Some((Some(url), 1)) => url.clone(),
                Some((Some(url), 2)) if value["detail"] == "auto" => url.clone(),
                _ => return Err(Error::data("image_url must have an url, and nothing else that changes the image")),
            },
            "base64" => json!({"bytes": value}),
            key if SOURCES.contains(&key) => value.clone(),
            // Empty texts are what Arrow stores for a missing one.
            "text" if value == "" => continue,
            key => return Err(Error::data(format!("an image has a setting {key:?} (= {value}), which is not read"))),
        };
        if found.replace(image).is_some() {
            return Err(Error::data("a part of a message has several images"));
        }
    }
    Ok(found)
}

/// Makes a part of each `<image>` in the text of a message, and returns their number.
fn split_marks(message: &mut Value) -> usize {
    let Some(text) = message.get("content").and_then(Value::as_str).filter(|text| text.contains(MARK)) else {
        return 0;
    };
    let mut parts = Vec::new();
    for (i, text) in text.split(MARK).enumerate() {
        if i > 0 {
            parts.push(json!({"type": "image"}));
        }
        if !text.is_empty() {
            parts.push(json!({"type": "text", "text": text}));
        }
    }
    let count = text.matches(MARK).count();
    message["content"] = parts.into();
    count
}

/// The bytes of an image's file: a path, a data URL, or an object with `bytes` and `path`. Paths start from `folder`.
///
/// # Errors
/// `Data`, if the value has none of the forms, or if its file does not exist. `Io`, if the file cannot be read.
pub fn read(image: &Value, folder: &Path) -> Result<Vec<u8>> {
    match image {
        Value::String(text) => read_text(text, folder),
        Value::Object(fields) => {
            if let Some(key) = fields.keys().find(|key| !["bytes", "path"].contains(&key.as_str())) {
                return Err(Error::data(format!("an image has bytes and path (it also has {key:?})")));
            }
            let of = |key: &str| fields.get(key).filter(|value| !value.is_null());
            match (of("bytes"), of("path")) {
                // The path only names the image that the bytes hold.
                (Some(Value::String(bytes)), _) => decode(bytes),
                (None, Some(Value::String(path))) => read_text(path, folder),
                (None, None) => Err(Error::data("an image has neither bytes nor a path")),
                (Some(other), _) | (None, Some(other)) => Err(Error::data(format!(
                    "bytes of an image must be base64, and its path a string (got {})",
                    kind_of(other)
                ))),
            }
        }
        other => Err(Error::data(format!(
            "an image must be a path, a data URL, or an object with bytes and path (got {})",
            kind_of(other)
        ))),
    }
}

fn read_text(text: &str, folder: &Path) -> Result<Vec<u8>> {
    if let Some(url) = text.strip_prefix("data:") {
        let (kind, data) = url.split_once(',').ok_or_else(|| Error::data("a data URL must have a comma"))?;
        if !kind.starts_with("image/") || !kind.ends_with(";base64") {
            return Err(Error::data(format!("a data URL must hold an image in base64 (got {kind:?})")));
        }
        return decode(data);
    }
    if text.starts_with("http://") || text.starts_with("https://") {
        return Err(Error::data(format!("images are not downloaded (got {text})"))
            .hint("download them before the job, and give their paths"));
    }
    if text.len() > PATH_BYTES_MAX {
        return Err(Error::data(format!("the path of an image has {} bytes", text.len()))
            .hint("bytes in base64 need the prefix \"data:image/png;base64,\", or the key bytes"));
    }
    let path = folder.join(text.strip_prefix("file://").unwrap_or(text));
    let failed = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::NotFound => Error::data(format!("the image {} does not exist", path.display()))
            .hint("a relative path starts from the folder of the rows' file, or of the environment's"),
        _ => Error::io("read", &path, &e),
    };
    let bytes = path.metadata().map_err(failed)?.len();
    if bytes > FILE_BYTES_MAX as u64 {
        let (found, most) = (format_bytes(bytes), format_bytes(FILE_BYTES_MAX as u64));
        return Err(Error::data(format!("the image {} has {found} (at most {most})", path.display())));
    }
    files::read(&path).map_err(failed)
}

fn decode(text: &str) -> Result<Vec<u8>> {
    STANDARD.decode(text).map_err(|e| Error::data(format!("the bytes of an image must be base64: {e}")))
}
