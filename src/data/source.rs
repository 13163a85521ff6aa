//! An open entry of `data.prompts`, and its documents.

use super::images;
use super::shard::{Meta, Shard};
use crate::error::{Error, Result};
use crate::experience::Image;

/// An open entry of `data.prompts` or `data.split.eval_files`.
#[derive(Debug)]
pub struct Source {
    pub name: String,
    pub shard: Shard,
    /// Its index among the sources.
    pub index: u32,
    /// Identity of its first row.
    pub first_id: u64,
    /// The split of all its rows, if files are splits.
    pub split: Option<&'static str>,
}

/// A document of a source.
#[derive(Clone, Copy, Debug)]
pub struct Document<'a> {
    pub source: &'a Source,
    pub index: u64,
}

impl Source {
    pub fn document(&self, index: u64) -> Document<'_> {
        Document { source: self, index }
    }
}

impl Document<'_> {
    /// Identity of its row over the whole run.
    pub fn id(self) -> u64 {
        self.source.first_id + self.index
    }

    /// The tokens of each sequence.
    pub fn sequences(self) -> Result<Vec<Vec<u32>>> {
        self.source.shard.document(self.index as usize)
    }

    /// The number of tokens of each sequence.
    pub fn lengths(self) -> Result<Vec<usize>> {
        self.source.shard.lengths(self.index as usize)
    }

    /// The number of tokens of the first sequence.
    pub fn prompt_tokens(self) -> Result<usize> {
        self.source.shard.prompt_tokens(self.index as usize)
    }

    /// The tokens of the first sequence.
    pub fn prompt(self) -> Result<Vec<u32>> {
        self.source.shard.prompt(self.index as usize)
    }

    /// The images, in order. `Image::at` counts over all sequences.
    pub fn images(self) -> Result<Vec<Image>> {
        self.source.shard.images(self.index as usize)
    }

    /// The images without their files.
    pub fn image_places(self) -> Result<Vec<Image>> {
        self.source.shard.image_places(self.index as usize)
    }

    /// The tokens of the first sequence, followed by the hashes of its images.
    pub fn identity(self) -> Result<Vec<u32>> {
        Ok(images::identity(&self.prompt()?, &self.image_places()?))
    }

    pub fn meta(self) -> Result<Meta> {
        self.source.shard.meta(self.index as usize)
    }

    pub fn label(self) -> Result<String> {
        Ok(self.meta()?.label)
    }

    /// The file and line of its row, or its index in a shard that does not list them.
    pub fn line(self) -> Result<String> {
        let line = self.meta()?.source;
        Ok(if line.is_empty() { format!("document {} of {}", self.index, self.source.name) } else { line })
    }

    /// The number of tokens of each of its `N` sequences, which `what` names. `option` of `shard` makes such documents.
    ///
    /// # Errors
    /// `Data`, if it has another number of sequences.
    pub fn lengths_of<const N: usize>(self, what: &str, option: &str) -> Result<[usize; N]> {
        <[usize; N]>::try_from(self.lengths()?).map_err(|found| {
            let rule = format!("must have {what} (sequences: {})", found.len());
            self.error(&rule).hint(format!("shard the rows with {option}"))
        })
    }

    /// The error of a document that breaks a rule.
    pub fn error(self, rule: &str) -> Error {
        Error::data(format!("{}: document {} {rule}", self.source.shard.prefix().display(), self.index))
    }
}
