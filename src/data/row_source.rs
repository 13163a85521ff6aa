//! Rows as they are handed out: prompts for rollout, and demonstrations, pairs and labeled responses to learn from.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::cut::{Entry, PIECE_SHIFT};
use super::rows::Reading;
use super::sources::{Prepared, Rows};
use crate::config::data::{DataConfig, LongPrompts};
use crate::config::method::RowKind;
use crate::error::{Error, Result};
use crate::experience::Prompt;
use crate::text::Tokenizer;
use serde::{Deserialize, Serialize};

/// Hands out rows in the order of the epochs. Every rank opens the same source and gets the same rows.
#[derive(Debug)]
pub struct RowSource<T> {
    rows: Rows,
    tokenizer: Arc<Tokenizer>,
    made: PhantomData<T>,
}

/// A row of a method.
pub trait Row: Sized {
    /// The kind of the data row that it is read from.
    const KIND: RowKind;
    /// The minimum number of tokens that it leaves free in the model's context.
    const FREE: usize = 0;

    /// The number of tokens of the longest sequence made from it.
    fn longest(entry: &Entry, _rows: &Rows) -> Result<usize> {
        Ok(entry.tokens())
    }

    /// The hint: keys that make rows fit a context of `context` tokens.
    fn hint(context: usize) -> String {
        format!("set data.row_tokens_max = {context}, and data.long_prompts to cut longer rows or drop them")
    }

    /// Its tokens in parts, and whether each part is learned. Also its label, or an empty string.
    fn parts(&self) -> (Vec<(&[u32], bool)>, &str);

    /// The number of tokens of each sequence made from it.
    fn sequences(&self) -> Vec<usize> {
        vec![self.parts().0.iter().map(|(tokens, _)| tokens.len()).sum()]
    }

    /// The row, or the piece of a row, that `entry` describes.
    fn read(entry: &Entry, rows: &Rows, tokenizer: &Tokenizer) -> Result<Self>;
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
    /// 1 for tokens of a response, which are learned, 0 for tokens of a prompt. As long as `tokens`.
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
        if T::KIND != RowKind::Prompt && config.long_prompts == LongPrompts::Window {
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
                let tokens = T::longest(entry, rows)?;
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

    /// The next `n` rows. They may span the end of an epoch and the start of the next, so no row is dropped.
    pub fn next(&mut self, n: usize) -> Result<Vec<T>> {
        let mut next = || {
            let entry = self.rows.feed.next();
            T::read(&entry, &self.rows, &self.tokenizer)
        };
        (0..n).map(|_| next()).collect()
    }

    /// The `n` rows of `data.pretrain` that step `step` (from 1) learns from. They depend only on its number, so
    /// checkpoints do not store their position.
    pub fn pretrain(&mut self, step: u64, n: usize) -> Result<Vec<SftRow>> {
        let Some(texts) = &mut self.rows.pretrain else { return Ok(Vec::new()) };
        let entries = texts.feed.at((step - 1) * n as u64, n);
        let all_learned = |row: SftRow| SftRow { mask: vec![1; row.tokens.len()], ..row };
        entries.iter().map(|entry| SftRow::read(entry, texts, &self.tokenizer).map(all_learned)).collect()
    }

    /// The next row as the model sees it, by `Tokenizer::marked`.
    pub fn shown(&mut self) -> Result<String> {
        let first = if self.rows.epoch_rows() > 0 { self.rows.feed.ahead(1).pop() } else { None };
        let evaluated = || self.rows.with_sets().find_map(|rows| Some((rows, *rows.eval.first()?)));
        let Some((rows, entry)) = first.map(|entry| (&self.rows, entry)).or_else(evaluated) else {
            return Ok(String::new());
        };
        let row = T::read(&entry, rows, &self.tokenizer)?;
        let (parts, label) = row.parts();
        let text = self.tokenizer.marked(parts)?;
        Ok(if label.is_empty() { text } else { format!("{text}  label {label}") })
    }

    /// Makes all rows once, including held-out rows, and passes each to `check`. Its error is reported with the row's
    /// file and line. Rows of which only the length is known are skipped.
    pub fn check_each(&self, mut check: impl FnMut(T) -> Result<()>) -> Result<()> {
        let entries = self.rows.feed.entries().chain(&self.rows.eval);
        for entry in entries.filter(|_| !self.rows.sources.is_empty()) {
            let checked = T::read(entry, &self.rows, &self.tokenizer).and_then(&mut check);
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

    fn evaluated(&self, rows: &Rows, most: usize) -> Result<Vec<T>> {
        let most = if most == 0 { usize::MAX } else { most };
        rows.eval.iter().take(most).map(|entry| T::read(entry, rows, &self.tokenizer)).collect()
    }
}

impl RowSource<Prompt> {
    /// Rejects prompts without a label, held-out prompts included.
    pub fn check_labels(&self) -> Result<()> {
        for rows in self.rows.with_sets() {
            for entry in rows.feed.entries().chain(&rows.eval) {
                let Some(source) = rows.sources.get(entry.source as usize) else { continue };
                if source.shard.meta(entry.document as usize)?.label.is_empty() {
                    let row = rows.line_of(entry)?;
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

impl Row for Prompt {
    const KIND: RowKind = RowKind::Prompt;
    // One token for a response.
    const FREE: usize = 1;

    fn hint(context: usize) -> String {
        let most = context.saturating_sub(1);
        format!("set data.prompt_tokens_max to at most {most}, and data.long_prompts for longer prompts")
    }

    fn parts(&self) -> (Vec<(&[u32], bool)>, &str) {
        (vec![(&self.tokens[..], false)], &self.label)
    }

    fn read(entry: &Entry, rows: &Rows, tokenizer: &Tokenizer) -> Result<Self> {
        let Some(source) = rows.sources.get(entry.source as usize) else {
            return Ok(Prompt { tokens: vec![0; entry.tokens()], ..Prompt::default() });
        };
        let document = entry.document as usize;
        let tokens = source.shard.prompt(document)?[entry.start as usize..entry.end as usize].to_vec();
        Ok(Prompt {
            id: source.first_id + entry.document + (u64::from(entry.piece) << PIECE_SHIFT),
            text: tokenizer.decode_prompt(&tokens)?,
            label: source.shard.meta(document)?.label,
            source: source.name.clone(),
            tokens,
        })
    }
}

impl Row for SftRow {
    const KIND: RowKind = RowKind::Demonstration;

    fn parts(&self) -> (Vec<(&[u32], bool)>, &str) {
        let mut rest = &self.tokens[..];
        let mut parts = Vec::new();
        for run in self.mask.chunk_by(|a, b| a == b) {
            let (own, behind) = rest.split_at(run.len());
            parts.push((own, run[0] != 0));
            rest = behind;
        }
        (parts, "")
    }

    fn read(entry: &Entry, rows: &Rows, _tokenizer: &Tokenizer) -> Result<Self> {
        let Some(source) = rows.sources.get(entry.source as usize) else {
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

/// Two responses to a prompt, one of which was preferred. Both hold the prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PairRow {
    /// Identity of the row over the whole run.
    pub id: u64,
    pub prompt_tokens: usize,
    pub chosen: Vec<u32>,
    pub rejected: Vec<u32>,
    /// The margin by which the chosen response is better; 0 if the data has none.
    pub margin: f32,
    /// The margin as written in the data.
    label: String,
}

/// The numbers of tokens of the chosen and the rejected response that are kept of an entry.
fn kept(entry: &Entry, rows: &Rows) -> Result<[usize; 2]> {
    let rest = entry.rest as usize;
    let Some(source) = rows.sources.get(entry.source as usize) else { return Ok([rest - rest / 2, rest / 2]) };
    let lengths = source.shard.lengths(entry.document as usize)?;
    // Longer responses were both cut to the same length.
    let short = lengths[1].min(lengths[2]).min(rest / 2);
    Ok(if lengths[1] <= lengths[2] { [short, rest - short] } else { [rest - short, short] })
}

impl Row for PairRow {
    const KIND: RowKind = RowKind::Pair;

    fn longest(entry: &Entry, rows: &Rows) -> Result<usize> {
        let [chosen, rejected] = kept(entry, rows)?;
        Ok((entry.end - entry.start) as usize + chosen.max(rejected))
    }

    fn parts(&self) -> (Vec<(&[u32], bool)>, &str) {
        let (prompt, chosen) = self.chosen.split_at(self.prompt_tokens);
        (vec![(prompt, false), (chosen, true), (&self.rejected[self.prompt_tokens..], false)], &self.label)
    }

    fn sequences(&self) -> Vec<usize> {
        vec![self.chosen.len(), self.rejected.len()]
    }

    fn read(entry: &Entry, rows: &Rows, _tokenizer: &Tokenizer) -> Result<Self> {
        let (prompt_tokens, [chosen, rejected]) = ((entry.end - entry.start) as usize, kept(entry, rows)?);
        let Some(source) = rows.sources.get(entry.source as usize) else {
            let side = |tokens| vec![0; prompt_tokens + tokens];
            return Ok(Self { prompt_tokens, chosen: side(chosen), rejected: side(rejected), ..Self::default() });
        };
        let document = source.shard.document(entry.document as usize)?;
        let prompt = &document[0][entry.start as usize..entry.end as usize];
        let side = |i: usize, tokens: usize| [prompt, &document[i][..tokens]].concat();
        let label = source.shard.meta(entry.document as usize)?.label;
        let margin = label.parse().unwrap_or(0.0);
        let id = source.first_id + entry.document;
        Ok(Self { id, prompt_tokens, chosen: side(1, chosen), rejected: side(2, rejected), margin, label })
    }
}

/// A response to a prompt, labeled good or bad.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelledRow {
    /// Identity of the row over the whole run.
    pub id: u64,
    pub tokens: Vec<u32>,
    pub prompt_tokens: usize,
    pub is_desirable: bool,
}

impl Row for LabelledRow {
    const KIND: RowKind = RowKind::Labelled;

    fn parts(&self) -> (Vec<(&[u32], bool)>, &str) {
        let (prompt, response) = self.tokens.split_at(self.prompt_tokens);
        (vec![(prompt, false), (response, true)], if self.is_desirable { "true" } else { "false" })
    }

    fn read(entry: &Entry, rows: &Rows, tokenizer: &Tokenizer) -> Result<Self> {
        let SftRow { id, tokens, .. } = SftRow::read(entry, rows, tokenizer)?;
        let label = match rows.sources.get(entry.source as usize) {
            Some(source) => source.shard.meta(entry.document as usize)?.label,
            None => "true".to_owned(),
        };
        let is_desirable = match label.as_str() {
            "true" | "1" => true,
            "false" | "0" => false,
            other => {
                return Err(Error::data(format!("the label must be true or false (got {other:?})"))
                    .hint("shard the rows with --labelled and --label-key"));
            }
        };
        Ok(Self { id, tokens, prompt_tokens: (entry.end - entry.start) as usize, is_desirable })
    }
}

/// A text, and the labels of its steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepRow {
    /// Identity of the row over the whole run.
    pub id: u64,
    pub tokens: Vec<u32>,
    /// The labels of all steps, including steps whose tokens were cut off.
    pub labels: Vec<StepLabel>,
    pub is_cut: bool,
    /// The labels as written in the data.
    label: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum StepLabel {
    /// The text of a token.
    Token(String),
    /// Probability of the first of two tokens.
    Soft(f64),
}

/// The number of tokens of a step in a plan, whose rows have no text.
const PLANNED_STEP_TOKENS: usize = 16;

impl Row for StepRow {
    const KIND: RowKind = RowKind::Steps;

    fn parts(&self) -> (Vec<(&[u32], bool)>, &str) {
        (vec![(&self.tokens, false)], &self.label)
    }

    fn read(entry: &Entry, rows: &Rows, _tokenizer: &Tokenizer) -> Result<Self> {
        let Some(source) = rows.sources.get(entry.source as usize) else {
            // A plan's tokenizer reads a placeholder as token 0. The last step ends with the row.
            let ends = |i: usize| (entry.tokens() - 1 - i).is_multiple_of(PLANNED_STEP_TOKENS);
            let tokens: Vec<u32> = (0..entry.tokens()).map(|i| u32::from(!ends(i))).collect();
            let labels = vec![StepLabel::Token("0".to_owned()); tokens.iter().filter(|token| **token == 0).count()];
            return Ok(Self { tokens, labels, ..Self::default() });
        };
        let mut tokens = source.shard.prompt(entry.document as usize)?;
        tokens.truncate(entry.tokens());
        let label = source.shard.meta(entry.document as usize)?.label;
        let labels = serde_json::from_str(&label).map_err(|_| {
            Error::data(format!("the label must be a list of strings or numbers (got {label:?})"))
                .hint("shard the rows with --steps and --label-key")
        })?;
        Ok(Self { id: source.first_id + entry.document, tokens, labels, is_cut: entry.cut > 0, label })
    }
}
