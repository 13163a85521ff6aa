//! The entries of a row: all of it, a part, several pieces, or nothing.

use serde::{Deserialize, Serialize};

use super::source::Document;
use crate::config::data::{DataConfig, LongPrompts};

/// The bit of `Prompt::id` from which the number of a window's piece is stored.
pub(super) const PIECE_SHIFT: u32 = 48;

/// Tokens of a row: of its prompts, and of its responses, if it has any.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RowTokens {
    pub prompt: usize,
    pub response: usize,
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
}

impl Entry {
    /// A row of which only the length is known. Everything after the prompt is the response.
    pub fn of_length(row: &RowTokens) -> Self {
        let (end, rest) = (row.prompt as u32, row.response as u32);
        Self { source: 0, document: 0, start: 0, end, rest, piece: 0, pieces: 1, cut: 0 }
    }

    pub fn tokens(&self) -> usize {
        (self.end - self.start + self.rest) as usize
    }
}

/// The entries of a row, or the rule that filters it.
pub type Entries = Result<Vec<Entry>, &'static str>;

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
