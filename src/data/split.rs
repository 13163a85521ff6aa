//! Assignment of rows to training and evaluation.

use serde_json::{Value, json};
use twox_hash::XxHash3_64;

use super::folder::keyword_of;
use super::images;
use super::ledger::Ledger;
use super::shard::Shard;
use crate::config::data::{DataConfig, SplitBy, SplitConfig};
use crate::config::method::RowKind;
use crate::error::{Error, Result};
use crate::sys::stderr;

/// Names of the two splits made by a ratio or a list of files.
pub const TRAIN: &str = "train";
pub const TEST: &str = "test";

/// The rule that makes the splits of rows during sharding, for the sidecar.
pub(super) fn describe(rule: &SplitConfig) -> Value {
    let SplitConfig { by, eval_ratio, seed, field, .. } = rule;
    match by {
        SplitBy::Source => Value::Null,
        SplitBy::Ratio => json!({"by": "ratio", "eval_ratio": eval_ratio, "seed": seed}),
        SplitBy::Field => json!({"by": "field", "field": field}),
        SplitBy::File => json!({"by": "file"}),
    }
}

/// Whether a row belongs to `test`: XXH3 of its prompt's tokens, seeded, below `eval_ratio` of the range. It depends
/// only on the row, so rows added later move no other row, and equal prompts always stay together.
pub(super) fn is_test(prompt: &[u32], rule: &SplitConfig) -> bool {
    let share = prompt_hash(prompt, rule.seed) as f64 / 18_446_744_073_709_551_616.0;
    share < rule.eval_ratio
}

/// XXH3 (64 bits) of a prompt's tokens as little-endian u32, independent of the shard's token width.
pub(super) fn prompt_hash(prompt: &[u32], seed: u64) -> u64 {
    let bytes: Vec<u8> = prompt.iter().flat_map(|t| t.to_le_bytes()).collect();
    XxHash3_64::oneshot_with_seed(seed, &bytes)
}

/// The splits of a source, with their documents in order. `of_file`: the split of all documents, if files are splits.
pub(super) fn splits_of(
    rule: &SplitConfig,
    of_file: Option<&str>,
    name: &str,
    shard: &Shard,
) -> Result<Vec<(String, Vec<u64>)>> {
    let documents = shard.documents() as u64;
    let recorded = || {
        let splits = &shard.sidecar().splits;
        splits.iter().map(|s| (s.name.clone(), (s.first..s.first + s.documents).collect())).collect()
    };
    match rule.by {
        SplitBy::Source => Ok(recorded()),
        SplitBy::File => Ok(of_file.map(|name| (name.to_owned(), (0..documents).collect())).into_iter().collect()),
        SplitBy::Field => {
            if shard.sidecar().split_rule == describe(rule) {
                return Ok(recorded());
            }
            Err(Error::data(format!("{name} must be split by the field {:?}, but its shard is not", rule.field))
                .hint(format!("shard its rows again with --split-field {}", rule.field)))
        }
        SplitBy::Ratio => {
            let (mut train, mut test) = (Vec::new(), Vec::new());
            for row in 0..documents {
                let side = if is_test(
                    &images::identity(&shard.prompt(row as usize)?, &shard.image_places(row as usize)?),
                    rule,
                ) {
                    &mut test
                } else {
                    &mut train
                };
                side.push(row);
            }
            Ok(vec![(TRAIN.to_owned(), train), (TEST.to_owned(), test)])
        }
    }
}

/// Rejects a source if training would use all its splits although the name of one means held-out rows. Warns if
/// the names of all mean that.
pub(super) fn check_training_splits(config: &DataConfig, kind: RowKind, name: &str, shard: &Shard) -> Result<()> {
    if config.only_evaluates || config.split.by != SplitBy::Source || !config.prompt_split.is_empty() {
        return Ok(());
    }
    let names = shard.sidecar().splits.iter().map(|split| split.name.as_str());
    let trained: Vec<&str> = names.filter(|name| *name != config.eval_split).collect();
    let is_held_out = |name: &&&str| keyword_of(name).is_some_and(|split| split != TRAIN);
    let (held_out, rest): (Vec<&str>, Vec<&str>) = trained.iter().partition(is_held_out);
    if let ([_, ..], []) = (&held_out[..], &rest[..]) {
        stderr::warn_once(&format!(
            "{name} has no split but {}, which is usually held out: its rows are used for training",
            held_out.join(" and ")
        ));
    }
    let ([test, ..], [train, ..]) = (&held_out[..], &rest[..]) else { return Ok(()) };
    let error = Error::data(format!("{name} has the splits {}: all would be used for training", trained.join(", ")));
    Err(error.hint(if kind.spec().has_splits() {
        format!("set data.prompt_split = {train:?}, and data.eval_split = {test:?} to evaluate on the others")
    } else {
        "list the files of one split in data.pretrain".to_owned()
    }))
}

pub(super) fn no_such_split(key: &str, name: &str, splits: &[Vec<(String, Vec<u64>)>]) -> Error {
    let mut names: Vec<&str> = splits.iter().flatten().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let there = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    Error::data(format!("data.{key} must name a split of the data (got {name:?}; splits: {there})"))
        .hint("choose one of these splits (a split without rows does not count), or make splits with data.split.by = \"ratio\", \"field\" or \"file\"")
}

/// The error of an evaluation without rows. `ledger` counts all rows and the filtered ones.
pub(super) fn none_to_evaluate(config: &DataConfig, ledger: &Ledger) -> Error {
    let split = &config.eval_split;
    let of_split = if split.is_empty() { String::new() } else { format!("data.eval_split = {split:?}: ") };
    let hint = match ledger.losses() {
        (0, _) if config.split.by == SplitBy::Ratio => {
            "raise data.split.eval_ratio, or add rows to data.prompts".to_owned()
        }
        (0, _) => "check data.prompts and data.eval_split".to_owned(),
        (_, rules) => rules.join("; "),
    };
    Error::data(format!("{of_split}there are no rows to evaluate: {ledger}")).hint(hint)
}

#[cfg(test)]
mod tests {
    use super::{SplitConfig, is_test};

    #[test]
    fn a_ratio_selects_about_its_share_and_another_seed_selects_other_rows() {
        let rule = |seed| SplitConfig { eval_ratio: 0.1, seed, ..SplitConfig::default() };
        let taken = |seed| (0..20_000_u32).filter(|i| is_test(&[*i, 7], &rule(seed))).collect::<Vec<_>>();
        let (a, b) = (taken(0), taken(1));
        assert!((1800..2200).contains(&a.len()), "{}", a.len());
        let both = a.iter().filter(|i| b.contains(i)).count();
        assert!(both < a.len() / 2, "{both}");
    }
}
