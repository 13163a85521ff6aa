//! Demonstrations for supervised fine-tuning.

use std::ops::{Deref, DerefMut};

use super::cut::Entry;
use super::rows::Part;
use super::sources::{Prepared, Rows};
use crate::config::data::{DataConfig, LongPrompts};
use crate::error::{Error, Result};
use crate::text::Tokenizer;

/// Prompt and demonstration in one row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SftRow {
    /// Identity of the row over the whole run.
    pub id: u64,
    pub tokens: Vec<u32>,
    /// 1 for tokens of a response, which are learned; 0 for those of a prompt. As long as `tokens`.
    pub mask: Vec<u8>,
}

/// Hands out rows in the order of the epochs. Every rank opens the same source and takes the same rows.
#[derive(Debug)]
pub struct SftSource {
    rows: Rows,
}

impl Deref for SftSource {
    type Target = Rows;

    fn deref(&self) -> &Rows {
        &self.rows
    }
}

impl DerefMut for SftSource {
    fn deref_mut(&mut self) -> &mut Rows {
        &mut self.rows
    }
}

impl SftSource {
    /// Opens `config.prompts` for a model of `vocabulary` tokens; `prepared` are their shards, by `super::prepare` with
    /// `Part::Demonstration`. `seed` is the job's.
    pub fn open(
        config: &DataConfig,
        tokenizer: &Tokenizer,
        vocabulary: usize,
        prepared: &Prepared,
        seed: u64,
    ) -> Result<Self> {
        if config.long_prompts == LongPrompts::Window {
            return Err(Error::usage("data.long_prompts = \"window\" would part a demonstration from its prompt")
                .hint("use reject, truncate_left or truncate_right for sft"));
        }
        Ok(Self { rows: Rows::open(config, Part::Demonstration, tokenizer, vocabulary, prepared, seed)? })
    }

    /// Refuses rows that are longer than the model's context.
    pub fn check_context(&self, context: usize) -> Result<()> {
        let hint = format!("set data.row_tokens_max = {context}; data.long_prompts says whether longer rows are cut");
        self.rows.check_room(context, 0, &hint)
    }

    /// The next `n` rows, across the end of an epoch where need be.
    pub fn next(&mut self, n: usize) -> Result<Vec<SftRow>> {
        (0..n)
            .map(|_| {
                let entry = self.rows.feed.next();
                self.row(&entry)
            })
            .collect()
    }

    /// All rows of the eval split; empty where there is none.
    pub fn eval_rows(&self) -> Result<Vec<SftRow>> {
        self.rows.eval.iter().map(|entry| self.row(entry)).collect()
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
