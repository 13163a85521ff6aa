//! Prompts for rollout.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::cut::Entry;
use super::rows::Part;
use super::sources::{Prepared, Rows};
use crate::config::data::DataConfig;
use crate::error::Result;
use crate::experience::Prompt;
use crate::text::Tokenizer;

/// Bit of `Prompt::id` from which the number of a window's piece stands.
const PIECE_SHIFT: u32 = 48;

/// Hands out prompts in the order of the epochs. Every rank opens the same source and takes the same prompts.
#[derive(Debug)]
pub struct PromptSource {
    rows: Rows,
    tokenizer: Arc<Tokenizer>,
}

impl Deref for PromptSource {
    type Target = Rows;

    fn deref(&self) -> &Rows {
        &self.rows
    }
}

impl DerefMut for PromptSource {
    fn deref_mut(&mut self) -> &mut Rows {
        &mut self.rows
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
        Ok(Self { rows, tokenizer: Arc::clone(tokenizer) })
    }

    /// Refuses prompts that leave the model no room for one token.
    pub fn check_context(&self, context: usize) -> Result<()> {
        let most = context.saturating_sub(1);
        self.rows.check_room(
            context,
            1,
            &format!(
                "set data.prompt_tokens_max to at most {most}; data.long_prompts says what happens to longer prompts"
            ),
        )
    }

    /// The next `n` prompts. The last ones of an epoch and the first ones of the next may come together: none is
    /// dropped.
    pub fn next(&mut self, n: usize) -> Result<Vec<Prompt>> {
        (0..n)
            .map(|_| {
                let entry = self.rows.feed.next();
                self.prompt(&entry)
            })
            .collect()
    }

    /// All prompts of the eval split, in the order of the sources; empty where there is none.
    pub fn eval_prompts(&self) -> Result<Vec<Prompt>> {
        self.rows.eval.iter().map(|entry| self.prompt(entry)).collect()
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
