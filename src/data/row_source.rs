//! Rows as they are handed out: prompts for rollout, demonstrations for supervised fine-tuning.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::cut::Entry;
use super::rows::Part;
use super::sources::{Prepared, Rows};
use crate::config::data::{DataConfig, LongPrompts};
use crate::error::{Error, Result};
use crate::experience::Prompt;
use crate::text::Tokenizer;

/// Bit of `Prompt::id` from which the number of a window's piece stands.
const PIECE_SHIFT: u32 = 48;

/// Hands out rows in the order of the epochs. Every rank opens the same source and takes the same rows.
#[derive(Debug)]
pub struct RowSource<T> {
    rows: Rows,
    tokenizer: Arc<Tokenizer>,
    make: fn(&Self, &Entry) -> Result<T>,
}

pub type PromptSource = RowSource<Prompt>;
/// Demonstrations.
pub type SftSource = RowSource<SftRow>;

/// Prompt and demonstration in one row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SftRow {
    /// Identity of the row over the whole run.
    pub id: u64,
    pub tokens: Vec<u32>,
    /// 1 for tokens of a response, which are learned; 0 for those of a prompt. As long as `tokens`.
    pub mask: Vec<u8>,
}

impl<T> Deref for RowSource<T> {
    type Target = Rows;

    fn deref(&self) -> &Rows {
        &self.rows
    }
}

impl<T> DerefMut for RowSource<T> {
    fn deref_mut(&mut self) -> &mut Rows {
        &mut self.rows
    }
}

impl<T> RowSource<T> {
    /// The next `n` rows. The last ones of an epoch and the first ones of the next may come together: none is dropped.
    pub fn next(&mut self, n: usize) -> Result<Vec<T>> {
        let mut next = || {
            let entry = self.rows.feed.next();
            (self.make)(self, &entry)
        };
        (0..n).map(|_| next()).collect()
    }

    /// All rows of the eval split, in the order of the sources; empty where there is none.
    pub fn eval_rows(&self) -> Result<Vec<T>> {
        self.rows.eval.iter().map(|entry| (self.make)(self, entry)).collect()
    }
}

impl PromptSource {
    /// Opens `config.prompts` for a model of `vocabulary` tokens; `prepared` are their shards, by `super::prepare` with
    /// `Part::Prompt`. `seed` is the job's.
    pub fn open(
        config: &DataConfig,
        tokenizer: &Arc<Tokenizer>,
        vocabulary: usize,
        prepared: &Prepared,
        seed: u64,
    ) -> Result<Self> {
        let rows = Rows::open(config, Part::Prompt, tokenizer, vocabulary, prepared, seed)?;
        Ok(Self { rows, tokenizer: Arc::clone(tokenizer), make: Self::prompt })
    }

    /// Refuses prompts that leave the model no space for one token.
    pub fn check_context(&self, context: usize) -> Result<()> {
        let most = context.saturating_sub(1);
        let hint = format!(
            "set data.prompt_tokens_max to at most {most}; data.long_prompts says what happens to longer prompts"
        );
        self.rows.check_context(context, 1, &hint)
    }

    fn prompt(&self, entry: &Entry) -> Result<Prompt> {
        let Some(source) = self.rows.sources.get(entry.source as usize) else {
            return Ok(Prompt { tokens: vec![0; entry.tokens()], ..Prompt::default() });
        };
        let document = entry.document as usize;
        let tokens = source.shard.prompt(document)?[entry.start as usize..entry.end as usize].to_vec();
        Ok(Prompt {
            id: source.first_id + entry.document + (u64::from(entry.piece) << PIECE_SHIFT),
            text: self.tokenizer.decode_prompt(&tokens)?,
            label: source.shard.meta(document)?.label,
            source: source.name.clone(),
            tokens,
        })
    }
}

impl SftSource {
    /// As `PromptSource::open`, with `Part::Demonstration`.
    pub fn open(
        config: &DataConfig,
        tokenizer: &Arc<Tokenizer>,
        vocabulary: usize,
        prepared: &Prepared,
        seed: u64,
    ) -> Result<Self> {
        if config.long_prompts == LongPrompts::Window {
            return Err(Error::usage("data.long_prompts = \"window\" would part a demonstration from its prompt")
                .hint("use reject, truncate_left or truncate_right for sft"));
        }
        let rows = Rows::open(config, Part::Demonstration, tokenizer, vocabulary, prepared, seed)?;
        Ok(Self { rows, tokenizer: Arc::clone(tokenizer), make: Self::row })
    }

    /// Refuses rows that are longer than the model's context.
    pub fn check_context(&self, context: usize) -> Result<()> {
        let hint = format!("set data.row_tokens_max = {context}; data.long_prompts says whether longer rows are cut");
        self.rows.check_context(context, 0, &hint)
    }

    fn row(&self, entry: &Entry) -> Result<SftRow> {
        let Some(source) = self.rows.sources.get(entry.source as usize) else {
            let prompt = (entry.end - entry.start) as usize;
            let mask = (0..entry.tokens()).map(|i| u8::from(i >= prompt)).collect();
            return Ok(SftRow { id: 0, tokens: vec![0; entry.tokens()], mask });
        };
        let document = source.shard.document(entry.document as usize)?;
        let mut tokens = document[0][entry.start as usize..entry.end as usize].to_vec();
        let mut mask = vec![0; tokens.len()];
        // Prompts and responses alternate.
        for (i, sequence) in document.iter().enumerate().skip(1) {
            tokens.extend_from_slice(sequence);
            mask.resize(tokens.len(), (i % 2) as u8);
        }
        tokens.truncate(entry.tokens());
        mask.truncate(entry.tokens());
        Ok(SftRow { id: source.first_id + entry.document, tokens, mask })
    }
}
