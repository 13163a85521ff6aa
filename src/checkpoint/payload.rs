//! What a rank gives into a checkpoint: borrowed where it lies in the host's memory, never copied again.

use super::manifest::{Entry, Shard};
use crate::error::{Error, Result};
use std::borrow::Cow;
use std::fs::File;
use std::hash::Hasher;
use std::io::Write;
use std::path::Path;
use twox_hash::XxHash3_64;

/// The contents of one file.
pub struct Payload<'a> {
    parts: Vec<Cow<'a, [u8]>>,
    shard: Option<Shard>,
    written: Option<&'a dyn Fn()>,
}

impl std::fmt::Debug for Payload<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Payload({} bytes, {:?})", self.len(), self.shard)
    }
}

impl<'a> Payload<'a> {
    fn of(parts: Vec<Cow<'a, [u8]>>, shard: Option<Shard>) -> Self {
        Self { parts, shard, written: None }
    }

    /// Calls `then` when the file is on the disk: what it was written from may leave memory again.
    #[must_use]
    pub fn and_then(self, then: &'a dyn Fn()) -> Self {
        Self { written: Some(then), ..self }
    }

    pub fn bytes(bytes: &'a [u8]) -> Self {
        Self::of(vec![Cow::Borrowed(bytes)], None)
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
        Self::of(parts.into_iter().map(Cow::Borrowed).collect(), None)
    }

    /// Elements `start ..` of the flat f32 vector `vector` of `len` elements, of which other ranks save the rest.
    /// `Checkpoint::read_vector` puts any range of it together again, on any number of ranks.
    pub fn shard(vector: &str, values: &'a [f32], start: usize, len: usize) -> Self {
        Self::shards(vector, [(start, values)], len)
    }

    /// As `shard`, for several stretches in one file: (first element, values), ascending and without overlap.
    pub fn shards<V: Into<Cow<'a, [f32]>>>(
        vector: &str,
        stretches: impl IntoIterator<Item = (usize, V)>,
        len: usize,
    ) -> Self {
        let stretches = stretches.into_iter().map(|(start, values)| (start, values.into()));
        let (ranges, parts): (Vec<[usize; 2]>, Vec<_>) =
            stretches.map(|(start, values)| ([start, start + values.len()], bytes_of(values))).unzip();
        debug_assert!(ranges.windows(2).all(|w| w[0][1] <= w[1][0]), "{vector}: stretches {ranges:?} ascend");
        Self::of(parts, Some(Shard { vector: vector.to_string(), ranges, len }))
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
        self.written.iter().for_each(|then| then());
        Ok(Entry { name: name.to_string(), bytes: self.len(), xxh3: hex(hash.finish()), shard: self.shard.clone() })
    }
}

fn bytes_of(values: Cow<[f32]>) -> Cow<[u8]> {
    match values {
        Cow::Borrowed(values) => Cow::Borrowed(bytemuck::cast_slice(values)),
        Cow::Owned(values) => Cow::Owned(bytemuck::cast_slice(&values).to_vec()),
    }
}

fn hex(hash: u64) -> String {
    format!("{hash:016x}")
}

/// xxh3 of a file's bytes, as manifests write it.
pub(super) fn xxh3(bytes: &[u8]) -> String {
    hex(XxHash3_64::oneshot(bytes))
}
