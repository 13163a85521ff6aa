//! Rows in the order in which a job gets them.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::cut::Entry;
use super::kinds::{Row, SftRow};
use super::rows::Reading;
use super::sources::{Prepared, Rows};
use crate::config::data::{DataConfig, LongPrompts};
use crate::error::{Error, Result};
use crate::experience::Prompt;
use crate::text::Tokenizer;

/// Hands out rows in the order of the epochs. Every rank opens the same source and gets the same rows.
#[derive(Debug)]
pub struct RowSource<T> {
    rows: Rows,
    tokenizer: Arc<Tokenizer>,
    made: PhantomData<T>,
}

pub type PromptSource = RowSource<Prompt>;
/// Demonstrations.
pub type SftSource = RowSource<SftRow>;

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

impl<T: Row> RowSource<T> {
    /// Opens `config.prompts` for a model of `vocabulary` tokens. `prepared` are their shards, made by `super::prepare`
    /// for the same kind of rows. `seed` is the job's.
    pub fn open(
        config: &DataConfig,
        tokenizer: &Arc<Tokenizer>,
        vocabulary: usize,
        prepared: &Prepared,
        seed: u64,
    ) -> Result<Self> {
        if config.long_prompts == LongPrompts::Window && !T::KIND.spec().has_windows() {
            return Err(Error::usage("data.long_prompts = \"window\" would separate responses from their prompts")
                .hint("set it to reject, truncate_left or truncate_right"));
        }
        let rows = Rows::open(Reading { config, kind: T::KIND, tokenizer, vocabulary }, prepared, seed)?;
        Ok(Self { rows, tokenizer: Arc::clone(tokenizer), made: PhantomData })
    }

    /// Rejects rows that exceed the model's context.
    pub fn check_context(&self, context: usize) -> Result<()> {
        let pieces = self.rows.pretrain.as_ref().map_or(0, |texts| texts.longest());
        if pieces > context {
            let what =
                format!("rows of data.pretrain have up to {pieces} tokens, but the model's context is {context}");
            return Err(Error::data(what).hint(format!("set data.pretrain_tokens_max = {context}")));
        }
        let (mut count, mut longest): (_, Option<(usize, &Rows, &Entry)>) = (0, None);
        for rows in self.rows.with_sets() {
            for entry in rows.feed.entries().chain(&rows.eval).filter(|e| e.tokens() + T::FREE > context) {
                let tokens = T::longest(entry, rows.document(entry))?;
                if tokens + T::FREE > context {
                    count += 1;
                    longest = longest.filter(|(most, ..)| *most >= tokens).or(Some((tokens, rows, entry)));
                }
            }
        }
        let Some((tokens, rows, longest)) = longest else { return Ok(()) };
        let row = rows.line_of(longest)?;
        let what = if count == 1 { "1 row does".to_string() } else { format!("{count} rows do") };
        let what = format!("{what} not fit the model's context of {context} tokens");
        Err(Error::data(format!("{what}: the longest, {row}, has {tokens} tokens")).hint(T::hint(context)))
    }

    /// Whether any row has images.
    pub fn have_images(&self) -> bool {
        self.rows.have_images()
    }

    /// The number of images in the rows.
    pub fn count_images(&self) -> usize {
        self.rows.count_images()
    }

    /// The next `n` rows. They may span the end of an epoch and the start of the next, so no row is dropped.
    pub fn next(&mut self, n: usize) -> Result<Vec<T>> {
        let mut next = || {
            let entry = self.rows.feed.next();
            self.read(&self.rows, &entry)
        };
        (0..n).map(|_| next()).collect()
    }

    /// The `n` rows of `data.pretrain` that step `step` (from 1) learns from. They depend only on its number, so
    /// checkpoints do not store their position.
    pub fn pretrain(&mut self, step: u64, n: usize) -> Result<Vec<SftRow>> {
        let Some(texts) = &mut self.rows.pretrain else { return Ok(Vec::new()) };
        let entries = texts.feed.at((step - 1) * n as u64, n);
        let all_learned = |row: SftRow| SftRow { mask: vec![1; row.tokens.len()], ..row };
        let read = |entry| SftRow::read(entry, texts.document(entry), &self.tokenizer);
        entries.iter().map(|entry| read(entry).map(all_learned)).collect()
    }

    /// The next row as the model sees it, by `Tokenizer::marked`.
    pub fn shown(&mut self) -> Result<String> {
        let first = if self.rows.epoch_rows() > 0 { self.rows.feed.ahead(1).pop() } else { None };
        let evaluated = || self.rows.with_sets().find_map(|rows| Some((rows, *rows.eval.first()?)));
        let Some((rows, entry)) = first.map(|entry| (&self.rows, entry)).or_else(evaluated) else {
            return Ok(String::new());
        };
        let row = self.read(rows, &entry)?;
        let (text, label) = (self.tokenizer.marked(row.parts())?, row.label());
        Ok(if label.is_empty() { text } else { format!("{text}  label {label}") })
    }

    /// Makes all rows once, including held-out rows, and passes each to `check`. Its error is reported with the row's
    /// file and line. Rows of which only the length is known are skipped.
    pub fn check_each(&self, mut check: impl FnMut(T) -> Result<()>) -> Result<()> {
        let entries = self.rows.feed.entries().chain(&self.rows.eval);
        for entry in entries.filter(|_| !self.rows.sources.is_empty()) {
            let checked = self.read(&self.rows, entry).and_then(&mut check);
            checked.or_else(|e| Err(e.within(self.rows.line_of(entry)?)))?;
        }
        Ok(())
    }

    /// Rows of the eval split, in the order of the sources: the first `most`, or all if `most` is 0. Empty without an
    /// eval split.
    pub fn eval_rows(&self, most: usize) -> Result<Vec<T>> {
        self.evaluated(&self.rows, most)
    }

    /// Rows of each of `data.eval_sets`, like `eval_rows`, with its name.
    pub fn eval_sets(&self, most: usize) -> Result<Vec<(String, Vec<T>)>> {
        self.rows.eval_sets.iter().map(|(name, rows)| Ok((name.clone(), self.evaluated(rows, most)?))).collect()
    }

    fn read(&self, rows: &Rows, entry: &Entry) -> Result<T> {
        T::read(entry, rows.document(entry), &self.tokenizer)
    }

    fn evaluated(&self, rows: &Rows, most: usize) -> Result<Vec<T>> {
        let most = if most == 0 { usize::MAX } else { most };
        rows.eval.iter().take(most).map(|entry| self.read(rows, entry)).collect()
    }
}

impl RowSource<Prompt> {
    /// Rejects prompts without a label, held-out prompts included.
    pub fn check_labels(&self) -> Result<()> {
        for rows in self.rows.with_sets() {
            for entry in rows.feed.entries().chain(&rows.eval) {
                let Some(document) = rows.document(entry) else { continue };
                if document.label()?.is_empty() {
                    let row = document.line()?;
                    return Err(Error::data(format!("{row}: the row has no label, but reward.rule compares with it"))
                        .hint(
                            "set data.label_key to the field that holds the answer; for a shard, use shard --label-key",
                        ));
                }
            }
        }
        Ok(())
    }
}
