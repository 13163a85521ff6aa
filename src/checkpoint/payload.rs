//! What a rank gives into a checkpoint: borrowed, never copied.

use super::manifest::{Entry, Shard};
use crate::error::{Error, Result};
use std::fs::File;
use std::hash::Hasher;
use std::io::Write;
use std::path::Path;
use twox_hash::XxHash3_64;

/// The contents of one file.
#[derive(Clone, Debug)]
pub struct Payload<'a> {
    parts: Vec<&'a [u8]>,
    shard: Option<Shard>,
}

impl<'a> Payload<'a> {
    pub fn bytes(bytes: &'a [u8]) -> Self {
        Self { parts: vec![bytes], shard: None }
    }

    /// Little-endian f32, one after another.
    pub fn f32(values: &'a [f32]) -> Self {
        Self::bytes(bytemuck::cast_slice(values))
    }

    /// Little-endian u16 (bf16 weights).
    pub fn u16(values: &'a [u16]) -> Self {
        Self::bytes(bytemuck::cast_slice(values))
    }

    /// Several pieces, written one after another.
    pub fn parts(parts: Vec<&'a [u8]>) -> Self {
        Self { parts, shard: None }
    }

    /// Elements `start ..` of the flat f32 vector `vector` of `len` elements, of which other ranks save the rest.
    /// `Checkpoint::read_vector` puts any range of it together again, on any number of ranks.
    pub fn shard(vector: &str, values: &'a [f32], start: usize, len: usize) -> Self {
        Self::shards(vector, &[(start, values)], len)
    }

    /// As `shard`, for several stretches in one file: (first element, values), ascending and without overlap.
    pub fn shards(vector: &str, stretches: &[(usize, &'a [f32])], len: usize) -> Self {
        let ranges: Vec<[usize; 2]> = stretches.iter().map(|(start, values)| [*start, start + values.len()]).collect();
        debug_assert!(ranges.windows(2).all(|w| w[0][1] <= w[1][0]), "{vector}: stretches {ranges:?} ascend");
        let parts = stretches.iter().map(|(_, values)| bytemuck::cast_slice(values)).collect();
        Self { parts, shard: Some(Shard { vector: vector.to_string(), ranges, len }) }
    }

    pub fn len(&self) -> u64 {
        self.parts.iter().map(|p| p.len() as u64).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes the file, hashing it on the way, and returns when it is on the disk.
    pub(super) fn write(&self, dir: &Path, name: &str) -> Result<Entry> {
        const PIECE: usize = 1 << 20;
        let path = dir.join(name);
        let mut hash = XxHash3_64::new();
        let written = File::create(&path).and_then(|mut file| {
            for piece in self.parts.iter().flat_map(|part| part.chunks(PIECE)) {
                hash.write(piece);
                file.write_all(piece)?;
            }
            file.sync_all()
        });
        written.map_err(|e| Error::io("write", &path, &e))?;
        Ok(Entry { name: name.to_string(), bytes: self.len(), xxh3: hex(hash.finish()), shard: self.shard.clone() })
    }
}

fn hex(hash: u64) -> String {
    format!("{hash:016x}")
}

/// xxh3 of a file's bytes, as manifests write it.
pub(super) fn xxh3(bytes: &[u8]) -> String {
    hex(XxHash3_64::oneshot(bytes))
}
