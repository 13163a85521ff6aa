//! Token shards: Megatron's `.bin` and `.idx`, with a sidecar that says what they hold.
//!
//! `PREFIX.bin` is the tokens, nothing else. `PREFIX.idx` (little-endian): 9 bytes `MMIDIDX\0\0`, u64 version 1, u8
//! dtype code, u64 sequences, u64 document entries; then i32 length of each sequence, i64 byte offset of each in
//! `.bin`, i64 document boundaries (first 0, last = sequences). `PREFIX.json` is the sidecar, `PREFIX.meta.jsonl` has
//! a line per document, `PREFIX.meta.idx` the u64 byte offsets of these lines (documents + 1).

mod format;
mod reader;
mod sidecar;
mod writer;

pub use reader::{Shard, check, files};
pub use sidecar::{FileHash, Meta, Sidecar};
pub use writer::ShardWriter;

use std::path::{Path, PathBuf};

/// `PREFIX` with `suffix` appended: a prefix may hold dots of its own.
pub(crate) fn file_of(prefix: &Path, suffix: &str) -> PathBuf {
    let mut name = prefix.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}
