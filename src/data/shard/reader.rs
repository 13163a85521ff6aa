//! Reading a shard through memory maps.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::file_of;
use super::format::Index;
use super::image_files::{BIN, IDX, ImageFiles};
use super::sidecar::{FileHash, Meta, Sidecar, VERSION};
use crate::error::{Error, Result};
use crate::experience::Image;
use crate::sys::map::Map;

/// An open shard. Opening costs the same for any number of tokens. Each document is checked when it is read.
#[derive(Debug)]
pub struct Shard {
    prefix: PathBuf,
    index: Index,
    bin: Map,
    meta: Option<(Map, Map)>,
    images: Option<ImageFiles>,
    sidecar: Sidecar,
}

impl Shard {
    /// Opens `PREFIX.idx` and `PREFIX.bin` for a model of `vocabulary` tokens. A `.idx` or `.bin` path works, too.
    ///
    /// A shard without a sidecar is scanned once and gets one, if its directory is writable.
    pub fn open(prefix: &Path, vocabulary: usize) -> Result<Self> {
        let prefix = strip(prefix);
        let (idx_path, bin_path) = (file_of(&prefix, ".idx"), file_of(&prefix, ".bin"));
        for path in [&idx_path, &bin_path] {
            if !path.is_file() {
                return Err(Error::data(format!("{} does not exist", path.display()))
                    .hint("give the PREFIX of PREFIX.bin and PREFIX.idx; if `shard` was interrupted, run it again"));
            }
        }
        let index = Index::open(&idx_path)?;
        let bin = Map::open(&bin_path)?;
        // If a shard is written in order, its last sequence ends the file. If another program wrote it in another
        // order, `scan` has checked every offset.
        index.bytes(index.sequences - 1, bin.len())?;
        let sidecar = if let Some(sidecar) = Sidecar::read(&prefix)? {
            sidecar
        } else {
            let sidecar = scan(&index, &bin, &prefix)?;
            // A read-only corpus is scanned each time it is opened, which is only slower.
            let _ = sidecar.write(&prefix);
            sidecar
        };
        let meta = open_meta(&prefix, &sidecar)?;
        let images = sidecar.files.contains_key(IDX).then(|| ImageFiles::open(&prefix)).transpose()?;
        let shard = Self { prefix, index, bin, meta, images, sidecar };
        shard.check(vocabulary)?;
        Ok(shard)
    }

    /// Whether the shard has a sidecar. `open` writes one if it is missing.
    pub fn has_sidecar(prefix: &Path) -> bool {
        file_of(&strip(prefix), ".json").is_file()
    }

    fn check(&self, vocabulary: usize) -> Result<()> {
        let wrong = |what: String| Error::data(format!("{}: {what}", self.prefix.display()));
        let sidecar = &self.sidecar;
        let counts = [
            ("documents", sidecar.documents, self.index.documents as u64),
            ("sequences", sidecar.sequences, self.index.sequences as u64),
            ("bytes of .bin", sidecar.files.get(".bin").map_or(0, |f| f.bytes), self.bin.len() as u64),
        ];
        for (what, expected, found) in counts {
            if expected != found {
                return Err(wrong(format!("the sidecar lists {expected} {what}, but the files hold {found}"))
                    .hint("write the shard again: its files do not belong together"));
            }
        }
        for split in &sidecar.splits {
            if split.first.checked_add(split.documents).is_none_or(|end| end > sidecar.documents) {
                return Err(wrong(format!("split {:?} ends beyond the last document", split.name)));
            }
        }
        if sidecar.token_max as usize >= vocabulary {
            return Err(wrong(format!(
                "holds token {}, but the model's vocabulary has {vocabulary} tokens",
                sidecar.token_max
            ))
            .hint("shard the rows again with the model's own tokenizer"));
        }
        Ok(())
    }

    /// Rejects a shard made with another tokenizer. A shard from elsewhere does not name its tokenizer and passes.
    pub fn check_tokenizer(&self, sha256: &str) -> Result<()> {
        let made = &self.sidecar.tokenizer_sha256;
        if made.is_empty() || made == sha256 {
            return Ok(());
        }
        Err(Error::data(format!(
            "{} was made with tokenizer {}, but the model has {}",
            self.prefix.display(),
            &made[..made.len().min(12)],
            &sha256[..sha256.len().min(12)]
        ))
        .hint("shard the rows again with the model's own tokenizer"))
    }

    pub fn has_images(&self) -> bool {
        self.images.is_some()
    }

    /// The number of different images.
    pub fn count_images(&self) -> usize {
        self.images.as_ref().map_or(0, ImageFiles::count)
    }

    /// Rejects a shard whose images were given tokens by another processor than the one with this recipe.
    pub fn check_images(&self, recipe: &str) -> Result<()> {
        if self.sidecar.image_recipe == recipe {
            return Ok(());
        }
        let prefix = self.prefix.display();
        Err(Error::data(format!("{prefix} was made with another image processor than the model's"))
            .hint("shard the rows again with the model's own directory"))
    }

    /// The images of document `i`, in order, without their files.
    pub fn image_places(&self, i: usize) -> Result<Vec<Image>> {
        self.images_of(i, |_| Vec::new())
    }

    /// The images of document `i`, in order.
    pub fn images(&self, i: usize) -> Result<Vec<Image>> {
        self.images_of(i, <[u8]>::to_vec)
    }

    fn images_of(&self, i: usize, file: impl Fn(&[u8]) -> Vec<u8>) -> Result<Vec<Image>> {
        let Some(images) = &self.images else { return Ok(Vec::new()) };
        let image = |place: [u64; 2]| {
            let (image, bytes) = images.get(place).ok_or_else(|| {
                Error::data(format!("{}: document {i} has an image that the shard lacks", self.prefix.display()))
                    .hint("write the shard again: its files do not belong together")
            })?;
            Ok(Image { file: file(bytes).into(), ..image })
        };
        let all = self.meta(i)?.images.into_iter().map(image).collect();
        images.release();
        all
    }

    /// Reads every byte and compares the hashes with the sidecar, and every document with the index.
    pub fn verify(&self) -> Result<()> {
        for suffix in self.sidecar.files.keys() {
            self.sidecar.check(&self.prefix, suffix, &FileHash::from_file(&file_of(&self.prefix, suffix))?)?;
        }
        (0..self.documents()).try_for_each(|i| self.document(i).map(|_| ()))
    }

    pub fn prefix(&self) -> &Path {
        &self.prefix
    }

    pub fn sidecar(&self) -> &Sidecar {
        &self.sidecar
    }

    pub fn documents(&self) -> usize {
        self.index.documents
    }

    pub fn tokens(&self) -> u64 {
        self.sidecar.tokens
    }

    pub fn document(&self, i: usize) -> Result<Vec<Vec<u32>>> {
        self.index.document(i)?.map(|s| self.sequence(s)).collect()
    }

    /// The number of tokens in each sequence of document `i`, without reading them.
    pub fn lengths(&self, i: usize) -> Result<Vec<usize>> {
        let width = self.index.width.bytes();
        self.index.document(i)?.map(|s| Ok(self.index.bytes(s, self.bin.len())?.len() / width)).collect()
    }

    /// The first sequence of document `i`; no tokens if there is none.
    pub fn prompt(&self, i: usize) -> Result<Vec<u32>> {
        self.index.document(i)?.next().map_or(Ok(Vec::new()), |s| self.sequence(s))
    }

    /// The number of tokens of the first sequence of document `i`, without reading them.
    pub fn prompt_tokens(&self, i: usize) -> Result<usize> {
        let bytes = |s| Ok(self.index.bytes(s, self.bin.len())?.len());
        Ok(self.index.document(i)?.next().map_or(Ok(0), bytes)? / self.index.width.bytes())
    }

    pub fn meta(&self, i: usize) -> Result<Meta> {
        let Some((lines, offsets)) = &self.meta else {
            return Ok(Meta { source: format!("{}:{i}", self.prefix.display()), ..Meta::default() });
        };
        let at = |i: usize| u64::from_le_bytes(offsets[8 * i..8 * i + 8].try_into().unwrap_or_default()) as usize;
        let (first, end) = (at(i), at(i + 1));
        let line = lines.get(first..end).filter(|line| !line.is_empty());
        line.and_then(|line| serde_json::from_slice(line).ok()).ok_or_else(|| {
            Error::data(format!(
                "{}: line {} (bytes {first} to {end}) is not the metadata of a document",
                file_of(&self.prefix, ".meta.jsonl").display(),
                i + 1
            ))
        })
    }

    fn sequence(&self, s: usize) -> Result<Vec<u32>> {
        let bytes = self.index.bytes(s, self.bin.len())?;
        let token_max = i64::from(self.sidecar.token_max);
        let mut tokens = Vec::with_capacity(bytes.len() / self.index.width.bytes());
        for value in self.index.width.values(&self.bin[bytes]) {
            if value < 0 || value > token_max {
                return Err(Error::data(format!(
                    "{}: sequence {s} holds token {value}, but the largest of the shard is {token_max}",
                    self.prefix.display()
                ))
                .hint("write the shard again: the .bin changed after its sidecar was written"));
            }
            tokens.push(value as u32);
        }
        Ok(tokens)
    }
}

/// The paths of the files of a shard, by suffix. Not all shards have the `.meta` files.
pub fn files(prefix: &Path) -> impl Iterator<Item = (&'static str, PathBuf)> {
    let prefix = strip(prefix);
    [".bin", ".idx", ".meta.jsonl", ".meta.idx", BIN, IDX]
        .into_iter()
        .map(move |suffix| (suffix, file_of(&prefix, suffix)))
}

/// Compares a shard with its sidecar, if it has one. `found` holds the hashes of its files, by path. `Shard::open`
/// reports missing files.
pub fn check(prefix: &Path, found: &BTreeMap<PathBuf, FileHash>) -> Result<()> {
    let prefix = strip(prefix);
    let Some(sidecar) = Sidecar::read(&prefix)? else { return Ok(()) };
    let mut found = files(&prefix).filter_map(|(suffix, path)| Some((suffix, found.get(&path)?)));
    found.try_for_each(|(suffix, found)| sidecar.check(&prefix, suffix, found))
}

/// The prefix of a path that may end in `.idx` or `.bin`.
fn strip(path: &Path) -> PathBuf {
    match path.extension().and_then(|e| e.to_str()) {
        Some("idx" | "bin") => path.with_extension(""),
        _ => path.to_owned(),
    }
}

fn open_meta(prefix: &Path, sidecar: &Sidecar) -> Result<Option<(Map, Map)>> {
    let Some(lines) = sidecar.files.get(".meta.jsonl") else { return Ok(None) };
    let open = |suffix: &str, needed: u64| {
        let path = file_of(prefix, suffix);
        if !path.is_file() {
            return Err(Error::data(format!("{} does not exist, but the sidecar lists it", path.display()))
                .hint("copy all files of the shard, or write it again"));
        }
        let map = Map::open(&path)?;
        if map.len() as u64 == needed {
            return Ok(map);
        }
        let what = format!("{}: must have {needed} bytes according to the sidecar (got {})", path.display(), map.len());
        Err(Error::data(what).hint("write the shard again: the file was truncated or is damaged"))
    };
    Ok(Some((open(".meta.jsonl", lines.bytes)?, open(".meta.idx", 8 * (sidecar.documents + 1))?)))
}

/// Reads every sequence and token of a shard without a sidecar.
fn scan(index: &Index, bin: &Map, prefix: &Path) -> Result<Sidecar> {
    let (mut token_max, mut tokens) = (0_i64, 0_u64);
    for i in 0..index.documents {
        index.document(i)?;
    }
    for s in 0..index.sequences {
        let bytes = index.bytes(s, bin.len())?;
        for value in index.width.values(&bin[bytes]) {
            if value < 0 || value > i64::from(u32::MAX >> 1) {
                return Err(Error::data(format!("{}: sequence {s} holds the invalid token {value}", prefix.display())));
            }
            token_max = token_max.max(value);
            tokens += 1;
        }
    }
    let files = [".bin", ".idx"]
        .into_iter()
        .map(|suffix| Ok((suffix.to_owned(), FileHash::from_file(&file_of(prefix, suffix))?)))
        .collect::<Result<_>>()?;
    Ok(Sidecar {
        version: VERSION,
        token_max: token_max as u32,
        documents: index.documents as u64,
        sequences: index.sequences as u64,
        tokens,
        files,
        ..Sidecar::default()
    })
}
