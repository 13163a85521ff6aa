//! The entries of a row: all of it, a part, several pieces, or nothing.

use serde::{Deserialize, Serialize};

use super::source::Document;
use crate::config::data::{DataConfig, LongPrompts};
use crate::error::Result;
use crate::experience::Image;
use std::ops::Range;

/// The bit of `Prompt::id` from which the number of a window's piece is stored.
pub(super) const PIECE_SHIFT: u32 = 48;

/// Tokens of a row: of its prompts, and of its responses, if it has any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RowTokens {
    pub prompt: usize,
    pub response: usize,
    /// The images among the tokens of the prompt.
    #[serde(default)]
    pub images: RowImages,
}

/// The images of a row: their number, and the tokens and patches of all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RowImages {
    pub count: usize,
    pub tokens: usize,
    pub patches: usize,
}

impl RowImages {
    pub fn of(images: &[Image]) -> Self {
        let patches = images.iter().map(|image| image.grid.iter().product::<usize>()).sum();
        Self { count: images.len(), tokens: images.iter().map(|image| image.tokens).sum(), patches }
    }
}

/// The images of a row in the four bytes that an entry has to spare: 20 bits for their tokens, 4 for the patches on the
/// side of a token, and 8 for their number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedImages(u32);

impl From<RowImages> for PackedImages {
    fn from(RowImages { count, tokens, patches }: RowImages) -> Self {
        let merge = (patches / tokens.max(1)).isqrt().min(15);
        Self((tokens.min((1 << 20) - 1) | merge << 20 | count.min(255) << 24) as u32)
    }
}

impl PackedImages {
    /// Images of these sizes in all, one after another at the beginning of row `row`. Images of other rows differ.
    fn images(self, row: u64) -> Vec<Image> {
        let [tokens, merge, count] = [self.0 & ((1 << 20) - 1), self.0 >> 20 & 15, self.0 >> 24].map(|n| n as usize);
        let mut at = 0;
        let image = |i: usize| {
            let own = tokens / count + usize::from(i < tokens % count);
            let hash = row << 16 | i as u64;
            at += own;
            Image { at: at - own, tokens: own, grid: [1, merge, merge * own], hash, ..Image::default() }
        };
        (0..count).map(image).collect()
    }
}

impl RowTokens {
    pub fn all(self) -> usize {
        self.prompt + self.response
    }
}

/// A row, or a piece of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    pub source: u32,
    pub document: u64,
    /// The kept tokens of the prompt.
    pub start: u32,
    pub end: u32,
    /// Tokens kept after the prompt (demonstrations).
    pub rest: u32,
    pub piece: u32,
    pub pieces: u32,
    /// Tokens of the row that were cut off.
    pub cut: u32,
    /// The images of a row of which only lengths are known.
    images: PackedImages,
}

impl Entry {
    /// A row of which only lengths are known, with its number. Everything after the prompt is the response.
    pub fn of_length(row: &RowTokens, document: u64) -> Self {
        let (end, rest, images) = (row.prompt as u32, row.response as u32, row.images.into());
        Self { source: 0, document, start: 0, end, rest, piece: 0, pieces: 1, cut: 0, images }
    }

    pub fn tokens(&self) -> usize {
        (self.end - self.start + self.rest) as usize
    }

    /// The kept tokens among those of a document whose prompt has `prompt` tokens: a part of the prompt, and the
    /// beginning of the rest.
    fn kept(&self, prompt: usize) -> [Range<usize>; 2] {
        [self.start as usize..self.end as usize, prompt..prompt + self.rest as usize]
    }

    /// The images among its tokens. Without a document they have no files.
    pub fn images(&self, document: Option<Document>) -> Result<Vec<Image>> {
        self.placed(document, Document::images)
    }

    /// The sizes of the images among its tokens.
    pub(super) fn sizes_of_images(&self, document: Option<Document>) -> Result<RowImages> {
        Ok(RowImages::of(&self.placed(document, Document::image_places)?))
    }

    fn placed<'a>(
        &self,
        document: Option<Document<'a>>,
        all: impl Fn(Document<'a>) -> Result<Vec<Image>>,
    ) -> Result<Vec<Image>> {
        let Some(document) = document else { return Ok(self.images.images(self.document)) };
        if !document.source.shard.has_images() {
            return Ok(Vec::new());
        }
        let [prompt, rest] = self.kept(document.prompt_tokens()?);
        let place = |image: Image| {
            let at = if prompt.contains(&image.at) {
                image.at - prompt.start
            } else {
                prompt.len() + rest.contains(&image.at).then(|| image.at - rest.start)?
            };
            Some(Image { at, ..image })
        };
        Ok(all(document)?.into_iter().filter_map(place).collect())
    }
}

/// Whether an entry keeps a part of an image, or an image without the tokens around it.
pub(super) fn cuts_an_image(entries: &[Entry], document: Document, prompt: usize) -> Result<bool> {
    let is_whole = |entry: &Entry| entry.cut == 0 && entry.pieces == 1;
    if !document.source.shard.has_images() || entries.iter().all(is_whole) {
        return Ok(false);
    }
    let all: usize = document.lengths()?.iter().sum();
    let images = document.image_places()?;
    let is_cut = |kept: &Range<usize>, image: &Image| {
        let image = image.at.saturating_sub(1)..(image.at + image.tokens + 1).min(all);
        let common = image.start.max(kept.start)..image.end.min(kept.end);
        !common.is_empty() && common != image
    };
    // Where nothing is cut between prompt and rest, they are one range.
    let ranges = |entry: &Entry| match entry.kept(prompt) {
        [own, rest] if own.end == rest.start => [own.start..rest.end, 0..0],
        both => both,
    };
    Ok(entries.iter().flat_map(ranges).any(|kept| images.iter().any(|image| is_cut(&kept, image))))
}

/// The entries of a row, or the rule that filters it.
pub type Entries = std::result::Result<Vec<Entry>, &'static str>;

/// The entries of a row with `prompt` tokens and `rest` tokens after it, or the rule that filters the row.
pub(super) fn cut(config: &DataConfig, document: Document, prompt: usize, rest: usize) -> Entries {
    let limit = config.prompt_tokens_max;
    let ranges = match config.long_prompts {
        _ if prompt <= limit => vec![(0, prompt)],
        LongPrompts::Reject => return Err("prompt_tokens_max"),
        LongPrompts::TruncateLeft => vec![(prompt - limit, prompt)],
        LongPrompts::TruncateRight => vec![(0, limit)],
        LongPrompts::Window => windows(prompt, limit, config.window_overlap_tokens),
    };
    let pieces = ranges.len() as u32;
    let mut entries = Vec::with_capacity(ranges.len());
    for (piece, (start, end)) in ranges.into_iter().enumerate() {
        let kept = end - start;
        let rest_kept = match config.row_tokens_max {
            // A prompt alone has nothing after it.
            row if rest == 0 || row == 0 || kept + rest <= row => rest,
            _ if config.long_prompts == LongPrompts::Reject => return Err("row_tokens_max"),
            row if kept >= row => return Err("row_tokens_max"),
            row => row - kept,
        };
        // Windows overlap: together they lose nothing of the prompt.
        let prompt_cut = if pieces > 1 { 0 } else { prompt - kept };
        entries.push(Entry {
            source: document.source.index,
            document: document.index,
            start: start as u32,
            end: end as u32,
            rest: rest_kept as u32,
            piece: piece as u32,
            pieces,
            cut: (prompt_cut + rest - rest_kept) as u32,
            images: PackedImages::default(),
        });
    }
    Ok(entries)
}

/// Pieces of `limit` tokens, each beginning `limit - overlap` tokens after the one before. The last one ends with the
/// prompt.
fn windows(prompt: usize, limit: usize, overlap: usize) -> Vec<(usize, usize)> {
    let step = limit - overlap.min(limit - 1);
    // Every piece but the last ends before the prompt does.
    let starts = (0..prompt.saturating_sub(limit)).step_by(step);
    let mut ranges: Vec<(usize, usize)> = starts.map(|start| (start, start + limit)).collect();
    ranges.push((prompt - limit, prompt));
    ranges
}
