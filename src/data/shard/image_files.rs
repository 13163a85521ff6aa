//! `PREFIX.images.bin`, the image files of a shard one after another, each once, and `PREFIX.images.idx`: 8 bytes
//! `RLHFIMG1`, then for each image (little-endian) u64 first byte in `.images.bin`, u64 bytes, u64 hash of its patches,
//! u32 tokens, and u32 patches in time, height and width.

use std::collections::HashMap;
use std::path::Path;

use super::file_of;
use super::partial::PartialFile;
use crate::error::{Error, Result};
use crate::experience::{Image, ImageFile};
use crate::sys::map::Map;
use twox_hash::XxHash3_64;

pub const BIN: &str = ".images.bin";
pub const IDX: &str = ".images.idx";
const MAGIC: [u8; 8] = *b"RLHFIMG1";
const RECORD_BYTES: usize = 40;

/// Collects the images of a shard.
#[derive(Debug)]
pub struct ImageWriter {
    bin: PartialFile,
    idx: PartialFile,
    bytes: u64,
    /// The number of each image, by hash and size of its file.
    known: HashMap<(u64, usize), u64>,
}

impl ImageWriter {
    pub fn create(prefix: &Path) -> Result<Self> {
        let (bin, mut idx) = (PartialFile::create(prefix, BIN)?, PartialFile::create(prefix, IDX)?);
        idx.write(&MAGIC)?;
        Ok(Self { bin, idx, bytes: 0, known: HashMap::new() })
    }

    /// Stores an image unless it is known, and returns its number.
    pub fn add(&mut self, image: &Image) -> Result<u64> {
        let file = image.file.bytes();
        let (key, next) = ((XxHash3_64::oneshot(file), file.len()), self.known.len() as u64);
        if let Some(number) = self.known.get(&key) {
            return Ok(*number);
        }
        self.bin.write(file)?;
        let mut record = Vec::with_capacity(RECORD_BYTES);
        for n in [self.bytes, file.len() as u64, image.hash] {
            record.extend_from_slice(&n.to_le_bytes());
        }
        for n in [image.tokens].into_iter().chain(image.grid) {
            record.extend_from_slice(&(n as u32).to_le_bytes());
        }
        self.idx.write(&record)?;
        self.bytes += file.len() as u64;
        self.known.insert(key, next);
        Ok(next)
    }

    /// The two files, complete.
    pub fn files(self) -> [PartialFile; 2] {
        [self.bin, self.idx]
    }
}

/// The images of an open shard.
#[derive(Debug)]
pub struct ImageFiles {
    bin: Map,
    idx: Map,
}

impl ImageFiles {
    /// # Errors
    /// `Data`, if a file is missing, or if the index is damaged.
    pub fn open(prefix: &Path) -> Result<Self> {
        let [bin, idx] = [BIN, IDX].map(|suffix| file_of(prefix, suffix));
        for path in [&bin, &idx] {
            if !path.is_file() {
                return Err(Error::data(format!("{} does not exist, but the sidecar lists it", path.display()))
                    .hint("copy all files of the shard, or write it again"));
            }
        }
        let (bin, found) = (Map::open(&bin)?, Map::open(&idx)?);
        if !found.starts_with(&MAGIC) || !(found.len() - MAGIC.len()).is_multiple_of(RECORD_BYTES) {
            return Err(Error::data(format!("{} is not an index of images", idx.display()))
                .hint("write the shard again: the file is damaged"));
        }
        Ok(Self { bin, idx: found })
    }

    /// The number of images.
    pub fn count(&self) -> usize {
        (self.idx.len() - MAGIC.len()) / RECORD_BYTES
    }

    /// Releases the memory of the files that were read.
    pub fn release(&self) {
        self.bin.release();
    }

    /// The image with this number, whose first token is `at`, and the bytes of its file.
    pub fn get(&self, [number, at]: [u64; 2]) -> Option<(Image, &[u8])> {
        let first = (number as usize).checked_mul(RECORD_BYTES)?.checked_add(MAGIC.len())?;
        let record = self.idx.get(first..first.checked_add(RECORD_BYTES)?)?;
        let long = |i: usize| u64::from_le_bytes(record[8 * i..8 * i + 8].try_into().unwrap_or_default());
        let short =
            |i: usize| u32::from_le_bytes(record[24 + 4 * i..28 + 4 * i].try_into().unwrap_or_default()) as usize;
        let file = self.bin.get(long(0) as usize..long(0).checked_add(long(1))? as usize)?;
        let grid = [short(1), short(2), short(3)];
        Some((Image { at: at as usize, tokens: short(0), grid, hash: long(2), file: ImageFile::default() }, file))
    }
}
