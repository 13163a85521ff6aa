//! The `.idx` file: header, arrays, and the width of a token.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::sys::map::Map;
use crate::sys::stderr;

pub(super) const MAGIC: [u8; 9] = *b"MMIDIDX\0\0";
pub(super) const VERSION: u64 = 1;
/// Bytes before the arrays.
pub(super) const HEADER_BYTES: usize = 34;

/// The integer type of a stored token, with its code in the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Width {
    U8 = 1,
    I8 = 2,
    I16 = 3,
    I32 = 4,
    I64 = 5,
    U16 = 8,
}

impl Width {
    /// u16 if the vocabulary allows it (Megatron's own limit), otherwise i32.
    pub fn for_vocabulary(vocabulary: usize) -> Self {
        if vocabulary < 65_500 { Self::U16 } else { Self::I32 }
    }

    pub fn bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::I16 | Self::U16 => 2,
            Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    pub(super) fn from_code(code: u8) -> Option<Self> {
        [Self::U8, Self::I8, Self::I16, Self::I32, Self::I64, Self::U16].into_iter().find(|w| *w as u8 == code)
    }

    /// Appends `tokens` in this width, which is a width of `for_vocabulary`.
    pub(super) fn write(self, tokens: &[u32], out: &mut Vec<u8>) {
        for token in tokens {
            if self == Self::U16 {
                out.extend_from_slice(&(*token as u16).to_le_bytes());
            } else {
                out.extend_from_slice(&token.to_le_bytes());
            }
        }
    }

    /// The raw values in `bytes`. The caller must reject negative ones.
    pub(super) fn values(self, bytes: &[u8]) -> impl Iterator<Item = i64> + '_ {
        bytes.chunks_exact(self.bytes()).map(move |chunk| match self {
            Self::U8 => i64::from(chunk[0]),
            Self::I8 => i64::from(chunk[0] as i8),
            Self::I16 => i64::from(i16::from_le_bytes([chunk[0], chunk[1]])),
            Self::U16 => i64::from(u16::from_le_bytes([chunk[0], chunk[1]])),
            Self::I32 => i64::from(i32::from_le_bytes([chunk[0], chunk[1], chunk[2], chunk[3]])),
            Self::I64 => i64::from_le_bytes(chunk.try_into().unwrap_or_default()),
        })
    }
}

/// A memory-mapped `.idx` whose size matches its header.
#[derive(Debug)]
pub(super) struct Index {
    map: Map,
    path: PathBuf,
    pub width: Width,
    pub sequences: usize,
    pub documents: usize,
}

impl Index {
    /// Reads the header and checks that the file has exactly the arrays that it declares.
    pub fn open(path: &Path) -> Result<Self> {
        let map = Map::open(path)?;
        let wrong = |what: String| Error::data(format!("{}: {what}", path.display()));
        if map.len() < HEADER_BYTES {
            return Err(wrong(format!("a shard index has at least {HEADER_BYTES} bytes (got {})", map.len()))
                .hint("write the shard again: the file was truncated"));
        }
        if map[..9] != MAGIC {
            return Err(wrong("must begin with MMIDIDX".to_owned())
                .hint("use a Megatron indexed dataset, or make one with the shard verb"));
        }
        let version = u64_at(&map, 9);
        if version != VERSION {
            return Err(wrong(format!("must have version {VERSION} (got {version})")));
        }
        let width = Width::from_code(map[17])
            .ok_or_else(|| wrong(format!("the dtype code must be an integer type, 1 to 5 or 8 (got {})", map[17])))?;
        let (sequences, entries) = (u64_at(&map, 18), u64_at(&map, 26));
        let needed = HEADER_BYTES as u128 + 12 * u128::from(sequences) + 8 * u128::from(entries);
        // With `multimodal=True`, Megatron writes the mode of each sequence after the arrays, one byte each.
        let has_modes = needed + u128::from(sequences) == map.len() as u128;
        if has_modes && map[needed as usize..].iter().any(|mode| *mode != 0) {
            let what = "the modes of its sequences are not used: all tokens count as text";
            stderr::warn_once(&format!("{}: {what}", path.display()));
        }
        if !has_modes && needed != map.len() as u128 {
            return Err(wrong(format!(
                "{sequences} sequences and {entries} document entries need {needed} bytes (got {})",
                map.len()
            ))
            .hint("write the shard again: the file was truncated or is damaged"));
        }
        if entries < 2 || sequences == 0 {
            return Err(wrong("holds no documents".to_owned()));
        }
        let index =
            Self { map, path: path.to_owned(), width, sequences: sequences as usize, documents: entries as usize - 1 };
        let (first, last) = (index.boundary(0), index.boundary(index.documents));
        if first != 0 || last != sequences as i64 {
            return Err(index.wrong(format!("documents must run from 0 to {sequences} (got {first} to {last})")));
        }
        Ok(index)
    }

    /// The number of tokens and the byte offset of sequence `i`.
    pub fn sequence(&self, i: usize) -> (i32, i64) {
        let lengths = HEADER_BYTES + 4 * i;
        let length = i32::from_le_bytes(self.map[lengths..lengths + 4].try_into().unwrap_or_default());
        (length, u64_at(&self.map, HEADER_BYTES + 4 * self.sequences + 8 * i) as i64)
    }

    /// First sequence of document `i`; `i = documents` gives the end.
    fn boundary(&self, i: usize) -> i64 {
        u64_at(&self.map, HEADER_BYTES + 12 * self.sequences + 8 * i) as i64
    }

    /// Sequences of document `i`, checked. Megatron makes a document without sequences of an empty text.
    pub fn document(&self, i: usize) -> Result<std::ops::Range<usize>> {
        let (first, end) = (self.boundary(i), self.boundary(i + 1));
        if first < 0 || end < first || end > self.sequences as i64 {
            return Err(self.wrong(format!(
                "document {i} runs from sequence {first} to {end}, but there are {} sequences",
                self.sequences
            )));
        }
        Ok(first as usize..end as usize)
    }

    /// Bytes of sequence `i` within a `.bin` of `bin_bytes` bytes, checked.
    pub fn bytes(&self, i: usize, bin_bytes: usize) -> Result<std::ops::Range<usize>> {
        let (length, offset) = self.sequence(i);
        let end = i64::from(length).checked_mul(self.width.bytes() as i64).and_then(|n| n.checked_add(offset));
        match end {
            Some(end) if length >= 0 && offset >= 0 && end <= bin_bytes as i64 => Ok(offset as usize..end as usize),
            _ => Err(self
                .wrong(format!("sequence {i} ends beyond the .bin ({length} tokens at byte {offset} of {bin_bytes})"))
                .hint("write the shard again: the .bin was truncated, or the two files do not belong together")),
        }
    }

    fn wrong(&self, what: impl std::fmt::Display) -> Error {
        Error::data(format!("{}: {what}", self.path.display()))
    }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or_default())
}
