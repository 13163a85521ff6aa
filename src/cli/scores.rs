//! Scoring of rows of tokens, a few thousand tokens per forward: the common part of `logprobs` and `reward`.
//!
//! Memory does not grow with the number of rows. It holds one forward, of a batch or of one longer row, and the
//! numbers of the previous forward.

use super::device::{self, Options};
use super::model_dirs::ModelDirs;
use super::out::progress;
use super::ranks::Ranks;
use super::rows::{self, Row};
use super::texts::{Template, Texts};
use crate::config::limits::{self, TOKENS_MAX};
use crate::config::rollout::RolloutConfig;
use crate::error::{Error, Result};
use crate::experience::Image;
use crate::launch::inference::InferenceModel;
use crate::learn::packed::PackedRow;
use crate::model::{Head, non_finite};
use crate::tensor::{Flat, Later};
use std::ops::Range;
use std::path::Path;
use std::time::Instant;

/// A row to score: each token given the previous ones.
pub struct ScoredRow {
    pub tokens: Vec<u32>,
    /// The first token of the response, if only that is scored; if none, all tokens except the first are scored.
    pub response: Option<usize>,
    /// The images among them.
    pub images: Vec<Image>,
    /// The fields of the row that the result repeats.
    pub fields: Row,
}

impl ScoredRow {
    /// The first token that is scored.
    fn first(&self) -> usize {
        self.response.unwrap_or(1)
    }
}

pub struct Scoring<'a> {
    pub verb: &'static str,
    pub model: &'a Path,
    pub adapter: Option<&'a Path>,
    pub head: Head,
    pub input: &'a Path,
    pub options: Options,
    /// Tokens per forward; a longer row gets a forward of its own.
    pub tokens_max: usize,
    pub template: Template<'a>,
    /// Turns a row into tokens to score.
    pub row: fn(&Row, &Texts) -> Result<ScoredRow>,
    /// The numbers of a packed row, sequence by sequence: one from a value head, else one for each scored token.
    pub forward: fn(&InferenceModel, &PackedRow) -> Flat,
}

impl Scoring<'_> {
    /// Scores this rank's share of the rows in order, and logs the speed; `write` gets the numbers of the next row.
    pub fn run(&self, mut ranks: Ranks, write: impl Fn(&mut Ranks, &ScoredRow, &[f32]) -> Result<()>) -> Result<()> {
        limits::check_option("--batch-tokens", self.tokens_max, 1, TOKENS_MAX)?;
        let dirs = ranks.agree(ModelDirs::find(self.model, self.adapter, Some(self.head)))?;
        let all = ranks.agree(self.read(&dirs))?;
        let settings = (RolloutConfig::default(), 0);
        let inference = device::open(self.verb, &dirs, self.options, self.head, settings, &ranks)?;
        let start = Instant::now();
        let lengths: Vec<usize> = all.iter().map(|row| row.tokens.len()).collect();
        let share = ranks.share(&lengths);
        let own = &all[share.clone()];
        let mut write_batch = |(batch, found): (Range<usize>, Later)| {
            let found = found.into_values();
            let mut left = &found[..];
            batch.clone().zip(&own[batch]).try_for_each(|(i, row)| {
                let (numbers, rest) =
                    left.split_at(if self.head == Head::Value { 1 } else { row.tokens.len() - row.first() });
                left = rest;
                if numbers.iter().all(|x| x.is_finite()) {
                    return write(&mut ranks, row, numbers);
                }
                Err(overflow(&inference, row).within(format!("{} line {}", self.input.display(), share.start + i + 1)))
            })
        };
        // The numbers of a forward are written while a GPU computes the next one.
        let mut before: Option<(Range<usize>, Later)> = None;
        let bar = progress(self.verb, Some(own.len()));
        for batch in rows::batches(own.iter().map(|row| row.tokens.len()), self.tokens_max) {
            let mut packed = PackedRow::new();
            for row in &own[batch.clone()] {
                packed.push(&row.tokens, row.first());
                packed.see(&row.images);
            }
            let found = (self.forward)(&inference, &packed).later();
            bar.set_position(batch.start as u64);
            before.replace((batch, found)).map_or(Ok(()), &mut write_batch)?;
        }
        drop(bar);
        before.map_or(Ok(()), write_batch)?;
        // The seconds are those of the slowest rank.
        ranks.world.group().barrier();
        let (verb, count, tokens) = (self.verb, all.len(), lengths.iter().sum::<usize>());
        let (seconds, memory) = (start.elapsed().as_secs_f64(), inference.describe_memory());
        let rate = tokens as f64 / seconds.max(1e-9);
        ranks.say(&format!("{verb}: {count} rows, {tokens} tokens in {seconds:.2} s ({rate:.0} tokens/s){memory}"));
        ranks.finish()
    }

    fn read(&self, dirs: &ModelDirs) -> Result<Vec<ScoredRow>> {
        let arch = dirs.arch()?;
        let texts = Texts::open(&dirs.tokenizer, &arch, &self.template)?.of_rows(self.input);
        rows::read(self.input, |row| {
            let row = (self.row)(row, &texts)?;
            rows::check(&row.tokens, &arch)?;
            Ok(row)
        })
    }
}

/// The error of a row with non-finite numbers. It names the weight, or the first result of a forward over the row.
fn overflow(inference: &InferenceModel, row: &ScoredRow) -> Error {
    let InferenceModel { transformer, weights, .. } = inference;
    let mut packed = PackedRow::new();
    packed.push(&row.tokens, 1);
    packed.see(&row.images);
    if weights.table.head() == Head::Value {
        packed.rows = vec![row.tokens.len() as u32 - 1];
    }
    let PackedRow { tokens, positions, pictures, cu_seqlens, rows, targets, .. } = &packed;
    let of = non_finite::Rows { tokens, positions, pictures, cu_seqlens, rows, targets };
    let first = weights.not_finite().or_else(|| transformer.not_finite(weights, of, false));
    let first = first.map_or(String::new(), |first| format!(" (first: {first})"));
    Error::data(format!("the model's results for this row are not finite{first}"))
        .hint("use an earlier checkpoint: the weights are damaged, or too large for f32 (or bf16) arithmetic")
}
