//! Writing a shard. All files get their names at the end, the `.idx` last. If the process is killed, the old shard or
//! none is left.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::file_of;
use super::format::{MAGIC, VERSION, Width};
use super::image_files::{BIN, IDX, ImageWriter};
use super::partial::PartialFile;
use super::sidecar::{FileHash, Meta, Sidecar, SplitRange};
use crate::error::{Error, Result};
use crate::experience::Image;
use crate::sys::files;

/// The maximum number of splits of a shard. Each keeps two files open while it is written.
const SPLITS_MAX: usize = 128;

/// Collects documents by split, and commits them as one shard in which the documents of each split are consecutive.
#[derive(Debug)]
pub struct ShardWriter {
    prefix: PathBuf,
    vocabulary: usize,
    width: Width,
    splits: Vec<Spool>,
    token_max: u32,
    images: Option<ImageWriter>,
}

/// The documents of one split, on disk next to the final shard.
#[derive(Debug)]
struct Spool {
    name: Option<String>,
    bin: PartialFile,
    meta: PartialFile,
    lengths: Vec<i32>,
    // The number of sequences up to and including each document.
    ends: Vec<u64>,
    meta_bytes: Vec<u64>,
}

impl ShardWriter {
    /// Begins a shard for tokens below `vocabulary`.
    pub fn create(prefix: &Path, vocabulary: usize) -> Result<Self> {
        let dir = files::parent(prefix);
        files::create_dir_all(dir)?;
        Ok(Self {
            prefix: prefix.to_owned(),
            vocabulary,
            width: Width::for_vocabulary(vocabulary),
            splits: Vec::new(),
            token_max: 0,
            images: None,
        })
    }

    /// Adds a document to a split (`None`: the shard has no splits).
    pub fn push(&mut self, split: Option<&str>, sequences: &[Vec<u32>], meta: &Meta) -> Result<()> {
        if sequences.is_empty() || sequences.iter().any(Vec::is_empty) {
            return Err(Error::data("a document needs at least one token in each of its sequences"));
        }
        let mut bytes = Vec::new();
        for sequence in sequences {
            let token_max = sequence.iter().copied().max().unwrap_or(0);
            if token_max as usize >= self.vocabulary {
                return Err(Error::data(format!(
                    "token {token_max} is outside the model's vocabulary of {} tokens",
                    self.vocabulary
                ))
                .hint("use the model's own tokenizer"));
            }
            if i32::try_from(sequence.len()).is_err() {
                return Err(Error::data(format!("a sequence is too long for a shard (got {} tokens)", sequence.len())));
            }
            self.token_max = self.token_max.max(token_max);
            self.width.write(sequence, &mut bytes);
        }
        let i = self.spool(split)?;
        let spool = &mut self.splits[i];
        spool.bin.write(&bytes)?;
        spool.lengths.extend(sequences.iter().map(|s| s.len() as i32));
        spool.ends.push(spool.lengths.len() as u64);
        let mut line = serde_json::to_vec(meta).map_err(|e| Error::fault(format!("meta: {e}")))?;
        line.push(b'\n');
        spool.meta.write(&line)?;
        spool.meta_bytes.push(line.len() as u64);
        Ok(())
    }

    /// Stores the images of the next document, and returns `Meta::images`. Equal files are stored once.
    pub fn add_images(&mut self, images: &[Image]) -> Result<Vec<[u64; 2]>> {
        if self.images.is_none() && !images.is_empty() {
            self.images = Some(ImageWriter::create(&self.prefix)?);
        }
        let Some(writer) = &mut self.images else { return Ok(Vec::new()) };
        images.iter().map(|image| Ok([writer.add(image)?, image.at as u64])).collect()
    }

    fn spool(&mut self, split: Option<&str>) -> Result<usize> {
        if let Some(i) = self.splits.iter().position(|s| s.name.as_deref() == split) {
            return Ok(i);
        }
        let i = self.splits.len();
        if i == SPLITS_MAX {
            return Err(Error::data(format!(
                "a shard may have at most {SPLITS_MAX} splits (the next one is {:?})",
                split.unwrap_or("")
            ))
            .hint("choose a split field with fewer values"));
        }
        let partial = |suffix: &str| PartialFile::create(&self.prefix, &format!("{suffix}.spool-{i}"));
        self.splits.push(Spool {
            name: split.map(str::to_owned),
            bin: partial(".bin")?,
            meta: partial(".meta.jsonl")?,
            lengths: Vec::new(),
            ends: Vec::new(),
            meta_bytes: Vec::new(),
        });
        Ok(i)
    }

    pub fn documents(&self) -> usize {
        self.splits.iter().map(|s| s.ends.len()).sum()
    }

    /// Writes the shard and makes it visible. Splits are ordered by name. The sidecar keeps the tokenizer, the rule of
    /// the splits and the inputs of `known`.
    ///
    /// # Errors
    /// Data, if there are no documents; I/O. An old shard of the same name is replaced only after the new one is
    /// complete on disk.
    pub fn commit(mut self, known: Sidecar) -> Result<Sidecar> {
        if self.documents() == 0 {
            return Err(Error::data(format!("{}: no rows to write", self.prefix.display())));
        }
        self.splits.sort_by(|a, b| a.name.cmp(&b.name));
        let mut partial = Vec::new();
        for suffix in [".bin", ".meta.jsonl", ".meta.idx"] {
            partial.push((suffix, PartialFile::create(&self.prefix, suffix)?));
        }
        for spool in &mut self.splits {
            partial[0].1.append(&mut spool.bin)?;
            partial[1].1.append(&mut spool.meta)?;
        }
        partial[2].1.write(&self.meta_index())?;
        let images = self.images.take().map(ImageWriter::files);
        partial.extend(images.into_iter().flat_map(|[bin, idx]| [(BIN, bin), (IDX, idx)]));
        let mut index = PartialFile::create(&self.prefix, ".idx")?;
        index.write(&self.index())?;
        partial.push((".idx", index));
        let mut facts = std::collections::BTreeMap::new();
        for (suffix, file) in &mut partial {
            file.finish()?;
            facts.insert((*suffix).to_owned(), FileHash::from_file(&file.path)?);
        }
        let sidecar = self.sidecar(known, facts);
        // A shard exists only with its `.idx`, so that file is removed first and renamed last.
        for suffix in [".idx", ".json", BIN, IDX] {
            let path = file_of(&self.prefix, suffix);
            match fs::remove_file(&path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(Error::io("replace", &path, &e)),
                _ => {}
            }
        }
        let index = partial.pop();
        for (suffix, file) in partial {
            file.rename(&file_of(&self.prefix, suffix))?;
        }
        sidecar.write(&self.prefix)?;
        if let Some((suffix, file)) = index {
            file.rename(&file_of(&self.prefix, suffix))?;
        }
        files::fsync_dir(files::parent(&self.prefix))?;
        Ok(sidecar)
    }

    fn sidecar(&self, known: Sidecar, files: std::collections::BTreeMap<String, FileHash>) -> Sidecar {
        let mut splits = Vec::new();
        let mut first = 0;
        for spool in &self.splits {
            let documents = spool.ends.len() as u64;
            if let Some(name) = &spool.name {
                splits.push(SplitRange { name: name.clone(), first, documents });
            }
            first += documents;
        }
        let lengths = || self.splits.iter().flat_map(|s| &s.lengths);
        Sidecar {
            version: super::sidecar::VERSION,
            vocabulary: self.vocabulary as u64,
            token_max: self.token_max,
            image_recipe: if files.contains_key(IDX) { known.image_recipe.clone() } else { String::new() },
            documents: first,
            sequences: lengths().count() as u64,
            tokens: lengths().map(|n| *n as u64).sum(),
            files,
            splits,
            ..known
        }
    }

    fn index(&self) -> Vec<u8> {
        let lengths = || self.splits.iter().flat_map(|s| &s.lengths);
        let mut out = Vec::new();
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.push(self.width as u8);
        out.extend_from_slice(&(lengths().count() as u64).to_le_bytes());
        out.extend_from_slice(&(self.documents() as u64 + 1).to_le_bytes());
        lengths().for_each(|n| out.extend_from_slice(&n.to_le_bytes()));
        let mut offset = 0_i64;
        for n in lengths() {
            out.extend_from_slice(&offset.to_le_bytes());
            offset += i64::from(*n) * self.width.bytes() as i64;
        }
        out.extend_from_slice(&0_i64.to_le_bytes());
        let mut before = 0;
        for spool in &self.splits {
            spool.ends.iter().for_each(|end| out.extend_from_slice(&(before + end).to_le_bytes()));
            before += spool.lengths.len() as u64;
        }
        out
    }

    fn meta_index(&self) -> Vec<u8> {
        let mut out = vec![0; 8];
        let mut offset = 0_u64;
        for bytes in self.splits.iter().flat_map(|s| &s.meta_bytes) {
            offset += bytes;
            out.extend_from_slice(&offset.to_le_bytes());
        }
        out
    }
}
