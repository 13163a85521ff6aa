//! Token shards: Megatron's `.bin` and `.idx`, with a sidecar that describes their contents.
//!
//! `PREFIX.bin` holds the tokens, nothing else. `PREFIX.idx` (little-endian): 9 bytes `MMIDIDX\0\0`, u64 version 1, u8
//! dtype code, u64 sequences, u64 document entries; then i32 length of each sequence, i64 byte offset of each in
//! `.bin`, i64 document boundaries (first 0, last = sequences). `PREFIX.json` is the sidecar. `PREFIX.meta.jsonl` has
//! one line per document, and `PREFIX.meta.idx` the u64 byte offsets of these lines (documents + 1). Rows with images
//! add `PREFIX.images.bin` and `PREFIX.images.idx`.

mod format;
mod image_files;
mod partial;
mod reader;
mod sidecar;
mod writer;

pub use reader::{Shard, check, files};
pub use sidecar::{FileHash, Meta, Sidecar};
pub use writer::ShardWriter;

use std::path::{Path, PathBuf};

/// `PREFIX` with `suffix` appended. A prefix may contain dots.
pub(crate) fn file_of(prefix: &Path, suffix: &str) -> PathBuf {
    let mut name = prefix.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}
