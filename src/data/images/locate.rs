//! The ways in which a row gives an image: a path, a data URL, or `{bytes, path}`.

use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use super::decode::FILE_BYTES_MAX;
use crate::error::{Error, Result, format_bytes};
use crate::sys::files;
use crate::text::kind_of;

/// The bytes of an image file. Paths start from `folder`.
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
        if kind.starts_with("video/") || kind.starts_with("audio/") {
            return Err(Error::data(format!("a data URL must hold an image (got {kind})")));
        }
        if !kind.ends_with(";base64") {
            return Err(Error::data(format!("a data URL must be base64 (got {kind:?})")));
        }
        return decode(data);
    }
    if text.starts_with("http://") || text.starts_with("https://") {
        return Err(Error::data(format!("images are not downloaded (got {text})"))
            .hint("download them before the job, and give their paths"));
    }
    let path = folder.join(text.strip_prefix("file://").unwrap_or(text));
    let failed = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::NotFound => Error::data(format!("the image {} does not exist", path.display()))
            .hint("paths start from the folder of the rows' file"),
        _ => Error::io("read", &path, &e),
    };
    let bytes = path.metadata().map_err(failed)?.len();
    if bytes > FILE_BYTES_MAX as u64 {
        let most = format_bytes(FILE_BYTES_MAX as u64);
        let found = format_bytes(bytes);
        return Err(Error::data(format!("the image {} has {found} (at most {most})", path.display())));
    }
    files::read(&path).map_err(failed)
}

fn decode(text: &str) -> Result<Vec<u8>> {
    STANDARD.decode(text).map_err(|e| Error::data(format!("the bytes of an image must be base64: {e}")))
}

/// Bytes as rows hold them.
pub fn base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

/// The data URL of a JPEG or PNG file.
pub fn data_url(file: &[u8]) -> String {
    let kind = if file.starts_with(b"\x89PNG") { "png" } else { "jpeg" };
    format!("data:image/{kind};base64,{}", STANDARD.encode(file))
}

/// The folder that the paths of a file's rows start from.
pub fn folder_of(rows: &Path) -> PathBuf {
    files::parent(rows).to_owned()
}
